"""No name, path or value of a config becomes code: shell lines are quoted, nothing runs through a shell, nothing is unpickled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from rungs import schemas
from rungs.files import ROOT

RULES = sorted(ROOT.glob("workflow/rules/*.smk"))
MODULES = sorted(
    path for folder in ("workflow", "benchmarks") for path in (ROOT / folder).rglob("*.py") if path.is_file()
)
CONSTANT = {"{params.twin}"}
"""What stands unquoted in a shell line: `--twin` or nothing, by the rule itself."""
CALLS = {
    *("eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "pd.read_pickle", "torch.load"),
}
IMPORTS = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_everything_that_a_shell_line_takes_is_quoted(path):
    blocks = re.findall(r"^ +shell:\n((?: +[\"'][^\n]*\n)+)", path.read_text(), re.MULTILINE)
    taken = re.findall(r"\{[^{}]*\}", "".join(blocks))
    assert len(blocks) == path.read_text().count("shell:")
    assert [name for name in taken if not name.endswith(":q}") and name not in CONSTANT] == []


def test_rules_run_shell_lines_alone():
    text = "".join(path.read_text() for path in [*RULES, ROOT / "Snakefile"])
    assert not re.search(r"^\s*(run|script|notebook|wrapper|cwl):", text, re.MULTILINE)


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def odd(path: Path) -> list[str]:
    """What in a module takes data for code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in IMPORTS]
        if isinstance(node, ast.Call):
            name, keywords = dotted(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
            if name in CALLS or (
                name == "yaml.load" and dotted(keywords.get("Loader", node)) not in ("_OneOfEachKey", "_Safe")
            ):
                found.append(f"line {node.lineno}: {name}")
            found += [
                f"line {node.lineno}: {key}"
                for key in ("shell", "allow_pickle")
                if key in keywords and getattr(keywords[key], "value", True) is not False
            ]
    return found


def test_no_module_takes_data_for_code():
    assert {path.name: what for path in MODULES if (what := odd(path))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "import pickle",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_such_code_would_be_found(tmp_path, line):
    (tmp_path / "x.py").write_text(line)
    assert odd(tmp_path / "x.py")


def test_yaml_is_loaded_by_a_safe_loader():
    safe = yaml.SafeLoader | getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    assert issubclass(schemas._OneOfEachKey, safe) and issubclass(schemas._Safe, safe)
