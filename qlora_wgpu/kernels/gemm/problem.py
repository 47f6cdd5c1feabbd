"""A matrix product with all that is fused into it: rows with rows, or rows with columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import DropoutMask, ExpertTiles

PART_UNIT = 64  # terms that parts of a reduction are made of


@dataclass(frozen=True)
class LoraTerm:
    """u·bᵀ, or u·a, that is added to a product.

    Attributes:
        u: (rows, r) float32; of several layers with rows their u side by side.
        factor: b (columns, r) of a product with rows, a (r, columns) of one with columns; float32.
        stride: Floats from one expert's factor to the next one's.
        dropout: What u·a is masked with, as the forward's input was.
    """

    u: Tensor
    factor: Tensor
    stride: int
    dropout: DropoutMask | None = None

    def rank(self, *, with_rows: bool) -> int:
        """Terms of each of its sums."""
        return self.factor.columns if with_rows else self.u.columns


@dataclass(frozen=True)
class Gemm:
    """y (+)= scale · x·wᵀ + term + bias + residual, or scale · x·w + mask · term.

    Attributes:
        x: (rows, K); of a product with columns the K columns from ``row0`` on.
        w: (columns, K), or for a product with columns (K, columns); any type. With experts the
            matrices of some of them, one below the other.
        y: (rows, ·); of a product with rows the columns from ``row0`` on are written.
        with_rows: Whether rows of x meet rows of w.
        row0: First row of ``w`` within the whole matrix; a multiple of eight.
        scale: The factor of the product alone.
        accumulate: Whether to add to y.
        lora: A term to add, if any.
        bias: The bias of the whole matrix, float32; with experts (all experts, columns).
        bias_begins: Where in ``bias`` those of the second and the third layer begin, in elements.
        residual: What to add, of y's layout; not to what is there.
        dropout: What x is masked with, in a product with rows.
        batch_info: Needed for dropout and for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, each tile of rows meets its expert's matrix; tiles of others are left
            alone.
        others: If there are, ``w`` is the matrices of up to three layers of one input, one below
            the other: with rows the second's and the third's results, else their x. All but the
            last have a multiple of eight columns.
        whole_columns: Columns of the product that this is a part of, if it is, with rows: its sums
            are then made in the order that those of the whole would be.
        part: Terms of each part of its reduction, if they are given, a multiple of ``PART_UNIT``:
            parts are added up one after the other, also onto what ``accumulate`` finds, so that one
            product has the bits of several of one part each.
        label: For timing tables.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    with_rows: bool
    row0: int = 0
    scale: float = 1.0
    accumulate: bool = False
    lora: LoraTerm | None = None
    bias: Tensor | None = None
    bias_begins: tuple[int, ...] = ()
    residual: Tensor | None = None
    dropout: DropoutMask | None = None
    batch_info: Tensor | None = None
    first_row: int | None = None
    experts: ExpertTiles | None = None
    others: tuple[Tensor, ...] = ()
    whole_columns: int = 0
    part: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        inner = self.x.columns == self.w.columns if self.with_rows else True
        if self.others:
            self._check_others()
        if not inner or (not self.with_rows and self.y.columns != self.w.columns):
            raise GraphError(f"gemm: {self.x}, {self.w} and {self.y} do not fit each other")
        if self.accumulate and self.residual is not None:
            raise GraphError(f"gemm: {self.y} cannot be added to with a residual")
        plain = not (self.with_rows or self.others or self.asks_terms)
        if self.part % PART_UNIT or (self.part and not plain):
            raise GraphError(f"gemm: {self} cannot be in parts of {self.part}")
        if self.x.rows != self.y.rows:
            raise GraphError(f"gemm: {self.x} and {self.y} differ in their rows")
        if self.asks_batch and self.batch_info is None:
            raise GraphError("gemm: dropout and row counts need the batch")

    def _check_others(self) -> None:
        first = self.y if self.with_rows else self.x
        parts = (first, *self.others)
        biases = len(self.others) if self.bias is not None else 0
        plain = self.residual is None and self.experts is None
        plain = plain and len(self.bias_begins) == biases
        plain = plain and not (self.row0 or (self.with_rows and self.accumulate))
        alike = self.with_rows or len({part.dtype for part in parts}) == 1
        whole = all(part.columns % 8 == 0 for part in parts)
        if (
            sum(part.columns for part in parts) != self.w.rows
            or any(part.rows != self.x.rows for part in parts)
            or not (plain and alike and whole and len(parts) <= 3)
        ):
            raise GraphError(f"gemm: {parts} are not the layers of {self.w}")

    @property
    def mask(self) -> DropoutMask | None:
        """The dropout mask that x or the term gets, if any."""
        return self.lora.dropout if self.lora is not None else self.dropout

    @property
    def asks_terms(self) -> bool:
        """Whether anything but rows meets columns."""
        return self.lora is not None or self.experts is not None or self.bias is not None

    @property
    def asks_batch(self) -> bool:
        """Whether the kernel reads the batch's key or its number of label rows."""
        return self.mask is not None or self.first_row is not None

    @property
    def own_rows(self) -> int:
        """Rows of ``w``, with experts of each one's."""
        return self.w.rows // (self.experts.count if self.experts is not None else 1)

    @property
    def columns(self) -> int:
        """Columns of the results."""
        return self.own_rows if self.with_rows else self.w.columns

    @property
    def cut_columns(self) -> int:
        """Columns by which it is decided how it is cut: those of the whole."""
        return self.whole_columns or self.columns

    @property
    def depth(self) -> int:
        """Terms of each sum."""
        return self.x.columns if self.with_rows else self.own_rows

    @property
    def cut_depth(self) -> int:
        """Terms by which it is decided how it is cut: those of a part, where that is given."""
        return min(self.depth, self.part) if self.part else self.depth

    @property
    def parts(self) -> int:
        """Parts of its reduction that are given; 1 where none are."""
        return ceil_div(self.depth, self.part) if self.part else 1

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        rank = self.lora.rank(with_rows=self.with_rows) if self.lora is not None else 0
        return 2 * self.x.rows * self.columns * (self.depth + rank)

    @property
    def name(self) -> str:
        """The shader's name: as BLAS has it, whether w is read transposed."""
        return "nt" if self.with_rows else "nn"

    @property
    def size_class(self) -> str:
        """Products that want to be cut alike (``Profile.products``)."""
        return size_class(self.name, self.x.rows, self.cut_columns, self.cut_depth)


@lru_cache(maxsize=1 << 12)
def size_class(name: str, rows: int, columns: int, depth: int) -> str:
    """Products whose sizes are alike: each up to the next power of two, and the largest as one.

    The tuner times fewer rows and a smaller vocabulary than a model may have.
    """
    sizes = zip((rows, columns, depth), _LARGEST, strict=True)
    return f"{name} " + "x".join(str(min(1 << (n - 1).bit_length(), most)) for n, most in sizes)


_LARGEST = (2_048, 16_384, 16_384)
