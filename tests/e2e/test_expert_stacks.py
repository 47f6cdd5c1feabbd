"""A mixture whose files hold a layer's experts together is the same model."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import load_file, save_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.exporting.folders import quantize_folder
from qlora_wgpu.exporting.merge import merge

pytestmark = pytest.mark.quick

RECORDED = Path(__file__).parents[1] / "references/qwen3_moe-experts.npz"
PLAIN = QuantConfig(scheme="none")


def stacked(tensors):
    """The tensors as transformers keeps them: gate above up of all experts, and all downs."""
    kept = {name: array for name, array in tensors.items() if ".experts." not in name}
    for at in sorted({name.partition("experts.")[0] for name in set(tensors) - set(kept)}):
        own = (name for name in tensors if name.startswith(f"{at}experts."))
        count = sum(name.endswith(".down_proj.weight") for name in own)
        for name, leaves in (("gate_up", ("gate", "up")), ("down", ("down",))):
            experts = [
                np.concatenate([tensors[f"{at}experts.{i}.{leaf}_proj.weight"] for leaf in leaves])
                for i in range(count)
            ]
            kept[f"{at}experts.{name}_proj"] = np.stack(experts)
    return kept


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model twice: its experts by themselves, and together."""
    place, recorded = tmp_path_factory.mktemp("stacks"), np.load(RECORDED)
    tensors = weights(json.loads(str(recorded["shapes"])), 0.0)
    for name, held in (("apart", tensors), ("together", stacked(tensors))):
        (place / name).mkdir()
        (place / name / "config.json").write_text(str(recorded["config"]))
        save_file(held, place / name / "model.safetensors")
    return place


def opened(folder, device, quant=PLAIN):
    model = QLoRAModel.from_pretrained(folder, LoraConfig(r=4), quant, "float32", device)
    parts = model.adapter.split(model.adapter.initial(0))
    model.load_adapter(adapter({name: array.shape for name, array in parts.items()}))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "nf4"])
def test_the_same_bits(device, folders, scheme):
    models = [
        opened(folders / n, device, QuantConfig(scheme=scheme)) for n in ("apart", "together")
    ]
    apart, together = (model.logits(*batch()[:2]) for model in models)
    assert np.array_equal(apart, together)


@pytest.mark.parametrize("base", ["original", "dequantized"])
def test_merging_keeps_them_together(device, folders, tmp_path, base):
    lora = LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"])
    model = QLoRAModel.from_pretrained(folders / "apart", lora, PLAIN, "float32", device)
    parts = model.adapter.split(model.adapter.initial(0))
    assert any(".experts.3.gate_proj." in name for name in parts)
    model.load_adapter(adapter({name: array.shape for name, array in parts.items()}))
    model.save_adapter(tmp_path / "adapter")
    merged = {}
    for name in ("apart", "together"):
        merge(
            folders / name, tmp_path / "adapter", tmp_path / name, base=base,
            quant=QuantConfig(scheme="nf4"),
        )  # fmt: skip
        merged[name] = load_file(tmp_path / name / "model.safetensors")
    expected = stacked(merged["apart"])
    assert set(merged["together"]) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(merged["together"][name], array), name


def test_four_bits(folders, tmp_path):
    for name in ("apart", "together"):
        quantize_folder(folders / name, tmp_path / name, experts=True)
    files = [load_file(tmp_path / n / "model.safetensors") for n in ("apart", "together")]
    assert set(files[0]) == set(files[1])
    assert all(np.array_equal(array, files[1][name]) for name, array in files[0].items())
