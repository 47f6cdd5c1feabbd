"""Every family against recorded PyTorch: odd shapes, padding, a row with nothing to learn."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file
from support.recorded_models import (
    check_gradients,
    check_logits,
    check_normalizers,
    check_training,
    recorded_base,
    start,
)

from e2e.test_family_types import shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, register_family
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import family, llama, parts
from qlora_wgpu.families.family import known_families

FOLDER = Path(__file__).parents[1] / "references"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if "config" in np.load(path).files)
# Kinds of rotation differ by a table alone.
FORWARDS = [
    c for c in CASES if ("rope" not in c and not c.startswith("llama-")) or c == "llama-dora"
]


def lora(recorded):
    names = [n for n in recorded.files if n.startswith("grad:")]
    modules = {n.split(".")[-3] for n in names if n.endswith(".weight")}
    dora = any(n.endswith("magnitude_vector") for n in names)
    rank = next(len(recorded[n]) for n in names if n.endswith("lora_A.weight"))
    return LoraConfig(r=rank, lora_alpha=10, target_modules=sorted(modules), use_dora=dora)


def quant(case):
    """How a case's linear layers are stored: what was recorded of 4 bits knows their bits."""
    return QuantConfig(scheme="nf4" if case.endswith("-nf4") else "none")


IMAGES = {"gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe"}


def test_every_family_is_recorded():
    types = {json.loads(str(np.load(FOLDER / f"{c}.npz")["config"]))["model_type"] for c in CASES}
    # A text part under the name of a model with images is the same forward.
    assert types | IMAGES >= set(known_families())


@pytest.mark.quick(case=["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("case", CASES)
def test_against_pytorch(device, tmp_path, case):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    model = QLoRAModel.from_pretrained(folder, lora(recorded), quant(case), "float32", device)
    ids, mask, labels = batch()
    logits = model.logits(ids, mask)
    check_logits(logits, recorded, mask)
    check_normalizers(logits, recorded, mask)
    model.load_adapter(start(recorded))
    check_gradients(model, recorded, ids, mask, labels)
    check_training(model, folder, recorded, ids, mask, labels, tmp_path / "run")


@pytest.mark.parametrize("case", ["cohere-qknorm", "stablelm-qknorm", "gpt_oss-experts"])
def test_weights_of_parts_are_read_back_as_they_are_stored(device, tmp_path, case):
    """Those of heads, and of experts with biases."""
    config = json.loads(str(np.load(FOLDER / f"{case}.npz")["config"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = weights(shapes(config)[0], 0.0)
    save_file(tensors, tmp_path / "model.safetensors")
    quant = QuantConfig(scheme="none")
    model = QLoRAModel.from_pretrained(tmp_path, None, quant, "float32", device)
    state = model.base_state_dict()
    assert set(state) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(state[name], array)


def test_the_text_part_of_a_model_with_images(device, tmp_path):
    recorded = np.load(FOLDER / "gemma3.npz")
    shapes = json.loads(str(recorded["shapes"]))
    tensors = weights(shapes, float(recorded["norm_offset"]))
    text = json.loads(str(recorded["config"]))
    ids, mask, _ = batch()
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix
        folder.mkdir()
        whole = {"model_type": "gemma3", "text_config": text}
        (folder / "config.json").write_text(json.dumps(whole))
        renamed = {prefix + name.removeprefix("model."): array for name, array in tensors.items()}
        save_file({**renamed, "vision_tower.x": np.zeros(3)}, folder / "model.safetensors")
        model = QLoRAModel.from_pretrained(
            folder, LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none"), "float32", device
        )
        logits = model.logits(ids, mask)
        worst = np.abs(logits[..., :40] - recorded["logits"])[mask == 1].max()
        assert worst <= 1e-5 * np.abs(recorded["logits"][mask == 1]).max()
        name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
        assert name in model.adapter_state_dict()


def test_a_family_of_ones_own(device, tmp_path, monkeypatch):
    recorded = np.load(FOLDER / "llama.npz")
    monkeypatch.setattr(family, "_REGISTERED", {})
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(str(recorded["config"])), "model_type": "my-llama"})
    )
    save_file(weights(json.loads(str(recorded["shapes"])), 0.0), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="my-llama"):
        QLoRAModel.from_pretrained(tmp_path, device=device)
    register_family("my-llama", parts.DecoderFamily(llama.compose))
    assert "my-llama" in known_families()
    model = QLoRAModel.from_pretrained(
        tmp_path, LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none"), "float32", device
    )
    ids, mask, _ = batch()
    logits = model.logits(ids, mask)
    assert np.abs(logits[..., :40] - recorded["logits"])[mask == 1].max() <= 1e-4


@pytest.mark.cover(case=["llama-dora", "gemma3", "qwen3_moe-experts", "qwen3_5"])
@pytest.mark.parametrize("case", FORWARDS)
def test_quantized_and_recomputed(device, tmp_path, case):
    """NF4 and bfloat16 stay near the recorded loss; recomputing layers changes no bit."""
    recorded = np.load(FOLDER / f"{case}.npz")
    (tmp_path / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), tmp_path / "model.safetensors")
    results = []
    for again in (False, True):
        model = QLoRAModel.from_pretrained(
            tmp_path, lora(recorded), device=device, gradient_checkpointing=again
        )
        names = {n: a.shape for n, a in model.adapter_state_dict().items()}
        model.load_adapter(adapter(names))
        results.append(model.loss_and_grads(*batch()[::2], batch()[1]))
    (loss, kept), (same, made_again) = results
    # Four bits a weight move the loss of random weights by a few per cent.
    assert abs(loss / recorded["losses"][0] - 1) <= 0.1 and loss == same
    assert all(np.array_equal(array, made_again[name]) for name, array in kept.items())
