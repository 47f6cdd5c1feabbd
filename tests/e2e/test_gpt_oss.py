"""gpt-oss: its experts in MXFP4 train as they are, and texts go on as a whole one does."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file
from support.grown_texts import grown, log_probabilities

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.exporting import merge
from qlora_wgpu.families.family import find_family
from qlora_wgpu.model.pretrained import QuantizationPolicy

CONFIG = {
    "model_type": "gpt_oss", "vocab_size": 331, "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7, "swiglu_limit": 1.5,
    "dtype": "bfloat16",
}  # fmt: skip
# As the published ones have it.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
TESTS = Path(__file__).parents[1]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", *EXPERTS])


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with experts in MXFP4, and one of what they stand for, as transformers has it."""
    place, random = tmp_path_factory.mktemp("gpt_oss"), np.random.default_rng(7)
    architecture = find_family(CONFIG).read(CONFIG)
    hidden, inner, count = 64, 32, 3
    shapes = {"model.embed_tokens.weight": (331, hidden), "lm_head.weight": (331, hidden)}
    for spec in architecture.linears:
        shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
        shapes[f"{spec.name}.bias"] = (spec.out_features,)
    shapes |= dict(architecture.norm_shapes) | dict(architecture.router_shapes)
    plain, stored = weights(shapes, 0.0), weights(shapes, 0.0)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        biases = {
            f"{at}gate_up_proj_bias": (count, 2 * inner),
            f"{at}down_proj_bias": (count, hidden),
        }
        for made in (plain, stored):
            made |= weights(biases, 0.0)
        for leaf, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            blocks = random.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
            scales = random.integers(120, 126, (count, rows, columns // 32), np.uint8)
            stored |= {f"{at}{leaf}_proj_blocks": blocks, f"{at}{leaf}_proj_scales": scales}
            numbers = np.stack([values[blocks & 15], values[blocks >> 4]], -1)
            numbers = numbers.reshape(*scales.shape, 32) * np.exp2(scales - 127.0)[..., None]
            whole = numbers.reshape(count, rows, columns).swapaxes(1, 2)
            plain[f"{at}{leaf}_proj"] = whole.astype(np.float32)
    quantized = {**CONFIG, "quantization_config": MXFP4}
    return written(place / "stored", quantized, stored), written(place / "plain", CONFIG, plain)


def opened(folder, device, dtype, scheme):
    model = QLoRAModel.from_pretrained(folder, LORA, QuantConfig(scheme=scheme), dtype, device)
    parts = model.adapter.split(model.adapter.initial(0))
    model.load_adapter(adapter({name: array.shape for name, array in parts.items()}))
    return model


@pytest.mark.cover(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_train_as_they_are(device, folders, dtype):
    """Bit by bit as with experts that are no longer quantized, by MXFP4's own definition."""
    ids, mask, labels = batch()
    got, expected = (
        opened(folder, device, dtype, scheme).loss_and_grads(ids, labels, mask)
        for folder, scheme in zip(folders, ("nf4", "none"), strict=True)
    )
    assert got[0] == expected[0]
    assert set(got[1]) == set(expected[1])
    for name, array in expected[1].items():
        assert np.abs(array).max() > 0
        assert np.array_equal(got[1][name], array), name


@pytest.mark.parametrize("kind", ["stored", "plain"])
def test_merged(device, folders, tmp_path, kind):
    """Experts come together in their tensors again, gate and up in turns."""
    folder = folders[kind == "plain"]
    base, scheme = ("dequantized", "nf4") if kind == "stored" else ("original", "none")
    model = opened(folder, device, "float32", scheme)
    ids, mask, labels = batch()
    expected, _ = model.loss_and_grads(ids, labels, mask)
    model.save_adapter(tmp_path / "adapter")
    config = json.loads((folder / "config.json").read_text())
    if kind == "stored":
        with pytest.raises(UnsupportedModelError, match="original weights are unknown"):
            merge(folder, tmp_path / "adapter", tmp_path / "merged")
    merge(folder, tmp_path / "adapter", tmp_path / "merged", base=base)
    merged = ModelFolder.open(tmp_path / "merged")
    names = set(ModelFolder.open(folders[1]).names())
    assert set(merged.names()) == names and merged.config.get("quantization_config") is None
    dtype = {"stored": "BF16", "plain": "F32"}[kind]
    assert merged["model.layers.1.mlp.experts.gate_up_proj"].stored_dtype == dtype
    assert config["dtype"] == "bfloat16"
    plain = QLoRAModel.from_pretrained(
        tmp_path / "merged", LORA, QuantConfig(scheme="none"), "float32", device
    )
    got, _ = plain.loss_and_grads(ids, labels, mask)  # of an adapter that does nothing yet
    assert abs(got - expected) <= (3e-3 if dtype == "BF16" else 2e-6) * expected


def test_a_text_goes_on_as_the_whole_does(device, folders):
    """Past the window, token by token: sinks, biases and experts beside a cache."""
    model = opened(folders[0], device, "float32", "nf4")
    prompt = np.random.default_rng(3).integers(0, 331, 12).tolist()
    ids, rows = grown(model, prompt, 7, 19)
    whole = model.logits([prompt + ids])[0, 11:-1]
    for row, expected, logits in zip(rows, log_probabilities(whole), whole, strict=True):
        assert np.abs(row - expected).max() <= 2e-5 * np.abs(logits).max()


@pytest.mark.quick
def test_what_the_config_alone_tells_of_forms(folders):
    """Attention, router and head stay in 16 bits; experts are in MXFP4."""
    folder = ModelFolder.open(folders[0])
    with_files = QuantizationPolicy(QuantConfig(), folder)
    planned = QuantizationPolicy(QuantConfig(), None, folder.config)
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.1.up_proj")
    for name in (f"model.layers.1.{name}.weight" for name in names):
        form, expected = planned.of([name], 64), with_files.of([name], 64)
        assert (form and form.name) == (expected and expected.name)
        assert (form is None) == ("self_attn" in name)
