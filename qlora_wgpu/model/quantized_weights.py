"""Quantized weights of a model: the vectors of their codes and scales, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.tensor import Storage, Tensor, ceil_div, round_up, vector
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.ops.quantized import EXPERT_WORDS, QuantizedMatrix, pair_values
from qlora_wgpu.quant import QuantizedWeight, WeightFormat

# Behind the codes' values in ``maps``: those of the scales' codes, and an offset or a factor.
_SCALE_VALUES = 257


def lay_out(
    name: str,
    shape: tuple[int, int],
    form: WeightFormat,
    experts: int,
    keep: Callable[[str, int], Storage],
    codebook: Tensor | None,
) -> tuple[QuantizedMatrix, dict[str, Storage]]:
    """A matrix, or several experts' stacked matrices, without bytes.

    Returns the matrix, and the storages for the ``device_arrays`` of its parts.
    """
    storages: dict[str, Storage] = {}

    def part(leaf: str, length: int, dtype: str) -> Tensor:
        if experts > 1:
            length = experts * round_up(length, EXPERT_WORDS)
        storages[leaf] = keep(f"{name}.{leaf}", 4 * length)
        return vector(f"{name}.{leaf}", length, dtype, storages[leaf])

    rows, columns = shape
    entries = form.scale_entries(rows, columns)
    nested_entries = form.nested_entries(rows, columns)
    codes = part("codes", ceil_div(form.code_bytes(rows, columns), 4), "uint32")
    if nested_entries:
        absmax = part("absmax", ceil_div(entries, 4), "uint32")
    else:
        absmax = part("absmax", entries, "float32")
    nested = part("nested_absmax", nested_entries, "float32") if nested_entries else None
    matrix = QuantizedMatrix(
        name=name,
        rows=rows,
        columns=columns,
        form=form,
        codes=codes,
        absmax=absmax,
        maps=part("maps", form.quant_map.size + _SCALE_VALUES, "float32"),
        nested_absmax=nested,
        codebook=codebook,
        experts=experts,
    )
    return matrix, storages


def quantized_matrix(name: str, quantized: QuantizedWeight, *, textures: bool) -> QuantizedMatrix:
    form, codebook = quantized.format, None
    if textures and fits_words(form, quantized.shape[1]):
        codebook = codebook_tensor(form, Storage)

    def keep(label: str, nbytes: int) -> Storage:
        return Storage(label, "base", nbytes)

    matrix, storages = lay_out(name, quantized.shape, form, 1, keep, codebook)
    arrays = device_arrays(quantized)
    for leaf, storage in storages.items():
        storage.data = words(arrays[leaf])
    return matrix


def codebook_tensor(form: WeightFormat, keep: Callable[..., Storage]) -> Tensor:
    """The values of all pairs of codes, for matrices read from textures."""
    pairs = pair_values(form.quant_map)
    storage = keep("codebook", "base", pairs.nbytes, pairs, texture=True)
    return vector("codebook", pairs.size, "float32", storage)


def device_arrays(quantized: QuantizedWeight) -> dict[str, npt.NDArray[Any]]:
    """A quantized matrix's arrays to upload; bytes are padded to whole 32-bit words.

    Arrays that need no padding are not copied, even from a mapped file.
    """

    def padded_words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.nbytes % 4 == 0:
            return array.reshape(-1)
        return np.pad(array.reshape(-1), (0, (-array.nbytes % 4) // array.itemsize))

    form = quantized.format
    values = form.quant_map.size
    maps = np.zeros(values + _SCALE_VALUES, np.float32)
    maps[:values] = form.quant_map
    if form.factor != 1.0:
        maps[-1] = form.factor
    arrays = {
        "codes": padded_words(quantized.codes),
        "absmax": padded_words(quantized.absmax),
        "maps": maps,
    }
    if quantized.nested_absmax is not None and quantized.nested_quant_map is not None:
        maps[values : values + 256] = quantized.nested_quant_map
        maps[-1] = quantized.nested_offset or 0.0
        arrays["nested_absmax"] = quantized.nested_absmax.reshape(-1)
    return arrays


def stacked_arrays(
    stored: Sequence[QuantizedWeight], name: str, folder: object
) -> dict[str, npt.NDArray[Any]]:
    if len(stored) == 1:
        return device_arrays(stored[0])
    if len({q.format.key for q in stored}) > 1:
        raise CheckpointError(f"{folder}: the experts of {name} have different quantized formats")
    arrays = [device_arrays(q) for q in stored]
    return {
        leaf: np.concatenate([_whole_windows(each[leaf]) for each in arrays]) for leaf in arrays[0]
    }


def words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array's bytes as 32-bit words; floats stay floats."""
    return array if array.dtype == np.float32 else array.view(np.uint32)


def _whole_windows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array padded so that a binding may begin after it."""
    flat = array.reshape(-1)
    return np.pad(flat, (0, -flat.nbytes % (4 * EXPERT_WORDS) // flat.itemsize))
