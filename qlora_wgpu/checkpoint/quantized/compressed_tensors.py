"""Folders in compressed-tensors' formats, as llm-compressor writes them, per group of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.coded_weight import CodedWeight, QuantizedFiles
from qlora_wgpu.checkpoint.quantized.float_weights import Fp8Weight, Mxfp4Weight, Nvfp4Weight
from qlora_wgpu.checkpoint.stored_weight import Files, FloatArray
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.safetensors_formats import byte_format, packed_format, scaled_weight, unpack
from qlora_wgpu.sandbox.expressions import ExpressionError, begins
from qlora_wgpu.weight_format import WHOLE

# ---- groups --------------------------------------------------------------------------------------

FP8, INT, PACKED, NVFP4, MXFP4 = "FP8", "INT", "PACKED", "NVFP4", "MXFP4"

_FORMATS = {
    "pack-quantized": PACKED,
    "int-quantized": INT,
    "float-quantized": FP8,
    "naive-quantized": "",  # depends on the type of weights
    "mxfp8-quantized": FP8,
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
}
_MIXED = "mixed-precision"
_PATTERN = "re:"
_CLASSES = ("Linear", "LinearBase")
_MAX_SIZE = 2**20


@dataclass(frozen=True)
class Group:
    """How the layers of a group are quantized."""

    targets: tuple[str, ...]  # names, patterns and classes of its layers
    kind: str  # ``FP8``, ``INT``, ``PACKED``, ``NVFP4`` or ``MXFP4``
    bits: int  # of an integer
    has_zeros: bool  # whether blocks have zero points
    tile: tuple[int, int]  # rows and columns that share a scale; ``WHOLE`` for all


class CompressedGroups:
    """All groups of a ``quantization_config``.

    Attributes:
        quantizes_more: Whether it quantizes activations or the KV cache, too.
    """

    def __init__(self, quantization: Mapping[str, Any], place: Path | str) -> None:
        """``place`` is the folder, for messages."""
        self._place = place
        self.quantizes_more = quantization.get("kv_cache_scheme") is not None
        groups = quantization.get("config_groups", {})
        if not isinstance(groups, Mapping):
            raise self._invalid("config_groups", "an object", groups)
        self.all: list[Group] = []
        self._by_target: dict[str, Group] = {}
        for name, group in groups.items():
            where = f"config_groups.{name}"
            if not isinstance(group, Mapping):
                raise self._invalid(where, "an object", group)
            activations = (group.get("input_activations"), group.get("output_activations"))
            self.quantizes_more |= activations != (None, None)
            if group.get("weights") is not None:
                read = self._group(where, group, quantization.get("format"))
                self.all.append(read)
                self._by_target |= dict.fromkeys(read.targets, read)
        if not self.all:
            kind = self._kind(quantization.get("format"), {}, 8)
            self.all.append(Group((), kind, 8, has_zeros=False, tile=(1, WHOLE)))
        ignored = quantization.get("ignore")
        self._ignored = [n for n in ignored if isinstance(n, str)] if ignored else []

    def of(self, module: str) -> Group | None:
        """The group of a linear layer, by its full name; a single group has all layers.

        As in compressed-tensors' ``match_targets``, names go before patterns, and patterns before
        classes.
        """
        if len(self.all) == 1:
            return self.all[0]
        targets = sorted(self._by_target, key=lambda target: (_PATTERN in target, target))
        named = [target for target in targets if self._matches(target, module)]
        classes = [target for target in targets if target in _CLASSES]
        first = next(iter(named + classes), None)
        return None if first is None else self._by_target[first]

    def is_ignored(self, module: str) -> bool:
        """Whether a linear layer is not quantized."""
        return any(name in _CLASSES or self._matches(name, module) for name in self._ignored)

    def _matches(self, target: str, module: str) -> bool:
        if not target.startswith(_PATTERN):
            return target == module
        try:
            return begins(target.removeprefix(_PATTERN), module)
        except ExpressionError as err:
            raise CheckpointError(
                f"{self._place}: the pattern {target[:80]!r} of quantization_config {err}"
            ) from err

    def _group(self, where: str, group: Mapping[str, Any], format: Any) -> Group:
        weights, targets = group["weights"], group.get("targets", [])
        if not isinstance(weights, Mapping):
            raise self._invalid(f"{where}.weights", "an object", weights)
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise self._invalid(f"{where}.targets", "a list of names", targets)
        bits = weights.get("num_bits", 8)
        if type(bits) is not int or not 1 <= bits <= 8:
            raise self._invalid(f"{where}.weights.num_bits", "from 1 to 8", bits)
        own = group.get("format")
        return Group(
            targets=tuple(targets),
            kind=self._kind(format if own is None or own == _MIXED else own, weights, bits),
            bits=bits,
            has_zeros=weights.get("symmetric") is False,
            tile=self._tile(where, weights),
        )

    def _kind(self, format: Any, weights: Mapping[str, Any], bits: int) -> str:
        kind = _FORMATS.get(format) if isinstance(format, str) else None
        is_float = str(weights.get("type", "int")).lower() == "float"
        if kind == "" and not (is_float and bits != 8):
            kind = FP8 if is_float else INT
        if not kind:
            raise UnsupportedModelError(
                f"{self._place} is quantized with compressed-tensors, format {str(format)[:80]}, "
                f"which is not supported (supported: {', '.join(_FORMATS)}): use the unquantized "
                "model"
            )
        return kind

    def _tile(self, where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
        size, tile = weights.get("group_size"), weights.get("block_structure")
        strategy = weights.get("strategy")
        if strategy is None:  # as compressed-tensors infers it
            strategy = "channel" if size == -1 else "tensor" if size is None else "group"
            strategy = strategy if tile is None else "block"
        if strategy == "channel":
            return 1, WHOLE
        if strategy == "tensor":
            return WHOLE, WHOLE
        if strategy in ("group", "tensor_group"):
            if type(size) is not int or not 0 < size < _MAX_SIZE:
                raise self._invalid(f"{where}.weights.group_size", "a positive integer", size)
            return 1, size
        if strategy == "block":
            return self._block(f"{where}.weights.block_structure", tile)
        names = "group, tensor_group, channel, tensor or block"
        raise self._invalid(f"{where}.weights.strategy", names, strategy)

    def _block(self, where: str, tile: Any) -> tuple[int, int]:
        sizes: Any = tile
        if isinstance(tile, str):  # older versions wrote "128x128"
            sizes = [int(n) if n.isascii() and n.isdigit() else 0 for n in tile.split("x")]
        if (
            not isinstance(sizes, list)
            or len(sizes) != 2
            or not all(type(size) is int and 0 < size < _MAX_SIZE for size in sizes)
        ):
            raise self._invalid(where, "a list of two sizes", tile)
        return sizes[0], sizes[1]

    def _invalid(self, where: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self._place}: {where} of quantization_config must be {expected}, got {brief(value)}"
        )


# ---- integers ------------------------------------------------------------------------------------

_SCALE, _ZERO = "weight_scale", "weight_zero_point"
_PACKED, _SHAPE, _ORDER = "weight_packed", "weight_shape", "weight_g_idx"
_WORDS = ("I32", "U32")


class _IntegerWeight(CodedWeight):
    """Integers in bytes or in 32-bit words.

    ``X.weight`` is I8, or ``X.weight_packed`` I32 with ``X.weight_shape``; ``X.weight_scale`` and
    perhaps ``X.weight_zero_point`` have a number for each block. With ``actorder: group``, the
    columns of a group are not contiguous, and no kernel reads them.
    """

    companions = (_SCALE, _ZERO, _SHAPE, _ORDER)

    def __init__(
        self, files: Files, name: str, torch_dtype: str, *, groups: CompressedGroups
    ) -> None:
        super().__init__(files, name, torch_dtype)
        self._groups = groups

    @property
    def format(self) -> WeightFormat | None:
        """The integers' format, with blocks from the scales' shape; None with act order."""
        return self._form if self._order is None else None

    def quantized(self) -> QuantizedWeight | None:
        """Codes, scales and zero points as stored."""
        form = self.format
        if form is None:
            return None
        scales = self._floats(_SCALE)
        zeros = self._zeros(scales.shape) if form.has_zeros else None
        return scaled_weight(form, self._codes, scales, self.torch_dtype, zeros)

    def _dequantize_act_order(self) -> FloatArray:
        """(q - zero) · scale, by the group of each column."""
        form, scales, order = self._form, self._floats(_SCALE), self._order
        values: FloatArray = form.quant_map[self._codes]
        if form.has_zeros:
            values -= self._zeros(scales.shape)[:, order]
        values *= scales[:, order]
        return values

    @property
    @abstractmethod
    def _codes(self) -> npt.NDArray[np.uint8]:
        """(out_features, in_features) as stored."""

    @abstractmethod
    def _zeros(self, shape: tuple[int, ...]) -> FloatArray:
        """The zero points, for scales of this shape."""

    @property
    @abstractmethod
    def _form(self) -> WeightFormat:
        """The format without act order."""

    @property
    def _group(self) -> Group:
        group = self._groups.of(self.name.removesuffix(".weight"))
        if group is None:
            raise self._error(self.codes_leaf, "does not belong to a group of quantization_config")
        return group

    @property
    def _tile(self) -> tuple[int, int]:
        (rows, columns), scales = self.shape, self._shape_of(_SCALE)
        if int(np.prod(scales)) == 1:
            return WHOLE, WHOLE
        if scales in ((rows,), (rows, 1)):
            return 1, WHOLE
        tile = self._group.tile
        if scales != (-(-rows // tile[0]), -(-columns // tile[1])):
            raise self._error(
                _SCALE,
                f"has shape {scales}, which does not match quantization_config for a weight of "
                f"{rows} x {columns}",
            )
        return tile

    @property
    def _order(self) -> npt.NDArray[np.int32] | None:
        """The group of each column; None without act order."""
        if not self._has(_ORDER):
            return None
        size = self._tile[1]
        order = self._raw(_ORDER, ("I32", "I64"), self.shape[1:])
        # -1 means no act order in compressed-tensors
        return None if (order == -1).any() else self._group_of_columns(_ORDER, size)


class ByteWeight(_IntegerWeight):
    """A byte for each integer: ``int-quantized`` and ``naive-quantized``."""

    codes_types = ("I8",)

    @property
    def _form(self) -> WeightFormat:
        return byte_format(self._tile, self.shape[1], has_zeros=self._has(_ZERO))

    @property
    def _codes(self) -> npt.NDArray[np.uint8]:
        return self._raw(self.codes_leaf, ("I8",), self.shape).view(np.uint8)

    def _zeros(self, shape: tuple[int, ...]) -> FloatArray:
        return self._raw(_ZERO, ("I8",), shape).astype(np.float32)


class PackedWeight(_IntegerWeight):
    """Integers of 1 to 8 bits in 32-bit words: ``pack-quantized``."""

    codes_leaf = _PACKED
    codes_types = _WORDS

    @property
    def shape(self) -> tuple[int, int]:
        """``X.weight_shape``, or the number of integers in the words."""
        rows, words = self._matrix(_PACKED)
        bits = self._group.bits
        if not self._has(_SHAPE):
            return rows, words * 32 // bits
        shape = self._raw(_SHAPE, ("I32", "I64"), (2,)).tolist()
        if shape[0] != rows or -(-shape[1] * bits // 32) != words:
            raise self._error(
                _SHAPE,
                f"is {shape[0]} x {shape[1]}, which does not match {rows} rows of {words} words "
                f"with {bits}-bit integers",
            )
        return rows, shape[1]

    @property
    def _form(self) -> WeightFormat:
        bits, columns = self._group.bits, self.shape[1]
        return packed_format(bits, self._tile, columns, has_zeros=self._has(_ZERO))

    @property
    def _codes(self) -> npt.NDArray[np.uint8]:
        words = self._raw(_PACKED, _WORDS).view(np.int32)
        return unpack(words, self._group.bits)[:, : self.shape[1]]

    def _zeros(self, shape: tuple[int, ...]) -> FloatArray:
        """Packed by columns, or bytes."""
        bits, rows = self._group.bits, self.shape[0]
        if self._dtype_of(_ZERO) == "I8":
            zeros = self._raw(_ZERO, ("I8",), shape).astype(np.float32)
            return zeros + np.float32(2 ** (bits - 1))
        stored = (-(-rows * bits // 32), int(np.prod(shape)) // rows)
        words = self._raw(_ZERO, _WORDS, stored).view(np.int32)
        return unpack(np.ascontiguousarray(words.T), bits)[:, :rows].T.astype(np.float32)


# ---- the folder ----------------------------------------------------------------------------------

_CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")
_WHOLE_ROWS = {(1, WHOLE), (WHOLE, WHOLE)}
_NOTE = (
    "quantization_config also quantizes activations or the KV cache for inference, which is "
    "ignored: only weights are quantized"
)


def compressed_files(
    files: Files, config: Mapping[str, Any], quantization: Mapping[str, Any], path: Path
) -> QuantizedFiles:
    """A folder's weights; names and dtypes of tensors decide which kind each one is."""
    _refuse_transforms(path, quantization)
    groups = CompressedGroups(quantization, path)
    tiles = {group.tile for group in groups.all if group.kind == FP8} - _WHOLE_ROWS
    if len(tiles) > 1:
        raise UnsupportedModelError(
            f"{path}: FP8 groups with different block_structure in quantization_config are not "
            "supported: use the unquantized model"
        )
    return QuantizedFiles(
        files,
        config,
        partial(PackedWeight, groups=groups),
        partial(ByteWeight, groups=groups),
        partial(Fp8Weight, tile=next(iter(tiles), None)),
        Mxfp4Weight,
        Nvfp4Weight,
        notes=(_NOTE,) if groups.quantizes_more else (),
        unused=_CACHE_SCALES,
    )


def _refuse_transforms(path: Path, quantization: Mapping[str, Any]) -> None:
    sparse = quantization.get("sparsity_config")
    kind = sparse.get("format", "dense") if isinstance(sparse, Mapping) and sparse else "dense"
    if kind != "dense":
        raise UnsupportedModelError(
            f"{path}: sparse weights of compressed-tensors ({brief(kind)}) are not supported: use "
            "the unquantized model"
        )
    if quantization.get("transform_config"):
        raise UnsupportedModelError(
            f"{path}: rotated weights of compressed-tensors (transform_config) are not supported: "
            "use the unquantized model"
        )
