"""A GPU's matrix units: their products, and tiles of these within the GPU's limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qlora_wgpu.gpu.wgsl import Constant

_BYTES = {"f16": 2, "f32": 4}
_PADDING = 16  # bytes at a row's end, so that rows do not start in the same bank
_STEPS, _DEEP_STEPS = 2, 4  # products along a tile's depth
_FEW_SUMS = 16  # maximum registers for sums if an invocation has 128
_LEAST = 8  # minimum of a product's sizes: kernels process eight values, and eight rows, at once
WHOLE = 64  # rows of one expert, and terms of partial sums: tiles must divide these
_MOST_K = WHOLE // _STEPS  # for deep tiles, half of it
_TERM_BYTES = {"f16": 136, "f32": 0}  # workgroup memory to find an adapter's largest values


@dataclass(frozen=True)
class Limits:
    """A GPU's limits of a workgroup; by default WebGPU's guaranteed ones."""

    invocations: int = 256
    workgroup_bytes: int = 16_384  # of workgroup memory

    def within(self, others: Limits) -> bool:
        return (
            self.invocations <= others.invocations
            and self.workgroup_bytes <= others.workgroup_bytes
        )


PROMISED = Limits()


@dataclass(frozen=True)
class MatrixShape:
    """A product of a GPU's matrix units: (m, k) by (k, n), accumulated in float32."""

    m: int  # rows
    n: int  # columns
    k: int  # depth
    threads: int  # size of the subgroup that computes it
    element: str = "f16"  # the factors' type, ``"f16"`` or ``"f32"``

    @property
    def problem(self) -> str:
        """Why kernels cannot use it; empty if they can."""
        for name, size, most in (("m", self.m, WHOLE), ("n", self.n, 0), ("k", self.k, _MOST_K)):
            if size < _LEAST or size & (size - 1) or size > (most or size):
                end = f"to {most}" if most else "on"
                return f"{name} must be a power of two from {_LEAST} {end}"
        return ""

    def __str__(self) -> str:
        return f"{self.element} {self.m}x{self.n}x{self.k} by {self.threads} invocations"


@dataclass(frozen=True)
class MatrixTile:
    """A workgroup's tile of a product on matrix units (``common/tile_matrix.wgsl``)."""

    shape: MatrixShape  # a subgroup's product
    groups_m: int  # subgroups along the rows
    groups_n: int  # subgroups along the columns
    fragments_m: int  # products per subgroup along the rows
    fragments_n: int  # products per subgroup along the columns
    # Whether it has four products instead of two along its depth, in a loop that is not unrolled.
    deep: bool = False

    @property
    def rows(self) -> int:
        return self.groups_m * self.fragments_m * self.shape.m

    @property
    def columns(self) -> int:
        return self.groups_n * self.fragments_n * self.shape.n

    @property
    def depth(self) -> int:
        """Terms of the sums in workgroup memory at once."""
        return (_DEEP_STEPS if self.deep else _STEPS) * self.shape.k

    @property
    def invocations(self) -> int:
        return self.groups_m * self.groups_n * self.shape.threads

    @property
    def sum_registers(self) -> int:
        """4-byte registers for an invocation's share of the results."""
        shape = self.shape
        return self.fragments_m * self.fragments_n * shape.m * shape.n // shape.threads

    def workgroup_bytes(self, *, with_rows: bool) -> int:
        """Bytes of workgroup memory: both factors' tiles, and results before they are stored."""
        size = _BYTES[self.shape.element]
        across = self.depth * size + _PADDING
        left = self.rows * across
        right = self.columns * across
        if not with_rows:
            right = self.depth * (self.columns * size + _PADDING)
        results = 4 * self.groups_m * self.groups_n * self.shape.m * self.shape.n
        return left + right + results + _TERM_BYTES[self.shape.element]

    def fits(self, limits: Limits, *, with_rows: bool) -> bool:
        """Whether it is within the limits, and invocations form whole rows of the tiles' units."""
        if self.shape.problem or self.depth > WHOLE:
            return False
        across = self.depth if with_rows else max(self.depth, self.columns)
        if self.invocations % (across // 8):
            return False
        taken = Limits(self.invocations, self.workgroup_bytes(with_rows=with_rows))
        return taken.within(limits)

    def of_rows(self, most: int) -> MatrixTile:
        tile = self
        while tile.rows > most and tile.groups_m > 1:
            tile = replace(tile, groups_m=tile.groups_m // 2, groups_n=tile.groups_n * 2)
        while tile.rows > most and tile.fragments_m > 1:
            tile = replace(tile, fragments_m=tile.fragments_m // 2)
        return tile

    def within(self, limits: Limits) -> MatrixTile:
        """The same tile, deep only if that is within the limits for both kinds of products."""
        fits = all(self.fits(limits, with_rows=with_rows) for with_rows in (True, False))
        return self if fits else replace(self, deep=False)

    def constants(self, *, with_rows: bool) -> dict[str, Constant]:
        """The shader's constants; all invocations together load units of eight."""
        shape = self.shape
        return {
            "MATRIX": True,
            "HALF": shape.element == "f16",
            "MATRIX_M": shape.m,
            "MATRIX_N": shape.n,
            "MATRIX_K": shape.k,
            "TILE_K": self.depth,
            "ROLLED": self.deep,
            "X_UNITS": -(-self.rows * self.depth // 8 // self.invocations),
            "W_UNITS": -(-self.columns * self.depth // 8 // self.invocations),
            "SUBGROUP_SIZE": shape.threads,
            "GROUP": self.invocations,
            "GROUPS_M": self.groups_m,
            "GROUPS_N": self.groups_n,
            "FRAGMENTS_M": self.fragments_m,
            "FRAGMENTS_N": self.fragments_n,
            "W_ROWS": with_rows,
        }


# Subgroups along rows and columns and the products of each, the first choice first; never a single
# subgroup, whose loads Apple's compiler miscompiles (cubecl 1636).
_TILES = (
    (2, 4, 4, 2),
    (2, 2, 4, 4),
    (2, 2, 4, 2),
    (2, 2, 2, 2),
    (1, 2, 2, 2),
    (8, 4, 1, 2),
    (4, 4, 1, 2),
    (2, 2, 1, 2),
    (1, 2, 1, 2),
    (1, 2, 1, 1),
)


def fitting_tiles(
    shape: MatrixShape, limits: Limits, *, few_registers: bool = False, deep: bool = False
) -> Iterator[MatrixTile]:
    """The tiles within the limits for both kinds of products, deep ones if possible.

    With ``few_registers``, invocations have 128 registers instead of about 250.
    """
    for numbers in _TILES:
        tile = MatrixTile(shape, *numbers, deep).within(limits)
        spills = few_registers and tile.sum_registers > _FEW_SUMS
        if not spills and all(
            tile.fits(limits, with_rows=with_rows) for with_rows in (True, False)
        ):
            yield tile
