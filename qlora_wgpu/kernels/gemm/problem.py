"""A matrix product with everything fused into it: rows with rows, or rows with columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import DropoutMask, ExpertTiles
from qlora_wgpu.kernels.dequantize import MOST_TOGETHER, QuantizedView
from qlora_wgpu.kernels.gemm.packed import PackedWeights, decodes

PART_UNIT = 64  # parts of a reduction have a multiple of this many terms


@dataclass(frozen=True)
class LoraTerm:
    """u·bᵀ, or u·a, added to a product."""

    u: Tensor  # (rows, r) float32; for several layers with rows, their u next to each other
    factor: Tensor  # b (columns, r), or for a product with columns a (r, columns); float32
    stride: int  # floats between experts' factors
    dropout: DropoutMask | None = None  # the mask of u·a, that of the forward's input

    def rank(self, *, with_rows: bool) -> int:
        return self.factor.columns if with_rows else self.u.columns


@dataclass(frozen=True)
class Gemm:
    """y (+)= scale · x·wᵀ + term + bias + residual, or scale · x·w + mask · term."""

    x: Tensor  # (rows, K); for a product with columns, the K columns from ``row0`` on
    # (columns, K), or for a product with columns (K, columns); any type. With experts, the stacked
    # matrices of some of them. For few rows also quantized or packed.
    w: Tensor | QuantizedView | PackedWeights
    y: Tensor  # (rows, ·); a product with rows writes the columns from ``row0`` on
    with_rows: bool = True  # whether rows of x are multiplied with rows of w
    row0: int = 0  # first row of ``w`` within the whole matrix; a multiple of eight
    scale: float = 1.0  # of the product alone
    accumulate: bool = False  # whether to add to y
    lora: LoraTerm | None = None
    bias: Tensor | None = None  # of the whole matrix, float32; (all experts, columns) with experts
    bias_begins: tuple[int, ...] = ()  # of the second and third layer in ``bias``, in elements
    residual: Tensor | None = None  # added, in y's layout; excludes ``accumulate``
    dropout: DropoutMask | None = None  # the mask of x, in a product with rows
    batch_info: Tensor | None = None  # required for dropout and ``first_row``
    first_row: int | None = None  # if x is a chunk of the compacted label rows, its first row
    experts: ExpertTiles | None = None  # each tile of rows is multiplied with its expert's matrix
    expert_stride: int = 0  # elements between experts' w, if they are not adjacent
    # If ``w`` is the stacked matrices of up to three layers of one input: with rows the second and
    # third results, else their x. All but the last have a multiple of eight columns.
    others: tuple[Tensor, ...] = ()
    # Columns of the product that this is a part of, if any, with rows: sums then have the order of
    # the whole product.
    whole_columns: int = 0
    # Terms of each part of the reduction, a multiple of ``PART_UNIT``: parts are added in order,
    # also to the existing values with ``accumulate``, so that one product is bit-identical to
    # several of one part each.
    part: int = 0
    # Whether rows are new tokens: the order of a row's sums does not depend on other rows or their
    # number, so that a sequence's tokens do not depend on the batch.
    few: bool = False
    label: str = ""  # for timing tables

    def __post_init__(self) -> None:
        inner = self.x.columns == self.w.columns if self.with_rows else True
        if self.others:
            self._check_others()
        if self.few:
            self._check_few()
        if not inner or (not self.with_rows and self.y.columns != self.w.columns):
            raise GraphError(f"gemm: {self.x}, {self.w} and {self.y} do not fit each other")
        if self.accumulate and self.residual is not None:
            raise GraphError(f"gemm: accumulating into {self.y} excludes a residual")
        plain = not (self.with_rows or self.others or self.asks_terms)
        if self.part % PART_UNIT or (self.part and not plain):
            raise GraphError(f"gemm: {self} cannot be split into parts of {self.part}")
        if self.x.rows != self.y.rows:
            raise GraphError(f"gemm: {self.x} and {self.y} differ in their rows")
        if self.asks_batch and self.batch_info is None:
            raise GraphError("gemm: dropout and row counts require the batch")

    def _check_others(self) -> None:
        first = self.y if self.with_rows else self.x
        parts = (first, *self.others)
        biases = len(self.others) if self.bias is not None else 0
        plain = self.residual is None and self.experts is None
        plain = plain and len(self.bias_begins) == biases
        plain = plain and not (self.row0 or (self.with_rows and self.accumulate))
        alike = self.with_rows or len({part.dtype for part in parts}) == 1
        whole = self.few or all(part.columns % 8 == 0 for part in parts)
        if (
            sum(part.columns for part in parts) != self.w.shape[0]
            or any(part.rows != self.x.rows for part in parts)
            or not (plain and alike and whole and len(parts) <= MOST_TOGETHER)
        ):
            raise GraphError(f"gemm: {parts} are not the layers of {self.w}")

    def _check_few(self) -> None:
        w = self.w
        if isinstance(w, PackedWeights) and self.experts is not None:
            raise GraphError(f"few_rows: packed weights {w.words} do not support experts")
        if isinstance(w, QuantizedView) and not decodes(w.form, w.columns):
            raise GraphError(f"few_rows: {w.form.name} of {w.columns} columns is not supported")
        if self.experts is not None and not self._apart and w.shape[0] % self.experts.count:
            raise GraphError(f"few_rows: {w} does not have {self.experts.count} experts")

    @property
    def dense(self) -> Tensor:
        assert isinstance(self.w, Tensor)
        return self.w

    @property
    def is_quantized(self) -> bool:
        """Whether the matrix is decoded from codes within the product."""
        return isinstance(self.w, QuantizedView)

    @property
    def mask(self) -> DropoutMask | None:
        return self.lora.dropout if self.lora is not None else self.dropout

    @property
    def asks_terms(self) -> bool:
        """Whether anything is fused into the product."""
        return self.lora is not None or self.experts is not None or self.bias is not None

    @property
    def asks_batch(self) -> bool:
        """Whether the kernel reads the batch's dropout key or number of label rows."""
        return self.mask is not None or self.first_row is not None

    @property
    def own_rows(self) -> int:
        """Rows of ``w``, per expert if there are experts."""
        if self.expert_stride:  # w starts with the first expert's and covers the others
            return self.y.columns
        rows = self.w.shape[0]
        return rows if self.experts is None or self._apart else rows // self.experts.count

    @property
    def _apart(self) -> bool:
        """Whether experts' rows are found by the stride from the first one's."""
        return self.is_quantized or self.expert_stride > 0

    @property
    def columns(self) -> int:
        return self.own_rows if self.with_rows else self.w.columns

    @property
    def tiling_columns(self) -> int:
        """Columns that decide the tiling: those of the whole product."""
        return self.whole_columns or self.columns

    @property
    def depth(self) -> int:
        """Terms of each sum."""
        return self.x.columns if self.with_rows else self.own_rows

    @property
    def tiling_depth(self) -> int:
        """Terms that decide the tiling: those of a part, if given."""
        return min(self.depth, self.part) if self.part else self.depth

    @property
    def parts(self) -> int:
        """Given parts of the reduction; 1 if there are none."""
        return ceil_div(self.depth, self.part) if self.part else 1

    @property
    def flops(self) -> int:
        thin = self.lora is not None and not self.few
        rank = self.lora.rank(with_rows=self.with_rows) if self.lora and thin else 0
        return 2 * self.x.rows * self.columns * (self.depth + rank)

    @property
    def name(self) -> str:
        """The shader's name, which says as in BLAS whether w is transposed."""
        return "nt" if self.with_rows else "nn"

    @property
    def size_class(self) -> str:
        """The class of products with the same tiling (``Profile.products``)."""
        return size_class(self.name, self.x.rows, self.tiling_columns, self.tiling_depth)


@lru_cache(maxsize=1 << 12)
def size_class(name: str, rows: int, columns: int, depth: int) -> str:
    """Sizes rounded up to powers of two; the largest are one class.

    The tuner times fewer rows and a smaller vocabulary than a model may have.
    """
    sizes = zip((rows, columns, depth), _LARGEST, strict=True)
    return f"{name} " + "x".join(str(min(1 << (n - 1).bit_length(), most)) for n, most in sizes)


_LARGEST = (2_048, 16_384, 16_384)
