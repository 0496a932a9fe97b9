"""tma_latency: what is refused, what a chain is, its binaries' evidence, and every variant in the emulator."""

from __future__ import annotations

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from binaries import built, inspected, manifest_of
from rungs import tables
from rungs.answers import tma_latency as answers
from rungs.emulator.parser import EmulationError
from rungs.errors import Refused, RungsError
from rungs.files import ROOT
from rungs.inspect import disassemble, executed, parse_sass, rules_of
from rungs.plan import InGlobal, TensorMap
from rungs.results import ResultsSet, write_recorded
from rungs.variants import Variant, load_device, load_experiment
from rungs.workloads import tma_latency
from workload_runs import emulate

LATENCY, ARCH = load_experiment("tma_latency"), "sm_90a"
H200 = load_device(ARCH)
RUNGS = {rung: variant for ladder in LATENCY.ladders.values() for rung, variant in ladder.rungs.items()}
VARIANTS = sorted(set(RUNGS.values()), key=lambda variant: variant.name)
BASE = tuple(LATENCY.base.values())
ADDRESSES = dict.fromkeys(("chain", "flush", "last", "cycles"), 1 << 30)


def plan(rung: str, point: tuple[int, ...] = BASE):
    return tma_latency.plan(LATENCY, RUNGS[rung], H200, point, ADDRESSES, 132)


@pytest.mark.parametrize(
    ("rung", "point", "sentence"),
    [
        (
            "TL2",
            (24, 8192, 0),
            "bytes=24 is not a positive multiple of the 16 bytes that the copy engine moves at once: choose a multiple of 16.",
        ),
        (
            "TL3",
            (2048, 8192, 0),
            "bytes=2048 is above the 1024 that lie between two nodes at the least: choose 1024 or less.",
        ),
        ("TL0", (64, 8192, 0), "bytes=64 is more than LDG and cp.async move at once: choose 16."),
        ("TL3", (192, 8192, 0), "bytes=192 is no box of whole lines: choose a multiple of 128, or less than 128."),
        (
            "TL1",
            (16, 100, 0),
            "footprint_kib=100 is not a power of two from 16 on, over which nodes can be spread evenly: choose one.",
        ),
        ("TL1", (16, 1 << 23, 0), "footprint_kib=8388608 is above 4 GiB: choose 4194304 or less."),
        ("TL1", (16, 8192, 2), "cold=2 is neither 0 (the data lie in L2) nor 1 (in DRAM): choose one of the two."),
    ],
)
def test_a_point_that_cannot_be_is_one_sentence(rung, point, sentence):
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        tma_latency.check(LATENCY, RUNGS[rung], H200, point)
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}$"):
        plan(rung, point)


def test_a_chip_without_the_copy_engine_is_refused():
    with pytest.raises(Refused) as refused:
        tma_latency.check(LATENCY, RUNGS["TL0"], load_device("sm_80"), BASE)
    assert str(refused.value) == "lat_w0_l0_d0_i0: tma_latency needs one of sm_90a, sm_100a, sm_120, not sm_80."
    assert refused.value.status == "not on this chip"


@pytest.mark.parametrize("levels", [{"descriptor": 1}, {"what": 2}, {"load": 0, "issue": 1}])
def test_levels_that_do_not_go_together(levels):
    with pytest.raises(RungsError, match="requires"):
        LATENCY.assign(dict(RUNGS["TL2"].levels) | levels)


def test_every_point_of_the_sweeps_can_be_launched():
    total = 0
    for variant in VARIANTS:
        points = LATENCY.shapes(variant)
        total += len(points)
        assert BASE in points and any(cold for *_, cold in points)
        for point in points:
            found = tma_latency.plan(LATENCY, variant, H200, point, ADDRESSES, 132)
            assert (found.grid, found.block, found.cluster) == ((1, 1, 1), (1024, 1, 1), (1, 1, 1))
            nodes, stride, size, flush = (value for value, _ in found.params[-4:])
            assert nodes % 16 == 0 and size <= stride * 128 and nodes * stride * 128 == point[1] * 1024
            assert flush == (256 << 20) * point[2]
            assert tma_latency.ctas_per_sm(LATENCY, variant, H200, point) is None
    assert (len(VARIANTS), total) == (15, 134)


def test_the_flush_is_more_than_twice_any_l2():
    """H200 60 MB (H100 50 MB), B200 126 MB, RTX 5090 96 MB: NVIDIA's architecture papers."""
    assert tma_latency.FLUSH > 2 * 126e6


@pytest.mark.parametrize("footprint", [16, 256, 8192])
def test_a_chain_is_one_ring_through_every_node(footprint):
    point = (16, footprint, 0)
    nodes, stride = tma_latency.nodes(point)
    chain = tma_latency.operands(LATENCY, RUNGS["TL0"], H200, point, None)["chain"].make(np.random.default_rng(5))
    line, seen = 0, []
    for _ in range(nodes):
        seen.append(line)
        line = int(chain[line * 32])
    assert line == 0 and sorted(seen) == [node * stride for node in range(nodes)]
    jumps = np.diff(seen)
    assert len(set(jumps.tolist())) > nodes // 4  # no stride that a prefetcher could follow
    inputs = {"chain": chain}
    want = tma_latency.expected(LATENCY, RUNGS["TL3"], H200, point, None, inputs)["last"]
    assert want.tolist() == [seen[-1]] and want.dtype == np.int32
    assert tma_latency.expected(LATENCY, RUNGS["TF0"], H200, point, None, inputs)["last"].tolist() == [seen[1]]


def test_maps_and_units():
    at = (512, 8192, 0)
    (map,) = [p for p in plan("TL3", at).params if isinstance(p, TensorMap)]
    assert (map.dims, map.strides, map.box) == ((32, 65536), (128,), (32, 4))
    assert tma_latency.tensor_map((16, 8192, 0), 0).box == (4, 1)
    assert isinstance(plan("TF2").params[0], InGlobal)
    units = [tma_latency.work(LATENCY, RUNGS[rung], H200, BASE, None).units for rung in ("TL0", "TQ0", "TF0")]
    assert units == [511, 512, 1]


# ---- emulated --------------------------------------------------------------------------------------------------------


@functools.cache
def build_all() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda variant: built(variant.name, ARCH), VARIANTS))


def ptx(variant: Variant) -> Path:
    build_all()
    return built(variant.name, ARCH).with_suffix(".ptx")


KINDS = {0: "ldg", 1: "ldgsts", 2: "tma_load", 3: "tma_load"}


def counted(variant: Variant, point: tuple[int, ...]) -> dict[str, int]:
    """A pass to warm up and one that is timed; the flush is 16 bytes a thread, a warp at a time."""
    nodes, what, load = tma_latency.nodes(point)[0], variant.level("what"), variant.level("load")
    loads = {0: 2 * nodes - 1, 1: 2 * nodes, 2: 1}[what]
    flush = min(point[1] * 1024, 256 << 20) // 512 * point[2] + (nodes if what == 2 else 0)
    counts = {KINDS[load]: loads, "barrier": 64}
    counts["ldg"] = counts.get("ldg", 0) + flush
    if load >= 2:
        counts["bytes_tma_load"] = loads * point[0]
    if load:
        counts["lds"] = loads
    return counts


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_right_and_counts_what_it_should(variant):
    points = tma_latency.emulated_points(LATENCY, variant, H200)
    for number, point in enumerate(points):
        how = [{"race": True}, {"delivery": "early"}, {"schedule": "random"}, {}][number]
        result, outputs, wanted = emulate(LATENCY, variant, ptx(variant), point, **how)
        assert not result.findings
        np.testing.assert_array_equal(outputs["last"], wanted["last"])
        counts = counted(variant, point)
        assert {name: result.counts.total(name) for name in counts} == counts


WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 (p\S*), \[(\S+)\], (\S+);"


@pytest.mark.parametrize(
    ("rung", "pattern", "replacement"),
    [
        ("TL1", r"cp\.async\.wait_group 0;", ""),
        ("TL1", r"cp\.async\.commit_group;", ""),
        ("TL2", WAIT, r"setp.eq.u32 \1, 0, 0;"),
        ("TL3", WAIT, r"setp.eq.u32 \1, 0, 0;"),
        ("TQ3", WAIT, r"setp.eq.u32 \1, 0, 0;"),
        ("TF0", WAIT, r"setp.eq.u32 \1, 0, 0;"),
        ("TL2", r"fence\.mbarrier_init\S+;", ""),
        ("TQ2", r"(cp\.async\.bulk\.shared[^;]*;)", ""),
    ],
)
def test_what_is_broken_is_caught(rung, pattern, replacement, tmp_path):
    variant = RUNGS[rung]
    changed, count = re.subn(pattern, replacement, ptx(variant).read_text())
    assert count
    (tmp_path / "k.ptx").write_text(changed)
    point = tma_latency.emulated_points(LATENCY, variant, H200)[0]
    try:
        result, outputs, wanted = emulate(LATENCY, variant, tmp_path / "k.ptx", point, race=True)
    except EmulationError:
        return
    assert result.findings or outputs["last"] != wanted["last"]


# ---- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "rungs"), [(ARCH, list(RUNGS)), ("sm_100a", ["TQI31"]), ("sm_120", ["TF2"])])
def test_the_binaries_have_their_evidence(arch, rungs):
    variants = {RUNGS[rung] for rung in rungs}
    build_all()
    for variant, frame in inspected(variants, arch).items():
        manifest = manifest_of(variant.name, arch)
        assert (manifest["status"], manifest["reason"], manifest["warnings"]) == ("ok", "", [])
        assert manifest["ptxas"]["stack_bytes"] == manifest["ptxas"]["spill_store_bytes"] == 0
        assert frame[frame["status"] != "ok"].empty, list(frame[frame["status"] != "ok"]["reason"])
        assert (frame["kind"] == "evidence").sum() == len(rules_of(variant)) >= 7


@pytest.mark.parametrize(
    ("rung", "opcode", "tails"),
    [
        ("TQ0", "LDG.E.LTC128B.STRONG.GPU", 0),
        ("TQ1", "LDGSTS.E.BYPASS.LTC128B.128", 0),
        ("TQ2", "UBLKCP.S.G", 0),
        ("TQ3", "UTMALDG.2D", 0),
        ("TQI31", "UTMALDG.2D", 16),
    ],
)
def test_sixteen_loads_and_no_wait_stand_between_the_two_readings_of_the_clock(rung, opcode, tails):
    """Of threadIdx.x == 0 each is a loop over the active lanes, which elect.sync spares."""
    build_all()
    lines = executed(parse_sass(disassemble(built(RUNGS[rung].name, ARCH).with_suffix(".cubin"), "pip")))
    clocks = [i for i, line in enumerate(lines) if "SR_CLOCKLO" in line.operands]
    between = [line.opcode for line in lines[clocks[-2] + 1 : clocks[-1]]]
    assert between.count(opcode) == 16
    assert between.count("BRA.U.ANY") == tails
    assert not [name for name in between if name.startswith(("SYNCS", "LDS", "DEPBAR", "BAR"))] or rung == "TQ1"


def test_what_a_new_map_costs_the_host_stands_where_the_sweep_measured_it(tmp_path):
    recorded = ROOT / "results" / "recorded" / "h200"
    source = tables.read_source(recorded, "tma_latency")
    job = ResultsSet(recorded).job("sweep", "tma_latency", source.experiment.variant("TF0").name)
    manifest = {**job.manifest, "descriptor_us": {"encode": 1.25, "encode_and_send": 4.5}}
    write_recorded(tmp_path, "sweep", "tma_latency", {job.name: (job.csv, manifest)})
    text = answers.first_table(dataclasses.replace(source, results=tmp_path))
    assert "encoded anew for each launch takes 1.25 us, and 4.50 us where it is sent to global memory too." in text
    assert answers.host_costs(dataclasses.replace(source, results=tmp_path / "elsewhere")) == {}
    costs = answers.host_costs(source)
    assert 0 < costs["encode"] < costs["encode_and_send"], "the recorded set has them"
