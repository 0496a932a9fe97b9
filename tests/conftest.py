"""One complete run of the pipeline on the stand-ins, which each test of a behaviour starts from."""

from __future__ import annotations

import pytest

from pipeline import Checkout


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory):
    """(checkout, result) of `snakemake --cores 2 all`; not to be changed."""
    checkout = Checkout.create(tmp_path_factory.mktemp("complete") / "run")
    return checkout, checkout.snakemake("--cores", "2", "all")


@pytest.fixture
def checkout(complete_run, tmp_path):
    """A copy of the complete run."""
    finished, result = complete_run
    assert result.code == 0, result.text
    return finished.copy(tmp_path / "run")


def pytest_collection_modifyitems(items):
    """With several workers (`-n 2 --dist loadgroup`) a file's tests stay together, as do all that look at built binaries."""
    for item in items:
        binaries = any(getattr(value, "__module__", "") == "binaries" for value in vars(item.module).values())
        item.add_marker(pytest.mark.xdist_group("binaries" if binaries else item.module.__name__))
