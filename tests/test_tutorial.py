"""docs/tutorial.md and docs/workload.md as a reader follows them: their files are saved, the commands run, and what is shown of their output is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import LIMIT_S, ROOT, Checkout, Result
from rungs import schemas

TUTORIAL, WORKLOAD = (ROOT / "docs" / f"{name}.md" for name in ("tutorial", "workload"))
QUICK = "results/emulator-quick"
FENCE = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: `words` are those behind its language, `file=kernels/x.cu`, `append=...`, `gpu` or `fails`."""

    language: str
    words: tuple[str, ...]
    text: str

    def named(self, key: str) -> str | None:
        return next((word.removeprefix(f"{key}=") for word in self.words if word.startswith(f"{key}=")), None)


def blocks(path: Path) -> list[Block]:
    return [
        Block(language, tuple((words or "").split()), text) for language, words, text in FENCE.findall(path.read_text())
    ]


def save(checkout: Checkout, block: Block) -> bool:
    """Whether the block is a file, which is then there."""
    for key, mode in (("file", "w"), ("append", "a")):
        if name := block.named(key):
            path = checkout.repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert path.exists() == (mode == "a"), name
            with path.open(mode) as file:
                file.write(block.text)
            return True
    return False


def shell(checkout: Checkout, text: str) -> Result:
    """The lines of a block of commands, as a shell runs them until one fails."""
    options = checkout.options({})
    done = subprocess.run(["bash", "-ec", text], **options, timeout=LIMIT_S)
    return Result(done.returncode, done.stdout)


def as_published(folder: Path) -> Checkout:
    """A checkout with the config that the repository has."""
    checkout = Checkout.create(folder)
    shutil.copy2(ROOT / "config" / "config.yaml", checkout.repo / "config" / "config.yaml")
    return checkout


def followed(checkout: Checkout, page: Path = TUTORIAL) -> Iterator[tuple[Block, Result]]:
    """Every block that is a command and needs no GPU, with what it printed."""
    for block in blocks(page):
        if save(checkout, block) or block.language == "text" or "gpu" in block.words:
            continue
        assert block.language == "sh", block
        yield block, shell(checkout, block.text)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The checkout of someone without a GPU who has followed the tutorial, and each command with its output."""
    checkout = as_published(tmp_path_factory.mktemp("tutorial") / "run")
    checkout.no_gpu()
    return checkout, list(followed(checkout))


def test_every_command_does_what_the_tutorial_says(reader):
    _, results = reader
    assert len(results) >= 6
    for block, result in results:
        assert (result.code != 0) == ("fails" in block.words), f"{block.text}\n{result.text}"


def test_what_the_tutorial_shows_is_what_the_commands_print(reader):
    printed = {block: result.text for block, result in reader[1]}
    before, shown = None, 0
    for block in blocks(TUTORIAL):
        if block in printed:
            before = block
        elif block.language == "text":
            assert before, "output before any command"
            for line in block.text.splitlines():
                assert line in printed[before], f"{before.text} does not print {line!r} but\n{printed[before]}"
                shown += 1
    assert shown > 10


def test_the_experiment_is_built_counted_and_drawn(reader):
    checkout, _ = reader
    live = checkout.repo / QUICK
    for name in ("my_w4_p0", "my_w16_p0", "my_w16_p8"):
        rows = schemas.read_csv("inspect", live / "csv/inspect/sm_90a" / f"{name}.csv")
        assert set(rows["status"]) == {"ok"}
        values = {row.name: row.value for row in rows[rows["kind"] == "resource"].itertuples(index=False)}
        assert values["ctas_per_sm"] == 2
        assert set(schemas.read_csv("emulate", live / "csv/emulate/my_gemm" / f"{name}.csv")["status"]) == {"ok"}
    for leaf in ("README.md", "md/my_gemm.md", "figures/my_gemm/counts_MY.svg", "figures/my_gemm/counts_MY.png"):
        assert (live / leaf).stat().st_size > 500
    (command,) = [block.text for block, _ in reader[1] if block.text.startswith("snakemake")]
    again = shell(checkout, command.replace("snakemake", "snakemake --dry-run"))
    assert again.code == 0 and "Nothing to be done" in again.text, again.text


def test_the_readmes_factor_is_one_more_rung(reader, tmp_path):
    """README.md adds a factor to the tutorial's experiment with a diff of nine lines, and renames none of its variants."""
    checkout = reader[0].copy(tmp_path / "run")
    checkout.no_gpu()
    (diff,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "diff"]
    assert len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)) == 9
    subprocess.run(["git", "apply", "-"], cwd=checkout.repo, input=diff, text=True, check=True)
    result = checkout.snakemake(
        *("--cores", "2", "all", "--config", "experiments=my_gemm", "device=emulator", "preset=quick")
    )
    assert result.code == 0, result.text
    table = (checkout.repo / QUICK / "md/my_gemm.md").read_text()
    rows = {cells[1]: cells for cells in (line.split(" | ") for line in table.splitlines()) if len(cells) > 4}
    assert "4 of 4 variants are right" in table and rows
    (last,) = [line for line in table.splitlines() if line.startswith("| MY3 |")]
    assert last.startswith("| MY3 | copies of 16 B, rows padded by 16 B, ldmatrix | 16.4 k | 2.05 k |"), last
    built = {path.stem for path in (checkout.repo / QUICK / "csv/inspect/sm_90a").glob("my_*.csv")}
    assert built == {"my_w4_p0", "my_w16_p0", "my_w16_p8", "my_w16_p8_r1"}


def test_on_a_gpu_the_experiment_is_measured(reader, tmp_path):
    """The first of the tutorial's commands that need a GPU, on the stand-in for one."""
    checkout = as_published(tmp_path / "run")
    checkout.configure(clock={"mode": "observe"})
    for block in blocks(TUTORIAL):
        save(checkout, block)
    measured = [block for block in blocks(TUTORIAL) if "gpu" in block.words and "slow" not in block.words]
    result = shell(checkout, "\n".join(block.text for block in measured))
    assert result.code == 0, result.text
    page = (checkout.repo / "results/h200-quick/md/my_gemm.md").read_text()
    assert "| MY1>MY2 | no padding > rows padded by 16 B |" in page
    assert "2 of 2 steps are controlled" in page


def test_a_kernel_that_is_no_gemm_takes_one_module(tmp_path):
    """docs/workload.md: emulated, then measured on the stand-in for a GPU."""
    checkout = as_published(tmp_path / "run")
    checkout.configure(clock={"mode": "observe"})
    (told,) = followed(checkout, WORKLOAD)
    assert told[1].code == 0, told[1].text
    shown = [line for block in blocks(WORKLOAD) if block.language == "text" for line in block.text.splitlines()]
    assert shown and all(line in told[1].text for line in shown), told[1].text
    (measured,) = (block for block in blocks(WORKLOAD) if "gpu" in block.words)
    result = shell(checkout, measured.text)
    assert result.code == 0, result.text
    page = (checkout.repo / "results/h200-quick/md/my_scale.md").read_text()
    assert "| SC0>SC1 | words of 4 B > words of 16 B |" in page and "1 of 1 steps are controlled" in page
    assert "| SC1 | words of 16 B |" in page and "## Curves" not in page
