"""Results sets: a recorded set gives back every byte that its jobs wrote, and a damaged one is one sentence."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from binaries import manifest_of
from rungs import record, results, workloads
from rungs.errors import RungsError
from rungs.files import ROOT, sha256_bytes
from rungs.plan import launch_hash
from rungs.results import ResultsSet, merged, recorded_sets, split_common, write_recorded
from rungs.variants import load_device, load_experiment
from synthetic import World, write_set

GEMM = load_experiment("gemm")
SHAPES = [(512, 512, 256), (512, 512, 512)]
KINDS = ("sweep", "floor", "profile")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "h200"
    write_set(folder, World(variants=("B2", "B3", "B5"), shapes=SHAPES, rounds=8))
    return ResultsSet(folder)


@pytest.fixture
def packed(live, tmp_path):
    """The same jobs as a recorded set has them."""
    for kind in KINDS:
        jobs = [live.job(kind, "gemm", name) for name in live.jobs(kind, "gemm")]
        write_recorded(tmp_path / "set", kind, "gemm", {job.name: (job.csv, job.manifest) for job in jobs})
    return ResultsSet(tmp_path / "set")


def test_a_recorded_set_gives_back_every_byte_of_csvs_and_manifests(live, packed):
    assert len(list(packed.path.rglob("*.*"))) == 2 * len(KINDS)
    for kind in KINDS:
        assert packed.jobs(kind, "gemm") == live.jobs(kind, "gemm") and packed.experiments(kind) == ["gemm"]
        for name in live.jobs(kind, "gemm"):
            was, now = live.job(kind, "gemm", name), packed.job(kind, "gemm", name)
            assert now.csv == was.csv and now.manifest == was.manifest and now.intact
            assert packed.has(kind, "gemm", name) and name in packed.where(kind, "gemm", name)
    assert not packed.has("sweep", "gemm", "B9") and packed.jobs("sweep", "nothing") == []
    assert packed.files("sweep", "gemm") == [packed.table("sweep", "gemm"), packed.manifests("sweep", "gemm")]


def test_a_table_leaves_out_what_the_manifests_say(packed):
    head = gzip.decompress(packed.table("sweep", "gemm").read_bytes()).decode().splitlines()[0]
    assert head.startswith("job,m,n,k,round,arm,") and "run_id" not in head
    written = json.loads(packed.manifests("sweep", "gemm").read_text())
    assert written["constant"] == ["run_id"] and written["common"]["gpu"]["name"] == "NVIDIA H200"
    assert all("gpu" not in own for own in written["jobs"].values())


def test_the_same_jobs_are_the_same_bytes(packed, tmp_path):
    jobs = {name: packed.job("sweep", "gemm", name) for name in reversed(packed.jobs("sweep", "gemm"))}
    write_recorded(tmp_path / "again", "sweep", "gemm", {name: (job.csv, job.manifest) for name, job in jobs.items()})
    for path in (packed.table("sweep", "gemm"), packed.manifests("sweep", "gemm")):
        assert (tmp_path / "again" / path.relative_to(packed.path)).read_bytes() == path.read_bytes()


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.just([]),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
MANIFESTS = st.dictionaries(
    st.sampled_from("xyz"), st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), min_size=1, max_size=3
)


@settings(max_examples=300, deadline=None)
@given(MANIFESTS)
def test_what_manifests_share_is_put_together_again(manifests):
    common, own = split_common(manifests)
    assert {name: merged(common, value) for name, value in own.items()} == manifests


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".csv.gz", lambda data: data[:-9]),
        (".csv.gz", lambda data: b"no gzip"),
        (".csv.gz", lambda data: gzip.compress(b"job,m\nB9,1\n")),
        (".csv.gz", lambda data: gzip.compress(b"job,m\n\xff\n")),
        (".json", lambda data: data[: len(data) // 2]),
        (".json", lambda data: b"{}"),
        (".json", lambda data: b'{"constant": [], "common": {}, "jobs": {"a": 1}}'),
        (".json", lambda data: data.replace(b'"run_id"', b'"run_ix"')),
    ],
)
def test_a_damaged_recorded_set_is_one_sentence(packed, suffix, damage):
    path = packed.path / "csv" / "sweep" / f"gemm{suffix}"
    name = packed.jobs("sweep", "gemm")[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RungsError, match=rf"gemm{suffix}.*restore it from version control"):
        packed.job("sweep", "gemm", name)


def test_an_edited_cell_is_not_the_csv_of_its_manifest(packed):
    path = packed.table("sweep", "gemm")
    text = gzip.decompress(path.read_bytes()).replace(b",control,", b",controk,", 1)
    path.write_bytes(gzip.compress(text))
    assert [packed.job("sweep", "gemm", name).intact for name in packed.jobs("sweep", "gemm")].count(False) == 1


def test_csvs_that_one_table_cannot_hold_are_refused(live, tmp_path):
    name = live.jobs("sweep", "gemm")[0]
    job = live.job("sweep", "gemm", name)
    for csv in (
        job.csv.replace(b"run_id,m,", b"run_id,M,"),
        job.csv.replace(job.manifest["run_id"].encode(), b"other", 1),
    ):
        with pytest.raises(RungsError, match="has other columns or constants than the others"):
            write_recorded(tmp_path, "sweep", "gemm", {"a": (job.csv, job.manifest), "b": (csv, job.manifest)})
    assert not list(tmp_path.rglob("*.*"))


# ---- record ----------------------------------------------------------------------------------------------------------


def test_merging_keeps_other_variants_and_drops_those_that_are_no_more(packed, live):
    first, *_ = packed.jobs("sweep", "gemm")
    job = packed.job("sweep", "gemm", first)
    csv = job.csv.replace(b"8,", b"9,", 1)
    new = {"sweep": {first: (csv, {**job.manifest, "csv_sha256": sha256_bytes(csv)})}}
    found, gone = record._merged(packed, GEMM, new)
    assert found["sweep"][first][0] == csv and found["sweep"].keys() == set(packed.jobs("sweep", "gemm")) and not gone
    odd = {**job.manifest, "variant": "abl_L9_R1_bl1_s2_sw1"}
    write_recorded(
        packed.path, "sweep", "gemm", {"abl_L9_R1_bl1_s2_sw1": (job.csv, odd), first: (job.csv, job.manifest)}
    )
    found, gone = record._merged(packed, GEMM, {})
    assert (list(found["sweep"]), gone) == ([first], ["abl_L9_R1_bl1_s2_sw1"])


def test_what_no_table_can_be_made_from_changes_nothing(packed, monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    name = packed.jobs("sweep", "gemm")[0]
    job = packed.job("sweep", "gemm", name)
    jobs = {name: (job.csv, {**job.manifest, "fill": "zeros"})}
    merged_jobs = {
        "sweep": {
            **{
                n: (packed.job("sweep", "gemm", n).csv, packed.manifest("sweep", "gemm", n))
                for n in packed.jobs("sweep", "gemm")
            },
            **jobs,
        }
    }
    with pytest.raises(RungsError, match="a table never mixes fills"):
        record._write(packed, GEMM, "sm_90a", merged_jobs)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class Killed(BaseException):
    """What a test raises where SIGKILL would end the process."""


def test_a_record_that_is_killed_between_two_files_is_finished_by_the_next(packed, monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    name = packed.jobs("sweep", "gemm")[0]
    old = packed.job("sweep", "gemm", name)
    csv = old.csv.replace(b",ok,", b",flagged,", 1)
    new = {"sweep": {name: (csv, {**old.manifest, "csv_sha256": sha256_bytes(csv)})}}
    merged_jobs, _ = record._merged(packed, GEMM, new)
    moved = []

    def replace(source, target):
        if moved:
            raise Killed
        moved.append(Path(source).rename(target))

    with monkeypatch.context() as killing:
        killing.setattr(record.os, "replace", replace)
        killing.setattr(record.shutil, "rmtree", lambda *_, **__: None)
        killing.setattr(results, "whole", whole_by_rename)
        with pytest.raises(Killed):
            record._write(packed, GEMM, "sm_90a", merged_jobs)
    assert len(moved) == 1 and [path.name for path in tmp_path.glob(".*")] != []
    with record._alone():
        assert packed.job("sweep", "gemm", name).csv == csv and not list(tmp_path.glob(".*"))
        assert all(packed.job(*each[:3]).intact for each in results.each_job(packed, KINDS))


@contextlib.contextmanager
def whole_by_rename(path):
    """`files.whole` without os.replace, which the test above breaks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path.with_name(f"{path.name}.new")
    path.with_name(f"{path.name}.new").rename(path)


def test_what_a_killed_record_left_is_dropped_where_the_set_has_changed_since(packed, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    left = tmp_path / f".set{results.STAGED}abc"
    shutil.copytree(packed.path / "csv", left / "csv")
    (left / record.READY).write_text(json.dumps(dict.fromkeys(record._places(left), "another hash")))
    (left / "csv" / "sweep" / "gemm.json").write_text("old")
    before = packed.manifests("sweep", "gemm").read_text()
    with record._alone():
        assert packed.manifests("sweep", "gemm").read_text() == before and not left.exists()
    assert "is dropped, since the set has changed since: record it again" in capsys.readouterr().out


def test_a_sweep_beside_a_predecessor_of_other_code_is_refused(packed):
    name = GEMM.variant("B3").name
    jobs = {n: (None, packed.manifest("sweep", "gemm", n)) for n in packed.jobs("sweep", "gemm")}
    built = {n: (None, {"code_hash": manifest["arms"][n]["code_hash"]}) for n, (_, manifest) in jobs.items()}
    record._check_arms({"inspect": built}, jobs)
    built[GEMM.variant("B2").name] = (None, {"code_hash": "other"})
    with pytest.raises(RungsError, match=rf"{name} was timed beside \S+, which is recorded with other machine code"):
        record._check_arms({"inspect": built}, {name: jobs[name]})


def test_a_set_of_the_older_layout_and_a_table_alone_are_sentences(packed, tmp_path):
    old = tmp_path / "old"
    path = old / "csv" / "sweep" / "gemm" / "B3.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b"run_id\n"))
    with pytest.raises(RungsError, match=r"sweep/gemm is of an older rungs, which recorded a file for each job"):
        ResultsSet(old).jobs("sweep", "gemm")
    assert ResultsSet(old).experiments("sweep") == ["gemm"]
    packed.manifests("sweep", "gemm").unlink()
    with pytest.raises(RungsError, match=r"gemm\.json does not exist: restore it from version control"):
        packed.jobs("sweep", "gemm")


def test_what_a_binary_works_on_is_part_of_its_launch(monkeypatch):
    experiment = load_experiment("tma_latency")
    variant, device = experiment.variant("TL0"), load_device("sm_90a")
    points = experiment.shapes(variant)[:2]
    before = launch_hash(experiment, variant, device, points)
    module = workloads.of(experiment)
    work = module.work
    with monkeypatch.context() as changed:
        changed.setattr(module, "work", lambda *of: replace(work(*of), units=2 * work(*of).units))
        assert launch_hash(experiment, variant, device, points) != before
    assert launch_hash(experiment, variant, device, points) == before


def test_what_a_killed_record_had_only_begun_is_removed(packed, monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    begun = tmp_path / f".set{results.STAGED}abc"
    shutil.copytree(packed.path, begun)
    (begun / "csv" / "sweep" / "gemm.json").write_text("half")
    before = packed.manifests("sweep", "gemm").read_text()
    with record._alone():
        assert not begun.exists() and packed.manifests("sweep", "gemm").read_text() == before


# ---- the sets of this repo -------------------------------------------------------------------------------------------


def test_every_recorded_job_is_intact_and_names_its_machine_code(monkeypatch):
    monkeypatch.chdir(ROOT)
    sets = [ResultsSet(path) for path in recorded_sets()]
    assert sets, "nothing is recorded here"
    for each in sets:
        for kind, experiment, name in results.each_job(each):
            job = each.job(kind, experiment, name)
            assert job.intact, job.where
            for binary in (job.manifest.get("arms") or {"": job.manifest["binary"]}).values():
                built = each.build_manifest(experiment, job.manifest["arch"], binary["variant"])
                assert built and built["code_hash"] == binary["code_hash"] and binary["launch_hash"], job.where
        for experiment in each.experiments("inspect"):
            assert all(each.job("inspect", experiment, name).intact for name in each.inspections(experiment))


def test_what_is_built_here_is_the_recorded_machine_code(monkeypatch):
    """Of ladder B, whatever codes.json remembers of it."""
    monkeypatch.chdir(ROOT)
    for path in recorded_sets():
        for variant in GEMM.ladders["B"].rungs.values():
            recorded = ResultsSet(path).build_manifest("gemm", "sm_90a", variant.name)
            assert recorded and recorded["code_hash"] == manifest_of(variant.name, "sm_90a")["code_hash"], variant.name


def test_the_recorded_sets_are_a_handful_of_files_and_small(monkeypatch):
    monkeypatch.chdir(ROOT)
    files = [path for path in Path("results/recorded").rglob("*") if path.is_file()]
    measured = [path for path in files if "csv" in path.parts]
    experiments = sum(len(ResultsSet(path).experiments("sweep")) for path in recorded_sets())
    assert len(measured) <= 10 * experiments and sum(path.stat().st_size for path in files) < 30_000_000


def test_a_live_set_has_a_csv_and_a_manifest_a_job(live, tmp_path):
    name = live.jobs("sweep", "gemm")[0]
    assert live.files("sweep", "gemm", [name]) == [
        live.csv("sweep", "gemm", name),
        live.csv("sweep", "gemm", name).with_suffix(".json"),
    ]
    shutil.copytree(live.path, tmp_path / "copy")
    copy = ResultsSet(tmp_path / "copy")
    copy.csv("sweep", "gemm", name).with_suffix(".json").unlink()
    with pytest.raises(RungsError, match=rf"has no manifest {name}\.json beside it"):
        copy.job("sweep", "gemm", name)
