"""Quantized matrices on the device: which vectors hold their codes, scales and maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.bitsandbytes import NF4Format
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.graph.dtype import ceil_div, round_up
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.nf4 import EXPERT_WORDS, NF4Matrix, pair_values
from qlora_wgpu.quant import NF4_QUANT_MAP, NF4Tensor

_NESTED_BLOCKSIZE = 256
_MAPS_LENGTH = 273  # values of the codes, values of the scales' codes, and their offset


def own_format(quant: QuantConfig) -> NF4Format:
    """The format of weights that are quantized here."""
    nested = _NESTED_BLOCKSIZE if quant.double_quant else None
    return NF4Format(quant.blocksize, nested, NF4_QUANT_MAP)


def format_of(quantized: NF4Tensor) -> NF4Format:
    """The format of a weight that has been read."""
    nested = None if quantized.nested_absmax is None else quantized.nested_blocksize
    return NF4Format(quantized.blocksize, nested, quantized.quant_map)


def fits_words(form: NF4Format, columns: int) -> bool:
    """Whether the codes of each 32-bit word share a row and a block, four words at a time."""
    return columns % 32 == 0 and form.blocksize % 32 == 0


def lay_out(
    name: str,
    shape: tuple[int, int],
    form: NF4Format,
    experts: int,
    keep: Callable[[str, int], Storage],
    codebook: Tensor | None,
) -> tuple[NF4Matrix, dict[str, Storage]]:
    """A matrix, or those of several experts one below the other, without bytes.

    Args:
        name: The matrix.
        shape: Rows and columns of one.
        form: How it is stored.
        experts: How many there are.
        keep: Makes the storage of a label and a number of bytes.
        codebook: The values of pairs of codes, where kernels read those.

    Returns:
        The matrix, and the storages that are to be filled with ``device_arrays`` of its parts.
    """
    storages: dict[str, Storage] = {}

    def part(leaf: str, length: int, dtype: str) -> Tensor:
        if experts > 1:
            length = experts * round_up(length, EXPERT_WORDS)
        storages[leaf] = keep(f"{name}.{leaf}", 4 * length)
        return vector(f"{name}.{leaf}", length, dtype, storages[leaf])

    rows, columns = shape
    blocks = ceil_div(rows * columns, form.blocksize)
    nested_blocksize = form.nested_blocksize
    codes = part("codes", ceil_div(rows * columns, 8), "uint32")
    if nested_blocksize is not None:
        absmax = part("absmax", ceil_div(blocks, 4), "uint32")
    else:
        absmax = part("absmax", blocks, "float32")
    nested = None
    if nested_blocksize is not None:
        nested = part("nested_absmax", ceil_div(blocks, nested_blocksize), "float32")
    matrix = NF4Matrix(
        name=name,
        rows=rows,
        columns=columns,
        blocksize=form.blocksize,
        codes=codes,
        absmax=absmax,
        maps=part("maps", _MAPS_LENGTH, "float32"),
        nested_absmax=nested,
        nested_blocksize=nested_blocksize or _NESTED_BLOCKSIZE,
        codebook=codebook,
        experts=experts,
    )
    return matrix, storages


def nf4_matrix(name: str, quantized: NF4Tensor, *, textures: bool) -> NF4Matrix:
    """A quantized matrix with its bytes, to be allocated with the plan that uses it."""
    form, codebook = format_of(quantized), None
    if textures and fits_words(form, quantized.shape[1]):
        codebook = codebook_tensor(form, Storage)

    def keep(label: str, nbytes: int) -> Storage:
        return Storage(label, "base", nbytes)

    matrix, storages = lay_out(name, quantized.shape, form, 1, keep, codebook)
    arrays = device_arrays(quantized)
    for leaf, storage in storages.items():
        storage.data = words(arrays[leaf])
    return matrix


def codebook_tensor(form: NF4Format, keep: Callable[..., Storage]) -> Tensor:
    """The values of pairs of codes, for matrices that are read from textures."""
    pairs = pair_values(form.quant_map)
    storage = keep("codebook", "base", pairs.nbytes, pairs, texture=True)
    return vector("codebook", pairs.size, "float32", storage)


def device_arrays(quantized: NF4Tensor) -> dict[str, npt.NDArray[Any]]:
    """The arrays to upload of a quantized matrix; bytes are padded to whole 32-bit words."""

    def padded_words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.pad(array.reshape(-1), (0, (-array.nbytes % 4) // array.itemsize))

    maps = np.zeros(_MAPS_LENGTH, np.float32)
    maps[:16] = quantized.quant_map
    arrays = {
        "codes": padded_words(quantized.codes),
        "absmax": padded_words(quantized.absmax),
        "maps": maps,
    }
    if quantized.nested_absmax is not None and quantized.nested_quant_map is not None:
        maps[16:272] = quantized.nested_quant_map
        maps[272] = quantized.nested_offset
        arrays["nested_absmax"] = quantized.nested_absmax
    return arrays


def stacked_arrays(
    stored: Sequence[NF4Tensor], name: str, folder: object
) -> dict[str, npt.NDArray[Any]]:
    """The arrays that are uploaded of one matrix, or of several one below the other.

    Raises:
        CheckpointError: If they differ in how they are quantized.
    """
    if len(stored) == 1:
        return device_arrays(stored[0])
    kinds = {(q.blocksize, q.nested_blocksize, q.nested_absmax is None) for q in stored}
    maps = {q.quant_map.tobytes() for q in stored}
    if len(kinds) > 1 or len(maps) > 1:
        raise CheckpointError(f"{folder}: the experts of {name} differ in how they are quantized")
    arrays = [device_arrays(q) for q in stored]
    return {
        leaf: np.concatenate([_whole_windows(each[leaf]) for each in arrays]) for leaf in arrays[0]
    }


def words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array's bytes as 32-bit words; floats stay floats."""
    return array if array.dtype == np.float32 else array.view(np.uint32)


def _whole_windows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Padded so that what follows may be bound by itself."""
    flat = array.reshape(-1)
    return np.pad(flat, (0, -flat.nbytes % (4 * EXPERT_WORDS) // flat.itemsize))
