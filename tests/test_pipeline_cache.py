"""Snakemake's cache between checkouts: what one built, another takes over without a compiler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from binaries import GEMM, toolchain
from pipeline import S0, S1, SLUG, Checkout
from rungs.binary import load_binary
from rungs.files import read_json, sha256_file

TARGETS = [f"results/{SLUG}/build/sm_90a/{name}/{name}.json" for name in (S0, S1)]


def compilers(folder: Path) -> Path:
    """nvcc and ptxas that do nothing but give their version once a file `broken` lies beside them."""
    folder.mkdir()
    for tool in (toolchain().nvcc, toolchain().ptxas):
        script = folder / Path(tool).name
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ ! -e {folder}/broken ] || exit 1\nexec {tool} "$@"\n')
        script.chmod(0o755)
    return folder


def test_a_second_checkout_takes_over_the_builds_of_the_first(tmp_path):
    tools, cache = compilers(tmp_path / "tools"), tmp_path / "cache"
    cache.mkdir()
    there = {"PATH": os.pathsep.join([str(tools), os.environ["PATH"]]), "SNAKEMAKE_OUTPUT_CACHE": str(cache)}
    arguments = ["--cores", "2", "--cache", "build", "--config", "toolchain=system", "--"]
    first, second = (Checkout.create(tmp_path / name) for name in ("first", "second"))
    made = first.snakemake(*arguments, *TARGETS, **there)
    assert made.code == 0 and made.of("build") == [S0, S1], made.text

    (tools / "broken").touch()
    taken = second.snakemake(*arguments, *TARGETS, **there)
    assert taken.code == 0 and taken.of("build") == [S0, S1], taken.text
    for name, target in zip((S0, S1), TARGETS, strict=True):
        manifest = second.repo / target
        assert manifest.read_bytes() == (first.repo / target).read_bytes()
        assert read_json(manifest)["variant"] == name and read_json(manifest)["status"] == "ok"
        # A job that follows the links finds the manifest's own cubin beside it.
        for path in (manifest, manifest.resolve()):
            assert sha256_file(load_binary(GEMM, path).cubin) == read_json(manifest)["cubin_sha256"]
    assert not second.planned(*arguments, *TARGETS, **there).jobs

    # The cache is asked for what the sources say now, and what is built without it goes into no file of the cache.
    kept = {path.name: sha256_file(path) for path in cache.iterdir()}
    second.edit("kernels/swizzle.cuh", "\n", "\n// edited\n")
    again = second.snakemake(*arguments, TARGETS[0], **there)
    assert again.code == 0 and read_json(second.repo / TARGETS[0])["status"] == "build failed", again.text
    done = second.rungs(
        "build", "--variant", S1, "--arch", "sm_90a", "--toolchain", "system", "--output", TARGETS[1], **there
    )
    assert done.code == 1 and read_json(second.repo / TARGETS[1])["status"] == "build failed", done.text
    assert kept.items() <= {path.name: sha256_file(path) for path in cache.iterdir()}.items()
    shutil.rmtree(cache)
