"""What is said of an adapter that does not fit a base."""

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.compatibility import refuse_other_base
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, MAGNITUDE, TOKENS, tensor_name

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
