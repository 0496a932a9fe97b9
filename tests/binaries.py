"""Binaries that several test files look at: each is built once, whichever process asks first, in a folder that goes with the run."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

import shared
from rungs.build import Toolchain, build, find_toolchain
from rungs.errors import RungsError
from rungs.files import read_json
from rungs.inspect import inspect
from rungs.variants import Variant, architectures, load_experiment

GEMM = load_experiment("gemm")


def ladder_variants() -> list[Variant]:
    """Every rung of every ladder, each variant once."""
    rungs = [variant for ladder in GEMM.ladders.values() for variant in ladder.rungs.values()]
    return sorted(set(rungs), key=lambda variant: variant.name)


@functools.cache
def tools() -> str:
    """pip's compiler, or the machine's own where that is all there is: both build the same bytes."""
    try:
        find_toolchain("pip")
    except RungsError:
        return "system"
    return "pip"


@functools.cache
def toolchain() -> Toolchain:
    return find_toolchain(tools())


@functools.cache
def built(name: str, arch: str) -> Path:
    """Path of the build manifest; the build's wall time is in `seconds` beside it."""
    manifest = shared.folder() / "binaries" / arch / name / f"{name}.json"
    with shared.alone(f"{arch}-{name}"):
        if not manifest.exists():
            start = time.perf_counter()
            build(name, arch, manifest, toolchain())
            manifest.with_name("seconds").write_text(str(time.perf_counter() - start))
    return manifest


ARCHITECTURES = [arch for arch in architectures() if arch not in ("sm_86", "sm_89")]
"""Those whose binaries are looked at: the two left out have sm_80's opcodes."""


@functools.cache
def build_ladders() -> None:
    """Build all rungs for those architectures, two at a time."""
    pairs = [(variant.name, arch) for arch in ARCHITECTURES for variant in ladder_variants()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: built(*pair), pairs))


def manifest_of(name: str, arch: str) -> dict[str, Any]:
    return read_json(built(name, arch))


def inspected(variants: Collection[Variant], arch: str) -> dict[Variant, pd.DataFrame]:
    """What `inspect` finds in the binaries of these variants, two at a time."""

    def look(variant: Variant) -> pd.DataFrame:
        return pd.DataFrame(inspect(variant.name, arch, built(variant.name, arch), tools()))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(variants, pool.map(look, variants), strict=True))
