"""Runs that train rows of the embedding: what they leave, and what follows."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.packed_runs import packed_run
from support.trained_parts import PLAIN, check_merged

from e2e.tiny import VOCAB, write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout

TOKENS = [VOCAB - 1, 0, 5, 3]
NAME = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens")
    write_model(path / "model")
    write_chats(path / "chats.jsonl", rows=16)
    return path


def trained(place, name, optim=None, lora=None, **options):
    return packed_run(
        place, name, {"trainable_token_indices": TOKENS, **(lora or {})},
        optim=optim or {}, train=options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(place):
    return trained(place, "whole")


def test_rows_move_and_the_saved_ones_are_the_trained(place, whole):
    rows = load_file(place / "whole/adapter/adapter_model.safetensors")[NAME]
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"][TOKENS]
    moved = np.abs(rows - base).max(axis=1)
    assert (moved[1:] > 1e-3).all()  # three steps of up to 0.01
    # As a row of the tied head the one that no text has moves, too.
    assert moved[0] > 1e-3
    config = json.loads((place / "whole/adapter/adapter_config.json").read_text())
    assert config["trainable_token_indices"] == TOKENS


def test_other_forms_of_gradient_and_moments(place, whole):
    exact = load_file(place / "whole/adapter/adapter_model.safetensors")[NAME]
    base = load_file(place / "model/model.safetensors")["model.embed_tokens.weight"][TOKENS]
    for name, options in (
        ("halves", {"gradient_dtype": "bfloat16"}),
        ("8bit", {"optim": {"name": "adamw_8bit"}}),
    ):
        trained(place, name, **options)
        rows = load_file(place / name / "adapter/adapter_model.safetensors")[NAME]
        # The same direction, but for what 8 bits round.
        apart = np.linalg.norm(rows - exact) / np.linalg.norm(exact - base)
        assert apart < 0.1, (name, apart)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_streamed_tied_head_has_the_same_bits(device, place, dtype):
    lora = LoraConfig(r=3, trainable_token_indices=TOKENS)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, VOCAB, (2, 12))
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
        logits = model.logits(ids)
        with model.adapter_off():
            seen.append((loss, gradients[NAME], logits, model.logits(ids)))
        state = model.base_state_dict()["model.embed_tokens.weight"]
        assert np.array_equal(
            state[TOKENS[0]], layout.adapter.trained_rows["model.embed_tokens"].originals[0]
        )
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one, other)


def test_the_adapter_is_opened_and_merged(place, whole, tmp_path):
    rows = load_file(place / "whole/adapter/adapter_model.safetensors")[NAME]
    stored = check_merged(place, tmp_path / "merged")["model.embed_tokens.weight"]
    assert np.array_equal(stored[TOKENS], rows)


def test_no_other_adapter_stands_beside_it(place, whole):
    with (
        QLoRAModel.from_pretrained(place / "model", LoraConfig(r=2), PLAIN) as model,
        pytest.raises(ConfigError, match="cannot be loaded together with others"),
    ):
        model.load_adapter(place / "whole/adapter", "other")


def test_what_llama_cpp_cannot_apply_is_a_sentence(place, whole, tmp_path):
    with pytest.raises(UnsupportedModelError, match="trained rows of the embedding"):
        export_gguf(place / "model", place / "whole/adapter", tmp_path / "adapter.gguf")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([VOCAB], "token 83 does not exist"),
        ([1, 2, 1], "token 1 is listed twice"),
        ([-1], "must be a list of token ids"),
        ([], "must be a list of token ids"),
        ([True], "must be a list of token ids"),
        ({"wte": [1]}, "unknown matrix 'wte'"),
        ({"embed_tokens": [1], "model.embed_tokens": [2]}, "names model.embed_tokens twice"),
        ({"embed_tokens": [1], "lm_head": [2]}, "lm_head is tied to model.embed_tokens"),
        ({"lm_head": [2]}, "lm_head is tied to model.embed_tokens"),
    ],
)
def test_wrong_tokens_are_a_sentence(place, tokens, message):
    with pytest.raises(ConfigError, match=message):
        trained(place, "wrong", lora={"trainable_token_indices": tokens})


def test_files_that_contradict_themselves_are_a_sentence(place, whole, tmp_path):
    from qlora_wgpu.lora import load_adapter, save_adapter

    tensors, config = load_adapter(place / "whole/adapter")
    for change, message in (
        ({NAME: tensors[NAME][:2]}, "names 4 tokens"),
        ({NAME: np.full_like(tensors[NAME], np.nan)}, "contain NaN"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_adapter(tmp_path / "broken", {**tensors, **change}, config)
    without = {n: a for n, a in tensors.items() if n != NAME}
    with pytest.raises(CheckpointError, match="there are no rows"):
        save_adapter(tmp_path / "broken", without, config)
    other = QLoRAModel.from_pretrained(
        place / "model", LoraConfig(r=3, trainable_token_indices=[1, 2, 3, 4]), PLAIN
    )
    with other, pytest.raises(CheckpointError, match="trainable_token_indices"):
        other.load_adapter(place / "whole/adapter")
