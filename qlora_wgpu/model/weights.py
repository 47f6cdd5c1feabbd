"""Frozen weights on the device: which form each takes, its bytes, and its upload.

The same code lays out a model whose weights are still to be seen (for a memory plan) and one that
is being loaded; in the latter case each tensor is read, quantized, uploaded and forgotten before
the next, so host memory stays near one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec, Modules
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.dtype import ROW_UNIT, pad_rows, padded
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.tensor import TEXEL, Storage, Tensor, matrix, row, vector
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.ops.modules import (
    DenseExperts,
    DenseMatrix,
    ExpertLinear,
    ExpertMatrix,
    Linear,
    Matrix,
)
from qlora_wgpu.ops.nf4 import EXPERT_WORDS, NF4Matrix, pair_values
from qlora_wgpu.quant import NF4Tensor, quantize_nf4

FloatArray = npt.NDArray[np.float32]
_NO_OFFSET = np.float32(0)


class WeightLayout:
    """Builds a model's modules."""

    def __init__(
        self,
        quant: QuantConfig,
        dtype: str,
        max_binding: int,
        folder: ModelFolder | None = None,
        device: Device | None = None,
        *,
        textures: bool = False,
    ) -> None:
        """Without a folder and a device, shapes and bytes only.

        Args:
            quant: How linear layers are stored.
            dtype: Element type of matmul operands.
            max_binding: Largest number of bytes that one binding may show.
            folder: The weights.
            device: Where they go.
            textures: Whether matrices that are not quantized are kept in textures.
        """
        self._quant = quant
        self._dtype = dtype
        self._max_binding = max_binding
        self._folder = folder
        self._device = device
        self._textures = textures
        self._codebooks: dict[bytes, Tensor] = {}
        self._prefixes: tuple[tuple[str, str], ...] = ()

    def modules(
        self,
        architecture: Architecture,
        adapter: Adapter,
        progress: Callable[[str], None] = lambda name: None,
    ) -> Modules:
        """Lays out, and if there is a device uploads, every weight.

        Args:
            architecture: What the model is made of.
            adapter: Whose pairs the layers get.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self._prefixes = architecture.stored_prefixes
        embed_name = self._embed_name(architecture)
        progress(embed_name)
        embedding = self._dense(embed_name, vocab, hidden)
        head: Matrix = embedding
        if not architecture.tied:
            progress(architecture.head_name)
            head = self._dense(architecture.head_name, vocab, hidden)
        linears = {}
        for spec in architecture.linears:
            progress(spec.name)
            linears[spec.name] = self._linear(spec, adapter)
        offset = np.float32(architecture.norm_offset)
        norms = {
            n: self._vector(n, size, "norms", offset) for n, size in architecture.norms.items()
        }
        experts = {}
        for stack in architecture.experts:
            progress(stack.name)
            experts[stack.name] = self._experts(stack, adapter)
        routers = {n: self._dense(n, *shape) for n, shape in architecture.routers.items()}
        return Modules(embedding, head, linears, norms, experts, routers)

    def _embed_name(self, architecture: Architecture) -> str:
        """A tied matrix may be stored under either name, another only under its own."""
        name, head_name = architecture.embed_name, architecture.head_name
        if (
            self._folder is None
            or self._folder.has(self._stored(name))
            or not self._folder.has(self._stored(head_name))
        ):
            return name
        if not architecture.tied:
            raise CheckpointError(
                f"{self._folder.path}: the weights lack {name}, and {head_name} is not taken for "
                "it, because config.json does not say tie_word_embeddings = true"
            )
        return head_name

    def _stored(self, name: str) -> str:
        """What a tensor is called in the files."""
        return name if self._folder is None else _stored(self._folder, self._prefixes, name)

    def _has(self, name: str) -> bool:
        return self._folder is not None and self._folder.has(self._stored(name))

    def _linear(self, spec: LinearSpec, adapter: Adapter) -> Linear:
        name = f"{spec.name}.weight"
        if self._quant.scheme == "nf4":
            weight: Matrix = self._nf4(name, spec.out_features, spec.in_features)
        else:
            weight = self._dense(name, spec.out_features, spec.in_features)
        bias = None
        if spec.bias:
            bias = self._vector(f"{spec.name}.bias", spec.out_features, "norms")
        elif self._folder is not None and self._has(f"{spec.name}.bias"):
            raise CheckpointError(
                f"{self._folder.path}: the weights hold {spec.name}.bias, but config.json says "
                "that this layer has no bias"
            )
        return Linear(spec.name, weight, bias, adapter.loras.get(spec.name))

    def _keep(
        self,
        label: str,
        kind: str,
        nbytes: int,
        data: npt.NDArray[Any] | None,
        *,
        texture: bool = False,
    ) -> Storage:
        storage = Storage(label, kind, nbytes, data, texture)
        if self._device is not None:
            allocate(self._device, storage)
            storage.data = None
        return storage

    def _read(self, name: str, shape: tuple[int, ...]) -> FloatArray | None:
        if self._folder is None:
            return None
        name = self._stored(name)
        stored = self._folder.nf4(name) if len(shape) == 2 else None
        array = stored.dequantize() if stored is not None else self._folder.float32(name)
        _check_shape(self._folder, name, array.shape, shape)
        return array

    def _vector(self, name: str, size: int, kind: str, offset: np.float32 = _NO_OFFSET) -> Tensor:
        array = self._read(name, (size,))
        data = None if array is None else pad_rows(array + offset)
        return row(name, size, "float32", self._keep(name, kind, 4 * padded(size), data))

    def _dense(self, name: str, rows: int, columns: int) -> DenseMatrix:
        array = self._read(name, (rows, columns))
        row_bytes = matrix("", 1, columns, self._dtype).nbytes
        most = max(self._max_binding // row_bytes // ROW_UNIT * ROW_UNIT, ROW_UNIT)
        pieces = []
        for row0 in range(0, rows, most):
            count = min(most, rows - row0)
            data: npt.NDArray[Any] | None = None
            if array is not None:
                data = pad_rows(array[row0 : row0 + count])
                data = to_bfloat16(data) if self._dtype == "bfloat16" else data
            storage = self._keep(name, "base", count * row_bytes, data, texture=self._textures)
            pieces.append((row0, matrix(name, count, columns, self._dtype, storage)))
        return DenseMatrix(rows, columns, tuple(pieces))

    def _experts(self, stack: ExpertSpec, adapter: Adapter) -> ExpertLinear:
        names = [f"{spec.name}.weight" for spec in stack.linears]
        shape = stack.out_features, stack.in_features
        weight: ExpertMatrix
        if self._quant.scheme == "nf4":
            weight = self._nf4(f"{stack.name}.weight", *shape, names)
        else:
            weight = self._dense_experts(stack.name, *shape, names)
        return ExpertLinear(stack.name, weight, adapter.expert_loras.get(stack.name))

    def _dense_experts(self, name: str, rows: int, columns: int, names: list[str]) -> DenseExperts:
        one = matrix("", rows, columns, self._dtype).nbytes
        most = max(self._max_binding // one, 1)
        pieces = []
        for first in range(0, len(names), most):
            some = names[first : first + most]
            data: npt.NDArray[Any] | None = None
            if self._folder is not None:
                arrays = [self._read(each, (rows, columns)) for each in some]
                data = pad_rows(np.concatenate([a for a in arrays if a is not None]))
                data = to_bfloat16(data) if self._dtype == "bfloat16" else data
            storage = self._keep(name, "base", len(some) * one, data, texture=self._textures)
            whole = matrix(name, len(some) * rows, columns, self._dtype, storage)
            pieces.append((first, len(some), whole))
        return DenseExperts(len(names), rows, columns, tuple(pieces))

    def _nf4(
        self, name: str, rows: int, columns: int, names: Sequence[str] | None = None
    ) -> NF4Matrix:
        """One matrix, or those of that many ``names`` one below the other."""
        stored = [self._quantized(each, rows, columns) for each in names or [name]]
        quantized = stored[0]
        blocksize: int = self._quant.blocksize
        double = self._quant.double_quant
        nested_blocksize = 256
        if quantized is not None:
            blocksize, nested_blocksize = quantized.blocksize, quantized.nested_blocksize
            double = quantized.nested_absmax is not None
        blocks = -(-rows * columns // blocksize)
        given = self._stacked([q for q in stored if q is not None], name)

        def part(leaf: str, length: int, dtype: str) -> Tensor:
            if len(stored) > 1:
                length = len(stored) * -(-length // EXPERT_WORDS) * EXPERT_WORDS
            nbytes, data = 4 * length, given.get(leaf)
            return vector(
                f"{name}.{leaf}", length, dtype, self._keep(f"{name}.{leaf}", "base", nbytes, data)
            )

        codes = part("codes", -(-rows * columns // 8), "uint32")
        if double:
            absmax = part("absmax", -(-blocks // 4), "uint32")
            count = -(-blocks // nested_blocksize)
            nested = part("nested_absmax", count, "float32")
        else:
            absmax = part("absmax", blocks, "float32")
            nested = None
        # Where 32 codes share a row and a block.
        in_words = self._textures and columns % 32 == 0 and blocksize % 32 == 0
        return NF4Matrix(
            name=name,
            rows=rows,
            columns=columns,
            blocksize=blocksize,
            codes=codes,
            absmax=absmax,
            maps=part("maps", 273, "float32"),
            nested_absmax=nested,
            nested_blocksize=nested_blocksize,
            codebook=self._codebook(quantized) if in_words else None,
            experts=len(stored),
        )

    def _stacked(self, stored: list[NF4Tensor], name: str) -> dict[str, npt.NDArray[Any]]:
        """What is uploaded of one matrix, or of several that lie one below the other."""
        if len(stored) < 2:
            return _device_arrays(stored[0]) if stored else {}
        kinds = {(q.blocksize, q.nested_blocksize, q.nested_absmax is None) for q in stored}
        maps = {q.quant_map.tobytes() for q in stored}
        if self._folder is not None and (len(kinds) > 1 or len(maps) > 1):
            raise CheckpointError(
                f"{self._folder.path}: the experts of {name} differ in how they are quantized"
            )
        arrays = [_device_arrays(q) for q in stored]
        return {
            leaf: np.concatenate([_whole_words(each[leaf]) for each in arrays])
            for leaf in arrays[0]
        }

    def _codebook(self, quantized: NF4Tensor | None) -> Tensor:
        """The values of pairs of codes, shared by all matrices with the same map."""
        key = b"" if quantized is None else quantized.quant_map.tobytes()
        if key not in self._codebooks:
            data = None if quantized is None else pair_values(quantized.quant_map)
            storage = self._keep("codebook", "base", 256 * TEXEL, data, texture=True)
            self._codebooks[key] = vector("codebook", 1024, "float32", storage)
        return self._codebooks[key]

    def _quantized(self, name: str, rows: int, columns: int) -> NF4Tensor | None:
        if self._folder is None:
            return None
        name = self._stored(name)
        stored = self._folder.nf4(name)
        if stored is not None:
            _check_shape(self._folder, name, stored.shape, (rows, columns))
            return stored
        array = self._read(name, (rows, columns))
        assert array is not None
        return quantize_nf4(array, self._quant.blocksize, self._quant.double_quant)


def stored_name(folder: ModelFolder, architecture: Architecture, name: str) -> str:
    """What a tensor of a model is called in its files."""
    return _stored(folder, architecture.stored_prefixes, name)


def _stored(folder: ModelFolder, prefixes: Sequence[tuple[str, str]], name: str) -> str:
    if not folder.has(name):
        for own, other in prefixes:
            if name.startswith(own) and folder.has(other + name.removeprefix(own)):
                return other + name.removeprefix(own)
    return name


def nf4_matrix(name: str, quantized: NF4Tensor, *, textures: bool) -> NF4Matrix:
    """A quantized matrix with its bytes, to be allocated with the plan that uses it."""
    parts = {}
    for leaf, array in _device_arrays(quantized).items():
        data = array if array.dtype == np.float32 else array.view(np.uint32)
        storage = Storage(f"{name}.{leaf}", "base", data.nbytes, data)
        parts[leaf] = vector(f"{name}.{leaf}", data.size, str(data.dtype), storage)
    codebook = None
    if textures and quantized.shape[1] % 32 == 0 and quantized.blocksize % 32 == 0:
        pairs = pair_values(quantized.quant_map)
        storage = Storage("codebook", "base", pairs.nbytes, pairs, texture=True)
        codebook = vector("codebook", pairs.size, "float32", storage)
    return NF4Matrix(
        name=name,
        rows=quantized.shape[0],
        columns=quantized.shape[1],
        blocksize=quantized.blocksize,
        codes=parts["codes"],
        absmax=parts["absmax"],
        maps=parts["maps"],
        nested_absmax=parts.get("nested_absmax"),
        nested_blocksize=quantized.nested_blocksize,
        codebook=codebook,
    )


def _device_arrays(quantized: NF4Tensor) -> dict[str, npt.NDArray[Any]]:
    """What is uploaded of a quantized matrix; bytes are padded to whole 32-bit words."""

    def words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.pad(array.reshape(-1), (0, (-array.nbytes % 4) // array.itemsize))

    maps = np.zeros(273, np.float32)
    maps[:16] = quantized.quant_map
    arrays = {"codes": words(quantized.codes), "absmax": words(quantized.absmax), "maps": maps}
    if quantized.nested_absmax is not None and quantized.nested_quant_map is not None:
        maps[16:272] = quantized.nested_quant_map
        maps[272] = quantized.nested_offset
        arrays["nested_absmax"] = quantized.nested_absmax
    return arrays


def _whole_words(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Padded so that what follows may be bound by itself."""
    flat = array.reshape(-1)
    return np.pad(flat, (0, -flat.nbytes % (4 * EXPERT_WORDS) // flat.itemsize))


def _check_shape(
    folder: ModelFolder, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if tuple(found) != wanted:
        raise CheckpointError(
            f"{folder.path}: {name} has shape {tuple(found)}, but config.json asks for {wanted}"
        )
