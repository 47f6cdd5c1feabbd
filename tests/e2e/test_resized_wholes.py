"""Adapters of PEFT's with whole matrices of a vocabulary that was resized."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from e2e.tiny import CONFIG, VOCAB, weights, write_model, write_weights
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting.merge import merge

ROWS = VOCAB + 6
IDS = np.random.default_rng(3).integers(0, ROWS, (2, 9))
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
SETTINGS = {
    "peft_type": "LORA", "r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def place(request, tmp_path_factory):
    """A base, the same one with a larger vocabulary, and a plain adapter of both."""
    tied = request.param
    path, random = tmp_path_factory.mktemp("resized"), np.random.default_rng(5)
    write_model(path / "base", tie_word_embeddings=tied)
    write_model(path / "larger", tie_word_embeddings=tied, vocab_size=ROWS)
    config = {**CONFIG, "tie_word_embeddings": tied}
    own, ends = weights(config), weights({**config, "vocab_size": ROWS}, seed=9)
    ends = {name: array for name, array in ends.items() if array.shape[0] == ROWS}
    write_weights(path / "base", own)
    write_weights(path / "larger", own | ends)
    pairs = {}
    for layer in range(2):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            rows, columns = own[f"model.layers.{layer}.{name}.weight"].shape
            where = f"base_model.model.model.layers.{layer}.{name}"
            for leaf, shape in (("lora_A", (3, columns)), ("lora_B", (rows, 3))):
                drawn = 0.3 * random.standard_normal(shape)
                pairs[f"{where}.{leaf}.weight"] = drawn.astype(np.float32)
    written(path / "plain", pairs, {})
    wholes, copies = {}, {}
    for end in (EMBEDDING, HEAD):  # of tied ones PEFT writes both
        matrix = ends.get(f"{end}.weight", ends[f"{EMBEDDING}.weight"])
        wholes[f"base_model.model.{end}.weight"] = matrix
        copies[f"base_model.model.{end}.modules_to_save.weight"] = matrix
        copies[f"base_model.model.{end}.original_module.weight"] = -matrix
    saved = {"modules_to_save": ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]}
    saved |= {"ensure_weight_tying": True} if tied else {}
    written(path / "adapter", pairs | wholes | copies, saved)
    return path


def written(folder, tensors, settings):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))


def logits(base, adapter, ids=IDS):
    plain = QuantConfig(scheme="none")
    with QLoRAModel.from_pretrained(base, None, plain, "float32", adapter=adapter) as model:
        return model.logits(ids)


def test_the_matrices_are_those_of_the_larger_base(place, tmp_path):
    exact = logits(place / "larger", place / "plain")
    assert exact.shape[-1] == ROWS
    assert np.array_equal(logits(place / "base", place / "adapter"), exact)
    merge(place / "base", place / "adapter", tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored[f"{EMBEDDING}.weight"].shape[0] == ROWS
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == ROWS
    assert np.abs(logits(tmp_path / "merged", None) - exact).max() < 1e-5


def test_it_is_saved_as_it_was(place, tmp_path):
    with QLoRAModel.from_pretrained(
        place / "base", quant=QuantConfig(scheme="none"), adapter=place / "adapter"
    ) as model:
        model.save_adapter(tmp_path / "again")
    own, again = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (place / "adapter", tmp_path / "again")
    )
    assert all(np.array_equal(own[name], array) for name, array in again.items())
    assert {name for name in own if name not in again} == {
        name for name in own if "modules_to_save" in name or "original_module" in name
    }


@pytest.mark.quick
def test_one_of_both_alone_is_refused(place, tmp_path):
    tensors = load_file(place / "adapter" / "adapter_model.safetensors")
    one = {name: array for name, array in tensors.items() if EMBEDDING not in name}
    written(tmp_path, one, {"modules_to_save": ["lm_head"], "ensure_weight_tying": True})
    with pytest.raises(CheckpointError, match=f"base has {VOCAB} .* only lm_head with {ROWS} rows"):
        logits(place / "base", tmp_path)
    written(tmp_path, tensors, {"modules_to_save": ["embed_tokens"]})
    with pytest.raises(UnsupportedModelError, match="whole lm_head, but adapter_config"):
        logits(place / "base", tmp_path)
