"""Attention's kernels: a workgroup takes a block of queries, or of keys, of one head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.kernel import Change, Kernel, Tunable

# Straight-line code is kept within what software adapters compile quickly: multiply-adds a turn.
_FORWARD_BODY = 512
_BACKWARD_BODY = 768


@dataclass(frozen=True)
class Gradients:
    """The tensors that the backward reads and writes besides what the forward did.

    Attributes:
        dout: Like o.
        dq: Like q, or None where nobody asks.
        dk: Like k, or None where nobody asks.
        dv: Like v, or None with dk.
    """

    dout: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


@dataclass(frozen=True)
class Attention:
    """o = softmax(scale · q·kᵀ, masked) · v per head, or its gradients.

    Attributes:
        q: (batch · seq, heads · head_dim).
        k: (batch · seq, kv_heads · head_dim).
        v: Like k.
        o: Like q.
        lse: float32 (batch · seq · heads): logarithms of the softmaxes' sums.
        segments: uint32 (batch · seq): which samples the tokens are of.
        batch: Sequences.
        head_dim: Elements of a head; even.
        scale: The factor of the scores.
        window: A query sees so many keys, itself among them.
        softcap: Scores s become softcap · tanh(s / softcap), if given.
        gradients: What the backward adds; None forward.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    segments: Tensor
    batch: int
    head_dim: int
    scale: float
    window: int
    softcap: float | None
    gradients: Gradients | None = None

    def __post_init__(self) -> None:
        """Refuses a problem of kernels that cannot be right."""
        if (
            self.q.rows % self.batch
            or self.o.shape != self.q.shape
            or self.lse.columns != (self.q.rows * self.heads)
        ):
            raise GraphError(f"attention: {self.q}, {self.o}, {self.lse} do not fit")

    @property
    def seq(self) -> int:
        """Tokens of a sequence."""
        return self.q.rows // self.batch

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.q.columns // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.k.columns // self.head_dim

    def flops(self, products: int) -> int:
        """Operations of so many products over every query and the keys up to it."""
        pairs = self.batch * self.heads * self.seq * (self.seq + 1) // 2
        return 2 * products * pairs * self.head_dim


class _Blocks(ABC):
    """The launches, which the variants share."""

    suffix = ""

    def launch(self, g: Graph, problem: Attention) -> None:
        """Adds the launches of the forward, or of the backward."""
        if problem.gradients is None:
            outputs = {"o": problem.o, "lse": problem.lse}
            self._launch(g, problem, "forward", problem.heads, outputs, 2)
        else:
            self._backward(g, problem, problem.gradients)

    def _backward(self, g: Graph, problem: Attention, gradients: Gradients) -> None:
        lse_delta = self._delta(g, problem, gradients.dout)
        tensors = {"dout": gradients.dout, "lse_delta": lse_delta}
        if gradients.dq is not None:
            self._launch(g, problem, "dq", problem.heads, {**tensors, "dq": gradients.dq}, 3)
        if gradients.dk is not None and gradients.dv is not None:
            tensors |= {"dk": gradients.dk, "dv": gradients.dv}
            self._launch(g, problem, "dkdv", problem.kv_heads, tensors, 4)

    def _delta(self, g: Graph, problem: Attention, dout: Tensor) -> Tensor:
        rows, heads, unit = problem.q.rows, problem.heads, self._unit(problem)
        lse_delta = g.float_vector("lse and delta", 2 * rows * heads)
        g.launch(
            "attention/delta.wgsl",
            rows * heads,
            {"o": problem.o, "dout": dout, "lse": problem.lse, "lse_delta": lse_delta},
            {"rows": rows, "heads": heads, "stride": problem.q.units(unit)},
            {
                "HEAD_UNIT8": unit == 8,
                "HEAD_UNIT4": unit == 4,
                "UNITS": problem.head_dim // unit,
            },
        )
        return lse_delta

    def _launch(
        self,
        g: Graph,
        problem: Attention,
        name: str,
        heads: int,
        tensors: Mapping[str, Tensor],
        products: int,
    ) -> None:
        unit, threads = self._unit(problem), self._threads(g.profile)
        inputs = {n: getattr(problem, n) for n in ("q", "k", "v", "segments")}
        g.launch(
            f"attention/{name}{self.suffix}.wgsl",
            (ceil_div(problem.seq, threads), heads, problem.batch),
            {**inputs, **tensors},
            {
                "seq": problem.seq,
                "heads": problem.heads,
                "group": problem.heads // problem.kv_heads,
                "q_stride": problem.q.units(unit),
                "kv_stride": problem.k.units(unit),
                "window": problem.window,
                "scale": problem.scale,
                "softcap": problem.softcap or 1.0,
            },
            {
                "THREADS": threads,
                "SOFTCAP": problem.softcap is not None,
                **self._constants(g.profile, problem, products),
            },
            flops=problem.flops(products),
            label=f"attention/{name}",
        )

    @abstractmethod
    def _unit(self, problem: Attention) -> int:
        """Elements of a head that are read at a time."""

    def _threads(self, profile: Profile) -> int:
        return profile.attention_threads

    @abstractmethod
    def _constants(
        self, profile: Profile, problem: Attention, products: int
    ) -> dict[str, Constant]:
        """The constants by which the variant's loops are cut."""


class SubgroupTexture(_Blocks):
    """Keys are read from textures by the invocations of a subgroup in turn, and broadcast."""

    suffix = "_texture"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Whether kernels read textures, and heads are whole units of eight."""
        return profile.textures and problem.head_dim % 8 == 0

    def _unit(self, problem: Attention) -> int:
        return 8

    def _threads(self, profile: Profile) -> int:
        return profile.subgroup_size

    def _constants(
        self, profile: Profile, problem: Attention, products: int
    ) -> dict[str, Constant]:
        """How many keys are loaded a turn, and how the invocations of a subgroup share them."""
        threads, head = profile.subgroup_size, problem.head_dim // 8
        body = _FORWARD_BODY if problem.gradients is None else _BACKWARD_BODY
        most = max(body // (products * problem.head_dim), 1)
        keys = next(n for n in (8, 4, 2, 1) if n <= most and n <= threads)
        pieces = next(n for n in range(threads // keys, 0, -1) if head % n == 0)
        return {"HEAD": head, "KEYS": keys, "UNITS": head // pieces, "HOLDERS": pieces * keys}


class Registers(_Blocks):
    """An invocation holds a query or a key and reads the others by itself; fits everywhere."""

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Always."""
        return True

    def _unit(self, problem: Attention) -> int:
        return 4 if problem.head_dim % 4 == 0 else 2

    def _constants(
        self, profile: Profile, problem: Attention, products: int
    ) -> dict[str, Constant]:
        unit = self._unit(problem)
        constants: dict[str, Constant] = {
            "HEAD_UNIT4": unit == 4,
            "UNITS": problem.head_dim // unit,
        }
        if problem.gradients is None:
            # Straight-line code is kept within what software adapters compile quickly.
            constants["KEYS"] = profile.attention_keys if problem.head_dim <= 32 * unit else 2
        return constants


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures or profile.name == "cpu":
        return ()
    return tuple(
        {"attention_threads": threads, "attention_keys": keys}
        for threads, keys in ((64, 4), (32, 8), (64, 2))
    )


ATTENTION = Kernel("attention", (SubgroupTexture(), Registers()))
KERNELS = (ATTENTION,)
TUNABLES = (Tunable("attention", lambda launch: launch.kernel == "attention", _changes),)
