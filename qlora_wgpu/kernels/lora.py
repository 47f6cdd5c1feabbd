"""The thin products of a LoRA adapter: down to its rank, and the gradient of what comes there."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.grid import Workgroups
from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div, round_up
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dropout import DropoutMask, dropout_params
from qlora_wgpu.kernels.experts import (
    ExpertTiles,
    expert_constants,
    expert_params,
)
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm, broadcast_constants, further_layers
from qlora_wgpu.kernels.kernel import Change, Kernel, Tunable

_DOWN_ROWS, _UP_GRAD_ROWS = 4, 8  # of results that a group of the GPUs' kernels makes
_RANKS = 8  # of results that a workgroup makes on the way down
_LANE_RANKS = 4  # that an invocation makes of the gradient
_PARTS = 16  # of a sum that an invocation adds up in workgroup memory
_THREADS = 32  # of a workgroup where a profile has no use for them but experts
_TEXTURE_RANKS = 8  # that a thin product for software adapters makes at a time


@dataclass(frozen=True)
class Lora:
    """One adapter pair, float32 windows of the flat buffers.

    Attributes:
        r: The rank.
        scaling: What the product is multiplied by.
        dropout: Probability that an element of its input is dropped.
        key: Tells its dropout masks from those of other modules.
        a: (r, in_features).
        b: (out_features, r).
        grad_a: Gradient of ``a``, summed up.
        grad_b: Gradient of ``b``, summed up.
        a_stride: Floats from one expert's ``a`` to the next one's.
        b_stride: The same of ``b``.
        magnitude: DoRA's, (out_features) float32, if it is one.
        grad_magnitude: The gradient of ``magnitude``, summed up.
    """

    r: int
    scaling: float
    dropout: float
    key: int
    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    a_stride: int = 0
    b_stride: int = 0
    magnitude: Tensor | None = None
    grad_magnitude: Tensor | None = None

    def forward_term(self, u: Tensor) -> LoraTerm:
        """u·Bᵀ, of the forward's product."""
        return LoraTerm(u, self.b, self.b_stride)

    def backward_term(self, du: Tensor) -> LoraTerm:
        """mask · (du·A), of the product that passes a gradient back."""
        return LoraTerm(du, self.a, self.a_stride, self.mask)

    @property
    def mask(self) -> DropoutMask | None:
        """The dropout of its input, if there is any."""
        return DropoutMask(self.dropout, self.key) if self.dropout > 0 else None


@dataclass(frozen=True)
class Down:
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
        self, g: Graph, path: str, workgroups: Workgroups, cut: dict[str, Constant], unit: int
    ) -> None:
        masked = self.lora.mask is not None
        tensors: dict[str, Tensor | None] = {
            "x": self.x,
            "a": self.lora.a,
            "u": self.u,
            "batch_info": self.batch_info if masked else None,
        }
        constants = {"DROPOUT": masked, **expert_constants(self.experts, tensors), **cut}
        g.launch(
            path,
            workgroups,
            tensors,
            {
                "rows": self.x.rows,
                "r": self.lora.r,
                "x_stride": self.x.units(unit),
                "a_stride": self.lora.a.units(unit),
                "u_stride": self.u.stride,
                "scale": self.lora.scaling,
                **dropout_params(self.lora.mask),
                **expert_params(self.experts, self.lora.a_stride // unit),
            },
            constants,
            flops=2 * self.x.rows * self.x.columns * self.lora.r,
            label="lora/down",
        )


class DownTexture:
    """For software adapters: ranks broadcast within a subgroup."""

    def fits(self, problem: Down, profile: Profile) -> bool:
        """Where kernels read textures."""
        return profile.textures

    def launch(self, g: Graph, problem: Down) -> None:
        """Adds the launch."""
        threads, r = g.profile.subgroup_size, problem.lora.r
        ranks = min(2 * _TEXTURE_RANKS, round_up(r, _TEXTURE_RANKS))
        workgroups = (ceil_div(problem.x.rows, 4 * threads), ceil_div(r, ranks), 1)
        cut = {**broadcast_constants(threads, ranks), "FOURS": ranks // 4}
        problem._launch(g, "lora/down_texture.wgsl", workgroups, cut, 8)


class DownShared:
    """For GPUs, and for experts: invocations of a workgroup share the sum over a row."""

    def fits(self, problem: Down, profile: Profile) -> bool:
        """Where the profile says how many."""
        return profile.lora_threads > 0 or problem.experts is not None

    def launch(self, g: Graph, problem: Down) -> None:
        """Adds the launch."""
        across = ceil_div(problem.lora.r, _RANKS)
        cut, rows = _shared(g.profile, problem.x.rows, across, _DOWN_ROWS, 1)
        workgroups = (across, ceil_div(problem.x.rows, rows), 1)
        problem._launch(g, "lora/down.wgsl", workgroups, cut, 4)


class DownGemm:
    """An ordinary product of few columns."""

    def fits(self, problem: Down, profile: Profile) -> bool:
        """Where there are no experts."""
        return problem.experts is None

    def launch(self, g: Graph, problem: Down) -> None:
        """Adds the launch."""
        lora = problem.lora
        gemm = Gemm(
            x=problem.x, w=lora.a, y=problem.u, with_rows=True, scale=lora.scaling,
            dropout=lora.mask, batch_info=problem.batch_info, label="lora/down",
        )  # fmt: skip
        GEMM.launch(g, gemm)


@dataclass(frozen=True)
class UpGrad:
    """du = scaling · dy·B, with dy (rows, out_features), du (rows, r) float32.

    With ``others`` du has the ranks of several layers of one input side by side, a multiple of
    eight each; B has the layers' rows one below the other, and ``others`` are the second's and the
    third's dy.
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
        cut: dict[str, Constant],
        unit: int,
        b_unit: int,
    ) -> None:
        tensors: dict[str, Tensor | None] = {"dy": self.dy, "b": self.lora.b, "du": self.du}
        others, layers = further_layers("dy", self.dy, self.others, unit)
        tensors |= others
        n1, n2 = (*(other.columns for other in self.others), 0, 0)[:2]
        constants = {**expert_constants(self.experts, tensors), **cut}
        g.launch(
            path,
            workgroups,
            tensors,
            {
                "rows": self.dy.rows,
                "r": self.lora.r,
                "n": self.dy.columns,
                "dy_stride": self.dy.units(unit),
                "b_stride": self.lora.b.units(b_unit),
                "du_stride": self.du.stride,
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


class UpGradTexture:
    """For software adapters: rows of B broadcast within a subgroup."""

    def fits(self, problem: UpGrad, profile: Profile) -> bool:
        """Where kernels read textures."""
        return profile.textures and not problem.others

    def launch(self, g: Graph, problem: UpGrad) -> None:
        """Adds the launch."""
        threads = g.profile.subgroup_size
        across = ceil_div(problem.lora.r, _TEXTURE_RANKS)
        workgroups = (ceil_div(problem.dy.rows, 2 * threads), across, 1)
        cut = broadcast_constants(threads, _TEXTURE_RANKS)
        problem._launch(g, "lora/up_grad_texture.wgsl", workgroups, cut, 8, 8)


class UpGradShared:
    """For GPUs, and for experts: invocations of a workgroup share the sum over a row."""

    def fits(self, problem: UpGrad, profile: Profile) -> bool:
        """Where the profile says how many."""
        return profile.lora_threads > 0 or problem.experts is not None or bool(problem.others)

    def launch(self, g: Graph, problem: UpGrad) -> None:
        """Adds the launch."""
        threads = g.profile.lora_threads or _THREADS
        lanes = 4 if problem.lora.b.stride % 16 == 0 and threads >= 4 * _PARTS else 2
        across = ceil_div(problem.lora.r, _LANE_RANKS * lanes)
        cut, rows = _shared(g.profile, problem.dy.rows, across, _UP_GRAD_ROWS, lanes)
        workgroups = (across, ceil_div(problem.dy.rows, rows), 1)
        problem._launch(g, "lora/up_grad.wgsl", workgroups, cut, 2, 4)


class UpGradGemm:
    """An ordinary product of few columns."""

    def fits(self, problem: UpGrad, profile: Profile) -> bool:
        """Where there are no experts."""
        return problem.experts is None

    def launch(self, g: Graph, problem: UpGrad) -> None:
        """Adds the launch."""
        lora = problem.lora
        gemm = Gemm(
            x=problem.dy, w=lora.b, y=problem.du, with_rows=False, scale=lora.scaling,
            label="lora/up_grad",
        )  # fmt: skip
        GEMM.launch(g, gemm)


def _shared(
    profile: Profile, rows: int, across: int, own: int, lanes: int
) -> tuple[dict[str, Constant], int]:
    """How a workgroup shares sums, and how many rows it makes.

    As many as the profile says, which read the thin factor once, if enough workgroups are left.

    Args:
        profile: How kernels are cut.
        rows: All rows.
        across: Workgroups along the ranks.
        own: Rows of a group of invocations.
        lanes: Invocations of a group that make different ranks.
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
    if profile.textures or profile.name == CPU_PROFILE.name:
        return ()
    return (
        _change(128, 8, (16, 16), 4),
        _change(256, 4, (8, 32), 4),  # more workgroups
        _change(128, 16, (32, 8), 8),  # fewer
    )


DOWN: Kernel[Down] = Kernel("lora", (DownTexture(), DownShared(), DownGemm()))
UP_GRAD: Kernel[UpGrad] = Kernel("lora", (UpGradTexture(), UpGradShared(), UpGradGemm()))
KERNELS = (DOWN, UP_GRAD)
TUNABLES = (Tunable("adapter", lambda launch: launch.kernel == "lora", _changes),)
