"""Weights in FP8 and FP4 by the shapes and numbers of their tensors, which no file has."""

import numpy as np
import pytest

from qlora_wgpu.checkpoint.quantized.float_weights import Fp8Weight, Mxfp4Weight, Nvfp4Weight
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant.safetensors_formats import fp8_format
from qlora_wgpu.weight_format import WHOLE


def weight(kind, tensors, *, tile=None, types=None):
    """A weight whose tensors are these arrays, of types by their names."""

    class Given(kind):
        torch_dtype = "float32"
        shape = property(lambda own: tensors["weight"].shape) if kind is Fp8Weight else kind.shape
        stored_dtype = "F8_E4M3"

        def __init__(self):
            self._tile = tile
            self._scales = next((name for name in tensors if "scale" in name), "")

        def _matrix(self, leaf):
            return tensors[leaf].shape

        def _shape_of(self, leaf):
            return tensors[leaf].shape

        def _has(self, leaf):
            return leaf in tensors

        def _dtype_of(self, leaf):
            return (types or {}).get(leaf, "F32")

        def _raw(self, leaf, types, shape=None):
            assert shape is None or tensors[leaf].shape == shape
            return tensors[leaf]

        def _floats(self, leaf):
            return tensors[leaf].astype(np.float32)

        def _error(self, leaf, text):
            return CheckpointError(f"{leaf} {text}")

    return Given()


def codes(*shape):
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(("kind", "leaf", "pairs", "columns"), [
    (Mxfp4Weight, "weight_packed", 16, 32), (Mxfp4Weight, "weight_packed", 48, 96),
    (Mxfp4Weight, "weight_packed", 17, None), (Mxfp4Weight, "weight_packed", 8, None),
    (Nvfp4Weight, "weight", 8, 16), (Nvfp4Weight, "weight", 24, 48),
    (Nvfp4Weight, "weight", 12, None), (Nvfp4Weight, "weight", 1, None),
])  # fmt: skip
def test_two_codes_are_in_a_byte(kind, leaf, pairs, columns):
    made = weight(kind, {leaf: codes(3, pairs)})
    made.codes_leaf = leaf
    if columns is not None:
        assert made.shape == (3, columns)
        return
    with pytest.raises(CheckpointError, match=f"has rows of {2 * pairs} codes, which are not"):
        assert made.shape


@pytest.mark.parametrize(("scales", "tile", "form"), [
    ((1,), None, (WHOLE, WHOLE)), ((1, 1), (4, 4), (WHOLE, WHOLE)), ((6,), None, (1, WHOLE)),
    ((6, 1), None, (1, WHOLE)), ((2, 2), (4, 5), (4, 5)), ((3, 2), (2, 5), (2, 5)),
    ((2, 3), (4, 5), None), ((3, 2), (4, 5), None), ((6, 10), None, None), ((2, 2), None, None),
    ((10,), None, None),
])  # fmt: skip
def test_what_shares_a_scale_in_fp8(scales, tile, form):
    arrays = {"weight": codes(6, 10), "weight_scale": np.ones(scales, np.float32)}
    made = weight(Fp8Weight, arrays, tile=tile)
    if form is not None:
        assert repr(made.format) == repr(fp8_format("F8_E4M3", form))
        return
    block = "row" if tile is None else f"{tile[0]} x {tile[1]} tile"
    with pytest.raises(CheckpointError, match=f"must have a scale for each {block} of a weight"):
        assert made.format


@pytest.mark.parametrize(("value", "dtype", "scale"), [
    (127, "U8", 1.0), (128, "F8_E8M0", 2.0), (254, "U8", 2.0**127), (255, "U8", None),
    (0.25, "F32", 0.25),
])  # fmt: skip
def test_scales_that_are_powers_of_two(value, dtype, scale):
    array = np.full((1,), value, np.float32 if dtype == "F32" else np.uint8)
    made = weight(Fp8Weight, {"weight": codes(2, 4), "weight_scale": array},
                  types={"weight_scale": dtype})  # fmt: skip
    if scale is not None:
        assert made._scale_values().tolist() == [scale]
        return
    with pytest.raises(CheckpointError, match="weight_scale contains NaN: the model is damaged"):
        made._scale_values()


@pytest.mark.parametrize(
    ("code", "good"), [(0x00, True), (0x7E, True), (0x7F, False), (0xFF, False)]
)
def test_codes_of_fp8_are_numbers(code, good):
    arrays = {"weight": codes(2, 4), "weight_scale": np.ones((1,), np.float32)}
    arrays["weight"][1, 3] = code
    made = weight(Fp8Weight, arrays)
    made.codes_leaf = "weight"
    if good:
        assert made.quantized().shape == (2, 4)
        return
    with pytest.raises(CheckpointError, match="weight contains NaN or infinity"):
        made.quantized()


@pytest.mark.parametrize("value", [254, 255])
def test_exponents_are_numbers(value):
    made = weight(Mxfp4Weight, {"weight_scale": np.array([[1, value]], np.uint8)})
    if value == 254:
        assert made._exponents("weight_scale", (1, 2)).tolist() == [[1, 254]]
        return
    with pytest.raises(CheckpointError, match="weight_scale contains NaN"):
        made._exponents("weight_scale", (1, 2))


@pytest.mark.parametrize(("leaf", "one"), [("weight_global_scale", 0.5), ("weight_scale_2", 2.0)])
def test_the_scale_of_a_whole_weight_in_nvfp4(leaf, one):
    """One divides, the other multiplies."""
    arrays = {"weight": codes(2, 8), "weight_scale": np.full((2, 1), 0x38, np.uint8)}
    made = weight(Nvfp4Weight, {**arrays, leaf: np.array([one], np.float32)})
    made.codes_leaf = "weight"
    assert made._scale_map()[0x38] == 2.0 and made.quantized().shape == (2, 16)
    two = weight(Nvfp4Weight, {**arrays, leaf: np.array([one, one], np.float32)})
    with pytest.raises(CheckpointError, match=f"{leaf} must have one number, got 2"):
        two._scale_map()
    arrays["weight_scale"][1, 0] = 0x7F
    wrong = weight(Nvfp4Weight, {**arrays, leaf: np.array([one], np.float32)})
    wrong.codes_leaf = "weight"
    with pytest.raises(CheckpointError, match="has scales that are NaN or infinite"):
        wrong.quantized()
