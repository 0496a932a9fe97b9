"""Clusters in the emulator: ranks, barriers across CTAs, multicast; and tensor maps that lie in global memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rungs.emulator import launch
from rungs.emulator.memory import GlobalMemory
from rungs.emulator.parser import EmulationError, load
from rungs.errors import Refused
from rungs.plan import InGlobal, Plan, TensorMap, Workspace
from test_emulator import MAP, assert_assembles, kernel

DATA = np.arange(1, 1025, dtype=np.uint32).reshape(32, 32)
BOXES = TensorMap(0, (32, 32), (128,), (32, 2), "none", element_bytes=4)


def run(
    folder: Path,
    body: str,
    *,
    cluster: int = 2,
    grid: int = 4,
    threads: int = 32,
    map: TensorMap | None = BOXES,
    in_global: bool = False,
    assemble: bool = True,
    workspace: bool = False,
    **how: object,
) -> tuple[np.ndarray, launch.Result]:
    """The body in every CTA; `out` has 32 words for each of them, %rd0 being the thread's. `data`: 256 bytes of a workspace, of which 128
    are zeros.
    """
    memory = GlobalMemory()
    at = memory.put("data", DATA)
    out = memory.reserve("out", (grid, 32), np.uint32)
    given, params = [(out, 8)], [".param .u64 out"]
    if map is not None:
        placed = TensorMap(
            map.address or at, map.dims, map.strides, map.box, map.swizzle, element_bytes=map.element_bytes
        )
        given.append(InGlobal(placed) if in_global else placed)  # type: ignore[arg-type]
        params.append(".param .u64 map0" if in_global else MAP.format("map0"))
    if workspace:
        given.append(Workspace(256, 128))  # type: ignore[arg-type]
        params.append(".param .u64 data")
    place = "mov.u32 %r60, %ctaid.x;\nmul.wide.u32 %rd30, %r60, 128;\nadd.s64 %rd0, %rd0, %rd30;\n"
    place += "mov.u32 %r61, %cluster_ctarank;\n"
    path = folder / "k.ptx"
    path.write_text(kernel(place + body, ", ".join(params)), encoding="utf-8")
    if assemble:
        assert_assembles(path)
    plan = Plan("k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), 4096, tuple(given))
    result = launch.run(path, plan, memory, **how)  # type: ignore[arg-type]
    return memory["out"], result


TOGETHER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
# One mbarrier at byte 2048 of each CTA, told to the copy engine and to the cluster.
INIT = """
setp.ne.u32 %p1, %r0, 0;
@%p1 bra $READY;
mbarrier.init.shared::cta.b64 [%r1+2048], {count};
fence.mbarrier_init.release.cluster;
$READY:
bar.warp.sync -1;
{together}"""
WAIT = """
$W:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+2048], 0;
@!%p2 bra $W;
"""


def test_a_cta_knows_its_rank_and_its_cluster(tmp_path):
    names = [
        "cluster_ctarank",
        "cluster_nctarank",
        "clusterid.x",
        "nclusterid.x",
        "cluster_ctaid.x",
        "cluster_nctaid.x",
    ]
    body = "".join(
        f"mov.u32 %r{10 + i}, %{name};\nst.global.u32 [%rd0+{4 * i}], %r{10 + i};\n" for i, name in enumerate(names)
    )
    got, _ = run(tmp_path, "setp.ne.u32 %p1, %r0, 0;\n@%p1 bra $E;\n" + body + "$E:", cluster=2, grid=4)
    assert got[:, :6].tolist() == [[cta % 2, 2, cta // 2, 2, cta % 2, 2] for cta in range(4)]


REMOTE = """
xor.b32 %r20, %r61, 1;
add.u32 %r21, %r1, 2048;
mapa.shared::cluster.u32 %r22, %r21, %r20;
setp.ne.u32 %p3, %r0, 0;
@!%p3 mbarrier.arrive.shared::cluster.b64 _, [%r22], {count};
"""


@pytest.mark.parametrize("schedule", ["cta", "ascending", "descending", "random"])
def test_an_arrival_at_the_barrier_of_another_cta(schedule, tmp_path):
    body = (
        INIT.format(count=3, together=TOGETHER)
        + REMOTE.format(count=3)
        + WAIT
        + "st.global.u32 [%rd0], %r61;\n"
        + TOGETHER
    )
    got, result = run(tmp_path, body, schedule=schedule, race=True)
    assert (got == np.array([0, 1, 0, 1])[:, None]).all() and not result.findings


def test_an_arrival_that_nobody_makes_is_a_deadlock(tmp_path):
    body = INIT.format(count=3, together=TOGETHER) + REMOTE.format(count=2) + WAIT
    with pytest.raises(
        EmulationError, match="phase 0 of the mbarrier at byte 2048 of shared memory, which lacks 1 of 3 arrivals"
    ):
        run(tmp_path, body)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            INIT.format(count=1, together=TOGETHER) + REMOTE.format(count=2),
            "arrives 2 times at the mbarrier .* where at most 1 of the phase's 1",
        ),
        (
            TOGETHER + REMOTE.format(count=1),
            "uses byte 2048 of shared memory of another CTA, where an initialised mbarrier",
        ),
        (
            INIT.format(count=1, together=TOGETHER) + REMOTE.format(count=1).replace("%r61, 1", "%r61, 2"),
            "names CTA [23] of a cluster, where 0 to 1 was expected",
        ),
        (
            "barrier.cluster.wait.aligned;",
            "waits at the cluster's barrier, where a barrier.cluster.arrive was expected before",
        ),
        (
            "barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;",
            "arrives at the cluster's barrier a second time, where a barrier.cluster.wait was expected",
        ),
        (
            "setp.eq.u32 %p1, %r61, 1;\n@%p1 bra $A;\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n$A:\n"
            "setp.eq.u32 %p1, %r61, 0;\n@%p1 bra $B;\n" + INIT.format(count=1, together="") + WAIT + "$B:",
            "for ever at the cluster's barrier, where 0 warps of this CTA and maybe more of others",
        ),
    ],
)
def test_a_cluster_that_is_used_wrongly(body, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        run(tmp_path, body)


def test_without_the_cluster_barrier_an_arrival_races_with_the_initialisation(tmp_path):
    body = INIT.format(count=1, together="") + REMOTE.format(count=1) + WAIT
    _, result = run(tmp_path, body, race=True)
    assert any("initialises, with nothing that orders the two" in finding.sentence for finding in result.findings)


def test_the_cluster_barrier_does_not_wait_for_warps_that_have_ended(tmp_path):
    body = "setp.eq.u32 %p1, %r61, 1;\n@%p1 bra $E;\n" + TOGETHER + "st.global.u32 [%rd0], %r0;\n$E:"
    got, _ = run(tmp_path, body)
    assert got[0].tolist() == list(range(32)) and (got[1] == 0xFFFFFFFF).all()


# Each CTA of the cluster loads its half of four rows and sends it to both.
MULTICAST = """
@%p1 bra $ISSUED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+2048], {bytes};
mov.b64 %rd5, map0;
cvta.param.u64 %rd6, %rd5;
mov.u32 %r20, 0;
shl.b32 %r21, %r61, 1;
shl.b32 %r22, %r61, 8;
add.u32 %r23, %r1, %r22;
mov.u16 %h0, {ctas};
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r23], [%rd6, {{%r20, %r21}}], [%r1+2048], %h0;
$ISSUED:
bar.warp.sync -1;
"""
READ = """
shl.b32 %r40, %r0, 4;
add.u32 %r41, %r1, %r40;
ld.shared.u32 %r42, [%r41];
st.global.u32 [%rd0], %r42;
"""


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("schedule", ["cta", "random"])
def test_a_multicast_lands_in_every_cta_and_completes_there(delivery, schedule, tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + MULTICAST.format(bytes=512, ctas=3) + WAIT + READ + TOGETHER
    if schedule == "random":  # the hint comes after the CTAs
        body = body.replace("multicast::cluster [", "multicast::cluster.L2::cache_hint [").replace(
            "%h0;\n$", "%h0, %rd9;\n$"
        )
        body = "createpolicy.fractional.L2::evict_last.b64 %rd9, 1.0;\n" + body
    got, result = run(tmp_path, body, delivery=delivery, schedule=schedule, race=True)
    assert (got == DATA.reshape(-1)[:128:4]).all() and not result.findings
    assert (result.counts.total("tma_load"), result.counts.total("bytes_tma_load")) == (4, 2 * 4 * 256)  # as they land


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ctas": 5}, "is multicast to CTAs 0x5 of the cluster, where some of its 2 were expected"),
        ({"ctas": 1}, r"mbarrier.try_wait.* holds warp 0 of CTA \(0, 0, 0\) for ever"),
        ({"bytes": 256}, "lands in phase 1 of the mbarrier|for ever at"),
    ],
)
def test_a_multicast_that_is_wrong(change, sentence, tmp_path):
    body = (
        INIT.format(count=1, together=TOGETHER) + MULTICAST.format(**{"bytes": 512, "ctas": 3} | change) + WAIT + READ
    )
    with pytest.raises(EmulationError, match=sentence):
        run(tmp_path, body)


def test_a_multicast_into_what_another_cta_still_reads_is_a_race(tmp_path):
    """The second load of the same place needs a barrier of the cluster after the reads."""
    again = MULTICAST.format(bytes=512, ctas=3).replace("$ISSUED", "$AGAIN")
    wait = WAIT.replace("$W", "$X").replace("], 0;", "], 1;")
    for between, races in (("", True), (TOGETHER, False)):
        body = INIT.format(count=1, together=TOGETHER) + MULTICAST.format(bytes=512, ctas=3) + WAIT + READ
        _, result = run(tmp_path, body + between + again + wait + TOGETHER, race=True, delivery="early")
        found = [
            finding
            for finding in result.findings
            if "which PTX line" in finding.sentence and "reads" in finding.sentence
        ]
        assert bool(found) == races, result.findings


# Every thread sends its number and its CTA's to the next CTA of the cluster, where the mbarrier counts what has come.
SEND = """
@%p1 bra $EXPECTED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+2048], {bytes};
$EXPECTED:
bar.warp.sync -1;
xor.b32 %r20, %r61, 1;
shl.b32 %r21, %r0, 3;
add.u32 %r21, %r1, %r21;
add.u32 %r22, %r1, 2048;
mapa.shared::cluster.u32 %r23, %r21, %r20;
mapa.shared::cluster.u32 %r24, %r22, {ctas};
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r23], {{%r0, %r60}}, [%r24];
"""
RECEIVE = WAIT.replace("parity.", "parity.acquire.cluster.")
TAKE = """
ld.shared.v2.u32 {%r40, %r41}, [%r21];
mad.lo.u32 %r40, %r41, 100, %r40;
st.global.u32 [%rd0], %r40;
"""


@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize("schedule", ["cta", "ascending", "random"])
def test_what_is_sent_to_another_cta_lands_there_and_completes_there(delivery, schedule, tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + SEND.format(bytes=256, ctas="%r20") + RECEIVE + TAKE
    got, result = run(tmp_path, body, delivery=delivery, schedule=schedule, race=True)
    assert (got == np.array([1, 0, 3, 2])[:, None] * 100 + np.arange(32)).all() and not result.findings
    assert result.counts.total("st_async") == 4 and not result.counts.total("sts")


@pytest.mark.parametrize(
    ("bytes", "ctas", "sentence"),
    [
        (264, "%r20", "for ever at phase 0 of the mbarrier at byte 2048 of shared memory, which lacks 8 bytes"),
        (248, "%r20", "lands in phase 1 of the mbarrier at byte 2048 .* it expected fewer bytes than were copied|for ever at"),
        (256, "%r61", "writes to CTA [01] of the cluster and completes on an mbarrier of CTA [01], where one CTA was expected"),
    ],
)  # fmt: skip
def test_what_is_sent_wrongly(bytes, ctas, sentence, tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + SEND.format(bytes=bytes, ctas=ctas) + RECEIVE + TAKE
    with pytest.raises(EmulationError, match=sentence):
        run(tmp_path, body, delivery="late")


def test_what_is_sent_and_not_waited_for_is_a_race_and_may_find_its_cta_ended(tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + SEND.format(bytes=256, ctas="%r20") + TAKE
    _, result = run(tmp_path, body, race=True, delivery="early")
    assert {finding.kind for finding in result.findings} == {"race", "left behind"}
    assert any(
        re.search(r"reads byte \d+ of .* which .*st.async.* writes, with nothing", f.sentence) for f in result.findings
    )
    assert any("where that CTA was expected to wait for the mbarrier" in f.sentence for f in result.findings)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("%r23, %r21, %r20", "%r23, %r21, 0", "byte 0 of shared memory of CTA .* several times at once"),  # from both CTAs
        ("shl.b32 %r21, %r0, 3;", "mov.u32 %r21, 0;", "byte 0 of shared memory of CTA .* several times at once"),  # all lanes
        ("[%r23]", "[%r23+2048]", "byte 2048 of shared memory of CTA .*, where .*mbarrier.init.* has initialised an mbarrier"),
    ],
)  # fmt: skip
def test_what_is_sent_to_one_place_or_onto_an_mbarrier_is_a_race(old, new, sentence, tmp_path):
    ctas = "0" if new.endswith(" 0") else "%r20"
    body = INIT.format(count=1, together=TOGETHER) + SEND.format(bytes=256, ctas=ctas).replace(old, new) + TOGETHER
    _, result = run(tmp_path, body, race=True, delivery="early")
    assert any(re.search(f"writes {sentence}", finding.sentence) for finding in result.findings)


def test_an_ordinary_store_onto_an_mbarrier_is_a_race_until_it_is_invalidated(tmp_path):
    store = "setp.ne.u32 %p4, %r0, 0;\n@!%p4 st.shared.u32 [%r1+2052], 7;\n"
    for before, races in (("", True), ("@!%p1 mbarrier.inval.shared::cta.b64 [%r1+2048];\n", False)):
        _, result = run(tmp_path, INIT.format(count=1, together=TOGETHER) + before + store, race=True)
        assert bool(result.findings) == races


def test_a_parameter_that_its_bytes_do_not_hold(tmp_path):
    path = tmp_path / "k.ptx"
    path.write_text(kernel("", ".param .u32 out"), encoding="utf-8")
    taken = load(path, "k")
    for value, refused in ((2**32 - 1, False), (-(2**31), False), (2**32, True), (-(2**31) - 1, True)):
        plan = Plan("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ((value, 4),))
        if not refused:
            launch.check_launch(taken, plan)
            continue
        with pytest.raises(
            EmulationError, match=f"Parameter 0 of k is {value}, where a number of 4 bytes was expected"
        ):
            launch.check_launch(taken, plan)


@pytest.mark.parametrize("rank", ["-1", "255", "256"])
def test_a_rank_that_no_address_holds_is_not_another_ctas(rank, tmp_path):
    body = INIT.format(count=1, together=TOGETHER) + REMOTE.format(count=1).replace(
        "xor.b32 %r20, %r61, 1", f"mov.u32 %r20, {rank}"
    )
    with pytest.raises(EmulationError, match="names CTA 254 of a cluster, where 0 to 1 was expected"):
        run(tmp_path, body)


def test_a_relaxed_arrival_at_an_mbarrier_hands_on_nothing_and_a_relaxed_wait_is_lacked(tmp_path):
    store = "shl.b32 %r30, %r0, 2;\nadd.u32 %r31, %r1, %r30;\nst.shared.u32 [%r31], %r0;\n"
    load = "xor.b32 %r30, %r30, 128;\nadd.u32 %r31, %r1, %r30;\nld.shared.u32 %r42, [%r31];\n"
    init = INIT.format(count=64, together="").replace("bar.warp.sync -1", "bar.sync 0")
    for sem, races in (("", False), ("relaxed.cta.", True)):
        body = init + store + f"mbarrier.arrive.{sem}shared::cta.b64 _, [%r1+2048];\n" + WAIT + load
        _, result = run(tmp_path, body, race=True, threads=64)
        assert bool(result.findings) == races
    with pytest.raises(EmulationError, match=r"try_wait.* is a form of mbarrier that the emulator lacks"):
        run(tmp_path, body.replace("parity.", "parity.relaxed.cta."))


def test_a_cta_without_its_cluster_is_not_run(tmp_path):
    with pytest.raises(EmulationError, match="CTAs of a cluster run together: ask for whole clusters of 2"):
        run(tmp_path, "", ctas=[1, 2])
    _, result = run(tmp_path, "", ctas=[2, 3])
    assert result.counts.ctas == [2, 3]
    with pytest.raises(
        EmulationError, match=r"in clusters of \(4, 1, 1\), where up to 8 CTAs along x were expected, a divisor of"
    ):
        run(tmp_path, "", cluster=4, grid=6)


def test_clusters_are_whole_in_every_batch(tmp_path):
    """Eight CTAs of a cluster are more than a batch has where races are watched."""
    body = TOGETHER + "st.global.u32 [%rd0], %r61;"
    got, result = run(tmp_path, body, cluster=8, grid=24, race=True)
    assert got[:, 0].tolist() == [cta % 8 for cta in range(24)] and not result.findings


# ---- tensor maps in global memory ------------------------------------------------------------------------------------

FROM_GLOBAL = """
@%p1 bra $ISSUED;
ld.param.u64 %rd6, [map0];
{ready}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+2048], 256;
mov.u32 %r20, 0;
mov.u32 %r21, 4;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd6, {{%r20, %r21}}], [%r1+2048];
$ISSUED:
bar.warp.sync -1;
"""


@pytest.mark.parametrize(
    "ready", ["fence.proxy.tensormap::generic.acquire.gpu [%rd6], 128;", "prefetch.tensormap [%rd6];", ""]
)
def test_a_tensor_map_in_global_memory(ready, tmp_path):
    body = INIT.format(count=1, together="") + FROM_GLOBAL.format(ready=ready) + WAIT + READ.replace("%r0, 4", "%r0, 3")
    got, result = run(tmp_path, body, cluster=1, in_global=True, race=True)
    assert (got == DATA.reshape(-1)[128 : 128 + 64 : 2]).all() and not result.findings


@pytest.mark.parametrize(
    ("ready", "sentence"),
    [
        ("add.s64 %rd6, %rd6, 128;", "names address .*, where a tensor map parameter was expected"),
        (
            "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;",
            "names address .*, where a tensor map was expected",
        ),
        ("prefetch.tensormap [%rd1];", "names address .*, where a tensor map was expected"),
        ("ld.global.u32 %r30, [%rd6];", "reads tensor map of parameter 1 where nothing has written it"),
    ],
)
def test_what_is_no_tensor_map(ready, sentence, tmp_path):
    body = INIT.format(count=1, together="") + FROM_GLOBAL.format(ready=ready) + WAIT
    with pytest.raises(EmulationError, match=sentence):
        run(tmp_path, body, cluster=1, in_global=True)


def test_a_tensor_map_in_global_memory_obeys_the_same_rules(tmp_path):
    odd = TensorMap(0, (32, 32), (120,), (32, 2), "none", element_bytes=4)
    with pytest.raises(Refused, match=r"Parameter 1 of k: stride 120 is not a multiple of 16 bytes below 2\^40"):
        run(tmp_path, "", cluster=1, map=odd, in_global=True)


# ---- lanes of a warp come together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cta", "ascending", "descending", "random"])
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.warp.sync -1;", TOGETHER])
def test_a_barrier_waits_for_a_lane_that_is_held_elsewhere(barrier, schedule, tmp_path):
    """Lane 0 waits for a copy; the others of its warp are at the barrier before it, and read what it has stored."""
    body = (
        INIT.format(count=1, together="")
        + """
@%p1 bra $THERE;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+2048], 256;
mov.b64 %rd5, map0;
cvta.param.u64 %rd6, %rd5;
mov.u32 %r20, 0;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd6, {%r20, %r20}], [%r1+2048];
$W:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+2048], 0;
@!%p2 bra $W;
st.shared.u32 [%r1+1024], 77;
$THERE:
"""
        + barrier
        + "ld.shared.u32 %r42, [%r1+1024];\nst.global.u32 [%rd0], %r42;"
    )
    got, result = run(tmp_path, body, schedule=schedule, race=True)
    assert (got == 77).all() and not result.findings
    kind = "barrier" if "warp" not in barrier else "alu"
    if kind == "barrier":
        assert result.counts.total("barrier") == 4 * len(re.findall(";", barrier))


def test_lanes_that_never_come_are_named(tmp_path):
    body = INIT.format(count=1, together="") + "@%p1 bra $THERE;\n" + WAIT + "$THERE:\nbar.sync 0;"
    with pytest.raises(
        EmulationError, match=r"held too is warp 0 .* by a barrier that other lanes of its warp have not come to"
    ):
        run(tmp_path, body)
