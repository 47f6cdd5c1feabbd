"""Every family's kernels are compiled by both browsers, under the limits that all devices have."""

import pytest
from references.sized import traced_configs

from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.training.optimizer import STEP_NUMBERS, trace_update
from qlora_wgpu.web.variant import Shaders

PROFILES = {"gpu": GPU_PROFILE, "cpu": CPU_PROFILE}
BINDING = 128 << 20  # that of WebGPU's default limits
SECONDS = 900.0  # for fifty shaders: software compiles some for seconds


def plans(layout):
    """All that a page runs of a model: steps, text, the update."""
    for checkpointing, noise in ((True, 5.0), (False, 0.0)):
        yield layout.step(StepOptions("train", 2, 40, checkpointing, noise=noise)).plan
    yield layout.step(StepOptions("loss", 2, 40)).plan
    for length in (1, 40):
        cache = CacheView(KVCache(96))
        hidden, head, logits = layout.logits_graphs(make_batch_buffers(1, length, cache))
        yield compile_plan(hidden)
        yield compile_plan(head, outputs=(logits,))
    info = vector("info", STEP_NUMBERS, "float32", Storage("info", "inputs", 4 * STEP_NUMBERS))
    graph = layout.new_graph()
    trace_update(graph, layout.adapter, layout.stats, info, OptimConfig(max_grad_norm=0.3))
    yield compile_plan(graph)


def shaders_of(config, profile, dtype, shaders):
    """Adds those of a family to the others."""
    for scheme, dora, forms in (
        ("nf4", False, AdapterDtypes()),
        ("none", True, AdapterDtypes("adamw_8bit", "bfloat16")),
    ):
        lora = LoraConfig(r=5, lora_dropout=0.1, use_dora=dora, target_modules="all-linear")
        layout = ModelPlan(
            Pretrained.from_config(config), lora, QuantConfig(scheme=scheme), dtype,
            profile=profile, max_binding=BINDING, forms=forms,
        )  # fmt: skip
        for plan in plans(layout):
            for launch in plan.launches:
                shaders.number(launch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_every_family_compiles(browser, profile, dtype, ask):
    shaders = Shaders()
    for config in traced_configs().values():
        shaders_of(config, PROFILES[profile], dtype, shaders)
    assert shaders.max_bindings <= 8 and shaders.max_invocations <= 256
    task = {"shaders": shaders.as_json(), "features": []}
    found, _ = ask(browser, "compile.html", task, seconds=SECONDS)
    assert found["refused"] == [] and found["uncaptured"] == []
    assert found["compiled"] == len(task["shaders"]) > 100
