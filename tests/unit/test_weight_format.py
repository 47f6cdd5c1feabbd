"""Sizes of quantized weights, by their format."""

import numpy as np
import pytest

from qlora_wgpu.quant.nf4 import nf4_format
from qlora_wgpu.quant.safetensors_formats import MXFP4, NVFP4, fp8_format, group_format
from qlora_wgpu.weight_format import WHOLE

NF4, DOUBLE = nf4_format(64, False), nf4_format(64, True)
TILES, ROWS = fp8_format("F8_E4M3", (128, 64)), fp8_format("F8_E4M3", (1, WHOLE))


@pytest.mark.parametrize(("form", "rows", "columns", "blocks"), [
    (NF4, 2, 64, 2), (NF4, 3, 40, 2), (NF4, 1, 1, 1), (NF4, 1, 65, 2), (MXFP4, 3, 64, 6),
    (TILES, 128, 64, 1), (TILES, 129, 64, 2), (TILES, 128, 65, 2), (TILES, 300, 130, 9),
    (ROWS, 5, 999, 5), (NVFP4, 3, 32, 6),
])  # fmt: skip
def test_blocks_of_a_matrix(form, rows, columns, blocks):
    assert form.block_count(rows, columns) == blocks
    assert form.scale_entries(rows, columns) == blocks * form.per_block


@pytest.mark.parametrize(("columns", "count"), [(64, 1), (65, 2), (1, 1), (128, 2)])
def test_tiles_of_a_row(columns, count):
    assert TILES.blocks_per_row(columns) == count


@pytest.mark.parametrize(("form", "bits", "nbytes"), [(NF4, 4, 8), (TILES, 8, 15)])
def test_bytes_of_codes(form, bits, nbytes):
    assert form.bits == bits and form.code_bytes(3, 5) == nbytes


def test_scales_that_have_scales():
    assert NF4.nested_entries(1000, 1000) == 0 and NF4.per_block == 1
    per = DOUBLE.nested_blocksize * 64
    assert [DOUBLE.nested_entries(1, n) for n in (1, per, per + 1, 3 * per)] == [1, 1, 2, 3]
    minima = group_format("GPTQ", 4, 256, 64)
    assert minima.has_minima and minima.per_block == 2
    assert minima.scale_entries(3, 256) == 2 * 3 * 4


def test_equal_formats_have_one_key():
    assert nf4_format(64, False).key == NF4.key != DOUBLE.key and hash(NF4.key) is not None
    assert nf4_format(128, False).key != NF4.key and isinstance(NF4.quant_map, np.ndarray)
