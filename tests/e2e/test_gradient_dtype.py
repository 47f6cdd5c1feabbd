"""A gradient kept in bfloat16: each micro-batch's is made in float32, added to it and rounded."""

import json

import numpy as np
import pytest
from references.seeded import weights
from references.sized import family_configs, with_head_dim
from safetensors.numpy import save_file

from e2e.test_family_types import normalize, shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16
from qlora_wgpu.cluster.blocks import BlockResult
from qlora_wgpu.cluster.owner import GradientSum
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.training.optimizer import Optimizer

# Products of several layers, and magnitudes; experts, whose gradients lie among each other.
CASES = {
    "llama": (GPU_PROFILE, LoraConfig(r=8, lora_alpha=16)),
    "qwen2": (None, LoraConfig(r=5, lora_alpha=10, use_dora=True)),
    "qwen3_moe": (None, LoraConfig(r=3, lora_alpha=6, lora_dropout=0.1,
                                   target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])),
}  # fmt: skip


def rounded(values):
    return from_bfloat16(to_bfloat16(values))


class Training:
    """A model whose gradient has a type, and its micro-batches."""

    def __init__(self, folder, profile, lora, dtype, offload=RESIDENT):
        device = Device()
        device.profile = profile or device.profile
        layout = device_layout(
            Pretrained.open(folder), lora, QuantConfig(scheme="none"), "bfloat16", device,
            offload, AdapterDtypes(gradient=dtype),
        )  # fmt: skip
        options = TrainingOptions(checkpointing=True)
        self.planned = layout.memory(options.step("train", 2, 12))["gradients"]
        self.model = QLoRAModel(layout, device, options=options)
        rng = np.random.default_rng(2)
        flat = rng.standard_normal(layout.adapter.length).astype(np.float32) * 0.1
        self.model.write_parameters(layout.adapter.join(layout.adapter.split(flat)))
        self.ids = rng.integers(4, 80, (2, 2, 12))
        self.model.zero_gradient()

    def add(self, block):
        ids = self.ids[block]
        checked = self.model.checked(ids, ids, np.ones_like(ids))
        self.model.accumulate(*checked, dropout_key=block)

    @property
    def gradient(self):
        return self.model.read_flat(self.model.adapter.gradient)


@pytest.mark.cover(family=["llama"])
@pytest.mark.parametrize("family", CASES)
def test_micro_batches_are_added_and_rounded(tmp_path, family, monkeypatch):
    config = with_head_dim(family_configs()[family], 24) | {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(normalize(weights(*shapes(config))), tmp_path / "model.safetensors")
    exact = Training(tmp_path, *CASES[family], "float32")
    expected, parts = np.float32(0), []
    for block in (0, 1):
        exact.model.zero_gradient()
        exact.add(block)
        parts.append(exact.gradient)
        expected = rounded(expected + parts[-1])
    halves = Training(tmp_path, *CASES[family], "bfloat16")
    halves.add(0)
    halves.add(1)
    np.testing.assert_array_equal(halves.gradient, expected)
    assert np.count_nonzero(expected) > 100 and halves.planned == exact.planned / 2
    held = halves.model.device.memory.by_kind["gradients"]
    assert held == halves.planned

    if family != "llama":
        return
    # The owner of a cluster adds what workers send as one device does.
    halves.model.zero_gradient()
    total = GradientSum(halves.model)
    for part in parts:
        total.add(BlockResult(1.0, 5.0, 0, 0.0, part))
    np.testing.assert_array_equal(halves.gradient, expected)
    # The update is that of the same numbers in float32, with moments on the host, too.
    monkeypatch.setattr("qlora_wgpu.ops.moments._PART", 1 << 10)
    away = Training(tmp_path, *CASES[family], "bfloat16", OffloadPlan(host_moments=True))
    updated = []
    for training in (exact, halves, away):
        model = training.model
        model.write_flat(model.adapter.gradient, expected)
        model.write_flat(model.stats, np.float32([9, 5, 0, 0]))
        Optimizer(model, OptimConfig(), 2).step(1)
        assert not training.gradient.any()
        updated.append(model.read_flat(model.adapter.parameters))
    np.testing.assert_array_equal(updated[1], updated[0])
    np.testing.assert_array_equal(updated[2], updated[0])
