"""How kernels are configured for a kind of GPU: tiles, workgroups, memory, vendors' needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.gpu.matrix import PROMISED, Limits, MatrixShape, MatrixTile, fitting_tiles

# ---- vendors ---------------------------------------------------------------------------------

FEW_REGISTERS = ("apple", "intel")  # by WebGPU's names of vendors
_HOIST_LOADS = {"qualcomm"}
_WITH_UNITS = {"amd", "apple", "intel", "nvidia"}
_IDS = {0x8086: "intel", 0x106B: "apple", 0x5143: "qualcomm", 0x4D4F4351: "qualcomm",
        0x10DE: "nvidia", 0x1002: "amd"}  # fmt: skip


def has_few_registers(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's invocations have 128 registers of 4 bytes, where others have some 250."""
    return not _names(info).isdisjoint(FEW_REGISTERS)


def hoists_loads(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's compiler loads all of straight-line code first, and spills what it loaded."""
    return not _HOIST_LOADS.isdisjoint(_names(info))


def takes_deep_tiles(info: Mapping[str, Any]) -> bool:
    """Whether products on matrix units are the fastest in deep tiles (measured: an H100)."""
    return "nvidia" in _names(info)


def may_have_matrix_units(info: Mapping[str, Any]) -> bool:
    """Whether newer GPUs of this vendor have matrix units that kernels can use."""
    return not _WITH_UNITS.isdisjoint(_names(info))


def _names(info: Mapping[str, Any]) -> set[str]:
    """Possible names of the vendor.

    Some drivers name themselves instead of the vendor; the GPU's name then begins with it.
    """
    first = str(info.get("device", "")).lower().partition(" ")[0]
    told = str(info.get("vendor", "")).lower()
    return {told, first.removesuffix("(r)"), _IDS.get(info.get("vendor_id", 0), "")}


# ---- profiles --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """How kernels are configured for a kind of GPU; a tuner may refine the defaults."""

    name: str  # the name that ``doctor`` shows
    flat_group: int  # invocations of a workgroup in element-wise kernels
    elements_per_thread: int  # elements of each of these invocations
    threads_per_row: int  # invocations that share a row in row-wise kernels
    rows_per_group: int  # rows of a workgroup in row-wise kernels
    gemm_tile: int  # rows of results an invocation of a GEMM holds (by 8 columns)
    gemm_group: tuple[int, int]  # invocations of a GEMM's workgroup, along columns and rows
    skinny_tile: int  # ``gemm_tile`` for GEMMs with as few columns as a LoRA rank
    skinny_group: tuple[int, int]  # ``gemm_group`` for those
    attention_threads: int  # queries or keys of an attention workgroup without workgroup memory
    attention_keys: int  # keys a query looks at in one turn, for heads of up to 128 elements
    # Rows of a block of ``lm_head``, a multiple of 256: its part of the loss and of the gradient is
    # summed by itself, and it is uploaded at once where the head is streamed. On CPUs so few that
    # they stay in the cache.
    head_block: int
    logits_bytes: int  # of the float32 logits that exist at once; GPUs want more rows to work on
    # Blocks of a resident head whose gradient is one launch and one product: fewer launches and
    # more workgroups, for more memory.
    head_group: int = 1
    # Label rows for which a single block is work enough for a launch, so that only chunks of fewer
    # rows take more blocks; 0 where all do.
    head_rows: int = 0
    # Of GEMMs and of attention: ``"register"``, without workgroup memory; ``"tiled"``, with it; or
    # ``"matrix"``, on matrix units.
    gemm_kind: str = "register"
    attention_kind: str = "register"
    attention_strips: int = 4  # of 16 queries or keys of an attention workgroup, at most
    # Whether tiled GEMMs hold less of their factors in registers at once, for GPUs whose
    # invocations have 128 registers of 4 bytes (Intel's, Apple's).
    gemm_few_registers: bool = False
    # Whether tiled attention holds fewer rows, in loops that no compiler unrolls, for these.
    attention_few_registers: bool = False
    # Rows from which a product of few rows with a quantized matrix takes its units one after the
    # other, in a loop that no compiler unrolls; 0 for never. With 1 a new token's attention and
    # do·o do so, too, for GPUs whose compilers load ahead more than registers hold (Adreno).
    unit_by_unit: int = 0
    # Most invocations of a tiled GEMM's workgroup, along columns and rows, 8 × 8 results each.
    tile_group: tuple[int, int] = (16, 16)
    matrix: tuple[int, ...] = ()  # a product of the matrix units: m, n, k, and its invocations
    matrix_element: str = "f16"  # the type of its factors, ``"f16"`` or ``"f32"``
    # Subgroups of a workgroup along rows and columns, then the products of matrix units that each
    # makes along rows and columns.
    matrix_tile: tuple[int, int, int, int] = (2, 4, 4, 2)
    # Whether twice as many products lie along a tile's depth, in a loop that no compiler unrolls
    # (NVIDIA's takes too many registers for one that it does).
    matrix_deep: bool = False
    # Workgroups of 64 invocations that fill a GPU: smaller products are split along their
    # reduction, if that is long.
    least_workgroups: int = 0
    # Invocations of a workgroup of LoRA's thin products, a power of two from 32 to 256; 0 for
    # skinny GEMMs.
    lora_threads: int = 0
    # Most rows of such a workgroup, a power of two, where enough workgroups are left: it reads the
    # thin factor once.
    lora_rows: int = 8
    # Invocations of a workgroup of LoRA's gradients: along columns, and those that share the rows.
    lora_grad_group: tuple[int, int] = (8, 1)
    lora_grad_ranks: int = 4  # most ranks of each of them, by four columns: 4 or 8
    # Invocations of a subgroup, for kernels that read their operands from textures and broadcast
    # them; 0 where those are not used.
    subgroup_size: int = 0
    texture_nt_rows: int = 32  # rows of results of an invocation of such kernels, in x·Wᵀ
    texture_nn_rows: int = 32  # the same in dy·W
    # Whether all intermediates lie in textures that may, not only what products and attention read.
    in_textures: bool = False
    # Whether loops of attention that read textures take half as many keys, or queries, a turn.
    short_loops: bool = False
    # Whether layers of one input are one product, where they may be: fewer launches, and workgroups
    # enough; on CPUs the larger weights leave the cache sooner.
    fused_linears: bool = False
    # Whether cheap outputs of layers that are kept for the backward are rematerialized there
    # (``Graph.record``): a GPU's memory is dearer than that traffic.
    remakes: bool = False
    limits: Limits = PROMISED  # what the GPU allows a workgroup
    # Iterations that all loops of an invocation may take together, 0 for any number: Mesa's
    # software GPUs leave loops after so many, without an error.
    most_turns: int = 0
    # Other values for products of some sizes: their class (``Gemm.size_class``) and the fields.
    products: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @property
    def textures(self) -> bool:
        """Whether kernels read their operands from textures."""
        return self.subgroup_size > 0

    @property
    def is_software(self) -> bool:
        """Whether it is for software GPUs."""
        return self.name == CPU_PROFILE.name

    @property
    def saturates(self) -> bool:
        """Whether products hold their factors in a type that ends at 65,504."""
        return self.gemm_kind == "matrix" and self.matrix_element == "f16"

    @property
    def counts_saturated(self) -> bool:
        """Whether any kernel counts the values that it clamps to such a type."""
        return self.matrix_element == "f16" and "matrix" in (self.gemm_kind, self.attention_kind)

    def weight_dtype(self, dtype: str) -> str:
        """The type of frozen weights where operands have this one: units of f16 copy theirs."""
        return "float16" if self.saturates and dtype == "bfloat16" else dtype

    def tile_on_matrix_units(self) -> MatrixTile:
        """The tile of a workgroup on matrix units."""
        m, n, k, threads = self.matrix
        shape = MatrixShape(m, n, k, threads, self.matrix_element)
        return MatrixTile(shape, *self.matrix_tile, self.matrix_deep).within(self.limits)

    def for_products(self, size_class: str) -> Profile:
        """The profile for products of a class of sizes."""
        changes: Mapping[str, Any] = dict(dict(self.products).get(size_class, ()))
        return replace(self, **changes) if changes else self


_WHOLE = 32  # invocations of a subgroup, of most GPUs
_ROWS_OF_FEW_REGISTERS = 4  # whose units do not fit all at once


CPU_PROFILE = Profile(
    name="cpu",
    most_turns=65_535,
    flat_group=8,
    elements_per_thread=8,
    threads_per_row=1,
    rows_per_group=8,
    gemm_tile=16,
    gemm_group=(8, 1),
    skinny_tile=4,
    skinny_group=(1, 8),
    attention_threads=8,
    attention_keys=4,
    head_block=2048,
    head_group=8,
    head_rows=128,
    logits_bytes=32 << 20,
)
GPU_PROFILE = Profile(
    name="gpu",
    flat_group=64,
    elements_per_thread=1,
    threads_per_row=128,
    rows_per_group=1,
    gemm_tile=8,
    gemm_group=(8, 8),
    skinny_tile=1,
    skinny_group=(1, 64),
    attention_threads=32,
    attention_keys=4,
    attention_kind="tiled",
    head_block=8192,
    head_group=8,
    logits_bytes=128 << 20,
    gemm_kind="tiled",
    fused_linears=True,
    remakes=True,
    least_workgroups=1024,
    lora_threads=256,
    lora_rows=16,
    lora_grad_group=(8, 32),
    lora_grad_ranks=8,
)


def cpu_profile(
    subgroup_size: int,
    product_rows: int = 32,
    *,
    in_textures: bool = False,
    short_loops: bool = False,
) -> Profile:
    """The profile of a software GPU."""
    if not subgroup_size:
        return CPU_PROFILE
    return replace(
        CPU_PROFILE,
        subgroup_size=subgroup_size,
        flat_group=subgroup_size,
        threads_per_row=subgroup_size,
        rows_per_group=1,
        attention_threads=subgroup_size,
        skinny_group=(1, subgroup_size),
        head_group=1,
        texture_nt_rows=product_rows,
        texture_nn_rows=product_rows,
        in_textures=in_textures,
        short_loops=short_loops,
    )


def gpu_profile(
    shape: MatrixShape | None,
    limits: Limits = PROMISED,
    *,
    few_registers: bool = False,
    hoists_loads: bool = False,
    deep_tiles: bool = False,
) -> Profile:
    """The profile of a GPU, and of its matrix units if there are any that fit its limits.

    ``shape`` is what those multiply. ``hoists_loads`` says that its compiler loads all of
    straight-line code first; else as for ``fitting_tiles``.
    """
    plain = replace(
        GPU_PROFILE,
        limits=limits,
        gemm_few_registers=few_registers,
        attention_few_registers=few_registers,
        unit_by_unit=1 if hoists_loads else _ROWS_OF_FEW_REGISTERS if few_registers else 0,
    )
    if shape is None:
        return plain
    tiles = fitting_tiles(shape, limits, few_registers=few_registers, deep=deep_tiles)
    tile = next(tiles, None)
    if tile is None:
        return plain
    return replace(
        plain,
        gemm_kind="matrix",
        # Fewer than 32 invocations have too few registers for the rows that attention keeps.
        attention_kind="tiled" if few_registers and shape.threads < _WHOLE else "matrix",
        matrix=(shape.m, shape.n, shape.k, shape.threads),
        matrix_element=shape.element,
        matrix_tile=(tile.groups_m, tile.groups_n, tile.fragments_m, tile.fragments_n),
        matrix_deep=tile.deep,
    )


def plainer(profile: Profile) -> Profile | None:
    """The profile to fall back on where a GPU's kernels are wrong; None if there is none.

    Attention gives up matrix units first, then products do, then nothing goes through workgroup
    memory.
    """
    if profile.textures or profile.gemm_kind == profile.attention_kind == "register":
        return None
    if profile.attention_kind == "matrix":
        return replace(profile, attention_kind="tiled")
    if profile.gemm_kind == "matrix":
        return replace(profile, gemm_kind="tiled", products=())
    return plainest(profile)


def plainest(profile: Profile) -> Profile:
    """The profile whose kernels ask least of a driver."""
    if profile.textures:
        return CPU_PROFILE
    return replace(profile, gemm_kind="register", attention_kind="register", products=())
