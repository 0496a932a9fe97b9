"""The environments name one set of versions: requirements, lock, conda environment and package."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
import yaml

import rungs
from rungs.files import ROOT

ENVS = ROOT / "envs"
PIN = re.compile(r"([A-Za-z0-9._-]+)(\[[a-z0-9,]+\])?==([A-Za-z0-9.]+)")


def pins(lines: list[str]) -> dict[str, tuple[str, str]]:
    """Normalised name -> (extras, version). Fails on a line that is no exact pin."""
    found = {}
    for line in lines:
        match = PIN.fullmatch(line)
        assert match, f"{line!r} is not name==version"
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = (match[2] or "", match[3])
    return found


def lines_of(name: str) -> list[str]:
    text = (ENVS / name).read_text().splitlines()
    return [line for line in text if line and not line.startswith(("#", "-r "))]


REQUIREMENTS = pins(lines_of("requirements.txt"))
DEVELOPMENT = pins(lines_of("requirements-slurm.txt") + lines_of("requirements-dev.txt"))
LOCK = pins(lines_of("lock.txt"))


def test_the_compiler_is_that_of_torch():
    assert REQUIREMENTS["cuda-toolkit"] == ("[nvcc,cudart,crt,nvvm,cccl]", "13.0.3")
    assert REQUIREMENTS["torch"] == ("", "2.13.0")
    assert {name: LOCK[name][1] for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")} == dict.fromkeys(
        ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"), "13.0.88"
    )


def test_the_conda_environment_pins_the_same():
    environment = yaml.safe_load((ENVS / "environment.yaml").read_text())
    *conda, pip = environment["dependencies"]
    assert pins(pip["pip"]) == REQUIREMENTS
    assert {re.split(r"[ =<>]", entry)[0] for entry in conda} == {"python", "gxx", "ninja", "pip"}


@pytest.mark.parametrize("name", sorted(REQUIREMENTS | DEVELOPMENT))
def test_the_lock_holds_every_requirement_at_its_version(name):
    wanted = (REQUIREMENTS | DEVELOPMENT)[name][1]
    assert re.fullmatch(rf"{re.escape(wanted)}(\.0)*", LOCK[name][1])


def test_the_lock_names_no_place_and_no_build():
    for line in lines_of("lock.txt"):
        assert PIN.fullmatch(line), line
        assert not re.search(r"[+@/]|file:|http", line)
    assert not {"rungs", "pip"} & set(LOCK)


def test_the_package_takes_its_requirements_and_version_from_their_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["envs/requirements.txt"]}
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rungs.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", rungs.__version__)
    assert project["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("name", ["cuda-toolkit", "snakemake", "torch"])
def test_the_tests_run_on_what_is_pinned(name):
    try:
        installed = version(name)
    except PackageNotFoundError:
        pytest.fail(f"{name} is not installed: run `pip install -r envs/requirements.txt`.")
    assert re.fullmatch(rf"{re.escape(REQUIREMENTS[name][1])}(\.0)*(\+\w+)?", installed)
