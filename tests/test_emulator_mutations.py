"""The emulator held honest: mutations of correct kernels, each of which it must report, while it reports no correct kernel.

A mutation changes the PTX that nvcc made of a real kernel as a mistake of its author would. Each is run in lockstep with
copies delivered late and with the race detector, which has to see all of them, and again without the detector under schedules that
make it go wrong by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from binaries import built
from rungs.emulator import launch, problem
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused
from rungs.variants import load_experiment

ARCH = "sm_90a"
SHAPES = {"gemm": (128, 128, 160), "gemm_tuned": (128, 256, 576)}  # five and nine tiles along K: every ring comes round

SYNC = ["abl_L0_R1_bl1_s1_sw1", "abl_L0_R1_bl1_s2_sw1", "abl_L0_R1_bl0_s2_sw1"]
CP_ASYNC = ["abl_L1_R1_bl1_s1_sw1", "abl_L1_R1_bl1_s2_sw1", "abl_L1_R0_bl0_s3_sw1", "abl_L1_R2_bl1_s4_sw0"]
TMA = ["abl_L2_R1_bl1_s1_sw1", "abl_L2_R1_bl1_s2_sw1", "abl_L2_R1_bl0_s3_sw1", "abl_L2_R2_bl1_s4_sw1"]
TUNED = ["tun_bk64_wt64_s4_pw1_db1_ps1_ep1_sk1", "tun_bk64_wt32_s3_pw1_db0_ps0_ep0_sk0"]
ALL = SYNC + CP_ASYNC + TMA + TUNED


def source(name: str) -> str:
    return built(name, ARCH).with_suffix(".ptx").read_text(encoding="utf-8")


def outcome(name: str, text: str, folder: Path, **how: object) -> problem.Outcome:
    experiment = load_experiment("gemm_tuned" if name.startswith("tun") else "gemm")
    path = folder / "mutant.ptx"
    path.write_text(text, encoding="utf-8")
    shape = SHAPES[experiment.name]
    return problem.emulate_gemm(experiment, experiment.variant(name), ARCH, path, shape, sms=1, **how)  # type: ignore[arg-type]


def watched(name: str, text: str, folder: Path) -> problem.Outcome:
    return outcome(name, text, folder, race=True)


# ---- mutations: each gives the mutants of a kernel, one for each place that it applies to ----


def at_each(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Callable[[str], list[str]]:
    """One mutant for each match."""

    def mutate(text: str) -> list[str]:
        return [
            text[: match.start()]
            + (match.expand(replacement) if isinstance(replacement, str) else replacement(match))
            + text[match.end() :]
            for match in re.finditer(pattern, text, re.M)
        ]

    return mutate


def everywhere(pattern: str, replacement: str) -> Callable[[str], list[str]]:
    """One mutant, changed at all matches."""
    return lambda text: [re.sub(pattern, replacement, text, flags=re.M)] if re.search(pattern, text, re.M) else []


TRY_WAIT = r"^mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[(%r\d+)\], (%r\d+);"
LOOP = (
    TRY_WAIT
    + r"(\s*selp\.u32 [^;]*;\s*\}(?:\s*//[^\n]*|\s*\.loc[^\n]*)*\s*setp\.eq\.s32 \s*(%p\d+), [^;]*;(?:\s*\.loc[^\n]*)*)\s*@\4 bra [^;]*;"
)
MUTATIONS = {
    "a cp.async wait dropped": (CP_ASYNC, everywhere(r"^\s*cp\.async\.wait_group \d+;", "")),
    "a cp.async wait weakened": (
        CP_ASYNC,
        at_each(r"cp\.async\.wait_group (\d+);", lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    ),
    "a barrier dropped": (SYNC + CP_ASYNC + TMA + TUNED, at_each(r"^\s*bar\.sync\s+0;", "")),
    "the barrier after mbarrier.init dropped": (
        TMA + TUNED,
        lambda text: at_each(r"^\s*bar\.sync\s+0;", "")(text)[:1],
    ),
    "the swizzle of a store left out": (
        ["abl_L0_R1_bl1_s2_sw1", "abl_L1_R1_bl1_s2_sw1"],
        at_each(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+);", r"mov.b32 \1, \2;"),
    ),
    "the parity of a wait inverted": (
        TMA + TUNED,
        at_each(TRY_WAIT, r".reg .b32 q;\nxor.b32 q, \2, 1;\nmbarrier.try_wait.parity.shared::cta.b64 p, [\1], q;"),
    ),
    "expect_tx too large": (
        TMA + TUNED,
        everywhere(r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), %r\d+;", r"\1, 99328;"),
    ),
    "expect_tx too small": (
        TMA + TUNED,
        everywhere(r"(mbarrier\.arrive\.expect_tx[^,]*, \[%r\d+\]), %r\d+;", r"\1, 8192;"),
    ),
    "an mbarrier of one arrival too many": (
        TMA + TUNED,
        at_each(r"(mbarrier\.init[^,]*), (%r\d+);", r"{ .reg .b32 q;\nadd.s32 q, \2, 1;\n\1, q;\n}"),
    ),
    "an mbarrier of one arrival too few": (
        TUNED,
        at_each(r"(mbarrier\.init[^,]*), (%r\d+);", r"{ .reg .b32 q;\nsub.s32 q, \2, 1;\n\1, q;\n}"),
    ),
    "a try_wait dropped": (TMA + TUNED, at_each(TRY_WAIT, "setp.eq.u32 p, 0, 0;")),
    "the answer of a try_wait ignored": (TMA + TUNED, at_each(LOOP, lambda m: m[0][: m[0].rindex("@")])),
    "an arrival on `empty` dropped": (TUNED, at_each(r"^\s*mbarrier\.arrive\.shared::cta\.b64[^;]*;", "")),
    "the fence after mbarrier.init dropped": (TMA + TUNED, everywhere(r"^\s*fence\.mbarrier_init[^;]*;", "")),
    "shared memory moved by 128 B": (
        ["abl_L2_R1_bl1_s2_sw1", "abl_L2_R1_bl0_s3_sw1", *TUNED],
        everywhere(r"(mov\.u32 \s*%r\d+, bytes);", r"\1+128;"),
    ),
    "shared memory moved by 8 B": (CP_ASYNC + TMA, everywhere(r"(mov\.u32 \s*%r\d+, bytes);", r"\1+8;")),
    "the commit after the wait": (
        CP_ASYNC[:1],
        everywhere(
            r"cp\.async\.commit_group;(.*\n(?:.*\n){1,8}?\s*)cp\.async\.wait_group 0;",
            r"cp.async.wait_group 0;\1cp.async.commit_group;",
        ),
    ),
    "a head start that nobody gives": (TUNED[:1], everywhere(r"^\s*bar\.arrive[^;]*;", "")),
}
CASES = [
    pytest.param(name, change, id=f"{change}-{name}") for change, (names, _) in MUTATIONS.items() for name in names
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("schedule", ["cta", "random"])
def test_a_correct_kernel_is_not_reported(name, schedule, tmp_path):
    found = outcome(name, source(name), tmp_path, race=True, schedule=schedule)
    assert found.good, (found.failure, found.error, found.findings)


NEEDS_DETECTOR = {"the fence after mbarrier.init dropped"}  # on this machine memory is always seen in order
WITHOUT_DETECTOR = [
    {"schedule": "cta"},
    {"schedule": "descending"},
    {"schedule": "random", "delivery": "early"},
]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_mutation_is_reported(name, change, tmp_path):
    mutants = MUTATIONS[change][1](source(name))
    assert mutants, f"{change} applies nowhere to {name}"
    for number, text in enumerate(mutants):
        found = watched(name, text, tmp_path)
        assert not found.good, f"{change}, place {number} of {name}, goes unseen"


@pytest.mark.parametrize("change", [change for change in MUTATIONS if change not in NEEDS_DETECTOR])
def test_a_mutation_goes_wrong_by_itself_under_some_schedule(change, tmp_path):
    names, mutate = MUTATIONS[change]
    for number, text in enumerate(mutate(source(names[-1]))):
        found = [outcome(names[-1], text, tmp_path, **how) for how in WITHOUT_DETECTOR]
        assert not all(each.good for each in found), f"{change}, place {number} of {names[-1]}, changes nothing"


def test_lockstep_alone_does_not_see_a_missing_barrier(tmp_path):
    """Why there are schedules and a detector: whole CTAs in step give the right result all the same."""
    name = "abl_L0_R1_bl1_s1_sw1"
    for text in MUTATIONS["a barrier dropped"][1](source(name)):
        assert outcome(name, text, tmp_path, schedule="cta").good


def test_a_race_names_both_instructions_and_their_source_lines(tmp_path):
    name = "abl_L0_R1_bl1_s1_sw1"
    text = MUTATIONS["a barrier dropped"][1](source(name))[0]
    finding = watched(name, text, tmp_path).findings[0]
    assert finding.kind == "race"
    lines = text.splitlines()
    assert [lines[line - 1].split()[0] for line in finding.ptx_lines] == [
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "st.shared.v4.u32",
    ]
    assert finding.sources[0].startswith("kernels/gemm/read.cuh:")
    assert finding.sources[1].startswith("kernels/gemm/load.cuh:")
    assert finding.sentence.endswith(" between them.") and ". " not in finding.sentence


def test_a_box_wider_than_its_swizzle_is_refused_before_anything_runs(tmp_path):
    experiment = load_experiment("gemm")
    variant = experiment.variant("abl_L2_R1_bl1_s2_sw1")
    memory, plan = problem.prepare(experiment, variant, ARCH, (128, 128, 64), "integer", 1)
    wide = replace(plan, params=(replace(plan.params[0], box=(64, 128)), *plan.params[1:]))
    with pytest.raises(Refused, match="128 bytes, wider than the 64 of a 64B swizzle"):
        launch.run(built(variant.name, ARCH).with_suffix(".ptx"), wide, memory)


def test_a_kernel_that_never_ends_is_stopped_with_its_place(tmp_path):
    experiment = load_experiment("gemm")
    variant = experiment.variant("abl_L0_R1_bl1_s1_sw1")
    memory, plan = problem.prepare(experiment, variant, ARCH, (128, 128, 64), "integer", 1)
    path = tmp_path / "endless.ptx"
    path.write_text(re.sub(r"bar\.sync\s+0;", "$ROUND:\nbra $ROUND;", source(variant.name)))
    with pytest.raises(
        EmulationError, match=r"PTX line \d+ .*is reached after 20000 instructions, where the kernel was expected"
    ):
        launch.run(path, plan, memory, max_instructions=20_000)


def test_the_races_found_before_a_kernel_is_stopped_are_kept(tmp_path):
    name = "abl_L2_R1_bl1_s2_sw1"
    found = watched(name, MUTATIONS["a try_wait dropped"][1](source(name))[0], tmp_path)
    assert "arrives 1 times at the mbarrier" in found.failure
    assert {finding.kind for finding in found.findings} == {"race"}
