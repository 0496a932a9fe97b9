"""What a round is: order, pairing, flags, launches and the stop rule, on a simulated device."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rungs import files, gpu, protocol
from rungs.protocol import Condition, Sample, Settings

SETTINGS = Settings(0.3, 20, 400, 200.0, 1.0, "hot", 7)
CALM = Condition("", 500.0, 60.0)


class Device:
    """Times come from `model(arm, now_us)`; everything that is queued is written down in `queue`."""

    def __init__(self, model: Callable[[str, float], float]) -> None:
        self.model, self.now, self.queue, self.launches, self.waits = model, 0.0, [], {}, 0

    def capture(self, arm: str, launches: int) -> None:
        self.launches[arm] = launches

    def replay(self, arm: str) -> None:
        self.queue.append(arm)
        self.now += self.model(arm, self.now) * self.launches.get(arm, 1)

    def stamp(self) -> float:
        self.queue.append("stamp")
        return self.now

    def event(self) -> float:
        self.queue.append("event")
        return self.now

    def wait(self, event: float) -> None:
        self.waits += 1

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def clock_mhz(self, before: float, after: float) -> float | None:
        return 1700.0

    def cycles(self, arm: str) -> float:
        self.queue.append(arm)
        return self.model(arm, self.now)


def noisy(times: dict[str, float], sigma: float, drift: float = 0.0, seed: int = 1) -> Callable[[str, float], float]:
    """Log-normal noise of `sigma`; `drift` is a clock that swings by that share over 20 ms."""
    rng = np.random.default_rng(seed)
    return lambda arm, now: times[arm] * float(np.exp(rng.normal(0, sigma))) * (1 + drift * np.sin(now / 20000))


def run(device: Device, arms: tuple[str, ...] = ("rung", "before", "control"), settings: Settings = SETTINGS):
    for arm in arms:
        device.capture(arm, 10)
    return protocol.run_rounds(device, arms[0], arms, 10, settings, (512, 512, 256), lambda: CALM)


def ratios(samples: list[Sample], a: str, b: str) -> np.ndarray:
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, {})[sample.arm] = sample.time_us
    return np.log([times[a] / times[b] for times in by_round.values()])


def test_every_round_times_every_arm_once_in_a_random_order_that_the_seed_fixes():
    samples, _ = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003)))
    orders = {}
    for sample in samples:
        orders.setdefault(sample.round, {})[sample.arm] = sample.order
    assert all(sorted(order.values()) == [0, 1, 2] for order in orders.values())
    assert len({tuple(sorted(order.items())) for order in orders.values()}) > 3
    again, _ = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003, seed=2)))
    assert [(s.arm, s.order) for s in again[:60]] == [(s.arm, s.order) for s in samples[:60]]


def test_a_sample_is_stamp_event_graph_event_stamp():
    device = Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.003))
    run(device)
    assert device.queue[:2] == ["stamp", "event"]
    assert device.queue[3:5] == ["event", "stamp"]
    assert device.queue[5:7] == ["stamp", "event"]


def test_a_step_of_one_percent_is_found_under_a_clock_that_drifts_by_a_fifth():
    samples, _ = run(Device(noisy({"rung": 100.0, "before": 101.0, "control": 60.0}, 0.002, drift=0.2)))
    assert np.median(ratios(samples, "before", "rung")) == pytest.approx(np.log(1.01), abs=0.003)
    unpaired = [
        np.median([s.time_us for s in samples if s.arm == "rung" and lo <= s.round < lo + 5]) for lo in (1, 6, 11, 16)
    ]
    assert max(unpaired) / min(unpaired) > 1.02, "the drift of this test must be larger than the step"


def test_it_stops_once_every_interval_is_narrow_and_not_before_the_fewest_rounds():
    samples, stop = run(Device(noisy({"rung": 10, "before": 11, "control": 5}, 1e-5)))
    assert (max(s.round for s in samples), stop) == (20, "interval")


def test_it_goes_on_to_the_cap_where_one_arm_stays_loose_and_keeps_every_round():
    samples, stop = run(
        Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.2)), settings=Settings(0.3, 20, 60, 200.0, 0, "hot", 7)
    )
    assert (len(samples), max(s.round for s in samples), stop) == (180, 60, "cap")


def test_one_round_is_always_queued_behind_the_one_that_is_read():
    device, seen = Device(noisy({"rung": 10, "before": 11, "control": 5}, 0.2)), []
    original = device.wait
    device.wait = lambda event: (seen.append(device.queue.count("rung")), original(event))
    run(device, settings=Settings(0.3, 20, 30, 200.0, 0, "hot", 7))
    assert seen[:3] == [2, 3, 4]
    assert seen[-1] == 30


def prepared(model: Callable[[str, float], float], seconds: float = 0, rotation: int = 1) -> tuple[Device, int]:
    device = Device(model)
    return device, protocol.prepare(device, ("rung", "before", "control"), 200.0, seconds, rotation)


def test_launches_make_the_fastest_arm_last_the_sample_and_are_the_same_for_all():
    device, launches = prepared(noisy({"rung": 10.0, "before": 11.0, "control": 5.0}, 0))
    assert 200.0 <= launches * 5.0 < 220.0
    assert set(device.launches.values()) == {launches}


def test_launches_are_enough_once_the_clock_is_that_of_a_load():
    """While the GPU is idle its clock is a quarter: as many launches as fill a sample then are too few later."""
    device, launches = prepared(lambda arm, now: 5.0 * (4 if now < 2000 else 1), seconds=0.001)
    assert launches * 5.0 >= 200.0
    assert set(device.launches.values()) == {launches}


def test_launches_are_enough_where_few_take_longer_each_than_many():
    """A launch costs 4 us and the first of a sample 40 more, so five of them suggest less than half of what is needed."""

    class Slow(Device):
        def replay(self, arm: str) -> None:
            super().replay(arm)
            self.now += 40.0

    device = Slow(noisy({"rung": 4.0, "before": 4.0, "control": 4.0}, 0))
    launches = protocol.prepare(device, ("rung", "before", "control"), 200.0, 0)
    assert launches * 4.0 + 40 >= 200.0


def test_launches_of_a_rotation_are_whole_rotations():
    _, launches = prepared(noisy({"rung": 10.0, "before": 11.0, "control": 5.0}, 0), rotation=7)
    assert launches % 7 == 0
    assert launches * 5.0 >= 200.0


@pytest.mark.parametrize(
    ("mhz", "condition", "locked", "reason"),
    [
        (1700.0, CALM, None, ""),
        (1700.0, Condition("power cap", 700.0, 60.0), None, ""),
        (1700.0, Condition("power cap+thermal", 700.0, 90.0), None, "thermal"),
        (1700.0, Condition("unreadable", None, None), None, "unreadable"),
        (1700.0, Condition("", 500.0, 60.0, (4242,)), None, "another process"),
        (1700.0, CALM, 1700, ""),
        (1684.0, CALM, 1700, ""),
        (1680.0, CALM, 1700, "left the lock"),
        (None, CALM, 1700, "left the lock"),
    ],
)
def test_flags(mhz, condition, locked, reason):
    flag = protocol.flag(mhz, condition, locked)
    assert (reason in flag) if reason else flag == ""


def test_flagged_rounds_are_kept_and_do_not_decide():
    device = Device(noisy({"rung": 10, "before": 11, "control": 5}, 1e-5))
    for arm in ("rung", "before", "control"):
        device.capture(arm, 10)
    thermal = Condition("thermal", 700.0, 90.0)
    settings = Settings(0.3, 20, 60, 200.0, 0, "hot", 7)
    arms = ("rung", "before", "control")
    samples, stop = protocol.run_rounds(device, "rung", arms, 10, settings, (1, 2, 3), lambda: thermal)
    assert (stop, len(samples)) == ("cap", 180)
    assert all("thermal" in sample.flag for sample in samples)


def test_the_first_slow_rounds_do_not_move_the_median():
    def model(arm: str, now: float) -> float:
        return {"rung": 10.0, "before": 11.0, "control": 5.0}[arm] * (1.3 if now < 1000 else 1.0)

    samples, _ = run(Device(model))
    assert np.median(ratios(samples, "before", "rung")) == pytest.approx(np.log(1.1), abs=1e-9)


def test_warm_up_keeps_all_arms_busy_for_its_time(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(protocol.time, "monotonic", lambda: next(clock))
    device = Device(noisy({"rung": 10, "control": 5}, 0))
    protocol.warm_up(device, ("rung", "control"), 10)
    assert device.queue == ["rung", "control", "event"] * 9
    assert device.waits == 9


def test_counts_are_rounds_of_all_arms_that_stop_as_times_do():
    device = Device(noisy({"rung": 20, "before": 22}, 1e-5))
    samples, stop = protocol.count_rounds(device, "rung", ("rung", "before"), SETTINGS, (2, 3), lambda: CALM)
    assert (max(s.round for s in samples), stop, device.waits) == (20, "interval", 0)
    assert len({tuple(device.queue[at : at + 2]) for at in range(0, 40, 2)}) == 2, "in either order"
    assert np.median(ratios(samples, "before", "rung")) == pytest.approx(np.log(1.1), abs=1e-4)


def test_a_count_is_flagged_for_other_processes_alone():
    assert protocol.count_flag(Condition("thermal", 700.0, 90.0)) == ""
    assert "another process" in protocol.count_flag(Condition("", None, None, (4242,)))


def test_a_job_times_its_largest_shape_first_and_warms_up_before_it_alone():
    assert protocol.largest_first([[2, 3], [4, 4], [1, 1], [3, 2]]) == [
        (1, (4, 4)),
        (0, (2, 3)),
        (3, (3, 2)),
        (2, (1, 1)),
    ]
    assert [protocol.warm_up_seconds(SETTINGS, under_load) for under_load in (False, True)] == [1.0, 0.0]


# ---- the hash --------------------------------------------------------------------------------------------------------

PACKAGE = Path(protocol.__file__).parent
OUTSIDE = {
    "clock": "finds the GPU and asks NVML",
    "files": "hashes",
    "launcher": "launches a variant as its plan has it, of which its build manifest tells",
    "workloads": "what a kernel works on, of which its experiment tells",
}
"""Modules that the protocol's import and that decide no sample, and what they do."""


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A function (module, edit of its text) that gives the protocol's hash of a copy of its modules with that edit."""

    def hashed(module: str = "", edit: Callable[[str], str] = str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in protocol.MODULES:
            text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
            (folder / f"{name}.py").write_bytes((edit(text) if name == module else text).encode())
        monkeypatch.setattr(files, "__file__", str(folder / "files.py"))
        return protocol.protocol_hash.__wrapped__()

    return hashed


LOOKS = {
    "comment": lambda text: text.replace("\n\n\n", "\n\n\n# a comment\n") + "# and another\n",
    "docstring": lambda text: re.sub(r'"""[A-Z][^"]*"""', '"""Says something else."""', text),
    "blank lines": lambda text: text.replace("\n", "\n\n\n") if '"""\n\n' in text else text,
    "line ends": lambda text: text.replace("\n", "\r\n"),
    "layout": lambda text: ast.unparse(ast.parse(text)),
}


@pytest.mark.parametrize("module", protocol.MODULES)
@pytest.mark.parametrize("look", LOOKS)
def test_what_a_hashed_module_looks_like_changes_nothing(copy, module, look):
    text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert LOOKS[look](text) != text
    assert copy(module, LOOKS[look]) == copy() == protocol.protocol_hash()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("protocol", "CHECK_EVERY = 10", "CHECK_EVERY = 20"),
        ("protocol", "SETTLE_S = 0.02", "SETTLE_S = 0.0"),
        ("protocol", "<= settings.target_percent / 100", "< settings.target_percent / 100"),
        ("protocol", 'frozenset({"power cap"})', 'frozenset({"power cap", "thermal"})'),
        ("protocol", "> LOCK_TOLERANCE", ">= LOCK_TOLERANCE"),
        ("protocol", 'return "normal",', 'return "integer",'),
        ("protocol", "key=lambda item: -math.prod", "key=lambda item: math.prod"),
        (
            "protocol",
            "before, start = session.stamp(), session.event()",
            "start, before = session.event(), session.stamp()",
        ),
        ("protocol", "count_flag(now)", '""'),
        ("bootstrap", "RESAMPLES = 1000", "RESAMPLES = 100"),
        ("bootstrap", "1.5 * rounds ** (1 / 3)", "1.5 * rounds ** (1 / 2)"),
        ("bootstrap", "1 - block / rounds", "1 + block / rounds"),
        ("session", "index % self.rotation", "0 % self.rotation"),
        ("session", "        self.launch(arm)  # cuBLAS", "        pass  # cuBLAS"),
        ("session", "self._stamp_function, self.sms, 1,", "self._stamp_function, 1, 1,"),
        ("session", "len(ratio) // 2", "0"),
        ("session", "enable_timing=True", "enable_timing=False"),
        ("session", "max(axis=1)", "min(axis=1)"),
        ("inputs", "torch.randn(shape", "torch.zeros(shape"),
        ("inputs", "max(2, 1 + math.ceil(2 * l2_bytes", "max(2, 1 + math.ceil(1 * l2_bytes"),
        ("inputs", "variant if operand.make else", "variant if not operand.make else"),
        ("sampler", '0x20: "thermal"', '0x20: "power cap"'),
        ("sampler", "0x1 | 0x2 | 0x100", "0x1 | 0x2 | 0x120"),
        ("sampler", "if foreign and", "if foreign or"),
    ],
)
def test_what_decides_a_sample_changes_the_hash(copy, module, old, new):
    assert old in (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert copy(module, lambda text: text.replace(old, new)) != protocol.protocol_hash()


@pytest.mark.parametrize("module", protocol.MODULES)
def test_every_number_of_a_hashed_module_is_in_the_hash(copy, module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    numbers = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    hashes = {protocol.protocol_hash()}
    for number in numbers:
        number.value += 1
        changed = ast.unparse(tree)
        number.value -= 1
        hashes.add(copy(module, lambda _, changed=changed: changed))
    assert len(hashes) == len(numbers) + 1 > 5


def test_the_hash_is_the_same_on_every_python(tmp_path):
    """As Python 3.11 to 3.13 give it of everything that the modules are written in, and more."""
    path = tmp_path / "module.py"
    path.write_text(
        """
import a.b as c
from . import d
class E(F, metaclass=G):
    x: int = 1
@h
async def i(j, /, k=1, *l, m=None, **n) -> None:
    async with o as p, q:
        await r
def s(*t): yield from t
global_ = -1j ** 2e300, b"\\x00\\xff", "\\ud800\U0001fae9", ..., None, True, not 0x10
f"a" "b" f"{c!r:>{d}.2}{{}} {e=}" "" f"{f'{g}'}" f"{h:}"
u = lambda v, *w: v @ w if v <= w else {**x, 1: [*y]}
match z:
    case {"a": [1, *_], **rest} if rest: pass
    case A(b=None) | -1: del z[1:2, ::3]
try:
    while (n := n - 1) and {i for i in range(3) if i not in j}: break
except* (B, C) as error:
    raise D from error
else: assert x, "y"
""",
        encoding="utf-8",
    )
    assert files.syntax_hash(path)[:16] == "eec6ede3e87c82fd"


def test_all_that_the_hashed_modules_import_is_hashed_or_decides_nothing():
    found = set()
    for module in protocol.MODULES:
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rungs":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rungs."):
                found.add(node.module.split(".")[1])
            elif isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "rungs" for alias in node.names)
    assert found - set(protocol.MODULES) == set(OUTSIDE)


@pytest.mark.parametrize("session", [gpu.Session, gpu.WorkSession])
def test_what_a_round_asks_of_a_session_is_in_a_hashed_module(session):
    asked = [name for name in vars(protocol.Session) if not name.startswith("_")]
    assert "capture" in asked
    for name in (*asked, "launch", "rotation", "load_stamp"):
        owner = next(kind for kind in session.__mro__ if name in vars(kind))
        assert owner.__module__.removeprefix("rungs.") in protocol.MODULES, name
