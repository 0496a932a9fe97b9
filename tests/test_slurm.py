"""The pipeline on a cluster: profiles/slurm on a real SLURM of this machine, a GPU that only the nodes have, split ladders."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import slurm
from pipeline import ARCH, ROOT, S2, S3, SLUG, UUID, Checkout
from rungs import boards, clock, schemas, settings
from rungs.errors import RungsError
from rungs.variants import load_experiment

PROFILE = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
MEASURING = ("clock", "sweep", "floor", "profile", "sanitize")
TIGHT = ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5"]
"""A cluster of one machine has no accounting and no slow file system."""
HERE = ["--profile", "profiles/slurm", *TIGHT, "--seconds-between-status-checks", "1", "--config", f"arch={ARCH}"]
LIMIT_S = 150


def needs_slurm() -> None:
    if why := slurm.missing():
        pytest.skip(why)
    pytest.importorskip("snakemake_executor_plugin_slurm", reason="pip install -r envs/requirements-slurm.txt")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(checkout measured on the stand-in's GPU, checkout counted in the emulator, what each said, SLURM's jobs)."""
    needs_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.running(folder / "cluster") as environment:
        runs = {}
        for name in ("timed", "counted"):
            checkout = Checkout.create(folder / name)
            path = checkout.repo / "config/experiments/gemm.yaml"
            for other in path.parent.glob("*.yaml"):  # fifteen Snakemakes would read them
                if other != path:
                    other.unlink()
            gemm = yaml.safe_load(path.read_text())
            gemm["ladders"]["S"] |= {
                "rungs": {rung: gemm["ladders"]["S"]["rungs"][rung] for rung in ("S2", "S3")},
                "steps": ["S2>S3"],
            }
            path.write_text(yaml.safe_dump(gemm, sort_keys=False))
            checkout.configure(experiments=["gemm"], recorded=[], preset="quick", axes={"mn": [128], "k": [64]})
            # CUDA_VISIBLE_DEVICES hides the GPU from this machine; in a job that asked for one, SLURM sets it anew.
            search = os.pathsep.join([environment["PATH"], checkout.env()["PATH"]])
            checkout.environment = {
                **environment,
                "PATH": search,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONDONTWRITEBYTECODE": "",
            }
            runs[name] = checkout
        emulated = f"results/emulator-quick/csv/emulate/gemm/{S3}.csv"
        on_gpu = [
            "--set-resources",
            "emulate:slurm_partition=gpu",
            "emulate:gres=gpu:1",
            "emulate:slurm_extra=--exclusive",
        ]
        started = {
            "timed": runs["timed"].start("sweeps", *HERE, f"device={SLUG}"),
            "counted": runs["counted"].start(emulated, *on_gpu, *HERE, "device=emulator"),
        }
        try:
            said = {name: process.communicate(timeout=LIMIT_S)[0] for name, process in started.items()}
        finally:
            for process in started.values():
                process.kill()
        asked = ["scontrol", "show", "jobs", "--oneliner"]
        jobs = subprocess.run(asked, env=runs["timed"].env(), check=True, capture_output=True, text=True).stdout
        assert [process.returncode for process in started.values()] == [0, 0], said["timed"] + said["counted"] + jobs
        yield runs, said, {job["JobId"]: job for job in map(fields, jobs.splitlines())}


def fields(line: str) -> dict[str, str]:
    """`JobId=1 Partition=cpu ...` of scontrol."""
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def submitted(said: str) -> list[str]:
    return re.findall(r"has been submitted with SLURM jobid (\d+)", said)


def test_builds_run_on_cpu_nodes_and_measurements_alone_on_one_gpu(cluster):
    _, said, jobs = cluster
    build, measure = (jobs[number] for number in submitted(said["timed"]))
    assert (build["Partition"], build["NodeList"], build.get("TresPerNode")) == ("cpu", "cpu1", None)
    assert (measure["Partition"], measure["OverSubscribe"]) == ("gpu", "NO")
    assert "gres:gpu:1" in measure["TresPerNode"] and measure["NodeList"] in ("gpu1", "gpu2")
    assert {job["JobState"] for job in jobs.values()} == {"COMPLETED"}


def test_what_is_measured_names_the_gpu_that_its_job_got(cluster):
    runs, said, _ = cluster
    assert f"rungs: There is no {SLUG} here" in said["timed"]
    live = runs["timed"].repo / f"results/{SLUG}-quick"
    for rung in (S2, S3):
        manifest = schemas.read_manifest(live / "csv/sweep/gemm" / f"{rung}.json")
        assert (manifest["gpu"]["uuid"], manifest["gpu"]["slug"], manifest["clock"]["gpu"]) == (UUID, SLUG, UUID)
        assert set(schemas.read_csv("sweep", live / "csv/sweep/gemm" / f"{rung}.csv")["status"]) == {"ok"}
    assert boards.split_ladders(live, load_experiment("gemm"), ["S"]) == []


def test_the_login_machine_finds_nothing_left_to_do(cluster):
    checkout = cluster[0]["timed"]
    planned = checkout.snakemake("--dry-run", "sweeps", "--config", f"device={SLUG}", f"arch={ARCH}")
    assert planned.code == 0 and "Nothing to be done" in planned.text, planned.text


def test_the_emulator_counts_in_a_slurm_job(cluster):
    runs, said, jobs = cluster
    build, count = (jobs[number] for number in submitted(said["counted"]))
    assert (build["Partition"], count["Partition"], count["OverSubscribe"]) == ("cpu", "gpu", "NO")
    assert "gres:gpu:1" in count["TresPerNode"]
    path = runs["counted"].repo / f"results/emulator-quick/csv/emulate/gemm/{S3}.csv"
    assert set(schemas.read_csv("emulate", path)["status"]) == {"ok"}


# ---- without a SLURM --------------------------------------------------------------------------------------------------


def test_the_profile_asks_for_a_gpu_and_a_whole_node_for_what_measures():
    assert set(PROFILE["set-resources"]) == {"build", "inspect", *MEASURING}
    for rule in MEASURING:
        asked = PROFILE["set-resources"][rule]
        assert (asked["gres"], asked["slurm_extra"]) == ("gpu:1", "--exclusive")
        assert asked["slurm_partition"] != PROFILE["default-resources"]["slurm_partition"]
        assert PROFILE["groups"][rule] == "measuring"
    rules = (ROOT / "workflow/rules").glob("*.smk")
    texts = [text for path in rules for text in path.read_text().split("\nrule ")]
    assert {text.split(":")[0].removeprefix("rule ") for text in texts if "gpu=1," in text} == set(MEASURING)


H200 = clock.Gpu(0, "NVIDIA H200", SLUG, UUID, "9.0", "sm_90a", "580", 1, None)


@pytest.mark.parametrize(
    ("device", "arch", "planning", "here", "found"),
    [
        ("h200", "sm_90a", True, [], ("h200", "", "9.0")),
        ("h200", "sm_90a", False, [H200, H200], ("h200", "", "9.0")),
        ("h200", "sm_90a", True, [H200], None),
        ("h200", "auto", True, [], None),
        ("emulator", "sm_90a", True, [], None),
        ("auto", "sm_90a", True, [], None),
        ("0", "sm_90a", True, [], None),
        (UUID, "sm_90a", True, [], None),
    ],
)
def test_a_slug_with_an_architecture_is_a_gpu_of_other_machines(monkeypatch, device, arch, planning, here, found):
    monkeypatch.setattr(clock, "gpus", lambda: here)
    gpu = settings.elsewhere(device, arch, planning)
    assert found == (gpu and (gpu.slug, gpu.uuid, gpu.capability))


def test_a_gpu_of_another_architecture_is_not_measured(monkeypatch):
    from rungs import cli

    monkeypatch.setattr(clock, "gpus", lambda: [H200])
    assert cli._gpu("h200", "sm_90a") == H200
    with pytest.raises(RungsError, match=r"is sm_90a and the binaries are sm_80: .*arch=sm_90a"):
        cli._gpu("h200", "sm_80")


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A folder of manifests that hold no more than a GPU."""
    monkeypatch.setattr(schemas, "read_manifest", lambda path: json.loads(path.read_text()))

    def written(kind: str, **uuids: str) -> Path:
        folder = tmp_path / "csv" / kind / "gemm"
        folder.mkdir(parents=True, exist_ok=True)
        for name, uuid in uuids.items():
            gpu = {"name": "a", "slug": "a", "uuid": uuid, "driver": "d"}
            keys = dict.fromkeys(("run_id", "experiment", "variant", "arch", "dtype", "fill", "csv_sha256"), "x")
            known = {"kind": "sweep", "arms": {}, "control": {"name": "c", "dtype": "d"}, "l2": "hot", "shapes": []}
            known |= {"clock": {"mode": "observe"}, "protocol": {"hash": "p"}, "software": {}}
            (folder / f"{name}.json").write_text(json.dumps(keys | known | {"gpu": gpu}))
            (folder / f"{name}.csv").touch()
        return tmp_path

    return written


def variants(**uuids: str) -> dict[str, str]:
    rungs = load_experiment("gemm").ladders["S"].rungs
    return {rungs[rung].name: uuid for rung, uuid in uuids.items()}


def test_a_ladder_on_two_gpus_is_said(live):
    folder = live("sweep", **variants(S0="GPU-1", S1="GPU-1", S2="GPU-2", S3="GPU-1"))
    (sentence,) = boards.split_ladders(folder, load_experiment("gemm"), ["S"])
    assert sentence == (
        "gemm, ladder S was measured on 2 GPUs (GPU-1: S0, S1, S3; GPU-2: S2): each step is of one of them and the rungs' shares"
        " are not, so to have it of one, delete the CSVs of the others and run again on its node."
    )


def test_a_ladder_on_one_gpu_whose_floor_is_of_another_is_said(live):
    live("floor", **{"1": "GPU-1", "2": "GPU-2"})
    folder = live("sweep", **variants(S0="GPU-1", S1="GPU-1"))
    (sentence,) = boards.split_ladders(folder, load_experiment("gemm"), ["S"])
    assert "on 2 GPUs (GPU-1: S0, S1, floor 1; GPU-2: floor 2)" in sentence


def test_a_ladder_on_one_gpu_needs_no_word(live):
    live("floor", **{"1": "GPU-1"})
    assert boards.split_ladders(live("sweep", **variants(S0="GPU-1")), load_experiment("gemm"), ["S", "B"]) == []
