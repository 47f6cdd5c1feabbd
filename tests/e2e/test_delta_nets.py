"""Models of delta nets and Mamba 2: samples apart, names of published files, generated text."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import VOCAB, adapter, batch, weights
from safetensors.numpy import save_file
from support.grown_texts import grown, log_probabilities

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.model.pretrained import Pretrained

FOLDER = Path(__file__).parents[1] / "references"
LENGTHS = (70, 3, 1, 25)  # of samples in a row: chunks end within them, and they within chunks


def recorded(case):
    file = np.load(FOLDER / f"{case}.npz")
    shapes = json.loads(str(file["shapes"]))
    return file, json.loads(str(file["config"])), weights(shapes, float(file["norm_offset"]))


def opened(case, folder, device, dtype="float32"):
    _, config, tensors = recorded(case)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    save_file(tensors, folder / "model.safetensors")
    lora, quant = LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none")
    model = QLoRAModel.from_pretrained(folder, lora, quant, dtype, device)
    model.load_adapter(adapter({n: a.shape for n, a in model.adapter_state_dict().items()}))
    return model


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "qwen3_5",
        "qwen3_next-experts",
        "bamba",
        "falcon_h1",
        "granite4-mamba-experts",
        "nemotron_h-experts",
        "zamba2",
    ],
)
def test_packed_samples_are_apart(device, tmp_path, case):
    """State and convolution begin anew with each; transformers' own packing is not asked."""
    model = opened(case, tmp_path, device)
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, VOCAB, n) for n in LENGTHS]
    row, mask = np.zeros((1, 112), int), np.zeros((1, 112), int)
    row[0, : sum(LENGTHS)] = np.concatenate(ids)
    mask[0, : sum(LENGTHS)] = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    together = model.logits(row, mask)[0]
    labels = np.where(mask > 0, row, -100)
    loss, gradients = model.loss_and_grads(row, labels, mask)
    alone, counts, begin = dict.fromkeys(gradients, 0.0), [n - 1 for n in LENGTHS], 0
    total = 0.0
    for sample, count in zip(ids, counts, strict=True):
        own = model.logits(sample[None])[0]
        part = together[begin : begin + len(sample)]
        assert np.abs(part - own).max() <= 1e-5 * np.abs(own).max()
        begin += len(sample)
        one, grads = model.loss_and_grads(sample[None], sample[None])
        total += count * one
        alone = {name: alone[name] + count * grads[name] for name in alone}
    assert abs(loss - total / sum(counts)) <= 5e-6
    for name, gradient in gradients.items():
        error = np.linalg.norm(gradient - alone[name] / sum(counts)) / np.linalg.norm(gradient)
        assert error <= 2e-5, (name, error)  # float32 sums in another order
    leaking, _ = model.loss_and_grads(row, labels, np.minimum(mask, 1))
    assert abs(leaking - loss) > 1e-3


@pytest.mark.cover(case=["qwen3_5"])
@pytest.mark.parametrize(
    "case",
    [
        "qwen3_5",
        "bamba",
        "falcon_h1",
        "granite4-mamba-experts",
        "nemotron_h-experts",
        "zamba2",
    ],
)
def test_a_text_grows_beyond_a_chunk(device, tmp_path, case):
    model = opened(case, tmp_path, device)
    prompt = np.random.default_rng(4).integers(0, VOCAB, 61).tolist()
    ids, steps = grown(model, prompt, 15, 96)
    expected = model.logits([prompt + ids])[0, 60:-1]
    apart = np.abs(steps - log_probabilities(expected)).max()
    assert apart <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "model_type"), [("qwen3_5", "qwen3_5"), ("qwen3_5_moe-experts", "qwen3_5_moe")]
)
def test_published_files(device, tmp_path, case, model_type):
    """Text beside images and layers that predict further tokens, under other names."""
    file, config, tensors = recorded(case)
    whole = {"model_type": model_type, "text_config": config, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = {n.replace("model.", "model.language_model.", 1): a for n, a in tensors.items()}
    more = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.norm.weight")
    zeros = dict.fromkeys(more, np.zeros((3, 3), np.float32))
    save_file({**stored, **zeros}, tmp_path / "model.safetensors")
    notes = Pretrained.open(tmp_path).notes
    assert any("2 tensors" in note and "mtp.*" in note for note in notes)
    lora, quant = LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none")
    model = QLoRAModel.from_pretrained(tmp_path, lora, quant, "float32", device)
    ids, mask, _ = batch()
    expected, seen = file["logits"], mask == 1
    worst = np.abs(model.logits(ids, mask)[..., :40] - expected)[seen].max()
    assert worst <= 1e-5 * np.abs(expected[seen]).max()
    names = set(model.adapter_state_dict())  # as AutoModelForImageTextToText and PEFT call them
    assert any(".linear_attn.in_proj_qkv.lora_A." in name for name in names)
    assert names <= {
        n[5:].replace(".layers.", ".language_model.layers.", 1)
        for n in file.files
        if n.startswith("grad:")
    }
