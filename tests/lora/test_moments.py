"""An optimizer's moments as tensors of a checkpoint."""

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.flat_vector import FlatVector
from qlora_wgpu.lora.moments import EightBitMoments


@pytest.fixture
def moments():
    flat = FlatVector()
    flat.append("a", 40, 128)  # in codes
    flat.append("b", 2, 8)  # too small for that
    return EightBitMoments(flat)


def test_tensors_become_the_same_words_again(moments):
    rng = np.random.default_rng(1)
    tensors = moments.split([moments.zeros(), moments.zeros()])
    assert tensors.keys() == {
        "state1.a", "absmax1.a", "state2.a", "absmax2.a", "state1.b", "state2.b"
    }  # fmt: skip
    values = {
        name: (rng.random(array.shape) * 200).astype(array.dtype) for name, array in tensors.items()
    }
    again = moments.split(moments.join(values))
    for name, array in values.items():
        np.testing.assert_array_equal(again[name], array)


def test_tensors_of_another_model_are_refused_by_name(moments):
    tensors = moments.split([moments.zeros(), moments.zeros()])
    with pytest.raises(CheckpointError, match="'c' is unknown to this model"):
        moments.join({**tensors, "state1.c": tensors["state1.b"]})
    del tensors["state2.b"]
    with pytest.raises(CheckpointError, match=r"^b: .*state2"):
        moments.join(tensors)
