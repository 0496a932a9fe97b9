"""Hot and cold stand side by side, each with its own set's numbers and provenance, and no statistic mixes them."""

import dataclasses
import json
import re

import pytest

from rendered import grids
from rungs import aggregate, contrast, readme, tables, variants
from rungs.errors import RungsError
from rungs.results import RECORDED
from synthetic import ARCH, World, write_set

EXPERIMENT = variants.load_experiment("gemm")
LADDER = EXPERIMENT.ladders["B"]
SHAPES = [(512, 512, 1024), (4096, 4096, 1024), (4096, 4096, 4096)]
COLD_SHAPES = [*SHAPES[:2], (4096, 4096, 8192)]


def name_of(rung: str) -> str:
    return EXPERIMENT.variant(rung).name


def make(folder, l2: str, **changes):
    world = World(**{"shapes": SHAPES, "profile": "", **changes, "manifest": {"l2": l2}})
    write_set(folder, world)
    aggregate.run(folder, "gemm", ARCH, [name_of(rung) for rung in LADDER.rungs])
    return tables.read_source(folder, "gemm")


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hot") / "h200", "hot")


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """B3 gains 20 % less there; another seed, fewer rounds, shapes that the hot set has not."""
    gains = {name_of("B3"): -20.0}
    return make(
        tmp_path_factory.mktemp("cold") / "h200-cold", "cold", shapes=COLD_SHAPES, gains=gains, seed=7, rounds=24
    )


def test_each_step_of_the_path_has_a_hot_and_a_cold_column_of_its_own_set(hot, cold):
    large, small = grids(contrast.table(hot, cold, LADDER))
    assert large[0] == ["step", "K=1024 hot", "K=1024 cold"], "only what both have"
    assert [row[0] for row in large[1:]] == ["B2>B3", "B3>B5", "B5>B6"]
    for grid, m in ((large, 4096), (small, 512)):
        for column, source in ((1, hot), (2, cold)):
            rows = {r["step"]: r for r in source.rows("steps") if (r["m"], r["k"], r["ladder"]) == (m, 1024, "B")}
            for row in grid[1:]:
                assert row[column] == f"{tables.gain_text(rows[row[0]])} {rows[row[0]]['verdict']}"


def test_each_set_keeps_its_own_provenance(hot, cold):
    text = contrast.table(hot, cold, LADDER)
    lines = re.findall(r"<sub>(Hot|Cold): (.*)</sub>", text)
    assert [word for word, _ in lines] == ["Hot", "Cold"]
    assert "; 30 rounds; " in lines[0][1] and "L2 hot" in lines[0][1]
    assert "; 24 rounds; " in lines[1][1] and "L2 cold" in lines[1][1]
    runs = [re.search(r"runs (\w+) \(hash over 4\)", line)[1] for _, line in lines]
    assert runs[0] != runs[1]


def test_the_sentence_names_what_cold_caches_change_most(hot, cold):
    text = contrast.table(hot, cold, LADDER)
    first, second = re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE)
    assert re.fullmatch(
        r"At M=N=4096 cold caches change the gain of B3>B5 most: they raise it from \+\d+\.\d % ±\d\.\d to \+\d+\.\d % ±\d\.\d at"
        r" K=1024; 1 of 3 gains are the same hot and cold as far as intervals and floors tell\.",
        first,
    )
    assert second.startswith("At M=N=512 cold caches change the gain of B3>B5 most")


def test_a_gain_that_cold_caches_lower_is_named_too(hot, tmp_path):
    other = make(tmp_path / "h200-cold", "cold", gains={name_of("B6"): -10.0}, seed=5)
    assert re.search(
        r"At M=N=4096 cold caches change the gain of B5>B6 most: they lower it from \+.* to .*; 4 of 6 gains are the same",
        contrast.table(hot, other, LADDER),
    )


def test_equal_gains_are_not_told_apart(hot, tmp_path):
    same = make(tmp_path / "h200-cold", "cold", seed=3)
    text = contrast.table(hot, same, LADDER)
    assert "3 of 3 gains are the same hot and cold as far as intervals and floors tell." in text
    assert "change the gain" not in text


def test_a_change_under_the_larger_floor_is_none(hot, cold):
    """The floor of one set alone is enough."""
    steps = cold.data["steps"].assign(floor_percent=90.0)
    text = contrast.table(hot, dataclasses.replace(cold, data={**cold.data, "steps": steps}), LADDER)
    assert "3 of 3 gains are the same hot and cold" in text and "change the gain" not in text


def test_a_step_that_one_set_lacks_has_its_word(hot, tmp_path):
    failures = {(name_of("B5"), shape): ("time limit", "It never ended.") for shape in SHAPES}
    other = make(tmp_path / "h200-cold", "cold", failures=failures)
    large = grids(contrast.table(hot, other, LADDER))[0]
    assert [row[2] for row in large[1:]][1] == "time limit"
    assert "time limit" not in [row[1] for row in large[1:]]
    assert " of 2 gains are" in contrast.table(hot, other, LADDER), "of those with two intervals"


def test_stale_cells_carry_a_dagger_in_their_own_set_only(hot, cold):
    old = dataclasses.replace(cold, stale={name_of("B3"): "its source has changed"})
    text = contrast.table(hot, old, LADDER)
    large = grids(text)[0]
    assert [["†" in cell for cell in row[1:]] for row in large[1:]] == [[False, True], [False, True], [False, False]]
    assert f"<sub>† Cold, stale. {name_of('B3')}: its source has changed.</sub>" in text


def test_a_set_of_the_wrong_policy_is_refused(hot, cold):
    for pair in ((cold, hot), (hot, hot), (cold, cold)):
        with pytest.raises(RungsError, match=r"was measured with L2 \w+, not (hot|cold)"):
            contrast.table(*pair, LADDER)


def test_sets_without_a_common_shape_say_so(hot, tmp_path):
    other = make(tmp_path / "h200-cold", "cold", shapes=[(512, 512, 512)])
    assert contrast.table(hot, other, LADDER) == "Ladder B has no shape that was measured both hot and cold."


def test_no_rows_of_the_two_sets_ever_meet(hot, cold, tmp_path):
    """A manifest of the other policy among a set's own is refused when its data are made."""
    world = World(shapes=SHAPES[:1], profile="", variants=["B2", "B3"])
    write_set(tmp_path, world)
    path = tmp_path / "csv" / "sweep" / "gemm" / f"{name_of('B3')}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"l2": "cold"}))
    with pytest.raises(RungsError, match="a table is hot or cold"):
        aggregate.run(tmp_path, "gemm", ARCH, [name_of("B2"), name_of("B3")])


def test_the_readme_shows_a_cold_set_beside_its_hot_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    recorded = RECORDED
    make(recorded / "h200", "hot")
    make(recorded / "h200-cold", "cold", gains={name_of("B3"): -20.0}, seed=7)
    page = tmp_path / "README.md"
    page.write_text("".join(f"<!-- rungs:h200-cold:gemm:cold:B {edge} -->\n" for edge in ("begin", "end")))
    assert readme.write() == 0
    text = page.read_text()
    assert "K=4096 hot | K=4096 cold" in text
    assert "<sub>Hot: NVIDIA H200" in text and "<sub>Cold: NVIDIA H200" in text
    assert (readme.write(check=True), capsys.readouterr().out.splitlines()[-1]) == (0, "README.md is current.")
    page.write_text(text.replace(":cold:B", ":cold:S"))
    with pytest.raises(RungsError, match="names no block"):
        readme.write()
