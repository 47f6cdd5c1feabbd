"""Submits are cut by time, launches that are too long by their grid; neither changes a bit."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import PROFILES, Bench

from qlora_wgpu.config import DeviceConfig, LoraConfig, QuantConfig
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, cpu_profile
from qlora_wgpu.graph import graph, program, submission
from qlora_wgpu.graph.submission import (
    ProfiledSubmission,
    TimedDispatch,
    cut,
    parts_needed,
    split_grid,
)
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.tensor import cast
from qlora_wgpu.runs import opening

# -- cutting -------------------------------------------------------------------------------


def lengths(seconds, limit, most):
    pieces = list(cut(seconds, limit, most))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(
        range(len(seconds))
    )
    return [piece.stop - piece.start for piece in pieces]


def test_submits_hold_so_much_time_and_so_many_dispatches():
    assert lengths([], 1.0, 10) == []
    assert lengths([0.4, 0.4, 0.4, 0.1], 1.0, 10) == [2, 2]
    assert lengths([0.1] * 7, 1.0, 3) == [3, 3, 1]
    assert lengths([0.1, 5.0, 0.1], 1.0, 10) == [1, 1, 1]  # what takes longer is alone
    assert lengths([0.0] * 5, math.inf, 2) == [2, 2, 1]


def test_a_launch_is_cut_where_it_takes_much_more_than_a_submit():
    assert [parts_needed(s, 0.1) for s in (0.0, 0.1, 0.14, 0.16, 1.0)] == [1, 1, 1, 2, 10]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("size", [(5, 1, 1), (3, 4, 1), (2, 3, 4), (1, 1, 1)])
def test_boxes_cover_a_grid_once(size, count):
    places = [
        tuple(f + o for f, o in zip(first, offset, strict=True))
        for first, extent in split_grid(size, count)
        for offset in itertools.product(*map(range, extent))
    ]
    assert sorted(places) == sorted(itertools.product(*map(range, size)))
    assert len(split_grid(size, count)) >= min(count, math.prod(size))


def test_samples_and_heads_are_cut_before_queries():
    assert {extent for _, extent in split_grid((8, 4, 2), 8)} == {(8, 1, 1)}


# -- the pace of a device ------------------------------------------------------------------


def test_a_software_gpu_has_no_limit(device):
    assert not CostModel.of_kind("CPU", 0.1).is_bounded
    assert CostModel.of_kind("IntegratedGPU", 0.1).is_bounded
    assert device.is_cpu and not device.pace.is_bounded
    assert device.pace.limit == pytest.approx(0.1)


def test_the_setting_reaches_the_device(monkeypatch):
    monkeypatch.setattr(opening, "Device", lambda *names, **settings: settings)
    monkeypatch.setattr(opening, "avoid_what_is_wrong", lambda device: None)
    settings = opening.device_of(DeviceConfig(submit_milliseconds=25, dispatches_per_submit=7))
    assert (settings["submit_milliseconds"], settings["dispatches_per_submit"]) == (25, 7)


def test_a_guess_is_replaced_by_what_launches_of_the_shader_took():
    pace = CostModel(flops_per_second=1e12, bytes_per_second=1e11, limit=0.1)
    assert pace.seconds("a", 10**12, 0) == pytest.approx(1.0, rel=1e-4)
    assert pace.seconds("a", 0, 10**11) == pytest.approx(1.0, rel=1e-4)
    pace.learn("a", 10**10, 0, 0.1)  # ten times as long as guessed
    assert pace.seconds("a", 10**12, 0) == pytest.approx(10.0, rel=1e-4)
    pace.learn("a", 3 * 10**10, 0, 0.1)
    assert pace.seconds("a", 10**12, 0) == pytest.approx(5.0, rel=1e-4)
    assert pace.seconds("b", 10**12, 0) == pytest.approx(1.0, rel=1e-4)


def test_launches_that_are_over_at_once_tell_no_rate():
    pace = CostModel(1e12, 1e11, 0.1)
    pace.learn("a", 1000, 0, 1e-5)  # ten thousand times the guess
    assert pace.seconds("a", 10**12, 0) == pytest.approx(1.0, rel=1e-4)


def test_guesses_keep_slow_gpus_below_what_systems_end():
    """A product of 8B's gate at 2,048 tokens, which an integrated GPU of 0.4 TFLOP/s needs 2.4 s
    for at a quarter of its rate, and Windows ends work after 2 s."""
    flops = 2 * 2048 * 4096 * 14336
    pace = CostModel.of_kind("IntegratedGPU", 0.1)
    parts = parts_needed(pace.seconds("gemm/nt_tiled.wgsl", flops, 0), pace.limit)
    assert flops / parts / 1e11 < 0.2


# -- the first run -------------------------------------------------------------------------


class Clock:
    """Submits that take as long as their dispatches say."""

    def __init__(self, monkeypatch, timestamps):
        self.now, self.submits = 0.0, []
        monkeypatch.setattr(submission.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(submission, "has_timestamps", lambda device: timestamps)
        monkeypatch.setattr(submission, "Timestamps", lambda device, most: self)
        self.device = SimpleNamespace(
            dispatches_per_submit=100, pace=CostModel(1e9, 1e9, 0.1), submit=self.seconds,
            buffer=lambda *size: None, read=lambda *what: None,
        )  # fmt: skip

    def seconds(self, dispatches):
        self.submits.append(list(dispatches))
        self.now += sum(dispatches)
        return dispatches


@pytest.mark.parametrize("timestamps", [True, False])
def test_the_first_run_learns_as_it_goes(monkeypatch, timestamps):
    """Launches that are guessed to take 40 ms take 4: two in a submit, and then twenty-five."""
    clock = Clock(monkeypatch, timestamps)
    run = ProfiledSubmission(clock.device, lambda dispatches: dispatches, 60)
    for index in range(60):
        run.add(TimedDispatch(index, 0.004, "a", 40_000_000, 0, 0.0))
    run.run()
    sizes = [len(each) for each in clock.submits]
    assert sizes[0] == 2 and max(sizes) > 20 and sum(sizes) == 60
    assert run.took == pytest.approx([0.004] * 60)


def test_a_clock_that_stands_still_is_not_believed(monkeypatch):
    clock = Clock(monkeypatch, True)
    run = ProfiledSubmission(clock.device, list, 2)
    monkeypatch.setattr(clock, "seconds", lambda d: [Clock.seconds(clock, d) and 0.0 for _ in d])
    for index in range(2):
        run.add(TimedDispatch(index, 0.5, "a", 10**6, 0, 0.001))
    run.run()
    assert sum(run.took) == pytest.approx(clock.now) and min(run.took) > 0


# -- the same bits -------------------------------------------------------------------------


def launched(run, monkeypatch, parts):
    """Attention, a norm, a product and element-wise kernels, as bits."""
    rng = np.random.default_rng(0)
    q, k, v = (run.operand(rng.standard_normal((2 * 70, 4 * 8))) for _ in "qkv")
    w = run.operand(rng.standard_normal((300, 4 * 8)))
    o = attention(run.graph, q, k, v, run.batch(np.ones((2, 70), np.int64)), 8, 0.3)
    y = run.graph.operand("y", 140, 300)
    normed = rms_norm(run.graph, o, run.float32(np.ones(32)), 1e-5)
    GEMM.launch(run.graph, Gemm(normed, w, y, True))
    pieces = []
    with monkeypatch.context() as patch:
        if parts > 1:
            patch.setattr(run.device, "pace", CostModel(1e12, 1e11, 1.0))
            patch.setattr(program, "parts_needed", lambda seconds, limit: parts)
            cut_up = program.Program._in_parts
            patch.setattr(
                program.Program, "_in_parts",
                lambda *where: pieces.append(cut_up(*where)) or pieces[-1],
            )  # fmt: skip
        results = run.run_bits(*(cast(run.graph, t, "float32") for t in (o, y)))
    return results, pieces


def in_threes(workgroups):
    """Every grid is dispatched three workgroups wide."""
    sizes = dict(zip(wgsl.GRID, workgroups, strict=True))
    return (3, -(-math.prod(workgroups) // 3), 1), {**sizes, wgsl.FOLD: 3}


@pytest.mark.slow
@pytest.mark.cover(profile=["gpu"], fold=[True])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("profile", ["texture", "gpu"])
def test_parts_of_a_launch_compute_the_same_bits(device, profile, fold, monkeypatch):
    if fold:
        monkeypatch.setattr(graph, "fold_grid", in_threes)
        monkeypatch.setattr(graph, "fold_workgroups", lambda count: (3, -(-count // 3), 1))
    own = replace(PROFILES[profile], gemm_kind="tiled")
    whole, _ = launched(Bench(device, "bfloat16", own), monkeypatch, 1)
    # Of grids three wide, every workgroup by itself: then x is cut, too.
    parts = 99 if fold else 3
    parted, pieces = launched(Bench(device, "bfloat16", own), monkeypatch, parts)
    for got, expected in zip(parted, whole, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(pieces) > 4 and max(map(len, pieces)) > 2


@pytest.mark.slow
def test_every_launch_of_a_step_can_be_cut():
    config = dict.fromkeys(("hidden_size", "intermediate_size"), 512)
    config |= {"model_type": "llama", "vocab_size": 4096, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    for profile in (GPU_PROFILE, replace(GPU_PROFILE, gemm_kind="tiled"), cpu_profile(8)):
        layout = ModelPlan(
            Pretrained.from_config(config), LoraConfig(), QuantConfig(), "bfloat16",
            profile=profile, max_binding=1 << 27,
        )  # fmt: skip
        for launch in layout.step(StepOptions("train", 2, 512)).plan.launches:
            if math.prod(launch.workgroups) > 1:
                assert launch.has_parts, launch.label
                part = launch.part((0, 0, 0), (1, 1, 1))
                assert len(part.params) >= len(launch.params) + 16 and part.flops <= launch.flops


def test_what_is_timed_alone_is_as_short_as_what_is_submitted(device, monkeypatch):
    monkeypatch.setattr(device, "pace", CostModel(1e7, 1e9, 0.1))
    run = Bench(device, "float32", PROFILES["gpu"])
    x, w = run.operand(np.ones((300, 70))), run.operand(np.ones((200, 70)))
    y = run.output(300, 200)
    GEMM.launch(run.graph, Gemm(x, w, y, True))
    own = run._run((y,))
    (launch,) = own.plan.launches
    whole = math.prod(launch.workgroups)
    # Guessed before it ran; then by what it took.
    monkeypatch.setattr(device, "pace", CostModel(1e8, 1e9, 0.03))
    fresh = program.Program(device, own.plan, program.BufferPool(device))
    (guessed,) = fresh.pieces
    assert len(guessed) >= parts_needed(2 * 300 * 200 * 70 / 1e8, 0.03) == 3
    assert sum(math.prod(workgroups) for *_, workgroups in guessed) == whole
    own._took = [0.1]
    (taken,) = own.pieces
    assert len(taken) >= 4 and own.dispatches[0] not in taken
    own._took = [0.01]
    assert own.pieces == [own.dispatches]
