"""The problem of attention's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class Gradients:
    """The additional tensors of the backward."""

    dout: Tensor  # like o
    dq: Tensor | None  # like q, or None if not needed
    dk: Tensor | None  # like k, or None if not needed
    dv: Tensor | None  # like v, or None with dk


@dataclass(frozen=True)
class Attention:
    """o = softmax(scale · q·kᵀ, masked) · v per head, or its gradients."""

    q: Tensor  # (batch · seq, heads · head_dim)
    k: Tensor  # (batch · seq, kv_heads · head_dim)
    v: Tensor  # like k
    o: Tensor  # like q
    lse: Tensor  # float32 (batch · seq · heads): log-sum-exps
    segments: Tensor  # uint32 (batch · seq): the tokens' samples
    batch: int  # sequences
    head_dim: int  # elements of a head; even
    scale: float  # the factor of the scores
    window: int  # keys that a query attends to, its own included
    softcap: float | None  # scores s become softcap · tanh(s / softcap), if given
    sinks: Tensor | None = None  # float32 (heads): a logit per head in the softmaxes' sums
    gradients: Gradients | None = None  # None in the forward

    def __post_init__(self) -> None:
        if (
            self.q.rows % self.batch
            or self.o.shape != self.q.shape
            or self.lse.columns != (self.q.rows * self.heads)
        ):
            raise GraphError(f"attention: {self.q}, {self.o}, {self.lse} do not fit")
        if self.sinks is not None and self.sinks.columns != self.heads:
            raise GraphError(f"attention: {self.sinks} does not fit the {self.heads} heads")

    @property
    def seq(self) -> int:
        return self.q.rows // self.batch

    @property
    def heads(self) -> int:
        return self.q.columns // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.k.columns // self.head_dim

    @property
    def group(self) -> int:
        """Heads of q per head of k and v."""
        return self.heads // self.kv_heads

    def flops(self, products: int) -> int:
        """Operations of ``products`` products over every query and the keys up to it."""
        pairs = self.batch * self.heads * self.seq * (self.seq + 1) // 2
        return 2 * products * pairs * self.head_dim
