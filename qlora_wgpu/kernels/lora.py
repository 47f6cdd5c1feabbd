"""LoRA's thin products: down to the rank, and the gradients of A, B and their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.limits import MOST_STORAGE_BUFFERS
from qlora_wgpu.gpu.wgsl import Constant, Workgroups
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.common import (
    Change,
    DropoutMask,
    ExpertTiles,
    Kernel,
    Tunable,
    Variant,
    always,
    dropout_params,
    expert_constants,
    expert_count,
    expert_params,
)
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm, broadcast_constants, further_layers

_DOWN_ROWS, _UP_GRAD_ROWS = 4, 8  # result rows per workgroup of the GPUs' kernels
_RANKS = 8  # ranks per workgroup on the way down
_LANE_RANKS = 4  # ranks of the gradient per invocation
_PARTS = 16  # partial sums that an invocation adds in workgroup memory
_THREADS = 32  # per workgroup if a profile uses these kernels only for experts
_TEXTURE_RANKS = 8  # ranks at a time in a thin product for software GPUs


@dataclass(frozen=True)
class Lora:
    """One adapter pair, float32 windows of the flat buffers."""

    r: int  # the rank
    scaling: float  # factor of the product
    dropout: float  # probability of dropping an input element
    key: int  # distinguishes its dropout masks from other modules'
    a: Tensor  # (r, in_features)
    b: Tensor  # (out_features, r)
    grad_a: Tensor  # accumulated gradient of ``a``
    grad_b: Tensor  # accumulated gradient of ``b``
    a_stride: int = 0  # floats between experts' ``a``
    b_stride: int = 0  # floats between experts' ``b``
    magnitude: Tensor | None = None  # DoRA's, (out_features) float32, if used
    grad_magnitude: Tensor | None = None  # accumulated gradient of ``magnitude``

    def forward_term(self, u: Tensor) -> LoraTerm:
        """u·Bᵀ, for the forward's product."""
        return LoraTerm(u, self.b, self.b_stride)

    def backward_term(self, du: Tensor) -> LoraTerm:
        """mask · (du·A), for the product of dx."""
        return LoraTerm(du, self.a, self.a_stride, self.mask)

    @property
    def mask(self) -> DropoutMask | None:
        return DropoutMask(self.dropout, self.key) if self.dropout > 0 else None


@dataclass(frozen=True)
class LoraA:
    """u = scaling · dropout(x)·Aᵀ, with x (rows, in_features), u (rows, r) float32."""

    x: Tensor
    lora: Lora
    u: Tensor
    batch_info: Tensor
    experts: ExpertTiles | None = None

    def __post_init__(self) -> None:
        if self.x.columns != self.lora.a.columns or self.u.shape != (self.x.rows, self.lora.r):
            raise GraphError(f"lora: {self.x}, {self.lora.a} and {self.u} do not fit")

    def _launch(
        self, g: Graph, path: str, workgroups: Workgroups, tiling: dict[str, Constant], unit: int
    ) -> None:
        masked = self.lora.mask is not None
        tensors: dict[str, Tensor | None] = {
            "x": self.x,
            "a": self.lora.a,
            "u": self.u,
            "batch_info": self.batch_info if masked else None,
        }
        constants = {"DROPOUT": masked, **expert_constants(self.experts, tensors), **tiling}
        g.launch(
            path,
            workgroups,
            tensors,
            {
                "r": self.lora.r,
                "scale": self.lora.scaling,
                **dropout_params(self.lora.mask),
                **expert_params(self.experts, self.lora.a_stride // unit),
            },
            constants,
            flops=2 * self.x.rows * self.x.columns * self.lora.r,
            label="lora/down",
        )


def _down_texture(g: Graph, problem: LoraA) -> None:
    """For software GPUs: ranks broadcast within a subgroup."""
    threads, r = g.profile.subgroup_size, problem.lora.r
    ranks = min(2 * _TEXTURE_RANKS, round_up(r, _TEXTURE_RANKS))
    workgroups = (ceil_div(problem.x.rows, 4 * threads), ceil_div(r, ranks), 1)
    tiling = {**broadcast_constants(threads, ranks), "FOURS": ranks // 4}
    problem._launch(g, "lora/down_texture.wgsl", workgroups, tiling, 8)


def _down_shared(g: Graph, problem: LoraA) -> None:
    """For GPUs, and for experts: invocations of a workgroup share the sum over a row."""
    across = ceil_div(problem.lora.r, _RANKS)
    tiling, rows = _shared(g.profile, problem.x.rows, across, _DOWN_ROWS, 1)
    workgroups = (across, ceil_div(problem.x.rows, rows), 1)
    problem._launch(g, "lora/down.wgsl", workgroups, tiling, 4)


def _down_gemm(g: Graph, problem: LoraA) -> None:
    lora = problem.lora
    gemm = Gemm(
        x=problem.x, w=lora.a, y=problem.u, with_rows=True, scale=lora.scaling,
        dropout=lora.mask, batch_info=problem.batch_info, label="lora/down",
    )  # fmt: skip
    GEMM.launch(g, gemm)


@dataclass(frozen=True)
class LoraBGradInput:
    """du = scaling · dy·B, with dy (rows, out_features), du (rows, r) float32.

    With ``others``, du has the ranks of several layers of one input, a multiple of eight each; B is
    stacked, and ``others`` are dy of the second and third layer.
    """

    dy: Tensor
    lora: Lora
    du: Tensor
    experts: ExpertTiles | None = None
    others: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        ranks = self.lora.b.columns * (1 + len(self.others))
        fits = not self.others or (ranks == self.lora.r and self.lora.b.columns % 8 == 0)
        if self.du.shape != (self.dy.rows, self.lora.r) or not fits:
            raise GraphError(f"lora: {self.dy}, {self.lora.b} and {self.du} do not fit")

    def _launch(
        self,
        g: Graph,
        path: str,
        workgroups: Workgroups,
        tiling: dict[str, Constant],
        unit: int,
        b_unit: int,
    ) -> None:
        tensors: dict[str, Tensor | None] = {"dy": self.dy, "b": self.lora.b, "du": self.du}
        others, layers = further_layers("dy", self.dy, self.others, unit)
        tensors |= others
        n1, n2 = (*(other.columns for other in self.others), 0, 0)[:2]
        constants = {**expert_constants(self.experts, tensors), **tiling}
        g.launch(
            path,
            workgroups,
            tensors,
            {
                "r": self.lora.r,
                "n": self.dy.columns,
                "scale": self.lora.scaling,
                **expert_params(self.experts, self.lora.b_stride // b_unit),
                "layer_r": self.lora.b.columns,
                **layers,
                "n1": n1,
                "n2": n2,
            },
            constants,
            flops=2 * self.dy.rows * self.dy.columns * self.lora.r,
            label="lora/up_grad",
        )


def _up_grad_texture(g: Graph, problem: LoraBGradInput) -> None:
    """For software GPUs: rows of B broadcast within a subgroup."""
    threads = g.profile.subgroup_size
    across = ceil_div(problem.lora.r, _TEXTURE_RANKS)
    workgroups = (ceil_div(problem.dy.rows, 2 * threads), across, 1)
    tiling = broadcast_constants(threads, _TEXTURE_RANKS)
    problem._launch(g, "lora/up_grad_texture.wgsl", workgroups, tiling, 8, 8)


def _up_grad_shared(g: Graph, problem: LoraBGradInput) -> None:
    """For GPUs, and for experts: invocations of a workgroup share the sum over a row."""
    threads = g.profile.lora_threads or _THREADS
    lanes = 4 if problem.lora.b.stride % 16 == 0 and threads >= 4 * _PARTS else 2
    across = ceil_div(problem.lora.r, _LANE_RANKS * lanes)
    tiling, rows = _shared(g.profile, problem.dy.rows, across, _UP_GRAD_ROWS, lanes)
    workgroups = (across, ceil_div(problem.dy.rows, rows), 1)
    problem._launch(g, "lora/up_grad.wgsl", workgroups, tiling, 2, 4)


def _up_grad_gemm(g: Graph, problem: LoraBGradInput) -> None:
    lora = problem.lora
    gemm = Gemm(
        x=problem.dy, w=lora.b, y=problem.du, with_rows=False, scale=lora.scaling,
        label="lora/up_grad",
    )  # fmt: skip
    GEMM.launch(g, gemm)


def _shared(
    profile: Profile, rows: int, across: int, own: int, lanes: int
) -> tuple[dict[str, Constant], int]:
    """How a workgroup shares sums, and its number of rows.

    Up to the profile's maximum, which reads the thin factor once, if enough workgroups are left.
    """
    threads = profile.lora_threads or _THREADS
    groups = max(min(profile.lora_rows // own, threads // (_PARTS * lanes)), 1)

    def few() -> bool:
        workgroups = ceil_div(rows, own * groups) * across
        return rows <= own * groups // 2 or workgroups < profile.least_workgroups // 8

    while groups > 1 and few():
        groups //= 2
    return {"THREADS": threads, "GROUPS": groups, "LANES": lanes}, own * groups


def _change(threads: int, rows: int, grad_group: tuple[int, int], grad_ranks: int) -> Change:
    return {
        "lora_threads": threads,
        "lora_rows": rows,
        "lora_grad_group": grad_group,
        "lora_grad_ranks": grad_ranks,
    }


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.is_software:
        return ()
    return (
        _change(128, 8, (16, 16), 4),
        _change(256, 4, (8, 32), 4),  # more workgroups
        _change(128, 16, (32, 8), 8),  # fewer
    )


DOWN: Kernel[LoraA] = Kernel(
    "lora",
    (
        Variant(lambda problem, profile: profile.textures, _down_texture),
        Variant(
            lambda problem, profile: profile.lora_threads > 0 or problem.experts is not None,
            _down_shared,
        ),
        Variant(lambda problem, profile: problem.experts is None, _down_gemm),
    ),
)
UP_GRAD: Kernel[LoraBGradInput] = Kernel(
    "lora",
    (
        Variant(lambda problem, profile: profile.textures and not problem.others, _up_grad_texture),
        Variant(
            lambda problem, profile: (
                profile.lora_threads > 0 or problem.experts is not None or bool(problem.others)
            ),
            _up_grad_shared,
        ),
        Variant(lambda problem, profile: problem.experts is None, _up_grad_gemm),
    ),
)
TUNABLES = (Tunable("adapter", lambda launch: launch.kernel == "lora", _changes),)


# Rows that an invocation of a GPU loads before it uses the first; with few registers.
_AHEAD, _AHEAD_OF_FEW = 4, 2


@dataclass(frozen=True)
class LoraWeightGrad:
    """gradient += xᵀ·u (dB), or its transpose with x masked (dA)."""

    x: Tensor  # (rows, columns)
    u: Tensor  # (rows, r) float32
    gradient: Tensor  # float32, added to
    transposed: bool = False  # whether it is the gradient of A
    dropout: DropoutMask | None = None  # the mask of x, for the gradient of A
    batch_info: Tensor | None = None  # required for dropout
    expert_rows: Tensor | None = None  # if given, each expert's rows add to its own gradient
    expert_stride: int = 0  # floats between experts' gradients
    # dy of the second and third layer of one input, if any: u has their ranks, a multiple of eight
    # each, and ``gradient`` their rows.
    others: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if self.x.rows != self.u.rows or (self.others and self.gradient.rows != self.columns):
            raise GraphError(f"lora: {self.x}, {self.u} and {self.gradient} do not fit")

    @property
    def columns(self) -> int:
        return self.x.columns + sum(other.columns for other in self.others)

    @property
    def r(self) -> int:
        return self.u.columns // (1 + len(self.others))

    def _launch(
        self, g: Graph, path: str, unit: int, ranks: int, tiling: dict[str, Constant]
    ) -> None:
        across, down = self._groups(unit, ranks, tiling)
        tensors, params = self._bound(unit)
        g.launch(
            path,
            (across, down, expert_count(self.expert_rows)),
            tensors,
            {**_NO_A, **params},
            {"TRANSPOSED": self.transposed, "DROPOUT": self.dropout is not None, **tiling},
            flops=self._flops,
            label="lora/grad_a" if self.transposed else "lora/grad_b",
            turns=ceil_div(self.x.rows, int(tiling.get("ROW_THREADS", tiling["THREADS"]))),
        )

    @property
    def _flops(self) -> int:
        return 2 * self.x.rows * self.columns * self.r

    def _groups(self, unit: int, ranks: int, tiling: dict[str, Constant]) -> tuple[int, int]:
        return ceil_div(self.columns, unit * int(tiling["THREADS"])), ceil_div(self.r, ranks)

    def _bound(self, unit: int) -> tuple[dict[str, Tensor | None], dict[str, int | float]]:
        others, layers = further_layers("x", self.x, self.others, unit, unit)
        tensors: dict[str, Tensor | None] = {
            "x": self.x,
            **others,
            "u": self.u,
            "g": self.gradient,
            "batch_info": self.batch_info if self.dropout is not None else None,
            "expert_rows": self.expert_rows,
        }
        return tensors, {
            "x_columns": self.columns,
            "r": self.r,
            "r_stride": self.u.units(4),
            "g_stride": self.gradient.units(4),
            **dropout_params(self.dropout),
            "lora_expert": self.expert_stride // 4,
            **layers,
        }


_NO_A = dict.fromkeys(
    (
        "groups_b", "down_b", "down_a", "xa_columns", "xa_stride", "ra", "ga_stride",
        "lora_expert_a",
    ),
    0,
)  # fmt: skip


@dataclass(frozen=True)
class BothGrads:
    """The gradients of B and of A of a layer, or of layers of one input."""

    b: LoraWeightGrad
    a: LoraWeightGrad


def _factor_grad_texture(g: Graph, problem: LoraWeightGrad) -> None:
    """For software GPUs: rows of u broadcast within a subgroup."""
    tiling: dict[str, Constant] = {"THREADS": g.profile.subgroup_size}
    problem._launch(g, "lora/grad_texture.wgsl", 8, _TEXTURE_RANKS, tiling)


def _factor_grad_shared(g: Graph, problem: LoraWeightGrad) -> None:
    """Four columns by four or eight ranks per invocation; on GPUs, invocations share the rows."""
    ranks, tiling = _tiling(g.profile, problem.r)
    problem._launch(g, "lora/grad.wgsl", 4, ranks, tiling)


def _both_shared_fits(problem: BothGrads, profile: Profile) -> bool:
    """Whether invocations share the rows, and bindings suffice."""
    bound = sum(tensor is not None for tensor in _both(problem).values())
    return (
        profile.fused_linears and profile.lora_grad_group[1] > 1 and bound <= MOST_STORAGE_BUFFERS
    )


def _both_shared(g: Graph, problem: BothGrads) -> None:
    """For GPUs: one launch with the workgroups of both."""
    b, a = problem.b, problem.a
    ranks, tiling = _tiling(g.profile, b.r)
    across_b, down_b = b._groups(4, ranks, tiling)
    across_a, down_a = a._groups(4, ranks, tiling)
    g.launch(
        "lora/grad.wgsl",
        (across_b * down_b + across_a * down_a, 1, expert_count(b.expert_rows)),
        _both(problem),
        {
            **b._bound(4)[1],
            **dropout_params(a.dropout),
            "groups_b": across_b * down_b,
            "down_b": down_b,
            "down_a": down_a,
            "xa_columns": a.columns,
            "ra": a.r,
            "ga_stride": a.gradient.units(4),
            "lora_expert_a": a.expert_stride // 4,
        },
        {"TRANSPOSED": False, "DROPOUT": a.dropout is not None, **tiling},
        flops=b._flops + a._flops,
        label="lora/grads",
    )


def _one_by_one(g: Graph, problem: BothGrads) -> None:
    FACTOR_GRAD.launch(g, problem.b)
    FACTOR_GRAD.launch(g, problem.a)


def _tiling(profile: Profile, r: int) -> tuple[int, dict[str, Constant]]:
    """Ranks per invocation without an idle half, and the kernel's tiling."""
    across, down = profile.lora_grad_group
    ranks = 4 if r <= 4 else profile.lora_grad_ranks
    ahead = _AHEAD_OF_FEW if profile.gemm_few_registers else _AHEAD
    return ranks, {
        "THREADS": across,
        "ROW_THREADS": down,
        "FOURS": ranks // 4,
        "AHEAD": ahead if down > 1 else 1,
        "SPREAD": down > 1,
    }


def _both(problem: BothGrads) -> dict[str, Tensor | None]:
    tensors, _ = problem.b._bound(4)
    of_a, _ = problem.a._bound(4)
    return tensors | {
        "xa": of_a["x"],
        "ua": of_a["u"],
        "ga": of_a["g"],
        "batch_info": of_a["batch_info"],
    }


FACTOR_GRAD: Kernel[LoraWeightGrad] = Kernel(
    "lora",
    (
        Variant(
            lambda problem, profile: profile.textures and not problem.others, _factor_grad_texture
        ),
        Variant(always, _factor_grad_shared),
    ),
)
BOTH_GRADS: Kernel[BothGrads] = Kernel(
    "lora", (Variant(_both_shared_fits, _both_shared), Variant(always, _one_by_one))
)
KERNELS = (DOWN, UP_GRAD, FACTOR_GRAD, BOTH_GRADS)
