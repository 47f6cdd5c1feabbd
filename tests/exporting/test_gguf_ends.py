"""Whole GGUF files of models whose embedding or head an adapter changes, read back."""

import json

import numpy as np
import pytest
from e2e.tiny import VOCAB, write_model
from references.seeded import adapter as seeded

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.exporting.merge import MergedWeights

PLAIN = QuantConfig(scheme="none")
IDS = np.array([[0, 5, 40, 3, VOCAB - 1, 9, 5]])
VOCABULARY = {"general.name": "tiny", "tokenizer.ggml.model": "none"}
BOTH = ["lm_head", "embed_tokens"]


def written(merged, path):
    gguf_model(merged, find_file_type("f32"), lambda size: VOCABULARY).write(path, lambda _: None)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "lora", "untied"),
    [
        (True, {"target_modules": ["q_proj", "lm_head"]}, True),
        (True, {"target_modules": ["q_proj", "embed_tokens"]}, True),
        (True, {"target_modules": ["q_proj", *BOTH]}, True),
        (False, {"target_modules": ["q_proj", *BOTH]}, False),
        (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
        (False, {"modules_to_save": BOTH}, False),
        (False, {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]}, False),
    ],
)
def test_a_file_is_the_merged_model(device, tmp_path, tied, lora, untied):
    base = write_model(tmp_path / "base", tie_word_embeddings=tied)
    config = LoraConfig(r=3, **lora)
    with QLoRAModel.from_pretrained(base, config, PLAIN, "float32", device) as model:
        shapes = {name: array.shape for name, array in model.adapter_state_dict().items()}
        model.load_adapter(seeded(shapes))
        expected = model.logits(IDS)
        model.save_adapter(tmp_path / "adapter")
    merged = MergedWeights(base, tmp_path / "adapter")
    assert bool(merged.untied) == untied
    path = written(merged, tmp_path / "whole.gguf")
    with QLoRAModel.from_pretrained(path, None, PLAIN, "float32", device) as model:
        assert model.architecture.tied == (tied and not untied)
        got = model.logits(IDS)
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()  # another order of sums
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"] is tied


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], BOTH])
def test_a_file_as_the_base_gets_a_head_of_its_own(device, tmp_path, targets):
    folder = write_model(tmp_path / "folder", tie_word_embeddings=True)
    nothing = LoraConfig(r=1, target_modules=["q_proj"])
    with QLoRAModel.from_pretrained(folder, nothing, PLAIN, "float32", device) as model:
        model.save_adapter(tmp_path / "nothing")
    base = written(MergedWeights(folder, tmp_path / "nothing"), tmp_path / "base.gguf")
    config = LoraConfig(r=3, target_modules=["q_proj", *targets])
    with QLoRAModel.from_pretrained(base, config, PLAIN, "float32", device) as model:
        shapes = {name: array.shape for name, array in model.adapter_state_dict().items()}
        model.load_adapter(seeded(shapes))
        expected = model.logits(IDS)
        model.save_adapter(tmp_path / "adapter")
    path = written(MergedWeights(base, tmp_path / "adapter"), tmp_path / "whole.gguf")
    with QLoRAModel.from_pretrained(path, None, PLAIN, "float32", device) as model:
        assert not model.architecture.tied
        got = model.logits(IDS)
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()  # another order of sums
