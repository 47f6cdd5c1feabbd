"""Gradients of trained tokens and matrices: from the embedding's lookups and the head's logits.

Those of trained tokens are accumulated on the tape, since a tied head's rows are the embedding's.
Those of whole matrices are added to the adapter's gradient directly, since they are as large as
the matrix.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import FACTOR_GRAD, LoraWeightGrad
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import gather, scale_label_rows, transposed
from qlora_wgpu.ops.tensor import add_to, fill_zero
from qlora_wgpu.ops.trained import NONE, SavedModule, TrainableTokens, overlapping

# ---- trained tokens --------------------------------------------------------------------------


def add_lookup_gradient(
    g: Graph, trained: TrainableTokens, ids: Tensor, dy: Tensor, scale: float
) -> None:
    """Adds scale · Σ dy[m] over all m with ids[m] = t to the gradient of each trained row t.

    The sum runs over a token's places in the batch in order, without atomics.
    """
    following = following_places(g, ids, dy.rows, trained.padding, trained.slots)
    threads = g.profile.flat_group
    gradient = g.float32(f"d {trained.name} looked up", *trained.rows.shape)
    fill_zero(g, gradient)
    g.launch(
        "trained_rows/lookup_gradient.wgsl",
        (dy.rows, ceil_div(dy.units(4), threads), 1),
        {
            "ids": ids,
            "slots": trained.slots,
            "following": following,
            "dy": dy,
            "gradient": gradient,
        },
        {"scale": scale},
        {"THREADS": threads},
        turns=dy.rows,
    )
    g.add_gradient(trained.rows, gradient)


class HeadGradient:
    """The gradient of a head's trained rows, gathered while its logits exist.

    Attributes:
        columns: The gradient of these rows' logits.
    """

    def __init__(self, g: Graph, trained: TrainableTokens, batch: BatchBuffers) -> None:
        self._g, self._trained, self._batch = g, trained, batch
        self.columns = g.float32("d logits of trained rows", batch.rows, trained.rows.rows)
        fill_zero(g, self.columns)

    def take(self, dlogits: Tensor, row0: int, first: int, scale: float) -> None:
        """Takes the columns of trained rows.

        dlogits is (label rows from ``first`` on, rows of the head from ``row0`` on), ``scale`` the
        factor of the head's product.
        """
        trained, columns = self._trained, self.columns
        if not trained.within(row0, dlogits.columns):
            return
        self._g.launch(
            "trained_rows/columns.wgsl",
            dlogits.rows * trained.rows.rows,
            {
                "dlogits": dlogits,
                "tokens": trained.tokens,
                "rows": self._batch.label_rows,
                "batch_info": self._batch.info,
                "columns": columns,
            },
            {
                "first": first,
                "trained": trained.rows.rows,
                "row0": row0,
                "row_count": dlogits.columns,
                "scale": scale,
            },
        )

    def add(self, hidden: Tensor, factors: Tensor | None = None) -> None:
        g, rows = self._g, self._trained.rows
        gradient = g.float32(f"d {self._trained.name}", *rows.shape)
        fill_zero(g, gradient)
        if factors is not None:
            scale_label_rows(g, self.columns, factors, self._batch)
        FACTOR_GRAD.launch(g, LoraWeightGrad(hidden, self.columns, gradient, transposed=True))
        g.add_gradient(rows, gradient)


def sum_up(g: Graph, trained: TrainableTokens) -> None:
    """Adds the gradient of a backward pass to the sum over micro-batches, once."""
    add_to(g, trained.gradient, g.gradient_of(trained.rows))


# ---- whole matrices --------------------------------------------------------------------------


def following_places(
    g: Graph, ids: Tensor, rows: int, padding: int | None, slots: Tensor | None = None
) -> Tensor:
    """For each of ``rows`` places the next one of the same token; none for ``padding``.

    With ``slots``, only for trained tokens.
    """
    following, threads = g.integers("next of the same token", rows), g.profile.flat_group
    g.launch(
        "trained_rows/following.wgsl",
        (ceil_div(rows, threads), 1, 1),
        {"ids": ids, "slots": slots, "following": following},
        {"rows": rows, "padding": NONE if padding is None else padding},
        {"THREADS": threads},
        turns=rows,
    )
    return following


def add_whole_lookup(g: Graph, trained: SavedModule, ids: Tensor, dy: Tensor, scale: float) -> None:
    """``add_lookup_gradient`` if all rows are trained."""
    following = following_places(g, ids, dy.rows, trained.padding)
    threads = g.profile.flat_group
    for row0, gradient in trained.gradients:
        g.launch(
            "trained_rows/whole_gradient.wgsl",
            (dy.rows, ceil_div(dy.units(4), threads), 1),
            {"ids": ids, "following": following, "dy": dy, "gradient": gradient},
            {"scale": scale, "row0": row0},
            {"THREADS": threads},
            turns=dy.rows,
        )


def add_whole_head(
    g: Graph,
    trained: SavedModule,
    hidden: Tensor,
    dlogits: Tensor,
    row0: int,
    first: int,
    batch: BatchBuffers,
    scale: float,
    factors: Tensor | None,
) -> None:
    """Adds the gradient of the head's rows from some label rows, times factors if any.

    dlogits is (label rows from ``first`` on, rows of the head from ``row0`` on).
    """
    x = gather(g, hidden, dlogits.rows, first, batch)
    for begin, gradient in overlapping(trained.gradients, row0, dlogits.columns):
        columns = (begin - row0, gradient.rows)
        turned = transposed(g, dlogits, first, batch, factors, columns)
        product = Gemm(
            turned, x, gradient, False, scale=scale, accumulate=True, label="lm_head/whole"
        )
        GEMM.launch(g, product)
