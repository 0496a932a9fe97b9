"""One cubin per variant through ninja, with a manifest that says what it was made from."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs import plan
from rungs.errors import Refused, RungsError
from rungs.files import ROOT, sha256_file, sha256_json, sha256_text, write_json, write_text
from rungs.machine_code import code_hash
from rungs.variants import GEMM, Device, Experiment, Variant, load_device, readable_experiments

KERNELS = ROOT / "kernels"
STAMP = "stamp"
"""Name of the clock-stamp kernel, which is built like a variant but is none."""
NVCC_FLAGS = ("-ptx", "-std=c++17", "-lineinfo", "-Ikernels")
PTXAS_FLAGS = ("-v", "-lineinfo")


@dataclass(frozen=True)
class Unit:
    """What one binary is made from. `smem_bytes` is what its launch asks for, for occupancy."""

    name: str
    experiment: str
    kernel: str
    entry: str
    macros: Mapping[str, int]
    smem_bytes: int = 0
    threads: int = 32


@dataclass(frozen=True)
class Toolchain:
    nvcc: str
    ptxas: str
    host: str

    def versions(self) -> dict[str, str]:
        """The versions that decide the bytes of a cubin. The host compiler only preprocesses: it does not."""
        return {"nvcc": _release(self.nvcc), "ptxas": _release(self.ptxas)}


@functools.cache
def _release(tool: str) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


def find_toolchain(which: str) -> Toolchain:
    """nvcc and ptxas, from pip's packages or (`system`) from PATH and CUDA_HOME, and a host g++.

    Raises RungsError that says what is missing and how to get it.
    """
    nvcc = pip_cuda_tool("nvcc") if which == "pip" else system_cuda_tool("nvcc")
    host = shutil.which("g++")
    if host is None:
        raise RungsError(
            "g++ is not on PATH, and nvcc needs a host compiler even for -ptx: install it (Debian: apt-get install g++; conda: gxx)."
        )
    ptxas = Path(nvcc).with_name("ptxas")
    if not ptxas.is_file():
        raise RungsError(
            f"ptxas is not beside {nvcc}: install the compiler with `pip install -r envs/requirements.txt`."
        )
    return Toolchain(nvcc, str(ptxas), host)


def pip_cuda_tool(name: str) -> str:
    """Path of a CUDA tool that pip installed (`nvcc`, `cuobjdump`, `nvdisasm`). Raises RungsError where there is none."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        tool = Path(folder) / "cu13" / "bin" / name
        if os.access(tool, os.X_OK):
            return str(tool)
    raise RungsError(
        f"{name} of CUDA 13.0 is not among this Python's packages: run `pip install -r envs/requirements.txt`, or use the"
        " machine's own with `--config toolchain=system`."
    )


def system_cuda_tool(name: str) -> str:
    """Path of a CUDA tool of the machine: PATH first, then CUDA_HOME and /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = shutil.which(name) or next((t for h in homes if h and (t := shutil.which(name, path=f"{h}/bin"))), None)
    if found is None:
        raise RungsError(
            f"{name} is neither on PATH nor under CUDA_HOME: install CUDA 13.0 or use pip's with `--config toolchain=pip`."
        )
    return found


def find_variant(name: str) -> tuple[Experiment, Variant]:
    """The experiment and the variant of a name, or of a rung's name.

    Raises RungsError where no experiment has it, and where more than one has.
    """
    found, reasons = [], []
    experiments, damaged = readable_experiments()
    # Where none has it, what the one says whose names begin most alike, or that has a ladder of its letters, and else the first GEMM.
    ladder = name.rstrip("0123456789")
    for experiment in sorted(
        experiments, key=lambda e: (-_alike(e.pattern, name), ladder not in e.ladders, e.workload != GEMM)
    ):
        try:
            found.append((experiment, experiment.variant(name)))
        except RungsError as error:
            reasons.append(error)
    if not found:
        missing = RungsError(f"There is no variant {name!r}: config/experiments holds no experiment.")
        raise next(iter([*damaged.values(), *reasons, missing]))
    if len(found) > 1:
        owners = " and ".join(experiment.name for experiment, _ in found)
        variants = list(dict.fromkeys(variant.name for _, variant in found))
        fix = f"say {' or '.join(variants)}" if len(variants) > 1 else "give one of the files another variant_name"
        raise RungsError(f"Experiments {owners} both have {name!r}, so it does not say which binary is meant: {fix}.")
    return found[0]


def _alike(one: str, other: str) -> int:
    """How many letters two names begin with together."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), min(len(one), len(other))
    )


def unit_of(name: str, arch: str) -> Unit:
    """The unit of a variant's name. Raises RungsError for an unknown name, Refused for one that the architecture lacks."""
    if name == STAMP:
        return Unit(STAMP, "", "stamp.cu", "stamp", {})
    experiment, variant = find_variant(name)
    return unit(experiment, variant, load_device(arch))


def unit(experiment: Experiment, variant: Variant, device: Device) -> Unit:
    """Raises Refused where the architecture lacks a level, or cannot hold the pinned CTAs' threads or shared memory."""
    experiment.check_chip(variant, device.arch)
    smem, threads, _ = plan.resources(experiment, variant, device)
    pinned, most = device.pinned(experiment.name), 32 * device.warps_per_sm
    if threads * pinned > most:
        raise Refused(
            f"{variant.name}: {threads} threads x {pinned} CTAs per SM are {threads * pinned}, but an SM of {device.arch} holds"
            f" {most}: pin fewer CTAs in config/devices/{device.arch}.yaml."
        )
    macros = experiment.macros(variant, device)
    return Unit(variant.name, experiment.name, experiment.kernel, experiment.entry, macros, smem, threads)


def made_of(unit: Unit, device: Device) -> list[Any]:
    """The unit as JSON has it, and what its registers are held against."""
    pinned = device.pinned(unit.experiment) if unit.experiment else None
    return [{**vars(unit), "macros": dict(unit.macros)}, device.registers_per_sm, pinned]


@functools.cache
def sources(kernel: str) -> tuple[str, ...]:
    """The kernel and every header of this repo that it includes, directly or not, as paths from the checkout, sorted.

    A header that is not there is left out: the compiler names it, and the build is then a failure with a reason. Nothing in
    a kernel may keep the pipeline from being planned.
    """
    pending, found = [(KERNELS / kernel).resolve()], set()
    while pending:
        path = pending.pop()
        if path in found or not path.is_relative_to(ROOT) or not path.is_file():
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            beside, central = (path.parent / name).resolve(), (KERNELS / name).resolve()
            pending.append(beside if beside.is_file() else central)
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found))


def source_hashes(kernel: str) -> dict[str, str]:
    return {name: sha256_text(ROOT / name) for name in sources(kernel)}


def identity(unit: Unit, arch: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The part of a build manifest that is known before compiling, with the `build_id` that hashes all of it."""
    hashes = source_hashes(unit.kernel)
    made_from = {
        "source_hash": sha256_json(hashes),
        "macros": dict(unit.macros),
        "flags": [*NVCC_FLAGS, f"-arch={_virtual(arch)}", *PTXAS_FLAGS, f"-arch={arch}"],
        "compiler": dict(versions),
    }
    return {"build_id": sha256_json(made_from)[:16], **made_from, "sources": hashes}


def _virtual(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def build(name: str, arch: str, manifest: Path, toolchain: Toolchain) -> dict[str, Any]:
    """Compile a variant into `<folder of manifest>/<name>.{ptx,cubin}` and write the manifest; returns it.

    A variant that does not compile, that spills, that uses a stack, that ptxas warns about with C75xx or that takes more
    registers than the pinned CTAs leave, is a result: `status` is then not `ok`, `reason` says why and the two files are
    empty.
    """
    head: dict[str, Any] = {"kind": "build", "variant": name, "arch": arch}
    folder = manifest.parent.resolve()  # ninja runs in the checkout, wherever the caller is
    try:
        wanted = unit_of(name, arch)
    except Refused as refusal:
        return _finish(folder, name, {**head, "status": refusal.status, "reason": str(refusal)})
    head |= {"experiment": wanted.experiment, "entry": wanted.entry}
    head |= {"smem_dynamic_bytes": wanted.smem_bytes, "threads": wanted.threads}
    head |= identity(wanted, arch, toolchain.versions())
    problem = _run_ninja(folder, wanted, arch, toolchain)
    if problem:
        return _finish(folder, name, {**head, "status": "build failed", "reason": problem})
    report = parse_ptxas((folder / "ptxas.txt").read_text(encoding="utf-8"))
    files = {f"{kind}_sha256": sha256_file(folder / f"{name}.{kind}") for kind in ("ptx", "cubin")}
    files |= {"code_hash": code_hash(folder / f"{name}.cubin")}
    reason = objection(report, name) or _too_many_registers(report["ptxas"]["registers"], wanted, arch)
    status = "build failed" if reason else "ok"
    return _finish(folder, name, {**head, "status": status, "reason": reason, **report, **({} if reason else files)})


def _finish(folder: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    if manifest["status"] != "ok":
        for kind in ("ptx", "cubin"):
            write_text(folder / f"{name}.{kind}", "")
    write_json(folder / f"{name}.json", manifest)
    return manifest


def _run_ninja(folder: Path, unit: Unit, arch: str, toolchain: Toolchain) -> str:
    """Run the two edges; returns the reason of a failure or an empty string."""
    ninja = shutil.which("ninja") or _pip_ninja()
    defines = [f"-D{macro}={value}" for macro, value in unit.macros.items()]
    ptx, cubin, report = (folder / file for file in (f"{unit.name}.ptx", f"{unit.name}.cubin", "ptxas.txt"))
    # nvcc writes absolute paths of sources into .file lines, and names the static functions of CUDA's headers after a hash of
    # them, once as text and once as bytes of debug information; without them the same source gives the same bytes anywhere.
    script = folder / "paths.sed"
    root = re.sub(r"([][\\/.*^$|&])", r"\\\1", str(ROOT))
    internal = ",".join(str(ord(letter)) for letter in "_INTERNAL_")
    rules = [
        r's|^\(\t\.file\t[0-9]* "\)[^"]*/include/|\1cuda/|',
        rf's|^\(\t\.file\t[0-9]* "\){root}/|\1|',
        r"s|_INTERNAL_[0-9a-f]\{8\}_|_INTERNAL_00000000_|g",
        rf"s|{internal},\([0-9]*,\)\{{8\}}|{internal},{'48,' * 8}|g",
    ]
    write_text(script, "".join(f"{rule}\n" for rule in rules))
    nvcc = [toolchain.nvcc, "-ccbin", toolchain.host, *NVCC_FLAGS, f"-arch={_virtual(arch)}", *defines]
    nvcc += [f"kernels/{unit.kernel}", "-o", f"{ptx}.raw", "-MD", "-MF", f"{ptx}.d", "-MT", str(ptx)]
    compile_ptx = (
        f"{shlex.join(nvcc)} && sed -f {shlex.quote(str(script))} {shlex.quote(f'{ptx}.raw')} > {shlex.quote(str(ptx))}"
    )
    ptxas = [toolchain.ptxas, *PTXAS_FLAGS, f"-arch={arch}", str(ptx), "-o", str(cubin)]
    log = shlex.quote(str(report))
    # Where none of the sources lies: ptxas writes the date and size of each file that it finds into the line table.
    elsewhere = shlex.quote(str(folder))
    assemble = f"cd {elsewhere} && {shlex.join(ptxas)} > {log} 2>&1 || {{ cat {log}; exit 1; }}"
    text = (
        f"builddir = {_ninja(str(folder))}\n"
        f"rule ptx\n  command = {_ninja(compile_ptx)}\n  depfile = {_ninja(f'{ptx}.d')}\n  description = nvcc {unit.name}\n"
        f"rule cubin\n  command = {_ninja(assemble)}\n  description = ptxas {unit.name}\n"
        f"build {_ninja_path(ptx)}: ptx {_ninja_path(ROOT / 'kernels' / unit.kernel)} | {_ninja_path(Path(toolchain.nvcc))}\n"
        f"build {_ninja_path(cubin)} | {_ninja_path(report)}: cubin {_ninja_path(ptx)} | {_ninja_path(Path(toolchain.ptxas))}\n"
    )
    write_text(folder / "build.ninja", text)
    for made in filter(Path.is_symlink, (ptx, cubin)):  # into a cache that other checkouts read
        made.unlink()
    command = [ninja, "-f", str(folder / "build.ninja"), str(cubin)]
    run = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    Path(f"{ptx}.raw").unlink(missing_ok=True)
    if run.returncode:
        said = run.stdout + run.stderr
        if re.search(r"No space left|Killed|annot allocate memory|out of memory|ninja: fatal", said):
            raise RungsError(
                f"{unit.name} was not compiled for want of memory or disk ({' '.join(said.split())[-200:]}): free some and run again."
            )
        lines = [line for line in said.splitlines() if re.search(r"error|fatal|not found|undefined", line, re.I)]
        first = lines[0] if lines else f"ninja exited with {run.returncode}"
        return f"{unit.name} does not compile for {arch}: {' '.join(first.split())}."
    return ""


def _environment() -> dict[str, str]:
    """Return the environment without the variables by which nvcc takes flags that no manifest would name."""
    return {name: value for name, value in os.environ.items() if not re.fullmatch(r"NVCC_(PRE|AP)PEND_FLAGS", name)}


def assemble(ptx: Path, cubin: Path, arch: str, toolchain: Toolchain) -> str:
    """ptxas alone, as a build runs it; returns the reason of a failure or an empty string."""
    command = [toolchain.ptxas, *PTXAS_FLAGS, f"-arch={arch}", str(ptx.resolve()), "-o", str(cubin.resolve())]
    run = subprocess.run(command, cwd=cubin.parent, capture_output=True, text=True)
    said = [line for line in (run.stdout + run.stderr).splitlines() if "error" in line or "fatal" in line]
    return (said or [f"ptxas exited with {run.returncode}"])[0].strip() if run.returncode else ""


def _ninja(command: str) -> str:
    return command.replace("$", "$$").replace("\n", " ")


def _ninja_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _pip_ninja() -> str:
    try:
        import ninja
    except ImportError:
        raise RungsError("ninja is not installed: run `pip install -r envs/requirements.txt`.") from None
    return str(Path(ninja.BIN_DIR) / "ninja")


def parse_ptxas(text: str) -> dict[str, Any]:
    """Registers, stack, spills (bytes) and warnings from the report of `ptxas -v`."""

    def number(pattern: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    return {
        "ptxas": {
            "registers": number(r"Used (\d+) registers"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "spill_store_bytes": number(r"(\d+) bytes spill stores"),
            "spill_load_bytes": number(r"(\d+) bytes spill loads"),
            "smem_static_bytes": number(r"(\d+) bytes smem"),
            "barriers": number(r"used (\d+) barriers"),
        },
        "warnings": [line.strip() for line in text.splitlines() if re.search(r"\bwarning\b|\(C75\d\d\)", line)],
    }


def objection(report: Mapping[str, Any], name: str) -> str:
    """Why a binary that assembled is refused all the same, or an empty string."""
    ptxas = report["ptxas"]
    serialised = [line for line in report["warnings"] if re.search(r"C75\d\d", line)]
    if serialised:
        return f"{name}: ptxas warns {serialised[0]!r}, so the instructions are not those that were declared."
    spilled = ptxas["spill_store_bytes"] + ptxas["spill_load_bytes"]
    if spilled or ptxas["stack_bytes"]:
        return (
            f"{name} spills {ptxas['spill_store_bytes']} + {ptxas['spill_load_bytes']} bytes and has a stack of"
            f" {ptxas['stack_bytes']} bytes at {ptxas['registers']} registers: it would measure local memory, so give it more"
            " registers (fewer CTAs per SM) or less to keep."
        )
    return ""


def _too_many_registers(registers: int, unit: Unit, arch: str) -> str:
    """Why the pinned CTAs do not fit into an SM's registers, which are given to warps 256 at a time; else empty."""
    if not unit.experiment:
        return ""
    device = load_device(arch)
    pinned, warps = device.pinned(unit.experiment), -(-unit.threads // 32)
    taken = -(-registers * 32 // 256) * 256 * warps * pinned
    if taken <= device.registers_per_sm:
        return ""
    return (
        f"{unit.name}: {registers} registers x {unit.threads} threads x {pinned} CTAs per SM take {taken} registers, but an SM"
        f" of {arch} has {device.registers_per_sm}: bound it with __launch_bounds__({unit.threads}, {pinned}), or pin fewer"
        " CTAs."
    )
