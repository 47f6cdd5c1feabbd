"""Runs that train a pair on the head: what they leave, and what follows."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.packed_runs import packed_run
from support.trained_parts import PLAIN, check_beside_others, check_merged, check_untied

from e2e.tiny import VOCAB, write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.errors import ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout

TARGETS = ["q_proj", "lm_head"]
A, B = (f"base_model.model.lm_head.lora_{x}.weight" for x in "AB")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    write_model(path / "model")  # tied
    write_chats(path / "chats.jsonl", rows=16)
    return path


def trained(place, name, optim=None, lora=None, **options):
    return packed_run(
        place, name, {"target_modules": TARGETS, **(lora or {})},
        optim=optim or {}, train=options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(place):
    return trained(place, "whole")


def test_both_matrices_move_and_are_saved(place, whole):
    tensors = load_file(place / "whole/adapter/adapter_model.safetensors")
    assert tensors[B].shape == (VOCAB, 3) and np.abs(tensors[B]).max() > 1e-3
    norms = np.linalg.norm(tensors[B], axis=1)
    assert (norms > 0).all()  # each token's row moves, since its share of the softmax does
    config = json.loads((place / "whole/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(TARGETS)


def test_a_gradient_in_halves_is_near(place, whole):
    exact = load_file(place / "whole/adapter/adapter_model.safetensors")
    trained(place, "halves", gradient_dtype="bfloat16")
    halves = load_file(place / "halves/adapter/adapter_model.safetensors")
    # AdamW's first steps are signs, which rounding moves where gradients are near zero.
    apart = np.linalg.norm(halves[B] - exact[B]) / np.linalg.norm(exact[B])
    assert 0 < apart < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_streamed_head_has_the_same_bits(device, place, dtype):
    lora = LoraConfig(r=3, target_modules=["lm_head"])
    ids = np.random.default_rng(4).integers(0, VOCAB, (2, 12))
    seen = []
    for offload in (OffloadPlan(), OffloadPlan(streamed_head=True)):
        layout = device_layout(
            Pretrained.open(place / "model"), lora, PLAIN, dtype, device, offload
        )
        model = QLoRAModel(layout, device)
        random = np.random.default_rng(5)
        flat = random.standard_normal(layout.adapter.length).astype(np.float32) * 0.1
        model.load_adapter(layout.adapter.split(flat))
        loss, gradients = model.loss_and_grads(ids, ids)
        assert set(gradients) == {A, B} and all(g.any() for g in gradients.values())
        logits = model.logits(ids)
        with model.adapter_off():
            seen.append((loss, gradients[A], gradients[B], logits, model.logits(ids)))
        assert not np.array_equal(seen[-1][3], seen[-1][4])
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one, other)


def test_the_adapter_is_opened_and_merged_into_a_head_of_its_own(place, whole, tmp_path):
    stored = check_merged(place, tmp_path / "merged")
    check_untied(tmp_path / "merged")
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(stored["model.embed_tokens.weight"], base)
    assert not np.array_equal(stored["lm_head.weight"], base)


def test_it_stands_beside_other_adapters(place, whole):
    check_beside_others(place)


@pytest.mark.quick
def test_all_linear_leaves_the_head_out(device, place):
    layout = device_layout(Pretrained.open(place / "model"), LoraConfig(), PLAIN, "float32", device)
    assert "lm_head" not in layout.adapter.loras


def test_what_llama_cpp_cannot_apply_is_a_sentence(place, whole, tmp_path):
    with pytest.raises(UnsupportedModelError, match="lm_head, but embedding and head are one"):
        export_gguf(place / "model", place / "whole/adapter", tmp_path / "adapter.gguf")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"use_dora": True}, "use_dora is not supported for lm_head"),
        ({"init_lora_weights": "pissa", "lora_dropout": 0.0}, "is not supported for lm_head"),
        ({"trainable_token_indices": [1]}, "target_modules names lm_head while rows of tokens"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(place, lora, message):
    with pytest.raises(ConfigError, match=message):
        trained(place, "wrong", lora=lora)
