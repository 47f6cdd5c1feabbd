"""How many launches a step takes on a GPU: each costs some microseconds, whatever it does."""

from dataclasses import replace

import pytest

from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions

STEP = StepOptions("train", 1, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "most", "layers"), [("llama-3.2-1b", 718, 16), ("llama-3.1-8b", 1358, 32)]
)
def test_a_step_has_no_more_launches(model, most, layers):
    """The update's three come on top, and what is made again: two norms and a unit of a layer.

    The first norm, whose input gets no gradient, is kept.
    """
    layout = ModelPlan(
        Pretrained.from_config(config_of(model), model), LoraConfig(r=8), QuantConfig(),
        "bfloat16", profile=GPU_PROFILE, max_binding=(1 << 31) - 1,
    )  # fmt: skip
    kept = layout.changed(profile=replace(GPU_PROFILE, remakes=False)).step(STEP).plan
    assert len(kept.launches) <= most
    plan = layout.step(STEP).plan
    assert len(plan.launches) == len(kept.launches) + 3 * layers - 1
    # Next to no traffic.
    assert plan.memory_traffic < 1.05 * kept.memory_traffic and plan.flops == kept.flops


@pytest.mark.slow
@pytest.mark.parametrize("deep", [False, True])
def test_sums_of_deep_tiles_are_cut_less_often(deep):
    """Products of 128 tiles: 1B's output projections, and gradients of as many columns."""
    profile = gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152), deep_tiles=deep)
    layout = ModelPlan(
        Pretrained.from_config(config_of("llama-3.2-1b"), "1B"), LoraConfig(r=8), QuantConfig(),
        "bfloat16", profile=profile, max_binding=(1 << 31) - 1,
    )  # fmt: skip
    launches = layout.step(STEP).plan.launches
    products = [each for each in launches if each.path == "gemm/nt_tiled.wgsl"]
    cut = [each for each in products if each.tensors["y"].name.startswith("parts of ")]
    assert len(cut) == (0 if deep else 2 * 16)  # o_proj and down_proj


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_what_a_step_keeps_of_its_layers(model, family):
    """Neither normed inputs nor gated units, nor heads that were normed before their rotation."""
    head = {"model_type": family, "head_dim": 128}
    config = {**config_of(model), **head}
    layout = ModelPlan(
        Pretrained.from_config(config, model), LoraConfig(r=8), QuantConfig(), "bfloat16",
        profile=GPU_PROFILE, max_binding=(1 << 31) - 1,
    )  # fmt: skip
    kept = layout.changed(profile=replace(GPU_PROFILE, remakes=False))
    less = [each.memory(STEP)["activations"] for each in (kept, layout)]
    columns = config["intermediate_size"] + 2 * config["hidden_size"]
    if family == "qwen3":
        columns += 128 * (config["num_attention_heads"] + config["num_key_value_heads"])
    of_layer = 2 * 1024 * columns
    # The last layer's may stay where the head's own tensors, or a layer's weights, take its place.
    assert less[0] - less[1] >= (config["num_hidden_layers"] - 2) * of_layer
