"""Values that kernels held at the end of their type are counted, told once, and logged."""

from types import SimpleNamespace

import numpy as np
from e2e.tiny import CONFIG, weights, write_model, write_weights

from qlora_wgpu import QLoRAModel
from qlora_wgpu.config import Config, LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import make_sums
from qlora_wgpu.ops.optimizers import STATS_LENGTH
from qlora_wgpu.training.executor import ThroughputMeter
from qlora_wgpu.training.observers import WorkerMetrics
from qlora_wgpu.training.step_log import MetricsLogger, SubmittedStep, log_window


def a_run(kept=0):
    warnings, rows = [], []
    dense = SimpleNamespace(vocab_size=83, balance_coefficient=lambda setting: 0.0)
    return SimpleNamespace(
        model=SimpleNamespace(architecture=dense, kept_saturated=kept),
        events=SimpleNamespace(warning=warnings.append, workers=lambda figures: None),
        logged=rows.append,
        folder=SimpleNamespace(log=SimpleNamespace(append=lambda row: None)),
        config=Config(model={"path": "none"}, log={"logging_steps": 1}),
        throughput=ThroughputMeter(),
        workers={},
        sources=None,
        state=SimpleNamespace(
            metrics=[],
            averages={},
            step=1,
            num_tokens=3,
            learning_rate=0.1,
            grad_norm=1.0,
            window=[],
            logged_step=0,
        ),
        saturated=0,
        warnings=warnings,
        rows=rows,
    )


def stats(count):
    data = np.zeros(68, np.uint32)
    data[:5] = np.array([3.0, 2.0, 1.0, 0.5, 1.0], np.float32).view(np.uint32)
    data[64] = count
    return data.tobytes()


def test_a_count_is_told_once_and_logged_from_then_on():
    run = a_run()
    log = MetricsLogger(run)
    for step, data in enumerate((stats(0)[: 4 * STATS_LENGTH], stats(0), stats(7), stats(5)), 1):
        log.finish(SubmittedStep(step, learning_rate=0.1, tokens=2), data)
    assert [row.get("saturated") for row in run.rows] == [None, None, 7, 12]
    assert len(run.warnings) == 1
    assert run.warnings[0].startswith("step 3: 7 values") and "float32" in run.warnings[0]
    log_window(run)
    assert len(run.rows) == 4


def test_what_is_kept_dequantized_counts_at_every_step():
    run = a_run(kept=3)
    log = MetricsLogger(run)
    for step, workers in enumerate(((), (), (WorkerMetrics("a", 1, 1.0, 1, 1),)), 1):
        log.finish(SubmittedStep(step, 0.1, 2, workers), stats(1))
    assert [row.get("saturated") for row in run.rows] == [4, 8, 9]  # a worker has counted its own
    assert run.warnings[0].startswith("step 1: 4 values")


def test_a_fill_is_counted_before_sums_are_cleared(device, tmp_path, monkeypatch):
    tensors = weights(CONFIG)
    tensors["model.layers.1.mlp.up_proj.weight"][3, [1, 30]] = 7e4
    folder = write_model(tmp_path / "model")
    write_weights(folder, tensors)
    monkeypatch.setattr(device, "profile", gpu_profile(MatrixShape(16, 16, 16, 32), device.limits))
    counts = {}
    for kept in (False, True):
        settings = LoraConfig(r=8), QuantConfig(), "bfloat16", device, OffloadPlan(dequantized=kept)
        model = QLoRAModel(device_layout(Pretrained.open(folder), *settings), device)
        assert model.count_saturated() == 0  # steps begin with nothing
        counts[kept] = model.kept_saturated
        model.close()
    assert counts == {False: 0, True: 2}


def test_counting_keeps_no_product_that_nobody_needs():
    profile = gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152))
    sums, saturated = make_sums(counts=profile.saturates)
    assert saturated is not None and saturated.storage is sums.storage
    for needed in (True, False):
        g = Graph("bfloat16", profile, saturated=saturated)
        y = g.operand("y", 200, 100)
        GEMM.launch(g, Gemm(g.operand("x", 200, 64), g.operand("w", 100, 64), y, True))
        assert "saturated" in g.launches[0].tensors
        assert bool(compile_plan(g, (y,) if needed else ()).launches) == needed
