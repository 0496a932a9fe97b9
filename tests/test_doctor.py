"""The doctor on machines in every state: what it finds, the fix that it names, what still works, and that it changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rungs import build, clock, doctor, profile, schemas
from rungs.doctor import FAIL, OK, SKIPPED, WARN, Check, Facts
from rungs.errors import RungsError
from rungs.files import ROOT
from test_clock import H200, RTX, STANDIN, machine  # noqa: F401  (a fixture)

CHECKS = dict(doctor.CHECKS)


def rows(check: str, **config: object) -> dict[str, Check]:
    """What one check finds, by name; `config` in place of what config.yaml says."""
    facts = Facts()
    facts.config = {"device": "auto", **config}
    return {row.name: row for row in doctor.guarded(check, lambda: CHECKS[check](facts))}


def row(check: str, name: str = "", **config: object) -> Check:
    return rows(check, **config)[name or check]


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def verb(*arguments: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "workflow")} | environment
    argv = [sys.executable, *python, "-m", "rungs", "doctor", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


# ---- as a whole ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_gpu(tmp_path_factory):
    """(JSON, folder that was TMPDIR and held the state) of a run on this machine without a GPU."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "tmp").mkdir()
    standin = {"PYTHONPATH": f"{ROOT / 'workflow'}:{STANDIN}", "RUNGS_STANDIN_NVML": str(folder / "none")}
    run = verb("--json", TMPDIR=str(folder / "tmp"), XDG_STATE_HOME=str(folder / "state"), **standin)
    assert run.stderr == ""
    return run, json.loads(run.stdout), folder


def test_it_runs_without_a_gpu_and_says_what_the_main_job_can_do(without_gpu):
    run, report, _ = without_gpu
    assert run.returncode == (1 if report["main_job"] == "nothing" else 0)
    assert report["main_job"] == "emulator", report
    assert report["sentence"].startswith("rungs: `snakemake --cores 1 all` can run, in the emulator")
    named = [found["name"] for found in report["checks"]]
    assert {"Python", "Python packages", "snakemake", "g++", "compiler", "a kernel", "driver", "disk"} <= set(named)


def test_the_json_is_as_its_schema_says_and_holds_no_private_path(without_gpu):
    run, report, _ = without_gpu
    schemas.validate(report, "doctor", "the report")
    assert str(ROOT) not in run.stdout
    assert str(Path.home()) + "/" not in run.stdout


def test_it_leaves_nothing_behind(without_gpu):
    *_, folder = without_gpu
    assert list((folder / "tmp").iterdir()) == []
    assert not (folder / "state").exists()


def test_no_clock_is_set_and_no_lock_taken(machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(doctor, "installed", lambda package: doctor.pinned()[package])
    report = doctor.examine()
    schemas.validate(report, "doctor", "the report")
    assert report["main_job"] == "gpu", report
    assert machine.calls() == []
    assert not list(Path("/tmp").glob(f"rungs-{machine.prefix}*"))
    assert not clock._state_folder().exists()


def test_a_python_without_any_package_is_told_what_to_install():
    run = verb(python=("-S",))
    assert (run.returncode, run.stderr) == (1, "")
    lines = run.stdout.splitlines()
    assert re.search(
        r"^fail +Python packages +missing: .*pandas.*snakemake|missing: .*snakemake.*pandas", run.stdout, re.M
    )
    assert "fix: `pip install -r envs/requirements.txt`" in run.stdout
    assert "could not be looked at" not in run.stdout
    assert re.fullmatch(r"rungs: `snakemake --cores 1 all` cannot run here before this is mended: .*\.", lines[-1])
    assert any(line.startswith("ok      g++") for line in lines), "the rest is looked at all the same"


def test_a_check_that_breaks_is_a_row_and_hides_no_other(monkeypatch, capsys):
    def broken(_):
        yield Check("half", OK, "found")
        raise KeyError("odd\nthing")

    monkeypatch.setattr(doctor, "CHECKS", (("broken", broken), ("disk", doctor.disk)))
    assert doctor.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["ok", "fail", "fix:"]
    assert "could not be looked at (KeyError: 'odd\\nthing')" in lines[1]
    assert lines[3].startswith("ok      disk")


def test_what_a_check_imports_and_is_not_here_is_no_finding_of_its_own():
    def lacking():
        raise ImportError("cannot import name 'Self' from 'typing'")
        yield

    (found,) = doctor.guarded("x", lacking)
    assert (found.status, found.stops) == (SKIPPED, "") and "'Self'" in found.found


def test_without_pynvml_the_cards_are_counted_all_the_same(no_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert row("driver").status == SKIPPED and row("driver").found.endswith("NVIDIA cards: 0.")
    assert rows("GPUs") == rows("GPU") == {}


def test_on_a_terminal_it_is_a_table(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", (("disk", doctor.disk), ("x", lambda _: iter([Check("x", WARN, "f", "g", "h")])))
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert doctor.run() == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.search(r"warn +x +f *\n +fix: g *\n +costs: h", out)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert doctor.run() == 0
    assert re.search(r"warn +x +f\n +fix: g\n +costs: h", capsys.readouterr().out), "plain text where rich is missing"


@pytest.mark.parametrize(
    ("stops", "gpu", "job", "words"),
    [
        ([], "", "emulator", "can run, in the emulator"),
        ([], "GPU 0", "gpu", "can run, on GPU 0"),
        (["gpu"], "GPU 0", "emulator", "--config device=emulator` can run, and counts; for times mend a"),
        (["gpu", "all"], "GPU 0", "nothing", "cannot run here before this is mended: b"),
        ([""], "GPU 0", "gpu", "can run, on GPU 0"),
    ],
)
def test_the_last_line_says_what_the_main_job_can_run_on(stops, gpu, job, words):
    found = [Check("ab"[at], FAIL, "", stops=where) for at, where in enumerate(stops)]
    assert doctor.conclusion(found, gpu)[0] == job
    assert words in doctor.conclusion(found, gpu)[1]
    assert doctor.conclusion([Check("a", WARN, "", stops="")], gpu)[0] != "nothing"


# ---- Python and the checkout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "name", "status", "stops"),
    [
        ("pandas", "Python packages", FAIL, "all"),
        ("snakemake", "Python packages", FAIL, "all"),
        ("nvidia-ml-py", "package nvidia-ml-py", FAIL, "gpu"),
        ("torch", "package torch", WARN, ""),
        ("cuda-toolkit", "Python packages", FAIL, "all"),
    ],
)
def test_a_missing_package_is_named_with_what_it_costs(monkeypatch, gone, name, status, stops):
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == gone else doctor.pinned()[package])
    monkeypatch.setattr(clock, "gpus", lambda: [])
    found = row("Python packages", name)
    assert (found.status, found.stops, found.fix) == (status, stops, "`pip install -r envs/requirements.txt`")
    assert gone in name + found.found and found.costs


def test_torch_is_needed_where_there_is_a_gpu(machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(doctor, "installed", lambda p: None if p == "torch" else doctor.pinned()[p])
    assert row("Python packages", "package torch").stops == "gpu"
    monkeypatch.setattr(doctor, "installed", lambda p: f"{doctor.pinned()[p]}{'+cpu' * (p == 'torch')}")
    assert "no CUDA" in row("Python packages", "package torch").found


def test_another_version_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda p: "1.0" if p == "numpy" else f"{doctor.pinned()[p]}.0")
    found = row("Python packages")
    assert found.status == WARN and f"numpy 1.0 (pinned: {doctor.pinned()['numpy']})" in found.found
    assert "torch" not in found.found


def test_a_package_of_which_only_the_record_is_left_is_missing(tmp_path, monkeypatch):
    (tmp_path / "half_one-1.0.dist-info").mkdir()
    (tmp_path / "half_one-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: half-one\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.installed("half-one") is None
    (tmp_path / "half_one").mkdir()
    assert doctor.installed("half-one") is None, "a folder without code"
    (tmp_path / "half_one" / "__init__.py").touch()
    assert doctor.installed("half-one") == "1.0"


def test_torch_is_imported_only_when_asked(monkeypatch):
    def tell(said, why=""):
        monkeypatch.setattr(doctor, "_run", lambda *_: (said, why))
        facts = Facts(torch=True)
        facts.gpus = ["a GPU"]
        return next(iter(doctor.torch(facts)))

    assert row("torch").status == SKIPPED
    assert tell('["2.13.0+cu130", "13.0", 1]').found == "2.13.0+cu130 with CUDA 13.0 sees 1 GPU"
    assert tell('["2.13.0+cu130", "13.0", 0]').stops == "gpu"
    assert tell("", "python ended with exit status 1 (no module torch)").stops == "gpu"


def test_snakemake_of_another_environment_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (row("snakemake").status, row("snakemake").stops) == (FAIL, "all")
    script(tmp_path / "snakemake", "#!/bin/sh\n")
    assert row("snakemake").status == WARN


def test_the_folder_must_be_a_checkout_that_can_be_written(tmp_path, monkeypatch):
    assert row("folder").status == OK
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != Path("results"))
    assert row("folder").found == "results/ cannot be written"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "holds no Snakefile" in row("folder").found and row("folder").stops == "all"
    Path("Snakefile").touch()
    assert row("folder").status == OK
    Path(".snakemake/locks").mkdir(parents=True)
    Path(".snakemake/locks/0.input.lock").touch()
    assert (row("folder").status, row("folder").fix) == (OK, "") and "killed run" in row("folder").found
    with Path(".snakemake/rungs.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # as a Snakemake of rungs does
        assert "a Snakemake works here" in row("folder").found


def test_a_full_disk_stops_everything(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0.4e9))
    assert (row("disk").found, row("disk").stops) == ("0.40 GB are free", "all")


def test_a_broken_config_is_told_in_its_own_sentence(tmp_path, monkeypatch, no_driver):
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir()
    text = (ROOT / "config" / "config.yaml").read_text()
    Path("config/config.yaml").write_text(text.replace("device: auto", "device: h900"))
    found = row("config", device="h900")
    assert (found.status, found.stops) == (FAIL, "gpu"), "without the GPU it can run"
    assert "'h900' is asked for" in found.found
    Path("config/config.yaml").write_text(text.replace("preset: full", "preset: fast"))
    assert "key preset" in row("config").found and row("config").stops == "all"
    Path("config/config.yaml").write_text("device: emulator\n")
    assert row("config").status == OK and "device emulator: gemm, gemm_tuned" in row("config").found
    assert doctor.Facts().setting("clock", "mode") == "auto" and doctor.Facts().setting("device") == "emulator"


# ---- the compiler ----------------------------------------------------------------------------------------------------


def test_no_host_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (row("g++").status, row("g++").stops) == (FAIL, "all")
    assert "apt-get install g++" in row("g++").fix
    script(tmp_path / "g++", "#!/bin/sh\necho no libc >&2\nexit 4\n")
    assert "exit status 4 (no libc)" in row("g++").found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho libnvvm is missing >&2\nexit 3\n", "ended with exit status 3 (libnvvm is missing)"),
        ("#!/no/such/interpreter\n", "does not start (No such file or directory)"),
        ("not a program", "does not start (Exec format error)"),
    ],
)
def test_a_broken_nvcc_is_told_and_stops_everything(tmp_path, monkeypatch, text, words):
    broken = script(tmp_path / "nvcc", text)
    monkeypatch.setattr(build, "pip_cuda_tool", lambda _: broken)
    found = row("compiler")
    assert (found.status, found.stops) == (FAIL, "all")
    assert words in found.found


def test_a_missing_compiler_is_told_in_builds_own_sentence(monkeypatch):
    def missing(name):
        raise RungsError(f"{name} is not here.")

    monkeypatch.setattr(build, "pip_cuda_tool", missing)
    assert row("compiler").found == "nvcc is not here." and row("compiler").stops == "all"


def test_another_compiler_lacks_architectures_and_is_told(tmp_path, monkeypatch):
    says = 'case "$1" in --version) echo "release 12.4, V12.4.131";; --list-gpu-code) echo sm_80; echo sm_86;; *) exit 1;; esac'
    old = script(tmp_path / "nvcc", f"#!/bin/sh\n{says}\n")
    script(tmp_path / "ptxas", f"#!/bin/sh\n{says}\n")
    monkeypatch.setattr(build, "system_cuda_tool", lambda _: old)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    build._release.cache_clear()
    found = rows("compiler", toolchain="system")
    assert (
        found["compiler"].found == "nvcc 12.4.131 of system, where 13.0 is pinned" and found["compiler"].status == WARN
    )
    assert found["architectures"].found == "nvcc lacks sm_89, sm_90a, sm_100a, sm_120"
    assert found["compiler's environment"].fix == "`unset NVCC_APPEND_FLAGS`"
    assert (found["a kernel"].status, found["a kernel"].stops) == (FAIL, "all")


# ---- the driver and the GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def no_driver(machine, tmp_path, monkeypatch):  # noqa: F811
    machine.file.unlink()
    monkeypatch.setattr(doctor, "PCI", tmp_path / "pci")
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "version")
    return tmp_path


def test_no_driver_and_no_card_is_nothing_to_mend(no_driver):
    assert row("driver").status == SKIPPED and row("driver").fix == ""
    assert rows("GPUs") == rows("GPU") == {}


def test_a_card_without_a_driver(no_driver):
    for address, vendor, kind in (
        ("0", "0x10de", "0x030200"),
        ("1", "0x10de", "0x040300"),
        ("2", "0x8086", "0x030000"),
    ):
        (no_driver / "pci" / address).mkdir(parents=True)
        (no_driver / "pci" / address / "vendor").write_text(f"{vendor}\n")
        (no_driver / "pci" / address / "class").write_text(f"{kind}\n")
    assert "NVIDIA cards (1)" in row("driver").found and "580" in row("driver").fix


def test_a_container_without_its_gpus(no_driver):
    (no_driver / "version").touch()
    assert row("driver").status == WARN and "--gpus all" in row("driver").fix


def test_a_driver_that_is_too_old_or_broken(machine):  # noqa: F811
    machine.gpus({}, driver="550.54.14", cuda=12040)
    assert (row("driver").status, row("driver").stops) == (FAIL, "gpu")
    assert row("driver").found.startswith("550.54.14, for CUDA up to 12.4, and binaries of CUDA 13.0")
    machine.gpus({}, broken=True)
    assert (row("driver").status, row("driver").stops, row("GPUs").stops) == (FAIL, "gpu", "gpu")
    assert "version mismatch" in row("driver").found and "restart" in row("driver").fix


def test_the_gpus_are_listed_with_uuid_and_architecture(machine):  # noqa: F811
    (uuid,) = machine.gpus({"name": H200})
    assert row("GPUs").found == f"GPU 0 (h200, {uuid}), sm_90a, 151 GB"
    first, second = machine.gpus({"name": H200}, {"name": RTX, "capability": [12, 0], "persistence": 0})
    assert (row("GPUs").status, row("GPUs").stops) == (FAIL, "gpu")
    assert first in row("GPUs").fix
    assert rows("GPU")["GPU 1: persistence mode"].status == WARN, "every one is looked at"
    assert row("GPUs", device="rtx5090").found.endswith(f"; GPU 1 (rtx5090, {second}) is used")
    assert "persistence mode" in rows("GPU", device="rtx5090"), "only the chosen one"
    assert row("GPUs", device="emulator").status == SKIPPED
    assert rows("GPU", device="emulator") == {}


def test_hidden_gpus_are_told(machine, monkeypatch):  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert row("GPUs").fix == "`unset CUDA_VISIBLE_DEVICES`"


def test_a_gpu_that_no_device_file_describes(machine):  # noqa: F811
    machine.gpus({"name": "Tesla V100", "capability": [7, 0]})
    assert (row("GPUs").status, row("GPUs").stops) == (FAIL, "gpu")
    assert "config/devices/" in row("GPUs").fix
    assert (row("config").status, row("config").stops) == (FAIL, "gpu")


def test_a_lost_gpu_hides_no_other(machine, monkeypatch):  # noqa: F811
    machine.gpus({"name": H200}, {"name": RTX})
    both = clock.gpus()
    monkeypatch.setattr(clock, "gpus", lambda: both)
    machine.change(lost=True)
    found = rows("GPU")
    assert found["GPU 0"].stops == "gpu" and "GPU is lost" in found["GPU 0"].found
    assert found["GPU 1: persistence mode"].status == OK


@pytest.mark.parametrize(
    ("state", "name", "status", "stops", "found", "fix"),
    [
        ({}, "compute mode", OK, "", "default, without MIG", ""),
        ({"mig": 1}, "MIG", FAIL, "gpu", "is on", "-mig 0"),
        ({"mig": 0}, "compute mode", OK, "", "without MIG", ""),
        ({"compute_mode": 2}, "compute mode", FAIL, "gpu", "prohibited", "-c DEFAULT"),
        ({"compute_mode": 3}, "compute mode", WARN, "", "exclusive", "-c DEFAULT"),
        ({"persistence": 0}, "persistence mode", WARN, "", "off", "-pm 1"),
        ({"free_bytes": 5e8}, "GPU memory", WARN, "", "0.5 GB are free", "axes"),
        ({"processes": [1]}, "other processes", WARN, "", "1", "another GPU"),
        ({}, "other processes", OK, "", "none", ""),
        ({"temp_c": 91}, "health", WARN, "", "91 °C", "cool"),
        ({"power_limit_w": 500}, "health", WARN, "", "capped at 500 W of 700", "-pl 700"),
        ({"event_reasons": 0x40}, "health", WARN, "", "throttles: hw thermal", "cooling"),
        ({"event_reasons": 0x4}, "health", OK, "", "60 °C, 700 W", ""),
        ({"ecc_errors": 3}, "health", WARN, "", "3 memory errors", "replace"),
    ],
)
def test_the_state_of_a_gpu(machine, state, name, status, stops, found, fix):  # noqa: F811
    machine.change(**state)
    said = row("GPU", name)
    assert (said.status, said.stops) == (status, stops)
    assert found in said.found and fix in said.fix
    assert (said.costs == "") == (status == OK)


def test_a_gpu_on_which_another_run_measures(machine):  # noqa: F811
    if not doctor.LOCKS.exists():
        pytest.skip("this kernel does not list its locks")
    (gpu,) = clock.gpus()
    with clock.exclusive(gpu.uuid):
        assert row("GPU", "other processes").found == f"process {os.getpid()} is measuring on it"
    assert row("GPU", "other processes").status == OK


# ---- the clock -------------------------------------------------------------------------------------------------------


def lock(record: dict) -> None:
    (gpu,) = clock.gpus()
    clock.write_json(clock._state_file(gpu.uuid), {"gpu": str(gpu), "mhz": 1500, **record})


@pytest.mark.parametrize(
    ("permitted", "config", "state", "status", "stops", "words"),
    [
        (True, {}, {}, OK, "", "345 to 1980 MHz; "),
        (False, {}, {}, WARN, "", "locking it is for root"),
        (True, {}, {"supported_mhz": []}, WARN, "", "lists no clocks"),
        (False, {"mode": "lock"}, {}, FAIL, "gpu", "locking it is for root"),
        (False, {"mode": "observe"}, {}, OK, "", "leaves it alone"),
    ],
)
def test_what_is_to_be_expected_of_the_clock(machine, monkeypatch, permitted, config, state, status, stops, words):  # noqa: F811
    monkeypatch.setattr(doctor, "administrator", lambda: permitted)
    machine.change(**state)
    found = row("GPU", "clock", clock=config)
    assert (found.status, found.stops) == (status, stops)
    assert words in found.found


def test_a_lock_that_a_killed_run_left(machine, monkeypatch):  # noqa: F811
    lock({"pid": 99999999, "started": "1", "boot_id": clock._boot_id()})
    monkeypatch.setattr(doctor, "administrator", lambda: True)
    found = row("GPU", "clock")
    assert (found.status, found.fix) == (WARN, "`python -m rungs clock release`"), "a run releases it first"
    assert "1500 MHz by process 99999999, which was killed" in found.found
    assert row("GPU", "clock", clock={"mode": "observe"}).stops == "gpu"
    monkeypatch.setattr(doctor, "administrator", lambda: False)
    assert row("GPU", "clock").stops == "gpu"
    lock({"pid": 99999999, "started": "1", "boot_id": "before a restart"})
    assert "killed" not in row("GPU", "clock").found


def test_a_lock_of_a_run_that_goes_on(machine):  # noqa: F811
    lock(clock._this_process())
    assert (row("GPU", "clock").status, row("GPU", "clock").found) == (
        OK,
        f"is locked by process {os.getpid()}, which is measuring",
    )


@pytest.mark.parametrize(("mask", "permitted"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_root_in_a_container_may_lack_the_right(tmp_path, monkeypatch, mask, permitted):
    monkeypatch.setattr(doctor, "STATUS", tmp_path / "status")
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{mask}\n")
    assert doctor.administrator() is permitted


# ---- ncu -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admin_only", "administrator", "status", "words"),
    [
        ("1", False, WARN, "ERR_NVGPUCTRPERM"),
        ("1", True, OK, "may count"),
        ("0", False, OK, "everybody may count"),
        (None, False, OK, "does not say"),
    ],
)
def test_who_may_read_counters(machine, tmp_path, monkeypatch, admin_only, administrator, status, words):  # noqa: F811
    monkeypatch.setattr(doctor, "PARAMS", tmp_path / "params")
    monkeypatch.setattr(doctor, "administrator", lambda: administrator)
    monkeypatch.setattr(profile, "holders", lambda: [])
    if admin_only:
        (tmp_path / "params").write_text(f"RmProfilingAdminOnly: {admin_only}\nOther: 0\n")
    found = row("ncu", profile={"enabled": True, "ncu": str(STANDIN / "ncu")})
    assert (found.status, found.stops) == (status, "")
    assert words in found.found
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.fix) == (status == WARN)


def test_ncu_that_is_missing_broken_or_held(machine, tmp_path, monkeypatch):  # noqa: F811
    ncu = {"enabled": True, "ncu": str(tmp_path / "ncu")}
    assert row("ncu", profile=ncu).status == WARN and "no counters" in row("ncu", profile=ncu).costs
    script(tmp_path / "ncu", "#!/bin/sh\nexit 1\n")
    assert "does not say its version" in row("ncu", profile=ncu).found
    monkeypatch.setattr(profile, "holders", lambda: [(7, "nv-hostengine")])
    monkeypatch.setattr(doctor, "PARAMS", tmp_path / "params")
    assert "held by nv-hostengine (process 7)" in row("ncu", profile={"ncu": str(STANDIN / "ncu")}).found
    assert row("ncu", profile={"enabled": False}).status == SKIPPED


# ---- its words -------------------------------------------------------------------------------------------------------


def test_paths_are_shortened(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    said = doctor.public(f"/home/ann/x and /home/anna/x, {ROOT}/kernels,\n\n{ROOT}")
    assert said == "~/x and /home/anna/x, ./kernels, ."


def test_a_tool_that_hangs_is_ended(tmp_path):
    began = time.monotonic()
    assert doctor._run([script(tmp_path / "x", "#!/bin/sh\nexec sleep 60\n")], 0.2)[1].endswith(
        "did not end within 0.2 s"
    )
    assert time.monotonic() - began < 10
