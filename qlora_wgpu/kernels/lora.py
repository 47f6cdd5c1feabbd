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

_ROWS, _RANKS = 4, 8  # of results that a workgroup of the GPUs' kernels makes
_THREADS = 8  # of theirs where a profile has no use for them but experts
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
        self, g: Graph, path: str, workgroups: Workgroups, cut: dict[str, Constant]
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
                "x_stride": self.x.units(8),
                "a_stride": self.lora.a.units(8),
                "u_stride": self.u.stride,
                "scale": self.lora.scaling,
                **dropout_params(self.lora.mask),
                **expert_params(self.experts, self.lora.a_stride // 8),
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
        problem._launch(g, "lora/down_texture.wgsl", workgroups, cut)


class DownShared:
    """For GPUs, and for experts: a workgroup shares the sum over a row."""

    def fits(self, problem: Down, profile: Profile) -> bool:
        """Where the profile says how many threads share it."""
        return profile.lora_threads > 0 or problem.experts is not None

    def launch(self, g: Graph, problem: Down) -> None:
        """Adds the launch."""
        workgroups = (ceil_div(problem.x.rows, _ROWS), ceil_div(problem.lora.r, _RANKS), 1)
        cut: dict[str, Constant] = {"THREADS": g.profile.lora_threads or _THREADS}
        problem._launch(g, "lora/down.wgsl", workgroups, cut)


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
        self, g: Graph, path: str, workgroups: Workgroups, cut: dict[str, Constant], unit: int
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
                "b_stride": self.lora.b.units(8),
                "du_stride": self.du.stride,
                "scale": self.lora.scaling,
                **expert_params(self.experts, self.lora.b_stride // 8),
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
        problem._launch(g, "lora/up_grad_texture.wgsl", workgroups, cut, 8)


class UpGradShared:
    """For GPUs, and for experts: a workgroup shares the sum over a row."""

    def fits(self, problem: UpGrad, profile: Profile) -> bool:
        """Where the profile says how many threads share it."""
        return profile.lora_threads > 0 or problem.experts is not None or bool(problem.others)

    def launch(self, g: Graph, problem: UpGrad) -> None:
        """Adds the launch."""
        workgroups = (ceil_div(problem.dy.rows, _ROWS), ceil_div(problem.lora.r, _RANKS), 1)
        cut: dict[str, Constant] = {"THREADS": g.profile.lora_threads or _THREADS}
        problem._launch(g, "lora/up_grad.wgsl", workgroups, cut, 2)


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


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures or profile.name == CPU_PROFILE.name:
        return ()
    return (
        {"lora_threads": 32, "lora_grad_group": (16, 16)},
        {"lora_threads": 128, "lora_grad_group": (32, 8)},
        {"lora_threads": 64, "lora_grad_group": (64, 4)},
    )


DOWN: Kernel[Down] = Kernel("lora", (DownTexture(), DownShared(), DownGemm()))
UP_GRAD: Kernel[UpGrad] = Kernel("lora", (UpGradTexture(), UpGradShared(), UpGradGemm()))
KERNELS = (DOWN, UP_GRAD)
TUNABLES = (Tunable("adapter", lambda launch: launch.kernel == "lora", _changes),)
