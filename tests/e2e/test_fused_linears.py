"""q, k, v and gate, up as one product each compute what they do one by one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from references.sized import with_head_dim
from safetensors.numpy import save_file

from e2e.test_family_types import CONFIGS, normalize, shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions

LORA = LoraConfig(r=8, lora_alpha=16)


def config_of(family):
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama-biases" else {}
    config = CONFIGS[family.removesuffix("-biases")]
    return with_head_dim(config, 24) | {"intermediate_size": 136} | biased


def products(family, lora, scheme="nf4", *, fused=True):
    """How many products the forward of a traced step has."""
    profile = replace(GPU_PROFILE, fused_linears=fused)
    layout = ModelPlan(
        Pretrained.from_config(config_of(family)), lora, QuantConfig(scheme=scheme), "bfloat16",
        profile=profile, max_binding=1 << 27,
    )  # fmt: skip
    launches = layout.step(StepOptions("train", 2, 24)).plan.launches
    return [launch.label for launch in launches].count("gemm/forward")


def computed(folder, device, dtype, *, fused, checkpointing=False):
    """Loss and gradients of a step with layers fused or not."""
    device.profile = replace(GPU_PROFILE, fused_linears=fused)
    model = QLoRAModel.from_pretrained(
        folder, LORA, QuantConfig(), dtype, device, gradient_checkpointing=checkpointing
    )
    parts = model.adapter.split(model.adapter.initial(0))
    model.load_adapter(normalize(adapter({name: a.shape for name, a in parts.items()})))
    ids, mask, labels = batch()
    return model.loss_and_grads(ids, labels, mask)


# Every family that has layers of one input: those of mixtures have q, k and v.
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*CONFIGS, "llama-biases"])
def test_fused_layers_compute_the_same(device, monkeypatch, tmp_path, family, dtype):
    monkeypatch.setattr(device, "profile", GPU_PROFILE)
    (tmp_path / "config.json").write_text(json.dumps(config_of(family)))
    save_file(normalize(weights(*shapes(config_of(family)))), tmp_path / "model.safetensors")
    loss, expected = computed(tmp_path, device, dtype, fused=False)
    fused_loss, gradients = computed(tmp_path, device, dtype, fused=True)
    # Sums in another order; with bfloat16 some are rounded otherwise.
    bound = 2e-5 if dtype == "float32" else 0.05
    # States with negative eigenvalues hardly decay: without fusion, too, gradients of two kinds of
    # kernels in float32 are up to 2.5e-5 apart (of 6 batches; of Qwen 3 Next 7e-6).
    bound = 4e-5 if (family, dtype) == ("olmo_hybrid", "float32") else bound
    assert abs(fused_loss - loss) <= bound * loss
    for name, array in expected.items():
        off = np.linalg.norm(gradients[name] - array) / np.linalg.norm(array)
        assert off <= bound, (name, off)
    again, same = computed(tmp_path, device, dtype, fused=True, checkpointing=True)
    assert again == fused_loss
    assert all(np.array_equal(same[name], array) for name, array in gradients.items())


@pytest.mark.parametrize(
    ("family", "options", "saved"),
    [
        ("llama", {}, 3),
        ("qwen3", {}, 3),
        ("llama", {"use_rslora": True}, 3),
        ("llama", {"target_modules": ["o_proj"]}, 3),
        ("llama", {"target_modules": ["gate_proj", "up_proj"]}, 3),
        ("llama", {"target_modules": ["q_proj", "v_proj"]}, 2),  # q and v, k by itself
        ("llama", {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}, 2),
        ("llama", {"rank_pattern": {"v_proj": 16}}, 2),
        ("llama", {"rank_pattern": {"k_proj": 16}}, 1),  # their B do not follow each other
        ("llama", {"alpha_pattern": {"q_proj": 64, "up_proj": 64}}, 1),
        ("llama", {"lora_dropout": 0.1}, 0),
        ("llama", {"use_dora": True}, 0),
        ("llama", {"r": 4}, 0),
        ("qwen2", {}, 3),  # biases of q, k and v
        ("llama-biases", {}, 3),
        ("phi3", {}, 0),  # one layer in the files already
    ],
)
def test_what_fits_one_product(family, options, saved):
    lora = LoraConfig(**{"r": 8, "lora_alpha": 16, **options})
    layers = config_of(family)["num_hidden_layers"]
    assert products(family, lora, fused=False) - products(family, lora) == saved * layers


@pytest.mark.quick
def test_weights_that_are_not_quantized_stay_apart():
    assert products("llama", LORA, "none") == products("llama", LORA, "none", fused=False)
