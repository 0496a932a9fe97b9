"""Recorded results: without a GPU, in a fresh clone, after the sources have changed, and back to where each number comes from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from pipeline import RUNGS, S1, Checkout, no_traceback
from rungs import tables
from rungs.results import ResultsSet

NOTHING = "Nothing to be done"
SET = "results/recorded/h200"
README = """# A test

<!-- rungs:h200:gemm:ladder:S begin -->
<!-- rungs:h200:gemm:ladder:S end -->

Words by hand.

<!-- rungs:h200:gemm:steps:S begin -->
<!-- rungs:h200:gemm:steps:S end -->

<!-- rungs:h200:gemm:floor begin -->
<!-- rungs:h200:gemm:floor end -->
"""
MEASURING = ("clock", "sweep", "floor", "profile")
SWIZZLE = "kernels/swizzle.cuh"
ONE_INSTRUCTION = (SWIZZLE, "row & 7;", "row & 6;")
"""An edit of the branch that only rows of 128 bytes take, those of S1."""
OTHER_CODE = "it compiles to other machine code now"


def kept(repo):
    """Every file of the recorded set, and what is in it."""
    return {path: path.read_bytes() for path in (repo / SET).rglob("*") if path.is_file()}


def reformat(repo, rename):
    """Put a comment on every line of every kernel and give one another layout, or rename its locals."""
    kernel = repo / "kernels" / "gemm" / "gemm.cu"
    if rename:
        renamed = re.sub(r"\bacc\b", "sums_of_this_thread", kernel.read_text())
        assert renamed != kernel.read_text()
        kernel.write_text(renamed)
        return
    for path in [*(repo / "kernels").rglob("*.cu"), *(repo / "kernels").rglob("*.cuh")]:
        lines, continued = [], False
        for line in path.read_text().splitlines():
            lines += [line] if continued else ["// A comment.", line]
            continued = line.endswith("\\")
        path.write_text("\n".join(lines) + "\n")
    if formatter := shutil.which("clang-format"):
        style = "--style={BasedOnStyle: Google, ColumnLimit: 70, SortIncludes: false, BreakStringLiterals: false}"
        subprocess.run([formatter, "-i", style, str(kernel)], check=True)


@pytest.fixture(scope="module")
def published(complete_run, tmp_path_factory):
    """The complete run recorded, drawn, put into a README and committed; not to be changed."""
    checkout = complete_run[0].copy(tmp_path_factory.mktemp("published") / "run")
    (checkout.repo / "README.md").write_text(README)
    said = [checkout.rungs("record", "results/h200"), checkout.snakemake("report"), checkout.rungs("readme")]
    assert [result.code for result in said] == [0, 0, 0], [result.text for result in said]
    checkout.git("init", "-q", "-b", "main")
    checkout.git("add", "-A")
    checkout.git("commit", "-q", "-m", "results")
    return checkout, said


@pytest.fixture
def recorded(published, tmp_path):
    """A copy of the published checkout, with its live results."""
    return published[0].copy(tmp_path / "recorded")


@pytest.fixture
def clone(published, tmp_path):
    """A fresh clone on a machine without a GPU: no live results and nothing that Snakemake remembers."""
    other = Checkout(tmp_path / "clone")
    other.folder.mkdir()
    subprocess.run(["git", "clone", "-q", str(published[0].repo), str(other.repo)], check=True)
    other.fault()
    return other


# ---- publishing ----


def test_record_keeps_every_byte_of_csvs_and_manifests_in_a_handful_of_files(published):
    checkout, (record, drawn, _) = published
    assert record.text.startswith(f"Recorded 11 CSVs of 4 variants in {SET}: run `snakemake report` to draw them")
    assert drawn.of(*MEASURING, "build", "inspect") == []
    there = {path.relative_to(checkout.repo / SET).as_posix() for path in (checkout.repo / SET / "csv").rglob("*.*")}
    kinds = ("sweep", "floor", "profile", "inspect")
    assert there == {f"csv/{kind}/gemm.{end}" for kind in kinds for end in ("csv.gz", "json")}
    live, recorded = ResultsSet(checkout.live), ResultsSet(checkout.repo / SET)
    for kind in ("sweep", "floor", "profile"):
        assert recorded.jobs(kind, "gemm") == live.jobs(kind, "gemm")
        for name in live.jobs(kind, "gemm"):
            was, now = live.job(kind, "gemm", name), recorded.job(kind, "gemm", name)
            assert (now.csv, now.manifest, now.intact) == (was.csv, was.manifest, True)
    for rung in RUNGS:
        again = recorded.job("inspect", "gemm", rung)
        assert again.csv == live.inspected("sm_90a", rung).read_bytes() and again.intact
        built = live.build_manifest("gemm", "sm_90a", rung)
        assert {**built, "csv_sha256": again.manifest["csv_sha256"]} == again.manifest
    assert recorded.build_manifest("gemm", "sm_90a", "stamp") == live.build_manifest("gemm", "sm_90a", "stamp")
    assert not list((checkout.repo / SET).rglob("*.cubin")), "recorded sets stay small"
    assert sum(path.stat().st_size for path in (checkout.repo / SET).rglob("*") if path.is_file()) < 1_000_000


def test_readme_blocks_are_filled_and_words_by_hand_kept(published):
    checkout, (_, _, readme) = published
    assert readme.text == "README.md is written anew.\n"
    text = (checkout.repo / "README.md").read_text()
    assert "| S1 |" in text and "\nWords by hand.\n" in text and "<sub>NVIDIA H200, driver" in text
    check = checkout.rungs("readme", "--check")
    assert (check.code, check.text) == (0, "README.md is current.\n")


def test_edited_number_in_the_readme_is_found_and_mended(recorded):
    text = (recorded.repo / "README.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| S1 |"))
    digit = next(letter for letter in row.split("|")[3] if letter.isdigit())
    cell = row.split("|")[3]
    recorded.edit("README.md", row, row.replace(cell, cell.replace(digit, str((int(digit) + 1) % 10), 1), 1))
    check = recorded.rungs("readme", "--check")
    assert (check.code, check.text) == (1, "README.md does not show what is recorded: run `python -m rungs readme`.\n")
    assert recorded.rungs("readme").code == 0
    assert (recorded.repo / "README.md").read_text() == text


def test_trace_finds_a_number_that_was_edited_and_names_shapes_and_steps_that_are_not_there(recorded):
    page = recorded.repo / SET / "md" / "gemm.md"
    row = next(line for line in page.read_text().splitlines() if line.startswith("| S1 |"))
    recorded.edit(f"{SET}/md/gemm.md", row, row.replace(" (", "1 (", 1))
    result = recorded.rungs("trace", f"{SET}/md/gemm.md:S1")
    assert result.code == 1
    assert f"FAIL {SET}/md/gemm.md is not what its data give" in result.text
    for cell, words in (
        ("S1:1x2x3", f"has no {S1} at 1x2x3: it has 512x512x256, 512x512x512."),
        ("S0>S3", "has no S0>S3: it has A3t>A3, S0>S1, S2>S3."),
    ):
        refused = recorded.rungs("trace", f"{SET}/md/gemm.md:{cell}")
        assert refused.code == 1 and words in refused.text


def test_record_of_a_part_merges_by_variant(recorded):
    before = ResultsSet(recorded.repo / SET)
    old = {name: before.job("sweep", "gemm", name) for name in before.jobs("sweep", "gemm")}
    for path in (recorded.live / "csv").rglob("*"):
        if path.is_file() and path.parts[-3] in ("sweep", "floor", "profile"):
            path.unlink()
    assert recorded.snakemake(f"results/h200/csv/sweep/gemm/{S1}.csv").code == 0
    result = recorded.rungs("record", "results/h200")
    assert result.code == 0 and result.text.startswith(f"Recorded 1 CSVs of 1 variants in {SET}:"), result.text
    now = {name: before.job("sweep", "gemm", name) for name in before.jobs("sweep", "gemm")}
    assert now.keys() == old.keys() and {name for name in now if now[name].csv != old[name].csv} == {S1}
    assert now[S1].csv == recorded.csv("sweep", S1).read_bytes()
    assert before.jobs("floor", "gemm") == ["1", "2", "3"] and set(before.jobs("profile", "gemm")) == set(RUNGS)
    assert recorded.rungs("status").text == f"{SET}: gemm, 4 variants, 0 stale\n"


def test_record_refuses_what_no_table_can_be_made_from(recorded):
    manifest = recorded.live / "csv" / "sweep" / "gemm" / f"{S1}.json"
    manifest.write_text(manifest.read_text().replace('"fill": "normal"', '"fill": "zeros"'))
    result = recorded.rungs("record", "results/h200")
    assert result.code == 1
    assert "fill" in result.text and "Traceback" not in result.text


def test_record_refuses_a_failed_result(recorded):
    recorded.csv("sweep", S1).unlink()
    recorded.fault(**{S1: {"kind": "wrong"}})
    assert recorded.snakemake(f"results/h200/csv/sweep/gemm/{S1}.csv").code == 0
    before = kept(recorded.repo)
    result = recorded.rungs("record", "results/h200")
    assert result.code == 1
    assert result.text.startswith(
        f"rungs: results/h200/csv/sweep/gemm/{S1}.csv holds a failed result (wrong: {S1} is wrong on"
    )
    assert result.text.endswith("measure it again before you record.\n")
    assert kept(recorded.repo) == before


def test_record_refuses_a_stale_an_edited_and_a_quick_set(recorded):
    (recorded.repo / "results" / "h200-quick").mkdir()
    quick = recorded.rungs("record", "results/h200-quick")
    again = recorded.rungs("record", SET)
    kernel = (recorded.repo / SWIZZLE).read_text()
    recorded.edit(*ONE_INSTRUCTION)
    stale = recorded.rungs("record", "results/h200")
    (recorded.repo / SWIZZLE).write_text(kernel)
    path = recorded.csv("sweep", S1)
    path.write_text(path.read_text().replace("0", "1", 1))
    edited = recorded.rungs("record", "results/h200")
    assert [result.code for result in (quick, again, stale, edited)] == [1, 1, 1, 1]
    assert (
        quick.text
        == "rungs: results/h200-quick is a quick look at few shapes: run the full preset before you record.\n"
    )
    assert again.text == f"rungs: {SET} is recorded already: name a live set, for example results/h200.\n"
    assert f"{S1} in results/h200 is stale ({OTHER_CODE})" in stale.text and stale.text.endswith(
        "measure it again before you record.\n"
    )
    assert edited.text == (
        f"rungs: results/h200/csv/sweep/gemm/{S1}.csv is not the file of its manifest (another hash): delete it and measure again.\n"
    )


# ---- the HTML report ----

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PRESS = """<script>
const press = text => [...document.querySelectorAll("a,button,li,div,span,td")]
  .filter(found => found.textContent.trim() === text && found.children.length < 4).pop().click();
setTimeout(() => press("gemm"), 1000);
setTimeout(() => press("roofline"), 2000);
setTimeout(() => document.querySelector("tbody tr a").click(), 3000);
</script>"""
"""What a reader presses to see the first roofline."""


@pytest.fixture(scope="module")
def report(published):
    """The report of the live and the recorded set, as HTML."""
    result = published[0].snakemake("report", "--report", "report.html")
    assert result.code == 0, result.text
    page = published[0].repo / "report.html"
    yield page
    page.unlink()


def test_every_figure_and_table_of_live_and_recorded_sets_is_in_the_report_with_caption_and_place(published, report):
    text, repo = report.read_text(), published[0].repo
    shown, _ = json.JSONDecoder().raw_decode(text[text.index("var results = {") + len("var results = ") :])
    drawn = [
        path for pattern in ("figures/**/*.svg", "md/*.md", "README.md") for path in published[0].live.glob(pattern)
    ]
    drawn += [path for pattern in ("figures/**/*.svg", "md/*.md", "README.md") for path in (repo / SET).glob(pattern)]
    assert set(shown) == {path.relative_to(repo).as_posix() for path in drawn}
    for path, entry in shown.items():
        assert len(entry["caption"]) > 60 and "{{" not in entry["caption"], path
        assert entry["labels"]["set"] == path.split("/figures/")[0].split("/md/")[0].removesuffix(
            "/README.md"
        ).removeprefix("results/")
        assert len(entry["labels"]) == 2 or Path(path).stem in ("clock_power", "claims"), path
    places, _ = json.JSONDecoder().raw_decode(text[text.index("var categories = {") + len("var categories = ") :])
    assert {"gemm", "overview"} <= set(places)
    assert {"gain of each step", "share of the control", "waterfall", "roofline", "clock and power", "tables"} <= set(
        places["gemm"]
    )


@pytest.mark.skipif(CHROMIUM is None, reason="the report is looked at in Chromium, which is not on PATH")
def test_a_reader_finds_a_figure_in_the_report(report, tmp_path):
    text = report.read_text()
    page = tmp_path / "pressed.html"
    page.write_text(text.replace("</body>", "") + PRESS + "</body>")
    shot = tmp_path / "report.png"
    common = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=6000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    said = subprocess.run([*common, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    dom = re.sub(r"<script.*?</script>|<style.*?</style>", "", said.stdout, flags=re.DOTALL)
    words = [word for word in re.sub(r"<[^>]+>", "\n", dom).split("\n") if word.strip()]
    assert {"Results", "gemm", "roofline", "set", "ladder", "h200", "recorded/h200", "S"} <= set(words)
    assert "filename=roofline_S.svg" in dom, "the figure itself"
    subprocess.run(
        [*common, "--window-size=1400,900", f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120
    )
    with Image.open(shot) as image:
        assert image.size == (1400, 900)
        colours = image.convert("RGB").crop((500, 200, 1350, 800)).getcolors(100_000) or []
    assert len(colours) > 50, "the figure stands there, not an empty page"


# ---- without a GPU ----


def test_without_a_gpu_all_counts_in_the_emulator_and_renders_the_recorded_set(clone):
    (clone.repo / SET / "md" / "gemm.md").unlink()
    result = clone.snakemake("--cores", "2", "all")
    assert result.code == 0, result.text
    assert result.said[0] == (
        "rungs: There is no GPU here, and times need one: counting in the emulator for sm_90a, and rendering the recorded"
        " results (h200)."
    )
    assert result.of(*MEASURING) == []
    assert result.of("inspect") == result.of("emulate") == sorted(RUNGS)
    assert "[h200](../recorded/h200/README.md)" in (clone.repo / "results/emulator/README.md").read_text()
    assert "| S1 |" in (clone.repo / SET / "md" / "gemm.md").read_text()
    assert json.loads((clone.repo / "results/emulator/data/verdict.json").read_text())["failed"] == 0
    assert clone.git("status", "--porcelain") == "", "what is rendered is what was committed, byte for byte"
    assert NOTHING in clone.planned("all").text


INDEX = f"make_index: {SET}/README.md"
"""Git and ZIP write README.md before the tables that it leads to, so the page may be written again, to the same bytes."""


def rules_of_set(result):
    """The rules that made files of the recorded set."""
    return {job.split(":")[0] for job in result.jobs if SET in job}


def test_fresh_clone_plans_nothing_for_the_recorded_set(clone):
    assert {job for job in clone.planned("report").jobs if SET in job} <= {INDEX}


@pytest.mark.parametrize("order", ["equal", "reversed"])
def test_copy_without_dates_measures_nothing(clone, order):
    """A ZIP or a copy gives every file one date, that of its extraction, or any."""
    shutil.rmtree(clone.repo / ".git")
    files = sorted(path for path in clone.repo.rglob("*") if path.is_file())
    for index, path in enumerate(files if order != "reversed" else files[::-1]):
        date = 1_700_000_000 + index * (order == "reversed")
        os.utime(path, (date, date))
    clone.machine()
    planned = [job for job in clone.planned("report").jobs if SET in job]
    assert not {job.split(":")[0] for job in planned} & {*MEASURING, "build", "inspect"}
    if order != "reversed":
        assert set(planned) <= {INDEX}


def test_an_edit_that_changes_code_draws_the_recorded_set_again_also_in_a_clone(clone):
    clone.edit(*ONE_INSTRUCTION)
    assert clone.rungs("status").code == 0
    assert rules_of_set(clone.planned("report")) == {
        "plot_heatmap",
        "plot_ladder",
        "plot_clock",
        "show_claims",
        "make_tables",
        "make_index",
    }


def test_branch_switch_plans_nothing(recorded):
    recorded.git("checkout", "-q", "-b", "other")
    for name in (SWIZZLE, "config/experiments/gemm.yaml", "README.md"):
        with (recorded.repo / name).open("a") as file:
            file.write("\n")
    recorded.git("rm", "-q", "-r", SET)
    recorded.git("commit", "-q", "-a", "-m", "other")
    recorded.git("checkout", "-q", "main")
    planned = recorded.planned("all")
    assert planned.of(*MEASURING, "build", "inspect") == []


# ---- staleness ----


def test_comments_names_line_ends_and_moved_lines_make_nothing_stale(recorded):
    before = recorded.rungs("status")
    assert before.text == f"{SET}: gemm, 4 variants, 0 stale\n"
    reformat(recorded.repo, rename=False)
    assert recorded.rungs("status").text == before.text, "of comments and layout nothing is compiled"
    assert not rules_of_set(recorded.planned("report")), "and nothing is drawn again"
    reformat(recorded.repo, rename=True)
    recorded.no_gpu()
    planned = recorded.planned("report")
    assert "rungs: 4 recorded binaries have another source now: `python -m rungs status` compares" in planned.text
    assert not rules_of_set(planned), "planning compiles nothing"
    assert recorded.rungs("status").text.splitlines() == [
        "rungs: 4 recorded binaries have another source now: compiling to compare the machine code, about 2 s.",
        f"{SET}: gemm, 4 variants, 0 stale",
    ]
    assert recorded.rungs("status").text == before.text, "what was found is remembered"
    assert "another source" not in recorded.planned("report").text
    assert recorded.rungs("readme", "--check").code == 0
    chain = recorded.rungs("trace", "--verbose", f"{SET}/md/gemm.md:S1")
    assert chain.code == 0 and f"has changed since; {S1} compiles to the same machine code" in chain.text
    renamed = (recorded.repo / "kernels" / "gemm" / "gemm.cu").read_text()
    recorded.git("checkout", "-q", "--", "kernels")
    assert recorded.rungs("status").text == before.text
    (recorded.repo / "kernels" / "gemm" / "gemm.cu").write_text(renamed)
    assert recorded.rungs("status").text == before.text, "to and fro: nobody compiles twice for one text"
    recorded.git("checkout", "-q", "--", "kernels")
    for path in (recorded.repo / "kernels").rglob("*.cu*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert recorded.rungs("status").text == before.text, "another system's line ends are not even compiled"


def test_one_changed_instruction_marks_exactly_its_variants(recorded):
    recorded.edit(*ONE_INSTRUCTION)
    status = recorded.rungs("status").text.splitlines()
    assert status[1:] == [f"{SET}: gemm, 4 variants, 1 stale", f"  stale: A3t/S1 ({S1}): {OTHER_CODE}"]
    recorded.no_gpu()
    result = recorded.snakemake("tables", "heatmap")
    assert result.code == 0, result.text
    assert rules_of_set(result) == {"show_claims", "make_tables", "make_index", "plot_heatmap"}
    page = (recorded.repo / SET / "md" / "gemm.md").read_text()
    rows = [line for line in page.split("### Steps")[0].splitlines() if line.startswith("| S")]
    assert [line[:5] for line in rows if "†" in line] == ["| S1 "] and OTHER_CODE in page
    assert "†" in (recorded.repo / SET / "figures" / "gemm" / "heatmap_S.svg").read_text()


def test_a_launch_that_is_planned_in_another_way_is_stale(recorded):
    recorded.edit(
        "workflow/rungs/plan.py", "padded = (one_more // 1024 + 1) * 1024", "padded = (one_more // 1024 + 2) * 1024"
    )
    status = recorded.rungs("status").text.splitlines()
    assert status[0] == f"{SET}: gemm, 4 variants, 4 stale"
    assert f"  stale: A3t/S1 ({S1}): it is launched in another way now" in status


def test_a_variant_that_does_not_compile_any_more_and_a_missing_compiler_are_sentences(recorded):
    recorded.edit(SWIZZLE, "row & 7;", "row & seven;")
    status = recorded.rungs("status").text.splitlines()
    assert any("it cannot be built any more (" in line and "does not compile" in line for line in status)
    lonely = recorded.rungs("status", PATH=str(Path(__file__).parent / "standin"))
    assert lonely.code == 0 and no_traceback(lonely)
    assert "it has another source now and cannot be compiled (g++ is not on PATH" in lonely.text


def test_a_stale_number_in_the_readme_fails_the_check_until_it_carries_its_mark(recorded):
    recorded.edit(*ONE_INSTRUCTION)
    check = recorded.rungs("readme", "--check")
    assert check.code == 1
    assert check.text.splitlines()[-1] == (
        f"README.md, block h200:gemm:ladder:S, shows {S1} without the mark †, though {OTHER_CODE}: run"
        " `python -m rungs readme` to mark it, or measure it again and record it."
    )
    assert recorded.rungs("readme").code == 0
    text = (recorded.repo / "README.md").read_text()
    assert recorded.rungs("readme", "--check").text == "README.md is current.\n"
    for name, block in tables.blocks_in(text).items():
        if name != "h200:gemm:floor":  # which is S3's
            assert "†" in block and "Stale" in block, f"{name}: also a block of figures or sums has a mark"
    row = next(line for line in text.splitlines() if line.startswith("| S1 |"))
    recorded.edit("README.md", row, row.replace("†", ""))
    assert recorded.rungs("readme", "--check").code == 1, "a mark that was taken away"
    recorded.git("checkout", "-q", "--", "kernels")
    assert recorded.rungs("readme", "--check").code == 1, "a mark that is no longer due"


def test_edited_stamp_or_protocol_is_told_apart_from_the_kernel(recorded):
    recorded.edit("kernels/stamp.cu", "//", "///")
    assert recorded.rungs("status").text == f"{SET}: gemm, 4 variants, 0 stale\n"
    recorded.edit(
        "kernels/stamp.cu", "{ptx::clock64_now(), ptx::globaltimer()}", "{ptx::globaltimer(), ptx::clock64_now()}"
    )
    status = recorded.rungs("status").text.splitlines()[1:]
    assert len(status) == 5 and all(
        line.endswith(": the clock stamp compiles to other machine code now") for line in status[1:]
    )
    recorded.git("checkout", "-q", "--", "kernels")
    recorded.edit("workflow/rungs/session.py", "# cuBLAS makes", "# as cuBLAS makes")
    assert recorded.rungs("status").text == f"{SET}: gemm, 4 variants, 0 stale\n"
    recorded.edit("workflow/rungs/session.py", "STAMP_SLOTS = 1024", "STAMP_SLOTS = 512")
    status = recorded.rungs("status").text.splitlines()
    assert len(status) == 5 and all(line.endswith(": the measuring protocol has changed since") for line in status[1:])


def test_live_tables_are_no_staler_than_their_measurements(checkout):
    """What is stale when a run is planned is measured in it, so the run after has nothing left to do."""
    checkout.edit("kernels/swizzle.cuh", "//", "///")
    checkout.configure(profile={"enabled": False})
    shutil.rmtree(checkout.live / "csv" / "profile")
    result = checkout.snakemake("--cores", "2", "tables")
    assert result.code == 0, result.text
    assert "†" not in (checkout.live / "md" / "gemm.md").read_text()
    assert NOTHING in checkout.planned("tables").text


# ---- trace ----


def test_trace_prints_a_chain_that_holds(published):
    checkout, _ = published
    for cell in (
        f"{SET}/md/gemm.md:S1",
        "README.md:S0>S1",
        f"{SET}/README.md:S3:512x512x256",
        "results/h200/md/gemm.md:S2",
    ):
        result = checkout.rungs("trace", cell, "--verbose")
        assert result.code == 0, result.text
        assert result.text.endswith("Every link holds.\n")
        short = checkout.rungs("trace", cell)
        assert "Every link holds. " in short.text and len(short.text) < len(result.text)
        for word in (
            "SHA-256",
            "binary",
            "source",
            "protocol",
            "clock observe: asked for",
            "NVIDIA H200, GPU-11111111",
        ):
            assert word in result.text, word


def test_trace_misses_counters_whose_recording_is_gone(recorded):
    for end in ("csv.gz", "json"):
        (recorded.repo / SET / "csv" / "profile" / f"gemm.{end}").unlink()
    result = recorded.rungs("trace", f"{SET}/md/gemm.md:S1")
    assert result.code == 1
    assert f"FAIL {SET}/csv/profile/gemm/{S1}.csv is missing" in result.text


@pytest.mark.parametrize("text", ["{}", '{"kind": "bu'])
def test_a_damaged_manifest_of_a_recorded_set_is_one_sentence_and_no_stack(clone, text):
    path = clone.repo / SET / "csv" / "inspect" / "gemm.json"
    path.write_text(text)
    result = clone.snakemake("--dry-run", "report")
    assert result.code == 1 and no_traceback(result)
    assert [path.name in line for line in result.said].count(True) == 1


def test_a_damaged_experiment_that_is_not_chosen_is_a_note(clone):
    (clone.repo / "config" / "experiments" / "stray.yaml").write_text("name: [")
    (clone.repo / "config" / "experiments" / ".#gemm.yaml").symlink_to("nobody@nowhere.1")
    result = clone.planned("report")
    assert sum("stray is not used here, and its file cannot be read" in line for line in result.said) == 1


@pytest.mark.parametrize(
    ("path", "old", "new", "link"),
    [
        (f"{SET}/csv/sweep/gemm.csv.gz", f"{S1},512,512,256,1,control,", f"{S1},512,512,256,1,controk,", S1),
        (
            f"{SET}/csv/inspect/gemm.json",
            '"-lineinfo"',
            '"-lineinfp"',
            "is the hash of sources, macros, flags and compiler",
        ),
        (
            f"{SET}/data/gemm/shapes.csv",
            f"{S1},A3t S1,512,512,256,2",
            f"{S1},A3t S1,512,512,256,1",
            "made again from the rounds: other figures",
        ),
        (*ONE_INSTRUCTION, f"kernels/swizzle.cuh has changed since; {S1} compiles to other machine code"),
        ("workflow/rungs/protocol.py", "PROBE = 5", "PROBE = 6", "is this checkout's"),
    ],
    ids=["csv", "build manifest", "data", "kernel", "protocol"],
)
def test_trace_names_the_link_that_a_changed_byte_breaks(recorded, path, old, new, link):
    recorded.edit(path, old, new)
    result = recorded.rungs("trace", f"{SET}/md/gemm.md:S1")
    assert result.code == 1
    assert "Traceback" not in result.text
    broken = [line for line in result.text.splitlines() if line.startswith(("FAIL", "rungs: "))]
    assert any(link in line for line in broken), result.text


def test_trace_names_a_binary_whose_machine_code_is_another_than_the_sets(recorded):
    path = recorded.repo / SET / "csv" / "sweep" / "gemm.json"
    manifests = json.loads(path.read_text())
    manifests["jobs"][S1]["arms"][S1]["code_hash"] = "0" * 64
    path.write_text(json.dumps(manifests))
    result = recorded.rungs("trace", f"{SET}/md/gemm.md:S1")
    assert result.code == 1 and f"FAIL   arm {S1}: binary" in result.text
