"""Bad input: one sentence that names the thing, the rule and the fix, a non-zero exit, no traceback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline import ARCH, S1, UUID, Checkout

TWO = ({"name": "NVIDIA H200", "uuid": UUID}, {"name": "NVIDIA H200", "uuid": "GPU-2"})
LISTED = f"(index 0, slug h200, UUID {UUID}"
STEP = "steps: [S0>S1, S2>S3]"
"""name -> (what `--config` says, GPUs or None for one, edit of the experiment's file, sentence)."""
CASES = {
    "no GPU where one is asked for": (
        ["device=h200"],
        (),
        None,
        "Device 'h200' is asked for and this machine has no GPU: use `--config device=auto` to build and render without one.",
    ),
    "GPU of a cluster without its scheduler": (
        ["device=h200", f"arch={ARCH}"],
        (),
        None,
        "h200 is asked for and this machine has no GPU, so add `--profile profiles/slurm`, or use `--config device=auto`.",
    ),
    "unknown device": (
        ["device=b200"],
        None,
        None,
        f"There is no device 'b200' here: choose auto, emulator or one of these GPUs {LISTED}).",
    ),
    "unknown index": (
        ["device=7"],
        None,
        None,
        f"There is no device '7' here: choose auto, emulator or one of these GPUs {LISTED}).",
    ),
    "two GPUs and none chosen": (
        [],
        TWO,
        None,
        f"This machine has several GPUs: choose one with `--config device=<index, slug or UUID>` {LISTED}; index 1, slug h200,",
    ),
    "two GPUs of one slug": (
        ["device=h200"],
        TWO,
        None,
        "Device 'h200' is the slug of several GPUs: choose by index or UUID",
    ),
    "unknown experiment": (
        ["experiments=conv"],
        None,
        None,
        "config, key experiments: there is no experiment 'conv'; choose of copy_intensity, gemm",
    ),
    "unknown ladder": (
        ["ladders=Z"],
        None,
        None,
        "config, key ladders: there is no ladder 'Z'; choose of A, B, S",
    ),
    "unknown key": (["devise=h200"], None, None, "there is no key 'devise'; choose of device, arch"),
    "unknown nested key": (["measure={rounds: 5}"], None, None, "config, key measure: "),
    "word for a number": (
        ["measure={rounds_max: many}"],
        None,
        None,
        "config, key measure.rounds_max: 'many' is not of type 'integer'.",
    ),
    "number for a mapping": (
        ["measure=5"],
        None,
        None,
        "config, key measure: this is no mapping: write `measure={rounds_min: 50}`, in quotes in a shell.",
    ),
    "nothing for a list": (
        ["experiments="],
        None,
        None,
        "config, key experiments: this is no list of names: write `experiments=[name,name]`.",
    ),
    "nothing in a mapping's place": (
        ["device={}"],
        None,
        None,
        "config, key device: {} changes nothing: give it a value, or leave it out.",
    ),
    "rounds the wrong way round": (
        ["measure={rounds_min: 60}"],
        None,
        None,
        "config, key measure: rounds_max 40 is below rounds_min 60: raise it.",
    ),
    "architecture of another GPU": (
        ["arch=sm_80"],
        None,
        None,
        f"config, key arch: sm_80 does not run on GPU 0 (h200, {UUID}), which is sm_90a: use auto, or `device=emulator`.",
    ),
    "GPU that no device file describes": (
        [],
        ({"name": "NVIDIA V100", "uuid": UUID, "capability": [7, 0]},),
        None,
        f"GPU 0 (v100, {UUID}) has compute capability 7.0, which no file under config/devices/ describes.",
    ),
    "step in two factors": (
        [],
        None,
        (STEP, "steps: [S0>S1, S1>S2]"),
        "Step S1>S2 of ladder S is not one step: its rungs differ in b_layout and swizzle; a step changes exactly one factor,"
        " so put a rung between them or drop the step.",
    ),
    "step of an unknown rung": (
        [],
        None,
        (STEP, "steps: [S0>S9]"),
        "Step S0>S9 of ladder S names 'S9': its rungs are S0, S1, S2, S3.",
    ),
    "unknown level": (
        [],
        None,
        ("S3: {b_layout: 1, swizzle: 1}", "S3: {b_layout: 1, swizzle: 7}"),
        "Experiment gemm has no level 7 of factor swizzle: choose one of 0, 1.",
    ),
    "levels that do not go together": (
        [],
        None,
        ("B4: {load: 1, stages: 3}", "B4: {load: 0, stages: 3}"),
        "Level 3 of factor stages (3 stages) requires load in 1, 2, not 0: change one of the two.",
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What Snakemake says to each of the cases."""
    folder = tmp_path_factory.mktemp("input")

    def tell(index_and_case):
        index, (config, gpus, edit, _) = index_and_case
        checkout = Checkout.create(folder / f"case{index}")
        if gpus is not None:
            checkout.machine(*gpus) if gpus else checkout.no_gpu()
        if edit:
            checkout.edit("config/experiments/gemm.yaml", *edit)
        return checkout.snakemake("all", *(["--config", *config] if config else []))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(tell, enumerate(CASES.values())), strict=True))


LATE = "GPU of a cluster without its scheduler"
"""Seen only when Snakemake knows who runs its jobs: what it says before is said already."""


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_and_starts_nothing(told, name):
    result, sentence = told[name], CASES[name][-1]
    assert result.code == 1
    assert sentence in result.text
    assert "Traceback" not in result.text and "common.smk" not in result.text
    assert sentence in result.said[-1]
    assert len(result.said) == 1 or name == LATE, "nothing is said but the sentence"
    assert result.jobs == []
    assert sum(sentence[:40] in line for line in result.text.splitlines()) == 1, "once"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("abl_L9_R1_bl1_s2_sw1", "no level 9 of factor load: choose one of 0, 1, 2."),
        ("abl_L0_R1_bl1_s4_sw1", "requires load in 1, 2, not 0: change one of the two."),
        ("B99", "'B99'"),
    ],
)
def test_unknown_variant_is_named(complete_run, tmp_path, name, sentence):
    result = complete_run[0].rungs("build", "--variant", name, "--arch", ARCH, "--output", str(tmp_path / "x.json"))
    assert result.code == 1
    assert len(result.text.splitlines()) == 1 and result.text.startswith("rungs: ") and sentence in result.text
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("step", "B1", "B6"), "rungs: Step B1>B6 is not one step: its rungs differ in load and stages;"),
        (("step", "B2", "B2"), "rungs: Step B2>B2 is not one step: its rungs are the same variant;"),
        (
            ("step", "B2", "B3", "--device", "b200"),
            "rungs: There is no device 'b200' here: choose auto, emulator or one of these GPUs",
        ),
        (("trace", "README.md"), "rungs: 'README.md' names no cell: give <table>:<rung or step>[:MxNxK]"),
        (("trace", "results/h200/md/none.md:S1"), "rungs: results/h200/md/none.md does not exist:"),
        (("record", "results/nowhere"), "rungs: results/nowhere has no sweep of gemm: run `snakemake sweeps`"),
    ],
)
def test_verb_refuses_in_one_sentence(complete_run, arguments, sentence):
    result = complete_run[0].rungs(*arguments)
    assert result.code == 1
    assert len(result.text.splitlines()) == 1 and result.text.startswith(sentence)


def test_folder_that_cannot_be_written_is_one_sentence_and_costs_nothing_else(checkout):
    """/sys takes no file from anyone, root included, as a read-only results folder takes none from its reader."""
    folder = checkout.csv("sweep", S1).parent
    kept = folder.rename(folder.with_name("kept"))
    folder.symlink_to("/sys")
    target = f"results/h200/csv/sweep/gemm/{S1}.csv"
    result = checkout.snakemake(target)
    assert result.code == 1 and "Traceback" not in result.text
    said = [line for line in result.said if target in line]
    assert len(said) == 1 and said[0].startswith(f"rungs: {target} cannot be written (")
    assert said[0].endswith("): make its folder writable or free some space.")
    folder.unlink()
    kept.rename(folder)
    assert "Nothing to be done" in checkout.planned("all").text


def test_a_header_that_is_not_there_is_a_build_that_fails_and_never_nothing_to_do(checkout):
    """Snakemake passes over an error in an input function where the outputs exist: no kernel may cause one."""
    checkout.edit("kernels/gemm/gemm.cu", '#include "load.cuh"', '#include "load.cuh"\n#include "nothere.cuh"')
    result = checkout.snakemake("--cores", "2", "all")
    assert result.code == 1
    assert "nothere.cuh" in result.text and "build failed" in result.text
    assert "Traceback" not in result.text


def test_editing_a_device_measures_again(checkout):
    checkout.edit("config/devices/sm_90a.yaml", "bf16_flop_per_sm_cycle: 4096", "bf16_flop_per_sm_cycle: 4095")
    assert checkout.planned("all").rules >= {"sweep", "floor", "aggregate"}
