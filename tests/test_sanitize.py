"""Compute Sanitizer over rungs and mutated kernels: its logs, its failures, the target, the recorded set and the pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline import ARCH, RUNGS, S1, S3
from rungs import clock, mutants, profile, sanitize, sanitizepages, schemas
from rungs.emulator import mutations
from rungs.errors import RungsError
from rungs.files import sha256_bytes, sha256_file
from rungs.results import ResultsSet
from rungs.variants import load_device, load_experiment, parse_experiment

TESTS = Path(__file__).parent
TOOL = str(TESTS / "standin" / "compute-sanitizer")
GEMM = load_experiment("gemm")
VARIANT = GEMM.variant("B3")
LAUNCHED = "rungs: launched abl\n"
BANNER = "========= COMPUTE-SANITIZER\n"


# ---- logs ------------------------------------------------------------------------------------------------------------


def judged(log: str, said: str = LAUNCHED, failure=None, tool: str = "memcheck") -> sanitize.Checked:
    return sanitize.judge(BANNER + log, said, failure, tool)


@pytest.mark.parametrize(
    "summary", ["ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"]
)
def test_a_clean_run(summary):
    assert judged(f"========= {summary}\n") == sanitize.Checked(0, 0, "", "", "ok", "")


REPORTS = {
    "analysis": (
        "========= Error: Race reported between Write access at gemm+0x90 in kernels/gemm/load.cuh:41\n"
        "=========     and Read access at gemm+0x100 in kernels/gemm/read.cuh:51 [508 hazards]\n=========\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
        (1, 0, "kernels/gemm/load.cuh:41 kernels/gemm/read.cuh:51"),
        r"Race reported between Write access .* and Read access .*read.cuh:51 \[508 hazards\]",
    ),
    "warning": (
        "========= Warning: (Warp Level Programming) Potential RAW hazard detected at __shared__ 0x8c in block (0,0,0) :\n"
        "=========     Write Thread (35,0,0) at gemm(int *)+0x90 in load.cuh:44\n"
        "=========     Read Thread (32,0,0) at gemm(int *)+0x120 in read.cuh:56\n=========     Current Value : 35\n"
        "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n",
        (0, 2, "load.cuh:44 read.cuh:56"),
        "Potential RAW hazard .* Write Thread .* Read Thread",
    ),
    "memcheck without a source line": (
        "========= Invalid __global__ read of size 16 bytes\n=========     at gemm+0x50\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n=========     Address 0x710fdca00001 is misaligned\n"
        "=========     Saved host backtrace up to driver entry point at kernel launch time\n"
        "=========         Host Frame: main [0xae61] in memcheck_demo.cu:3\n=========\n"
        "========= LEAK SUMMARY: 0 bytes leaked in 0 allocations\n========= ERROR SUMMARY: 1 error\n",
        (1, 0, ""),
        "^Invalid __global__ read of size 16 bytes at gemm.0x50 Address 0x710fdca00001 is misaligned$",
    ),
    "synccheck": (
        "========= Barrier error detected. Divergent thread(s) in block\n=========     at gemm+0xf0 in gemm.cu:79\n"
        "=========     by thread (37,0,0) in block (0,0,0)\n========= ERROR SUMMARY: 1 error\n",
        (1, 0, "gemm.cu:79"),
        "Divergent thread.*gemm.cu:79",
    ),
    "deadlock": (
        "========= Deadlock detected in Cuda::barrier wait called by threads starting at (0,0,0) in block (0,0,0), (active mask:"
        " 0xffffffff), barrier address: 0x0 at gemm+0x1190 in gemm.cu:98\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
        (1, 0, "gemm.cu:98"),
        "^Deadlock detected",
    ),
    "a crash that it brings about": (
        "========= Invalid __shared__ write of size 16 bytes\n=========     at gemm+0xb0 in ptx.cuh:6\n=========\n"
        "========= Error: process didn't terminate successfully\n========= Target application returned an error\n"
        "========= ERROR SUMMARY: 3 errors\n",
        (3, 0, "ptx.cuh:6"),
        "^Invalid __shared__ write of size 16 bytes at gemm.0xb0 in ptx.cuh:6$",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_finding_is_its_first_report_with_its_source_lines(name):
    log, (errors, warnings, source), pattern = REPORTS[name]
    found = judged(log, "rungs: Running abl failed with CUDA_ERROR_LAUNCH_FAILED.\n", ("crashed", "rc"))
    assert (found.errors, found.warnings, found.source, found.status) == (errors, warnings, source, "found")
    assert re.search(pattern, found.finding) and found.reason.endswith(".")
    assert len(found.finding) <= sanitize.LONGEST


@pytest.mark.parametrize(
    ("log", "said", "status", "words"),
    [
        ("========= Error: Device not supported\n========= ERROR SUMMARY: 1 error\n", "", "not run", "does not support"),
        ("", "unrecognised option '--strip-paths'\n", "not run", "refuses its options .*strip-paths"),
        ("========= Error: Permission denied\n", "", "not permitted", "administrator"),
        ("========= Error: Target application terminated before first instrumented API call\n", "", "crashed", "first"),
        ("========= Target application returned an error\n========= ERROR SUMMARY: 0 errors\n", "rungs: No GPU.\n",
         "crashed", r"did not launch its kernel to the end \(No GPU\)\."),
        ("========= ERROR SUMMARY: 0 errors\n", "", "crashed", "did not launch its kernel"),
        ("========= ERROR SUMMARY: 7 errors\n", LAUNCHED, "crashed", "counts 7 errors and names none"),
        ("========= Internal Sanitizer Error: no memory\n========= ERROR SUMMARY: 0 errors\n", LAUNCHED, "crashed",
         "Internal Sanitizer Error: no memory"),
        ("\x00 17 of\n====== SUMMARY\n", LAUNCHED, "crashed", "printed no summary"),
        ("", "", "crashed", "printed no summary"),
    ],
)  # fmt: skip
def test_what_keeps_a_tool_from_looking_is_never_clean(log, said, status, words):
    found = judged(log, said)
    assert found.status == status and re.search(words, found.reason) and found.errors is None


def test_any_cut_of_a_log_is_no_clean_run():
    log = BANNER + REPORTS["analysis"][0]
    for cut in range(len(log) - len(" hazard displayed (1 error, 0 warnings)\n")):
        assert sanitize.judge(log[:cut], LAUNCHED, None, "racecheck").status == "crashed"


# ---- the tool and its command line -----------------------------------------------------------------------------------


def test_only_options_that_the_version_knows_are_asked_for(monkeypatch, tmp_path):
    opened = sanitize.open_sanitizer(TOOL)
    assert opened.version == "2025.3.1.0"
    argv = opened.command("racecheck", ["python", "x"], Path("/log"), 20.0)
    assert argv[0] == TOOL and argv[-2:] == ["python", "x"]
    assert set(argv[1:-2]) == {
        "--tool=racecheck",
        "--strip-paths=no",
        "--show-backtrace=device",
        "--print-limit=20",
        "--error-exitcode=86",
        "--racecheck-report=all",
        "--num-cuda-barriers=16",
        "--racecheck-deadlock-timeout=5000",
        "--log-file=/log",
    }
    assert not [option for option in opened.command("memcheck", [], Path("/log"), 20.0) if "tensor" in option]
    newer = sanitize.Sanitizer(TOOL, "2026.4", opened.knows | {"check-tensor-ops"})
    assert "--check-tensor-ops=yes" in newer.command("memcheck", [], Path("/log"), 20.0)


def test_it_is_found_on_path_and_by_its_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{Path(TOOL).parent}:{os.environ['PATH']}")
    assert sanitize.find_sanitizer("auto") == sanitize.find_sanitizer(TOOL) == TOOL
    with pytest.raises(RungsError, match=r"not installed at .*absent: set `sanitize.tool`"):
        sanitize.find_sanitizer(str(tmp_path / "absent"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(RungsError, match=r"not installed.*nvidia-cuda-sanitizer-api"):
        sanitize.find_sanitizer("auto")


# ---- a rung's CSV ----------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "build" / f"{VARIANT.name}.json"
    path.parent.mkdir()
    path.with_suffix(".cubin").write_bytes(b"cubin")
    built = {"kind": "build", "variant": VARIANT.name, "experiment": "gemm", "arch": ARCH, "status": "ok", "reason": ""}
    built |= {"build_id": "b1", "source_hash": "s1", "sources": {}, "flags": [], "compiler": {}, "ptxas": {}}
    built |= {"macros": GEMM.macros(VARIANT, load_device(ARCH)), "smem_dynamic_bytes": 77824, "threads": 256}
    path.write_text(json.dumps(built | {"ptx_sha256": "p1", "code_hash": "k1", "cubin_sha256": sha256_bytes(b"cubin")}))
    return path


def run(gpu, manifest, tool=TOOL, **more):
    """(rows by tool, manifest, the tool's calls) of one job."""
    folder = manifest.parent.parent
    output = folder / "out" / "sanitize" / "gemm" / f"{VARIANT.name}.csv"
    sanitize.sanitize(GEMM, VARIANT, ARCH, manifest, tool, gpu, output, **more)
    written = schemas.read_manifest(output.with_suffix(".json"))
    assert written["csv_sha256"] == sha256_file(output)
    calls = folder / "calls.jsonl"
    lines = calls.read_text().splitlines() if calls.exists() else []
    rows = schemas.read_csv("sanitize", output).set_index("tool")
    assert list(rows.index) == list(sanitize.TOOLS)
    return rows, written, [json.loads(line) for line in lines]


def test_one_row_per_tool_at_the_small_problem(gpu, manifest, monkeypatch):
    monkeypatch.setenv("RUNGS_STANDIN_SANITIZER", "racecheck=races,memcheck=bounds")
    rows, written, calls = run(gpu, manifest)
    assert dict(rows["status"]) == {"memcheck": "found", "racecheck": "found", "initcheck": "ok", "synccheck": "ok"}
    assert set(zip(rows["m"], rows["n"], rows["k"], strict=True)) == {(128, 256, 128)}
    assert rows["source"]["racecheck"] == "kernels/gemm/load.cuh:52 kernels/gemm/read.cuh:47"
    assert rows["source"]["memcheck"] == "kernels/ptx.cuh:61 kernels/gemm/load.cuh:52"
    assert written["sanitizer"]["version"] == "2025.3.1.0"
    assert written["sanitizer"]["options"]["racecheck"]["racecheck-report"] == "all"
    child = [sys.executable, "-m", "rungs", "launch", "--experiment", "gemm", "--arch", ARCH, "--gpu", gpu.uuid]
    child += ["--manifest", str(manifest), "--shape", "128,256,128", "--launches", "1", "--instrumented"]
    assert [call["child"] for call in calls] == [child] * 4


@pytest.mark.parametrize(
    ("mode", "status"),
    [("crash", "crashed"), ("unsupported", "not run"), ("perm", "not permitted"), ("internal", "crashed"),
     ("option", "not run"), ("garbage", "crashed"), ("silent", "crashed"), ("many", "crashed")],
)  # fmt: skip
def test_a_failure_is_a_row_with_its_own_word(gpu, manifest, monkeypatch, mode, status):
    monkeypatch.setenv("RUNGS_STANDIN_SANITIZER", mode)
    rows, _, _ = run(gpu, manifest)
    assert set(rows["status"]) == {status} and all(reason.endswith(".") for reason in rows["reason"])


def test_a_tool_that_hangs_is_ended_with_all_it_started(gpu, manifest, monkeypatch):
    """Also what left the tool's process group, as the stand-in's child does."""
    monkeypatch.setenv("RUNGS_STANDIN_SANITIZER", "racecheck=hang")
    rows, _, calls = run(gpu, manifest, time_limit_s=1.0)
    assert rows["status"]["racecheck"] == "time limit" and rows["status"]["memcheck"] == "ok"
    pids = [call["pid"] for call in calls if call["pid"]]
    assert len(pids) == sanitize.ATTEMPTS
    end = time.monotonic() + 5
    while any(clock._started(pid) is not None for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if clock._started(pid) is not None]


def test_a_missing_tool_and_one_that_may_not_be_run_are_rows(gpu, manifest, tmp_path):
    rows, written, _ = run(gpu, manifest, tool=str(tmp_path / "absent"))
    assert set(rows["status"]) == {"not run"} and written["sanitizer"]["version"] == ""
    locked = tmp_path / "locked"
    locked.write_text("")
    assert profile.run_tool([str(locked)], 5.0, "memcheck")[0][0] == "not permitted"
    assert not locked.stat().st_mode & stat.S_IXUSR


def test_a_variant_without_a_binary_keeps_its_reason(gpu, manifest):
    built = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(built | {"status": "build failed", "reason": "It spills."}))
    rows, written, calls = run(gpu, manifest)
    assert set(zip(rows["status"], rows["reason"], strict=True)) == {("build failed", "It spills.")}
    assert calls == [] and written["binary"] == {"variant": VARIANT.name}


def test_a_binary_that_is_not_its_manifests_is_an_error(gpu, manifest):
    manifest.with_suffix(".cubin").write_bytes(b"another")
    with pytest.raises(RungsError, match="not the binary of"):
        run(gpu, manifest)


# ---- the target, and the recorded set --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sanitized(complete_run, tmp_path_factory):
    """(checkout, result) of `snakemake sanitized`, clean and then again with a race in S1; not to be changed."""
    checkout = complete_run[0].copy(tmp_path_factory.mktemp("sanitized") / "run")
    first = checkout.snakemake("--cores", "2", "sanitized")
    assert first.code == 0, first.text
    (checkout.live / "csv" / "sanitize" / "gemm" / f"{S1}.csv").unlink()
    return checkout, checkout.snakemake("--cores", "2", "sanitized", RUNGS_STANDIN_SANITIZER="racecheck=races")


def test_the_target_ends_in_a_failing_exit_when_a_tool_found_something(sanitized):
    checkout, result = sanitized
    assert result.code == 1 and result.of("sanitize") == [S1]
    assert [
        f"{S1}, racecheck at 128x256x128: found: racecheck: Error: Race reported" in line for line in result.said
    ].count(True)
    page = (checkout.live / "md" / "gemm_sanitizer.md").read_text()
    assert f"| {S1} | A3t S1 | 128x256x128 | clean | 2 errors | clean | clean |" in page
    assert "15 of 16 runs of the 4 tools over 4 variants have nothing to report; racecheck reports on 1.**" in page
    assert "kernels/gemm/load.cuh:52" in page and "NVIDIA H200, driver" in page


def test_it_is_no_part_of_all_and_says_what_it_needs_without_a_gpu(sanitized, tmp_path):
    checkout = sanitized[0].copy(tmp_path / "run")
    assert "sanitize" not in checkout.planned("all").rules
    checkout.no_gpu()
    result = checkout.snakemake("--dry-run", "sanitized")
    assert result.code == 1 and "Traceback" not in result.text
    assert result.said[-1].startswith("rungs: Compute Sanitizer needs a GPU")


def test_what_was_found_is_recorded_beside_the_sweeps_traced_and_stale(sanitized, complete_run, tmp_path):
    swept = complete_run[0].copy(tmp_path / "run")
    folder = Path("csv") / "sanitize" / "gemm"
    alone = swept.repo / "results" / "apart"
    shutil.copytree(sanitized[0].live / folder, alone / folder)
    early = swept.rungs("record", "results/apart")
    assert early.code == 1 and f"is not of a binary that results/recorded/{swept.live.name} holds" in early.text
    assert swept.rungs("record", "results/h200").code == 0
    later = swept.rungs("record", "results/apart")
    assert later.code == 0 and "Recorded 4 CSVs of Compute Sanitizer in results/recorded/h200:" in later.text
    target = swept.repo / "results" / "recorded" / "h200"
    assert ResultsSet(target).jobs("sanitize", "gemm") == sorted(RUNGS)
    # With sweeps beside them they go the usual way.
    shutil.copytree(alone / folder, swept.live / folder)
    assert swept.rungs("record", "results/h200").text.startswith("Recorded 15 CSVs of 4 variants")

    page_of(target, {"of": COPY, "racecheck": "found"})
    swept.configure(recorded=["h200"])
    pages = [f"results/recorded/h200/{name}" for name in ("md/gemm_sanitizer.md", "md/mutations.md", "README.md")]
    assert {pages[0], pages[1]} <= {job.split(": ")[1] for job in swept.planned("tables").jobs}
    drawn = swept.snakemake("--cores", "2", *pages)
    assert drawn.code == 0, drawn.text
    assert "| a cp.async wait dropped | cp.async | 1 | 1 |" in (target / "md" / "mutations.md").read_text()
    index = (target / "README.md").read_text()
    assert "[What Compute Sanitizer found](md/gemm_sanitizer.md)" in index and "(md/mutations.md)" in index
    page = target / "md" / "gemm_sanitizer.md"
    assert "| 2 errors |" in page.read_text()
    chain = swept.rungs("trace", f"results/recorded/h200/md/gemm_sanitizer.md:{S1}")
    assert chain.code == 0, chain.text
    assert "Compute Sanitizer 2025.3.1.0; NVIDIA H200" in chain.text and "SHA-256" in chain.text

    swept.edit("kernels/swizzle.cuh", "row & 7;", "row & 6;")
    assert f"  stale: A3t/S1 ({S1}): it compiles to other machine code now" in swept.rungs("status").text
    swept.no_gpu()
    assert swept.snakemake("--cores", "2", "results/recorded/h200/md/gemm_sanitizer.md").code == 0
    assert f"| {S1} † |" in page.read_text()


def test_record_refuses_a_tool_that_could_not_look(sanitized, tmp_path):
    checkout = sanitized[0].copy(tmp_path / "run")
    checkout.csv("sanitize", S3).unlink()
    made = checkout.snakemake(f"results/h200/csv/sanitize/gemm/{S3}.csv", RUNGS_STANDIN_SANITIZER="perm")
    assert made.code == 0, made.text
    result = checkout.rungs("record", "results/h200")
    assert result.code == 1 and "holds a failed result (not permitted: memcheck may not look here" in result.text


# ---- mutated kernels -------------------------------------------------------------------------------------------------

SMALL = ("abl_L1_R1_bl1_s1_sw1", "abl_L2_R1_bl1_s2_sw1")
CHANGES = ("a cp.async wait dropped", "a barrier dropped", "expect_tx too large")


@pytest.fixture
def few(monkeypatch):
    """Two kernels and three mutations."""
    kept = {name: mutations.MUTATIONS[name] for name in CHANGES}
    monkeypatch.setattr(mutations, "MUTATIONS", kept)
    monkeypatch.setattr(mutations, "ALL", SMALL)


def test_mutants_are_built_once_and_run_under_every_tool(few, gpu, monkeypatch, tmp_path):
    folder = tmp_path / "data" / "mutations"
    mutants.run(folder, ARCH, "pip", TOOL, None, 2, 20.0)
    frame = schemas.read_csv("mutations", folder / "mutations.csv")
    assert set(frame[frame["tool"] != "emulator"]["status"]) == {"not run"}
    found = frame[frame["tool"] == "emulator"].set_index(["mutation", "variant", "place"])["status"]
    assert {key[:2] for key in found.index[found == "ok"]} == {("none", name) for name in SMALL}
    assert len(found) == 2 + 1 + 2 + 2 + 1
    assert "Compute Sanitizer was not run." in sanitizepages.render_mutations(tmp_path)

    monkeypatch.setattr(mutants.build, "find_toolchain", lambda which: pytest.fail("it was built already"))
    monkeypatch.setenv("RUNGS_STANDIN_SANITIZER", "racecheck=races,synccheck=hang")
    launch = [sys.executable, "-c", "print('rungs: abl is wrong on integers whose sums are exact: 3 of 9 differ.')"]
    whole, opened = json.loads((folder / "built.json").read_text()), sanitize.open_sanitizer(TOOL)
    rows = mutants.run_all(folder, whole, opened, gpu, 8, 1.0, launch)
    status = {(row["mutation"], row["tool"]): row["status"] for row in rows}
    assert status["a barrier dropped", "racecheck"] == "found" and status["a barrier dropped", "memcheck"] == "ok"
    assert status["none", "synccheck"] == "time limit" and status["none", "result"] == "wrong"
    calls = (tmp_path / "calls.jsonl").read_text().splitlines()
    again = mutants.run_all(folder, whole, opened, gpu, 8, 1.0, launch)
    assert again == rows and (tmp_path / "calls.jsonl").read_text().splitlines() == calls, "a run that was cut goes on"
    runs = folder / mutants.RUNS
    runs.write_bytes(runs.read_bytes()[:-30])  # killed while it wrote
    assert mutants.run_all(folder, whole, opened, gpu, 8, 1.0, launch) == rows, "the last one ran again"
    assert len(mutants.ran(runs.read_text())) == len(rows)
    child = json.loads(calls[0])["child"]
    assert "--cubin" in child and child[child.index("--shape") + 1] == "128,128,160"

    (folder / whole["mutants"][0]["cubin"]).write_bytes(b"another")
    monkeypatch.setattr(mutants.build, "find_toolchain", lambda which: pytest.fail("made anew"))
    with pytest.raises(pytest.fail.Exception, match="made anew"):
        mutants.prepare(folder, ARCH, "pip", 0)


PLAIN = {"mutation": "none", "variant": SMALL[0], "place": 0, "cubin": "a.cubin", "cubin_sha256": "c", "not_built": ""}


@pytest.fixture
def beside(monkeypatch):
    """For each run of a tool the tools that ran while it did."""
    running, met = [], []

    def check(opened, tool, argv, limit):
        seen = {tool}
        running.append(tool)
        for _ in range(5):
            time.sleep(0.01)
            seen |= set(running)
        running.remove(tool)
        met.append((tool, seen))
        return sanitize.Checked(0, 0, "", "", "ok", "")

    monkeypatch.setattr(sanitize, "check", check)
    return met


def test_nothing_runs_beside_racecheck(few, beside, gpu, manifest, monkeypatch, tmp_path):
    """Beside other tools on a GPU it reported waits without an end, of a wgmma kernel in which there was nothing to wait for."""
    run(gpu, manifest)
    assert next(tool for tool, _ in beside) == "racecheck" and len(beside) == len(sanitize.TOOLS)
    made = [{**PLAIN, "place": place} for place in range(3)]
    monkeypatch.setattr(mutants.profile, "run_tool", lambda *_: (None, LAUNCHED))
    rows = mutants.run_all(tmp_path, {"mutants": made, "arch": ARCH}, sanitize.open_sanitizer(TOOL), gpu, 8, 1.0)
    assert len(rows) == 3 * (len(sanitize.TOOLS) + 1) and {row["status"] for row in rows} == {"ok"}
    for tool, seen in beside:
        assert seen == {"racecheck"} if tool == "racecheck" else "racecheck" not in seen
    assert any(len(seen) > 1 for _, seen in beside), "the others run side by side"


def test_a_wait_without_an_end_is_the_finding_only_where_there_is_no_other():
    deadlock, race = REPORTS["deadlock"][0].splitlines(True), REPORTS["analysis"][0].splitlines(True)
    found = judged("".join([deadlock[0], *race[:3], race[-1].replace("1 hazard", "2 hazards")]), tool="racecheck")
    assert found.finding.startswith("Error: Race reported") and not sanitize.endless(found.status, found.finding)
    alone = judged(REPORTS["deadlock"][0], tool="racecheck")
    assert sanitize.endless(alone.status, alone.finding)


@pytest.mark.parametrize("word", ["finding", "status", "reason"])
def test_a_row_that_was_edited_is_as_if_it_had_not_run(word):
    row = mutants.row_of({"mutation": "none", "variant": SMALL[0], "place": 0}, "racecheck", status="ok")
    key = ["none", "0", "c", "racecheck", "1", "15.0"]
    assert mutants.ran(json.dumps([key, row])) and not mutants.ran(json.dumps([key, row | {word: None}]))


def test_a_run_that_is_cut_begins_no_further_attempt(few, gpu, monkeypatch, tmp_path):
    """Three runs of a second each that do not end, cut in the first."""
    asked = []

    def check(_, tool, *__):
        asked.append(tool)
        if tool != "racecheck":
            return CLEAN
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(1)
        return LATE

    monkeypatch.setattr(sanitize, "check", check)
    monkeypatch.setattr(mutants.profile, "run_tool", lambda *_: (None, LAUNCHED))
    with pytest.raises(KeyboardInterrupt):
        mutants.run_all(tmp_path, {"mutants": [PLAIN], "arch": ARCH}, sanitize.open_sanitizer(TOOL), gpu, 8, 1.0)
    assert asked.count("racecheck") == 1


DEADLOCK = sanitize.Checked(1, 0, "Deadlock detected in Cuda::barrier wait called by threads", "a.cu:1", "found", "")
LATE = sanitize.Checked(None, None, "", "", "time limit", "racecheck did not end within 1 s.")
RACE = sanitize.Checked(1, 0, "Error: Race reported", "a.cu:1", "found", "")
CLEAN = sanitize.Checked(0, 0, "", "", "ok", "")


@pytest.mark.parametrize(
    ("runs", "counts"),
    [
        ([DEADLOCK, CLEAN], CLEAN),
        ([LATE, DEADLOCK, RACE], RACE),
        ([RACE], RACE),
        ([LATE, LATE, DEADLOCK], DEADLOCK),
    ],
)
def test_a_wait_without_an_end_counts_where_it_repeats(runs, counts, few, gpu, manifest, monkeypatch, tmp_path):
    """Racecheck reported such waits of kernels that do not wait for anything, once in a few runs."""
    left = iter(runs)
    monkeypatch.setattr(sanitize, "check", lambda _, tool, *__: next(left) if tool == "racecheck" else CLEAN)
    rows, written, _ = run(gpu, manifest)
    assert (rows["status"]["racecheck"], next(left, None)) == (counts.status, None)
    assert written["attempts"] == {"racecheck": len(runs)}

    of = (tmp_path, {"mutants": [PLAIN], "arch": ARCH}, sanitize.open_sanitizer(TOOL), gpu, 8, 1.0)
    for ends, asked in ((True, len(runs)), (False, 1)):  # what does not end by itself is believed at once
        (tmp_path / mutants.RUNS).unlink(missing_ok=True)
        late = None if ends else ("time limit", "The kernel did not end within 1 s.")
        monkeypatch.setattr(mutants.profile, "run_tool", lambda *_, late=late: (late, LAUNCHED))
        left = iter(runs)
        [row] = [row for row in mutants.run_all(*of) if row["tool"] == "racecheck"]
        assert row["status"] == (counts if ends else runs[0]).status and len(list(left)) == len(runs) - asked
        left = iter([])
        assert row in mutants.run_all(*of), "what has run is kept, each attempt"


@pytest.mark.parametrize(("jobs", "limit", "places"), [(0, 20.0, 0), (1, 0.0, 0), (1, float("nan"), 0), (1, 20.0, -1)])
def test_no_jobs_no_time_and_negative_places_are_one_sentence(tmp_path, jobs, limit, places):
    with pytest.raises(
        RungsError, match=r"are no run: give 0 or more places, one job or more and a limit above 0 seconds\.$"
    ):
        mutants.run(tmp_path, ARCH, "pip", TOOL, None, jobs, limit, places)


@pytest.mark.parametrize(
    ("failure", "said", "status"),
    [
        (None, LAUNCHED, "ok"),
        (("crashed", "rc"), "rungs: abl is wrong on integers whose sums are exact: 1 of 2.\n", "wrong"),
        (("time limit", "It hung."), "", "time limit"),
        (("crashed", "It died."), "rungs: Running abl failed with CUDA_ERROR_MISALIGNED_ADDRESS.\n", "crashed"),
        (None, "", "crashed"),
    ],
)
def test_what_a_kernel_does_by_itself(failure, said, status):
    assert mutants.judge_result(failure, said)[0] == status


def page_of(folder: Path, statuses, version="2025.3.1.0") -> str:
    """The page of one mutation of one kernel, by tool -> status, and of the same kernel unmutated and clean."""
    (change, variant), rows = statuses.pop("of"), []
    for name, tools in ((mutants.NONE, {}), (change, {"emulator": "found"} | statuses)):
        for tool in ("emulator", *sanitize.TOOLS, "result"):
            key = {"mutation": name, "variant": variant, "place": 0}
            rows.append({"run_id": "r", **mutants.row_of(key, tool, status=tools.get(tool, "ok"))})
    path = folder / mutants.CSV
    binary = {variant: {"variant": variant, "source_hash": "s", "build_id": "b", "code_hash": "k"}}
    head = {"kind": "mutations", "run_id": "r", "arch": ARCH, "binaries": binary, "gpu": None}
    mutants.measure.write_result("mutations", rows, head | {"sanitizer": {"version": version, "options": {}}}, path)
    return sanitizepages.render_mutations(folder)


COPY, BOUND = ("a cp.async wait dropped", SMALL[0]), ("a try_wait dropped", SMALL[1])
SAYS = {
    "found": ({"of": COPY, "racecheck": "found"}, "| yes |  |"),
    "missed without a documented reason": (
        {"of": COPY, "result": "wrong"},
        "| 1 | no | memcheck: addresses; racecheck: not explained; initcheck: global memory; synccheck: use of primitives |",
    ),
    "missed because it is TMA": (
        {"of": BOUND},
        "| no | memcheck: addresses; racecheck: no tensor copies; initcheck: global memory; synccheck: not explained |",
    ),
    "a hang": ({"of": BOUND, "racecheck": "time limit", "result": "time limit"}, "| 1 hang or crash |  |"),
}


@pytest.mark.parametrize("name", SAYS)
def test_the_page_says_whether_they_agree_and_if_not_why(tmp_path, name):
    statuses, row = SAYS[name]
    page = page_of(tmp_path, dict(statuses))
    assert row in page, page
    assert "| none | " in page and "| yes |  |" in page
    assert "The emulator reports 1 of 1 mutants and 0 of 1 correct kernels; " in page


@pytest.mark.parametrize(("old", "new"), [("a cp.async wait dropped", "a comma dropped"), (COPY[1], "abl_x")])
def test_a_page_of_mutations_or_kernels_that_are_none_is_one_sentence(tmp_path, old, new):
    page_of(tmp_path, {"of": COPY})
    path = tmp_path / mutants.CSV
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RungsError, match=rf"has the \w+ '{new}', which \S+ has not: run `python -m rungs sanitize-"):
        sanitizepages.render_mutations(tmp_path)


@pytest.mark.parametrize("change", [{"gpu": {}}, {"sanitizer": {"version": 5, "options": {}}}, {"time_limit_s": "20"}])
def test_a_damaged_manifest_of_mutations_is_one_sentence(tmp_path, change):
    page_of(tmp_path, {"of": COPY})
    path = (tmp_path / mutants.CSV).with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RungsError, match=rf"^{path} \(delete it and run again\), .*\.$"):
        sanitizepages.render_mutations(tmp_path)


def test_every_rule_has_a_source_and_a_version_can_end_one():
    for rule in sanitizepages.RULES:
        assert not rule.why or sanitizepages.MANUAL in rule.why or sanitizepages.NOTES in rule.why
        assert set(rule.kinds) <= set(mutations.KINDS) and set(rule.groups) <= set(mutations.GROUPS)
    moved = ("memcheck", "alignment", "TMA")
    assert sanitizepages.why_not(*moved, "2025.3.1.0") and not sanitizepages.why_not(*moved, "2026.4.0.0")


# ---- more shapes for some variants -----------------------------------------------------------------------------------


def test_twenty_variants_on_no_ladder_are_profiled_at_two_shapes_and_have_every_level():
    more = GEMM.factorial["profile_more"]
    names = [variant.name for variant in GEMM.off_ladder()]
    assert len(more["variants"]) == 20 and set(more["variants"]) <= set(names)
    levels = {level for name in more["variants"] for level in GEMM.variant(name).levels}
    assert levels == {level for variant in GEMM.off_ladder() for level in variant.levels}
    shapes = {name: GEMM.shapes_to_profile(GEMM.variant(name)) for name in names}
    assert {name for name in names if len(shapes[name]) == 2} == set(more["variants"])
    assert all(found[0] == (512, 512, 4096) for found in shapes.values())
    assert GEMM.shapes_to_profile(VARIANT) == [(4096, 4096, 4096), (512, 512, 4096)]


def test_a_rung_among_them_is_refused():
    raw = schemas.read_yaml(Path("config/experiments/gemm.yaml"), "experiment")
    raw["factorial"]["profile_more"]["variants"][0] = VARIANT.name
    with pytest.raises(RungsError, match=f"profile_more names {VARIANT.name}, which is on a ladder"):
        parse_experiment(raw)
