"""The measuring verbs by themselves, on the stand-in GPU: one step now, and the L2 policy of a sweep."""

from __future__ import annotations

import json

import pytest

from pipeline import ARCH, S0, S1, S2, UUID
from rungs import schemas


def sweep(checkout, settings: dict, shapes: list, *more: str) -> tuple:
    """Run `rungs sweep` for S1 as the rule does; returns its frame and manifest."""
    build = checkout.live / "build" / ARCH
    clock, output = checkout.folder / "clock.json", checkout.folder / "out" / "sweep.csv"
    assert checkout.rungs("clock", "decide", "--gpu", UUID, "--mode", "observe", "--output", str(clock)).code == 0
    manifests = [str(build / name / f"{name}.json") for name in (S1, S0)]
    done = checkout.rungs(
        *("sweep", "--experiment", "gemm", "--variant", S1, "--arch", ARCH, "--gpu", UUID),
        *("--manifests", *manifests, "--stamp", str(build / "stamp" / "stamp.json"), "--clock", str(clock)),
        *("--shapes", json.dumps(shapes), "--settings", json.dumps(settings), "--output", str(output), *more),
    )
    assert done.code == 0, done.text
    return schemas.read_csv("sweep", output), json.loads(output.with_suffix(".json").read_text())


SETTINGS = {
    "target_percent": 0.3,
    "rounds_min": 10,
    "rounds_max": 20,
    "sample_us": 200,
    "warmup_s": 0,
    "l2": "hot",
    "seed": 1,
}


def test_a_sweep_has_every_arm_in_every_round_and_a_manifest_that_says_what_was_measured_on_what(checkout):
    frame, manifest = sweep(checkout, SETTINGS, [[512, 512, 256]])
    rounds = frame.groupby("round")["arm"].agg(lambda arms: tuple(sorted(arms)))
    assert set(rounds) == {(S0, S1, "control")}
    assert set(frame["run_id"]) == {manifest["run_id"]}
    assert (manifest["fill"], manifest["l2"], manifest["control"]["name"]) == ("normal", "hot", "torch.matmul")
    assert (manifest["gpu"]["uuid"], manifest["clock"]["mode"]) == (UUID, "observe")
    assert set(manifest["arms"]) == {S0, S1}
    assert all(set(arm) >= {"build_id", "source_hash", "cubin_sha256"} for arm in manifest["arms"].values())
    (shape,) = manifest["shapes"]
    assert (shape["rounds"], shape["bytes_between_uses"]) == (frame["round"].max(), 0)
    assert manifest["clock"]["load_mhz"] == pytest.approx(frame["sm_mhz"].median(), rel=0.2)


def test_cold_rotates_whole_and_says_how_many_bytes_lie_between_two_uses(checkout):
    frame, manifest = sweep(checkout, {**SETTINGS, "l2": "cold"}, [[512, 512, 8192]])
    (shape,) = manifest["shapes"]
    assert shape["bytes_between_uses"] >= 2 * manifest["gpu"]["l2_bytes"]
    assert shape["launches"] % 4 == 0, "the stand-in rotates over four sets"
    assert manifest["l2"] == "cold"
    assert set(frame["launches"]) == {shape["launches"]}


def test_a_twin_is_the_same_binary_under_another_name(checkout):
    frame, _ = sweep(checkout, SETTINGS, [[512, 512, 256]], "--twin")
    assert set(frame["arm"]) == {S0, S1, "control", "twin"}
    medians = frame.groupby("arm")["time_us"].median()
    assert medians["twin"] / medians[S1] == pytest.approx(1, abs=0.05)


def test_step_builds_measures_and_says_what_the_factor_bought(checkout):
    done = checkout.rungs("step", "S2", "S3", "--shape", "512,512,512", "--shape", "512x512x256")
    assert done.code == 0, done.text
    waited = "Another process is measuring on GPU "  # of another test, on the same stand-in
    first, *lines = [line for line in done.text.splitlines() if not line.startswith(("abl_", waited))]
    assert first == "S2>S3, factor swizzle, on NVIDIA H200:"
    assert [line.split(":")[0].strip() for line in lines] == ["512x512x512", "512x512x256"]
    assert all(" %, faster (A/A " in line.replace("],", "%,") or "faster (A/A" in line for line in lines)
    gain = float(lines[0].split(":")[1].split("%")[0])
    assert 3 < gain < 20, "the stand-in gives the swizzle 0.08 of the control on top of about half"


def test_step_names_a_rung_that_fails_and_ends_with_exit_status_1_for_a_refused_shape(checkout):
    checkout.fault(**{S2: {"kind": "nan"}})
    done = checkout.rungs("step", "S2", "S3", "--shape", "512,512,512")
    assert f"{S2} could not be timed" in done.text
    refused = checkout.rungs("step", "S0", "S1", "--shape", "512,512,4100")
    assert "K=4100 gives rows of 8200 bytes, which is not a multiple of the 16 bytes" in refused.text
