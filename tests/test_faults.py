"""What goes wrong around a run: kills, full disks, tools that fail half-way, and other places than the checkout's folder.

Nothing is lost, nothing is left half written, and the same command does the rest. Faults of the variants themselves (hang, abort,
wrong) are in `test_pipeline_failures.py`, Ctrl-C and SIGHUP in `test_pipeline.py`, clones in `test_pipeline_recorded.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
from pipeline import ARCH, LIMIT_S, S0, S1, S2, S3, SHAPES, STANDIN, Checkout, Result, processes, wait_until
from rungs import schemas

MADE = {
    "build": f"build/{ARCH}/{S1}/{S1}.json",
    "inspect": f"csv/inspect/{ARCH}/{S1}.csv",
    "sweep": f"csv/sweep/gemm/{S1}.csv",
    "profile": f"csv/profile/gemm/{S1}.csv",
    "aggregate": "data/gemm/shapes.csv",
    "plot": "figures/gemm/heatmap_S.svg",
}
"""Verb -> what it makes of S1, in a results set."""


LAST = {"claims": "data/verdicts/claims.csv", "tables": "md/gemm.md", "verdict": "data/verdict.json"}
"""Verb -> what it makes last, in a results set."""


def target(verb: str) -> str:
    return f"results/h200/{(MADE | LAST)[verb]}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def half_written(checkout: Checkout) -> list[Path]:
    return [path for path in (checkout.repo / "results").rglob(".*.*") if not path.name.startswith(".ninja")]


def sweep_outcomes(checkout: Checkout, variant: str) -> dict[int, tuple[str, str]]:
    frame = schemas.read_csv("sweep", checkout.csv("sweep", variant))
    return {k: (rows["status"].iloc[0], rows["reason"].iloc[0]) for k, rows in frame.groupby("k")}


def sweep_slowly(checkout: Checkout, kind: str = "slow") -> subprocess.Popen[str]:
    """A Snakemake that is at S1's slow second shape."""
    checkout.csv("sweep", S1).unlink(missing_ok=True)
    checkout.fault(**{S1: {"kind": kind, "shape": list(SHAPES[0])}})
    log = checkout.repo / "logs" / "h200" / "sweep" / "gemm" / f"{S1}.log"
    log.unlink(missing_ok=True)
    process = checkout.start(target("sweep"))
    wait_until(lambda: log.exists() and "512x512x512" in log.read_text())
    return process


# ---- kill -9 ----


def test_snakemake_killed_at_every_stage_resumes_by_the_same_command(checkout):
    """Killed with the job, at the worst moment: a file is written and not yet in its place."""
    for verb in ("build", "inspect", "sweep", "profile"):
        (checkout.live / MADE[verb]).unlink()
    kept = {path: data for path, data in contents(checkout.live / "csv").items() if S1 not in path}
    killed = checkout.folder / "killed"
    killed.mkdir()
    verbs = {"clock", *MADE}
    for _ in verbs:
        cut = checkout.snakemake("--cores", "2", "heatmap", RUNGS_STANDIN_KILL=f"run:{killed}")
        assert cut.code == -signal.SIGKILL, cut.text
    result = checkout.snakemake("--cores", "2", "heatmap", RUNGS_STANDIN_KILL=f"run:{killed}")
    assert result.code == 0, result.text
    assert {path.name for path in killed.iterdir()} == verbs
    assert "rungs: A run in this folder was killed: what it had begun is done again." in result.said
    assert "Nothing to be done" in checkout.planned("heatmap").text
    assert {path: data for path, data in contents(checkout.live / "csv").items() if path in kept} == kept, (
        "no other is lost"
    )
    assert all((checkout.repo / target(verb)).stat().st_size for verb in MADE)
    left = half_written(checkout)
    for path in left:
        os.utime(path, (1, 1))
    assert left and checkout.planned("heatmap").code == 0 and not half_written(checkout), "what was begun is removed"


def test_jobs_killed_at_claims_tables_and_the_verdict_leave_what_is_whole_and_the_same_command_does_the_rest(checkout):
    whole = contents(checkout.live)
    for path in LAST.values():
        (checkout.live / path).unlink()
    killed = checkout.folder / "killed"
    killed.mkdir()
    cut = checkout.snakemake(target("verdict"), RUNGS_STANDIN_KILL=f"job:{killed}")
    assert cut.code == 1 and {path.name for path in killed.iterdir()} == {"claims", "tables"}, cut.text
    assert len([line for line in cut.said if "was killed (exit status 137;" in line]) == 2
    left = {path.relative_to(checkout.live).as_posix() for path in half_written(checkout)}
    assert contents(checkout.live).items() <= whole.items() | {(p, (checkout.live / p).read_bytes()) for p in left}
    assert not [path for path in LAST.values() if (checkout.live / path).exists()]
    done = checkout.snakemake("--retries", "1", target("verdict"), RUNGS_STANDIN_KILL=f"job:{killed}")
    assert done.code == 0 and {path.name for path in killed.iterdir()} == set(LAST), done.text
    assert contents(checkout.live).items() >= whole.items()
    assert not (cut.rules | done.rules) & {"sweep", "floor", "profile", "build", "aggregate"}


def test_job_killed_at_every_stage_says_so_and_leaves_nothing(checkout):
    for verb in ("sweep", "profile"):
        (checkout.live / MADE[verb]).unlink()
    killed = checkout.folder / "killed"
    killed.mkdir()
    targets = (target("sweep"), target("profile"))
    result = checkout.snakemake("--retries", "1", *targets, RUNGS_STANDIN_KILL=f"job:{killed}")
    assert result.code == 0, result.text
    assert {path.name for path in killed.iterdir()} == {"clock", "sweep", "profile"}
    said = [line for line in result.said if "was killed (exit status 137;" in line]
    assert len(said) == 3 and all(
        line.endswith("nothing of it is kept, and the same command does it again.") for line in said
    )
    assert all(status == "ok" for status, _ in sweep_outcomes(checkout, S1).values())


def test_two_snakemakes_in_one_folder_and_in_two_and_a_kill_of_one_alone(checkout, tmp_path):
    other = checkout.copy(tmp_path / "other")
    other.csv("sweep", S0).unlink()
    first = sweep_slowly(checkout)
    beside = other.start(f"results/h200/csv/sweep/gemm/{S0}.csv")  # another folder: it waits for the GPU
    second = checkout.snakemake(target("sweep"))
    assert second.code == 1 and second.jobs == [] and "Traceback" not in second.text
    assert (
        "rungs: Another Snakemake works in this folder: where both make the same files, wait until it has ended."
        in second.said
    )
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)  # Snakemake alone: its job goes on
    first.communicate()
    checkout.fault()
    again = checkout.snakemake("heatmap")
    assert again.code == 0 and again.of("sweep") == [S1], again.text
    said, _ = beside.communicate()
    assert beside.returncode == 0, said
    waited = (other.repo / "logs" / "h200" / "sweep" / "gemm" / f"{S0}.log").read_text()
    assert "wait" in waited
    wait_until(lambda: not processes(checkout))
    assert all(status == "ok" for status, _ in sweep_outcomes(checkout, S1).values())
    assert "Nothing to be done" in checkout.planned("heatmap").text


# ---- the GPU and its tools ----


def test_variant_that_corrupts_memory_after_its_tenth_launch_spoils_no_other(checkout):
    """S2 stands beside S3 in its job: S3 is timed alone at that shape, and S2 has no time there."""
    for variant in (S2, S3):
        checkout.csv("sweep", variant).unlink()
    checkout.fault(**{S2: {"kind": "tenth", "shape": list(SHAPES[0])}})
    result = checkout.snakemake(*(f"results/h200/csv/sweep/gemm/{variant}.csv" for variant in (S2, S3)))
    assert result.code == 0, result.text
    guilty, other = (sweep_outcomes(checkout, variant) for variant in (S2, S3))
    assert guilty[256] == (
        "wrong",
        f"The control's result changed during the timing: {S2} writes into the memory of others.",
    )
    assert guilty[512][0] == other[256][0] == other[512][0] == "ok"
    frame = schemas.read_csv("sweep", checkout.csv("sweep", S3))
    assert {k: set(rows["arm"]) for k, rows in frame.groupby("k")} == {256: {S3, "control"}, 512: {S2, S3, "control"}}
    shapes = json.loads(checkout.csv("sweep", S3).with_suffix(".json").read_text())["shapes"]
    assert [shape["lost"].get(S2, {}).get("status") for shape in shapes] == ["wrong", None]


def test_ncu_with_other_units_and_one_that_fails_half_way_give_no_wrong_number(checkout):
    checkout.csv("profile", S1).unlink()
    command = ["snakemake", target("profile")]
    for mode, bad, status, words in (
        ("half:4096,4096,4096", None, "crashed", "ncu's page ends early"),
        ("units", 1, "not run", "ncu printed it in Kbyte, rounded, and not in base units as asked"),
    ):
        result = checkout.snakemake(*command[1:], RUNGS_STANDIN_NCU=mode)
        assert result.code == 0 and result.rules == {"clock", "profile"}, result.text
        frame = schemas.read_csv("profile", checkout.csv("profile", S1))
        frame = frame[frame["status"] != "not on this chip"]
        for m, rows in frame.groupby("m"):
            gaps = rows[rows["status"] != "ok"]
            assert len(gaps) == (bad if bad is not None else len(rows) * (m == 4096)), mode
            assert (
                set(gaps["status"]) <= {status}
                and gaps["value"].isna().all()
                and gaps["reason"].str.contains(words).all()
            )
        (command,) = {reason.split("`")[1] for reason in frame["reason"] if "`" in reason}  # as the reason has it
        command = command.split()
    assert command == ["snakemake", "--force", target("profile")]


def test_nvml_that_disappears_under_a_measurement_costs_its_rounds_and_nothing_else(checkout):
    kept = contents(checkout.live / "csv")
    process = sweep_slowly(checkout, "slow:1")
    checkout.no_gpu()
    said, _ = process.communicate()
    assert process.returncode == 0 and "Traceback" not in said, said
    found = sweep_outcomes(checkout, S1)
    assert found == {
        256: ("flagged", "NVML no longer answered, so that nothing is known of the clock"),
        512: ("ok", ""),
    }
    assert "There is no GPU here" in checkout.planned("all").text
    checkout.machine()
    checkout.fault()
    checkout.csv("sweep", S1).unlink()
    assert checkout.planned("heatmap").of("sweep", "floor", "profile", "build") == [S1]
    assert {path for path, data in contents(checkout.live / "csv").items() if kept[path] != data} == {
        f"sweep/gemm/{S1}.json"
    }


# ---- disks ----


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A full file system of 2 MB in place of a folder, with the folder's files in it."""
    kept = folder.rename(folder.with_name(f"{folder.name}.kept"))
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small tmpfs needs the right to mount one: {mount.stderr.strip()}")
    try:
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        fill(folder)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def test_full_and_read_only_disks_are_one_sentence_and_space_resumes(checkout):
    with small_disk(checkout.live):
        for lost, goal in (list(LAST.values()), target("verdict")), ([MADE["sweep"]], target("sweep")):
            for path in lost:
                (checkout.live / path).unlink()
            fill(checkout.live)
            kept = contents(checkout.live)
            full = checkout.snakemake(goal)
            assert full.code == 1 and "Traceback" not in full.text, full.text
            said = [line for line in full.said if not line.endswith("is not here, so it is not rendered.")]
            assert said and all(line.startswith("rungs: results/h200/") for line in said), said
            reason = " cannot be written (No space left on device): make its folder writable or free some space."
            assert all(line.endswith(reason) for line in said), said
            assert contents(checkout.live).items() <= kept.items() and not half_written(checkout)
            assert not [path for path in lost if (checkout.live / path).exists()]
            (checkout.live / "filler").unlink()
        assert checkout.snakemake(target("sweep")).of("sweep") == [S1]
        subprocess.run(["mount", "-o", "remount,ro", checkout.live], check=True)
        read_only = checkout.snakemake(target("verdict"))
        assert read_only.code == 1 and "Traceback" not in read_only.text
        assert read_only.said and all("cannot be written (it is read-only): " in line for line in read_only.said)
    with small_disk(checkout.repo / ".snakemake"):
        nowhere = checkout.snakemake("all")
        assert nowhere.code == 1 and nowhere.jobs == [] and "Traceback" not in nowhere.text
        assert len(nowhere.said) == 1 and "cannot be written (No space left on device): " in nowhere.said[0]
        assert nowhere.said[0].endswith(
            "free some space, make the folder writable, or work in another one with --directory."
        )


# ---- other places ----


def run_in(checkout: Checkout, folder: Path, *arguments: str) -> Result:
    """Snakemake as a user of another folder starts it: nothing of the environment is activated, nothing finds the package."""
    system = [str(STANDIN), "/usr/local/bin", "/usr/bin", "/bin"]
    env = checkout.env(PATH=os.pathsep.join(system), PYTHONPATH=str(STANDIN))
    return Result(*forked.run(arguments, folder, env, LIMIT_S))


def test_path_with_spaces_an_environment_not_activated_and_results_elsewhere(complete_run, tmp_path):
    checkout = complete_run[0].copy(tmp_path / "it's a run (1) ü")
    assert "Nothing to be done" in checkout.planned("all").text, "moved as a whole"
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    before = contents(checkout.live)
    targets = (target("sweep").replace(S1, S0), target("inspect").replace(S1, S0))  # of one binary alone
    made = run_in(checkout, checkout.repo, "--directory", str(elsewhere), *targets)
    assert made.code == 0 and made.of("sweep") == [S0], made.text
    assert set(schemas.read_csv("sweep", elsewhere / targets[0])["status"]) == {"ok"}
    assert contents(checkout.live) == before
    standard = str(checkout.repo / "workflow" / "Snakefile")  # beside which no profile says how many cores
    again = run_in(checkout, elsewhere, "--cores", "1", "-s", standard, *targets)
    assert again.code == 0 and again.jobs == [], again.text


MODULE = """
module rungs:
    snakefile: "../repo/Snakefile"
    {options}

use rule * from rungs as rungs_*

rule mine:
    input: rules.rungs_{of}.input
    output: "mine.txt"
    default_target: True
    shell: "ls {{input}} > {{output}}"
"""


def test_as_a_module_of_another_workflow(checkout):
    outer = checkout.folder / "outer"
    outer.mkdir()
    snakefile = outer / "Snakefile"
    snakefile.write_text(MODULE.format(options="", of="all"))
    planned = run_in(checkout, outer, "--cores", "2", "--dry-run")
    assert planned.code == 0, planned.text
    assert len([job for job in planned.jobs if job.startswith("rungs_sweep: ")]) == 4
    assert {"rungs_profile", "rungs_verdict", "mine"} <= planned.rules
    made = run_in(checkout, outer, "--cores", "2", target("inspect"))
    assert made.code == 0, made.text
    assert set(schemas.read_csv("inspect", outer / target("inspect"))["status"]) == {"ok"}
    (outer / "config").mkdir()
    (outer / "config" / "config.yaml").write_text("samples: 3\nrungs: {device: emulator, measure: {rounds_min: 20}}\n")
    part = 'configfile: "config/config.yaml"\n' + MODULE
    snakefile.write_text(part.format(options='config: config["rungs"]', of="all"))
    counted = run_in(checkout, outer, "--cores", "2", "--dry-run")
    assert counted.code == 0 and "rungs_emulate" in counted.rules, counted.text
    snakefile.write_text(part.format(options="config: config", of="all"))
    refused = run_in(checkout, outer, "--cores", "2", "--dry-run")
    assert refused.code == 1 and refused.said == [
        "rungs: config: there is no key 'samples': give the module of rungs keys of its own, as `config: config[\"rungs\"]`."
    ]
    snakefile.write_text(MODULE.format(options='prefix: "sub"', of="all"))
    refused = run_in(checkout, outer, "--cores", "2", "--dry-run")
    assert refused.code == 1 and [
        line.startswith("rungs: A module of rungs takes no prefix") for line in refused.said
    ] == [True]


def test_config_takes_words_lists_and_numbers_as_a_shell_gives_them(complete_run):
    words = ["experiments=gemm", "ladders=[S]", "device=0", "axes={mn: 512, k: [256, 512]}", "recorded=h200"]
    planned = complete_run[0].planned("all", "--config", *words, "measure={target_percent: .3}")
    assert "Nothing to be done" in planned.text
