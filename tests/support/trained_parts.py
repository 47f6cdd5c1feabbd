"""What holds of every adapter that trains more than layers' pairs."""

import json

import numpy as np
from safetensors.numpy import load_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, open_adapter
from qlora_wgpu.exporting.merge import merge

IDS = np.array([[0, 5, 40, 3, 82, 9, 5]])
PLAIN = QuantConfig(scheme="none")


def check_merged(place, folder):
    """Merges the run `whole`, which computes and writes the same; the stored tensors."""
    with open_adapter(place / "whole", quant=PLAIN, compute_dtype="float32") as model:
        expected = model.logits(IDS)
        text = model.generate("hello", max_new_tokens=12)
    merge(place / "model", place / "whole/adapter", folder)
    with QLoRAModel.from_pretrained(folder, None, PLAIN, "float32") as model:
        got = model.logits(IDS)
        assert model.generate("hello", max_new_tokens=12) == text
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    return load_file(folder / "model.safetensors")


def check_untied(folder):
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def check_beside_others(place):
    """The run `whole` beside another adapter: each computes what it does alone."""
    with open_adapter(place / "whole", quant=PLAIN) as model:
        expected = model.logits(IDS)
    with QLoRAModel.from_pretrained(place / "model", LoraConfig(r=2), PLAIN) as model:
        before = model.logits(IDS)
        model.load_adapter(place / "whole/adapter", "other")
        model.set_adapter("other")
        assert np.array_equal(model.logits(IDS), expected)
        model.set_adapter("default")
        assert np.array_equal(model.logits(IDS), before)
