"""Models and batches beyond common sizes: every launch keeps WebGPU's default limits.

Or it is told before a weight is read: nothing else of the limits is left to a driver.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.limits import MOST_STORAGE_TEXTURES
from qlora_wgpu.gpu.matrix import PROMISED, MatrixShape
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import make_seen
from qlora_wgpu.runs.placement import beyond_a_binding, beyond_a_texture, check_binding_limits

BINDING = TEXTURE = 128 << 20
SMALL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "head_dim": 64,
}  # fmt: skip
VOCABULARY = {**SMALL, "hidden_size": 5120, "vocab_size": 300_000}
WIDE = {
    **SMALL, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 128,
}  # fmt: skip
EXPERTS = {
    **SMALL, "model_type": "qwen3_moe", "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "hidden_size": 1024, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip
STATES = {
    **EXPERTS, "model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip
MODELS = {
    "vocabulary": (VOCABULARY, (1, 64)),
    "vocabulary, tied": ({**VOCABULARY, "tie_word_embeddings": True}, (1, 64)),
    "intermediate": (WIDE, (1, 64)),
    "rows": ({**SMALL, "num_key_value_heads": 4}, (1, 65_000)),
    "experts": (EXPERTS, (2, 512)),
    "states": (STATES, (2, 512)),
}
PROFILES = {
    "buffers": CPU_PROFILE,
    "textures": cpu_profile(8),
    "all in textures": cpu_profile(8, 10, in_textures=True, short_loops=True),
    "registers": replace(GPU_PROFILE, gemm_kind="register", attention_kind="register"),
    "workgroup memory": GPU_PROFILE,
    "matrix units": gpu_profile(MatrixShape(8, 8, 8, 32), PROMISED),
}


def laid_out(config, profile, **lora):
    return ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=8, **lora), QuantConfig(), "bfloat16",
        profile=PROFILES[profile], max_binding=BINDING,
    )  # fmt: skip


def assert_within(plan):
    """All that WebGPU limits of a launch, at the least that it promises."""
    for launch in plan.launches:
        assert max(launch.workgroups) <= 65_535, launch.label
        x, y, z = launch.shader.workgroup_size
        assert x * y * z <= 256 and x <= 256 and y <= 256 and z <= 64, launch.label
        buffers = [tensor for tensor in launch.tensors.values() if not tensor.texture]
        assert len(buffers) <= 8, launch.label  # textures are read by software GPUs alone
        assert len(launch.tensors) - len(buffers) <= MOST_STORAGE_TEXTURES, launch.label
        assert len(launch.params) <= 65_536, launch.label
        for name, tensor in launch.tensors.items():
            assert tensor.nbytes <= (TEXTURE if tensor.texture else BINDING), (launch.label, tensor)
            assert tensor.offset % 256 == 0, (launch.label, name, tensor)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("model", MODELS)
def test_every_launch_keeps_the_default_limits(model, profile):
    config, (batch, seq) = MODELS[model]
    layout = laid_out(config, profile)
    plan = layout.step(StepOptions("train", batch, seq, True)).plan
    assert beyond_a_binding([plan], BINDING) is None is beyond_a_texture([plan], TEXTURE)
    assert_within(plan)


# Where memory is scarce and intermediates are in buffers, too.
@pytest.mark.parametrize("offload", [OffloadPlan(in_buffers=True), OffloadPlan.least(1)])
@pytest.mark.parametrize("profile", ["textures", "all in textures"])
def test_what_a_texture_holds_and_no_binding_shows_is_in_a_texture(profile, offload):
    config = {**WIDE, "num_key_value_heads": 16}
    layout = laid_out(config, profile, target_modules=["down_proj"]).changed(offload=offload)
    plan = layout.step(StepOptions("train", 4, 700, True)).plan
    large = [tensor for tensor in plan.slot_of if tensor.nbytes > BINDING]
    assert large and all(tensor.texture for tensor in large)
    assert beyond_a_binding([plan], BINDING) is None is beyond_a_texture([plan], 2 * TEXTURE)


@pytest.mark.parametrize("profile", ["textures", "workgroup memory"])
def test_texts_of_a_large_vocabulary_keep_them_too(profile):
    layout = laid_out(VOCABULARY, profile)
    graphs = layout.token_graphs(3, 1, KVCache(4096, 3), make_seen(3, 300_000))
    for graph in (graphs.hidden, graphs.head):
        plan = compile_plan(graph)
        assert beyond_a_binding([plan], BINDING) is None
        assert_within(plan)


def test_more_rows_than_thin_products_have_workgroups():
    plan = laid_out(SMALL, "workgroup memory").step(StepOptions("train", 4, 70_000, True)).plan
    assert max(x.nbytes for x in plan.slot_of) > BINDING  # so that it takes a GPU that allows it
    assert all(max(launch.workgroups) <= 65_535 for launch in plan.launches)


@pytest.mark.parametrize("profile", ["buffers", "textures"])
def test_loops_that_software_gpus_leave_are_a_sentence(profile):
    with pytest.raises(DeviceError, match=r"needs 70,000 loop iterations .* lower data.max_seq"):
        laid_out(SMALL, profile).step(StepOptions("train", 1, 70_000, True))


DEVICE = SimpleNamespace(name="a card", max_binding=BINDING, max_texture=TEXTURE)


def refused(layout, plans):
    with pytest.raises(OutOfMemoryError) as refusal:
        check_binding_limits(layout, plans, DEVICE)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kernels", "tokens", "told"),
    [
        ("workgroup memory", 1024, "4,096 rows needs 469,762,048 bytes"),
        ("all in textures", 1000, "4,000 rows needs 458,752,000 bytes"),
    ],
)
def test_a_tensor_that_has_no_room_is_told_before_weights_are_read(kernels, tokens, told):
    layout = laid_out(WIDE, kernels)
    said = refused(layout, [layout.step(StepOptions("train", 4, tokens, True)).plan])
    assert said.endswith(
        f"of {told} in one piece, but a card allows 134,217,728: lower the batch size or "
        "data.max_seq_length"
    )


def test_weights_beyond_a_binding_are_no_matter_of_the_batch():
    config = {**EXPERTS, "hidden_size": 4096, "moe_intermediate_size": 2048}
    layout = laid_out(config, "workgroup memory", target_modules=["q_proj"])
    said = refused(layout, [layout.step(StepOptions("train", 1, 8, True)).plan])
    assert said == (
        "model.layers.0.mlp.experts.gate_proj.weight.codes needs 1,073,741,824 bytes in one piece, "
        "but a card allows 134,217,728: choose a GPU with a higher limit (device.gpu), or a "
        "smaller model"
    )


def test_texts_beyond_a_binding_are_no_matter_of_the_batch():
    layout = laid_out(WIDE, "workgroup memory")
    cache = KVCache(131_072, 16)
    hidden = layout.token_graphs(16, 1, cache, make_seen(16, 1000)).hidden
    said = refused(layout, [compile_plan(hidden)])
    assert said.endswith("allows 134,217,728: generate shorter sequences, or fewer at a time")
