"""An adapter that no buffer holds lies in several, and every bit is that of one."""

from functools import partial

import numpy as np
import pytest

from e2e.test_residency import MEASURES, RESIDENT, trained, write_family
from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.cluster.blocks import BlockResult
from qlora_wgpu.cluster.owner import GradientSum
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.training.checkpoints import RunState, load_checkpoint, save_checkpoint
from qlora_wgpu.training.optimizer import Optimizer

LIMIT = 24_000  # bytes


@pytest.fixture
def limited(monkeypatch):
    """Vectors in as many pieces as a small limit demands, for which weights have none."""
    monkeypatch.setattr("qlora_wgpu.ops.moments._PART", 1 << 10)
    most = []

    def laid_out(architecture, config, forms=FLOAT32, max_binding=None):
        linears, experts = architecture.linears, architecture.experts
        adapter = AdapterLayout(config, linears, experts, forms, max_binding=LIMIT)
        most.append(len(adapter.parameters.shards))
        return adapter

    return partial(monkeypatch.setattr, AdapterLayout, "of", laid_out), most


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


CASES = {
    "adamw": {},
    "8 bits": {"optimizer": "adamw_8bit", "lora": LoraConfig(r=72)},
    "on the host": {"offload": MEASURES["moments"]},
    "8 bits on the host": {
        "optimizer": "adamw_8bit", "offload": MEASURES["moments"], "lora": LoraConfig(r=72),
    },
    "dora": {"lora": LoraConfig(r=16, use_dora=True)},
    "lion": {"optimizer": "lion"},
    "lion on the host": {"optimizer": "lion", "offload": MEASURES["moments"]},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_training(device, folder, limited, case):
    given = {"lora": LoraConfig(r=16, lora_dropout=0.1), "offload": RESIDENT} | CASES[case]
    offload = given.pop("offload")
    expected, loss, kinds, _ = trained(device, folder, offload, **given)
    cut, pieces = limited
    cut()
    got, other_loss, other_kinds, planned = trained(device, folder, offload, **given)
    assert min(pieces) >= 3
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert other_loss == loss and expected.view(np.uint32).any()
    for kind in ("adapter", "gradients", "optimizer"):
        assert other_kinds[kind] == kinds[kind] == planned[kind]


@pytest.mark.full
def test_experts(device, tmp_path, limited):
    write_family(tmp_path, "qwen3_moe")
    lora = LoraConfig(r=12, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    expected, loss, *_ = trained(device, tmp_path, RESIDENT, lora=lora, steps=2)
    cut, pieces = limited
    cut()
    got, other_loss, *_ = trained(device, tmp_path, RESIDENT, lora=lora, steps=2)
    assert min(pieces) >= 3 and other_loss == loss
    np.testing.assert_array_equal(got, expected)


@pytest.mark.quick
@pytest.mark.parametrize("gradient", ["float32", "bfloat16"])
def test_a_cluster_s_gradients(device, folder, limited, gradient):
    cut, _ = limited
    found = []
    for number in range(2):
        if number:
            cut()
        layout = device_layout(
            Pretrained.open(folder), LoraConfig(r=16), QuantConfig(), "bfloat16", device,
            forms=AdapterDtypes(gradient=gradient),
        )  # fmt: skip
        model = QLoRAModel(layout, device)
        model.zero_gradient()
        total, rng = GradientSum(model), np.random.default_rng(4)
        for _ in range(2):
            sent = rng.standard_normal(layout.adapter.length).astype(np.float32)
            total.add(BlockResult(1.0, 2.0, 0, 0.0, sent))
        found.append(model.read_flat(layout.adapter.gradient).copy())
    assert np.abs(found[0]).max() > 1
    np.testing.assert_array_equal(*found)


def test_a_checkpoint_goes_on_in_pieces(device, folder, tmp_path, limited):
    def steps(first, last, resumed=None, saved=None):
        layout = device_layout(
            Pretrained.open(folder), LoraConfig(r=16), QuantConfig(), "bfloat16", device,
            forms=AdapterDtypes(gradient="bfloat16"),
        )  # fmt: skip
        model = QLoRAModel(layout, device)
        optimizer = Optimizer(model, OptimConfig(learning_rate=1e-2), 5)
        if resumed is not None:
            load_checkpoint(resumed, model, lambda manifest: None)
        for step in range(first, last + 1):
            ids = np.random.default_rng(step).integers(4, 80, (2, 24))
            model.zero_stats()
            model.accumulate(*model.checked(ids, ids, np.ones_like(ids)))
            optimizer.step(step)
        model.save_adapter(tmp_path / f"after {last}")
        if saved is not None:
            save_checkpoint(saved, model, RunState(step=last), {})
        return (tmp_path / f"after {last}" / "adapter_model.safetensors").read_bytes()

    checkpoint = tmp_path / "step-2"
    steps(1, 2, saved=checkpoint)
    expected = steps(3, 5, resumed=checkpoint)
    cut, pieces = limited
    cut()
    assert steps(1, 5) == expected and min(pieces) >= 3
    assert steps(3, 5, resumed=checkpoint) == expected
