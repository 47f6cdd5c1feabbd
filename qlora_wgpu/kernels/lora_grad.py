"""The gradients of a LoRA adapter's two matrices."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.sizes import MOST_STORAGE_BUFFERS
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dropout import DropoutMask, dropout_params
from qlora_wgpu.kernels.experts import expert_count
from qlora_wgpu.kernels.gemm import further_layers
from qlora_wgpu.kernels.kernel import Kernel

# Rows that an invocation of a GPU loads before it uses the first; where it has few registers.
_AHEAD, _AHEAD_OF_FEW = 4, 2
_TEXTURE_RANKS = 8  # that a thin product for software adapters makes at a time


@dataclass(frozen=True)
class FactorGrad:
    """gradient += xᵀ·u (dB), or its transpose with x masked (dA).

    Attributes:
        x: (rows, columns).
        u: (rows, r) float32.
        gradient: float32, added to.
        transposed: Whether it is the gradient of A.
        dropout: What x had, for the gradient of A.
        batch_info: Needed for dropout.
        expert_rows: If given, each expert's rows add to its own gradient.
        expert_stride: Floats from one expert's gradient to the next one's.
        others: If there are, the second's and the third's dy of layers of one input: u has their
            ranks side by side, a multiple of eight each, and ``gradient`` their rows.
    """

    x: Tensor
    u: Tensor
    gradient: Tensor
    transposed: bool = False
    dropout: DropoutMask | None = None
    batch_info: Tensor | None = None
    expert_rows: Tensor | None = None
    expert_stride: int = 0
    others: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if self.x.rows != self.u.rows or (self.others and self.gradient.rows != self.columns):
            raise GraphError(f"lora: {self.x}, {self.u} and {self.gradient} do not fit")

    @property
    def columns(self) -> int:
        """Columns of all x."""
        return self.x.columns + sum(other.columns for other in self.others)

    @property
    def r(self) -> int:
        """Ranks of a layer."""
        return self.u.columns // (1 + len(self.others))

    def _launch(self, g: Graph, path: str, unit: int, ranks: int, cut: dict[str, Constant]) -> None:
        across, down = self._groups(unit, ranks, cut)
        tensors, params = self._bound(unit)
        g.launch(
            path,
            (across, down, expert_count(self.expert_rows)),
            tensors,
            {**_NO_A, **params},
            {
                "TRANSPOSED": self.transposed,
                "DROPOUT": self.dropout is not None,
                **cut,
            },
            flops=self._flops,
            label="lora/grad_a" if self.transposed else "lora/grad_b",
            turns=ceil_div(self.x.rows, int(cut.get("ROW_THREADS", cut["THREADS"]))),
        )

    @property
    def _flops(self) -> int:
        return 2 * self.x.rows * self.columns * self.r

    def _groups(self, unit: int, ranks: int, cut: dict[str, Constant]) -> tuple[int, int]:
        """Workgroups along the columns and along the ranks."""
        return ceil_div(self.columns, unit * int(cut["THREADS"])), ceil_div(self.r, ranks)

    def _bound(self, unit: int) -> tuple[dict[str, Tensor | None], dict[str, int | float]]:
        """What the kernels are bound to and told."""
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
            "rows": self.x.rows,
            "x_columns": self.columns,
            "x_stride": self.x.units(unit),
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

    b: FactorGrad
    a: FactorGrad


class FactorGradTexture:
    """For software adapters: rows of u broadcast within a subgroup."""

    def fits(self, problem: FactorGrad, profile: Profile) -> bool:
        """Where kernels read textures."""
        return profile.textures and not problem.others

    def launch(self, g: Graph, problem: FactorGrad) -> None:
        """Adds the launch."""
        cut: dict[str, Constant] = {"THREADS": g.profile.subgroup_size}
        problem._launch(g, "lora/grad_texture.wgsl", 8, _TEXTURE_RANKS, cut)


class FactorGradShared:
    """Four columns by four or eight ranks an invocation, which on GPUs share the rows."""

    def fits(self, problem: FactorGrad, profile: Profile) -> bool:
        """Everywhere."""
        return True

    def launch(self, g: Graph, problem: FactorGrad) -> None:
        """Adds the launch."""
        ranks, cut = _cut(g.profile, problem.r)
        problem._launch(g, "lora/grad.wgsl", 4, ranks, cut)


class BothShared:
    """For GPUs: one launch, the workgroups of the one after those of the other."""

    def fits(self, problem: BothGrads, profile: Profile) -> bool:
        """Where invocations share the rows, and not too much is bound."""
        bound = sum(tensor is not None for tensor in _both(problem).values())
        return (
            profile.fused_linears
            and profile.lora_grad_group[1] > 1
            and bound <= MOST_STORAGE_BUFFERS
        )

    def launch(self, g: Graph, problem: BothGrads) -> None:
        """Adds the launch."""
        b, a = problem.b, problem.a
        ranks, cut = _cut(g.profile, b.r)
        across_b, down_b = b._groups(4, ranks, cut)
        across_a, down_a = a._groups(4, ranks, cut)
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
                "xa_stride": a.x.units(4),
                "ra": a.r,
                "ga_stride": a.gradient.units(4),
                "lora_expert_a": a.expert_stride // 4,
            },
            {"TRANSPOSED": False, "DROPOUT": a.dropout is not None, **cut},
            flops=b._flops + a._flops,
            label="lora/grads",
        )


class OneByOne:
    """A launch for each."""

    def fits(self, problem: BothGrads, profile: Profile) -> bool:
        """Everywhere."""
        return True

    def launch(self, g: Graph, problem: BothGrads) -> None:
        """Adds the launches."""
        FACTOR_GRAD.launch(g, problem.b)
        FACTOR_GRAD.launch(g, problem.a)


def _cut(profile: Profile, r: int) -> tuple[int, dict[str, Constant]]:
    """Ranks of an invocation, of which no half is idle, and how its kernel is cut."""
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


FACTOR_GRAD: Kernel[FactorGrad] = Kernel("lora", (FactorGradTexture(), FactorGradShared()))
BOTH_GRADS: Kernel[BothGrads] = Kernel("lora", (BothShared(), OneByOne()))
KERNELS = (FACTOR_GRAD, BOTH_GRADS)
