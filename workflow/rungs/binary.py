"""A variant's binary and the build manifest beside it: what is timed, profiled or launched is what was built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs import schemas
from rungs.errors import Refused, RungsError
from rungs.files import sha256_file
from rungs.plan import launch_hash
from rungs.variants import Experiment, Variant, load_device


def made_as(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what every manifest says of a binary that its job used, from the manifest of its build."""
    return {key: manifest[key] for key in ("variant", "build_id", "source_hash", "cubin_sha256", "code_hash")}


@dataclass(frozen=True)
class Binary:
    """One variant's binary as its build manifest describes it."""

    variant: Variant
    cubin: Path
    manifest: Mapping[str, Any]

    def provenance(
        self, experiment: Experiment, points: Iterable[tuple[int, ...]], sms: int | None = None
    ) -> dict[str, str]:
        """Return what a manifest says of the binary and of its launches at these points."""
        device = load_device(self.manifest["arch"])
        launches = launch_hash(experiment, self.variant, device, points, sms)
        return {**made_as(self.manifest), "launch_hash": launches}


def load_binary(experiment: Experiment, manifest_path: Path) -> Binary:
    """Raises RungsError for a binary of another experiment, of other macros than the experiment's file says now or that is
    not the one of its manifest, and Refused for a variant that has none."""
    manifest = schemas.read_manifest(manifest_path)
    owner = manifest.get("experiment", experiment.name)
    if owner != experiment.name:
        raise RungsError(
            f"{manifest_path} is of experiment {owner}, not of {experiment.name}: delete its folder and build the variant again."
        )
    variant = experiment.variant(manifest["variant"])
    if manifest["status"] != "ok":
        raise Refused(manifest["reason"], manifest["status"])
    wanted, built = experiment.macros(variant, load_device(manifest["arch"])), manifest["macros"]
    if odd := next((name for name in (*wanted, *built) if wanted.get(name) != built.get(name)), None):
        raise RungsError(
            f"{manifest_path} was built with {odd}={built.get(odd, 'nothing')} where experiment {experiment.name} says"
            f" {wanted.get(odd, 'nothing')}: delete its folder and build the variant again."
        )
    cubin = manifest_path.with_suffix(".cubin")
    if sha256_file(cubin) != manifest["cubin_sha256"]:
        raise RungsError(f"{cubin} is not the binary of {manifest_path}: delete its folder and build it again.")
    return Binary(variant, cubin, manifest)
