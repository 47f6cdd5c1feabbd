"""Runs that train embedding and head whole: what they leave, and what follows."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.packed_runs import packed_run

from e2e.tiny import VOCAB, write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, open_adapter
from qlora_wgpu.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.lora import load_adapter, save_adapter
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout

PLAIN = QuantConfig(scheme="none")
WHOLE = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
BOTH = {"modules_to_save": ["lm_head", "embed_tokens"]}
EMBEDDING, HEAD = (f"base_model.model.{m}.weight" for m in ("model.embed_tokens", "lm_head"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("wholes")
    write_model(path / "model")  # tied
    write_model(path / "untied", tie_word_embeddings=False)
    write_chats(path / "chats.jsonl", rows=16)
    return path


def trained(place, name, model="model", lora=WHOLE, **more):
    return packed_run(place, name, lora, model, **more)


@pytest.fixture(scope="module")
def whole(place):
    return trained(place, "whole")


@pytest.fixture(scope="module")
def both(place):
    return trained(place, "both", "untied", lora=BOTH)


@pytest.mark.parametrize("kind", ["whole", "both"])
def test_every_row_moves_and_the_saved_ones_are_the_trained(place, whole, both, kind):
    saved = load_file(place / kind / "adapter/adapter_model.safetensors")
    base = load_file(place / ("model" if kind == "whole" else "untied") / "model.safetensors")
    for name in (EMBEDDING, HEAD):
        stored = base.get(name.removeprefix("base_model.model."), base["model.embed_tokens.weight"])
        assert saved[name].dtype == np.float32 and saved[name].shape == stored.shape
        moved = np.abs(saved[name] - stored).max(axis=1)
        # Rows that are looked up nowhere have no gradient and stay, but for the decay.
        assert (moved > 1e-3).all() or (kind == "both" and name == EMBEDDING and moved.max() > 1e-3)
    assert np.array_equal(saved[EMBEDDING], saved[HEAD]) == (kind == "whole")


@pytest.mark.parametrize("kind", ["whole", "both"])
def test_it_is_opened_taken_off_and_merged(place, whole, both, kind, tmp_path):
    base = place / ("model" if kind == "whole" else "untied")
    ids = np.array([[0, 5, 40, 3, VOCAB - 1, 9, 5]])
    with QLoRAModel.from_pretrained(base, LoraConfig(r=2), PLAIN, "float32") as model:
        plain = model.logits(ids)
        state = model.base_state_dict()
    with open_adapter(place / kind, quant=PLAIN, compute_dtype="float32") as model:
        expected = model.logits(ids)
        text = model.generate("hello", max_new_tokens=12)
        with model.adapter_off():
            assert np.array_equal(model.logits(ids), plain)
        assert np.array_equal(model.logits(ids), expected)
        own = model.base_state_dict()
        assert all(np.array_equal(own[name], array) for name, array in state.items())
        model.save_adapter(tmp_path / "again")
    first, _ = load_adapter(place / kind / "adapter")
    again, _ = load_adapter(tmp_path / "again")
    assert first.keys() == again.keys() and all(np.array_equal(first[n], again[n]) for n in first)
    merge(base, place / kind / "adapter", tmp_path / "merged")
    with QLoRAModel.from_pretrained(tmp_path / "merged", None, PLAIN, "float32") as model:
        got = model.logits(ids)
        assert model.generate("hello", max_new_tokens=12) == text
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_is_computed_otherwise_is_not_merged(place, whole, both, tmp_path):
    """PEFT leaves a tied head alone without ensure_weight_tying, and trains other modules whole."""
    tensors, config = load_adapter(place / "whole/adapter")
    save_adapter(tmp_path / "two", tensors, replace(config, ensure_weight_tying=False))
    with pytest.raises(ConfigError, match="as PEFT trains without it"):
        merge(place / "model", tmp_path / "two", tmp_path / "merged")
    tensors, config = load_adapter(place / "both/adapter")
    other = EMBEDDING.replace("embed_tokens", "layers.0.mlp.gate_proj")
    saved = replace(config, modules_to_save=["gate_proj"])
    pairs = {n: a for n, a in tensors.items() if n not in (EMBEDDING, HEAD)}
    gate = load_file(place / "untied/model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    save_adapter(tmp_path / "other", pairs | {other: gate}, saved)
    with pytest.raises(ConfigError, match="'gate_proj' is not supported"):
        merge(place / "untied", tmp_path / "other", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_run_goes_on_from_it(place, both):
    trained(
        place, "further", "untied", steps=2, lora={**BOTH, "init_from": str(place / "both/adapter")}
    )
    one, other = (
        load_file(place / n / "adapter/adapter_model.safetensors") for n in ("both", "further")
    )
    assert 0 < np.abs(other[HEAD] - one[HEAD]).max() <= 0.022  # two steps of 0.01 at most


def test_weights_of_rows_count(device, place):
    """Gradients with a factor of each row, whose chunks are computed in a pass of their own."""
    layout = device_layout(
        Pretrained.open(place / "untied"), LoraConfig(r=2, **BOTH), PLAIN, "float32", device
    )
    model = QLoRAModel(layout, device)
    ids = np.random.default_rng(4).integers(0, VOCAB, (2, 12))
    _, plain = model.loss_and_grads(ids, ids)
    objective = replace(model.options.objective, confidence=True)
    model.options = replace(model.options, objective=objective)
    loss, weighted = model.loss_and_grads(ids, ids)
    assert np.isfinite(loss) and weighted[HEAD].any()
    assert np.linalg.norm(weighted[HEAD]) < np.linalg.norm(plain[HEAD])


def test_the_head_does_not_wait_in_host_memory(device, place):
    base = Pretrained.open(place / "untied")
    plain, whole = (
        device_layout(base, LoraConfig(r=2, **lora), PLAIN, "float32", device)
        for lora in ({}, BOTH)
    )
    assert plain.head_options == (False, True) and whole.head_options == (False,)
    assert plain.embedding_bytes and not whole.embedding_bytes
    with pytest.raises(ConfigError, match="cannot be offloaded"):
        whole.changed(offload=OffloadPlan(streamed_head=True))


def test_no_room_is_a_sentence_with_figures(place):
    with pytest.raises(OutOfMemoryError, match=r"at least [\d.]+ MiB of device memory"):
        trained(place, "room", device={"memory": "200 KiB"})


def test_no_other_adapter_stands_beside_it(place, whole):
    with (
        QLoRAModel.from_pretrained(place / "model", LoraConfig(r=2), PLAIN) as model,
        pytest.raises(ConfigError, match="cannot be loaded together with others"),
    ):
        model.load_adapter(place / "whole/adapter", "other")


def test_what_llama_cpp_cannot_apply_is_a_sentence(place, whole, tmp_path):
    with pytest.raises(UnsupportedModelError, match="has a whole embed_tokens"):
        export_gguf(place / "model", place / "whole/adapter", tmp_path / "adapter.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"modules_to_save": ["lm_head"]}}, "lm_head is tied to model.embed_tokens"),
        ({"lora": {**WHOLE, "modules_to_save": ["score"]}}, "'score' is not supported"),
        ({"lora": {**WHOLE, "trainable_token_indices": [1]}}, "rows of them"),
        (
            {"lora": {**WHOLE, "init_lora_weights": "olora", "lora_dropout": 0.0}},
            "init_lora_weights to default",
        ),
        ({"train": {"gradient_dtype": "bfloat16"}}, "set train.gradient_dtype to float32"),
        (
            {"model": "untied", "lora": {**BOTH, "target_modules": ["lm_head"]}},
            "both name lm_head",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(place, changes, message):
    with pytest.raises(ConfigError, match=message):
        trained(place, "wrong", **changes)


def test_files_that_contradict_themselves_are_a_sentence(place, both, tmp_path):
    tensors, config = load_adapter(place / "both/adapter")
    without = {n: a for n, a in tensors.items() if n not in (EMBEDDING, HEAD)}
    with pytest.raises(CheckpointError, match="there is no such matrix"):
        save_adapter(tmp_path / "broken", without, config)
    with pytest.raises(CheckpointError, match="contains NaN"):
        save_adapter(tmp_path / "broken", {**tensors, HEAD: tensors[HEAD] * np.nan}, config)
    with pytest.raises(UnsupportedModelError, match=r"contains the whole model.embed_tokens, but"):
        save_adapter(tmp_path / "broken", tensors, replace(config, modules_to_save=["lm_head"]))
    resized = {**tensors, HEAD.replace("weight", "modules_to_save.weight"): tensors[HEAD]}
    with pytest.raises(UnsupportedModelError, match=r"the whole lm_head\.modules_to_save, but"):
        save_adapter(tmp_path / "broken", resized, replace(config, ensure_weight_tying=True))
    assert json.loads((place / "both/adapter/adapter_config.json").read_text())["modules_to_save"]
