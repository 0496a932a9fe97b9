"""Counters through Nsight Compute: the command line, ncu's page, and every way of not getting one, each with its own word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rungs import clock, profile, schemas
from rungs.errors import RungsError
from rungs.files import sha256_bytes, sha256_file
from rungs.plan import launch_hash
from rungs.variants import architectures, load_device, load_experiment

TESTS = Path(__file__).parent
NCU = str(TESTS / "standin" / "ncu")
GEMM = load_experiment("gemm")
VARIANT = GEMM.variant("B3")
PLANNED = "smsp__inst_executed_pipe_lsu_mem_shared_op_ld.sum"
STALLS = [
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "lg_throttle", "long_scoreboard", "math_pipe_throttle"),
    *("membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping"),
    *("tex_throttle", "wait"),
]


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", architectures())
def test_every_chip_has_the_stall_reasons_and_not_the_plans_metric(arch):
    on_chip = {m.metric: m.on_chip for m in profile.metrics_for(load_device(arch).chip)}
    assert on_chip[PLANNED] is False
    named = {m.removeprefix("smsp__average_warps_issue_stalled_") for m in on_chip if "issue_stalled" in m}
    assert {f"{reason}_per_issue_active.ratio" for reason in STALLS} == named - {
        "imc_miss_per_issue_active.ratio",
        "gmma_per_issue_active.ratio",
    }
    assert all(on_chip[f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"] for reason in STALLS)


@pytest.mark.parametrize(
    ("metric", "chips"),
    [
        ("smsp__inst_executed_op_tma_ld.sum", {"gh100", "gb100", "gb202"}),
        ("smsp__inst_executed_op_ldgsts.sum", {"ga100", "ga102", "ad102", "gh100", "gb100", "gb202"}),
        ("sm__inst_executed_pipe_tensor_op_gmma.sum", {"gh100"}),
        ("smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio", {"gh100"}),
        ("smsp__average_warps_issue_stalled_imc_miss_per_issue_active.ratio", {"ga100", "ga102", "ad102", "gh100"}),
        (PLANNED, set()),
    ],
)
def test_metric_by_chip(metric, chips):
    every = ["ga100", "ga102", "ad102", "gh100", "gb100", "gb202"]
    assert {c for c in every if {m.metric: m.on_chip for m in profile.metrics_for(c)}[metric]} == chips


def test_metrics_and_their_meanings_stand_once():
    metrics = profile.metrics_for("gh100")
    assert len({m.metric for m in metrics}) == len({m.want for m in metrics}) == len(metrics) == 50


def test_unknown_chip():
    with pytest.raises(RungsError, match=r"no chip 'gv100': it knows ga100, .*gb202"):
        profile.metrics_for("gv100")


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("l2", "cache"), [("hot", "none"), ("cold", "all")])
def test_command_controls_clock_caches_kernel_and_launch(l2, cache):
    argv = profile.command("/ncu", ["python", "-m", "rungs"], "gemm", ["a.sum", "b.sum"], "/tmp/log", l2)
    assert argv[0] == "/ncu"
    assert argv[-3:] == ["python", "-m", "rungs"]
    assert set(argv[1:-3]) == {
        "--clock-control=none",
        f"--cache-control={cache}",
        "--kernel-name=gemm",
        "--launch-skip=2",
        "--launch-count=1",
        "--metrics=a.sum,b.sum",
        "--csv",
        "--page=raw",
        "--print-units=base",
        "--log-file=/tmp/log",
    }


def test_ncu_is_found_on_path_and_by_its_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{Path(NCU).parent}:{os.environ['PATH']}")
    assert profile.find_ncu("auto") == NCU
    assert profile.find_ncu(NCU) == NCU
    assert profile.ncu_version(NCU) == "2025.3.1.0"
    with pytest.raises(RungsError, match=r"not installed at .*absent"):
        profile.find_ncu(str(tmp_path / "absent"))


def test_missing_ncu_is_one_sentence_with_the_fix(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(RungsError, match=r"^ncu is not installed: install Nsight Compute .*`profile.ncu`.*\.$"):
        profile.find_ncu("auto")


# ---- ncu's page ------------------------------------------------------------------------------------------------------

PAGE = """==PROF== Connected to process 7 (/usr/bin/python3.11)
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 9 passes
==PROF== Disconnected from process 7
"ID","Kernel Name","Context","sm__cycles_elapsed.max","lts__t_sector_hit_rate.pct","dram__bytes.sum"
"","","","cycle","%","byte"
"0","gemm(const __nv_bfloat16 *, int)","1","1,234,567","98.5","12,345.75 (1; 2; 3)"
"1","void other<int, 2>(int)","1","5","n/a","1e+09"
"""


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace('"5"', '"5"\r,'),
        PAGE.replace('"n/a"', f'"{"9" * 140_000}"'),
    ],
    ids=["carriage return", "endless cell"],
)
def test_a_page_that_is_no_csv_is_one_sentence(page):
    with pytest.raises(RungsError, match=r"^ncu's page (is no CSV \(.*\)|ends early, .*)\.$"):
        profile.parse(page)


def test_page_is_read_by_column_name():
    assert profile.parse(PAGE) == [
        ("gemm", "sm__cycles_elapsed.max", "cycle", 1234567.0),
        ("gemm", "lts__t_sector_hit_rate.pct", "%", 98.5),
        ("gemm", "dram__bytes.sum", "byte", 12345.75),
        ("other", "sm__cycles_elapsed.max", "cycle", 5.0),
        ("other", "lts__t_sector_hit_rate.pct", "%", None),
        ("other", "dram__bytes.sum", "byte", 1e9),
    ]


def test_page_in_another_order_without_units_and_with_warnings_between():
    text = '"dram__bytes.sum","Kernel Name","ID"\n==WARNING== something\n"5","ns::gemm","0"\n'
    assert profile.parse(text) == [("gemm", "dram__bytes.sum", "", 5.0)]


@pytest.mark.parametrize("cell", ["n/a", "", "nan", "inf", "-", "no data"])
def test_cell_without_a_number(cell):
    text = f'"ID","Kernel Name","dram__bytes.sum"\n"0","gemm","{cell}"\n'
    assert profile.parse(text) == [("gemm", "dram__bytes.sum", "", None)]


@pytest.mark.parametrize("text", ["", "==PROF== Connected to process 7\n", "hello, world\n"])
def test_no_page(text):
    assert profile.parse(text) == []


def test_page_cut_anywhere_gives_no_number():
    page = PAGE.split('"1","void')[0]
    assert profile.parse(page) == profile.parse(page.removesuffix("\n"))
    for cut in range(page.index('"ID"') + len('"ID","Kernel Name"'), len(page) - 1):
        with pytest.raises(RungsError, match="ends early"):
            profile.parse(page[:cut])


# ---- a rung's CSV ----------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "build" / f"{VARIANT.name}.json"
    path.parent.mkdir()
    path.with_suffix(".cubin").write_bytes(b"cubin")
    built = {
        "kind": "build",
        "variant": VARIANT.name,
        "experiment": "gemm",
        "arch": "sm_90a",
        "status": "ok",
        "reason": "",
    }
    built |= {
        "build_id": "b1",
        "source_hash": "s1",
        "sources": {},
        "macros": GEMM.macros(VARIANT, load_device("sm_90a")),
        "flags": [],
        "compiler": {},
        "ptxas": {},
    }
    built |= {"smem_dynamic_bytes": 77824, "threads": 256, "ptx_sha256": "p1", "code_hash": "k1"}
    path.write_text(json.dumps(built | {"cubin_sha256": sha256_bytes(b"cubin")}))
    return path


def run(gpu, manifest, shapes=((4096, 4096, 4096),), ncu=NCU, arch="sm_90a", l2="hot", **more):
    """(rows, manifest, ncu's calls) of one job."""
    folder = manifest.parent.parent
    output = folder / "out.csv"
    profile.profile(GEMM, VARIANT, arch, manifest, shapes, ncu, load_device(arch), gpu, l2, output, **more)
    calls = folder / "calls.jsonl"
    lines = calls.read_text().splitlines() if calls.exists() else []
    written = json.loads(output.with_suffix(".json").read_text())
    assert written["csv_sha256"] == sha256_file(output)
    return schemas.read_csv("profile", output), written, [json.loads(line) for line in lines]


def gap(rows, metric="dram__bytes.sum"):
    """(status, reason) of a metric that the chip has, over all shapes; no value beside it."""
    found = rows[rows.metric == metric]
    assert found.value.isna().all()
    assert len(set(zip(found.status, found.reason, strict=True))) == 1
    return found.status.iloc[0], found.reason.iloc[0]


def test_one_row_per_shape_and_metric(gpu, manifest):
    shapes = [(4096, 4096, 4096), (512, 512, 4096)]
    rows, written, calls = run(gpu, manifest, shapes)
    assert list(rows.groupby(["m", "n", "k"]).size()) == [50, 50]
    at_first = rows[rows.m == 4096].set_index("metric")
    asked = calls[0]["options"]["metrics"].split(",")
    assert at_first.value[asked[6]] == 7000.5
    assert at_first.unit[asked[6]] == "inst"
    assert set(at_first.status[asked]) == {"ok"}
    assert set(rows.run_id) == {written["run_id"]}


def test_the_plans_metric_is_not_asked_for_and_said_not_to_exist(gpu, manifest):
    rows, written, calls = run(gpu, manifest)
    assert PLANNED not in calls[0]["options"]["metrics"]
    assert PLANNED not in written["ncu"]["metrics"]
    assert gap(rows, PLANNED) == ("not on this chip", "gh100 has no such counter.")


def test_chip_decides_what_is_asked_for(gpu, manifest):
    rows, _, calls = run(gpu, manifest, arch="sm_80")
    assert "op_tma_ld" not in calls[0]["options"]["metrics"]
    assert gap(rows, "smsp__inst_executed_op_tma_ld.sum") == ("not on this chip", "ga100 has no such counter.")


def test_child_launches_the_binary_of_the_manifest_at_each_shape(gpu, manifest):
    _, _, calls = run(gpu, manifest, [(128, 256, 512), (4096, 4096, 256)], l2="cold")
    child = [sys.executable, "-m", "rungs", "launch", "--experiment", "gemm", "--arch", "sm_90a", "--gpu", gpu.uuid]
    child += ["--manifest", str(manifest), "--shape"]
    assert [c["child"] for c in calls] == [[*child, shape] for shape in ("128,256,512", "4096,4096,256")]
    assert [c["options"]["cache-control"] for c in calls] == ["all", "all"]


def test_manifest_says_what_was_counted_and_how(gpu, manifest):
    _, written, calls = run(gpu, manifest)
    assert written["binary"] == {
        "variant": VARIANT.name,
        "build_id": "b1",
        "source_hash": "s1",
        "cubin_sha256": sha256_bytes(b"cubin"),
        "code_hash": "k1",
        "launch_hash": launch_hash(GEMM, VARIANT, load_device("sm_90a"), [(4096, 4096, 4096)]),
    }
    assert written["ncu"]["version"] == "2025.3.1.0"
    assert written["ncu"]["metrics"] == calls[0]["options"]["metrics"].split(",")
    assert (written["ncu"]["clock_control"], written["ncu"]["cache_control"]) == ("none", "none")
    assert (written["gpu"]["uuid"], written["l2"], written["kind"]) == (gpu.uuid, "hot", "profile")


def test_time_stays_under_ncus_own_name(gpu, manifest):
    rows, _, _ = run(gpu, manifest)
    assert rows[rows.metric == "gpu__time_duration.sum"].status.tolist() == ["ok"]
    assert not [name for name in (*rows.columns, *rows.metric) if "time_us" in name]


FAILURES = {
    "perm": ("not permitted", "ERR_NVGPUCTRPERM.*NVreg_RestrictProfilingToAdminUsers=0.*administrator"),
    "nomatch": ("kernel not matched", "named gemm was seen; it launched vectorized_elementwise_kernel, stamp"),
    "held": ("not run", "Another profiler holds the counters: .*nothing was stopped"),
    "half": ("crashed", "page ends early"),
    "crash": ("crashed", r"exit status 1 \(CUDA has no kernel image for this GPU\)"),
    "error": ("crashed", "ncu says: Cuda driver is not compatible"),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_failure_is_a_row_with_its_own_word(gpu, manifest, monkeypatch, tmp_path, mode):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", mode)
    rows, _, _ = run(gpu, manifest)
    status, reason = gap(rows)
    wanted, pattern = FAILURES[mode]
    assert status == wanted
    assert re.search(pattern, reason)
    assert reason.endswith(".")
    assert (f"`snakemake --force {tmp_path / 'out.csv'}`" in reason) == (wanted in ("crashed", "not run"))
    assert gap(rows, PLANNED)[0] == "not on this chip"
    assert "ok" not in set(rows.status)


def test_missing_value_is_not_on_this_chip_and_the_others_are_there(gpu, manifest, monkeypatch):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", "na")
    rows, _, calls = run(gpu, manifest)
    absent = calls[0]["options"]["metrics"].split(",")[1]
    assert gap(rows, absent) == ("not on this chip", "ncu has no value of it on this gh100.")
    assert set(rows[rows.metric != absent].status) == {"ok", "not on this chip"}


def test_the_three_words_for_a_gap_differ(gpu, manifest, monkeypatch):
    words = set()
    for mode in ("perm", "nomatch", "ok"):
        monkeypatch.setenv("RUNGS_STANDIN_NCU", mode)
        rows, _, _ = run(gpu, manifest)
        words.add(gap(rows, PLANNED if mode == "ok" else "dram__bytes.sum")[0])
    assert words == {"not permitted", "kernel not matched", "not on this chip"}


def test_permission_is_asked_for_once(gpu, manifest, monkeypatch):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", "perm")
    rows, _, calls = run(gpu, manifest, [(4096, 4096, 4096), (512, 512, 4096)])
    assert len(calls) == 1
    assert set(rows.m) == {4096, 512}
    assert gap(rows)[0] == "not permitted"


def test_other_profiler_is_named_and_lives(gpu, manifest, monkeypatch, tmp_path):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", "held")
    shutil.copy(shutil.which("sleep"), tmp_path / "nv-hostengine")
    other = subprocess.Popen([tmp_path / "nv-hostengine", "60"])
    try:
        rows, _, _ = run(gpu, manifest)
        assert f"nv-hostengine (process {other.pid})" in gap(rows)[1]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_missing_ncu_is_not_run(gpu, manifest, tmp_path):
    rows, written, _ = run(gpu, manifest, ncu=str(tmp_path / "absent"))
    status, reason = gap(rows)
    assert (status, written["ncu"]["version"]) == ("not run", "")
    assert "not installed" in reason


def test_refused_shape_is_not_launched_and_the_next_one_is(gpu, manifest):
    rows, _, calls = run(gpu, manifest, [(4096, 4096, 4100), (4096, 4096, 4096)])
    assert len(calls) == 1
    status, reason = gap(rows[rows.k == 4100])
    assert status == "refused"
    assert "K=4100" in reason
    assert set(rows[rows.k == 4096].status) == {"ok", "not on this chip"}


@pytest.mark.parametrize("status", ["build failed", "not on this chip"])
def test_variant_without_a_binary_keeps_its_reason(gpu, manifest, status):
    built = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(built | {"status": status, "reason": "It spills."}))
    rows, written, calls = run(gpu, manifest)
    assert gap(rows) == (status, "It spills.")
    assert calls == []
    assert written["binary"] == {"variant": VARIANT.name}


def test_binary_that_is_not_its_manifests_is_an_error(gpu, manifest):
    manifest.with_suffix(".cubin").write_bytes(b"another")
    with pytest.raises(RungsError, match="not the binary of"):
        run(gpu, manifest)
    assert not (manifest.parent.parent / "out.csv").exists()


def ended(pid: int) -> bool:
    """Whether that process is gone within 5 s, or waits for nobody but init."""
    end = time.monotonic() + 5
    while clock._started(pid) is not None and time.monotonic() < end:
        time.sleep(0.02)
    return clock._started(pid) is None


def test_ncu_that_hangs_is_ended_with_all_it_started(gpu, manifest, monkeypatch):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", "hang")
    rows, _, calls = run(gpu, manifest, time_limit_s=1.0)
    status, reason = gap(rows)
    assert status == "time limit" and reason.startswith("ncu did not end within 1 s. `snakemake --force ")
    assert reason.endswith("with the flags of this run, counts it again; its times and all other counters are kept.")
    assert ended(calls[0]["pid"])


def test_signal_ends_ncu_too(gpu, manifest, monkeypatch, tmp_path):
    monkeypatch.setenv("RUNGS_STANDIN_NCU", "hang")
    code = (
        "import sys; from pathlib import Path; from rungs import clock, profile\n"
        "from rungs.variants import load_device, load_experiment\n"
        "gemm = load_experiment('gemm')\n"
        "profile.profile(gemm, gemm.variant('B3'), 'sm_90a', Path(sys.argv[1]), [(512, 512, 512)], sys.argv[2],"
        " load_device('sm_90a'), clock.gpus()[0], 'hot', Path(sys.argv[3]))"
    )
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent / 'workflow'}:{TESTS / 'standin'}"}
    output = tmp_path / "out.csv"
    process = subprocess.Popen([sys.executable, "-c", code, manifest, NCU, output], env=env)
    calls = tmp_path / "calls.jsonl"
    end = time.monotonic() + 20
    while not calls.exists() and time.monotonic() < end:
        time.sleep(0.02)
    pid = json.loads(calls.read_text())["pid"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert ended(pid)
    assert not output.exists()


def lock_record(gpu, mhz):
    return clock.decide(gpu, "lock", mhz)


def setters(tmp_path):
    log = tmp_path / "nvml.jsonl"
    return [json.loads(line)["call"] for line in log.read_text().splitlines()] if log.exists() else []


def test_counting_holds_the_clock_of_its_record(gpu, manifest, tmp_path):
    record = lock_record(gpu, 1500)
    before = len(setters(tmp_path))
    _, written, _ = run(gpu, manifest, clock_record=record)
    assert setters(tmp_path)[before:] == ["lock", "reset"]
    assert (written["clock"]["mode"], written["clock"]["read_back_mhz"]) == ("lock", 1500)


def test_counting_without_a_known_clock_locks_nothing(gpu, manifest, tmp_path):
    record = lock_record(gpu, "auto")
    before = len(setters(tmp_path))
    rows, written, _ = run(gpu, manifest, clock_record=record)
    assert setters(tmp_path)[before:] == []
    assert written["clock"]["mode"] == "observe"
    assert "ok" in set(rows.status)


def test_nothing_is_locked_where_nothing_is_counted(gpu, manifest, tmp_path):
    record = lock_record(gpu, 1500)
    before = len(setters(tmp_path))
    run(gpu, manifest, clock_record=record, ncu=str(tmp_path / "absent"))
    assert setters(tmp_path)[before:] == []


def test_guard_is_free_again(gpu, manifest):
    run(gpu, manifest)
    with contextlib.ExitStack() as stack:
        stack.enter_context(clock.exclusive(gpu.uuid))


@pytest.mark.parametrize(
    "content", [b"", b"want,metric,gh100\n", b"\xff\xfe", b"want,metric,gh100\na,x,1\nb,x,1\n", b"want\nonly\n"]
)
def test_a_damaged_list_of_metrics_is_one_sentence(monkeypatch, tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    monkeypatch.setattr(profile, "METRICS", path)
    profile.metrics_for.cache_clear()
    with pytest.raises(RungsError, match="restore it from version control"):
        profile.metrics_for("gh100")
    profile.metrics_for.cache_clear()


@pytest.mark.parametrize(("number", "word"), [(11, "SIGSEGV"), (40, "signal 40")])
def test_a_tool_that_a_signal_ends_is_one_sentence(number, word):
    failure, _ = profile.run_tool(["sh", "-c", f"kill -{number} $$"], 30)
    assert failure == (profile.CRASHED, f"ncu was ended by {word}.")
