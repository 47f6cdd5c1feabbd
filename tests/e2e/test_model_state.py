"""Weights and adapters as the Python API hands them out and takes them back."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from e2e.biased_model import EXACT, LORA, biased_folder, opened, sample
from e2e.numpy_llama import llama_logits
from e2e.tiny import weights, write_model, write_weights
from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.errors import (
    CheckpointError,
    ConfigError,
)

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return biased_folder(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def model(folder, device):
    return opened(folder, device)


STORED = {
    "float32": {},
    "bfloat16": {"store": "bfloat16"},
    "shards": {"shards": 3},
    "bfloat16 shards": {"store": "bfloat16", "shards": 2},
    "float16": {"store": "float16"},
    "head's name": {},
    "both names": {},
}


@pytest.mark.parametrize("form", list(STORED))
def test_storage_forms_give_one_model(tmp_path, device, form):
    ids, _ = sample()
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    # Of few bits, so that every form holds the same numbers.
    tensors = {n: np.round(a * 128) / np.float32(128) for n, a in weights(config).items()}
    write_weights(folder, tensors)
    expected = opened(folder, device).logits(ids)
    (folder / "model.safetensors").unlink()
    embedding = tensors["model.embed_tokens.weight"]
    if form == "head's name":
        del tensors["model.embed_tokens.weight"]
    if "name" in form:
        tensors["lm_head.weight"] = embedding
    write_weights(folder, tensors, **STORED[form])
    assert np.array_equal(opened(folder, device).logits(ids), expected)


def test_base_state_dict_is_what_was_stored(folder, model):
    stored = load_file(folder / "model.safetensors")
    state = model.base_state_dict()
    assert set(state) == set(stored)
    for name, array in stored.items():
        assert np.array_equal(np.squeeze(state[name]), array), name


def test_adapter_round_trip_and_names(tmp_path, model, folder, device):
    model.save_adapter(tmp_path / "a")
    state = model.adapter_state_dict()
    prefix = "base_model.model.model.layers.1.self_attn.k_proj"
    assert state[f"{prefix}.lora_A.weight"].shape == (5, 36)
    assert state[f"{prefix}.lora_B.weight"].shape == (20, 5)
    assert len(state) == 2 * 7 * 2
    again = QLoRAModel.from_pretrained(folder, LORA, device=device, **EXACT)
    again.load_adapter(tmp_path / "a")
    for name, array in again.adapter_state_dict().items():
        assert np.array_equal(array, state[name])
    for key, value in (("lora_alpha", 11), ("r", 4), ("use_rslora", True)):
        lora = LoraConfig(**{"r": 5, "lora_alpha": 10, key: value})
        other = QLoRAModel.from_pretrained(folder, lora, device=device, **EXACT)
        before = other.adapter_state_dict()
        with pytest.raises(CheckpointError, match=key):
            other.load_adapter(tmp_path / "a")
        assert all(np.array_equal(a, before[n]) for n, a in other.adapter_state_dict().items())


def test_an_adapter_given_as_a_dictionary_is_checked(model):
    state = model.adapter_state_dict()
    name = next(iter(state))
    unknown = name.replace("layers.0", "layers.9")
    for change, message in (
        ({name: state[name][:, :-1]}, "has shape"),
        ({name: np.full_like(state[name], np.nan)}, "contains NaN"),
        ({unknown: state[name]}, "is unknown"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model.load_adapter({**state, **change})
    with pytest.raises(CheckpointError, match="is missing"):
        model.load_adapter({n: a for n, a in state.items() if n != name})
    assert all(np.array_equal(a, state[n]) for n, a in model.adapter_state_dict().items())


def test_a_fresh_adapter_changes_nothing(folder, device):
    ids, labels = sample()
    config = json.loads((folder / "config.json").read_text())
    fresh = QLoRAModel.from_pretrained(folder, LORA, device=device, seed=3, **EXACT)
    expected = llama_logits(config, load_file(folder / "model.safetensors"), ids)
    assert np.abs(fresh.logits(ids) - expected).max() < 2e-5 * np.abs(expected).max()
    state = fresh.adapter_state_dict()
    for name, array in state.items():
        if "lora_B" in name:
            assert not array.any()
        else:
            bound = 1 / np.sqrt(array.shape[1])  # Kaiming's with a = sqrt(5)
            assert 0.7 * bound < np.abs(array).max() <= bound
            assert abs(array.mean()) < 0.2 * bound
    _, gradients = fresh.loss_and_grads(ids, labels)
    assert all(gradients[n].any() == ("lora_B" in n) for n in state)
    again = QLoRAModel.from_pretrained(folder, LORA, device=device, seed=4, **EXACT)
    assert not np.array_equal(
        again.adapter_state_dict()[next(iter(state))], next(iter(state.values()))
    )


@pytest.mark.slow
def test_target_modules(folder, device):
    only = QLoRAModel.from_pretrained(
        folder, LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"]), device=device, **EXACT
    )
    names = set(only.adapter_state_dict())
    assert len(names) == 4 and all(".v_proj." in n for n in names)
    loss, gradients = only.loss_and_grads(*sample())
    assert set(gradients) == names and loss > 0
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        QLoRAModel.from_pretrained(
            folder, LoraConfig(target_modules=["q_prj"]), device=device, **EXACT
        )
