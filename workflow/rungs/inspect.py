"""What the disassembly of a variant's cubin shows: its opcodes, its resources, and whether its levels are the real ones."""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs import plan, schemas
from rungs.build import pip_cuda_tool, system_cuda_tool
from rungs.errors import RungsError
from rungs.files import read_json, sha256_file
from rungs.variants import CONFIG, GEMM, Device, Variant, load_device, load_experiment

TENSOR = ("HMMA", "HGMMA")
"""Opcodes that make a loop the main one."""
ROW = ("variant", "arch", "kind", "name", "value", "status", "reason")
SCOPES = {"loop": "main loop", "kernel": "kernel"}
MISSING = "evidence missing"


@dataclass(frozen=True)
class Instruction:
    """One line of SASS. `predicate` is `@P0`, `@!UP1` or empty; `targets` are indices into the listing."""

    address: int
    predicate: str
    opcode: str
    operands: str
    targets: tuple[int, ...] = ()

    @property
    def filler(self) -> bool:
        """Never executed, whatever the data: ptxas pads with `@!PT LDS RZ, [RZ]`."""
        return self.predicate in ("@!PT", "@!UPT")

    @functools.cached_property
    def registers(self) -> set[str]:
        """Those that its operands name, of each group the first."""
        return set(re.findall(r"\bU?R\d+\b", self.operands))

    @property
    def falls_through(self) -> bool:
        """Whether the next line can be the next one executed."""
        name = self.opcode.split(".")[0]
        if self.predicate not in ("", "@PT", "@UPT"):
            return True
        if name in ("EXIT", "RET", "BRX", "JMX", "KILL"):
            return False
        # `BRA.U UP0, target` and `BRA.DIV UR4, target` have a condition among their operands.
        return name not in ("BRA", "JMP") or "," in self.operands


@dataclass(frozen=True)
class Rule:
    """One piece of evidence: `opcode` stands (`wanted`) or does not stand in `scope`; with `reads`, each of them waits for those (see
    waits_for_reads, of `ahead` too)."""

    name: str
    scope: str
    opcode: str
    wanted: bool
    reads: str = ""
    ahead: bool = False

    @property
    def row(self) -> str:
        if self.reads:
            return f"{self.name}: {self.opcode.lstrip('=')} waits for {self.reads.lstrip('=')}"
        return f"{self.name}: {'' if self.wanted else 'no '}{self.opcode.lstrip('=')} in the {SCOPES[self.scope]}"


def tool(name: str, toolchain: str) -> str:
    """Path of `nvdisasm` or `cuobjdump`: pip's, or with toolchain `system` the machine's own."""
    return pip_cuda_tool(name) if toolchain == "pip" else system_cuda_tool(name)


def _output(command: Sequence[str], cubin: Path) -> str:
    run = subprocess.run([*command, str(cubin)], capture_output=True, text=True)
    if run.returncode:
        said = " ".join((run.stderr or run.stdout).replace(str(cubin), cubin.name).split())
        raise RungsError(f"{cubin} cannot be disassembled ({said}): delete it and build it again.")
    return run.stdout


def disassemble(cubin: Path, toolchain: str) -> str:
    """The SASS of a cubin with branch targets as labels. Raises RungsError where the tool or the cubin is no good.

    The data-flow pass is left out: it only guesses the targets of BSYNC, and fails on some binaries.
    """
    return _output([tool("nvdisasm", toolchain), "-c", "-ndf"], cubin)


def resource_usage(cubin: Path, toolchain: str) -> dict[str, int]:
    """What the cubin itself declares, summed or largest over its functions: `registers`, and `stack_bytes` with local memory."""
    text = _output([tool("cuobjdump", toolchain), "-res-usage"], cubin)
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not found:
        raise RungsError(f"{cubin} declares no registers: delete it and build it again.")
    return {
        "registers": max(int(registers) for registers, _, _ in found),
        "stack_bytes": max(int(stack) + int(local) for _, stack, local in found),
    }


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of an `nvdisasm -c` listing, in its order, with each label resolved to an index."""
    labels: dict[str, int] = {}
    lines: list[tuple[int, str, str, str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*([.$\w]+):\s*$", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+\{?\s*(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            lines.append((int(found[1], 16), (found[2] or "").strip(), found[3], found[4]))
    return [
        Instruction(
            address,
            predicate,
            opcode,
            operands,
            # RET names the function it is relative to, not a place it goes to.
            ()
            if opcode.startswith("RET")
            else tuple(labels[name] for name in re.findall(r"(\.L\w+|(?<=`\()[.$\w]+)", operands) if name in labels),
        )
        for address, predicate, opcode, operands in lines
    ]


def reachable(instructions: Sequence[Instruction], without: int | None = None) -> set[int]:
    """Indices that control can reach from the first line, or can reach without passing index `without`."""
    seen: set[int] = set()
    pending = [0] if instructions else []
    while pending:
        index = pending.pop()
        if index in seen or index == without or index >= len(instructions):
            continue
        seen.add(index)
        pending.extend(instructions[index].targets)
        if instructions[index].falls_through:
            pending.append(index + 1)
    return seen


def executed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Without what never runs: predicated-off fillers, and the padding behind the end of the kernel."""
    return [instructions[index] for index in sorted(reachable(instructions)) if not instructions[index].filler]


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The innermost back-edge span with most HMMA or HGMMA, fillers included; empty where no loop has any.

    A branch back is a back edge only if its target is passed on every way to it. ptxas puts the slow path of an mbarrier
    wait behind the end of the kernel, from where it jumps back into the middle of the loop: that is none.
    """
    reached = reachable(instructions)
    ends: dict[int, int] = {}
    for index in sorted(reached):
        for head in instructions[index].targets:
            if head <= index and (head == index or index not in reachable(instructions, head)):
                ends[head] = index
    tensor = {head: sum(_is_tensor(i) for i in instructions[head : end + 1]) for head, end in ends.items()}
    spans = [(head, end) for head, end in ends.items() if tensor[head]]
    innermost = [
        (head, end)
        for head, end in spans
        if not any((h, e) != (head, end) and head <= h and e <= end for h, e in spans)
    ]
    if not innermost:
        return []
    head, end = max(innermost, key=lambda span: (tensor[span[0]], span[0] - span[1]))
    return list(instructions[head : end + 1])


def _is_tensor(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in TENSOR and not instruction.filler


WAIT = "SYNCS.PHASECHK.TRYWAIT"
"""The wait for a stage that has been filled."""
WIDTHS = {"128": 4, "64": 2, "4": 4, "2": 2}
"""Registers that a read writes, by the last part of its opcode (`LDS.U.128`, `LDSM.16.MT88.4`), where it is not one."""


def waits_for_reads(instructions: Sequence[Instruction], arrive: int, reads: str, ahead: bool = False) -> bool:
    """Whether on every way to the arrive at that index each read before it has returned.

    ptxas issues an arrive without looking at the scoreboard of reads, and changes the order of reads. But a warp issues in order, an
    instruction that has a register of a read among its operands only once the read has returned, and reads return in the order of
    their issue. So on each way from a read to the arrive has to stand such an instruction, or another read of which that holds.

    `ahead`: what is read after the last wait before the arrive is the next stage's, and has to have returned at the next arrive.
    """
    found = {
        index: _written(instruction)
        for index, instruction in enumerate(instructions)
        if matches(instruction.opcode, reads) and not instruction.filler
    }
    come = [index for index in found if _comes_first(instructions, arrive, index, {index: set()}, not ahead)]
    return bool(come) and not any(_comes_first(instructions, arrive, index, found, not ahead) for index in come)


def _comes_first(
    instructions: Sequence[Instruction],
    arrive: int,
    read: int,
    reads: Mapping[int, set[str]],
    freed: bool,
) -> bool:
    """Whether a way leads from the read to the arrive on which nothing waits for it. `freed`: its stage is what the arrive frees,
    also where no wait for another one lies between."""
    always = ("", "@PT", "@UPT", instructions[arrive].predicate)
    seen: set[tuple[int, bool]] = set()
    pending = [(read + 1, freed)]
    while pending:
        state = index, behind = pending.pop()
        if state in seen or index >= len(instructions):
            continue
        seen.add(state)
        instruction = instructions[index]
        if instruction.predicate in always and reads[read] & instruction.registers:
            continue
        if index == arrive and behind:
            return True
        if index in reads and not instruction.predicate and behind == freed:
            continue  # of the same stage, and looked at itself
        behind = behind or matches(instruction.opcode, WAIT)
        if not instruction.opcode.startswith("BSSY"):  # which names where lanes come together and does not go there
            pending += [(target, behind) for target in instruction.targets]
        if instruction.falls_through:
            pending.append((index + 1, behind))
    return False


def _written(read: Instruction) -> set[str]:
    named = re.match(r"(U?R)(\d+)\b", read.operands)
    width = WIDTHS.get(read.opcode.rsplit(".", 1)[-1], 1)
    return {f"{named[1]}{int(named[2]) + i}" for i in range(width)} if named else set()


def matches(opcode: str, pattern: str) -> bool:
    """Whether `opcode` has the dot parts of `pattern`: the first first, the others anywhere. `=LDS` is met by `LDS` alone."""
    if pattern.startswith("="):
        return opcode == pattern[1:]
    (name, *parts), (wanted, *needed) = opcode.split("."), pattern.split(".")
    return name == wanted and not Counter(needed) - Counter(parts)


@functools.cache
def load_evidence(path: Path = CONFIG / "evidence.yaml", only: str = "") -> dict[str, list[dict[str, Any]]]:
    """The rules by experiment; with `only`, no other experiment's file is read, since most jobs ask for one.

    Raises RungsError for a file that breaks the schema or names a factor or level there is not.
    """
    rules = schemas.read_yaml(path, "evidence")
    for name, wanted in rules.items():
        if only and name != only:
            continue
        factors = load_experiment(name).factors
        for rule in wanted:
            for factor, levels in rule.get("levels", {}).items():
                if factor not in factors:
                    raise RungsError(
                        f"{path}, {rule['name']}: {name} has no factor {factor}: choose one of {', '.join(factors)}."
                    )
                for level in levels:
                    if level not in factors[factor].levels:
                        known = ", ".join(map(str, factors[factor].levels))
                        raise RungsError(
                            f"{path}, {rule['name']}: factor {factor} has no level {level}: choose one of {known}."
                        )
    return rules


def rules_of(variant: Variant, arch: str = "") -> list[Rule]:
    """The rules that a variant's levels call for, in the file's order; those for other architectures than `arch` are left out."""
    wanted = load_evidence(only=variant.experiment).get(variant.experiment)
    if wanted is None:
        raise RungsError(
            f"config/evidence.yaml has no rules for experiment {variant.experiment}: add what proves its levels."
        )
    called = [
        rule
        for rule in wanted
        if all(variant.level(factor) in levels for factor, levels in rule.get("levels", {}).items())
        if not arch or arch in rule.get("architectures", (arch,))
    ]
    rules = [
        Rule(rule["name"], scope, opcode, need == "must")
        for rule in called
        for scope in SCOPES
        for need in ("must", "must_not")
        for opcode in rule.get(scope, {}).get(need, ())
    ]
    return rules + [
        Rule(rule["name"], "kernel", waits["at"], True, waits["for"], waits.get("ahead", False))
        for rule in called
        for waits in ([rule["waits"]] if "waits" in rule else [])
    ]


def ctas_per_sm(device: Device, registers: int, smem_bytes: int, threads: int) -> int:
    """How many CTAs an SM's registers, shared memory and warps hold at once.

    `registers` per thread; `smem_bytes` static and dynamic, per CTA. Registers are given to warps 256 at a time, from four
    files of equal size; shared memory 128 bytes at a time, the system's part of each CTA on top (CUDA C++ Programming
    Guide 13.0, and NVIDIA's occupancy calculator). The limit on CTAs as such (16 to 32) binds only under four warps a CTA.
    """
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = device.registers_per_sm // 4 // per_warp * 4 // warps
    per_cta = -(-(smem_bytes + device.smem_reserved_bytes) // 128) * 128
    return min(by_registers, device.smem_per_sm_bytes // per_cta, device.warps_per_sm // warps)


def inspect(name: str, arch: str, manifest_path: Path, toolchain: str) -> list[dict[str, Any]]:
    """Opcodes, resources and evidence of the variant's binary, as rows of CSV kind `inspect`.

    A build that failed, and a cubin that is not the one the manifest names, give one evidence row with the status and the
    reason. Raises RungsError for a manifest of another variant or architecture, and for a missing disassembler.
    """
    manifest = read_json(manifest_path)
    if (manifest.get("variant"), manifest.get("arch")) != (name, arch):
        raise RungsError(
            f"{manifest_path} is the manifest of {manifest.get('variant')} for {manifest.get('arch')}, not of {name} for"
            f" {arch}: delete it and build again."
        )
    if manifest["status"] != "ok":
        return _rows(name, arch, [("evidence", "build", None, manifest["status"], manifest["reason"])])
    cubin = manifest_path.with_suffix(".cubin")
    if sha256_file(cubin) != manifest["cubin_sha256"]:
        reason = f"{cubin.name} is not the binary that its manifest names: delete it and build it again."
        return _rows(name, arch, [("evidence", "build", None, MISSING, reason)])

    listing = parse_sass(disassemble(cubin, toolchain))
    lines = {"loop": [i for i in main_loop(listing) if not i.filler], "kernel": executed(listing)}
    counts = {scope: Counter(i.opcode for i in found) for scope, found in lines.items()}
    rows: list[tuple[str, str, int | None, str, str]] = []
    for kind, scope in (("opcode", "loop"), ("opcode_total", "kernel")):
        rows += [(kind, opcode, count, "ok", "") for opcode, count in sorted(counts[scope].items())]
    rows += _resources(manifest, load_device(arch), resource_usage(cubin, toolchain))
    for rule in rules_of(load_experiment(manifest["experiment"]).variant(name), arch):
        count = sum(n for opcode, n in counts[rule.scope].items() if matches(opcode, rule.opcode))
        reason = "" if (count > 0) == rule.wanted else _objection(name, arch, rule, count)
        if rule.reads and not reason:
            reached = sorted(reachable(listing))
            arrives = [at for at in reached if matches(listing[at].opcode, rule.opcode) and not listing[at].filler]
            count = sum(waits_for_reads(listing, at, rule.reads, rule.ahead) for at in arrives)
            if count < len(arrives):
                reason = (
                    f"{name} for {arch} has {len(arrives) - count} {rule.opcode.lstrip('=')} that may come before the last"
                    f" {rule.reads.lstrip('=')} has returned, or that no {rule.reads.lstrip('=')} comes before ({rule.name}):"
                    " make its count depend on all of them."
                )
        rows.append(("evidence", rule.row, count, MISSING if reason else "ok", reason))
    return _rows(name, arch, rows)


def _objection(name: str, arch: str, rule: Rule, count: int) -> str:
    opcode, where = rule.opcode.lstrip("="), SCOPES[rule.scope]
    found = (
        f"needs {opcode} in the {where} and has none"
        if rule.wanted
        else f"has {count} {opcode} in the {where} and may have none"
    )
    return f"{name} for {arch} {found} ({rule.name}): the binary is not what the variant declares."


def _resources(
    manifest: dict[str, Any], device: Device, usage: dict[str, int]
) -> list[tuple[str, str, int | None, str, str]]:
    """Registers and stack as the cubin declares them; the rest as ptxas reported and as the plan launches."""
    name, ptxas = manifest["variant"], manifest["ptxas"]
    smem = ptxas["smem_static_bytes"] + manifest["smem_dynamic_bytes"]
    ctas = ctas_per_sm(device, usage["registers"], smem, manifest["threads"])
    experiment = load_experiment(manifest["experiment"])
    _, _, pinned = plan.resources(experiment, experiment.variant(name), device)
    values = {
        "registers": usage["registers"],
        "stack_bytes": usage["stack_bytes"],
        "spill_store_bytes": ptxas["spill_store_bytes"],
        "spill_load_bytes": ptxas["spill_load_bytes"],
        "smem_static_bytes": ptxas["smem_static_bytes"],
        "smem_dynamic_bytes": manifest["smem_dynamic_bytes"],
        "threads": manifest["threads"],
        "barriers": ptxas["barriers"],
        "ctas_per_sm": ctas,
    }
    reasons = {
        resource: f"{name} for {device.arch} has {resource} {values[resource]}, not 0: it would measure local memory."
        for resource in ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
        if values[resource]
    }
    # A workload that is no GEMM pins no number by its shared memory: it needs room for so many.
    if pinned is not None and (ctas < pinned if experiment.workload != GEMM else ctas != pinned):
        reasons["ctas_per_sm"] = (
            f"{name} for {device.arch} fits {ctas} CTAs per SM where {pinned} are pinned ({usage['registers']} registers, {smem}"
            " bytes of shared memory): its steps are not controlled."
        )
    return [
        ("resource", resource, value, MISSING if resource in reasons else "ok", reasons.get(resource, ""))
        for resource, value in values.items()
    ]


def _rows(name: str, arch: str, found: Sequence[tuple[str, str, int | None, str, str]]) -> list[dict[str, Any]]:
    return [dict(zip(ROW, (name, arch, *row), strict=True)) for row in found]


def run(name: str, arch: str, manifest: Path, output: Path, toolchain: str) -> None:
    """Inspect the variant and write the CSV; evidence that is missing is a row, not an error."""
    schemas.write_rows("inspect", inspect(name, arch, manifest, toolchain), output)
