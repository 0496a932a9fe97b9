"""What CTAs do together in global memory: atomics, reductions of the copy engine, semaphores; and what clusters may leave out."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rungs.emulator.alu import round_to_bf16, widen_bf16
from rungs.emulator.parser import EmulationError
from rungs.plan import TensorMap
from test_emulator import execute
from test_emulator_cluster import INIT, REMOTE, TOGETHER, WAIT, run

LANE = np.arange(32)
EIGHTH = (
    "ld.param.u64 %rd3, [data];\nand.b32 %r2, %r0, 7;\nmul.wide.u32 %rd4, %r2, {size};\nadd.s64 %rd3, %rd3, %rd4;\n"
)
"""Four lanes to each of eight places of `size` bytes in `data`."""
COPY = "bar.sync 0;\nld.param.u64 %rd5, [data];\nadd.s64 %rd6, %rd5, %rd2;\nld.global.u32 %r9, [%rd6];\nst.global.u32 [%rd0], %r9;\n"


@pytest.mark.parametrize(
    ("count", "operation"),
    [(1, "red.global.add.f32 [%rd3], %f0;"), (2, "red.global.add.v2.f32 [%rd3], {%f0, %f1};"),
     (4, "red.relaxed.gpu.global.add.v4.f32 [%rd3], {%f0, %f1, %f0, %f1};")],
)  # fmt: skip
def test_reductions_of_floats_in_vectors(count, operation, tmp_path):
    data = np.arange(32, dtype=np.float32)
    body = "cvt.rn.f32.u32 %f0, %r0;\nneg.f32 %f1, %f0;\n" + EIGHTH.format(size=4 * count) + operation + COPY
    got, _ = execute(tmp_path, body, inputs={"data": data})
    expected, signs = data.copy(), np.array([1, -1, 1, -1][:count])
    np.add.at(expected[: 8 * count].reshape(8, count), LANE % 8, LANE[:, None] * signs)
    assert np.array_equal(got.view(np.float32), expected)


@pytest.mark.parametrize("vector", [1, 4])
def test_reductions_of_pairs_of_bf16(vector, tmp_path):
    data = round_to_bf16(np.arange(64, dtype=np.float32) / 4)
    values = "%r3" if vector == 1 else "{%r3, %r3, %r3, %r3}"
    body = "cvt.rn.f32.u32 %f0, %r0;\nneg.f32 %f1, %f0;\ncvt.rn.bf16x2.f32 %r3, %f1, %f0;\n" + EIGHTH.format(
        size=4 * vector
    )
    body += f"red.global.add.noftz{'.v4' if vector == 4 else ''}.bf16x2 [%rd3], {values};\n" + COPY
    got, _ = execute(tmp_path, body, inputs={"data": data})
    expected = data.copy()
    places = expected[: 16 * vector].reshape(8, vector, 2)
    for lane in range(32):  # one after the other, each rounded
        places[lane % 8] = round_to_bf16(widen_bf16(places[lane % 8]) + np.array([lane, -lane], np.float32))
    assert np.array_equal(got.view(np.uint16), expected)


def test_an_atomic_returns_what_was_there_lane_after_lane(tmp_path):
    body = "ld.param.u64 %rd3, [data];\natom.acq_rel.gpu.global.add.u32 %r2, [%rd3], 3;\nst.global.u32 [%rd0], %r2;"
    got, _ = execute(tmp_path, body, inputs={"data": np.array([5], np.uint32)})
    assert got.tolist() == [5 + 3 * lane for lane in range(32)]


SHARED = "shl.b32 %r2, %r0, 4;\nadd.u32 %r3, %r1, %r2;\nst.shared.v4.f32 [%r3], {%f0, %f1, %f0, %f1};\n"
FENCE = "fence.proxy.async.shared::cta;\nbar.sync 0;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra $DONE;\n"
DONE = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n$DONE:\n"
BULK = "ld.param.u64 %rd3, [data];\ncp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd3], [%r1], 128;\n"
TENSOR = """mov.b64 %rd4, map0;
cvta.param.u64 %rd5, %rd4;
mov.u32 %r4, {x};
mov.u32 %r5, 0;
cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd5, {{%r4, %r5}}], [%r1];
"""


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("reduce", [BULK + BULK, TENSOR.format(x=0) * 2, TENSOR.format(x=4)])
def test_reductions_by_the_copy_engine(reduce, delivery, tmp_path):
    """Twice the same, or once with half of the box outside of the tensor."""
    data = np.arange(32, dtype=np.float32)
    maps = (TensorMap(0, (8, 4), (32,), (8, 4), "none", element_bytes=4),) if "map0" in reduce else ()
    body = "cvt.rn.f32.u32 %f0, %r0;\nneg.f32 %f1, %f0;\n" + SHARED + FENCE + reduce + DONE + COPY
    got, result = execute(tmp_path, body, inputs={"data": data}, maps=maps, delivery=delivery, race=True)
    added = np.stack([LANE, -LANE, LANE, -LANE], axis=1).astype(np.float32).reshape(-1)[:32]
    expected = data + 2 * added
    if "4;" in reduce and reduce.count("cp.reduce") == 1:
        expected = data.copy().reshape(4, 8)
        expected[:, 4:] += added.reshape(4, 8)[:, :4]
    assert np.array_equal(got.view(np.float32), expected.reshape(-1)) and not result.findings
    assert result.counts.total("tma_reduce") == reduce.count("cp.reduce")


def test_a_fence_for_global_memory_is_none_for_shared_memory(tmp_path):
    body = (
        "cvt.rn.f32.u32 %f0, %r0;\nneg.f32 %f1, %f0;\n" + SHARED + FENCE.replace("shared::cta", "global") + BULK + DONE
    )
    _, result = execute(tmp_path, body, inputs={"data": np.zeros(32, np.float32)}, race=True)
    assert {finding.kind for finding in result.findings} == {"missing fence"}


# A CTA adds one to the first word of `out` when all that come after it in the grid have, as the last parts of a sum might.
SPIN = """
$SPIN:
ld.acquire.gpu.global.u32 %r20, [%rd1];
setp.ne.u32 %p1, %r20, {wanted};
@%p1 bra $SPIN;
"""
ORDERED = (
    "setp.eq.u32 %p1, %r60, 19;\n@%p1 st.global.u32 [%rd1], 0;\nsub.u32 %r62, 19, %r60;\n"
    + SPIN.format(wanted="%r62")
    + "bar.sync 0;\nst.global.u32 [%rd0+4], %r20;\nadd.u32 %r21, %r20, 1;\nst.release.gpu.global.u32 [%rd1], %r21;\n"
)


@pytest.mark.parametrize("schedule", ["cta", "ascending", "descending", "random"])
def test_ctas_that_wait_for_each_other_in_global_memory(schedule, tmp_path):
    """More of them than a batch has: whoever polls is held until somebody writes."""
    body = "setp.ne.u32 %p2, %r0, 0;\n@%p2 exit;\n" + ORDERED
    got, _ = run(tmp_path, body, cluster=1, grid=20, map=None, schedule=schedule)
    assert got[0, 0] == 20 and got[:, 1].tolist() == list(range(19, -1, -1))


def test_a_value_that_nobody_writes_is_a_deadlock(tmp_path):
    body = "st.global.u32 [%rd1], 0;\n" + SPIN.format(wanted=7)
    with pytest.raises(EmulationError, match=r"ld.acquire.* for ever at a value in global memory that nobody writes"):
        run(tmp_path, body, cluster=1, grid=1, map=None)


# Lane 0 of the second CTA leaves 7 for the first, and says so at a counter, which is 0 before.
SAID = """
setp.ne.u32 %p2, %r0, 0;
setp.ne.u32 %p3, %r60, 0;
mov.u32 %r25, 7;
@%p3 bra $SAYS;
@%p2 bra $HEARD;
$WAITS:
{wait}
setp.eq.u32 %p1, %r20, 0;
@%p1 bra $WAITS;
$HEARD:
{heard}
ld.global.u32 %r24, [%rd3+128];
st.global.u32 [%rd0], %r24;
exit;
$SAYS:
@%p2 bra $WRITTEN;
{write}
$WRITTEN:
{written}
{say}
"""
SAY = "@!%p2 {}.global.add.u32 [%rd3], 1;"
WAIT_FOR = "{}.global.u32 %r20, [%rd3];"
WRITE = "st.global.u32 [%rd3+128], %r25;"
ALL = "bar.sync 0;"


@pytest.mark.parametrize("schedule", ["cta", "random"])
@pytest.mark.parametrize(
    ("write", "written", "say", "wait", "heard", "races"),
    [
        (WRITE, "", "red.release.gpu", "ld.acquire.gpu", ALL, 0),
        (WRITE, "", "red.release.cta", "ld.acquire.gpu", ALL, 1),
        (WRITE, "", "red.relaxed.gpu", "ld.acquire.gpu", ALL, 1),
        (WRITE, "", "red.release.gpu", "ld.relaxed.gpu", ALL, 1),
        (WRITE, "fence.acq_rel.gpu;", "red.relaxed.gpu", "ld.relaxed.gpu", "fence.acq_rel.gpu;" + ALL, 0),
        (WRITE, "membar.gl;", "red", "ld.volatile", "membar.gl;" + ALL, 0),
        (WRITE, "fence.acq_rel.gpu;", "red.relaxed.gpu", "ld.relaxed.gpu", ALL, 1),
        ("", "fence.acq_rel.gpu;" + WRITE, "red.relaxed.gpu", "ld.acquire.gpu", ALL, 1),
    ],
)
def test_what_ctas_leave_each_other_in_global_memory(write, written, say, wait, heard, races, schedule, tmp_path):
    body = "ld.param.u64 %rd3, [data];\n" + SAID.format(
        write=write, written=written, say=SAY.format(say), wait=WAIT_FOR.format(wait), heard=heard
    )
    got, result = run(tmp_path, body, cluster=1, grid=2, map=None, schedule=schedule, race=True, workspace=True)
    assert (got[0] == 7).all() and len(result.findings) == races
    if races:
        [finding] = result.findings
        assert finding.kind == "race" and re.search(
            r"reads byte 128 of workspace of parameter 1, which .* writes in CTA \(1, 0, 0\)", finding.sentence
        )


def test_two_ctas_that_write_one_place(tmp_path):
    body = "ld.param.u64 %rd3, [data];\nred.global.add.u32 [%rd3], 1;\nst.global.u32 [%rd3+128], %r60;\n"
    _, result = run(tmp_path, body, cluster=1, grid=2, map=None, race=True, workspace=True)
    assert "writes byte 128 of workspace of parameter 1, which" in result.findings[0].sentence


# A kernel that polls, whose CTAs go on one after the other from each atomic on.
POLLS = (
    "ld.param.u64 %rd3, [data];\nld.acquire.gpu.global.u32 %r20, [%rd3];\nsetp.ne.u32 %p2, %r0, 0;\nmov.u32 %r30, 0;\n"
)
ADDS = {
    "by all threads": "red.relaxed.gpu.global.add.u32 [%rd3], 1;\n",
    "by a guard": "@!%p2 red.relaxed.gpu.global.add.u32 [%rd3], 1;\n",
    "by a branch": "@%p2 bra $PAST;\nred.relaxed.gpu.global.add.u32 [%rd3], 1;\n$PAST:\n",
}


@pytest.mark.parametrize("how", ADDS)
@pytest.mark.parametrize(("schedule", "race"), [("cta", False), ("cta", True), ("ascending", False), ("random", True)])
def test_who_is_held_back_executes_nothing_twice_and_nothing_alone(how, schedule, race, tmp_path):
    """What comes behind an atomic is executed once, by whole warps, whether or not other CTAs are held back at it."""
    body = (
        POLLS
        + ADDS[how]
        + "add.u32 %r30, %r30, 1;\nshfl.sync.idx.b32 %r31, %r30, 0, 31, -1;\nbar.sync 0;\nbar.sync 0;\n"
    )
    body += "st.global.u32 [%rd0], %r31;\n"
    got, result = run(tmp_path, body, cluster=1, grid=3, map=None, schedule=schedule, race=race, workspace=True)
    assert (got == 1).all() and not result.findings
    assert result.counts.total("stg") == 3


def test_several_ctas_that_store_out_of_bounds_are_one_sentence(tmp_path):
    for offset in (256, 4096, 1 << 33):
        body = POLLS + f"mov.u64 %rd9, {offset};\nadd.s64 %rd9, %rd9, %rd3;\nst.global.u32 [%rd9], %r60;\n"
        with pytest.raises(
            EmulationError, match=rf"accesses 4 bytes at .*, byte {offset} of workspace of parameter 1, where 0 to"
        ):
            run(tmp_path, body, cluster=1, grid=3, map=None, race=True, workspace=True)


TELL, HEAR = "red.release.{}.global.add.u32 [%rd3], 1;", "ld.acquire.{}.global.u32 %r20, [%rd3];"


@pytest.mark.parametrize(("tell", "hear", "races"), [("gpu", "gpu", 0), ("cluster", "gpu", 1), ("gpu", "cluster", 1)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_scope_reaches_as_far_as_its_name(tell, hear, races, cluster, tmp_path):
    body = "ld.param.u64 %rd3, [data];\n" + SAID.format(
        write=WRITE, written="", say="@!%p2 " + TELL.format(tell), wait=HEAR.format(hear), heard=ALL
    )
    _, result = run(tmp_path, body, cluster=cluster, grid=2, map=None, race=True, workspace=True)
    assert len(result.findings) == (races if cluster == 1 else 0)


@pytest.mark.parametrize("fence", ["membar.cta;", "fence.acq_rel.cta;", "fence.mbarrier_init.release.cluster;"])
def test_a_fence_of_a_smaller_scope_publishes_nothing_to_other_clusters(fence, tmp_path):
    body = "ld.param.u64 %rd3, [data];\n" + SAID.format(
        write=WRITE, written=fence, say=SAY.format("red.relaxed.gpu"), wait=WAIT_FOR.format("ld.acquire.gpu"), heard=ALL
    )
    _, result = run(tmp_path, body, cluster=1, grid=2, map=None, race=True, workspace=True)
    assert len(result.findings) == 1


@pytest.mark.parametrize(
    "access",
    ["ld.global.u32 %r24, [%rd3];", "st.global.u32 [%rd3], 0;"],
)
def test_a_plain_access_beside_atomics_of_another_cta_is_a_race(access, tmp_path):
    body = POLLS + f"setp.ne.u32 %p3, %r60, 0;\n@!%p3 red.relaxed.gpu.global.add.u32 [%rd3], 1;\n@%p3 {access}\n"
    _, result = run(tmp_path, body, cluster=1, grid=2, map=None, race=True, workspace=True)
    assert [finding.kind for finding in result.findings] == ["race"]


def test_ctas_far_apart_that_write_one_place(tmp_path):
    """Without a poll the CTAs of a small grid run together all the same where races are watched."""
    body = "ld.param.u64 %rd3, [data];\nred.global.add.u32 [%rd3], 1;\nsetp.eq.u32 %p1, %r60, 0;\nsetp.eq.u32 %p2, %r60, 63;\n"
    body += "or.pred %p3, %p1, %p2;\n@%p3 st.global.u32 [%rd3+128], %r60;\n"
    _, result = run(tmp_path, body, cluster=1, grid=64, map=None, race=True, workspace=True)
    assert "writes byte 128 of workspace of parameter 1" in result.findings[0].sentence


def test_hints_change_nothing(tmp_path):
    body = "griddepcontrol.wait;\ncreatepolicy.fractional.L2::evict_first.b64 %rd9, 1.0;\n"
    body += "st.global.L2::cache_hint.u32 [%rd0], %r0, %rd9;\ngriddepcontrol.launch_dependents;\n"
    assert execute(tmp_path, body)[0].tolist() == LANE.tolist()


# ---- clusters --------------------------------------------------------------------------------------------------------

RELAXED = TOGETHER.replace("arrive.aligned", "arrive.relaxed.aligned").replace("wait.aligned", "wait.acquire.aligned")


def test_a_relaxed_arrival_hands_on_what_the_last_fence_did(tmp_path):
    for fence, races in (("", True), ("fence.mbarrier_init.release.cluster;", False)):
        init = INIT.format(count=1, together=RELAXED).replace("fence.mbarrier_init.release.cluster;", fence)
        got, result = run(
            tmp_path, init + REMOTE.format(count=1) + WAIT + "st.global.u32 [%rd0], %r61;\n" + TOGETHER, race=True
        )
        assert (got == np.array([0, 1, 0, 1])[:, None]).all()
        assert any("initialises" in finding.sentence for finding in result.findings) == races


def test_a_cta_may_not_end_before_others_have_reached_into_it(tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + REMOTE.format(count=1).replace(
        "arrive.shared", "arrive.release.cluster.shared"
    )
    for after, findings in (("", 1), (TOGETHER, 0), (WAIT, 0)):
        _, result = run(tmp_path, body + after, race=True)
        assert len(result.findings) == findings, result.findings
    assert "reaches into the shared memory of CTA" in run(tmp_path, body, race=True)[1].findings[0].sentence
    gone = body.replace("xor.b32 %r20", "setp.eq.u32 %p4, %r61, 0;\n@%p4 exit;\nxor.b32 %r20")
    with pytest.raises(
        EmulationError, match=r"reaches into the shared memory of a CTA that has ended, where a barrier"
    ):
        run(tmp_path, gone)


# Each thread keeps a hundred times its CTA's rank plus its lane, and reads what its lane has in the other CTA.
OTHERS = """
mad.lo.u32 %r20, %r61, 100, %r0;
shl.b32 %r21, %r0, 2;
add.u32 %r21, %r21, %r1;
st.shared.u32 [%r21], %r20;
{before}
xor.b32 %r22, %r61, 1;
mapa.shared::cluster.u32 %r23, %r21, %r22;
ld.shared::cluster.u32 %r24, [%r23];
st.global.u32 [%rd0], %r24;
{after}
"""
AGAIN = "st.shared.u32 [%r21], %r0;\n"


@pytest.mark.parametrize("schedule", ["cta", "ascending", "random"])
@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (TOGETHER, RELAXED, ""),
        (TOGETHER, TOGETHER + AGAIN, ""),
        (
            RELAXED,
            RELAXED,
            "ld.shared::cluster.u32; .* reads byte 0 of shared memory of CTA .* which .*st.shared.u32; .* writes",
        ),
        (
            TOGETHER,
            RELAXED + AGAIN + RELAXED,
            r"st.shared.u32; .* writes byte 0 of shared .* which .*\(ld.shared::cluster.* reads",
        ),
        (TOGETHER, "", "reaches into the shared memory of CTA .* which may have ended"),
    ],
)
def test_what_other_ctas_keep_in_shared_memory(before, after, sentence, schedule, tmp_path):
    got, result = run(tmp_path, OTHERS.format(before=before, after=after), schedule=schedule, race=True)
    if not sentence:
        assert (got == LANE + 100 * np.array([1, 0, 1, 0])[:, None]).all() and not result.findings
        assert result.counts.total("ld_cluster") == 4 and not result.counts.total("lds")
    else:
        assert any(re.search(sentence, finding.sentence) for finding in result.findings), result.findings
