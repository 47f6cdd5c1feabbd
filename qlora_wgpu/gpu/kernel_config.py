"""The configuration of kernels for a kind of GPU: tiles, workgroups, memory, vendors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.gpu.matrix import PROMISED, Limits, MatrixShape, MatrixTile, fitting_tiles

# ---- vendors ---------------------------------------------------------------------------------

FEW_REGISTERS = ("apple", "intel")  # WebGPU's vendor names
_HOIST_LOADS = {"qualcomm"}
_WITH_UNITS = {"amd", "apple", "intel", "nvidia"}
_IDS = {0x8086: "intel", 0x106B: "apple", 0x5143: "qualcomm", 0x4D4F4351: "qualcomm",
        0x10DE: "nvidia", 0x1002: "amd"}  # fmt: skip


def has_few_registers(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's invocations have 128 4-byte registers instead of about 250."""
    return not _names(info).isdisjoint(FEW_REGISTERS)


def hoists_loads(info: Mapping[str, Any]) -> bool:
    """Whether a GPU's compiler hoists all loads of straight-line code, and then spills."""
    return not _HOIST_LOADS.isdisjoint(_names(info))


def takes_deep_tiles(info: Mapping[str, Any]) -> bool:
    """Whether products on matrix units are fastest in deep tiles (measured on an H100)."""
    return "nvidia" in _names(info)


def may_have_matrix_units(info: Mapping[str, Any]) -> bool:
    """Whether newer GPUs of this vendor have matrix units that kernels can use."""
    return not _WITH_UNITS.isdisjoint(_names(info))


def _names(info: Mapping[str, Any]) -> set[str]:
    """Possible names of the vendor.

    Some drivers report their own name; the GPU's name then starts with the vendor's.
    """
    first = str(info.get("device", "")).lower().partition(" ")[0]
    told = str(info.get("vendor", "")).lower()
    return {told, first.removesuffix("(r)"), _IDS.get(info.get("vendor_id", 0), "")}


# ---- profiles --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """The configuration of kernels for a kind of GPU; the tuner may refine the defaults."""

    name: str  # the name that ``doctor`` shows
    flat_group: int  # invocations of a workgroup in element-wise kernels
    elements_per_thread: int  # elements per invocation there
    threads_per_row: int  # invocations that share a row in row-wise kernels
    rows_per_group: int  # rows per workgroup in row-wise kernels
    gemm_tile: int  # result rows per invocation of a GEMM (by 8 columns)
    gemm_group: tuple[int, int]  # invocations of a GEMM's workgroup along columns and rows
    skinny_tile: int  # ``gemm_tile`` for GEMMs with few columns, such as a LoRA rank
    skinny_group: tuple[int, int]  # ``gemm_group`` for those
    attention_threads: int  # queries or keys per attention workgroup without workgroup memory
    attention_keys: int  # keys per query and iteration, for heads of up to 128 elements
    # Rows of a block of ``lm_head``, a multiple of 256: its part of the loss and of the gradient is
    # a partial sum, and a streamed head is uploaded in blocks. On CPUs a block fits the cache.
    head_block: int
    logits_bytes: int  # of float32 logits at a time; GPUs need more rows
    # Blocks of a resident head per launch and product of its gradient: more need fewer launches and
    # have more workgroups, but take more memory.
    head_group: int = 1
    # Label rows with which a single block is enough work for a launch, so that only chunks of fewer
    # rows take more blocks; 0 if all do.
    head_rows: int = 0
    # Of GEMMs and attention: ``"register"``, without workgroup memory; ``"tiled"``, with it; or
    # ``"matrix"``, on matrix units.
    gemm_kind: str = "register"
    attention_kind: str = "register"
    attention_strips: int = 4  # maximum strips of 16 queries or keys per attention workgroup
    # Whether tiled GEMMs hold less of their factors in registers, for GPUs with 128 4-byte
    # registers per invocation (Intel's, Apple's).
    gemm_few_registers: bool = False
    # Whether tiled attention holds fewer rows, in loops that are not unrolled, for these.
    attention_few_registers: bool = False
    # Minimum rows with which a product of few rows with a quantized matrix processes its units in a
    # loop that is not unrolled; 0 for never. With 1, the attention of a new token and do·o also do,
    # for GPUs whose compilers hoist more loads than registers can hold (Adreno).
    unit_by_unit: int = 0
    # Maximum invocations of a tiled GEMM's workgroup along columns and rows, 8 × 8 results each.
    tile_group: tuple[int, int] = (16, 16)
    matrix: tuple[int, ...] = ()  # a product of the matrix units: m, n, k, and its invocations
    matrix_element: str = "f16"  # the type of its factors, ``"f16"`` or ``"f32"``
    # Subgroups of a workgroup along rows and columns, then each one's products of matrix units
    # along rows and columns.
    matrix_tile: tuple[int, int, int, int] = (2, 4, 4, 2)
    # Whether a tile's depth has twice as many products, in a loop that is not unrolled (unrolled,
    # it takes too many registers on NVIDIA's).
    matrix_deep: bool = False
    # Workgroups of 64 invocations that fill a GPU: products with fewer are split along their
    # reduction, if it is long.
    least_workgroups: int = 0
    # Invocations of a workgroup of LoRA's thin products, a power of two from 32 to 256; 0 for
    # skinny GEMMs.
    lora_threads: int = 0
    # Maximum rows of such a workgroup, a power of two, if enough workgroups are left: it reads the
    # thin factor once.
    lora_rows: int = 8
    # Invocations of a workgroup of LoRA's gradients: along columns, and sharing the rows.
    lora_grad_group: tuple[int, int] = (8, 1)
    lora_grad_ranks: int = 4  # maximum ranks of each, by four columns: 4 or 8
    # Subgroup size of kernels that read operands from textures and broadcast them; 0 if those are
    # not used.
    subgroup_size: int = 0
    texture_nt_rows: int = 32  # result rows per invocation of these kernels, in x·Wᵀ
    texture_nn_rows: int = 32  # the same in dy·W
    # Whether all possible intermediates are in textures, not only inputs of products and attention.
    in_textures: bool = False
    # Whether attention's loops over textures process half as many keys, or queries, per iteration.
    short_loops: bool = False
    # Whether layers of one input are one product if possible: fewer launches and more workgroups;
    # on CPUs the larger weights are evicted from the cache.
    fused_linears: bool = False
    # Whether cheap outputs in layers that are not recomputed are rematerialized (``Graph.record``):
    # on GPUs memory is worth more than that traffic.
    remakes: bool = False
    limits: Limits = PROMISED  # the GPU's limits of a workgroup
    # Maximum iterations of all loops of an invocation together, 0 for no limit: Mesa's software
    # GPUs leave loops after that many, without an error.
    most_turns: int = 0
    # Overrides for products of some sizes: their class (``Gemm.size_class``) and the fields.
    products: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @property
    def textures(self) -> bool:
        return self.subgroup_size > 0

    @property
    def is_software(self) -> bool:
        return self.name == CPU_PROFILE.name

    @property
    def saturates(self) -> bool:
        """Whether products hold their factors in float16, which ends at 65,504."""
        return self.gemm_kind == "matrix" and self.matrix_element == "f16"

    @property
    def counts_saturated(self) -> bool:
        """Whether any kernel counts values that it clamps to float16."""
        return self.matrix_element == "f16" and "matrix" in (self.gemm_kind, self.attention_kind)

    def weight_dtype(self, dtype: str) -> str:
        """The type of frozen weights for a type of operands: matrix units of f16 need float16."""
        return "float16" if self.saturates and dtype == "bfloat16" else dtype

    def tile_on_matrix_units(self) -> MatrixTile:
        m, n, k, threads = self.matrix
        shape = MatrixShape(m, n, k, threads, self.matrix_element)
        return MatrixTile(shape, *self.matrix_tile, self.matrix_deep).within(self.limits)

    def for_products(self, size_class: str) -> Profile:
        changes: Mapping[str, Any] = dict(dict(self.products).get(size_class, ()))
        return replace(self, **changes) if changes else self


_WHOLE = 32  # subgroup size of most GPUs
_ROWS_OF_FEW_REGISTERS = 4  # whose units do not fit registers all at once


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
    """The profile of a GPU, using its matrix units if they fit its limits.

    ``shape`` is the matrix units' product. ``hoists_loads`` is whether the compiler hoists all
    loads of straight-line code; other arguments as for ``fitting_tiles``.
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
        # Fewer than 32 invocations have too few registers for attention's rows.
        attention_kind="tiled" if few_registers and shape.threads < _WHOLE else "matrix",
        matrix=(shape.m, shape.n, shape.k, shape.threads),
        matrix_element=shape.element,
        matrix_tile=(tile.groups_m, tile.groups_n, tile.fragments_m, tile.fragments_n),
        matrix_deep=tile.deep,
    )


def plainer(profile: Profile) -> Profile | None:
    """The fallback profile if a GPU's kernels are wrong; None if there is none.

    First attention stops using matrix units, then products, then nothing uses workgroup memory.
    """
    if profile.textures or profile.gemm_kind == profile.attention_kind == "register":
        return None
    if profile.attention_kind == "matrix":
        return replace(profile, attention_kind="tiled")
    if profile.gemm_kind == "matrix":
        return replace(profile, gemm_kind="tiled", products=())
    return plainest(profile)


def plainest(profile: Profile) -> Profile:
    """The profile whose kernels require the minimum of a driver."""
    if profile.textures:
        return CPU_PROFILE
    return replace(profile, gemm_kind="register", attention_kind="register", products=())
