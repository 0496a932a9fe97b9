"""What libraries make of asynchronous copies: cp.async that arrive at an mbarrier, atomics, match, bfind, and the clock."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rungs.emulator.parser import EmulationError
from test_emulator import execute

DATA = np.arange(256, dtype=np.uint32)

# 64 threads copy 4 bytes each, arrive at an mbarrier by their copies (`{copies}`) and by themselves, wait, and read a word
# that a thread of the other warp has copied.
COPIES = """
ld.param.u64 %rd3, [data];
setp.ne.u32 %p1, %r0, 0;
@%p1 bra $READY;
mbarrier.init.shared::cta.b64 [%r1+4096], {count};
$READY:
bar.sync 0;
shl.b32 %r5, %r0, 2;
add.u32 %r2, %r1, %r5;
cvt.u64.u32 %rd5, %r5;
add.s64 %rd4, %rd3, %rd5;
cp.async.ca.shared.global [%r2], [%rd4], 4;
{copies}
mbarrier.arrive.shared::cta.b64 %rd7, [%r1+4096];
$WAIT:
mbarrier.try_wait.shared::cta.b64 %p2, [%r1+4096], %rd7;
@!%p2 bra $WAIT;
xor.b32 %r6, %r5, 252;
add.u32 %r6, %r1, %r6;
ld.shared.u32 %r7, [%r6];
st.global.u32 [%rd0], %r7;
"""
ARRIVE, NOINC = (f"cp.async.mbarrier.arrive{form}.shared::cta.b64 [%r1+4096];" for form in ("", ".noinc"))
SCHEDULES = ["cta", "ascending", "descending", "random"]


def copies(folder, text, **how):
    return execute(folder, text, threads=64, out=64, inputs={"data": DATA}, race=True, **how)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("delivery", ["early", "late"])
@pytest.mark.parametrize(("arrive", "count"), [(ARRIVE, 64), (NOINC, 128)])
def test_copies_arrive_at_an_mbarrier(arrive, count, schedule, delivery, tmp_path):
    """Without .noinc the copies' arrivals are on top of those that the phase expects; with it they are among them."""
    text = COPIES.format(count=count, copies=arrive)
    got, result = copies(tmp_path, text, schedule=schedule, delivery=delivery)
    assert got.tolist() == DATA[:64][::-1].tolist()
    assert not result.findings
    assert result.counts.totals["ldgsts"] == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_that_nobody_waits_for_are_a_race(schedule, tmp_path):
    _, result = copies(tmp_path, COPIES.format(count=64, copies=""), schedule=schedule)
    assert {finding.kind for finding in result.findings} == {"race"}
    assert "cp.async.ca" in result.findings[0].sentence


def test_copies_of_a_later_phase_are_not_known_from_an_earlier_one(tmp_path):
    """The second copy of each thread comes behind its arrival: waiting for the phase says nothing about it."""
    second = ARRIVE + "\ncp.async.ca.shared.global [%r2], [%rd4+256], 4;"
    got, result = copies(tmp_path, COPIES.format(count=64, copies=second), delivery="late")
    assert got.tolist() == DATA[:64][::-1].tolist()
    assert {finding.kind for finding in result.findings} == {"race"}


@pytest.mark.parametrize(
    ("count", "arrive", "sentence"),
    [
        (
            100,
            NOINC,
            "arrives 64 times at the mbarrier at byte 4096 of shared memory, where at most 36 of the phase's 100",
        ),
        (65, ARRIVE, "which lacks 1 of 65 arrivals"),
        (64, ARRIVE + "\ncp.async.wait_all;", "stands beside cp.async groups in one kernel, which the emulator lacks"),
        (64, ARRIVE.replace("4096", "8192"), "uses byte 8192 of shared memory, where an initialised mbarrier"),
    ],
)
def test_copies_that_arrive_wrongly(count, arrive, sentence, tmp_path):
    with pytest.raises(EmulationError, match=sentence):
        copies(tmp_path, COPIES.format(count=count, copies=arrive), delivery="early")


def test_an_arrival_without_copies_is_at_once_and_leaves_nothing_behind(tmp_path):
    body = """setp.ne.u32 %p1, %r0, 0;
@%p1 bra $READY;
mbarrier.init.shared::cta.b64 [%r1], 32;
$READY:
bar.sync 0;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], 0;
selp.u32 %r2, 1, 0, %p2;
st.global.u32 [%rd0], %r2;"""
    got, result = execute(tmp_path, body, race=True)
    assert got.tolist() == [1] * 32
    assert not result.findings


# ---- atomics ---------------------------------------------------------------------------------------------------------

INIT = "setp.ne.u32 %p1, %r0, 0;\n@!%p1 st.shared.u32 [%r1], {start};\nbar.sync 0;\n"


@pytest.mark.parametrize(
    ("operation", "start", "found", "left"),
    [
        ("add.u32", 5, [5 + n * (n - 1) // 2 for n in range(64)], 5 + 63 * 32),
        ("exch.b32", 7, [7, *range(63)], 63),
        ("max.s32", 30, [max(30, n - 1) for n in range(64)], 63),
        ("min.u32", 3, [3] + [0] * 63, 0),
        ("or.b32", 64, [64 | (1 << (n - 1).bit_length()) - 1 if n else 64 for n in range(64)], 127),
        ("xor.b32", 0, [0, *np.bitwise_xor.accumulate(np.arange(63)).tolist()], 0),
    ],
)
def test_an_atomic_is_one_thread_after_the_other(operation, start, found, left, tmp_path):
    for space, base in (("shared", "%r1"), ("", "%rd4")):
        body = INIT.format(start=start) + "cvt.u64.u32 %rd3, %r1;\ncvta.shared.u64 %rd4, %rd3;\n"
        name = f"atom.{space}.{operation}".replace("..", ".")
        body += f"{name} %r2, [{base}], %r0;\nst.global.u32 [%rd0], %r2;\nbar.sync 0;\nld.shared.u32 %r3, [%r1];\n"
        body += "@!%p1 st.global.u32 [%rd1+256], %r3;"
        got, result = execute(tmp_path, body, threads=64, out=65, race=True)
        assert got[:64].tolist() == found, name
        assert got[64] == left
        assert not result.findings


def test_a_reduction_in_global_memory_counts_active_threads_only(tmp_path):
    body = "setp.lt.u32 %p1, %r0, 10;\nld.param.u64 %rd3, [data];\n@%p1 red.global.add.u32 [%rd3], 3;\nbar.sync 0;\n"
    body += "ld.global.u32 %r2, [%rd3];\nst.global.u32 [%rd0], %r2;"
    got, _ = execute(tmp_path, body, inputs={"data": np.array([4], np.uint32)})
    assert got.tolist() == [34] * 32


def test_an_atomic_on_what_another_warp_wrote_is_a_race_without_a_barrier(tmp_path):
    body = INIT.format(start=0).replace("bar.sync 0;\n", "") + "red.shared.add.u32 [%r1], 1;"
    _, result = execute(tmp_path, body, threads=64, race=True)
    assert [finding.kind for finding in result.findings] == ["race"]
    assert "red.shared.add.u32" in result.findings[0].sentence


def test_an_atomic_that_is_not_aligned(tmp_path):
    with pytest.raises(EmulationError, match="accesses byte 2 of shared memory, where a multiple of 4 was expected"):
        execute(tmp_path, "red.shared.add.u32 [%r1+2], 1;")


# ---- lanes and bits --------------------------------------------------------------------------------------------------


def test_match_finds_the_lanes_with_the_same_value(tmp_path):
    body = "and.b32 %r2, %r0, 3;\nmatch.any.sync.b32 %r3, %r2, 0xffffffff;\nst.global.u32 [%rd0], %r3;"
    got, _ = execute(tmp_path, body)
    assert got.tolist() == [0x11111111 << lane % 4 for lane in range(32)]


def test_match_asks_the_active_lanes_only(tmp_path):
    body = """setp.ge.u32 %p1, %r0, 8;
@%p1 bra $END;
activemask.b32 %r4;
cvt.u64.u32 %rd3, %r4;
match.any.sync.b64 %r3, %rd3, %r4;
st.global.u32 [%rd0], %r3;
$END:"""
    got, _ = execute(tmp_path, body)
    assert got[:8].tolist() == [0xFF] * 8


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("bfind.u32 %r2, %r0;", [0xFFFFFFFF, *(n.bit_length() - 1 for n in range(1, 32))]),
        ("bfind.shiftamt.u32 %r2, %r0;", [0xFFFFFFFF, *(32 - n.bit_length() for n in range(1, 32))]),
        ("neg.s32 %r3, %r0;\nbfind.s32 %r2, %r3;", [0xFFFFFFFF] * 2 + [(n - 1).bit_length() - 1 for n in range(2, 32)]),
        ("cvt.u64.u32 %rd3, %r0;\nshl.b64 %rd3, %rd3, 32;\nbfind.u64 %r2, %rd3;", [0xFFFFFFFF, *(n.bit_length() + 31 for n in range(1, 32))]),
    ],
)  # fmt: skip
def test_the_highest_bit(code, expected, tmp_path):
    got, _ = execute(tmp_path, f"{code}\nst.global.u32 [%rd0], %r2;")
    assert got.tolist() == expected


def test_the_timer_stands_still(tmp_path):
    """So a loop that sleeps longer the longer it has waited goes on asking."""
    body = "mov.u64 %rd3, %globaltimer;\nmov.u64 %rd4, %globaltimer;\nsub.s64 %rd5, %rd4, %rd3;\nst.global.u64 [%rd1], %rd5;"
    got, _ = execute(tmp_path, re.sub("^st", "setp.eq.u32 %p1, %r0, 0;\n@%p1 st", body, flags=re.M))
    assert got[:2].tolist() == [0, 0]
