"""The tokens of a source: what comments and layout do not change, and what they do."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rungs.errors import RungsError
from rungs.files import ROOT
from rungs.tokens import tokens_hash

SOURCE = '#define TWICE(x) ((x) + (x))\nconstexpr int K = 1\'000;\n__device__ int f(int a, int b) { return a + +b - "//"[0] * TWICE(a); }\n'


def hash_of(folder, text, name="k.cu"):
    path = folder / f"{len(list(folder.iterdir()))}-{name}"
    path.write_text(text)
    return tokens_hash(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: f"// A comment, it's here.\n{text}/* and\nhere */",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("a + +b", "a\n  + /* unary */ +b").replace("{", "{\n\n\t"),
        lambda text: text.replace("((x) + (x))", "((x) +   (x)) // why"),
        lambda text: text.replace("((x) + (x))", "((x) \\\n + (x))"),
    ],
    ids=["comments", "line ends", "layout", "a directive's comment", "a continued directive"],
)
def test_comments_and_layout_take_no_part(tmp_path, change):
    assert hash_of(tmp_path, change(SOURCE)) == hash_of(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + +b", "a ++b"),
        ("TWICE(x)", "TWICE (x)"),
        ('"//"', '"/ /"'),
        ("1'000", "1'001"),
        ("return a", "returna"),
        ("int K", "int k"),
        ("- ", "-"),
    ],
)
def test_another_program_is_another_hash(tmp_path, old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert (hash_of(tmp_path, changed) == hash_of(tmp_path, SOURCE)) == (old == "- ")


def test_where_a_lines_place_has_a_meaning_every_letter_counts(tmp_path):
    placed = SOURCE + "__device__ int line() { return __LINE__; }\n"
    assert hash_of(tmp_path, placed) != hash_of(tmp_path, f"\n{placed}")
    assert hash_of(tmp_path, placed) == hash_of(tmp_path, placed)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(RungsError, match=r"none\.cu cannot be read"):
        tokens_hash(tmp_path / "none.cu")


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not on PATH")
def test_another_layout_of_every_kernel_is_the_same_tokens(tmp_path):
    style = "{BasedOnStyle: Google, ColumnLimit: 70, SortIncludes: false, BreakStringLiterals: false}"
    for path in sorted([*(ROOT / "kernels").rglob("*.cu"), *(ROOT / "kernels").rglob("*.cuh")]):
        copy = tmp_path / path.relative_to(ROOT).as_posix().replace("/", "-")
        text = subprocess.run(
            ["clang-format", f"--style={style}"], input=path.read_text(), capture_output=True, text=True, check=True
        )
        copy.write_text(text.stdout)
        assert text.stdout != path.read_text() and tokens_hash(copy) == tokens_hash(path), path
