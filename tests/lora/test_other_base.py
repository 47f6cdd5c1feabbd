"""What is said of an adapter that does not fit a base."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.compatibility import refuse_other_base, rows_for
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, MAGNITUDE, TOKENS, WHOLE, tensor_name

STORED = AdapterConfig(2, 4, 0.0, ["q_proj", "gate"], False, "org/mixture")
LAYER, FROZEN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"


def pair(module, rows, columns):
    return {
        tensor_name(module, LORA_A): np.ones((2, columns), np.float32),
        tensor_name(module, LORA_B): np.ones((rows, 2), np.float32),
    }


def told(tensors, shapes, **more):
    with pytest.raises(CheckpointError) as caught:
        refuse_other_base("a", STORED, tensors, shapes, "base", **more)
    return str(caught.value)


def test_a_layer_that_stays_frozen_here_may_be_of_the_right_model():
    own = pair(LAYER, 6, 8)
    shapes = {name: array.shape for name, array in own.items()}
    text = told(own | pair(FROZEN, 4, 8), shapes)
    assert f"org/mixture and does not fit base: it adapts {FROZEN} (1 such layers), which" in text
    assert text.endswith("that it was trained on, or merge it with PEFT if that is this model")
    larger = told(pair(LAYER, 6, 9), shapes)
    assert "(2, 9), this model expects (2, 8)" in larger and "PEFT" not in larger


def test_ranks_and_counts_of_rows_may_be_others_and_magnitudes_not():
    rows, size = tensor_name("lm_head", TOKENS), tensor_name(LAYER, MAGNITUDE)
    own = {**pair(LAYER, 6, 8), rows: np.ones((3, 8)), size: np.ones(6)}
    taken = {name: array.shape for name, array in own.items()}
    taken |= {tensor_name(LAYER, LORA_A): (5, 8), tensor_name(LAYER, LORA_B): (6, 5), rows: (9, 8)}
    refuse_other_base("a", STORED, own, taken, "org/mixture")
    assert "(6,), this model expects (7,)" in told(own, {**taken, size: (7,)})


def test_a_layer_without_weights_is_named_unless_some_may_be_missing():
    own = pair(LAYER, 6, 8)
    shapes = {name: array.shape for name, array in (own | pair(FROZEN, 4, 8)).items()}
    assert f"it has no weights for {FROZEN} (1 such layers)" in told(own, shapes)
    refuse_other_base("a", STORED, own, shapes, "org/mixture", whole=False)


# ---- added tokens --------------------------------------------------------------------------------


def base(*, tied):
    return SimpleNamespace(
        vocab_size=10, tied=tied, embed_name="model.embed_tokens.weight",
        head_name="lm_head.weight",
    )  # fmt: skip


def both(rows):
    return {"embed_tokens": rows, "lm_head": rows}


@pytest.mark.parametrize(
    ("tied", "indices", "expected"),
    [
        (True, None, 10),
        (True, [3, 9], 10),
        (True, [3, 10], 11),
        (True, [11, 10], 12),
        (True, {"embed_tokens": [10]}, 11),
        (False, both([3, 10, 11]), 12),
        (False, {"embed_tokens": [3, 10], "lm_head": [10]}, 11),
        (False, {"embed_tokens": [9]}, 10),
        (True, [11], "trained token 11, but the base has 10 tokens and the adapter lacks"),
        (False, both([11]), "trained token 11, but"),
        (False, [10], "added token 10 to the base's 10, but has its row for only one of"),
        (False, {"embed_tokens": [10], "lm_head": [3]}, "added token 10 to the base's 10, but"),
        (False, {"embed_tokens": [10, 11], "lm_head": [10]}, "added token 11 to the base's 10"),
    ],
)
def test_rows_of_tokens_that_an_adapter_has_added(tied, indices, expected):
    stored = replace(STORED, trainable_token_indices=indices)
    if isinstance(expected, int):
        assert rows_for(base(tied=tied), stored, {}) == expected
        return
    with pytest.raises(CheckpointError, match=expected):
        rows_for(base(tied=tied), stored, {})


@pytest.mark.parametrize(
    ("tied", "rows", "expected"),
    [
        (True, {"model.embed_tokens": 12}, 12),
        (True, {"model.embed_tokens": 10}, 10),
        (False, {"model.embed_tokens": 12, "lm_head": 12}, 12),
        (False, {"model.embed_tokens": 12}, "has only model.embed_tokens with 12 rows: merge"),
        (False, {"lm_head": 12, "model.embed_tokens": 10}, "only lm_head with 12 rows and model"),
        (False, {"model.embed_tokens": 12, "lm_head": 13}, "only model.embed_tokens with 12 rows"),
        (True, {"lm_head": 12}, "the adapter has only lm_head with 12 rows"),
    ],
)
def test_rows_of_whole_matrices_that_are_larger(tied, rows, expected):
    tensors = {tensor_name(module, WHOLE): np.ones((count, 2)) for module, count in rows.items()}
    if isinstance(expected, int):
        assert rows_for(base(tied=tied), STORED, tensors) == expected
        return
    with pytest.raises(CheckpointError, match=expected):
        rows_for(base(tied=tied), STORED, tensors)
