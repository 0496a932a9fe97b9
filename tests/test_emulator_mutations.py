"""The emulator held honest: mutations of correct kernels, each of which it must report, while it reports no correct kernel.

A mutation changes the PTX that nvcc made of a real kernel as a mistake of its author would. Each is run in lockstep with
copies delivered late and with the race detector, which has to see all of them, and again without the detector under schedules that
make it go wrong by itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from binaries import built
from rungs.emulator import launch, mutations, problem
from rungs.emulator.mutations import ALL, KINDS, MUTATIONS
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused
from rungs.variants import load_experiment

ARCH = "sm_90a"


def source(name: str) -> str:
    return built(name, ARCH).with_suffix(".ptx").read_text(encoding="utf-8")


def outcome(name: str, text: str, folder: Path, **how: object) -> problem.Outcome:
    experiment = load_experiment(mutations.experiment_of(name))
    path = folder / "mutant.ptx"
    path.write_text(text, encoding="utf-8")
    shape = mutations.SHAPES[experiment.name]
    return problem.emulate_gemm(experiment, experiment.variant(name), ARCH, path, shape, sms=mutations.SMS, **how)  # type: ignore[arg-type]


def watched(name: str, text: str, folder: Path) -> problem.Outcome:
    return outcome(name, text, folder, race=True)


TWINS = mutations.WGMMA[:1]
"""Of the wgmma kernels the one that has no synchronisation of its own beside the other's: checked to be right, not mutated here."""
CASES = [
    pytest.param(name, change, id=f"{change}-{name}")
    for change, mutation in MUTATIONS.items()
    for name in mutation.variants
    if name not in TWINS
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("schedule", ["cta", "random"])
def test_a_correct_kernel_is_not_reported(name, schedule, tmp_path):
    found = outcome(name, source(name), tmp_path, race=True, schedule=schedule)
    assert found.good, (found.failure, found.error, found.findings)


def test_every_mutation_says_what_it_breaks_and_what_the_emulator_reports():
    for name, mutation in MUTATIONS.items():
        assert mutation.name == name and mutation.kind in KINDS and mutation.what and mutation.reports
        assert set(mutation.variants) <= set(ALL)


NEEDS_DETECTOR = {  # on this machine memory is always seen in order, and a product reads as late as it may
    "the fence after mbarrier.init dropped",
    "a wgmma wait weakened",
    "a stage released before the wgmma wait",
    "a wait for a bulk store dropped",
    "a named barrier dropped",
    "the fence before a bulk store dropped",
    "a barrier of the cluster dropped",
    "an arrival in L2 that releases nothing",
    "a wait in L2 that acquires nothing",
    "the answer of a wait in L2 ignored",  # CTAs write in step
}
WITHOUT_DETECTOR = [
    {"schedule": "cta"},
    {"schedule": "descending"},
    {"schedule": "random", "delivery": "early"},
]


@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_mutation_is_reported(name, change, tmp_path):
    mutants = MUTATIONS[change].mutate(source(name))
    assert mutants, f"{change} applies nowhere to {name}"
    for number, text in enumerate(mutants):
        found = watched(name, text, tmp_path)
        assert not found.good, f"{change}, place {number} of {name}, goes unseen"


@pytest.mark.parametrize("change", [c for c, each in MUTATIONS.items() if each.variants and c not in NEEDS_DETECTOR])
def test_a_mutation_goes_wrong_by_itself_under_some_schedule(change, tmp_path):
    variants = MUTATIONS[change].variants
    name = (
        [each for each in variants if each not in mutations.WGMMA + mutations.SPLIT + mutations.THROUGH_L2] or variants
    )[-1]
    for number, text in enumerate(MUTATIONS[change].mutate(source(name))):
        found = [outcome(name, text, tmp_path, **how) for how in WITHOUT_DETECTOR]
        assert not all(each.good for each in found), f"{change}, place {number} of {name}, changes nothing"


@pytest.mark.parametrize("scope", ["cta", "cluster"])
@pytest.mark.parametrize("access", [r"atom\.add\.release\.", r"ld\.acquire\."])
def test_a_scope_that_ends_before_the_ctas_of_a_tile_do(access, scope, tmp_path):
    """They are of several clusters: no mutation of the list above, which is what ran under Compute Sanitizer too."""
    [name] = mutations.THROUGH_L2
    text, times = re.subn(rf"({access})gpu", rf"\g<1>{scope}", source(name))
    found = watched(name, text, tmp_path)
    assert times == 1 and not found.good and found.findings[0].kind == "race"


def test_lockstep_alone_does_not_see_a_missing_barrier(tmp_path):
    """Why there are schedules and a detector: whole CTAs in step give the right result all the same."""
    name = "abl_L0_R1_bl1_s1_sw1"
    for text in MUTATIONS["a barrier dropped"].mutate(source(name)):
        assert outcome(name, text, tmp_path, schedule="cta").good


def test_a_race_names_both_instructions_and_their_source_lines(tmp_path):
    name = "abl_L0_R1_bl1_s1_sw1"
    text = MUTATIONS["a barrier dropped"].mutate(source(name))[0]
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
    found = watched(name, MUTATIONS["a try_wait dropped"].mutate(source(name))[0], tmp_path)
    assert "arrives 1 times at the mbarrier" in found.failure
    assert {finding.kind for finding in found.findings} == {"race"}
