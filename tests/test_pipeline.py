"""What a run plans and does: each rule of the design as the real Snakemake shows it, on the stand-in for the GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline import ARCH, RUNGS, S0, S1, S3, SHAPES, UUID, processes, wait_until
from rungs import schemas
from rungs.files import sha256_file

NOTHING = "Nothing to be done"
MEASURING = ("sweep", "floor", "profile")
LEAVES = [
    *(f"csv/inspect/{ARCH}/{rung}.csv" for rung in RUNGS),
    *(
        f"csv/{kind}/gemm/{rung}.{ending}"
        for kind in ("sweep", "profile")
        for rung in RUNGS
        for ending in ("csv", "json")
    ),
    *(f"csv/floor/gemm/{job}.{ending}" for job in (1, 2, 3) for ending in ("csv", "json")),
    *(f"data/gemm/{kind}.csv" for kind in ("shapes", "steps", "changes", "floor", "counters", "coverage")),
    *(f"figures/gemm/{kind}_S.{ending}" for kind in ("heatmap", "ladder", "waterfall") for ending in ("svg", "png")),
    "md/gemm.md",
    "README.md",
    "data/verdict.json",
]


def lines(variants, shapes=SHAPES):
    """What `measured.log` holds when these variants were each timed in one job."""
    return sorted(f"{variant} {m} {n} {k}" for variant in variants for m, n, k in shapes)


# ---- a whole run ----


def test_complete_run_makes_every_leaf_and_fails_nothing(complete_run):
    checkout, result = complete_run
    assert result.code == 0, result.text
    assert [
        leaf for leaf in LEAVES if not (checkout.live / leaf).is_file() or not (checkout.live / leaf).stat().st_size
    ] == []
    assert checkout.verdict() == {"failed": 0, "failures": [], "readme": ""}
    assert result.said[-1] == "rungs: tables and figures are in results/h200/README.md."


def test_each_rung_is_one_job_and_the_floor_three(complete_run):
    checkout, result = complete_run
    assert result.of("sweep") == result.of("profile") == result.of("inspect") == sorted(RUNGS)
    assert result.of("build") == sorted([*RUNGS, "stamp"])
    assert result.of("floor") == ["1", "2", "3"]
    assert sorted(checkout.measured) == sorted(lines(RUNGS) + 3 * lines([S3]))


def test_clock_records_are_temporary_and_live_on_in_the_manifests(complete_run):
    checkout, result = complete_run
    assert len(result.of("clock")) == 4 + 4 + 3
    assert not [path for path in (checkout.live / "clock").rglob("*") if path.is_file()]
    for kind, names in (("sweep", RUNGS), ("profile", RUNGS), ("floor", (1, 2, 3))):
        for name in names:
            record = json.loads(checkout.csv(kind, name).with_suffix(".json").read_text())["clock"]
            assert (record["mode"], record["reason"]) == ("observe", "asked for")


def test_snakemake_looks_at_the_ready_jobs_when_one_ends_and_not_all_the_time(checkout):
    """Its own limit of jobs per second leaves a timer behind with each job that ends: a busy core beside what is timed."""
    for path in checkout.live.glob("csv/*/*/*.csv"):
        path.unlink()
    result = checkout.snakemake("ladders", "profiles", "--verbose")
    assert result.code == 0, result.text
    assert len(result.jobs) > 20
    assert result.text.count("Resources before job selection") <= len(result.jobs) + 2


def test_second_run_plans_nothing_and_is_quick(complete_run):
    checkout, _ = complete_run
    before = time.monotonic()
    result = checkout.snakemake("all")
    assert time.monotonic() - before < 8
    assert result.code == 0 and NOTHING in result.text and result.jobs == []


def intervals(checkout):
    """(rule, start, end) of every job, from what Snakemake keeps of each output."""
    found = {}
    for path in (checkout.repo / ".snakemake" / "metadata").rglob("*"):
        if path.is_file():
            kept = json.loads(path.read_text())
            start = min(kept["starttime"], found.get(kept["log"][0], (0, kept["starttime"], 0))[1])
            found[kept["log"][0]] = (kept["rule"], start, kept["endtime"])
    return sorted(found.values(), key=lambda job: job[1])


def test_nothing_runs_beside_a_measurement(complete_run):
    jobs = intervals(complete_run[0])
    measuring = [job for job in jobs if job[0] in MEASURING]
    assert len(measuring) == 4 + 4 + 3
    slack = 0.02  # the end is read off after the job
    beside = [
        (one[0], other[0])
        for one in measuring
        for other in jobs
        if other != one and other[1] < one[2] - slack and one[1] < other[2] - slack
    ]
    assert beside == []


def test_measuring_job_asks_for_its_gpu_and_every_core_and_a_build_for_one(complete_run):
    checkout, _ = complete_run
    text = checkout.planned("--cores", "7", "--forceall", "all").text
    asked = re.findall(r"rule (\w+):\n(?:    .*\n)*?(?:    threads: (\d+)\n)?    resources: (.*)\n", text)
    seen = {(rule, threads or "1", "gpu=1" in resources) for rule, threads, resources in asked}
    assert {entry for entry in seen if entry[0] in (*MEASURING, "build", "clock")} == {
        *((rule, "7", True) for rule in MEASURING),
        ("build", "1", False),
        ("clock", "1", True),
    }


def test_targets_list_what_they_are_named_after(complete_run):
    checkout, _ = complete_run
    targets = ("ladders", "factorial", "sweeps", "profiles", "heatmap", "claims", "tables", "report")
    with ThreadPoolExecutor(2) as pool:
        planned = dict(
            zip(targets, pool.map(lambda target: checkout.planned("--forceall", target), targets), strict=True)
        )
    claimed = {"judge_claims", "show_claims"}
    drawn = {"plot_heatmap", "plot_ladder", "plot_clock", "make_tables", "make_index", *claimed}
    whole = {"effects", "plot_effects_gemm", "make_factorial"}
    assert {target: result.rules & {*MEASURING, *drawn, *whole, "inspect"} for target, result in planned.items()} == {
        "ladders": {"sweep", "floor", "inspect"},
        "factorial": {"sweep", "floor", "profile", "inspect", *whole},
        "sweeps": {"sweep", "floor"},
        "profiles": {"profile"},
        "heatmap": {"sweep", "floor", "profile", "inspect", "plot_heatmap"},
        "claims": {"sweep", "floor", "profile", "inspect", *claimed},
        "tables": {"sweep", "floor", "profile", "inspect", "make_tables", "make_index", *claimed},
        "report": {"sweep", "floor", "profile", "inspect", *drawn},
    }
    assert planned["sweeps"].of("sweep") == sorted(RUNGS)
    assert len(planned["factorial"].of("sweep")) == len(planned["factorial"].of("inspect")) > 20
    assert "verdict" in checkout.planned("--forcerun", "verdict").rules, "`snakemake` alone makes `all`"


def test_workflow_is_clean_by_snakemakes_linter(complete_run):
    result = complete_run[0].snakemake("--lint")
    assert result.code == 0, result.text
    assert "Congratulations, your workflow is in a good condition!" in result.text


def test_snakemakes_report_holds_figures_and_tables(checkout):
    result = checkout.snakemake("report", "--report", "report.html")
    assert result.code == 0, result.text
    page = (checkout.repo / "report.html").read_text()
    for leaf in ("figures/gemm/heatmap_S.svg", "figures/gemm/ladder_S.svg", "md/gemm.md"):
        assert f"results/h200/{leaf}" in page


# ---- what changes make again ----


def test_deleted_csv_is_measured_again_and_the_map_drawn_again_and_nothing_else(checkout):
    checkout.csv("sweep", S1).unlink()
    kept = {path: sha256_file(path) for path in (checkout.live / "csv").rglob("*.csv")}
    (checkout.folder / "measured.log").unlink(missing_ok=True)
    result = checkout.snakemake("heatmap")
    assert result.code == 0, result.text
    assert result.jobs == [
        "aggregate: results/h200/data/gemm/shapes.csv",
        f"clock: results/h200/clock/sweep/gemm/{S1}.json",
        "plot_heatmap: results/h200/figures/gemm/heatmap_S.svg",
        f"sweep: results/h200/csv/sweep/gemm/{S1}.csv",
    ]
    assert sorted(checkout.measured) == lines([S1])
    assert {path: sha256_file(path) for path in kept} == kept
    assert NOTHING in checkout.planned("heatmap").text


def test_new_rung_builds_and_measures_only_its_variant(checkout):
    (checkout.folder / "measured.log").unlink(missing_ok=True)
    checkout.edit(
        "config/experiments/gemm.yaml",
        "      S3: {b_layout: 1, swizzle: 1}\n",
        "      S3: {b_layout: 1, swizzle: 1}\n      S4: {b_layout: 1, swizzle: 1, stages: 3}\n",
    )
    checkout.edit("config/experiments/gemm.yaml", "steps: [S0>S1, S2>S3]", "steps: [S0>S1, S2>S3, S3>S4]")
    new = "abl_L1_R1_bl1_s3_sw1"
    result = checkout.snakemake("sweeps")
    assert result.code == 0, result.text
    assert (result.of("build"), result.of("sweep"), result.of("floor")) == ([new], [new], [])
    assert sorted(checkout.measured) == lines([new])
    assert set(schemas.read_csv("sweep", checkout.csv("sweep", new))["arm"]) == {new, S3, "control"}
    later = checkout.planned("all")
    assert (later.of("inspect"), later.of("profile"), later.of("sweep", "floor", "build")) == ([new], [new], [])


def test_edited_header_rebuilds_and_measures_what_includes_it(checkout):
    checkout.edit("kernels/swizzle.cuh", "//", "///")
    planned = checkout.planned("all")
    assert planned.of("build") == planned.of("sweep") == planned.of("profile") == planned.of("inspect") == sorted(RUNGS)
    assert planned.of("floor") == ["1", "2", "3"]
    (checkout.folder / "measured.log").unlink(missing_ok=True)
    result = checkout.snakemake(f"results/h200/csv/sweep/gemm/{S1}.csv")
    assert result.code == 0, result.text
    assert (result.of("build"), result.of("sweep")) == (sorted([S0, S1]), [S1])
    assert not checkout.measured, "the comment changed no machine code"
    checkout.edit("kernels/swizzle.cuh", "row & 7;", "row & 6;")
    result = checkout.snakemake(f"results/h200/csv/sweep/gemm/{S1}.csv")
    assert result.code == 0 and sorted(checkout.measured) == lines([S1])
    manifest = json.loads(checkout.csv("sweep", S1).with_suffix(".json").read_text())
    built = json.loads((checkout.live / "build" / ARCH / S1 / f"{S1}.json").read_text())
    assert built["sources"]["kernels/swizzle.cuh"] == sha256_file(checkout.repo / "kernels/swizzle.cuh")
    assert manifest["arms"][S1]["source_hash"] == built["source_hash"]


def test_edited_clock_stamp_rebuilds_it_alone_and_times_everything_again(checkout):
    checkout.edit("kernels/stamp.cu", "//", "///")
    planned = checkout.planned("all")
    assert planned.of("build") == ["stamp"]
    assert planned.of("sweep") == sorted(RUNGS) and planned.of("floor") == ["1", "2", "3"]
    assert planned.of("profile") == planned.of("inspect") == [], "counting uses no stamps"


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"measure": {"rounds_max": 50}, "axes": {"mn": [512], "k": [256]}}, {"sweep", "floor"}),
        ({"clock": {"mhz": 1755}}, {"sweep", "floor", "profile"}),
    ],
    ids=["shapes", "mhz"],
)
def test_setting_measures_again_what_it_decides(checkout, changes, rules):
    checkout.configure(**changes)
    planned = checkout.planned("all")
    assert planned.rules & {*MEASURING, "build", "inspect"} == rules
    assert planned.of("sweep") == sorted(RUNGS) and planned.of("floor") == ["1", "2", "3"]


def test_protocol_times_everything_again_and_other_modules_nothing(checkout):
    for modules, text, sweeps in (
        (("measure", "warm", "gpu"), "ADDED = 1", []),
        (("protocol", "session"), "# a comment", []),
        (("session",), "ADDED = 1", sorted(RUNGS)),
    ):
        for module in modules:
            with (checkout.repo / "workflow" / "rungs" / f"{module}.py").open("a") as file:
                file.write(f"\n{text}\n")
        planned = checkout.planned("all")
        assert planned.of("sweep") == sweeps, modules
        assert planned.of("profile") == planned.of("build") == []


def test_documents_dates_and_checkouts_plan_nothing(checkout):
    checkout.git("init", "-q", "-b", "main")
    checkout.git("add", "-A")
    checkout.git("commit", "-q", "-m", "all")
    for name in ("README.md", "config/README.md"):
        checkout.edit(name, "\n", "\nA sentence more.\n")
    checkout.git("commit", "-q", "-a", "-m", "documents")
    for path in (checkout.repo / "kernels").rglob("*.cu*"):
        os.utime(path)
    for name in ("kernels/swizzle.cuh", "config/experiments/gemm.yaml"):
        (checkout.repo / name).unlink()
    checkout.git("checkout", "--", "kernels", "config")
    planned = checkout.planned("all")
    assert NOTHING in planned.text and planned.jobs == []


def test_quick_look_writes_a_set_of_its_own(checkout):
    kept = {path: sha256_file(path) for path in checkout.live.rglob("*") if path.is_file()}
    planned = checkout.planned("all", "--config", "preset=quick")
    assert {job.split("/")[1] for job in planned.jobs} == {"h200-quick"}
    assert planned.of("profile") == [] and planned.of("sweep") == sorted(RUNGS)
    result = checkout.snakemake(f"results/h200-quick/csv/sweep/gemm/{S0}.csv", "--config", "preset=quick")
    assert result.code == 0, result.text
    assert (checkout.repo / "results" / "h200-quick" / "csv" / "sweep" / "gemm" / f"{S0}.csv").is_file()
    assert {path: sha256_file(path) for path in kept} == kept


def test_quick_look_takes_ladder_b_at_two_shapes(checkout):
    checkout.configure(ladders="all", axes=None)
    planned = checkout.planned("all", "--printshellcmds", "--config", "preset=quick")
    assert len(planned.of("sweep")) == 8 and S3 in planned.of("sweep") and S0 not in planned.of("sweep")
    shapes = set(re.findall(r"--shapes '(.*?)'", planned.text))
    assert shapes == {"[[512, 512, 1024], [4096, 4096, 1024]]"}


# ---- a run that is ended ----


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP], ids=lambda sent: sent.name)
def test_ended_run_frees_the_gpu_and_resumes_without_handwork(checkout, sent):
    """Row 29 of the cases. Kind: a run is ended from outside, by its user, its terminal or the kernel. Ended in the middle of a rung's sweep under a locked clock: nothing half written stays, that rung is measured again."""
    calls = checkout.folder / "calls.jsonl"
    checkout.machine({"name": "NVIDIA H200", "uuid": UUID}, log=str(calls))
    checkout.configure(clock={"mode": "lock", "mhz": 1755})
    checkout.csv("sweep", S1).unlink()
    checkout.fault(**{S1: {"kind": "slow", "shape": list(SHAPES[0])}})
    log = checkout.repo / "logs" / "h200" / "sweep" / "gemm" / f"{S1}.log"
    log.unlink()
    target = f"results/h200/csv/sweep/gemm/{S1}.csv"
    process = checkout.start(target)
    wait_until(lambda: log.exists() and "512x512x512" in log.read_text())
    locked = [json.loads(line) for line in calls.read_text().splitlines()]
    assert (locked[-1]["call"], locked[-1].get("max_mhz")) == ("lock", 1755)
    os.killpg(process.pid, sent)
    process.communicate(timeout=30)
    assert process.returncode != 0
    wait_until(lambda: not processes(checkout))
    assert json.loads(calls.read_text().splitlines()[-1])["call"] == "reset"
    assert not checkout.csv("sweep", S1).exists()
    assert not list((checkout.live / "csv").rglob(".*")), "no temporary file is left"
    checkout.fault()
    again = checkout.snakemake(target)
    assert again.code == 0, again.text
    killed = "rungs: A run in this folder was killed: what it had begun is done again."
    assert (killed in again.said) == (sent != signal.SIGINT), "Snakemake itself takes back its lock"
    assert again.of("sweep") == [S1] and again.rules <= {"clock", "sweep"}
    frame = schemas.read_csv("sweep", checkout.csv("sweep", S1))
    assert set(frame[["m", "n", "k"]].itertuples(index=False, name=None)) == set(SHAPES)


def test_an_edit_that_changes_no_code_builds_again_and_measures_nothing_again(checkout):
    """A comment in a header; one instruction of S1; and what is asked for by name is measured whatever its code."""
    csvs = [path for kind in MEASURING for path in (checkout.live / "csv" / kind).rglob("*.*")]
    kept = {path: path.read_bytes() for path in csvs}
    before = len(checkout.measured)
    checkout.edit("kernels/swizzle.cuh", "//", "// Here,")
    result = checkout.snakemake("--cores", "2", "all")
    assert result.code == 0, result.text
    assert result.of("build") == sorted(RUNGS) and set(result.of("sweep")) == set(RUNGS)
    assert len(checkout.measured) == before, "the jobs found their results standing"
    assert {path: path.read_bytes() for path in csvs} == kept
    assert NOTHING in checkout.planned("all").text
    checkout.edit("kernels/swizzle.cuh", "row & 7;", "row & 6;")
    result = checkout.snakemake("--cores", "2", "sweeps")
    assert result.code == 0, result.text
    again = set(checkout.measured[before:])
    assert again and all(S1 in line for line in again), again
    before = len(checkout.measured)
    forced = checkout.snakemake("--cores", "2", "-R", "sweep", "--until", "sweep", "sweeps")
    assert forced.code == 0 and len(checkout.measured) > before, forced.text
