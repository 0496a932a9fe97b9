"""The documents: every link leads somewhere, the citation and the changelog are those of this version, the code blocks are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import rungs
from pipeline import ROOT

DOCUMENTS = ["README.md", "config/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^()\s]+)\)")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = next(n for n in range(len(found) + 1) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(name: str) -> list[str]:
    """The links of a page, relative to it, that lead to no file or heading."""
    page, wrong = ROOT / name, []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.is_relative_to(ROOT) or not path.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{link}: no such heading")
    return wrong


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name):
    assert broken(name) == []
    assert prose(ROOT / name).count("```") == 0, "a block of code is not closed"


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    """What the test above can see."""
    monkeypatch.setattr("test_documents.ROOT", tmp_path)
    (tmp_path / "a.md").write_text(
        "# One `two`\n[x](b.md) [y](#one-two) [z](#three) ![p](a.md) [u](https://example.org)\n"
    )
    assert broken("a.md") == ["b.md: no such file", "#three: no such heading"]


def test_the_readme_says_what_a_reader_looks_for():
    """And in which words others link to it."""
    wanted = {"why", "use-it", "read-a-ladder", "add-a-factor", "limits-of-the-method", "cite", "license"}
    assert wanted <= anchors(ROOT / "README.md")


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation), "required by CFF 1.2.0"
    assert (citation["cff-version"], citation["type"], citation["license"]) == ("1.2.0", "software", "MIT")
    assert citation["version"] == rungs.__version__
    assert [set(author) for author in citation["authors"]] == [{"name"}]
    assert citation["authors"][0]["name"].lower() in (ROOT / "LICENSE").read_text().lower()


def test_the_changelog_has_this_version():
    versions = re.findall(
        r"^## \[([^\]]+)\](?: - \d{4}-\d{2}-\d{2})?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == "Unreleased" and rungs.__version__ in versions


def test_the_catalog_is_told_what_the_workflow_has():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert set(usage) == {"mandatory-flags", "software-stack-deployment", "report"}
    assert not usage["mandatory-flags"]["flags"], "a plain `snakemake` is enough"
    assert usage["software-stack-deployment"]["conda"] is True, "every rule names its conda environment"
    rules = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    assert rules.count("conda:") >= 20 and "report(" in rules
    assert (ROOT / "config/README.md").is_file() and (ROOT / "LICENSE").is_file()
