"""Runs that train a pair on the embedding: what they leave, and what follows."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.packed_runs import packed_run
from support.trained_parts import IDS, PLAIN, check_beside_others, check_merged, check_untied

from e2e.tiny import VOCAB, write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, open_adapter
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.lora import load_adapter, save_adapter
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.web.site import check_model

TARGETS = ["q_proj", "embed_tokens"]
A, B = (f"base_model.model.model.embed_tokens.lora_embedding_{x}" for x in "AB")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("embeddings")
    write_model(path / "model")  # tied
    write_chats(path / "chats.jsonl", rows=16)
    return path


def trained(place, name, lora=None, **more):
    lora = {"target_modules": TARGETS, **(lora or {})}
    return packed_run(place, name, lora, **more)


@pytest.fixture(scope="module")
def whole(place):
    return trained(place, "whole")


def test_it_begins_as_in_peft(device, place):
    """A is zero, and B normal; the model computes what its base does."""
    layout = device_layout(
        Pretrained.open(place / "model"), LoraConfig(r=8, target_modules=TARGETS), PLAIN,
        "float32", device,
    )  # fmt: skip
    start = layout.adapter.split(layout.adapter.initial(1))
    assert start[A].shape == (8, VOCAB) and not start[A].any()
    assert start[B].shape == (36, 8) and 0.85 < start[B].std() < 1.15
    assert abs(start[B].mean()) < 0.2 and np.abs(start[B]).max() > 2
    other = layout.adapter.split(layout.adapter.initial(2))
    assert not np.array_equal(other[B], start[B])
    model = QLoRAModel(layout, device)
    with model.adapter_off():
        assert np.array_equal(model.logits(IDS), logits_at_start(place, device, start))


def logits_at_start(place, device, start):
    lora = LoraConfig(r=8, target_modules=TARGETS)
    with QLoRAModel.from_pretrained(place / "model", lora, PLAIN, "float32", device) as model:
        model.load_adapter(start)
        return model.logits(IDS)


def test_tokens_that_were_seen_move_and_others_do_not(place, whole):
    tensors = load_file(place / "whole/adapter/adapter_model.safetensors")
    moved = np.abs(tensors[A]).max(axis=0) > 0
    assert moved[:4].any() and not moved[60:].any()  # no text has tokens beyond the tokenizer's
    config = json.loads((place / "whole/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(TARGETS)


def test_a_gradient_in_halves_is_near(place, whole):
    exact = load_file(place / "whole/adapter/adapter_model.safetensors")
    trained(place, "halves", train={"gradient_dtype": "bfloat16"})
    halves = load_file(place / "halves/adapter/adapter_model.safetensors")
    # AdamW's first steps are signs, which rounding moves where gradients are near zero.
    apart = np.linalg.norm(halves[B] - exact[B]) / np.linalg.norm(exact[B])
    assert 0 < apart < 0.1


@pytest.mark.full
def test_moments_of_8_bits_go_on_to_the_bit(place):
    optim = {"name": "adamw_8bit"}
    straight = trained(place, "8 bits straight", optim=optim)[1]
    trained(place, "8 bits", steps=2, optim=optim)
    assert trained(place, "8 bits", resume=True, optim=optim)[1] == straight


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_waits_in_host_memory_has_the_same_bits(device, place, dtype):
    """A tied head that is streamed, whose embedding the host looks up, and an embedding alone."""
    lora, seen = LoraConfig(r=3, target_modules=["embed_tokens", "lm_head"]), []
    ids = np.random.default_rng(4).integers(0, VOCAB, (2, 12))
    for offload in (OffloadPlan(), OffloadPlan(streamed_head=True)):
        layout = device_layout(
            Pretrained.open(place / "model"), lora, PLAIN, dtype, device, offload
        )
        model = QLoRAModel(layout, device)
        random = np.random.default_rng(5)
        flat = random.standard_normal(layout.adapter.length).astype(np.float32) * 0.1
        model.load_adapter(layout.adapter.split(flat))
        loss, gradients = model.loss_and_grads(ids, ids)
        assert {A, B} < set(gradients) and all(g.any() for g in gradients.values())
        seen.append((loss, gradients[A], gradients[B], model.logits(ids)))
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one, other)


def test_the_adapter_is_opened_and_merged_into_an_embedding_of_its_own(place, whole, tmp_path):
    stored = check_merged(place, tmp_path / "merged")
    check_untied(tmp_path / "merged")
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(stored["lm_head.weight"], base)
    assert not np.array_equal(stored["model.embed_tokens.weight"], base)


def test_it_stands_beside_other_adapters(place, whole):
    check_beside_others(place)


def test_ranks_alphas_and_patterns(device, place):
    lora = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, rank_pattern={"embed_tokens": 9},
        alpha_pattern={"embed_tokens": 6}, target_modules=r".*\.(q_proj|embed_tokens)",
    )  # fmt: skip
    layout = device_layout(Pretrained.open(place / "model"), lora, PLAIN, "float32", device)
    assert layout.adapter.shapes[A] == (9, VOCAB) and layout.adapter.shapes[B] == (36, 9)
    assert layout.adapter.embedding_lora.scaling == 6 / 3
    assert layout.adapter.peft.target_modules == r".*\.(q_proj|embed_tokens)"


def test_all_linear_and_some_layers_leave_the_embedding_out(device, place):
    for lora in (LoraConfig(), LoraConfig(target_modules=TARGETS, layers_to_transform=[0])):
        layout = device_layout(Pretrained.open(place / "model"), lora, PLAIN, "float32", device)
        assert layout.adapter.embedding_lora is None and A not in layout.adapter.shapes


def test_the_embedding_alone(place):
    _, saved = trained(place, "alone", lora={"target_modules": ["embed_tokens"]})
    tensors = load_file(place / "alone/adapter/adapter_model.safetensors")
    assert saved and set(tensors) == {A, B}
    assert np.abs(tensors[A]).max() > 1e-3


def test_a_run_goes_on_from_it(place, whole):
    """Steps of next to nothing leave what was there."""
    lora = {"init_from": str(place / "whole/adapter")}
    trained(place, "on", lora=lora, optim={"learning_rate": 1e-12, "weight_decay": 0.0})
    before, after = (
        load_file(place / name / "adapter/adapter_model.safetensors") for name in ("whole", "on")
    )
    assert all(np.abs(after[name] - before[name]).max() <= 1e-10 for name in (A, B))


def test_what_others_cannot_apply_is_a_sentence(device, place, whole, tmp_path):
    with pytest.raises(UnsupportedModelError, match="embed_tokens, but embedding and head are one"):
        export_gguf(place / "model", place / "whole/adapter", tmp_path / "adapter.gguf")
    lora = LoraConfig(target_modules=TARGETS)
    layout = device_layout(Pretrained.open(place / "model"), lora, PLAIN, "float32", device)
    with pytest.raises(ConfigError, match=r"LoRA on model\.embed_tokens is not supported in a"):
        check_model(layout)


def test_one_pair_for_both_is_not_merged(place, whole, tmp_path):
    tensors, config = load_adapter(place / "whole/adapter")
    save_adapter(tmp_path / "tied", tensors, replace(config, ensure_weight_tying=True))
    with pytest.raises(ConfigError, match="one pair for both is not supported"):
        merge(place / "model", tmp_path / "tied", tmp_path / "merged")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"use_dora": True}}, r"use_dora is not supported for model\.embed_tokens"),
        (
            {"lora": {"init_lora_weights": "pissa", "lora_dropout": 0.0}},
            r"is not supported for model\.embed_tokens",
        ),
        ({"lora": {"trainable_token_indices": [1]}}, r"names model\.embed_tokens while rows"),
        ({"model": {"add_tokens": ["<new>"]}}, r"names model\.embed_tokens while rows of tokens"),
        (
            {"lora": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}},
            "one pair for both is not supported",
        ),
        ({"lora": {"ensure_weight_tying": True}}, "one pair for both is not supported"),
        (
            {"lora": {"ensure_weight_tying": True, "target_modules": ["q_proj", "lm_head"]}},
            "one pair for both is not supported",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(place, sections, message):
    with pytest.raises(ConfigError, match=message):
        trained(place, "wrong", **sections)


def test_files_that_contradict_themselves_are_a_sentence(place, whole, tmp_path):
    tensors, config = load_adapter(place / "whole/adapter")
    without = {name: array for name, array in tensors.items() if name != B}
    with pytest.raises(
        CheckpointError, match=r"but not 'base_model.model.model.embed_tokens.lora_e"
    ):
        save_adapter(tmp_path / "one", without, config)
    with pytest.raises(CheckpointError, match=r"expected \(3, in_features\) for r = 3"):
        save_adapter(tmp_path / "two", {**tensors, A: tensors[A].T.copy()}, config)
    save_adapter(tmp_path / "three", {**tensors, A: tensors[A][:, :-1].copy()}, config)
    with pytest.raises(CheckpointError, match=r"lora_embedding_A has shape \(3, 82\), this model"):
        open_adapter(tmp_path / "three", model=place / "model")
