"""Files are whole or absent, and what was damaged by hand is one sentence with file, row and fix."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest

from rungs import files, schemas
from rungs.errors import RungsError

GOOD = {
    "run_id": "ab12",
    "m": 512,
    "n": 512,
    "k": 256,
    "round": 1,
    "arm": "control",
    "order": 0,
    "launches": 40,
    "time_us": 3.25,
    "sm_mhz": 1755,
    "throttle": "",
    "power_w": 300,
    "temp_c": 55,
    "status": "ok",
    "reason": "",
}


def rows(*changes: dict) -> pd.DataFrame:
    return pd.DataFrame([{**GOOD, **change} for change in changes])


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "csv" / "a.csv"
    schemas.write_csv(
        "sweep", rows({}, {"round": 2}, {"round": 3, "time_us": None, "status": "crashed", "reason": "why"}), path
    )
    return path


def test_what_is_written_is_read_back(csv):
    frame = schemas.read_csv("sweep", csv)
    assert frame["time_us"].tolist()[:2] == [3.25, 3.25]
    assert pd.isna(frame["time_us"].iloc[2])
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame["throttle"].tolist() == ["", "", ""]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "ends in the middle of a line"),
        (lambda text: text.splitlines()[0] + "\n", "has no rows"),
        (lambda text: "", "ends in the middle of a line"),
        (lambda text: text.replace("run_id,", "run,"), "column 'run'"),
        (lambda text: text.replace(",reason\n", ",reason,more\n"), "column 'more'"),
        (lambda text: text.replace("3.25", "fast", 1), "row 2: time_us is 'fast', not number above 0"),
        (lambda text: text.replace("3.25", "nan", 1), "row 2: time_us is 'nan'"),
        (lambda text: text.replace("3.25", "inf", 1), "row 2: time_us is 'inf'"),
        (lambda text: text.replace("3.25", "0", 1), "row 2: time_us is '0'"),
        (lambda text: text.replace("3.25", "-1", 1), "row 2: time_us is '-1'"),
        (lambda text: text.replace(",512,512,", ",512.5,512,", 1), "row 2: m is '512.5', not integer"),
        (lambda text: text.replace(",512,512,", ",,512,", 1), "row 2: m is ''"),
        (lambda text: text.replace(",ok,", ",fine,", 1), "row 2: status is 'fine', not one of ok, flagged"),
        (lambda text: text + text.splitlines()[1] + "\n", "row 5: the same m, n, k, round, arm"),
        (lambda text: text.replace("control", 'con"trol', 1), None),
        (lambda text: text.replace(",ok,\n", ",ok,,\n", 1), "a row with more or fewer than 15 cells"),
        (lambda text: re.sub(r"\nab12,", "\nab12,ab12,", text), "a row with more or fewer than 15 cells"),
        (lambda text: text.replace(",ok,\n", "\n", 1), "a row with more or fewer than 15 cells"),
        (lambda text: text.replace("ab12,", 'ab12,"', 1).replace(",ok,", '",ok,', 1), "a row with more or fewer"),
    ],
)
def test_a_damaged_csv_is_one_sentence_with_the_file_the_row_and_the_fix(csv, damage, words):
    csv.write_text(damage(csv.read_text()))
    if words is None:
        schemas.read_csv("sweep", csv)
        return
    with pytest.raises(RungsError) as error:
        schemas.read_csv("sweep", csv)
    assert str(csv) in str(error.value)
    assert words in str(error.value)
    assert "delete the file and run again" in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_one_sentence(csv):
    csv.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RungsError, match="cannot be read"):
        schemas.read_csv("sweep", csv)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (rows({}).drop(columns="reason"), "'reason' is missing"),
        (rows({}).assign(extra=1), "'extra' is unknown"),
        (rows({"time_us": 0.0}), "time_us is '0.0'"),
        (rows({}, {}), "the same m, n, k, round, arm"),
    ],
)
def test_nothing_is_written_that_could_not_be_read(tmp_path, frame, words):
    with pytest.raises(RungsError, match=words):
        schemas.write_csv("sweep", frame, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_plain_rows_are_written_as_a_frame_of_them_is(tmp_path):
    written = [{**GOOD}, {**GOOD, "round": 2, "reason": 'a "word", and\nanother line', "time_us": 1e-7}]
    written += [{**GOOD, "round": 3, "time_us": None, "sm_mhz": None, "status": "crashed", "reason": "why"}]
    schemas.write_rows("sweep", written, tmp_path / "rows.csv")
    schemas.write_csv("sweep", pd.DataFrame(written), tmp_path / "frame.csv")
    pd.testing.assert_frame_equal(*(schemas.read_csv("sweep", tmp_path / f"{name}.csv") for name in ("rows", "frame")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "column 'extra' is unknown to a sweep CSV"),
        ({"time_us": 0.0}, "row 3: time_us is 0.0, not number above 0"),
        ({"time_us": math.nan}, "row 3: time_us is nan, not number"),
        ({"time_us": math.inf}, "row 3: time_us is inf, not number"),
        ({"time_us": "3"}, "row 3: time_us is '3', not number"),
        ({"m": 512.5}, "row 3: m is 512.5, not integer"),
        ({"m": 512.0}, "row 3: m is 512.0, not integer"),
        ({"m": True}, "row 3: m is True, not integer"),
        ({"m": None}, "row 3: m is None, not integer, which may not be empty"),
        ({"arm": 7}, "row 3: arm is 7, not string"),
        ({"status": "fine"}, "row 3: status is 'fine', not one of ok, flagged"),
        ({"round": 1}, "row 3: the same m, n, k, round, arm"),
    ],
)
def test_no_row_is_written_that_could_not_be_read(tmp_path, change, words):
    with pytest.raises(RungsError) as error:
        schemas.write_rows("sweep", [GOOD, {**GOOD, "round": 2, **change}], tmp_path / "a.csv")
    assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_a_column_and_a_file_without_rows_are_refused(tmp_path):
    with pytest.raises(RungsError, match="column 'reason' is missing for a sweep CSV"):
        schemas.write_rows("sweep", [{k: v for k, v in GOOD.items() if k != "reason"}], tmp_path / "a.csv")
    with pytest.raises(RungsError, match="would have no rows"):
        schemas.write_rows("sweep", [], tmp_path / "a.csv")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError), files.whole(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert files.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "results").write_text("a file in its place")
    with pytest.raises(RungsError, match=r"cannot be written .*: make its folder writable or free some space"):
        files.write_text(tmp_path / "results" / "a.csv", "x")


def test_nan_never_reaches_a_manifest(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", {"error": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_damaged_manifest_is_one_sentence(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RungsError, match="delete it and run again"):
        files.read_json(path)


def test_hashes_do_not_depend_on_the_order_of_keys():
    assert files.sha256_json({"a": 1, "b": [2]}) == files.sha256_json({"b": [2], "a": 1})


def test_a_source_has_one_hash_with_the_line_ends_of_any_system(tmp_path):
    (tmp_path / "a.cu").write_bytes(b"one\ntwo\n")
    (tmp_path / "b.cu").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "c.cu").write_bytes(b"one\n\ntwo\n")
    hashes = [files.sha256_text(tmp_path / f"{name}.cu") for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2] and files.sha256_file(tmp_path / "b.cu") != hashes[1]
    with pytest.raises(RungsError, match="cannot be read"):
        files.sha256_text(tmp_path / "missing.cu")
