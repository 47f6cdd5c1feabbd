"""Vision towers: from an image's patches to the features that replace its placeholders' embeddings.

A tower is frozen and runs forward only. The host arranges the patches of all images as rows of one
sequence, in an order in which merging neighbouring patches is a reshape; whole images, or windows
of them, are blocks of its attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.families.family import LinearSpec, Weights
from qlora_wgpu.families.parts.layer_ops import LayerOps
from qlora_wgpu.families.parts.mlp import GatedMLP, PlainMLP
from qlora_wgpu.families.parts.norm import Norm
from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.ops.tensor import clamped

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# ---- weights -------------------------------------------------------------------------------------


def as_stored(array: FloatArray) -> FloatArray:
    return array


@dataclass(frozen=True)
class TowerMatrix:
    """The matrix of a product, and how it is made from tensors of the files."""

    name: str  # of the layer
    out_features: int
    in_features: int
    tensor: str  # the weight's name
    shape: tuple[int, ...]  # its shape
    bias: str = ""  # the bias's name; empty without one
    first: int = 0  # the first row of weight and bias, if they are parts of larger ones
    make: Callable[[FloatArray], FloatArray] = as_stored  # makes (rows, in_features) of the tensor

    @classmethod
    def of(cls, spec: LinearSpec) -> TowerMatrix:
        shape = spec.out_features, spec.in_features
        bias = f"{spec.name}.bias" if spec.bias else ""
        return cls(spec.name, *shape, f"{spec.name}.weight", shape, bias)


@dataclass(frozen=True)
class TowerRow:
    """A row of float32 numbers, such as a norm's weight, and how it is made from what is stored."""

    shape: tuple[int, ...]  # of the tensor, whose name is the row's; () for a single number
    offset: float = 0.0  # added to what is stored
    make: Callable[[FloatArray], FloatArray] = as_stored  # before that

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TowerWeights:
    """All weights of a tower or of its parts."""

    matrices: tuple[TowerMatrix, ...] = ()
    rows: Mapping[str, TowerRow] = field(default_factory=dict)
    # Shapes by name of the tensors that the host reads: tables of positions and single rows.
    host: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Weights) -> TowerWeights:
        """Those of linear layers."""
        return cls(tuple(map(TowerMatrix.of, weights.linears)))

    @classmethod
    def of_norm(cls, norm: Norm, name: str, size: int) -> TowerWeights:
        return cls(
            rows={
                leaf: TowerRow((size,), norm.offset if leaf.endswith("weight") else 0.0)
                for leaf in norm.weights(name, size).norms
            }
        )

    def __add__(self, other: TowerWeights) -> TowerWeights:
        return TowerWeights(
            self.matrices + other.matrices,
            {**self.rows, **other.rows},
            {**self.host, **other.host},
        )


# ---- what the device computes --------------------------------------------------------------------


@dataclass(frozen=True)
class TowerInputs:
    """The inputs of a tower's program, written by the host."""

    pixels: Tensor  # operands (rows, channels · patch_size²)
    # float32 (rows, hidden_size), added to the patches' embeddings; None if the tower has none.
    added: Tensor | None
    angles: Tensor | None  # float32 (rows · head_dim): (cos, sin) of each row, for rotary positions
    row_numbers: Tensor  # uint32 (rows): 0, 1, 2, …


class TowerOps(LayerOps):
    """Ops of a tower, some of whose layers clamp what they read and what they compute.

    Its weights are never quantized, so ``group`` computes none of them before ``linear``.
    """

    def linear(
        self, x: Tensor, name: str, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        bounds = _bounds(name)
        if bounds[0] not in self._modules.norms:
            return super().linear(x, name, residual, **options)
        if residual is not None:
            raise GraphError(f"{name} clamps its output, which must not have a residual")
        lowest, highest, *of_output = map(self.small, bounds)
        x = clamped(self.g, x, lowest, highest)
        return clamped(self.g, super().linear(x, name, **options), *of_output)


def _bounds(name: str) -> list[str]:
    """The numbers of a layer ``….linear`` that clamps."""
    leaves = ("input_min", "input_max", "output_min", "output_max")
    return [f"{name.removesuffix('linear')}{leaf}" for leaf in leaves]


def _with_bounds(weights: TowerWeights) -> TowerWeights:
    """Weights of layers that clamp, with their numbers."""
    bounds = (bound for matrix in weights.matrices for bound in _bounds(matrix.name))
    return weights + TowerWeights(rows=dict.fromkeys(bounds, TowerRow((), make=_finite)))


def _finite(number: FloatArray) -> FloatArray:
    """Infinities, which shaders may not read, as the largest numbers."""
    return np.nan_to_num(number)


@dataclass(frozen=True)
class TowerAttention:
    """Attention of all heads within the blocks of the batch, with biases or without."""

    hidden_size: int
    heads: int
    bias: bool = True
    # The layers of q, k and v, or one layer of all three.
    leaves: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.out_proj"
    scale: float | None = None  # factor of the scores; None for 1 / √head_dim
    # The epsilon of RMSNorms of each head's query, key and value, the latter without a weight.
    head_norm: float | None = None
    # Whether each half of a head is rotated by itself, the first one by columns.
    by_halves: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    def weights(self, at: str) -> TowerWeights:
        size, matrices = self.hidden_size, list[TowerMatrix]()
        if len(self.leaves) == 1:
            whole = f"{at}{self.leaves[0]}"
            bias = f"{whole}.bias" if self.bias else ""
            for first, name in zip(range(0, 3 * size, size), self._names(at), strict=True):
                weight, shape = f"{whole}.weight", (3 * size, size)
                matrices.append(TowerMatrix(name, size, size, weight, shape, bias, first))
        else:
            specs = [LinearSpec(name, size, size, self.bias) for name in self._names(at)]
            matrices += map(TowerMatrix.of, specs)
        if self.by_halves:  # in the order of ``AxialRope``
            ordered = partial(_joined_halves, self.head_dim)
            matrices[:2] = [replace(matrix, make=ordered) for matrix in matrices[:2]]
        out = LinearSpec(f"{at}{self.out}", size, size, self.bias)
        weights = TowerWeights((*matrices, TowerMatrix.of(out)))
        if self.head_norm is not None:
            norm = TowerRow((self.head_dim,), make=ordered if self.by_halves else as_stored)
            weights += TowerWeights(rows={f"{at}{name}.weight": norm for name in _HEAD_NORMS})
        return weights

    def trace(
        self, ops: LayerOps, x: Tensor, h: Tensor | None, at: str, given: TowerInputs
    ) -> Tensor:
        """Attention's output for x, plus h if it is given, float32."""
        q, k, v = (ops.linear(x, name) for name in self._names(at))
        if self.head_norm is not None:
            eps = self.head_norm
            q, k = (
                ops.qk_norm(y, at + name, eps) for y, name in zip((q, k), _HEAD_NORMS, strict=True)
            )
            v = ops.plain_qk_norm(v, self.head_dim, eps)
        if given.angles is not None:
            size, rows = self.head_dim, given.row_numbers
            q, k = rope(ops.g, [q, k], given.angles, ops.batch, size, size, rows=rows)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        y = ops.attention(q, k, v, self.head_dim, scale)
        return ops.linear_out(y, f"{at}{self.out}", h, 1.0)

    def _names(self, at: str) -> list[str]:
        if len(self.leaves) == 1:
            return [f"{at}{self.leaves[0]}.{part}" for part in "qkv"]
        return [f"{at}{leaf}" for leaf in self.leaves]


_HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"


def _joined_halves(head_dim: int, array: FloatArray) -> FloatArray:
    """Rows of heads (a, b, c, d), of which a and b are rotated together, as (c, a, d, b)."""
    quarters = array.reshape(-1, 4, head_dim // 4, *array.shape[1:])
    return quarters[:, [2, 0, 3, 1]].reshape(array.shape)


@dataclass(frozen=True)
class TowerLayer:
    """A pre-norm layer, which may have norms of both halves' output, too."""

    norm: Norm
    attention: TowerAttention
    mlp: PlainMLP | GatedMLP
    # Names of the norms of attention's input, and of the MLP's.
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    post_norms: tuple[str, str] | None = None  # of their outputs
    clamps: bool = False  # whether linear layers clamp, see ``TowerOps``

    def weights(self, at: str) -> TowerWeights:
        weights = self.attention.weights(at) + TowerWeights.of(self.mlp.weights(at))
        if self.clamps:
            weights = _with_bounds(weights)
        for name in self.norms + (self.post_norms or ()):
            weights += TowerWeights.of_norm(self.norm, at + name, self.attention.hidden_size)
        return weights

    def trace(self, ops: LayerOps, h: Tensor, at: str, given: TowerInputs) -> Tensor:
        first, second = (at + name for name in self.norms)
        if self.post_norms is None:
            h = self.attention.trace(ops, self.norm.trace(ops, h, first), h, at, given)
            return self.mlp.trace(ops, self.norm.trace(ops, h, second), at, h, 1.0)
        after, last = (at + name for name in self.post_norms)
        y = self.attention.trace(ops, self.norm.trace(ops, h, first), None, at, given)
        h = self.norm.trace(ops, y, after, h)
        y = self.mlp.trace(ops, self.norm.trace(ops, h, second), at, None, 1.0)
        return self.norm.trace(ops, y, last, h)


@dataclass(frozen=True)
class PatchEmbedding:
    """The product of a patch's pixels, (channels, patch_size, patch_size), with a matrix."""

    name: str  # of the layer
    hidden_size: int
    patch_size: int
    channels: int = 3
    bias: bool = True
    frames: int = 1  # equal ones that a kernel over time covers, whose weights are added up
    # Whether the weight is a matrix whose columns have the channels last.
    channels_last: bool = False
    centers: bool = False  # whether pixels from 0 to 1 are moved to -1 to 1 first

    @property
    def columns(self) -> int:
        return self.channels * self.patch_size**2

    def weights(self) -> TowerWeights:
        size, side, channels = self.hidden_size, self.patch_size, self.channels
        shape: tuple[int, ...] = (size, channels, side, side)
        if self.channels_last:
            shape = (size, self.columns)
        elif self.frames > 1:
            shape = (size, channels, self.frames, side, side)
        bias = f"{self.name}.bias" if self.bias else ""
        weight = f"{self.name}.weight"
        made = TowerMatrix(self.name, size, self.columns, weight, shape, bias, make=self._matrix)
        return TowerWeights((made,))

    def _matrix(self, weight: FloatArray) -> FloatArray:
        if self.channels_last:
            sides = self.patch_size, self.patch_size
            weight = weight.reshape(self.hidden_size, *sides, -1).transpose(0, 3, 1, 2)
        elif self.frames > 1:
            weight = weight.sum(axis=2)
        return weight.reshape(self.hidden_size, self.columns)

    def grid(self, pixels: FloatArray) -> tuple[int, int]:
        """Rows and columns of whole patches."""
        _, height, width = pixels.shape
        return height // self.patch_size, width // self.patch_size

    def patches(self, pixels: FloatArray) -> FloatArray:
        """(patches, columns) of (channels, height, width), row by row."""
        side, (rows, columns) = self.patch_size, self.grid(pixels)
        whole = pixels[:, : rows * side, : columns * side]
        parts = whole.reshape(self.channels, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        if self.centers:
            parts = 2 * (parts - np.float32(0.5))
        return parts.reshape(rows * columns, self.columns)


class Connector(Protocol):
    """What makes features of a tower's hidden states."""

    def weights(self) -> TowerWeights:
        """The weights, all by their tensors' names."""

    @property
    def out_features(self) -> int:
        """Columns of the features."""

    def trace(self, ops: LayerOps, states: Sequence[Tensor]) -> list[Tensor]:
        """The features, float32 (rows / merged patches, hidden_size), then those of DeepStack."""


# ---- what the host arranges ----------------------------------------------------------------------


class Positions(Protocol):
    """Learned positions of patches."""

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of its tables by tensor name."""

    def rows(self, tables: Mapping[str, FloatArray], grid: tuple[int, int]) -> FloatArray:
        """(tokens, hidden_size) to add, row by row; a class token comes first."""


@dataclass(frozen=True)
class AxialRope:
    """Rotary positions: half of a head's pairs by the patch's row, half by its column."""

    head_dim: int
    theta: float = 10_000.0
    alternate: bool = False  # whether rows and columns take turns in one series of frequencies

    def angles(self, places: IntArray) -> FloatArray:
        """(tokens, head_dim / 2, 2) of (cos, sin) for the rows and columns (tokens, 2)."""
        size = self.head_dim if self.alternate else self.head_dim // 2
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        series = (1.0 / self.theta**exponents).astype(np.float32)
        pair = (series[::2], series[1::2]) if self.alternate else (series, series)
        each = [places[:, axis, None].astype(np.float32) * pair[axis] for axis in (0, 1)]
        angles = np.concatenate(each, axis=1).astype(np.float64)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Arranged:
    """A crop as rows of a tower's sequence."""

    pixels: FloatArray  # (tokens, columns of a patch)
    added: FloatArray | None  # (tokens, hidden_size)
    angles: FloatArray | None  # (tokens, head_dim / 2, 2)
    windows: IntArray  # (tokens): the window of each, in ascending order; zeros without windows
    places: IntArray  # where in the features, before ``skip``, each merged row belongs
    grid: tuple[int, int]  # rows and columns of merged patches


@dataclass(frozen=True)
class VisionTower:
    """A tower with its connector."""

    embedding: PatchEmbedding
    layers: tuple[TowerLayer, ...]
    connector: Connector
    layer_prefix: str  # of the layers' weights, before their number
    # Prefixes of modules and what files may have in their place.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    positions: Positions | None = None
    rope: AxialRope | None = None
    first_norm: tuple[str, Norm] | None = None  # of the embedded patches, with its name
    last_norm: tuple[str, Norm] | None = None  # of the last layer's states
    # The hidden states that the connector reads, by the number of layers before them.
    selected: tuple[int, ...] = ()
    class_token: bool = False  # whether ``positions`` has a row of its own in front
    skip: int = 0  # rows of a crop in front that are no features
    merge: int = 1  # patches of a side that are merged
    window: int = 0  # merged patches of a window's side; 0 if all attend to all
    whole: frozenset[int] = frozenset()  # the layers without windows
    # A row that ends each row of an image that is put together from tiles (LLaVA-NeXT).
    newline: str = ""
    has_grid: bool = False  # whether the language model places tokens by rows and columns

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def needed(self) -> tuple[TowerLayer, ...]:
        """The layers up to the last one whose states are read."""
        is_whole = self.last_norm is not None or not self.selected
        return self.layers if is_whole else self.layers[: max(self.selected)]

    def rows(self, height: int, width: int) -> int:
        """Rows of its sequence for a crop of this size."""
        side = self.embedding.patch_size
        return (height // side) * (width // side) + self.class_token

    def weights(self) -> TowerWeights:
        weights = self.embedding.weights() + self.connector.weights()
        for i, layer in enumerate(self.needed):
            weights += layer.weights(f"{self.layer_prefix}{i}.")
        for name, norm in filter(None, (self.first_norm, self.last_norm)):
            weights += TowerWeights.of_norm(norm, name, self.hidden_size)
        if self.positions is not None:
            weights += TowerWeights(host=self.positions.weights())
        if self.newline:
            weights += TowerWeights(host={self.newline: (self.connector.out_features,)})
        return weights

    def trace(self, whole: LayerOps, windowed: LayerOps, given: TowerInputs) -> list[Tensor]:
        """The features of all rows, by ops whose batch has images, or windows, as blocks."""
        h = whole.linear(given.pixels, self.embedding.name, given.added, float32=True)
        if self.first_norm is not None:
            name, norm = self.first_norm
            h = norm.trace(whole, h, name)
        states = [h]
        for i, layer in enumerate(self.needed):
            ops = windowed if self.window and i not in self.whole else whole
            h = layer.trace(ops, h, f"{self.layer_prefix}{i}.", given)
            states.append(h)
        if self.last_norm is not None:
            name, norm = self.last_norm
            return self.connector.trace(whole, [norm.trace(whole, h, name)])
        return self.connector.trace(whole, [states[i] for i in self.selected or (-1,)])

    def arrange(self, pixels: FloatArray, tables: Mapping[str, FloatArray]) -> Arranged:
        """The rows of a crop, (channels, height, width)."""
        rows, columns = grid = self.embedding.grid(pixels)
        if not rows or not columns or rows % self.merge or columns % self.merge:
            raise ShapeError(
                "the sides of an image for the vision tower must be multiples of "
                f"{self.merge * self.embedding.patch_size} pixels, got {pixels.shape[2]} x "
                f"{pixels.shape[1]}: check preprocessor_config.json"
            )
        units, windows = self._order(rows, columns)
        order = units.reshape(-1)
        patches = self.embedding.patches(pixels)[order]
        added = None if self.positions is None else self.positions.rows(tables, grid)
        if self.class_token:
            patches = np.concatenate([np.zeros_like(patches[:1]), patches])
            order = np.concatenate([[0], order + 1])
        if added is not None:
            added = added[order]
        angles = None
        if self.rope is not None:
            angles = self.rope.angles(np.stack([order // columns, order % columns], axis=-1))
        merged = rows // self.merge, columns // self.merge
        places = np.arange(len(order)) if self.merge == 1 else self._places(units, merged)
        windows = np.repeat(windows, self.merge**2) if not self.class_token else 0 * order
        return Arranged(patches, added, angles, windows, places, merged)

    def _order(self, rows: int, columns: int) -> tuple[IntArray, IntArray]:
        """The patches (merged, merge²) in the tower's order, and the window of each merged one."""
        side = self.merge
        numbers = np.arange(rows * columns).reshape(rows // side, side, columns // side, side)
        units = numbers.transpose(0, 2, 1, 3).reshape(-1, side * side)
        if not self.window:
            return units, np.zeros(len(units), np.int64)
        i, j = np.indices((rows // side, columns // side)) // self.window
        windows = (i * columns + j).reshape(-1)
        order = np.argsort(windows, kind="stable")
        return units[order], windows[order]

    def _places(self, units: IntArray, merged: tuple[int, int]) -> IntArray:
        rows, columns = np.divmod(units[:, 0], merged[1] * self.merge)
        places: IntArray = rows // self.merge * merged[1] + columns // self.merge
        return places
