"""What of this machine works, what does not, what that costs and how to mend it. Nothing is changed: no clock, no lock, no file.

Nothing beyond Python's own library is imported at the top: half an environment is what this is for. Each check is a function
that looks at one thing; one that breaks is a row of its own and hides no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rungs import __version__
from rungs.errors import RungsError, shown
from rungs.files import ROOT

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"
INSTALL = "pip install -r envs/requirements.txt"
RUN = "snakemake --cores 1 all"
PYTHON = (3, 11)
CUDA = 13000
"""The CUDA version that a driver must know, as NVML writes 13.0."""
DRIVER = "580"
"""The first driver that knows it."""
DISK_GB, GPU_GB = 1.0, 2.0
"""What a run writes, and what the largest shapes with all their buffers and torch take."""
HOT_C = 85
LIMIT_S = 30.0
"""Of a tool that is asked for its version, or compiles."""

PARAMS = Path("/proc/driver/nvidia/params")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
STATUS = Path("/proc/self/status")
LOCKS = Path("/proc/locks")
CAP_SYS_ADMIN = 21

MODULES = {
    "cuda-bindings": "cuda.bindings",
    "cuda-toolkit": "nvidia",
    "nvidia-cuda-cuobjdump": "nvidia",
    "nvidia-cuda-nvdisasm": "nvidia",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
"""Of packages whose module is not called as they are."""
FOR_TIMES = {"torch": "no times", "cuda-bindings": "neither times nor counters", "nvidia-ml-py": "no GPU is found"}
"""Packages that only a GPU needs, and what is lost without them."""
OF_COMPILER = ("cuda-toolkit", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
"""Packages that `toolchain: system` does without."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `stops` names what cannot run until it is mended: `all`, `gpu` or nothing."""

    name: str
    status: str
    found: str
    fix: str = ""
    costs: str = ""
    stops: str = ""


class Facts:
    """What several checks ask for, looked up once."""

    def __init__(self, torch: bool = False) -> None:
        self.torch = torch

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """What config.yaml says; empty where it cannot be read, which a check of its own reports."""
        value: Any = None
        try:
            import yaml

            value = yaml.safe_load(config_file().read_text(encoding="utf-8"))
            from rungs import settings

            return settings.over_defaults(value, {}, module=False)
        except Exception:
            return value if isinstance(value, dict) else {}

    def setting(self, key: str, inner: str = "") -> str:
        value = self.config.get(key, "auto")
        if inner:
            value = value.get(inner, "auto") if isinstance(value, dict) else "auto"
        return str(value)

    @functools.cached_property
    def nvml(self) -> Any:
        """pynvml, initialised; None without a driver. Raises RungsError where the package or the driver is broken."""
        from rungs import clock

        return clock._nvml()

    @functools.cached_property
    def gpus(self) -> list[Any]:
        """What CUDA_VISIBLE_DEVICES leaves; none where they cannot be listed, which a check of its own reports."""
        from rungs import clock

        try:
            return clock.gpus()
        except RungsError:
            return []

    @functools.cached_property
    def chosen(self) -> Any:
        """The GPU that the config means, None where it means none or no single one."""
        from rungs import clock

        try:
            return clock.choose(self.setting("device"))
        except RungsError:
            return None

    @property
    def looked_at(self) -> list[Any]:
        """The chosen GPU, and every one where none can be chosen; none for the emulator."""
        if self.setting("device") == "emulator":
            return []
        return [self.chosen] if self.chosen else self.gpus


def config_file() -> Path:
    return next(
        (p for p in (Path("config/config.yaml"), ROOT / "config" / "config.yaml") if p.is_file()),
        Path("config/config.yaml"),
    )


# ---- Python ----------------------------------------------------------------------------------------------------------


def python(_: Facts) -> Iterator[Check]:
    found = f"{platform.python_version()} ({sys.executable}) on {platform.platform(terse=True)}, {os.cpu_count()} cores"
    if sys.version_info < PYTHON:
        wanted = ".".join(map(str, PYTHON))
        yield Check(
            "Python",
            FAIL,
            found,
            f"use Python {wanted} or later: `python{wanted} -m venv .venv`",
            "nothing runs",
            "all",
        )
    else:
        yield Check("Python", OK, found)


def pinned() -> dict[str, str]:
    """Package -> version, of envs/requirements.txt."""
    text = (ROOT / "envs" / "requirements.txt").read_text(encoding="utf-8")
    return {m[1]: m[2] for m in re.finditer(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE)}


def installed(package: str) -> str | None:
    """The version of a package that is all there; None for one that is not, or of which only the record is left."""
    module = MODULES.get(package, package.replace("-", "_"))
    try:
        version, spec = importlib.metadata.version(package), importlib.util.find_spec(module)
    except (ImportError, ValueError):  # PackageNotFoundError is the first
        return None
    bare = spec is None or (spec.origin is None and module != "nvidia")  # a folder without code
    return None if bare and module != "cuda.bindings" else version


def packages(f: Facts) -> Iterator[Check]:
    wanted = pinned()
    found = {name: installed(name) for name in wanted}
    spared = OF_COMPILER if f.setting("toolchain") == "system" else ()
    missing = [n for n in wanted if found[n] is None and n not in spared and n not in FOR_TIMES]
    if missing == ["ninja"] and shutil.which("ninja"):
        missing = []
    other = [f"{n} {v} (pinned: {wanted[n]})" for n, v in found.items() if v and not _same_version(v, wanted[n])]
    there = f"{sum(v is not None for v in found.values())} of {len(wanted)} are installed"
    if missing:
        yield Check("Python packages", FAIL, f"missing: {', '.join(missing)}", f"`{INSTALL}`", "nothing runs", "all")
    elif other:
        yield Check(
            "Python packages",
            WARN,
            f"{there}, at other versions: {', '.join(other)}",
            f"`{INSTALL}`",
            "results may differ",
        )
    else:
        yield Check("Python packages", OK, there)
    for name, costs in FOR_TIMES.items():
        if name in wanted and found[name] is None:
            needed = name == "nvidia-ml-py" or bool(f.gpus)
            yield Check(
                f"package {name}",
                FAIL if needed else WARN,
                "is missing",
                f"`{INSTALL}`",
                costs,
                "gpu" if needed else "",
            )
    if (torch := found.get("torch")) and "+cpu" in torch and f.gpus:
        yield Check(
            "package torch",
            FAIL,
            f"{torch} has no CUDA in it",
            f"`pip uninstall -y torch && {INSTALL}`",
            "no times",
            "gpu",
        )


def _same_version(one: str, other: str) -> bool:
    """13.0.3 is 13.0.3.0, and 2.13.0 is 2.13.0+cu130."""
    return re.sub(r"(\.0)*(\+.*)?$", "", one) == re.sub(r"(\.0)*$", "", other)


def torch(f: Facts) -> Iterator[Check]:
    """In a process of its own: importing it takes seconds, and starts CUDA."""
    if not f.torch:
        yield Check("torch", SKIPPED, "not imported: ask with --torch")
        return
    code = (
        "import json, torch; there = torch.cuda.is_available(); "
        "print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count() if there else 0]))"
    )
    said, why = _run([sys.executable, "-c", code], 120.0)
    if why:
        needed = bool(f.gpus)
        yield Check("torch", FAIL if needed else WARN, why, f"`{INSTALL}`", "no times", "gpu" if needed else "")
        return
    version, cuda, count = json.loads(said.splitlines()[-1])
    found = f"{version} with CUDA {cuda} sees {count} GPU{'s' * (count != 1)}"
    if f.gpus and not count:
        fix = "see `python -c 'import torch; torch.cuda.init()'` for the reason"
        yield Check("torch", FAIL, found, fix, "no times", "gpu")
    else:
        yield Check("torch", OK, found)


def snakemake(_: Facts) -> Iterator[Check]:
    beside = Path(sys.executable).parent
    found = shutil.which("snakemake")
    if found is None:
        there = (beside / "snakemake").exists()
        fix = (
            f"activate the environment: `. {beside / 'activate'}`"
            if there
            else f"`{INSTALL}`, in an activated environment"
        )
        yield Check("snakemake", FAIL, "is not on PATH", fix, "nothing runs; single verbs may", "all")
    elif Path(found).parent.resolve() != beside.resolve():
        fix = f"activate the environment of {sys.executable}, or run `python -m snakemake`"
        yield Check(
            "snakemake", WARN, f"{found} is not of this Python", fix, "what is checked here is not what would run"
        )
    else:
        yield Check("snakemake", OK, found)


# ---- the checkout ----------------------------------------------------------------------------------------------------


def folder(_: Facts) -> Iterator[Check]:
    here = Path.cwd()
    if not (here / "Snakefile").is_file():
        fix = "run it in the checkout, where the Snakefile is"
        yield Check("folder", FAIL, "this folder holds no Snakefile", fix, "nothing runs from here", "all")
        return
    for path in (Path("results"), Path("logs"), Path(".snakemake")):
        deepest = path if path.exists() else here
        if not os.access(deepest, os.W_OK | os.X_OK):
            fix = "make it writable, or copy the checkout to a place that is"
            yield Check("folder", FAIL, f"{path}/ cannot be written", fix, "nothing runs", "all")
            return
    note = ""
    if any(Path(".snakemake/locks").glob("*")):
        note = (
            "; a Snakemake works here"
            if _held(Path(".snakemake/rungs.lock"))
            else "; what a killed run left, the next one clears"
        )
    yield Check("folder", OK, f"results/, logs/ and .snakemake/ can be written{note}")


def _held(lock: Path) -> bool:
    """Whether a process holds it, as every Snakemake of rungs does (folder.py)."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def disk(_: Facts) -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    if free < DISK_GB:
        fix = f"free some: a run takes up to {DISK_GB:g} GB"
        yield Check("disk", FAIL, f"{free:.2f} GB are free", fix, "jobs would fail half-way", "all")
    else:
        yield Check("disk", OK, f"{free:.0f} GB are free")


def config(_: Facts) -> Iterator[Check]:
    """As a run resolves it: the file, the experiments, and the GPU that it means."""
    try:
        from rungs import schemas, settings
    except ImportError as error:
        yield Check("config", SKIPPED, f"cannot be read without {error.name}")
        return
    value: dict[str, Any] = {}
    try:
        value = settings.over_defaults(schemas.load_yaml(config_file()), {}, module=False)
        run = settings.resolve(value)
    except RungsError as error:
        stops, costs = "all", "nothing runs"
        with contextlib.suppress(RungsError):
            settings.resolve({**value, "device": "emulator"})
            stops, costs = "gpu", "no times; with `--config device=emulator` it counts"
        yield Check("config", FAIL, str(error), "as said", costs, stops)
        return
    names = ", ".join(run.experiments)
    yield Check("config", OK, f"device {value['device']}: {names} for {run.arch}, into results/{run.results}")


# ---- the compiler ----------------------------------------------------------------------------------------------------


def host_compiler(_: Facts) -> Iterator[Check]:
    fix = "install it (Debian: `apt-get install g++`; conda: `conda install gxx`)"
    found = shutil.which("g++")
    if found is None:
        yield Check("g++", FAIL, "is not on PATH", fix, "nothing can be built: nvcc needs it even for PTX", "all")
        return
    said, why = _run([found, "--version"])
    if why:
        yield Check("g++", FAIL, why, fix, "nothing can be built: nvcc needs it even for PTX", "all")
    else:
        yield Check("g++", OK, said.splitlines()[0] if said.strip() else found)


def compiler(f: Facts) -> Iterator[Check]:
    """nvcc is asked what it knows, and compiles the smallest kernel in a temporary folder."""
    try:
        from rungs import build, settings
        from rungs.variants import architectures
    except ImportError as error:
        yield Check("compiler", SKIPPED, f"is not looked for without {error.name}")
        return
    which = "system" if f.setting("toolchain") == "system" else "pip"
    lost = "nothing can be built"
    try:
        tools = {
            n: build.pip_cuda_tool(n) if which == "pip" else build.system_cuda_tool(n)
            for n in ("nvcc", "cuobjdump", "nvdisasm")
        }
    except RungsError as error:
        yield Check("compiler", FAIL, str(error), f"`{INSTALL}`" if which == "pip" else "as said", lost, "all")
        return
    fix = "`pip install --force-reinstall -r envs/requirements.txt`" if which == "pip" else "install CUDA 13.0 anew"
    said, why = _run([tools["nvcc"], "--version"])
    codes, why_codes = _run([tools["nvcc"], "--list-gpu-code"])
    if why or why_codes:
        yield Check("compiler", FAIL, why or why_codes, fix, lost, "all")
        return
    release = re.search(r"V(\d+\.\d+)\.\d+", said)
    version, pin = (release[0][1:] if release else "unknown"), ".".join(pinned().get("cuda-toolkit", "").split(".")[:2])
    if release and release[1] != pin:
        costs = "binaries are not those that were recorded: every result is of another compiler"
        yield Check(
            "compiler", WARN, f"nvcc {version} of {which}, where {pin} is pinned", "use `toolchain: pip`", costs
        )
    else:
        yield Check("compiler", OK, f"nvcc {version} of {which}")
    lacking = [a for a in architectures() if a.rstrip("a") not in codes.split()]
    if lacking:
        yield Check(
            "architectures", WARN, f"nvcc lacks {', '.join(lacking)}", "use `toolchain: pip`", "no binaries for these"
        )
    else:
        yield Check("architectures", OK, ", ".join(architectures()))
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        if os.environ.get(name):
            costs = "every binary is another than its manifest says"
            yield Check("compiler's environment", WARN, f"{name} is set", f"`unset {name}`", costs)
    arch = f.chosen.arch if f.chosen and f.chosen.arch else settings.DEFAULT_ARCH
    yield _compiled(build, which, arch, fix)


def _compiled(build: Any, which: str, arch: str, fix: str) -> Check:
    with tempfile.TemporaryDirectory(prefix="rungs-doctor-") as temporary:
        try:
            made = build.build(build.STAMP, arch, Path(temporary) / f"{build.STAMP}.json", build.find_toolchain(which))
        except (RungsError, OSError, subprocess.SubprocessError) as error:
            return Check("a kernel", FAIL, _plain(error), fix, "nothing can be built", "all")
    if made["status"] != "ok":
        return Check("a kernel", FAIL, made["reason"], fix, "nothing can be built", "all")
    return Check("a kernel", OK, f"{build.STAMP}.cu compiles for {arch}")


# ---- the driver and the GPUs -----------------------------------------------------------------------------------------


def driver(f: Facts) -> Iterator[Check]:
    no_times = "no times: the emulator counts, and recorded results are rendered"
    try:
        nvml = f.nvml
    except RungsError as error:
        package = "package" in str(error)
        fix = f"`{INSTALL}`" if package else "see what `nvidia-smi` says; after a driver update, restart the machine"
        said = f"{error} NVIDIA cards: {len(nvidia_cards())}." if package else str(error)
        yield Check("driver", SKIPPED if package else FAIL, said, fix, no_times, "" if package else "gpu")
        return
    if nvml is None:
        cards = nvidia_cards()
        if DRIVER_FILE.exists():
            fix = "start the container with its GPUs (Docker: `--gpus all`)"
            yield Check("driver", WARN, "is loaded, but its library is not here", fix, no_times)
        elif cards:
            fix = f"install NVIDIA's driver, {DRIVER} or newer"
            yield Check("driver", WARN, f"none, though there are NVIDIA cards ({len(cards)})", fix, no_times)
        else:
            yield Check("driver", SKIPPED, "none, and no NVIDIA card", "", no_times)
        return
    from rungs import clock

    version, cuda = nvml.nvmlSystemGetDriverVersion(), clock._ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    found = f"{version}{f', for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}' if cuda else ''}"
    if cuda is not None and cuda < CUDA:
        fix = f"install driver {DRIVER} or newer"
        yield Check("driver", FAIL, f"{found}, and binaries of CUDA 13.0 need a newer one", fix, no_times, "gpu")
    else:
        yield Check("driver", OK, found)


def nvidia_cards() -> list[str]:
    """PCI addresses of NVIDIA's display controllers and accelerators, with or without a driver."""
    found = []
    for card in sorted(PCI.glob("*")):
        with contextlib.suppress(OSError):
            if (card / "vendor").read_text().strip() == "0x10de" and (card / "class").read_text().startswith("0x03"):
                found.append(card.name)
    return found


def gpus(f: Facts) -> Iterator[Check]:
    from rungs import clock

    try:
        there = clock.gpus()
        nvml = f.nvml
    except RungsError as error:
        if "package" not in str(error):
            yield Check("GPUs", FAIL, str(error), "as said", "no times", "gpu")
        return
    if nvml is None:
        return
    if not there:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = "`unset CUDA_VISIBLE_DEVICES`" if hidden is not None else "see what `nvidia-smi` lists"
        why = f"none that CUDA_VISIBLE_DEVICES={hidden} leaves" if hidden is not None else "the driver lists none"
        yield Check("GPUs", WARN, why, fix, "no times")
        return
    listed = "; ".join(
        f"{g}, {g.arch or f'compute capability {g.capability}'}, {g.memory_bytes / 1e9:.0f} GB" for g in there
    )
    if f.setting("device") == "emulator":
        yield Check(
            "GPUs", SKIPPED, f"{listed}; none is used: config says `device: emulator`", "set `device: auto` for times"
        )
        return
    unknown = [g for g in f.looked_at if g.arch is None]
    if len(there) > 1 and f.chosen is None:
        fix = f"choose one: `--config device={there[0].uuid}`, or by index or slug"
        yield Check(
            "GPUs",
            FAIL,
            f"{listed}; config's `device: {f.setting('device')}` is none of them alone",
            fix,
            "no times",
            "gpu",
        )
    elif unknown:
        fix = "describe it in a file under config/devices/, or use `--config device=emulator`"
        yield Check("GPUs", FAIL, f"{listed}; no kernels are built for {unknown[0]}", fix, "no times", "gpu")
    else:
        yield Check("GPUs", OK, f"{listed}{f'; {f.chosen} is used' if len(there) > 1 else ''}")


def per_gpu(*questions: Callable[[Facts, Any, Any, Any], Iterator[Check]]) -> Callable[[Facts], Iterator[Check]]:
    """Ask the questions of each GPU; where there are several its index stands in the name."""

    def look(f: Facts) -> Iterator[Check]:
        from rungs import clock

        for gpu in f.looked_at:
            several = f"GPU {gpu.index}: " if len(f.looked_at) > 1 else ""
            try:
                nvml, handle = clock._open(gpu)
            except RungsError as error:
                yield Check(f"GPU {gpu.index}", FAIL, str(error), "as said", "no times", "gpu")
                continue
            for question in questions:
                asked = functools.partial(question, f, gpu, nvml, handle)
                for found in guarded(question.__name__.replace("_", " "), asked):
                    yield replace(found, name=f"{several}{found.name}")

    return look


def use(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    """MIG and the compute mode: who may run what on it."""
    from rungs import clock

    mig = clock._ask(nvml, "nvmlDeviceGetMigMode", handle)
    mode = clock._ask(nvml, "nvmlDeviceGetComputeMode", handle)
    if mig and mig[0]:
        fix = f"as root: `nvidia-smi -i {gpu.uuid} -mig 0`, or use a GPU without it"
        yield Check(
            "MIG",
            FAIL,
            "is on: a kernel gets a slice whose clock, memory and counters are not the GPU's",
            fix,
            "no times",
            "gpu",
        )
    if mode == 2:
        fix = f"as root: `nvidia-smi -i {gpu.uuid} -c DEFAULT`"
        yield Check("compute mode", FAIL, "prohibited: nobody may compute on it", fix, "no times", "gpu")
    elif mode in (1, 3):
        costs = "a job fails while another process has the GPU open"
        fix = f"as root: `nvidia-smi -i {gpu.uuid} -c DEFAULT`, or leave the GPU to this run"
        yield Check("compute mode", WARN, "exclusive", fix, costs)
    elif not (mig and mig[0]):
        yield Check("compute mode", OK, "default, without MIG")


def persistence(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    from rungs import clock

    mode = clock._ask(nvml, "nvmlDeviceGetPersistenceMode", handle)
    if mode is None:
        yield Check("persistence mode", SKIPPED, "the driver does not say")
    elif mode:
        yield Check("persistence mode", OK, "on")
    else:
        costs = "the driver may unload between jobs: seconds for each, and a clock lock that is lost"
        yield Check("persistence mode", WARN, "off", f"as root: `nvidia-smi -i {gpu.uuid} -pm 1`", costs)


def clock_lock(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    """Only setting a clock would show whether it is permitted, so this says what is to be expected."""
    from rungs import clock

    mode = f.setting("clock", "mode")
    state = clock._state(gpu.uuid)
    if state is not None and clock._alive(state):
        yield Check("clock", OK, f"is locked by process {state['pid']}, which is measuring")
        return
    permitted = administrator()
    if state is not None and state.get("boot_id") in (None, clock._boot_id()):
        stops = "gpu" if mode == "observe" or not permitted else ""
        costs = "every time is at that clock" + ("; no run starts" if stops else "")
        found = f"is still locked at {state.get('mhz') or 'an unknown number of'} MHz by process {state.get('pid')}, which was killed"
        yield Check("clock", FAIL if stops else WARN, found, "`python -m rungs clock release`", costs, stops)
        return
    supported = clock._supported(nvml, handle)
    range_ = f"{supported[0]} to {supported[-1]} MHz" if supported else ""
    costs = "clocks are observed, not locked; steps stay sound, since they are paired"
    if mode == "observe":
        yield Check("clock", OK, f"{range_ or 'not listed'}; config leaves it alone (`clock.mode: observe`)")
    elif not supported or not permitted:
        why = (
            "the driver lists no clocks to lock"
            if not supported
            else f"{range_}; locking it is for root, and this is {user()}"
        )
        fix = "run as root (in a container with CAP_SYS_ADMIN), or set `clock.mode: observe`"
        stops = "gpu" if mode == "lock" else ""
        yield Check(
            "clock",
            FAIL if stops else WARN,
            why,
            fix,
            "no times: config says `clock.mode: lock`" if stops else costs,
            stops,
        )
    else:
        yield Check("clock", OK, f"{range_}; {user()} may lock it as far as can be seen without trying")


def others(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    from rungs import clock, sampler

    listed = clock._ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    strangers = sampler.others([process.pid for process in listed or []])
    measuring = guard_holder(gpu.uuid)
    costs = "rounds beside another process are flagged and not used"
    if measuring:
        found = f"process {measuring} is measuring on it"
        yield Check("other processes", WARN, found, "wait: a run does so too", "a run would wait for it")
    elif strangers:
        names = ", ".join(f"{pid} ({name})" if (name := command(pid)) else str(pid) for pid in strangers)
        yield Check("other processes", WARN, f"on the GPU: {names}", "end them, or use another GPU", costs)
    elif listed is None:
        yield Check("other processes", SKIPPED, "the driver does not say")
    else:
        yield Check("other processes", OK, "none")


def memory(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    free = nvml.nvmlDeviceGetMemoryInfo(handle).free / 1e9
    if free < GPU_GB:
        fix = "end what holds it, or choose smaller shapes with `axes`"
        yield Check(
            "GPU memory",
            WARN,
            f"{free:.1f} GB are free, and the largest shapes take {GPU_GB:g}",
            fix,
            "they fail, the others are measured",
        )
    else:
        yield Check("GPU memory", OK, f"{free:.0f} GB of {gpu.memory_bytes / 1e9:.0f} are free")


def health(f: Facts, gpu: Any, nvml: Any, handle: Any) -> Iterator[Check]:
    """Temperature, power cap, throttling and memory errors, each where the driver says."""
    from rungs import clock, sampler

    degrees = clock._ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
    usual = clock._ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    errors = clock._ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, since the driver was loaded
    reasons = clock._ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    words = sampler.throttle_words(reasons).replace("+", " and ") if reasons else ""
    notes = []
    if degrees is not None and degrees >= HOT_C:
        notes.append((f"{degrees} °C", "let it cool", "it throttles, and such rounds are not used"))
    if usual and gpu.power_limit_w and gpu.power_limit_w < usual / 1000:
        fix = f"as root: `nvidia-smi -i {gpu.uuid} -pl {usual // 1000}`"
        notes.append((f"power is capped at {gpu.power_limit_w:g} W of {usual // 1000}", fix, "lower clocks under load"))
    if words and words != "power cap":
        notes.append((f"throttles: {words}", "see to power and cooling", "such rounds are not used"))
    if errors:
        fix = f"as root: `nvidia-smi -i {gpu.uuid} -r`; where they come back, replace the board"
        notes.append((f"{errors} memory errors that ECC could not correct", fix, "results may be wrong"))
    if notes:
        found, fixes, costs = (list(dict.fromkeys(words)) for words in zip(*notes, strict=False))
        yield Check("health", WARN, "; ".join(found), "; ".join(fixes), "; ".join(costs))
    else:
        limit = f", {gpu.power_limit_w:g} W" if gpu.power_limit_w else ""
        yield Check("health", OK, f"{degrees} °C{limit}" if degrees is not None else "nothing unusual")


# ---- profilers -------------------------------------------------------------------------------------------------------


def profiling(f: Facts) -> Iterator[Check]:
    costs = "no counters: times are complete without them"
    if f.setting("profile", "enabled") == "False":
        yield Check("ncu", SKIPPED, "config says `profile.enabled: false`")
        return
    try:
        from rungs import profile
    except ImportError as error:
        yield Check("ncu", SKIPPED, f"is not looked for without {error.name}")
        return
    absent = WARN if f.looked_at else SKIPPED
    try:
        tool = profile.find_ncu(f.setting("profile", "ncu"))
    except RungsError as error:
        yield Check(
            "ncu",
            absent,
            str(error) if f.looked_at else "not installed, and there is no GPU to count on",
            "as said" if f.looked_at else "",
            costs,
        )
        return
    version = profile.ncu_version(tool)
    if not version:
        yield Check("ncu", absent, f"{tool} does not say its version", "install Nsight Compute anew", costs)
        return
    try:
        admin_only = "RmProfilingAdminOnly: 1" in PARAMS.read_text(encoding="utf-8")
    except OSError:
        admin_only = None
    held = profile.holders() if f.looked_at else []
    if admin_only and not administrator():
        yield Check(
            "ncu",
            absent,
            f"{version}; the driver keeps counters from {user()} (ERR_NVGPUCTRPERM)",
            profile.PERMIT,
            costs,
        )
    elif held:
        names = ", ".join(f"{name} (process {pid})" for pid, name in held)
        yield Check(
            "ncu", WARN, f"{version}; counters are held by {names}", "pause it (DCGM: `dcgmi profile --pause`)", costs
        )
    else:
        said = {
            None: "the driver does not say who may count",
            True: f"{user()} may count",
            False: "everybody may count",
        }
        yield Check("ncu", OK, f"{version}{f'; {said[admin_only]}' if f.looked_at else ''}")


def sanitizer(f: Facts) -> Iterator[Check]:
    costs = "no `snakemake sanitized`, which `all` does without"
    if not f.looked_at:
        yield Check("compute-sanitizer", SKIPPED, "there is no GPU to run it on")
        return
    try:
        from rungs import sanitize

        yield Check("compute-sanitizer", OK, sanitize.find_sanitizer(f.setting("sanitize", "tool")))
    except ImportError as error:
        yield Check("compute-sanitizer", SKIPPED, f"is not looked for without {error.name}")
    except RungsError as error:
        yield Check("compute-sanitizer", SKIPPED, str(error), "", costs)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def user() -> str:
    return "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"


def administrator() -> bool:
    """Whether the driver takes this process for one: CAP_SYS_ADMIN, which root in a container may lack."""
    try:
        mask = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        mask = None
    return bool(int(mask[1], 16) >> CAP_SYS_ADMIN & 1) if mask else os.geteuid() == 0


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def guard_holder(uuid: str) -> int | None:
    """The process that measures on a GPU, from the kernel's list of locks: none is taken to find out."""
    try:
        inode = os.stat(f"/tmp/rungs-{uuid}.lock").st_ino
        text = LOCKS.read_text(encoding="utf-8")
    except OSError:
        return None
    held = re.search(rf"FLOCK\s+ADVISORY\s+WRITE\s+(-?\d+)\s+[0-9a-f]+:[0-9a-f]+:{inode}\s", text)
    return int(held[1]) if held and int(held[1]) > 0 else None


def _run(argv: Sequence[str], limit_s: float = LIMIT_S) -> tuple[str, str]:
    """(what a tool printed, why it did not)."""
    try:
        run = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "", f"{argv[0]} did not end within {limit_s:g} s"
    except OSError as error:
        return "", f"{argv[0]} does not start ({error.strerror})"
    if run.returncode:
        last = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
        return "", f"{argv[0]} ended with exit status {run.returncode}{f' ({shown(last[0])})' if last else ''}"
    return run.stdout, ""


def _plain(error: BaseException) -> str:
    return str(error) if isinstance(error, RungsError) else f"{type(error).__name__}: {shown(str(error))}"


# ---- all of them -----------------------------------------------------------------------------------------------------

CHECKS: tuple[tuple[str, Callable[[Facts], Iterator[Check]]], ...] = (
    ("Python", python),
    ("Python packages", packages),
    ("torch", torch),
    ("snakemake", snakemake),
    ("folder", folder),
    ("disk", disk),
    ("g++", host_compiler),
    ("compiler", compiler),
    ("driver", driver),
    ("GPUs", gpus),
    ("GPU", per_gpu(use, persistence, clock_lock, others, memory, health)),
    ("ncu", profiling),
    ("compute-sanitizer", sanitizer),
    ("config", config),
)


def guarded(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """What a check finds; where it breaks or lacks a module, a row that says so."""
    try:
        yield from check()
    except ImportError as error:
        yield Check(name, SKIPPED, f"cannot be looked at before Python and its packages are mended ({_plain(error)})")
    except Exception as error:
        fix = "report it, with what `python -m rungs doctor --json` prints"
        yield Check(name, FAIL, f"could not be looked at ({_plain(error)})", fix)


def examine(torch: bool = False) -> dict[str, Any]:
    """Every check and what comes of them, as `doctor.schema.yaml` describes it."""
    f = Facts(torch)
    found = [row for name, check in CHECKS for row in guarded(name, functools.partial(check, f))]
    job, sentence = conclusion(found, _quietly(lambda: str(f.chosen) if f.chosen else ""))
    return {
        "kind": "doctor",
        "rungs": __version__,
        "main_job": job,
        "sentence": public(sentence),
        "checks": [{key: public(text) for key, text in asdict(row).items()} for row in found],
    }


def _quietly(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception:
        return ""


def conclusion(found: Sequence[Check], gpu: str) -> tuple[str, str]:
    """What the main job can run on (`gpu`, `emulator` or `nothing`), and that in a sentence."""
    stopped = {
        where: [row.name for row in found if row.status == FAIL and row.stops == where] for where in ("all", "gpu")
    }
    if stopped["all"]:
        return "nothing", f"rungs: `{RUN}` cannot run here before this is mended: {', '.join(stopped['all'])}."
    if stopped["gpu"]:
        return "emulator", (
            f"rungs: `{RUN} --config device=emulator` can run, and counts; for times mend {', '.join(stopped['gpu'])}."
        )
    if gpu:
        return "gpu", f"rungs: `{RUN}` can run, on {gpu}."
    return "emulator", f"rungs: `{RUN}` can run, in the emulator, which counts: times need a GPU."


def public(text: str) -> str:
    """On one line, the checkout as `.` and the home folder as `~`: a report may be pasted anywhere."""
    for folder, short in ((ROOT, "."), (Path.cwd(), "."), (Path.home(), "~")):
        if str(folder) != "/":
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", short, text)
    return " ".join(text.split())


# ---- how it is shown -------------------------------------------------------------------------------------------------


def run(as_json: bool = False, torch: bool = False) -> int:
    """Print what was found; 0 where the main job can run, on a GPU or in the emulator."""
    report = examine(torch)
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    elif not (sys.stdout.isatty() and _table(report)):
        print(plain(report))
    return 1 if report["main_job"] == "nothing" else 0


def plain(report: dict[str, Any]) -> str:
    """A line for each check; under what does not work, the fix and what it costs."""
    wide = max(len(row["name"]) for row in report["checks"])
    lines = []
    for row in report["checks"]:
        lines.append(f"{row['status']:8}{row['name']:{wide}}  {row['found']}")
        lines += [f"{'':{wide + 10}}{line}" for line in _below(row)]
    return "\n".join([*lines, report["sentence"]])


def _below(row: dict[str, str]) -> list[str]:
    if row["status"] == OK:
        return []
    fix = [f"fix: {row['fix']}"] if row["fix"] not in ("", "as said") else []
    return [*fix, *([f"costs: {row['costs']}"] if row["costs"] else [])]


def _table(report: dict[str, Any]) -> bool:
    """A coloured table; False where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    colours = {OK: "green", WARN: "yellow", FAIL: "bold red", SKIPPED: "dim"}
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in report["checks"]:
        said = Text(row["found"], style="dim" if row["status"] == SKIPPED else "")
        for line in _below(row):
            said.append(f"\n{line}", style="bold" if line.startswith("fix") else "dim")
        table.add_row(Text(row["status"], style=colours[row["status"]]), row["name"], said)
    console = Console(highlight=False)
    console.print(table)
    console.print(textwrap.fill(report["sentence"], console.width), style="bold", markup=False)
    return True
