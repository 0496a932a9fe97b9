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
