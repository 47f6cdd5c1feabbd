"""Layers that share a weight (Zamba 2): their adapters, merging, and weights that are offloaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.families.family import find_family

FOLDER = Path(__file__).parents[1] / "references"
PLAIN = QuantConfig(scheme="none")
SHARED = "model.layers.2.shared_transformer.self_attn.q_proj"


def base_of(folder, case="zamba2"):
    recorded = np.load(FOLDER / f"{case}.npz")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(recorded["config"]))
    save_file(weights(json.loads(str(recorded["shapes"])), 0.0), folder / "model.safetensors")
    return folder


@pytest.mark.quick
def test_which_weights_are_shared():
    config = json.loads(str(np.load(FOLDER / "zamba2-turns.npz")["config"]))
    of = find_family(config).read(config)
    layers = {name.split(".")[2] for name in of.shared_linears}
    assert layers == {"0"}  # whose block is used again by layer 2; that of layer 1 is not
    assert len(of.shared_linears) == 6


@pytest.mark.full
def test_an_adapter_on_a_shared_weight_is_not_merged(device, tmp_path):
    base = base_of(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules="all-linear")
    model = QLoRAModel.from_pretrained(base, lora, PLAIN, "float32", device)
    model.load_adapter(adapter({n: a.shape for n, a in model.adapter_state_dict().items()}))
    model.save_adapter(tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    # PEFT would take layers of the decoder for modules that are called by a number.
    assert "0" not in named and any(name.endswith("_adapter_list.1.0") for name in named)
    with pytest.raises(UnsupportedModelError, match="whose weight other layers also use"):
        merge(base, tmp_path / "adapter", tmp_path / "merged", base="original", quant=PLAIN)


@pytest.mark.quick
def test_an_initialization_does_not_change_a_shared_weight(device, tmp_path):
    lora = LoraConfig(r=2, target_modules=[SHARED], init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="layers share"):
        QLoRAModel.from_pretrained(base_of(tmp_path), lora, PLAIN, "float32", device)


@pytest.mark.full
def test_recomputed_and_trained_embeddings(device, tmp_path):
    """The embedding has gradients from the first layer and from each shared block."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "in_proj"], modules_to_save=["embed_tokens"])
    base, results = base_of(tmp_path, "zamba2-untied"), []
    for again in (False, True):
        model = QLoRAModel.from_pretrained(
            base, lora, PLAIN, "float32", device, gradient_checkpointing=again
        )
        ids, mask, labels = batch()
        results.append(model.loss_and_grads(ids, labels, mask))
    (loss, kept), (same, made_again) = results
    assert loss == same and all(np.array_equal(kept[name], made_again[name]) for name in kept)
