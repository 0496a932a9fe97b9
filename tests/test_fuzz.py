"""Any config, CSV, PTX and ncu page gives a result or one sentence: never another exception, never a hang.

Short and the same each time by default; RUNGS_FUZZ=<number of inputs for each test> looks further, at others each time:

    RUNGS_FUZZ=100000 python -m pytest tests/test_fuzz.py
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rungs import clock, mutants, profile, schemas
from rungs import settings as rungs_settings
from rungs.emulator import mutations, parser
from rungs.emulator.parser import EmulationError
from rungs.errors import RungsError
from rungs.files import ROOT

WANTED = int(os.environ.get("RUNGS_FUZZ", "0"))
LONGEST_S = 5


def fuzz(inputs: int, *strategies: Any) -> Callable[[Any], Any]:
    """`given` with so many inputs, always the same ones, or RUNGS_FUZZ others."""
    how = settings(
        max_examples=WANTED or inputs,
        derandomize=not WANTED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: how(given(*strategies)(test))


@contextlib.contextmanager
def told(kind: type[RungsError] = RungsError) -> Iterator[None]:
    """What stands in it ends soon, well or with one sentence of that kind."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    except kind as error:
        said = str(error)
        assert said.endswith(".") and "\n" not in said and len(said) < 4000, said
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edited(base: str, words: list[str]) -> st.SearchStrategy[str]:
    """The text with up to six places cut, doubled or replaced: by one of the words or by anything."""
    place = st.integers(0, len(base))
    new = st.one_of(st.sampled_from(["", *words]), st.text(max_size=8))
    edit = st.tuples(place, st.integers(0, 40), new, st.booleans())

    def apply(edits: list[tuple[int, int, str, bool]]) -> str:
        text = base
        for at, length, replacement, double in edits:
            kept = text[at : at + length] if double else ""
            text = text[:at] + kept + replacement + kept + text[at + length :]
        return text

    return st.lists(edit, min_size=1, max_size=6).map(apply)


# ---- the config ------------------------------------------------------------------------------------------------------

CONFIG = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
WORDS = [
    *(
        "auto",
        "all",
        "emulator",
        "0",
        "h200",
        "sm_80",
        "sm_90a",
        "pip",
        "system",
        "gemm",
        "smem_read",
        "B",
        "A",
        "quick",
    ),
    *("full", "hot", "cold", "lock", "observe", "true", "1e999", "9" * 5000, "-1", "../..", "", "\n", "\0", "\ud800"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 11000),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from([datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1), float("1e300")]),
    st.just(5000).map(lambda digits: 10**digits),  # which Python refuses to print
)


def nested(levels: int) -> Any:
    """A list in a list ...; with no levels one that holds itself, as YAML can write it."""
    inner: Any = []
    if not levels:
        inner.append(inner)
    for _ in range(levels):
        inner = [inner]
    return inner


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.sampled_from([0, 3000]).map(nested),
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(sorted(CONFIG)), SCALARS), inner, max_size=3),
        st.sets(st.sampled_from(WORDS), max_size=2),
    ),
    max_leaves=6,
)
PLACES = [(key,) for key in (*CONFIG, "axes", "odd")] + [
    (*outer, key)
    for outer, keys in (
        (("measure",), (*CONFIG["measure"], "odd")),
        (("measure", "factorial"), CONFIG["measure"]["factorial"]),
        (("clock",), CONFIG["clock"]),
        (("profile",), CONFIG["profile"]),
        (("sanitize",), CONFIG["sanitize"]),
        (("axes",), ("mn", "k")),
    )
    for key in keys
]
LIKELY = st.one_of(
    VALUES,
    st.sampled_from(WORDS),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.lists(st.one_of(st.integers(1, 9000), st.integers(1, 9000).map(str)), min_size=1, max_size=3),
)


def changed(edits: list[tuple[tuple[str, ...], Any, bool]]) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for place, value, gone in edits:
        inner: Any = config
        for key in place[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            if gone:
                inner.pop(place[-1], None)
            else:
                inner[place[-1]] = value
    return config


CONFIGS = st.one_of(
    st.lists(
        st.tuples(st.sampled_from(PLACES), LIKELY, st.sampled_from([False] * 9 + [True])), min_size=1, max_size=3
    ).map(changed),
    st.dictionaries(st.one_of(st.sampled_from(sorted(CONFIG)), SCALARS), VALUES, max_size=3),
)


@fuzz(150, CONFIGS, st.booleans())
def test_any_config_is_a_run_or_one_sentence(config, gpu):
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            only = clock.Gpu(0, "NVIDIA H200", "h200", "GPU-1", "9.0", "sm_90a", "580.1", 1 << 37, 700.0)
            patch.setattr(clock, "gpus", lambda: [only])
        with told():
            run = rungs_settings.resolve(config)
            for name in run.experiments:
                for variant in run.variants(name)[:1]:
                    run.shapes_as_json(name, variant)
                    run.settings_as_json(name, variant)


# ---- CSVs ------------------------------------------------------------------------------------------------------------

KINDS = sorted(path.name.split(".")[0] for path in (schemas.SCHEMAS / "csv").glob("*.yaml"))
KINDS += ["sweep@tile,stages", "points@warps"]
CELLS = [
    *(
        "1",
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "9" * 400,
        str(2**63),
        str(2**62),
        "True",
        "False",
        "",
        "ok",
    ),
    *('"', '""', ",", "\n", "\r", "\r\n", "\0", " 1", "1_0", "\uff10", "\ufeff", "é", "0x10", "1e5", "NA", "<NA>"),
]


@functools.cache
def sample(kind: str) -> str:
    """Two rows that the schema allows."""
    declared = schemas.columns(kind)
    texts = {"string": "x", "integer": "3", "number": "2.5", "boolean": "True"}
    rows = []
    for number in (1, 2):
        row = {name: rule["enum"][0] if "enum" in rule else texts[rule["type"]] for name, rule in declared.items()}
        for name in schemas.csv_schema(kind).get("key", ()):
            if "enum" not in declared[name]:
                row[name] = str(number)
        rows.append(",".join(row.values()))
    return "\n".join([",".join(declared), *rows, ""])


@pytest.mark.parametrize("kind", ["sweep", "coverage", "emulate"])
def test_the_samples_are_read(kind):
    assert len(schemas.parse_csv(kind, sample(kind), "x.csv")) == 2


TABLES = st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), edited(sample(kind), CELLS)))
ODD_TABLES = st.tuples(st.sampled_from(KINDS), st.one_of(st.text(), st.text(',"\n\r1a', max_size=30)))


@fuzz(150, st.one_of(TABLES, ODD_TABLES))
def test_any_text_is_a_csv_or_one_sentence(table):
    with told():
        schemas.parse_csv(*table, "x.csv")


@fuzz(
    60,
    st.sampled_from(KINDS),
    st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "replace"))),
)
def test_any_file_is_a_csv_or_one_sentence(tmp_path_factory, kind, data):
    path = tmp_path_factory.getbasetemp() / "x.csv"
    path.write_bytes(data)
    with told():
        schemas.read_csv(kind, path)


# ---- PTX -------------------------------------------------------------------------------------------------------------

PTX = r"""
//
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 bytes[];
.global .align 4 .b8 unused[4] = {1, 2, 3, 4};
.visible .entry k(
	.param .u64 .ptr .align 1 k_param_0,
	.param .align 64 .b8 k_param_1[128],
	.param .u32 k_param_2
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .f32 	%f<5>;
	.reg .b64 	%rd<6>;
	.shared .align 8 .b8 bar[16];
	.loc	1 10 5
	ld.param.b64 	%rd1, [k_param_0];
	.loc	2 20 3, function_name $L__info_string0, inlined_at 1 10 5
	mov.u32 	%r1, %tid.x;
	mov.b32 	%r2, bytes;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_2;
	// begin inline asm
	{
	.reg .pred P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared::cta.b64 P1, [%r2], %r1;
	@!P1 bra LAB_WAIT;
	}
	// end inline asm
$L__BB0_2:
	cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2+16], [k_param_1, {%r1, %r3}], [%r2];
	mov.f32 	%f1, 0f3F800000;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
	setp.lt.and.f64 	%p1|%p2, %f1, 0.5, !%p1;
	st.global.v4.b32 	[%rd1+-16], {%r1, -1, 0x10U, 0d3FF0000000000000};
	ret;
}
.file	1 "kernels/gemm/../gemm.cu"
.file	2 "kernels/ptx.cuh"
"""
TOKENS = [
    *(
        "{",
        "}",
        "[",
        "]",
        ";",
        ",",
        "<",
        ">",
        "!",
        "|",
        "@",
        '"',
        "//",
        "/*",
        "*/",
        ":",
        "+",
        "%",
        ".",
        "\n",
        "\r",
        "\0",
    ),
    *(
        ".reg",
        ".b32",
        ".shared",
        ".align",
        ".align 0",
        ".loc",
        ".param",
        ".entry",
        "inlined_at",
        "<1000000000000>",
        "08",
    ),
    *(
        "9" * 5000,
        "0x",
        "1e9",
        "-",
        "--",
        "{" * 3000,
        "[" * 3000,
        "!" * 3000,
        "}" * 3000,
        "|" * 3000,
        "]",
        "_",
        "P1",
        "\u0661",
    ),
    *(" " * 20000, "\n" * 20000, "a" * 20000, "/", "a:" * 3000, ".x" * 3000, ", 1" * 3000, ".loc 1 1 1\n" * 300),
]


@pytest.fixture
def ptx(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "x.ptx"


def test_the_sample_is_parsed():
    assert [found.opcode for found in parser.parse(PTX, "k").code][:3] == ["ld", "mov", "mov"]


@fuzz(150, st.one_of(edited(PTX, TOKENS), edited(PTX.replace("\n", "\r\n"), TOKENS), st.text()))
def test_any_text_is_a_kernel_or_one_sentence(text):
    parser.parse.cache_clear()
    with told(EmulationError):
        parser.parse(text, "k")


@fuzz(30, st.one_of(st.binary(), edited(PTX, TOKENS).map(lambda text: text.encode("utf-16", "replace"))))
def test_any_file_is_a_kernel_or_one_sentence(ptx, data):
    ptx.write_bytes(data)
    with told(EmulationError):
        parser.load(ptx, "k")


# ---- ncu's page ------------------------------------------------------------------------------------------------------

PAGE = """==PROF== Connected to process 7 (/usr/bin/python3.11)
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 9 passes
"ID","Kernel Name","Context","sm__cycles_elapsed.max","dram__bytes.sum"
"","","","cycle","byte"
"0","gemm(const __nv_bfloat16 *, int)","1","1,234,567","12,345.75 (1; 2; 3)"
"1","void ns::other<int, 2>(int)","1","5","n/a"
"""
SAID = """==ERROR== The application returned an error code (1).
==WARNING== No kernels were profiled.
Available Kernels:
1. other
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission
==ERROR== Failed to profile "gemm": a driver resource was unavailable.
rungs: something.
"""
PIECES = [
    *(
        '"',
        '""',
        ",",
        "\n",
        "\r",
        "\x0b",
        "\u2028",
        "\0",
        "==",
        "Kernel Name",
        '"Kernel Name"',
        "__",
        "ID",
        "(",
        "<",
        "::",
    ),
    *("nan", "inf", "1e999", "9" * 400, "x" * 140000, "1,2,3", "\ud800", "٣", "n/a", '"\n"', '"ID","Kernel Name"\n'),
]


@fuzz(150, st.one_of(edited(PAGE, PIECES), st.text(), st.text('",\n=_KID Kernl Nam1', max_size=60)))
def test_any_page_is_counters_or_one_sentence(page):
    with told():
        counters = profile.parse(page)
        assert all(isinstance(name, str) and "__" in metric for name, metric, _, _ in counters)


@fuzz(80, st.one_of(edited(SAID, PIECES), st.text()))
def test_anything_that_ncu_says_is_diagnosed(text):
    with told():
        found = profile.diagnose(text, "gemm")
        assert found is None or all(isinstance(word, str) and "\n" not in word for word in found), found


# ---- what `sanitize-mutations` left of an earlier run ----------------------------------------------------------------

KERNELS = mutations.ALL[:2]
MUTANT = {
    "mutation": mutants.NONE,
    "variant": KERNELS[0],
    "place": 0,
    "cubin": f"build/{KERNELS[0]}/none-0.cubin",
    "cubin_sha256": "",
    "ptx_sha256": "p",
    "not_built": "it is not",
    "emulator": {"status": "ok", "finding": "", "source": ""},
}
BINARY = {"variant": "", "build_id": "b", "source_hash": "s", "cubin_sha256": "c"}
BUILT = {
    "arch": "sm_90a",
    "places": 0,
    "modules": mutants.modules(),
    "binaries": {name: BINARY | {"variant": name} for name in KERNELS},
    "mutants": [MUTANT],
}
RAN = json.dumps([["none", "0", "c", "memcheck", "1", "20.0"], mutants.row_of(MUTANT, "memcheck", status="ok")]) + "\n"
AWAY = ["../../x", "/etc/passwd", "build/../x.cubin", "build/a/b.cubin\n", "memcheck", "none"]


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in nested dictionaries and lists."""
    yield at
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*at, key))


def damaged(value: Any) -> st.SearchStrategy[Any]:
    """The same JSON with a value somewhere in it replaced or gone."""
    new = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(AWAY))
    nests = st.one_of(new, st.lists(new, max_size=2), st.dictionaries(st.text(max_size=4), new, max_size=2))

    def apply(edit: tuple[tuple[Any, ...], Any, bool]) -> Any:
        (*outer, key), other, gone = edit
        whole = copy.deepcopy(value)
        inner = functools.reduce(lambda found, step: found[step], outer, whole)
        if gone:
            del inner[key]
        else:
            inner[key] = other
        return whole

    at = st.sampled_from([place for place in places_in(value) if place])
    return st.tuples(at, nests, st.sampled_from([False, False, True])).map(apply)


class Anew(Exception):
    pass


def anew(which: str) -> None:
    raise Anew(which)


@fuzz(80, damaged(BUILT))
def test_any_built_json_is_taken_or_made_anew_or_one_sentence(tmp_path_factory, built):
    folder = tmp_path_factory.getbasetemp() / "mutants"
    folder.mkdir(exist_ok=True)
    (folder / "built.json").write_text(json.dumps(built))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "ALL", KERNELS)
        patch.setattr(mutants.build, "source_hashes", lambda kernel: {})
        patch.setattr(mutants, "sha256_json", lambda value: "s")
        patch.setattr(mutants.build, "find_toolchain", anew)
        with told(), contextlib.suppress(Anew):
            there = mutants.prepare(folder, "sm_90a", "pip", 0)
            assert all((folder / mutant["cubin"]).resolve().is_relative_to(folder) for mutant in there["mutants"])
            assert [mutants.emulated(mutant)["status"] for mutant in there["mutants"]]


@fuzz(80, edited(RAN * 2, ["null", "[", "]", "}", "1e999", "NaN", "9" * 5000, "\n", '"ok"', '"found"', "[" * 3000]))
def test_any_runs_are_rows_or_run_again(text):
    for row in itertools.chain(*mutants.ran(text).values()):
        assert row["tool"] in schemas.columns("mutations")["tool"]["enum"] and type(row["place"]) is int, row
