"""`python -m rungs export`: a wgmma variant as one .cu with its launcher, its header and an example, to build without rungs.

What the launcher does is taken from the plan of a probe problem: constants as they stand there, dimensions by the letter of the
problem's extent that they equal. Only the grid and the conditions of a refusal are written a second time, in C++, as pure
functions in the header, which the tests hold equal to `plan` for every rung.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from rungs import build, schemas, staleness, wgmma
from rungs.errors import Refused, RungsError
from rungs.files import ROOT, whole
from rungs.plan import BF16_BYTES, LARGEST_EXTENT, Plan, TensorMap, Workspace, plan
from rungs.results import COLD, RECORDED, ResultsSet
from rungs.variants import (
    GEMM,
    WGMMA,
    Device,
    Experiment,
    Variant,
    cluster_of,
    ctas_along_k,
    load_device,
    load_experiment,
    readable_experiments,
)

ARCH = "sm_90a"
MARKER = "// Exported by rungs"
"""How every exported file begins: what begins otherwise is not overwritten."""
PROBE = (1000, 2000, 3000)
ADDRESSES = {"a": 1 << 40, "b": 2 << 40, "c": 3 << 40}
Shape = tuple[int, int, int]
USUAL: Shape = (4096, 4096, 4096)
"""The shape of the example and of the share of cuBLAS where no other is asked for, or what is asked for was not measured."""
WIDTH = 124


def run(name: str, folder: Path, shape: Shape | None = None) -> list[Path]:
    """Write `<variant>.cu`, `<variant>.h` and `example.cu` of a variant or a rung into the folder; returns the three paths.

    `shape`: M, N, K that it is for, which the example computes and the share of cuBLAS is given at.

    All three or none. Raises RungsError for an unknown variant, one that does not multiply by wgmma, a folder that cannot be
    written and a file in it that is no export.
    """
    experiment, variant = build.find_variant(name)
    texts = files(experiment, variant, shape=shape)
    if folder.exists() and not folder.is_dir():
        raise RungsError(f"{folder} is a file, and an export is three files in a folder: name a folder.")
    paths = {folder / file: text for file, text in texts.items()}
    for path in paths:
        _check_ours(path)
    with contextlib.ExitStack() as stack:  # each is renamed only when all have been written
        for path, text in paths.items():
            stack.enter_context(whole(path)).write_text(text, encoding="utf-8")
    return list(paths)


def _check_ours(path: Path) -> None:
    """Raises RungsError for anything at the path that is not an export, whose place a new one may take."""
    if not (path.exists() or path.is_symlink()):
        return
    with contextlib.suppress(OSError):
        if path.is_file():  # not a pipe, say
            with path.open("rb") as file:
                if file.read(len(MARKER)) == MARKER.encode():
                    return
    raise RungsError(
        f"{path} is there and does not begin with {MARKER!r}, so it is not overwritten: name another folder."
    )


def variant_for(shape: tuple[int, int, int]) -> str:
    """Name of the variant that `choose` takes for M, N, K. Raises Refused where none computes the shape."""
    from rungs import choose

    return choose.chosen(load_experiment(choose.EXPERIMENT), shape, load_device(ARCH)).variant.name


def files(
    experiment: Experiment, variant: Variant, recorded: Path | None = None, shape: Shape | None = None
) -> dict[str, str]:
    """The exported files by name. Raises RungsError as `run` does, and Refused where the plan of every launch is refused.

    `recorded` is the folder of the recorded sets, by default this checkout's.
    """
    if experiment.workload != GEMM or experiment.multiplies != WGMMA:
        others = [e.name for e in readable_experiments()[0] if e.workload == GEMM and e.multiplies == WGMMA]
        raise RungsError(
            f"{variant.name} is of experiment {experiment.name}, and export knows the launch of those that multiply by wgmma"
            f" alone: choose a variant of {' or '.join(others)}."
        )
    device = load_device(ARCH)
    probed = plan(experiment, variant, device, PROBE, ADDRESSES)
    header = _provenance(experiment, variant, recorded or ROOT / RECORDED, shape)
    words = {"name": variant.name, "upper": variant.name.upper(), "header": header}
    words |= _plan_words(experiment, variant, device, probed)
    words |= _launcher_words(experiment, variant, device, probed)
    words |= dict(zip(("m", "n", "k"), map(str, shape or USUAL), strict=True))
    words["b_at"] = "b[j * k + t]" if words["b_shape"] == "N x K" else "b[t * n + j]"
    templates = {f"{variant.name}.cu": SOURCE, f"{variant.name}.h": HEADER, "example.cu": EXAMPLE}
    return {file: Template(template).substitute(words) for file, template in templates.items()}


# ---- where it comes from ---------------------------------------------------------------------------------------------


def compile_line(name: str) -> str:
    """What builds the example in the folder of a variant's export, which may hold other variants too."""
    compute = ARCH.replace("sm_", "compute_")
    return f"nvcc -std=c++17 -gencode arch={compute},code={ARCH} example.cu {name.split('_')[0]}_*.cu -o example"


def _provenance(experiment: Experiment, variant: Variant, recorded: Path, shape: Shape | None) -> str:
    """The comment at the top of each file."""
    rungs = "".join(f", rung {rung}" for rung in experiment.rung_names(variant))
    unit = build.unit(experiment, variant, load_device(ARCH))
    source_hash = build.identity(unit, ARCH, {})["source_hash"]
    levels = "; ".join(experiment.factors[factor].levels[value].title for factor, value in variant.levels)
    paragraphs = [
        f"{MARKER.removeprefix('// ')}, variant {variant.name} of experiment {experiment.name}{rungs}.",
        f"License: {license_line()}",
        f"Levels: {levels}.",
        f"Source: kernels/{experiment.kernel} and the headers that it includes, hash {source_hash}.",
        *measurements(experiment, variant, recorded, shape),
    ]
    # The compile line is one line, to be copied.
    return "\n".join([*map(_comment, paragraphs), f"// Compile: {compile_line(variant.name)}"])


def _comment(paragraph: str, hanging: str = "  ") -> str:
    return textwrap.fill(
        paragraph,
        WIDTH,
        initial_indent="// ",
        subsequent_indent=f"// {hanging}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def license_line() -> str:
    """The license's name and who has the copyright, from LICENSE."""
    lines = [line.strip() for line in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines() if line.strip()]
    return ", ".join([lines[0], *(line for line in lines if line.startswith("Copyright"))])


def measurements(experiment: Experiment, variant: Variant, recorded: Path, asked: Shape | None = None) -> list[str]:
    """What the recorded sets say of a variant: its compiler and its share of cuBLAS, a sentence for each set.

    The share is that at the shape `asked` for, else at `USUAL` and the largest.

    Sets with cold caches are left out. A recording of other machine code is named without its numbers.
    """
    found = []
    for results in sorted(path for path in recorded.glob("*") if not path.name.endswith(COLD)):
        shapes, recorded_set = results / "data" / experiment.name / "shapes.csv", ResultsSet(results)
        made = recorded_set.build_manifest(experiment.name, ARCH, variant.name)
        if not (shapes.is_file() and recorded_set.has("sweep", experiment.name, variant.name) and made):
            continue
        frame = schemas.read_csv("shapes", shapes)
        rows = frame[(frame["variant"] == variant.name) & frame["share_percent"].notna()]
        if rows.empty:
            continue
        measured = {(row["m"], row["n"], row["k"]): row for _, row in rows.iterrows()}
        best = max(measured, key=lambda shape: measured[shape]["share_percent"])
        at = next((shape for shape in (asked, USUAL) if shape in measured), best)
        row = measured[at]
        gpu = recorded_set.manifest("sweep", experiment.name, variant.name)["gpu"]["name"]
        missed = f" Not at {experiment.describe(asked)}." if asked and at != asked else ""
        shape = experiment.describe(at)
        if at not in (asked, best):
            shape += f", at most {measured[best]['share_percent']:.1f} % at {experiment.describe(best)}"
        if reason := staleness.stale(results, [experiment.name], [variant.name], compare=True).get(variant.name):
            found.append(f"Recorded on {gpu}, but {reason}: what it took there is not of this source.")
            continue
        compiler = _versions(made["compiler"])
        found.append(
            f"Measured on {gpu}, compiled by {compiler}: {row['share_percent']:.1f} % of cuBLAS at {shape}"
            f" (recorded set {results.name}, run {row['run_id']}).{missed}"
        )
    if found:
        return found
    with contextlib.suppress(RungsError):
        return [
            f"Not measured in a recorded set; rungs builds it by {_versions(build.find_toolchain('pip').versions())}."
        ]
    return ["Not measured in a recorded set."]


def _versions(compiler: Mapping[str, str]) -> str:
    return ", ".join(f"{tool} {version}" for tool, version in compiler.items())


# ---- the kernel ------------------------------------------------------------------------------------------------------


def inlined(kernel: str) -> tuple[list[str], str]:
    """CUDA's own headers that a kernel includes, and its source with each header of this repo once, where it is first named.

    Raises RungsError for a header that is neither.
    """
    outside: list[str] = []
    seen: set[Path] = set()

    def text_of(path: Path) -> str:
        seen.add(path)
        relative = path.relative_to(ROOT).as_posix()
        lines = [f"// ==== {relative} ===="]
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', line)
            if re.match(r"\s*#\s*pragma\s+once\b", line):
                continue
            if not found:
                lines.append(line)
            elif found[2]:
                if not re.match(r"(cuda|nv/|cooperative_groups|vector_types|mma\.h)", found[2]):
                    raise RungsError(
                        f"{relative} includes <{found[2]}>, which is none of CUDA's headers: an export needs nothing else, so"
                        " write what it takes from there into the kernel."
                    )
                outside.append(found[2])
            else:
                beside, central = (path.parent / found[1]).resolve(), (build.KERNELS / found[1]).resolve()
                header = beside if beside.is_file() else central
                if not header.is_file() or not header.is_relative_to(ROOT):
                    raise RungsError(
                        f'{relative} includes "{found[1]}", which is not in this repo: add it or take it out.'
                    )
                if header not in seen:
                    lines += [text_of(header), f"// ==== {relative}, continued ===="]
        return "\n".join(lines)

    source = text_of((build.KERNELS / kernel).resolve())
    return list(dict.fromkeys(outside)), re.sub(r"\n{3,}", "\n\n", source)


def _launcher_words(experiment: Experiment, variant: Variant, device: Device, probed: Plan) -> dict[str, str]:
    """What stands in the .cu alone: macros, kernel, and the kernel's parameters in their order."""
    outside, source = inlined(experiment.kernel)
    # In a namespace of the variant two exports have two kernels; a C name would be one symbol, defined twice.
    linked = r'extern\s+"C"\s+(?=__global__)'
    heads = [text.partition("{")[0] for text in re.split(linked, source)[1:]]
    if not heads or not all(re.search(rf"\b{experiment.entry}\(", head) for head in heads):
        raise RungsError(
            f'kernels/{experiment.kernel} and its headers have an extern "C" __global__ that is not {experiment.entry}, or none:'
            " export takes one kernel."
        )
    source = re.sub(linked, "", source)
    titles = {factor.macro: factor.levels[variant.level(name)].title for name, factor in experiment.factors.items()}
    macros = experiment.macros(variant, device)
    defines = [
        f"#define {macro} {value}" + (f"  // {titles[macro]}" if macro in titles else "")
        for macro, value in macros.items()
    ]
    letters = dict(zip(PROBE, "mnk", strict=True))
    names = {address: name for name, address in ADDRESSES.items()}
    arguments = []
    for parameter in probed.params:
        if isinstance(parameter, TensorMap):
            arguments.append(f"&map_{names[parameter.address]}")
        elif isinstance(parameter, tuple) and parameter[1] == 8 and parameter[0] in names:
            arguments.append(f"&to_{names[parameter[0]]}")
        elif isinstance(parameter, tuple) and parameter[1] == 4 and parameter[0] in letters:
            arguments.append(f"&extent_{letters[parameter[0]]}")
        elif isinstance(parameter, Workspace):
            arguments.append("&workspace")
        else:
            raise _unknown_plan(variant, f"parameter {parameter}")
    major, minor = device.capability.split(".")
    held = {
        "to_a": "const void* to_a = a;",
        "to_b": "const void* to_b = b;",
        "to_c": "const void* to_c = c;",
        **{f"extent_{axis}": f"unsigned extent_{axis} = static_cast<unsigned>({axis});" for axis in "mnk"},
    }
    taken = [argument.removeprefix("&") for argument in arguments]
    return {
        "includes": "".join(f"#include <{header}>\n" for header in outside),
        "defines": "\n".join(defines),
        "undefines": "\n".join(f"#undef {macro}" for macro in macros),
        "source": source,
        "entry": experiment.entry,
        "arguments": ", ".join(arguments),
        "held": "\n  ".join(held[name] for name in taken if name in held),
        "major": major,
        "minor": minor,
    }


# ---- the plan --------------------------------------------------------------------------------------------------------


def _plan_words(experiment: Experiment, variant: Variant, device: Device, probed: Plan) -> dict[str, str]:
    """What stands in the header's `plan`."""
    values = experiment.values(variant)
    along_m, along_n, _ = cluster_of(values)
    cluster = probed.cluster[0]
    if (probed.grid[1:], probed.block[1:], probed.cluster[1:]) != ((1, 1),) * 3:
        raise _unknown_plan(variant, "a grid, a block or a cluster of more than one dimension")
    maps = {}
    for name, address in ADDRESSES.items():
        found = [p for p in probed.params if isinstance(p, TensorMap) and p.address == address]
        if len(found) != 1:
            raise _unknown_plan(variant, f"{len(found)} tensor maps of {name.upper()}")
        maps[name] = found[0]
    resident = f"sms * {device.pinned(experiment.name)}" if device.pinned(experiment.name) > 1 else "sms"
    grid = [
        f"plan.grid = ceil_div(m, {values['TILE_M'] * along_m}) * ceil_div(n, {values['TILE_N'] * along_n}) * {probed.together};"
    ]
    if values["VARIANT_PERSISTENT"]:
        grid += [
            f"const unsigned clusters = {resident} / {cluster}, most = (clusters > 1 ? clusters : 1) * {cluster};",
            "if (plan.grid > most) plan.grid = most;",
        ]
    return {
        "refusals": "\n".join(f"  if ({rule}) return {_quoted(why)};" for rule, why in refusals(experiment, variant)),
        "grid": "\n  ".join(grid),
        "block": str(probed.block[0]),
        "cluster": str(cluster),
        "smem": str(probed.smem_bytes),
        "dependent": str(probed.dependent).lower(),
        "maps": "\n  ".join(f"plan.{name} = {_map_words(variant, found)};" for name, found in maps.items()),
        "sms_unused": "" if values["VARIANT_PERSISTENT"] else "  (void)sms;\n",
        **_workspace_words(variant, values, probed),
        "b_shape": "N x K" if values["VARIANT_B_LAYOUT"] == 1 else "K x N",
        "largest": str(LARGEST_EXTENT),
        "capability": device.capability,
        "title": device.title,
        "stream_words": _comment(STREAM_WORDS[probed.dependent], hanging=""),
    }


def _workspace_words(variant: Variant, values: Mapping[str, int], probed: Plan) -> dict[str, str]:
    """What stands in header, launcher and example where the kernel has a workspace; nothing where it has none."""
    found = [parameter for parameter in probed.params if isinstance(parameter, Workspace)]
    if not found:
        return dict.fromkeys((*WORKSPACE, "workspace_plan"), "")
    split = ctas_along_k(values)
    [workspace], tiles = found, wgmma.tiles(values, PROBE)
    zeros, whole_tile = workspace.zeros // tiles, workspace.bytes // tiles
    plan = (
        f"\n  plan.workspace_zeros = {zeros}ull * (plan.grid / {split});"
        f"\n  plan.workspace_bytes = {whole_tile}ull * (plan.grid / {split});"
    )
    waiting = probed.together - probed.cluster[0]
    of = {"name": variant.name, "together": str(probed.together), "waiting": str(waiting)}
    words = {key: Template(text).substitute(of) for key, text in WORKSPACE.items()}
    return words | {"workspace_plan": plan}


def refusals(experiment: Experiment, variant: Variant) -> list[tuple[str, str]]:
    """(condition in C++, sentence of `wgmma.check` without the extent) of each rule that depends on the shape, in its order."""
    extents = dict(zip("MNK", PROBE, strict=True))
    broken = [(axis, *rule) for axis in "MNK" for rule in (("< 1", 0), (f"> {LARGEST_EXTENT}", 2 * LARGEST_EXTENT))]
    broken += [(axis, "% 8 != 0", extents[axis] + 4) for axis in "NK"]
    found = []
    for axis, rule, extent in broken:
        m, n, k = (extents | {axis: extent}).values()
        try:
            wgmma.check(experiment, variant, (m, n, k))
        except Refused as refusal:
            found.append((f"{axis.lower()} {rule}", str(refusal).replace(f"{axis}={extent}", axis)))
        else:
            raise _unknown_plan(variant, f"no rule against {axis}={extent}")
    return found


def _map_words(variant: Variant, tensor_map: TensorMap) -> str:
    letters = dict(zip(PROBE, "mnk", strict=True))
    dims = [letters.get(extent) for extent in tensor_map.dims]
    plain = tensor_map.element_bytes == BF16_BYTES and tensor_map.strides == (tensor_map.dims[0] * BF16_BYTES,)
    if len(dims) != 2 or None in dims or not plain:
        raise _unknown_plan(variant, f"a tensor map {tensor_map}")
    inner, outer = dims
    widths = [re.sub(r"\D", "", word) or "0" for word in (tensor_map.swizzle, tensor_map.l2_promotion)]
    box = ", ".join(map(str, tensor_map.box))
    return f"{{{{extent({inner}), extent({outer})}}, extent({inner}) * {BF16_BYTES}, {{{box}}}, {', '.join(widths)}}}"


def _unknown_plan(variant: Variant, what: str) -> RungsError:
    return RungsError(
        f"{variant.name}: its launch has {what}, which the exported launcher does not know: teach workflow/rungs/export.py."
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


WORKSPACE = {
    "workspace_words": """
// workspace: `workspace_bytes` of the plan below of global memory, at a multiple of 16 bytes; its size is not checked. Fill
// the first `workspace_zeros` with zeros, in the stream, before the first launch, after one that failed, and whenever M or N
// come to another `grid` than in the launch before; between launches leave it alone. Launches in one stream may share it, each
// waits for the one ahead; launches in several streams, or of several of these kernels, may not.
// The CTAs of a tile wait for each other, and are no cluster: they have indices in a row, and CTAs begin in that order. A
// launch holds no more than $waiting of the device's SMs while it waits for others, so that it ends beside any kernels that end by
// themselves, and beside fewer than SMs / $waiting launches of this kind; of a part of a device count its SMs.""",
    "workspace_parameter": "void* workspace, ",
    "workspace_fields": """
  unsigned long long workspace_bytes, workspace_zeros;""",
    "workspace_aligned": " || !aligned(workspace)",
    "workspace_example": """
  int device, sms;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const auto plan = rungs::${name}_plan::plan(m, n, k, sms);
  void* workspace;
  CHECK(cudaMalloc(&workspace, plan.workspace_bytes));
  CHECK(cudaMemset(workspace, 0, plan.workspace_zeros));""",
    "workspace_argument": ", workspace",
    "too_few_words": """
//   cudaErrorCooperativeLaunchTooLarge  the device has fewer SMs than CTAs share a tile, which wait for each other""",
    "too_few": """
  if (device.sms < ${together}) return cudaErrorCooperativeLaunchTooLarge;""",
}
"""The words of the templates that a workspace adds."""

STREAM_WORDS: Sequence[str] = (
    "stream: the launch is ordered in it like any other, and can be captured into a graph.",
    "stream: the launch is ordered in it like any other, and can be captured into a graph. It has the attribute of programmatic"
    " stream serialization: it may begin before the launch ahead of it has ended, and waits for its end before it reads or"
    " writes global memory. A launch behind it that has the attribute too must do the same (griddepcontrol.wait).",
)

HEADER = """\
$header
#ifndef RUNGS_${upper}_H
#define RUNGS_${upper}_H

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace rungs {

// Enqueues C[M][N] = A[M][K] * B on the current device: bf16 in, fp32 accumulate, bf16 out, no alpha and no beta.
//
// a, b, c: addresses on the device, multiples of 16 bytes. A is M x K, B $b_shape, C M x N, each row-major without gaps. C
// is written whole and must overlap neither A nor B.
// m, n, k: any M, and N and K that are multiples of 8; each from 1 to $largest.$workspace_words
$stream_words
//
// Returns cudaSuccess once the launch is enqueued; what goes wrong on the device later a later call of CUDA returns. Else:
//   cudaErrorInvalidValue            a shape that `refusal` below refuses, or a null or misaligned address
//   cudaErrorNoKernelImageForDevice  the device is not of compute capability $capability, $title
//   cudaErrorNotSupported            the driver has no cuTensorMapEncodeTiled$too_few_words
//   what cudaFuncSetAttribute or cudaLaunchKernelExC return
// May be called from several threads, and on several devices. The host does not wait for the device.
cudaError_t $name(
    const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, long long m, long long n, long long k,
    ${workspace_parameter}cudaStream_t stream = nullptr);

// The launch of that call as plain numbers; needs no GPU.
namespace ${name}_plan {

// Of bf16, innermost dimension first.
struct TensorMap {
  unsigned long long dims[2], stride_bytes;
  unsigned box[2], swizzle_bytes, l2_promotion_bytes;
};

struct Plan {
  const char* refusal;  // where there is one, the rest is zeros
  unsigned grid, block, cluster, smem_bytes;
  bool dependent;  // programmatic stream serialization
  TensorMap a, b, c;$workspace_fields
};

inline unsigned ceil_div(long long extent, unsigned tile) { return static_cast<unsigned>((extent + tile - 1) / tile); }
inline unsigned long long extent(long long value) { return static_cast<unsigned long long>(value); }

// Why a shape is not computed; null where it is.
inline const char* refusal(long long m, long long n, long long k) {
$refusals
  return nullptr;
}

// `sms` is how many SMs the device has.
inline Plan plan(long long m, long long n, long long k, unsigned sms) {
  Plan plan = {};
  plan.refusal = refusal(m, n, k);
  if (plan.refusal) return plan;
$sms_unused  $grid
  plan.block = $block;
  plan.cluster = $cluster;
  plan.smem_bytes = $smem;
  plan.dependent = $dependent;
  $maps$workspace_plan
  return plan;
}

}  // namespace ${name}_plan
}  // namespace rungs

#endif
"""

SOURCE = """\
$header
#include "$name.h"

#include <cuda.h>
#include <cuda_runtime.h>
$includes
$defines

namespace rungs {
namespace ${name}_kernel {

$source

}  // namespace ${name}_kernel

// ==== the launcher ====
namespace ${name}_launch {

using ${name}_plan::Plan;
using ${name}_plan::TensorMap;
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);  // its type alone: the driver's library is not linked

struct Device {
  unsigned sms;  // 0: not looked at yet
  EncodeTiled encode;
};

static const void* kernel() {
  return reinterpret_cast<const void*>(&${name}_kernel::$entry);
}

static cudaError_t look_at(int ordinal, Device& device) {
  int major = 0, minor = 0, sms = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (!error) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, ordinal);
  if (error) return error;
  if (major != $major || minor != $minor) return cudaErrorNoKernelImageForDevice;
  error = cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, $smem);
  if (!error) error = cudaFuncSetAttribute(kernel(), cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  if (error) return error;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (error) return error;
  if (result != cudaDriverEntryPointSuccess || !found) return cudaErrorNotSupported;
  device.encode = reinterpret_cast<EncodeTiled>(found);
  device.sms = static_cast<unsigned>(sms);
  return cudaSuccess;
}

// The current device: a thread looks at it once, and shares what it finds with no other.
static cudaError_t current_device(Device& device) {
  constexpr int KEPT = 64;
  thread_local Device kept[KEPT] = {};
  int ordinal = 0;
  if (cudaError_t error = cudaGetDevice(&ordinal)) return error;
  if (ordinal < KEPT && kept[ordinal].sms) return device = kept[ordinal], cudaSuccess;
  const cudaError_t error = look_at(ordinal, device);
  if (!error && ordinal < KEPT) kept[ordinal] = device;
  return error;
}

static cudaError_t encode(const Device& device, const TensorMap& from, const void* address, CUtensorMap& map) {
  const cuuint64_t dims[2] = {from.dims[0], from.dims[1]}, strides[1] = {from.stride_bytes};
  const cuuint32_t box[2] = {from.box[0], from.box[1]}, steps[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = from.swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : from.swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : from.swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                                : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUtensorMapL2promotion promotion = from.l2_promotion_bytes == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                           : from.l2_promotion_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                           : from.l2_promotion_bytes == 64  ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B
                                                                            : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult result =
      device.encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(address), dims, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);  // the two number their errors alike
}

static bool aligned(const void* address) { return address && reinterpret_cast<unsigned long long>(address) % 16 == 0; }

}  // namespace ${name}_launch

cudaError_t $name(
    const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, long long m, long long n, long long k,
    ${workspace_parameter}cudaStream_t stream) {
  using namespace ${name}_launch;
  if (${name}_plan::refusal(m, n, k)) return cudaErrorInvalidValue;
  if (!aligned(a) || !aligned(b) || !aligned(c)$workspace_aligned) return cudaErrorInvalidValue;
  Device device = {};
  if (cudaError_t error = current_device(device)) return error;
  const Plan plan = ${name}_plan::plan(m, n, k, device.sms);$too_few

  CUtensorMap map_a, map_b, map_c;
  if (cudaError_t error = encode(device, plan.a, a, map_a)) return error;
  if (cudaError_t error = encode(device, plan.b, b, map_b)) return error;
  if (cudaError_t error = encode(device, plan.c, c, map_c)) return error;
  $held
  void* arguments[] = {$arguments};

  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(plan.block);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (plan.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = plan.cluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  }
  if (plan.dependent) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelExC(&config, kernel(), arguments);
}

}  // namespace rungs

$undefines
"""

EXAMPLE = """\
$header
// Usage: ./example [M N K]. Times the kernel, checks the last row of C, and exits 1 where it is wrong.
#include "$name.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call) \\
  if (cudaError_t error = (call)) return std::fprintf(stderr, "%s: %s\\n", #call, cudaGetErrorString(error)), 1

int main(int count, char** words) {
  long long m = ${m}, n = ${n}, k = ${k}, runs = 20, wrong = 0;
  if (count > 3) m = std::atoll(words[1]), n = std::atoll(words[2]), k = std::atoll(words[3]);
  if (const char* why = rungs::${name}_plan::refusal(m, n, k)) return std::fprintf(stderr, "%s\\n", why), 1;
  std::vector<__nv_bfloat16> a(m * k), b(n * k), c(m * n);
  unsigned state = 1;
  for (std::vector<__nv_bfloat16>* values : {&a, &b})  // from -1 to 1
    for (auto& value : *values) value = __float2bfloat16((state = state * 1664525 + 1013904223) / 2147483648.0f - 1);
  __nv_bfloat16 *on_a, *on_b, *on_c;
  CHECK(cudaMalloc(&on_a, a.size() * 2));
  CHECK(cudaMalloc(&on_b, b.size() * 2));
  CHECK(cudaMalloc(&on_c, c.size() * 2));
  CHECK(cudaMemcpy(on_a, a.data(), a.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(on_b, b.data(), b.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(on_c, 0xFF, c.size() * 2));  // NaN: what is not written is wrong$workspace_example
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int run = -3; run < runs; ++run) {  // three to warm up
    if (run == 0) CHECK(cudaEventRecord(begin));
    CHECK(rungs::$name(on_a, on_b, on_c, m, n, k$workspace_argument));
  }
  CHECK(cudaEventRecord(end));
  CHECK(cudaMemcpy(c.data(), on_c, c.size() * 2, cudaMemcpyDeviceToHost));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  for (long long i = m - 1, j = 0; j < n; ++j) {
    double sum = 0;
    for (long long t = 0; t < k; ++t) sum += __bfloat162float(a[i * k + t]) * __bfloat162float($b_at);
    wrong += !(std::fabs(__bfloat162float(c[i * n + j]) - sum) <= 0.01 * std::fabs(sum) + 1e-5 * k);
  }
  std::printf("%lldx%lldx%lld: %.1f TFLOP/s, %lld of %lld wrong\\n", m, n, k, 2e-9 * m * n * k * runs / ms, wrong, n);
  return wrong != 0;
}
"""
