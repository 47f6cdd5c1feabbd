"""What keys say of Gemma 4's layers."""

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.gguf import gemma4
from qlora_wgpu.gguf.architecture import Keys

FULL, SLIDING = gemma4.FULL, gemma4.SLIDING


def keys_of(**values):
    named = {f"gemma4.{key}": value for key, value in values.items()}
    return Keys({"general.architecture": "gemma4", **named}, "F")


@pytest.mark.parametrize(
    ("heads", "full", "sliding"),
    [([2, 1, 2, 1], 1, 2), ([3, 3, 3, 3], 3, 3), ([2, 1, 3, 1], 1, "differs between layers of")],
)
def test_layers_of_a_kind_have_as_many_key_heads(heads, full, sliding):
    types = [SLIDING, FULL, SLIDING, FULL]
    assert gemma4._key_heads(keys_of(), heads, types, FULL) == full
    if isinstance(sliding, int):
        assert gemma4._key_heads(keys_of(), heads, types, SLIDING) == sliding
        assert gemma4._key_heads(keys_of(), heads, [FULL] * 4, SLIDING) is None
        return
    with pytest.raises(UnsupportedModelError, match=sliding):
        gemma4._key_heads(keys_of(), heads, types, SLIDING)


@pytest.mark.parametrize(
    ("sizes", "shared", "expected"),
    [
        ([8, 8, 8], 0, (8, False)),
        ([8, 8, 8], 2, (8, False)),
        ([8, 16, 16], 2, (8, True)),
        ([8, 8, 16], 1, (8, True)),
        ([8, 8, 16], 2, None),
        ([8, 8, 16], 0, None),
        ([8, 9, 8], 1, None),
        ([8, 24, 24], 2, None),
    ],
)
def test_mlps_are_twice_as_wide_where_keys_are_shared(sizes, shared, expected):
    keys = keys_of(feed_forward_length=np.array(sizes, np.uint32))
    if expected is not None:
        made = gemma4._feed_forward(keys, 3, shared)
        assert (made["intermediate_size"], made["use_double_wide_mlp"]) == expected
        return
    with pytest.raises(UnsupportedModelError, match=r"the combination of sizes in gemma4\.feed"):
        gemma4._feed_forward(keys, 3, shared)


class File(dict):
    path = "F"

    def floats(self, name):
        return np.array(self[name], np.float32)


LARGE = 1e30


@pytest.mark.parametrize(
    ("factors", "works"),
    [
        (None, True), ([1, 1, LARGE, LARGE], True), ([2, 2, 2, LARGE], True), ([LARGE] * 4, True),
        ([1, 2, LARGE, LARGE], False), ([1, LARGE, 1, LARGE], False), ([1] * 3, False),
        ([1] * 5, False), ([0, 0, LARGE, LARGE], False), ([-1, -1, LARGE, LARGE], False),
    ],
)  # fmt: skip
def test_the_first_pairs_are_rotated_alike(factors, works):
    file = File({} if factors is None else {gemma4.FACTORS: factors})
    if works:
        made = gemma4._rotation(file, 1e6, 8)
        rotated = 4 if factors is None else sum(factor < LARGE for factor in factors)
        assert int(made["partial_rotary_factor"] * 8 // 2) == rotated
        return
    with pytest.raises(CheckpointError, match="are not valid for Gemma 4"):
        gemma4._rotation(file, 1e6, 8)
