"""Experiments, devices and config say one thing each, or are refused with the name, the rule and the fix."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import yaml

from rungs import binary, build, schemas, settings, variants
from rungs.errors import RungsError

GEMM = (variants.CONFIG / "experiments" / "gemm.yaml").read_text(encoding="utf-8")
RAW = yaml.safe_load(GEMM)
EXPERIMENT = variants.load_experiment("gemm")
CONFIG = yaml.safe_load((variants.CONFIG / "config.yaml").read_text(encoding="utf-8"))


def changed(*path_and_value) -> dict:
    *path, value = path_and_value
    raw = copy.deepcopy(RAW)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return raw


def test_ladder_b_has_the_rungs_and_steps_of_the_plan():
    ladder = EXPERIMENT.ladders["B"]
    assert {rung: v.name for rung, v in ladder.rungs.items()} == {
        "B0": "abl_L0_R1_bl1_s1_sw1",
        "B1": "abl_L1_R1_bl1_s1_sw1",
        "B2": "abl_L0_R1_bl1_s2_sw1",
        "B3": "abl_L1_R1_bl1_s2_sw1",
        "B4": "abl_L1_R1_bl1_s3_sw1",
        "B5": "abl_L2_R1_bl1_s2_sw1",
        "B6": "abl_L2_R1_bl1_s3_sw1",
        "B7": "abl_L2_R1_bl1_s1_sw1",
    }
    factors = {step.label: step.factor for step in ladder.steps}
    assert factors == {
        **dict.fromkeys(("B0>B1", "B2>B3", "B3>B5", "B1>B7", "B4>B6"), "load"),
        **dict.fromkeys(("B0>B2", "B1>B3", "B3>B4", "B7>B5", "B5>B6"), "stages"),
    }


def test_a_name_and_its_levels_are_the_same_thing():
    for variant in EXPERIMENT.estimable():
        assert EXPERIMENT.variant(variant.name) == variant
    assert len(EXPERIMENT.estimable()) == 100
    assert EXPERIMENT.variant("B3") == EXPERIMENT.variant("S3")


def test_a_contract_is_the_order_in_which_k_is_summed():
    contracts = {EXPERIMENT.contract(v) for v in EXPERIMENT.estimable() if v.level("read") != 2}
    assert contracts == {"natural"}
    assert EXPERIMENT.contract(EXPERIMENT.variant("abl_L1_R2_bl1_s2_sw1")) == "k-permuted"


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (changed("ladders", "B", "rungs", "B1", {"load": 1, "stages": 2}), "Step B0>B1 of ladder B is not one step: its rungs differ in load and stages;"),
        (changed("ladders", "B", "steps", ["B0>B9"]), "Step B0>B9 of ladder B names 'B9': its rungs are B0"),
        (changed("ladders", "B", "steps", ["B0>B1"]), "the path of ladder B goes from B2 to B3, which is none of its steps"),
        (changed("ladders", "S", "path", ["S0", "S3"]), "the path of ladder S goes from S0 to S3, which is none of its steps"),
        (changed("ladders", "S", "path", ["S9"]), "the path of ladder S names 'S9', which is none of its rungs"),
        (changed("ladders", "S", "rungs", "B0", {"b_layout": 0, "swizzle": 0}), "rung B0 stands on ladders B and S"),
        (changed("ladders", "B", "rungs", "B0", {"load": 0, "stages": 3}), "requires load in 1, 2, not 0: change one of the two"),
        (changed("factors", "read", "macro", "VARIANT_LOAD"), "macro VARIANT_LOAD is given twice"),
        (changed("factors", "read", "levels", 2, {"title": "x", "requires": {"nope": [1]}}), "requires 'nope', which is no factor"),
        (changed("variant_name", "abl_{load"), "is no pattern"),
        (changed("variant_name", "abl_L{load}"), "must hold each factor once"),
        (changed("constants", {"TILE_M": 128}), "give TILE_N"),
        (changed("quick", "ladders", ["Q"]), "quick names ladder 'Q', which it does not have"),
        (changed("floor_rung", "B9"), "'B9' is no variant of gemm"),
        (changed("floor_rung", "abl_L0_R0_bl0_s1_sw0"), "floor_rung 'abl_L0_R0_bl0_s1_sw0' is on no ladder: name one of the rungs"),
        (changed("ladders", "S", "path", []), "the path of ladder S has 0 rungs: give it 2 or more"),
        (changed("factors", "read", "levels", 2, {"title": "x", "requires": {"b_layout": [7]}}), "requires level 7 of b_layout, whose levels are 0, 1"),
        (changed("factors", "read", "levels", 2, {"title": "x", "requires": {"b_layout": []}}), "requires no level of b_layout"),
        (changed("factors", "read", "levels", 2, {"title": "x", "requires": {"read": [2]}}), "level 2 of read requires levels of read itself"),
        (changed("factors", "load", "levels", 2, {"title": "x", "architectures": ["sm_90"]}), "level 2 of load names architecture 'sm_90': choose of sm_80"),
        (changed("architectures", ["sm_1"]), "Experiment gemm names architecture 'sm_1': choose of sm_80"),
        (changed("constants", "TILE_M", 0), "constants gives TILE_M the value 0: it must be 1 or more"),
        (changed("kernel", "gemm/none.cu"), "there is no kernels/gemm/none.cu: name a file under kernels/"),
        (changed("factors", 1, RAW["factors"]["load"]), "factor 1 is no name: use letters"),
        (changed("ladders", "control", RAW["ladders"]["S"]), "control has a name that is a word of rungs' own: rename it"),
        (changed("ladders", "S", "rungs", "twin", {"b_layout": 0, "swizzle": 0}), "twin has a name that is a word of rungs' own"),
    ],
)  # fmt: skip
def test_an_experiment_that_contradicts_itself_is_refused(raw, sentence):
    with pytest.raises(RungsError) as error:
        variants.parse_experiment(raw)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


DEFAULT = RAW["variant_name"].replace("_sw", "[_x{extra}]_sw")
"""The pattern of `gemm` with a factor more, whose default level a name leaves out."""
EXTRA = {
    "macro": "VARIANT_EXTRA",
    "title": "extra",
    "default": 3,
    "levels": {3: {"title": "plain"}, 7: {"title": "more"}},
}


def widened(pattern: str = DEFAULT, **changes) -> dict:
    """`gemm` with a factor more, of which nothing else in its file says anything."""
    raw = changed("variant_name", pattern)
    raw["factors"]["extra"] = {**EXTRA, **changes}
    return raw


def test_a_new_factor_with_a_default_leaves_every_variant_as_it_was():
    wide = variants.parse_experiment(widened())
    for variant in EXPERIMENT.estimable():
        found = wide.variant(variant.name)
        assert found.name == variant.name and dict(found.levels) == {**dict(variant.levels), "extra": 3}
        assert wide.values(found) == {**EXPERIMENT.values(variant), "VARIANT_EXTRA": 3}
    for name, ladder in EXPERIMENT.ladders.items():
        assert [v.name for v in wide.ladders[name].rungs.values()] == [v.name for v in ladder.rungs.values()]
        assert [(step.label, step.factor) for step in wide.ladders[name].steps] == [
            (step.label, step.factor) for step in ladder.steps
        ]
    assert wide.factorial == EXPERIMENT.factorial
    assert [variant.name for variant in wide.estimable() if variant.level("extra") == 3] == [
        variant.name for variant in EXPERIMENT.estimable()
    ]


def test_a_name_holds_the_levels_that_are_no_default():
    wide = variants.parse_experiment(widened())
    seen = {variant.name for variant in wide.estimable()}
    assert len(seen) == 200
    more = wide.assign({**dict(wide.variant("B3").levels), "extra": 7})
    assert more.name == "abl_L1_R1_bl1_s2_x7_sw1" and wide.variant(more.name) == more
    assert variants.make_step(wide.variant("B3"), more).factor == "extra"
    every = re.compile(wide.name_regex())
    assert every.groups == 0 and all(every.fullmatch(name) for name in seen)
    assert not every.fullmatch("abl_L1_R1_bl1_s2_x3_sw1") and not every.fullmatch("abl_L1_R1_bl1_s2_x8_sw1")
    alone = variants.parse_experiment(widened(levels={3: {"title": "plain"}}))
    assert re.fullmatch(alone.name_regex(), "abl_L1_R1_bl1_s2_sw1")
    assert not re.fullmatch(alone.name_regex(), "abl_L1_R1_bl1_s2_x_sw1")


@pytest.mark.parametrize("name", ["abl_L1_R1_bl1_s2_x3_sw1", "abl_L1_R1_bl1_s2_x03_sw1", "abl_L01_R1_bl1_s2_sw1"])
def test_a_second_spelling_of_a_name_is_refused_with_the_first(name):
    with pytest.raises(RungsError) as error:
        variants.parse_experiment(widened()).variant(name)
    assert str(error.value) == (
        f"{name!r} is a second spelling of abl_L1_R1_bl1_s2_sw1, and a binary goes by one name, which leaves out default levels"
        " and leading zeros: write abl_L1_R1_bl1_s2_sw1."
    )


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (widened(default=4), "the default of extra is 4, which is none of its levels 3, 7."),
        (widened(default=None), "variant_name has extra in square brackets, and extra has no default"),
        (widened(DEFAULT.replace("[_x{extra}]", "_x{extra}")), "extra has a default, which names leave out, so variant_name needs its part in square brackets, for example [_e{extra}]."),
        (widened(DEFAULT.replace("[_x{extra}]", "[_x]_x{extra}")), "[_x] in variant_name holds 0 factors: put exactly one"),
        (widened(DEFAULT.replace("_s{stages}[_x{extra}]", "[_s{stages}_x{extra}]")), "[_s{stages}_x{extra}] in variant_name holds 2 factors"),
        (widened(DEFAULT.replace("[_x{extra}]", "[_x[{extra}]]")), "are nested or not closed: put each part"),
        (widened(DEFAULT.replace("[_x{extra}]", "[_x{extra}")), "are nested or not closed"),
        (widened(DEFAULT.replace("[_x{extra}]", "_x{extra}]")), "are nested or not closed"),
        (widened(DEFAULT.replace("[_x{extra}]", "]_x{extra}[")), "are nested or not closed"),
        (widened(DEFAULT.replace("[_x{extra}]", "[_x{extra}]]")), "are nested or not closed"),
        (changed("variant_name", f"[{RAW['variant_name']}]"), "holds 5 factors: put exactly one into a pair of brackets"),
        (changed("variant_name", RAW["variant_name"].replace("{load}", "[{load}]")), "variant_name has load in square brackets, and load has no default"),
    ],
)  # fmt: skip
def test_a_default_that_contradicts_the_name_is_refused(raw, sentence):
    with pytest.raises(RungsError) as error:
        variants.parse_experiment(raw)
    assert sentence in str(error.value) and str(error.value).startswith("Experiment gemm: ")
    assert "\n" not in str(error.value)


def test_two_parts_that_a_name_leaves_out_are_told_apart():
    """`_7` could be a level of either: only the letters of the pattern say of which."""
    raw = widened("abl_L{load}_R{read}_bl{b_layout}_s{stages}_sw{swizzle}[_{extra}][_{more}]")
    del raw["factorial"]["profile_more"]
    raw["factors"]["more"] = {**EXTRA, "macro": "VARIANT_MORE"}
    with pytest.raises(RungsError, match="the name abl_L0_R0_bl0_s1_sw0_7 does not say where one level ends"):
        variants.parse_experiment(raw)
    raw["factors"]["more"]["levels"] = {3: {"title": "plain"}, 8: {"title": "more"}}
    raw["variant_name"] = raw["variant_name"].replace("_{more}", "_m{more}")
    wide = variants.parse_experiment(raw)
    assert wide.variant("abl_L1_R1_bl1_s2_sw1_7_m8").levels[-2:] == (("extra", 7), ("more", 8))
    assert wide.variant("abl_L1_R1_bl1_s2_sw1_m8").levels[-2:] == (("extra", 3), ("more", 8))


def test_a_name_that_leaves_out_everything_is_refused():
    raw = changed("variant_name", "[a{load}][b{read}][c{b_layout}][d{stages}][e{swizzle}]")
    for factor in raw["factors"].values():
        factor["default"] = next(iter(factor["levels"]))
    with pytest.raises(RungsError, match="may leave out everything: put a word outside the brackets"):
        variants.parse_experiment(raw)


def test_a_name_of_two_variants_is_refused():
    raw = changed("variant_name", "abl_L{load}_R{read}_bl{b_layout}_s{stages}{swizzle}")
    del raw["factorial"]["profile_more"]
    assert variants.parse_experiment(raw).variant("abl_L1_R1_bl1_s21") == variants.parse_experiment(raw).variant("B3")
    for factor in ("stages", "swizzle"):
        raw["factors"][factor]["levels"][11] = {"title": "x"}
    with pytest.raises(RungsError, match="put a letter or _ between the factors of variant_name abl_L"):
        variants.parse_experiment(raw)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("      0: {title: plain}", '      "0": {title: plain}', "levels: '0' is not of type 'integer' .a level is a whole number"),
        ("      0: {title: plain}", "      true: {title: plain}", "True is not of type|given twice"),
        ("      0: {title: plain}", "      null: {title: plain}", "None is not of type 'integer'"),
        ("      0: {title: plain}", f"      {10**30}: {{title: plain}}", "greater than the maximum of 1000000"),
        ("  swizzle:\n    macro", "  7:\n    macro", "key factors: 7 is not of type 'string' .a factor's name"),
        ("  TILE_M: 128", "  TILE_M: 128\n  tile m: 1", "key constants: 'tile m' does not match"),
        ("  TILE_M: 128", "  TILE_M: 128\n  1: 1", "key constants: 1 is not of type 'string'"),
        ("  S:\n", "  ../S:\n", "key ladders: '../S' does not match"),
        ("      S0: {", "      S_0: {", "key ladders.S.rungs: 'S_0' does not match"),
        ("steps: [S0>S1, S2>S3]", "steps: [S0>S1, S0>S1, S2>S3]", "has non-unique elements"),
        ("path: [S2, S3]", "path: []", "key ladders.S.path: "),
    ],
)  # fmt: skip
def test_names_and_levels_in_an_experiments_file_have_their_form(tmp_path, old, new, words):
    assert old in GEMM
    (tmp_path / "gemm.yaml").write_text(GEMM.replace(old, new))
    with pytest.raises(RungsError, match=words) as error:
        variants.load_experiment("gemm", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!float abc\n", "is not what its tag or form says .*abc"),
        ("a: !!int abc\n", "is not what its tag or form says"),
        ("a: !!bool abc\n", "is not what its tag or form says"),
        ("a: !!timestamp abc\n", "is not what its tag or form says"),
        ("a: 2020-13-45\n", "is not what its tag or form says .month must be in"),
        ("a: " + "9" * 5000 + "\n", "is not what its tag or form says"),
        ("a: 1\na: 2\n", "key 'a' is given twice"),
        ("a: !!python/object/apply:os.system [true]\n", "not readable YAML"),
        ("a: [1\n", "not readable YAML"),
        ("\x00", "not readable YAML"),
    ],
)
def test_yaml_is_safe_and_has_each_key_once(tmp_path, text, words):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(RungsError, match=words):
        schemas.read_yaml(path, "config")


HOLDS_ITSELF: dict = {}
HOLDS_ITSELF["x"] = HOLDS_ITSELF  # `measure: &a {x: *a}` in YAML


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"axes": {"mn": [512], "k": [256.0]}}, "256.0 is not of type 'integer'"),
        ({"axes": {"mn": [512], "k": [10**19]}}, "greater than the maximum of 1048576"),
        ({"axes": {"mn": [512], "k": [256, 256]}}, "non-unique"),
        ({"measure": {**CONFIG["measure"], "target_percent": math.nan}}, "nan is not of type 'number'"),
        ({"measure": {**CONFIG["measure"], "sample_us": math.inf}}, "inf is not of type 'number'"),
        ({"measure": {**CONFIG["measure"], "seed": True}}, "True is not of type 'integer'"),
        ({"measure": {**CONFIG["measure"], "round_min": 3}}, "there is no key 'round_min'; choose of target_percent, rounds_min"),
        ({"measure": {**CONFIG["measure"], "rounds_min": 500}}, "rounds_max 200 is below rounds_min 500: raise it"),
        ({"ladders": "A,B"}, "'A,B' is one word: write `ladders=[A,B]` for several"),
        ({"ladders": ["T"], "arch": "sm_80"}, "nothing is left to do on sm_80: of gemm and gemm_tuned, none is for this architecture and has a chosen ladder"),
        ({"ladders": ["Q"]}, "there is no ladder 'Q'; choose of A, B, S"),
        ({"experiments": ["nope"]}, "there is no experiment 'nope'; choose of "),
        ({"device": "a b"}, "'a b' does not match"),
        ({"recorded": ["../x"]}, "'../x' does not match"),
        ({"recorded": ["9" * 5000]}, "is too long"),
        ({"device": "9" * 5000}, "is too long"),
        ({"device": 10**5000}, "config holds itself, hundreds of levels or a number of thousands of digits"),
        ({"measure": {**CONFIG["measure"], "sample_us": 10**5000}}, "a number of thousands of digits"),
        ({"measure": {**CONFIG["measure"], "seed": 2**63}}, "greater than the maximum"),
        ({10**5000: None}, "config holds itself, hundreds of levels or a number of thousands of digits"),
        ({"measure": HOLDS_ITSELF}, "a value holds itself or hundreds of levels: write it out flat"),
        ({"recorded": HOLDS_ITSELF}, "key recorded: this is no list of names"),
        ({"device": None}, "key device: it has no value: give it one, or leave it out"),
        ({"clock": {**CONFIG["clock"], "mhz": ""}}, "'' is nothing that it may be (auto or a supported SM clock in MHz)"),
        ({"profile": {**CONFIG["profile"], "ncu": ""}}, "'' should be non-empty (auto or the path of ncu)"),
        ({"profile": {"ncu": "auto"}}, "key profile.enabled: neither you nor "),
        ({"nothing": None}, "there is no key 'nothing'"),
    ],
)  # fmt: skip
def test_a_config_that_means_nothing_is_one_sentence(monkeypatch, change, sentence):
    monkeypatch.setattr(settings.clock, "gpus", list)
    with pytest.raises(RungsError) as error:
        settings.resolve({**CONFIG, **change})
    assert sentence in str(error.value)


def test_a_config_has_the_checkouts_own_where_it_says_nothing():
    whole = settings.over_defaults({"ladders": "B", "measure": {"rounds_min": 50}}, {}, module=True)
    assert whole == {**CONFIG, "ladders": "B", "measure": {**CONFIG["measure"], "rounds_min": 50}}
    assert settings.over_defaults({}, {"measure": {}, "axes": {}}, module=False) == CONFIG


@pytest.mark.parametrize(
    ("config", "given", "sentence"),
    [
        (5, {}, "config: this is no mapping: write keys and values, as in config/config.yaml."),
        ([], {}, "config: this is no mapping"),
        ({"samples": 3}, {}, "there is no key 'samples': give the module of rungs keys of its own, as `config: config[\"rungs\"]`."),
        ({1: 2}, {}, "there is no key 1: give the module"),
        ({}, {"device": {}}, "config, key device: {} changes nothing: give it a value, or leave it out."),
        ({}, {"measure": {"factorial": {"rounds_min": {}}}}, "key measure.factorial.rounds_min: {} changes nothing"),
    ],
)  # fmt: skip
def test_a_config_over_the_defaults_that_means_nothing_is_one_sentence(config, given, sentence):
    with pytest.raises(RungsError) as error:
        settings.over_defaults(config, given, module=True)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [("device: [", "is not readable YAML"), ("- device", "config.yaml: this is no mapping"), ("device: auto", None)],
)
def test_a_checkout_whose_own_config_is_damaged_is_one_sentence(monkeypatch, tmp_path, own, sentence):
    monkeypatch.setattr(settings, "OWN_CONFIG", tmp_path / "config.yaml")
    settings.OWN_CONFIG.write_text(own)
    with pytest.raises(RungsError, match=sentence or "key arch: neither you nor .*config.yaml says it: add it there"):
        settings.resolve(settings.over_defaults({}, {}, module=False))


def test_a_config_that_holds_itself_as_the_checkouts_own_does_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "OWN_CONFIG", tmp_path / "config.yaml")
    settings.OWN_CONFIG.write_text("measure: &a {x: *a}")
    with pytest.raises(RungsError, match="a value holds itself or hundreds of levels"):
        settings.over_defaults({"measure": HOLDS_ITSELF}, {}, module=False)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("007", 7), ("0256", 256), ("0.5", 0.5), ("-3", -3), ("true", True), ("False", False), ("hot", "hot"), ("", ""), ("1e3", "1e3")],
)  # fmt: skip
def test_what_the_command_line_gives_as_text(given, meant):
    assert settings._as_numbers({"a": [given]}) == {"a": [meant]}


def test_a_checkout_whose_path_is_code_to_a_shell_is_refused(monkeypatch, tmp_path):
    odd = tmp_path / 'a"b'
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(RungsError, match="in its path, which shells and compilers take for code: move it elsewhere"):
        settings.resolve(CONFIG)


def shop(monkeypatch, tmp_path, **files):
    """A folder of experiments in the place of config/experiments, read by nobody yet."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    (tmp_path / "devices").symlink_to(variants.CONFIG / "devices")
    monkeypatch.setattr(variants, "CONFIG", tmp_path)
    load = variants.load_experiment.__wrapped__
    monkeypatch.setattr(variants, "load_experiment", lambda name: load(name, folder))
    monkeypatch.setattr(settings, "load_experiment", lambda name: load(name, folder))
    for name in ("settings", "build"):
        monkeypatch.setattr(f"rungs.{name}.readable_experiments", variants.readable_experiments.__wrapped__)
    monkeypatch.setattr(settings.clock, "gpus", list)
    return folder


WANTED = {**CONFIG, "experiments": ["gemm"], "arch": "sm_90a", "recorded": []}


def test_two_experiments_with_one_variant_name_are_refused(monkeypatch, tmp_path):
    mine = GEMM.replace("name: gemm\n", "name: my_gemm\n").replace("TILE_K: 32", "TILE_K: 64")
    folder = shop(monkeypatch, tmp_path, gemm=GEMM, my_gemm=mine)
    for chosen in (["gemm"], ["my_gemm"], ["gemm", "my_gemm"]):
        with pytest.raises(RungsError, match="Experiments gemm and my_gemm both have a variant abl_L0_R0_bl0_s1_sw0"):
            settings.resolve({**WANTED, "experiments": chosen})
    with pytest.raises(
        RungsError, match=r"gemm and my_gemm both have 'B3', so it does not say which.*another variant_name"
    ):
        build.find_variant("B3")
    (folder / "my_gemm.yaml").write_text(mine.replace("abl_", "mine_"))
    assert list(settings.resolve(WANTED).experiments) == ["gemm"]
    shared = yaml.safe_dump(
        {**widened("abl_L{load}_R{read}_bl{b_layout}_s{stages}_sw{swizzle}[_x{extra}]"), "name": "my_gemm"}
    )
    (folder / "my_gemm.yaml").write_text(shared)
    with pytest.raises(RungsError, match="Experiments gemm and my_gemm both have a variant abl_L0_R0_bl0_s1_sw0"):
        settings.resolve(WANTED)
    (folder / "my_gemm.yaml").write_text(mine.replace("abl_", "mine_"))
    with pytest.raises(RungsError, match="say abl_L1_R1_bl1_s2_sw1 or mine_L1_R1_bl1_s2_sw1"):
        build.find_variant("B3")
    assert build.find_variant("mine_L1_R1_bl1_s2_sw1")[0].name == "my_gemm"


def test_a_damaged_experiment_stops_only_the_run_that_chose_it(monkeypatch, tmp_path):
    folder = shop(monkeypatch, tmp_path, gemm=GEMM, other="name: [")
    (folder / ".#gemm.yaml").symlink_to("nobody@nowhere.1")
    assert variants.experiment_names() == ["gemm", "other"]
    run = settings.resolve(WANTED)
    assert sum("experiment other is not used here, and its file cannot be read" in note for note in run.notes) == 1
    assert build.find_variant("B3")[0].name == "gemm"
    for call in (lambda: settings.resolve({**WANTED, "experiments": ["other"]}), lambda: build.find_variant("T7")):
        with pytest.raises(RungsError, match=r"other\.yaml is not readable YAML"):
            call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experiment": "my_gemm"}, "is of experiment my_gemm, not of gemm: delete its folder and build"),
        (
            {"macros": {"TILE_K": 64}},
            "was built with TILE_K=64 where experiment gemm says 32: delete its folder and build",
        ),
        ({"macros": {"MORE": 1}}, "was built with MORE=1 where experiment gemm says nothing"),
        ({}, "is not the binary of"),
    ],
)
def test_a_binary_of_another_experiment_or_of_other_macros_is_refused(tmp_path, change, words):
    variant, ok = EXPERIMENT.variant("B3"), {"status": "ok", "reason": "", "arch": "sm_90a", "kind": "build"}
    macros = {**EXPERIMENT.macros(variant, variants.load_device("sm_90a")), **change.pop("macros", {})}
    filled = dict.fromkeys(("build_id", "source_hash", "cubin_sha256"), "x") | {"threads": 256, "smem_dynamic_bytes": 0}
    empty = {"sources": {}, "flags": [], "compiler": {}, "ptxas": {}, "ptx_sha256": "x", "code_hash": "x"}
    path = tmp_path / "m.json"
    manifest = {**ok, **filled, **empty, "experiment": "gemm", "variant": variant.name, "macros": macros, **change}
    path.write_text(json.dumps(manifest))
    path.with_suffix(".cubin").write_bytes(b"")
    with pytest.raises(RungsError, match=words):
        binary.load_binary(EXPERIMENT, path)


def test_a_device_without_a_pin_is_one_sentence():
    device = variants.load_device("sm_90a")
    with pytest.raises(RungsError, match=r"sm_90a\.yaml pins no CTAs per SM for other: add it under ctas_per_sm"):
        device.pinned("other")


def test_an_experiment_pins_its_ctas_itself_where_the_device_names_none(monkeypatch):
    """Another experiment's file then changes no device's, whose limits are params of every measurement."""
    own = replace(EXPERIMENT, name="own", ctas_per_sm=3)
    monkeypatch.setattr(variants, "experiment_names", lambda: ["own"])
    monkeypatch.setattr(variants, "load_experiment", {"own": own}.__getitem__)
    device = variants.load_device("sm_90a")
    assert own.macros(own.variant("B1"), device)["CTAS_PER_SM"] == 3
    assert replace(device, ctas_per_sm={"own": 1}).pinned("own") == 1


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({}, "is no manifest of a build, sweep, profile, emulate, sanitize or mutations"),
        ({"kind": "sweep"}, "is a required property"),
        ({"kind": "build", "variant": "v", "arch": "sm_90a", "status": "ok", "reason": ""}, "is a required property"),
        ({"kind": "profile", "run_id": 7}, "required property"),
    ],
)
def test_a_manifest_that_lacks_what_is_read_from_it_is_one_sentence(tmp_path, manifest, words):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(manifest))
    with pytest.raises(RungsError, match=words):
        schemas.read_manifest(path)
