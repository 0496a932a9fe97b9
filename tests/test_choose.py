"""The rule that chooses a rung for a shape: its arithmetic, what it chooses, its verbs, and its page against what was measured."""

from __future__ import annotations

import re

import pytest
import yaml

from rungs import choose
from rungs.cli import main
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.variants import load_device, load_experiment, parse_experiment

HOPPER = load_experiment("hopper_gemm")
DEVICE = load_device("sm_90a")
RULE = HOPPER.choice["rungs"]
FILE = ROOT / "config" / "experiments" / "hopper_gemm.yaml"


def estimate(rung: str, *shape: int, sms: int | None = None) -> choose.Estimate:
    return choose.estimate(HOPPER, rung, shape, DEVICE, sms)


def test_cycles_are_first_steps_and_more_of_each_further_wave():
    found = estimate("H15", 4096, 4096, 4096)  # 1,024 tiles of 128 x 128 on 132 SMs
    assert (found.waves, found.k_tiles, found.by_l2) == (8, 64, False)
    assert found.cycles == RULE["H15"]["first"] + 8 * 64 * RULE["H15"]["step"] + 7 * RULE["H15"]["more"]


def test_a_split_tile_takes_its_share_of_k_and_the_exchange():
    found = estimate("G3", 512, 512, 8192)  # 16 tiles, 128 CTAs, 128 tiles of K over 8
    assert (found.waves, found.k_tiles) == (1, 16)
    assert found.cycles == RULE["G3"]["first"] + 16 * RULE["G3"]["step"] + RULE["G3"]["split"]


def test_a_wave_holds_as_many_clusters_as_run_at_once():
    at_once = HOPPER.choice["sms_in_clusters"][3] // 3  # fewer than 132 / 3: SMs of a GPC are left over
    assert at_once < 132 // 3
    assert estimate("K3", 128 * at_once, 128, 64).waves == 1
    assert estimate("K3", 128 * (at_once + 1), 128, 64).waves == 2
    assert estimate("K3", 1024, 512, 64, sms=66).waves == 2, "22 clusters on a GPU of half the SMs"
    assert estimate("G3", 512, 512, 64).waves == 1, "128 CTAs in clusters of two"
    with pytest.raises(Refused, match="G3 has 16 CTAs that wait for each other, more than the GPU's SMs"):
        estimate("G3", 512, 512, 64, sms=15)


def test_rows_that_begin_inside_a_line_cost_l2_more_and_multicast_less():
    """8000 x 8000 x 1000 on an H200: H15 at 64 % of cuBLAS, H13, whose CTAs share what L2 delivers, at 106 %."""
    assert not estimate("H15", 8000, 8000, 1024).by_l2
    assert estimate("H15", 8000, 8000, 1000).by_l2
    assert choose.chosen(HOPPER, (8000, 8000, 1000), DEVICE).rung == "H13"


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((512, 512, 256), 64064),
        ((1024, 1024, 1024), 64128),
        ((4096, 4096, 1024), 128128),
        ((4096, 4096, 8192), 128256),
        ((8192, 8192, 8192), 128192),
    ],
)
def test_the_tile_grows_with_the_work(shape, tile):
    assert choose.chosen(HOPPER, shape, DEVICE).variant.level("tile") == tile


def test_every_rung_of_the_rule_is_chosen_somewhere():
    """What no shape needs is no part of a small rule."""
    sizes, depths = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192), (256, 1024, 4096, 8192, 16384)
    taken = {choose.chosen(HOPPER, (m, n, k), DEVICE).rung for m in sizes for n in sizes for k in depths}
    assert taken >= set(RULE) - {"D5"}, set(RULE) - taken


def test_shapes_that_the_kernel_refuses_are_refused():
    with pytest.raises(Refused, match=r"^N=12 is not a multiple of 8, .*: choose a multiple of 8\.$"):
        choose.chosen(HOPPER, (64, 12, 64), DEVICE)


def test_a_gpu_that_holds_no_cluster_of_a_rung_has_the_others(capsys):
    taken = {each.rung for each in choose.estimates(HOPPER, (512, 512, 8192), DEVICE, 4)}
    assert "G10" not in taken and {"D2", "H15"} <= taken
    assert main(["choose", "8x8x8", "--sms", "0"]) != 0
    assert (
        capsys.readouterr().err
        == "rungs: A GPU of 0 SMs is none that there is: give --sms from 1 to 1024, 132 for an H200.\n"
    )


def test_an_experiment_without_a_rule_says_so():
    with pytest.raises(
        RungsError, match=r"^Experiment gemm has no rule that chooses a rung: choose hopper_gemm, or add"
    ):
        choose.estimates(load_experiment("gemm"), (512, 512, 512), DEVICE)


def test_a_rule_names_rungs():
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    raw["choice"]["rungs"]["H99"] = {"step": 1, "first": 1, "more": 1}
    with pytest.raises(
        RungsError, match=r"^Experiment hopper_gemm: choice names 'H99', which is none of its rungs: name one of H0,"
    ):
        parse_experiment(raw)


def test_the_verb_prints_the_rung_first_and_its_cycles(capsys):
    assert main(["choose", "4096x4096x1024", "512x512x8192"]) == 0
    printed = capsys.readouterr().out
    first = re.search(r"M=4096, N=4096, K=1024: take (\w+)|4096\D+4096\D+1024\D*: take (\w+)", printed)
    assert first and "H15" in first.groups()
    cycles = [int(line.split("|")[-2]) for line in printed.split("\n\n")[1].splitlines()[2:]]
    assert cycles == sorted(cycles) and len(cycles) == len(RULE)


@pytest.mark.parametrize(
    "shape", ["64x64", "0x64x64", "axbxc", "1_0x8x8", "\uff11x8x8", "9" * 5000 + "x8x8", "64x64x12"]
)
def test_what_is_no_shape_is_one_sentence(capsys, shape):
    with pytest.raises(SystemExit) if shape != "64x64x12" else _nothing():
        assert main(["choose", shape]) != 0
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and 0 < len(printed.err.strip()) < 600 and not printed.out


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_the_export_of_a_shape_is_that_of_the_chosen_rung(tmp_path, capsys):
    assert main(["export", "--shape", "8192x8192x8192", "--to", str(tmp_path)]) == 0
    assert (tmp_path / f"{HOPPER.variant('H13').name}.cu").is_file()


def test_an_export_is_of_a_variant_or_for_a_shape(tmp_path, capsys):
    for more in ([], ["--variant", "H10", "--shape", "64x64x64"]):
        assert main(["export", "--to", str(tmp_path / "new"), *more]) != 0
        assert capsys.readouterr().err.count("give --variant or --shape, and not both.") == 1
    assert not (tmp_path / "new").exists()
    assert main(["export", "--variant", "", "--to", str(tmp_path / "new")]) != 0
    assert capsys.readouterr().err.startswith("rungs: '' is no variant of ")
    with pytest.raises(SystemExit):
        main(["export", "--variant", "H10", "--to", ""])
    assert capsys.readouterr().err.endswith("argument --to: it is empty: name a folder, . for this one\n")


@pytest.mark.parametrize("verb", [["sanitize-mutations", "--build-only"], ["compare", "results"]])
def test_a_folder_that_is_written_has_a_name(verb, capsys):
    with pytest.raises(SystemExit):
        main([*verb, "--output", ""])
    assert capsys.readouterr().err.endswith("argument --output: it is empty: name a folder, . for this one\n")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sms_in_clusters": {"6": 102}}, "'6' is not of type 'integer'"),
        ({"sms_in_clusters": {0: 102}}, "0 is less than the minimum of 1"),
        ({"sms_in_clusters": {6: 5}}, "sms_in_clusters has 5 SMs in clusters of 6 CTAs: give 6 or more."),
        ({"l2_bytes_per_cycle": 10**400}, "is greater than the maximum of"),
        ({"rungs": {"K6": {"step": 616, "first": 7150, "more": 2900}}}, "choice.rungs.K6 needs `split`,"),
        ({"rungs": {"H13": {"step": 1, "first": 1, "more": 1, "split": 1}}}, "choice.rungs.H13 has `split`,"),
        ({"rungs": {"H13": {"step": float("nan"), "first": 1, "more": 1}}}, "nan is not of type 'number'"),
    ],
)
def test_a_rule_that_would_choose_by_wrong_cycles_is_one_sentence(tmp_path, change, sentence):
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    raw["choice"] |= change
    (tmp_path / FILE.name).write_text(yaml.safe_dump(raw, sort_keys=False))
    with pytest.raises(RungsError, match=re.escape(sentence)) as told:
        load_experiment("hopper_gemm", tmp_path)
    assert str(told.value).endswith(".") and "\n" not in str(told.value)


def test_only_experiments_that_multiply_by_wgmma_have_a_rule():
    raw = yaml.safe_load((FILE.parent / "smem_read.yaml").read_text(encoding="utf-8"))
    raw["choice"] = {**HOPPER.choice, "rungs": {"W1": {"step": 1, "first": 1, "more": 1}}}
    with pytest.raises(RungsError, match=r"^Experiment smem_read: choice is of experiments that multiply by wgmma"):
        parse_experiment(raw)
