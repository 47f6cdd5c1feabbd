"""Mamba 2 (Dao & Gu, 2024): time steps, the selective scan and the gated norm after it."""

from __future__ import annotations

from types import ModuleType

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels import mamba_chunks
from qlora_wgpu.kernels import mamba_scan as kernels
from qlora_wgpu.kernels.common import row_constants, row_workgroups
from qlora_wgpu.kernels.mamba_scan import MambaScan, tokens_of_chunk
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.pointwise import ACTIVATIONS

_LARGEST = 3.4e38


def mamba_steps(
    g: Graph, raw: Tensor, bias: Tensor, limits: tuple[float, float | None] = (0.0, None)
) -> Tensor:
    """softplus(raw + bias) within the limits, float32.

    raw (rows, heads) is of any type, bias (heads) float32, frozen; None is no upper limit.
    """
    if bias.columns != raw.columns:
        raise GraphError(f"mamba_steps: {raw} and {bias} do not fit")
    dt = g.float32("dt", *raw.shape)
    low, high = limits[0], _LARGEST if limits[1] is None else limits[1]
    units = raw.rows * raw.units(8)
    params = {"units": units, "heads": raw.columns, "low": low, "high": high}
    given = {"raw": raw, "bias": bias}
    g.launch("mamba_scan/dt.wgsl", units, {**given, "dt": dt}, params)

    def vjp(ddt: Tensor) -> None:
        draw = g.new_gradient(raw)
        g.launch("mamba_scan/dt_backward.wgsl", units, {**given, "ddt": ddt, "draw": draw}, params)
        g.add_gradient(raw, draw)

    g.record(dt, [raw], vjp)
    return dt


def scan_kernels(profile: Profile) -> ModuleType:
    """The kernels of a profile: ``forward`` and ``backward`` of a ``MambaScan``."""
    return mamba_chunks if profile.textures else kernels


def mamba_scan(
    g: Graph,
    x: Tensor,
    bc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    d: Tensor,
    batch: BatchBuffers,
    heads: int,
    state_size: int,
    *,
    chunk: int = 0,
) -> Tensor:
    """y_t = S_tᵀ · C_t + D · x_t of each head's state S, (state_size, head_dim); an operand like x.

    S_t = exp(dt_t · A) · S_{t-1} + B_t ⊗ dt_t · x_t, A = -exp(a_log). It is zero at the start of
    every sample; padding does not change it and has zeros for y. All of it is float32 inside.

    Tokens are processed in chunks of 16, 32 or 64 (the state-space dual form), by default as many
    as suit the profile; results differ only in rounding. Only the arguments are kept for the
    backward pass. The forward needs 4 · chunk + 32 temporary bytes per token and head, the backward
    8 · chunk + 8 · state_size · (head_dim / chunk) + state_size / 8 + 40, for as many heads at once
    as fit a binding; with operands in textures the forward needs 4 · state_size · (head_dim /
    chunk) + 32.

    x is (rows, heads · head_dim) and bc (rows, 2 · groups · state_size), B of all groups and then
    C, operands; dt is (rows, heads) float32, a_log and d (heads) float32, frozen. Neighbouring
    heads share a group. In generation, the state after the last token is kept in the batch's
    cache, and each new token updates it.
    """
    shapes = f"mamba_scan: {x}, {bc}, {dt}, {a_log} and {d}"
    if {x.rows, bc.rows, dt.rows} != {batch.rows}:
        raise GraphError(f"{shapes} do not have {batch.rows} rows")
    if {dt.columns, a_log.columns, d.columns} != {heads} or x.columns % heads:
        raise GraphError(f"{shapes} do not have {heads} heads")
    groups = bc.columns // (2 * state_size)
    parts_fit = bc.columns == 2 * groups * state_size and groups and heads % groups == 0
    if not parts_fit or state_size % 8 or x.columns // heads % 8:
        raise GraphError(f"{shapes}: states of {state_size} rows do not fit")
    chunk = chunk or tokens_of_chunk(g.profile)
    scan = scan_kernels(g.profile)
    problem = MambaScan(x, bc, dt, a_log, d, batch.segments, batch.batch, heads, state_size, chunk)
    y = g.operand("mamba scan", x.rows, x.columns)
    state = None
    if batch.cache is not None:
        state = batch.cache.next_state(heads * state_size, problem.head_dim)
        assert batch.places is not None
        if batch.decodes:
            kernels.step(g, problem, state, batch.places, y)
            return y
    scan.forward(g, problem, y, state, batch.places)

    def vjp(dy: Tensor) -> None:
        dx = g.new_gradient(x)
        dbc, ddt = (g.float32(f"d {each.name}", *each.shape) for each in (bc, dt))
        scan.backward(g, problem, dy, dx, dbc, ddt)
        for each, gradient in ((x, dx), (bc, dbc), (dt, ddt)):
            g.add_gradient(each, gradient)

    g.record(y, [x, bc, dt], vjp)
    return y


def gated_group_norm(
    g: Graph, x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, *, gate_first: bool
) -> Tensor:
    """RMSNorm of x · silu(z) over each group of a row's columns, or of x, and then times silu(z).

    x and z (rows, columns) operands, weight (columns) float32; columns a multiple of 8 · groups.
    """
    if x.shape != z.shape or x.columns != weight.columns or x.columns % (8 * groups):
        raise GraphError(f"gated_group_norm: {x}, {z} and {weight} do not fit {groups} groups")
    given = {"x": x, "z": z, "weight": weight}
    params = {"rows": x.rows, "groups": groups, "units": x.columns // 8 // groups, "eps": eps}
    constants = {**ACTIVATIONS["silu"], **row_constants(g), "GATE_FIRST": gate_first}
    workgroups = row_workgroups(g, x.rows * groups)

    def forward() -> Tensor:
        y = g.operand(f"norm({x.name})", x.rows, x.columns)
        g.launch("gated_group_norm/forward.wgsl", workgroups, {**given, "y": y}, params, constants)
        return y

    def vjp(dy: Tensor) -> None:
        dx, dz = g.new_gradient(x), g.new_gradient(z)
        bound = {**given, "dy": dy, "dx": dx, "dz": dz}
        g.launch("gated_group_norm/backward.wgsl", workgroups, bound, params, constants)
        g.add_gradient(x, dx)
        g.add_gradient(z, dz)

    y = forward()
    g.record(y, [x, z], vjp, remat=forward)
    return y
