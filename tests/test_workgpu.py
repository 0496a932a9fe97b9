"""The session of experiments that are no GEMM, and what measures with it: torch on the CPU, and launches that write what is right."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch as real

from rungs import gpu, inputs, launcher, measure, protocol, workloads
from rungs.session import Timing, cycles_per_unit
from rungs.variants import load_device, load_experiment

DEVICE = load_device("sm_90a")
SMS = 2
SETTINGS = protocol.Settings(5.0, 3, 6, 200.0, 0.0, "hot", 1)


class Torch:
    """torch, with the CPU where `cuda` is asked for; its stream runs at once and its events tell a time of our own."""

    def __init__(self) -> None:
        self.now, self.recording = 0.0, None
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            init=lambda: None,
            synchronize=lambda: None,
            get_device_properties=lambda _: SimpleNamespace(multi_processor_count=SMS, L2_cache_size=1 << 20),
            Stream=lambda: SimpleNamespace(cuda_stream=0),
            set_stream=lambda _: None,
            CUDAGraph=lambda: Graph(self),
            Event=lambda enable_timing: Event(self),
        )

    def __getattr__(self, name: str):
        return getattr(real, name)

    def Generator(self, device: str):
        return real.Generator()

    def empty(self, *shape, device: str = "", **options):
        return real.empty(*shape, **options)

    def zeros(self, *shape, pin_memory: bool = False, **options):
        return real.zeros(*shape, **options)

    def randn(self, *shape, device: str = "", **options):
        return real.randn(*shape, **options)

    def randint(self, *arguments, device: str = "", **options):
        return real.randint(*arguments, **options)


class Graph:
    def __init__(self, torch: Torch) -> None:
        self.torch, self.launches = torch, []

    def capture_begin(self) -> None:
        self.torch.recording = self.launches

    def capture_end(self) -> None:
        self.torch.recording = None

    def replay(self) -> None:
        for act in self.launches:
            act()


class Event:
    def __init__(self, torch: Torch) -> None:
        self.torch = torch

    def record(self, stream) -> None:
        self.at = self.torch.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end) -> float:
        return (end.at - self.at) / 1000


@pytest.fixture
def opened(monkeypatch):
    """A function (experiment, variants, fault) that opens a session with their binaries loaded; each launch takes 10 us.

    `fault`: variant -> what its launches do to the results that would be right.
    """

    def open_(name, names, fault=None):
        torch, experiment = Torch(), load_experiment(name)
        session = gpu.WorkSession.__new__(gpu.WorkSession)
        session.torch, session.sms, session.l2_bytes, session.dram_bytes_per_us = torch, SMS, 1 << 20, 4.9e6
        session.stream, session.arms, session.refused, session.graphs, session.sets = (
            torch.cuda.Stream(),
            {},
            {},
            {},
            [],
        )
        monkeypatch.setattr(real.Tensor, "cuda", lambda tensor: tensor, raising=False)
        monkeypatch.setattr(launcher, "allow_shared_memory", lambda *arguments: None)

        def prepare(function, launched, variant):
            return lambda stream: run(session, experiment, variant, (fault or {}).get(variant), torch)

        monkeypatch.setattr(launcher, "prepare", prepare)
        copied = session.launch

        def launch(arm, buffer_set=0):
            """The control's, as `run` does the rungs'."""
            if arm != gpu.CONTROL:
                copied(arm, buffer_set)
            elif torch.recording is None:
                copied(arm)
                torch.now += 5.0
            else:
                torch.recording.append(lambda: (copied(arm), setattr(torch, "now", torch.now + 5.0)))

        monkeypatch.setattr(session, "launch", launch)
        monkeypatch.setattr(session, "stamp", lambda: torch.now)
        monkeypatch.setattr(session, "clock_mhz", lambda before, after: 1980.0)
        for each in names:
            variant = experiment.variant(each)
            session.arms[variant.name] = gpu.WorkArm(experiment, variant, DEVICE, None)
        return session, experiment

    return open_


def run(session, experiment, variant, fault, torch) -> None:
    """What a launch does: it writes the right results into the arm's tensors, or queues that in the graph being captured."""

    def act() -> None:
        torch.now += 10.0
        arm = session.arms[variant]
        inputs = {n: session._wide(arm, n) for n, o in arm.operands.items() if o.role == "input"}
        of = (experiment, arm.variant, DEVICE, session.point, arm.sms)
        right = workloads.of(experiment).expected(*of, inputs)
        for name, operand in arm.operands.items():
            if operand.role == "output":
                values = right[name].reshape(arm.tensors[name].shape).to(arm.tensors[name].dtype)
                arm.tensors[name].copy_(fault(values) if fault else values)
            elif operand.role == "cycles":
                arm.tensors[name].fill_(1000)

    if torch.recording is None:
        act()
    else:
        torch.recording.append(act)


class Sampler:
    def read(self):
        return "", 500.0, 40.0, ()


def measured(session, experiment, rung, point):
    at = measure.At(experiment, experiment.variant(rung), DEVICE, point)
    way = measure._measure if measure._timed(experiment) else measure._count_cycles
    held = SimpleNamespace(locked_mhz=None, record={})
    return way(session, at, SETTINGS, Sampler(), held, 0.0, {}, lambda arm: None, measure.Phases(0.0))


SMALL = {
    "copy_intensity": ("CP3", "CP2", (3, 64, 1)),
    "tma_wall": ("WM2", "WM0", (1024, 1, 2, 64, 1)),
    "smem_read": ("W4", "W1", (2, 3)),
    "tma_latency": ("TL3", "TL2", (16, 64, 0)),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_point_is_checked_measured_and_checked_again(opened, name):
    """Every arm in every round; the control copies, and a launch of 10 us is one of 10 us."""
    rung, before, point = SMALL[name]
    session, experiment = opened(name, [rung, before])
    part = measured(session, experiment, rung, point)
    assert (part["status"], part["reason"]) == ("ok", "")
    arms = {experiment.variant(rung).name, experiment.variant(before).name}
    timed = workloads.of(experiment).MEASURES == "time"
    assert {sample["arm"] for sample in part["samples"]} == (arms | {"control"} if timed else arms)
    rounds = {sample["round"] for sample in part["samples"]}
    assert len(part["samples"]) == len(rounds) * (3 if timed else 2) and max(rounds) >= 3
    values = {sample["arm"]: sample["time_us"] for sample in part["samples"]}
    own = values[experiment.variant(rung).name]
    units = workloads.of(experiment).work(experiment, experiment.variant(rung), DEVICE, point, SMS).units
    assert own == pytest.approx(10.0 if timed else 1000 / units)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("spoil", [lambda v: v + 1, lambda v: v * math.nan if v.is_floating_point() else v * 0 - 1])
def test_a_wrong_result_is_never_measured(opened, name, spoil):
    rung, before, point = SMALL[name]
    variant = load_experiment(name).variant(rung).name
    session, experiment = opened(name, [rung, before], {variant: spoil})
    part = measured(session, experiment, rung, point)
    assert part["status"] == "wrong" and part["reason"].startswith(variant) and not part["samples"]


def test_a_wrong_predecessor_is_left_out_and_named(opened):
    rung, before, point = SMALL["copy_intensity"]
    other = load_experiment("copy_intensity").variant(before).name
    session, experiment = opened("copy_intensity", [rung, before], {other: lambda values: values + 1})
    part = measured(session, experiment, rung, point)
    assert part["status"] == "ok" and set(part["shape"]["excluded"]) == {other}
    assert other not in {sample["arm"] for sample in part["samples"]}


def test_an_arm_that_has_not_the_point_is_left_out_with_its_reason(opened):
    """A payload that is whole tiles of the rung's, but not of its predecessor's."""
    session, experiment = opened("copy_intensity", ["CT3", "CT4"])  # 8 and 16 KiB
    part = measured(session, experiment, "CT3", (1, 24, 1))
    assert part["status"] == "ok"
    assert not part["shape"]["excluded"]
    (left_out,) = part["shape"]["lost"].values()
    reason = left_out["reason"]
    assert left_out["status"] == "refused" and "not a positive multiple of the tile of 16384" in reason


def test_bytes_above_what_the_memory_gives_are_refused(opened):
    session, experiment = opened("copy_intensity", ["CP3"])
    session.sms = 132
    at = measure.At(experiment, experiment.variant("CP3"), DEVICE, (1, 1048576, 2))
    condition = protocol.Condition("", None, None)
    fast = protocol.Sample(1, "x", 0, 1, 300.0, 1980.0, condition, "")
    assert "are above the memory's 4.90 TB/s" in at.implausible("x", fast, session)
    slow = protocol.Sample(1, "x", 0, 1, 600.0, 1980.0, condition, "")
    assert at.implausible("x", slow, session) == ""


def test_what_l2_holds_may_be_read_faster_than_memory(opened):
    """Sixteen passes over 16 MiB in 50 us: 5.4 TB/s, which L2 gives."""
    session, experiment = opened("tma_wall", ["WM2"])
    session.sms, session.l2_bytes = 132, 60 << 20
    condition = protocol.Condition("", None, None)
    fast = protocol.Sample(1, "x", 0, 1, 50.0, 1980.0, condition, "")
    at = [
        measure.At(experiment, experiment.variant("WM2"), DEVICE, point)
        for point in ((8192, 1, 8, 16384, 16), (8192, 1, 8, 262144, 1))
    ]
    assert at[0].implausible("x", fast, session) == ""
    short = protocol.Sample(1, "control", 0, 1, 5.4, 1980.0, condition, "")
    assert at[0].implausible("control", short, session) == "", "the control goes over the payload once"
    assert "above the memory's" in at[1].implausible("x", fast, session)


def test_equal_operands_of_two_arms_are_one_buffer_and_what_is_made_is_each_arms_own(opened):
    session, _ = opened("copy_intensity", ["CP3", "CP2"])
    session.set_problem((1, 64, 1), "normal", 1)
    one, other = session.arms.values()
    assert one.tensors["payload"] is other.tensors["payload"] and one.tensors["result"] is other.tensors["result"]
    session, _ = opened("smem_read", ["Y4", "Y5"])
    session.set_problem((1, 2), "integer", 1)
    one, other = session.arms.values()
    assert one.tensors["tile"] is not other.tensors["tile"]


@pytest.mark.parametrize("ctas", [1, 2])
def test_clusters_are_no_more_than_the_gpu_holds_at_once(opened, monkeypatch, ctas):
    """Two clusters of four where ten SMs would have room for two and a half, and the driver finds one."""
    session, _ = opened("tma_wall", ["WC4", "WC2", "WC1"])
    session.sms, planned, found = 10, {}, []
    prepare = launcher.prepare
    monkeypatch.setattr(
        launcher, "prepare", lambda f, p, v: planned.update({p.cluster[0]: p.grid[0]}) or prepare(f, p, v)
    )
    monkeypatch.setattr(launcher, "launch_config", lambda plan: found.append(plan) or plan)
    driver = SimpleNamespace(
        CUresult=launcher.driver.CUresult,
        cuOccupancyMaxActiveClusters=lambda function, plan: (
            launcher.driver.CUresult.CUDA_SUCCESS,
            ctas * {2: 5, 4: 1}[plan.cluster[0]],
        ),
    )
    monkeypatch.setattr(launcher, "driver", driver)
    session.set_problem((1024, ctas, 2, 1024, 1), "integer", 1)
    assert not session.refused and [plan.cluster[0] for plan in found] == [4, 2]
    assert planned == {1: 10 * ctas, 2: 10 * ctas, 4: 4 * ctas}
    assert [arm.sms for arm in session.arms.values()] == [4, 10, 10]
    for name, arm in session.arms.items():
        assert arm.tensors["sums"].shape == (arm.sms * ctas,) and session.outcome(name).equal


def test_cold_caches_are_refused(opened):
    session, _ = opened("copy_intensity", ["CP3"])
    with pytest.raises(gpu.Refused, match="take l2 hot"):
        session.set_problem((1, 64, 1), "normal", 1, "cold")


# ---- buffers of GEMMs, and graphs that go round them -----------------------------------------------------------------


@pytest.mark.parametrize(("l2", "count"), [("hot", 1), ("cold", 4)])
def test_as_many_buffers_rotate_as_pass_twice_l2_between_two_uses(l2, count):
    """A set of 64 x 64 x 16 has 2 x (2 x 64 x 16 + 64 x 64) = 12,288 bytes, and 2 x L2 are 36,000."""
    sets = inputs.buffer_sets(Torch(), (64, 64, 16), "normal", 7, l2, 18_000)
    assert len(sets) == count and len({each.c.data_ptr() for each in sets}) == count
    assert all(real.equal(each.a, sets[0].a) and real.equal(each.b_kn, sets[0].b_nk.t()) for each in sets)
    assert sets[0].read_bytes() == 12_288
    again = inputs.buffer_sets(Torch(), (64, 64, 16), "normal", 7, "hot", 18_000)
    assert real.equal(again[0].a, sets[0].a) and 0.9 < float(sets[0].a.float().std()) < 1.1


def test_small_buffers_rotate_over_two_sets_at_least():
    assert len(inputs.buffer_sets(Torch(), (64, 64, 16), "integer", 7, "cold", 1)) == 2


def test_a_graph_goes_round_the_buffer_sets_after_one_launch_outside_it():
    torch = Torch()
    timing, launched = Timing(torch, SMS), []
    timing.sets = inputs.buffer_sets(torch, (64, 64, 16), "normal", 7, "cold", 18_000)

    def launch(buffer_set):
        act = functools.partial(launched.append, buffer_set)
        return lambda: act() if torch.recording is None else torch.recording.append(act)

    timing.arms["rung"] = SimpleNamespace(launches=[launch(index) for index in range(4)])
    assert timing.rotation == 4
    timing.capture("rung", 8)
    assert (launched, timing.captured) == ([0], 8)
    timing.replay("rung")
    assert launched == [0, *range(4), *range(4)]


def test_the_control_multiplies_a_set_of_buffers_and_without_any_copies_the_largest_input():
    timing = Timing(Torch(), SMS)
    timing.sets = inputs.buffer_sets(timing.torch, (64, 64, 16), "integer", 7, "cold", 1)
    timing.launch("control", 1)
    (first, second) = timing.sets
    assert real.equal(second.c.float(), second.a.float() @ second.b_kn.float()) and not real.equal(first.c, second.c)
    timing.sets = []
    timing.source = inputs.largest([real.ones(3), real.arange(4.0)])
    timing.copied = real.zeros(4)
    timing.launch("control")
    assert timing.copied.tolist() == [0, 1, 2, 3] and timing.rotation == 1


def test_the_clock_is_the_middle_one_of_the_sms_that_both_stamps_reached():
    timing = Timing(Torch(), 4)
    timing._stamps = real.tensor(
        [[[100, 1000], [0, 0], [200, 1000], [5, 1000]], [[2100, 2000], [900, 2000], [1700, 2000], [1005, 2000]]]
    )
    assert timing.clock_mhz(0, 1) == 1500.0
    timing._stamps[1, :, 1] = 0
    assert timing.clock_mhz(0, 1) is None


def test_the_slowest_warp_of_the_middle_cta_is_what_a_launch_takes():
    values = np.array([[10, 30], [20, 20], [90, 10]])
    assert cycles_per_unit(values, 3) == 10.0


def test_unsigned_integers_keep_their_bits():
    found = np.array([0xFFFFFFFF, 1], np.uint32)
    assert not workloads.differs(found, np.array([-1, 1])).any()
    assert workloads.differs(found, np.array([0, 1])).tolist() == [True, False]


def test_what_a_new_tensor_map_costs_the_host_is_measured_last(opened, monkeypatch):
    asked = []
    monkeypatch.setattr(
        launcher,
        "descriptor_costs",
        lambda map, name, stream: asked.append(map) or {"encode": 1.5, "encode_and_send": 4.0},
    )
    monkeypatch.setattr(gpu.Session, "describe", lambda session: {"sms": session.sms})
    session, experiment = opened("tma_latency", ["TF0"])
    point = experiment.shapes(experiment.variant("TF0"))[0]
    session.set_problem(point, "integer", 1)
    assert not asked
    assert session.describe() == {"sms": SMS, "descriptor_us": {"encode": 1.5, "encode_and_send": 4.0}}
    assert len(asked) == 1 and asked[0].element_bytes in (2, 4)
    session, experiment = opened("tma_latency", ["TL0"])
    session.set_problem(experiment.shapes(experiment.variant("TL0"))[0], "integer", 1)
    assert session.describe() == {"sms": SMS}, "LDG has no map"
