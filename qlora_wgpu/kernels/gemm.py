"""Matrix products with all that is fused into them: rows with rows, or rows with columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qlora_wgpu.gpu.matrix import Limits, MatrixTile
from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div, round_up
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dropout import DropoutMask, dropout_params
from qlora_wgpu.kernels.elementwise import sum_parts
from qlora_wgpu.kernels.experts import (
    EXPERT_TILE,
    ExpertTiles,
    expert_constants,
    expert_params,
)
from qlora_wgpu.kernels.kernel import Change, Kernel, Tunable

SKINNY = 64  # products of at most so many columns are cut along their rows instead
_LEAST_PART = 512  # of a reduction that is cut, so that adding up the parts stays cheap
_CUT_THREADS = 64  # invocations of the workgroups that ``Profile.least_workgroups`` counts
_TILE_DEPTH, _LEAST_TILE = 16, 8  # of common/tile_f32.wgsl: along k; invocations along a side
SIZED_ROWS = 8  # share an entry of what says how large gradients are
_SIZING_GROUP = 128  # invocations that look for it


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
        bias: The bias of the whole matrix, float32.
        residual: What to add, of y's layout.
        dropout: What x is masked with, in a product with rows.
        batch_info: Needed for dropout and for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, each tile of rows meets its expert's matrix; tiles of others are left
            alone.
        others: If there are, ``w`` is the matrices of up to three layers of one input, one below
            the other: with rows the second's and the third's results, else their x. All but the
            last have a multiple of eight columns.
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
    residual: Tensor | None = None
    dropout: DropoutMask | None = None
    batch_info: Tensor | None = None
    first_row: int | None = None
    experts: ExpertTiles | None = None
    others: tuple[Tensor, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        inner = self.x.columns == self.w.columns if self.with_rows else True
        if self.others:
            self._check_others()
        if not inner or (not self.with_rows and self.y.columns != self.w.columns):
            raise GraphError(f"gemm: {self.x}, {self.w} and {self.y} do not fit each other")
        if self.x.rows != self.y.rows:
            raise GraphError(f"gemm: {self.x} and {self.y} differ in their rows")
        if self.asks_batch and self.batch_info is None:
            raise GraphError("gemm: dropout and row counts need the batch")

    def _check_others(self) -> None:
        first = self.y if self.with_rows else self.x
        parts = (first, *self.others)
        plain = self.bias is None and self.residual is None and self.experts is None
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
    def depth(self) -> int:
        """Terms of each sum."""
        return self.x.columns if self.with_rows else self.own_rows

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
        return size_class(self.name, self.x.rows, self.columns, self.depth)


def size_class(name: str, rows: int, columns: int, depth: int) -> str:
    """Products whose sizes are alike: each up to the next power of two, and the largest as one.

    The tuner times fewer rows and a smaller vocabulary than a model may have.
    """
    sizes = zip((rows, columns, depth), _LARGEST, strict=True)
    return f"{name} " + "x".join(str(min(1 << (n - 1).bit_length(), most)) for n, most in sizes)


_LARGEST = (2_048, 16_384, 16_384)


@dataclass(frozen=True)
class Cut:
    """A shader and how many results its workgroups make.

    Attributes:
        path: The shader.
        rows: Rows of results that a workgroup makes.
        columns: Columns of results that a workgroup makes.
        constants: The shader's, besides those that all products have.
        rows_first: Whether workgroups are counted along the rows first.
        threads: Invocations of a workgroup.
        any_parts: Whether the shader can be cut along the reduction whatever is added to it.
        tensors: What the shader binds besides.
    """

    path: str
    rows: int
    columns: int
    constants: dict[str, Constant]
    rows_first: bool = False
    threads: int = _CUT_THREADS
    any_parts: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def _launch(
    g: Graph, gemm: Gemm, cut: Cut, parts_in: Tensor | None = None, parts: int = 1, part: int = 0
) -> None:
    """One dispatch; with ``parts_in`` each part's results lie there, one below the other."""
    lora = gemm.lora
    tensors: dict[str, Tensor | None] = {
        **cut.tensors,
        "x": gemm.x,
        "w": gemm.w,
        "y": parts_in or gemm.y,
        "u": lora.u if lora is not None else None,
        "bias": gemm.bias if parts_in is None else None,
        "residual": gemm.residual if parts_in is None else None,
        "batch_info": gemm.batch_info
        if gemm.mask is not None or gemm.first_row is not None
        else None,
    }
    if lora is not None:
        tensors["b" if gemm.with_rows else "a"] = lora.factor
    others, layers = (
        further_layers("y", gemm.y, gemm.others, 4)
        if gemm.with_rows
        else further_layers("x", gemm.x, gemm.others, 8, 8)
    )
    tensors |= others
    across = ceil_div(gemm.columns, cut.columns)
    down = ceil_div(gemm.x.rows, cut.rows)
    constants: dict[str, Constant] = {
        "ACCUMULATE": gemm.accumulate and parts_in is None,
        "ROW_COUNT": gemm.first_row is not None,
        "DROPOUT": gemm.mask is not None,
        **expert_constants(gemm.experts, tensors),
        **cut.constants,
    }
    g.launch(
        cut.path,
        (down, across, parts) if cut.rows_first else (across, down, parts),
        tensors,
        {
            "rows": gemm.x.rows,
            "columns": gemm.columns,
            "k": gemm.depth,
            "k_part": part or round_up(gemm.depth, 64),
            "x_stride": gemm.x.units(8),
            "x_unit0": 0 if gemm.with_rows else gemm.row0 // 8,
            "w_stride": gemm.w.units(8),
            "y_stride": (parts_in or gemm.y).units(4),
            "y_unit0": gemm.row0 // 4 if gemm.with_rows and parts_in is None else 0,
            "row0": gemm.row0 if gemm.with_rows else 0,
            "first_row": gemm.first_row or 0,
            "r": lora.rank(with_rows=gemm.with_rows) if lora is not None else 0,
            "r_stride": lora.u.stride if lora is not None else 0,
            "b_stride": lora.factor.stride if lora is not None else 0,
            "scale": gemm.scale,
            **dropout_params(gemm.mask),
            "w_expert": gemm.own_rows * gemm.w.units(8),
            **expert_params(gemm.experts, lora.stride // 4 if lora is not None else 0),
            **layers,
        },
        constants,
        flops=gemm.flops,
        label=gemm.label,
    )


def further_layers(
    name: str, first: Tensor, others: tuple[Tensor, ...], unit: int, begin_unit: int = 1
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What a kernel of layers of one input is bound to and told of the second and the third.

    Args:
        name: The binding of the first layer's tensor.
        first: That tensor.
        others: Those of the others.
        unit: Elements that their strides count.
        begin_unit: Columns that the places where they begin count.
    """
    begin, tensors = first.columns, {}
    params = {"begin1": 0, "begin2": 0, "stride1": 0, "stride2": 0}
    for index, other in enumerate(others, 1):
        tensors[f"{name}{index}"] = other
        params |= {f"begin{index}": begin // begin_unit, f"stride{index}": other.units(unit)}
        begin += other.columns
    # What is not there begins past the end.
    params |= {f"begin{i}": 0xFFFFFFFF for i in range(len(others) + 1, 3)}
    return tensors, params


def _launch_split(g: Graph, gemm: Gemm, cut: Cut) -> None:
    """Cuts a long reduction of few results, which would leave a GPU idle, into parts."""
    workgroups = ceil_div(gemm.x.rows, cut.rows) * ceil_div(gemm.columns, cut.columns)
    least = g.profile.least_workgroups * _CUT_THREADS // cut.threads
    parts = min(least // workgroups, gemm.depth // _LEAST_PART)
    part = round_up(ceil_div(gemm.depth, max(parts, 1)), 64)
    parts = ceil_div(gemm.depth, part)
    plain = gemm.lora is None and gemm.y.dtype == "float32" and not gemm.with_rows
    whole = gemm.experts is not None or (gemm.with_rows and gemm.others)
    if parts == 1 or whole or not (plain or cut.any_parts):
        _launch(g, gemm, cut)
        return
    stacked = g.float32(f"parts of {gemm.y.name}", parts * gemm.y.rows, gemm.columns)
    _launch(g, gemm, cut, stacked, parts, part)
    sum_parts(
        g, stacked, gemm.y, parts, accumulate=gemm.accumulate, bias=gemm.bias,
        residual=gemm.residual, column0=gemm.row0 if gemm.with_rows else 0,
    )  # fmt: skip


class SubgroupTexture:
    """For software adapters: operands in textures, rows broadcast within a subgroup."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where kernels read textures; they mask the term, not x."""
        return profile.textures and gemm.dropout is None and not gemm.others

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launch."""
        threads = g.profile.subgroup_size
        most = g.profile.texture_nt_rows if gemm.with_rows else g.profile.texture_nn_rows
        rows = _fewer(most, gemm.x.rows)
        columns = (4 if gemm.with_rows else 8) * threads
        path = f"gemm/{gemm.name}_texture.wgsl"
        _launch(g, gemm, Cut(path, rows, columns, broadcast_constants(threads, rows), True))


class Skinny:
    """For results of few columns, or a masked x: each invocation has a few rows."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where there are few columns, as a LoRA rank."""
        return gemm.columns <= SKINNY or gemm.dropout is not None

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        _launch_split(g, gemm, _registers(gemm, g.profile.skinny_tile, *g.profile.skinny_group))


class MatrixUnits:
    """On matrix units, with float32 sums; factors of f16 are for bfloat16, float32 stays exact."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where the profile has some that take the operands, in a tile within its limits."""
        own = profile.for_products(gemm.size_class)
        if own.gemm_kind != "matrix":
            return False
        takes = own.matrix_element == "f32" or gemm.x.dtype == "bfloat16"
        return takes and _matrix_tile(gemm, own).fits(own.limits, with_rows=gemm.with_rows)

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        own = g.profile.for_products(gemm.size_class)
        tile = _matrix_tile(gemm, own)
        constants = tile.constants(with_rows=gemm.with_rows)
        added = (gemm.lora, gemm.bias, gemm.residual)
        alone = not (gemm.with_rows and gemm.others)
        plain = alone and all(term is None for term in added)
        constants["DIRECT"] = plain and gemm.y.dtype == "float32"
        tensors: dict[str, Tensor] = {}
        if own.saturates and not gemm.with_rows:
            tensors["sizes"] = largest_sizes(g, gemm)
            constants["SIZED_ROWS"] = SIZED_ROWS
        elif own.saturates and g.saturated is not None:
            tensors["saturated"] = g.saturated
        cut = Cut(
            f"gemm/{gemm.name}_tiled.wgsl", tile.rows, tile.columns, constants,
            threads=tile.invocations, any_parts=True, tensors=tensors,
        )  # fmt: skip
        _launch_split(g, gemm, cut)


def _matrix_tile(gemm: Gemm, profile: Profile) -> MatrixTile:
    tile = profile.tile_on_matrix_units()
    return tile if gemm.experts is None else tile.of_rows(EXPERT_TILE)


def largest_sizes(g: Graph, gemm: Gemm) -> Tensor:
    """How large a product's x is at most, for each ``SIZED_ROWS`` of its rows: float32's bits."""
    x = gemm.x
    sizes = g.integers(f"sizes of {x.name}", ceil_div(x.rows, SIZED_ROWS))
    batch_info = gemm.batch_info if gemm.first_row is not None else None
    others, layers = further_layers("x", x, gemm.others, 8, 8)
    g.launch(
        "gemm/sizes.wgsl",
        (sizes.columns, 1, 1),
        {"x": x, **others, "sizes": sizes, "batch_info": batch_info},
        {
            "rows": x.rows,
            "stride": x.units(8),
            "first_row": gemm.first_row or 0,
            "stride1": layers["stride1"],
            "stride2": layers["stride2"],
        },
        {"GROUP": _SIZING_GROUP, "ROWS": SIZED_ROWS},
        label=gemm.label,
    )
    return sizes


class WorkgroupTiles:
    """For GPUs: tiles of both operands pass through workgroup memory."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where the profile asks for it, also in place of matrix units that do not fit."""
        own = profile.for_products(gemm.size_class)
        across, down = own.tile_group
        if own.gemm_kind not in ("tiled", "matrix"):
            return False
        return Limits(across * down, _tile_bytes(across, down)).within(own.limits)

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        across, down = _tile_group(g.profile.for_products(gemm.size_class), gemm)
        constants: dict[str, Constant] = {
            "MATRIX": False,
            "HALF": False,
            "DIRECT": False,
            "WG_M": down,
            "WG_N": across,
            "GROUP": across * down,
            "W_ROWS": gemm.with_rows,
            "X_UNITS": _TILE_DEPTH // across,
            "W_UNITS": _TILE_DEPTH // down,
        }
        path, threads = f"gemm/{gemm.name}_tiled.wgsl", across * down
        _launch_split(
            g, gemm, Cut(path, 8 * down, 8 * across, constants, threads=threads, any_parts=True)
        )


def _tile_group(profile: Profile, gemm: Gemm) -> tuple[int, int]:
    """The largest workgroup that has no idle half, and of which there are enough for all cores.

    Large tiles read less; cutting the reduction, if it is long, makes more workgroups of them.
    """
    across, down = profile.tile_group
    if gemm.experts is not None:
        down = min(down, EXPERT_TILE // 8)
    parts = max(gemm.depth // _LEAST_PART, 1)
    while max(across, down) > _LEAST_TILE:
        workgroups = ceil_div(gemm.x.rows, 8 * down) * ceil_div(gemm.columns, 8 * across)
        few = workgroups * parts < profile.least_workgroups // 8
        if down > _LEAST_TILE and (gemm.x.rows <= 4 * down or (few and down >= across)):
            down //= 2
        elif across > _LEAST_TILE and (gemm.columns <= 4 * across or few):
            across //= 2
        else:
            break
    return across, down


def _tile_bytes(across: int, down: int) -> int:
    """Workgroup memory of ``common/tile_f32.wgsl``: eight rows and columns each, 16 deep."""
    return 4 * 16 * 8 * (across + down)


class Registers:
    """Each invocation holds a tile of results; no workgroup memory."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Everywhere."""
        return True

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        own = g.profile.for_products(gemm.size_class)
        _launch_split(g, gemm, _registers(gemm, own.gemm_tile, *own.gemm_group))


def _registers(gemm: Gemm, tile: int, across: int, down: int) -> Cut:
    constants: dict[str, Constant] = {"TILE_M": tile, "WG_N": across, "WG_M": down}
    return Cut(f"gemm/{gemm.name}.wgsl", tile * down, 8 * across, constants)


def _fewer(rows: int, present: int) -> int:
    """Rows of a tile: fewer where there are few."""
    while rows > 8 and present <= rows // 2:
        rows //= 2
    return rows


def broadcast_constants(subgroup_size: int, rows: int) -> dict[str, Constant]:
    """How rows that are broadcast are spread over the invocations of a subgroup."""
    span = min(subgroup_size, rows)
    return {"THREADS": subgroup_size, "SPAN": span, "BLOCKS": rows // span}


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures:
        return (
            {"texture_nt_rows": 16},
            {"texture_nt_rows": 32, "texture_nn_rows": 8},
            {"texture_nt_rows": 16, "texture_nn_rows": 8},
        )
    if profile.name == CPU_PROFILE.name:
        return ({"gemm_tile": 8}, {"gemm_tile": 16, "gemm_group": (16, 1)})
    tried = _MATRIX_CHANGES if profile.matrix else _CHANGES
    changed = ((change, replace(profile, **change)) for change in tried)
    return tuple(change for change, cut in changed if cut != profile and _is_allowed(cut))


_MATRIX_CHANGES: tuple[Change, ...] = (
    {"gemm_kind": "matrix", "matrix_tile": (2, 2, 4, 4)},
    {"gemm_kind": "matrix", "matrix_tile": (2, 2, 2, 2)},
    {"gemm_kind": "matrix", "matrix_tile": (2, 4, 2, 2)},
    {"gemm_kind": "matrix", "matrix_tile": (4, 2, 2, 4)},
    {"gemm_kind": "register"},
    {"gemm_kind": "tiled", "tile_group": (16, 16)},
    {"gemm_kind": "tiled", "tile_group": (8, 8)},
)
_CHANGES: tuple[Change, ...] = (
    {"gemm_kind": "tiled", "tile_group": (16, 16)},
    {"gemm_kind": "tiled", "tile_group": (8, 8)},
    {"gemm_kind": "tiled", "tile_group": (16, 8)},
    {"gemm_kind": "tiled", "tile_group": (8, 16)},
    {"gemm_kind": "register", "gemm_tile": 4, "gemm_group": (16, 8)},
    {"gemm_kind": "register", "gemm_tile": 8, "gemm_group": (16, 4)},
    {"gemm_kind": "register", "gemm_tile": 16, "gemm_group": (8, 8)},
)


def _is_allowed(profile: Profile) -> bool:
    """Whether a GPU's workgroups may be as a profile cuts products."""
    if profile.gemm_kind == "matrix":
        tile = profile.tile_on_matrix_units()
        return all(tile.fits(profile.limits, with_rows=rows) for rows in (True, False))
    if profile.gemm_kind == "tiled":
        across, down = profile.tile_group
        return Limits(across * down, _tile_bytes(across, down)).within(profile.limits)
    across, down = profile.gemm_group
    return across * down <= profile.limits.invocations


GEMM: Kernel[Gemm] = Kernel(
    "gemm", (SubgroupTexture(), Skinny(), MatrixUnits(), WorkgroupTiles(), Registers())
)
KERNELS = (GEMM,)
TUNABLES = (Tunable("products", lambda launch: launch.kernel == "gemm", _changes),)
