"""LoRA on the embedding: its term of what is looked up, and the gradients of A and B.

u = s·Aᵀ[ids] is (rows, r), so that u·Bᵀ is a thin product, dB = dyᵀ·u an ordinary one, and dA sums
up du = s·dy·B over the places of each token.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.lora import UP_GRAD, Lora, UpGrad
from qlora_wgpu.kernels.lora_grad import FACTOR_GRAD, FactorGrad
from qlora_wgpu.ops.tensor import summed
from qlora_wgpu.ops.whole_gradient import following_places


class EmbeddingPair:
    """The adapter of an embedding within one forward.

    Attributes:
        u: scaling · Aᵀ[ids], (rows, r) float32.
    """

    def __init__(
        self, g: Graph, lora: Lora, ids: Tensor, rows: int, scale: float, padding: int | None
    ) -> None:
        """Looks up what A has of each token.

        Args:
            g: The graph.
            lora: The pair: a (r, vocab_size), b (hidden_size, r).
            ids: uint32 (rows), below vocab_size.
            rows: Tokens.
            scale: What the embedding's rows are multiplied by.
            padding: A token of which A gets no gradient.
        """
        self._g, self._ids, self._padding = g, ids, padding
        self._lora = lora = replace(lora, scaling=scale * lora.scaling)
        self.u = u = g.float32("embedding u", rows, lora.r)
        g.launch(
            "embedding_pair/down.wgsl",
            rows * u.units(4),
            {"ids": ids, "a": lora.a, "u": u},
            {
                "rows": rows,
                "columns": lora.r,
                "stride": u.units(4),
                "a_stride": lora.a.stride,
                "scale": lora.scaling,
            },
        )

    def add_to(self, y: Tensor) -> None:
        """Adds u·Bᵀ to what was looked up, (rows, hidden_size) float32.

        Raises:
            GraphError: If the shapes do not fit.
        """
        u, b = self.u, self._lora.b
        if y.shape != (u.rows, b.rows) or b.columns != u.columns:
            raise GraphError(f"embedding: {u}, {b} and {y} do not fit")
        self._g.launch(
            "embedding_pair/up.wgsl",
            y.rows * y.units(4),
            {"u": u, "b": b, "y": y},
            {"rows": y.rows, "columns": y.columns, "stride": y.units(4), "u_stride": u.units(4)},
            {"ACCUMULATE": True},
            flops=2 * y.rows * y.columns * u.columns,
        )

    def add_gradients(self, dy: Tensor) -> None:
        """Adds to the gradients of A and B, of dy (rows, hidden_size) of any type."""
        g, lora, u = self._g, self._lora, self.u
        du = g.float32("d embedding u", *u.shape)
        UP_GRAD.launch(g, UpGrad(dy, lora, du))
        with summed(g, lora.grad_b) as grad_b:
            FACTOR_GRAD.launch(g, FactorGrad(dy, u, grad_b))
        following = following_places(g, self._ids, u.rows, self._padding)
        threads = g.profile.flat_group
        with summed(g, lora.grad_a) as grad_a:
            g.launch(
                "embedding_pair/gradient.wgsl",
                (u.rows, ceil_div(lora.r, threads), 1),
                {"ids": self._ids, "following": following, "du": du, "gradient": grad_a},
                {"rows": u.rows, "r": lora.r, "du_stride": du.stride, "stride": grad_a.stride},
                {"THREADS": threads},
            )
