"""The embedding, and LoRA on embedding and head."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import ITEM_SIZE, Storage, Tensor, ceil_div, matrix, rows_from
from qlora_wgpu.kernels.common import dropout_params
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import (
    DOWN,
    FACTOR_GRAD,
    UP_GRAD,
    Lora,
    LoraA,
    LoraBGradInput,
    LoraWeightGrad,
)
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import gather, scale_label_rows, scatter
from qlora_wgpu.ops.modules import Head, HostEmbedding, Matrix, trained_rows, trained_whole
from qlora_wgpu.ops.pointwise import masked
from qlora_wgpu.ops.tensor import add_to, fill_zero, summed
from qlora_wgpu.ops.trained import overwrite_looked_up
from qlora_wgpu.ops.trained_gradients import add_lookup_gradient, add_whole_lookup, following_places

# ---- the embedding ---------------------------------------------------------------------------


class EmbeddingPair:
    """The adapter of an embedding within one forward pass.

    u = s·Aᵀ[ids] is (rows, r), so u·Bᵀ is a thin product and dB = dyᵀ·u an ordinary one; dA sums du
    = s·dy·B over the occurrences of each token.

    Attributes:
        u: scaling · Aᵀ[ids], (rows, r) float32.
    """

    def __init__(
        self, g: Graph, lora: Lora, ids: Tensor, rows: int, scale: float, padding: int | None
    ) -> None:
        """Looks up each token's column of A (r, vocab_size); ``scale`` is that of the rows.

        A gets no gradient for the ``padding`` token.
        """
        self._g, self._ids, self._padding = g, ids, padding
        self._lora = lora = replace(lora, scaling=scale * lora.scaling)
        self.u = u = g.float32("embedding u", rows, lora.r)
        g.launch(
            "embedding_pair/down.wgsl",
            rows * u.units(4),
            {"ids": ids, "a": lora.a, "u": u},
            {"rows": rows, "columns": lora.r, "scale": lora.scaling},
        )

    def add_to(self, y: Tensor) -> None:
        """Adds u·Bᵀ to the looked-up rows, (rows, hidden_size) float32."""
        u, b = self.u, self._lora.b
        if y.shape != (u.rows, b.rows) or b.columns != u.columns:
            raise GraphError(f"embedding: {u}, {b} and {y} do not fit")
        self._g.launch(
            "embedding_pair/up.wgsl",
            y.rows * y.units(4),
            {"u": u, "b": b, "y": y},
            {},
            {"ACCUMULATE": True},
            flops=2 * y.rows * y.columns * u.columns,
        )

    def add_gradients(self, dy: Tensor) -> None:
        """Adds to the gradients of A and B, given dy (rows, hidden_size) of any type."""
        g, lora, u = self._g, self._lora, self.u
        du = g.float32("d embedding u", *u.shape)
        UP_GRAD.launch(g, LoraBGradInput(dy, lora, du))
        with summed(g, lora.grad_b) as grad_b:
            FACTOR_GRAD.launch(g, LoraWeightGrad(dy, u, grad_b))
        following = following_places(g, self._ids, u.rows, self._padding)
        threads = g.profile.flat_group
        with summed(g, lora.grad_a) as grad_a:
            g.launch(
                "embedding_pair/gradient.wgsl",
                (u.rows, ceil_div(lora.r, threads), 1),
                {"ids": self._ids, "following": following, "du": du, "gradient": grad_a},
                {"r": lora.r},
                {"THREADS": threads},
            )


_NOISE_KEY = zlib.crc32(b"neftune")


def embedding(
    g: Graph,
    weight: Matrix | HostEmbedding,
    batch: BatchBuffers,
    scale: float = 1.0,
    noise_scale: float = 1.0,
    lora: Lora | None = None,
    padding: int | None = None,
) -> Tensor:
    """Looks up a batch's ``input_ids``, times ``scale``: (rows, hidden_size) float32.

    A batch's ``noise`` α adds noise in ±α / √(seq · hidden_size), times ``noise_scale``, to
    training batches (NEFTune, Jain et al., 2023). An adapter's a is (r, vocab_size), its b
    (hidden_size, r); a gets no gradient for the ``padding`` token.
    """
    y = g.float32("embedding", batch.rows, weight.columns)
    info = batch.info if batch.noise > 0 else None
    ids, trained, whole = batch.input_ids, trained_rows(weight), trained_whole(weight)
    if isinstance(weight, HostEmbedding):
        shards, ids = [(0, batch.rows_of(weight).table)], batch.rows_of(weight).rows
        if trained is not None:
            overwrite_looked_up(g, trained, batch.input_ids, batch.rows_of(weight).table)
    else:
        shards = list(weight.shards(g))
    for row0, shard in shards:
        g.launch(
            "embedding/forward.wgsl",
            y.rows * y.units(4),
            {"ids": ids, "weight": shard, "y": y, "batch_info": info},
            {
                "row0": row0,
                "shard_rows": shard.rows,
                "scale": scale,
                "noise": noise_scale * batch.noise / math.sqrt(batch.seq * y.columns),
                **dropout_params(None),
                "module_key": _NOISE_KEY,
            },
        )
    if lora is not None:
        pair = EmbeddingPair(g, lora, batch.input_ids, batch.rows, scale, padding)
        pair.add_to(y)
        g.record(y, [], pair.add_gradients, trains=True)
    if trained is not None:
        g.record(
            y,
            [trained.rows],
            lambda dy: add_lookup_gradient(g, trained, batch.input_ids, dy, scale),
        )
    if whole is not None:
        g.record(
            y, [], lambda dy: add_whole_lookup(g, whole, batch.input_ids, dy, scale), trains=True
        )
    return y


# ---- the head --------------------------------------------------------------------------------


class LoraHead:
    """The adapter of a head within one loss.

    u = s·drop(hidden)·Aᵀ is computed from all hidden states at once, so that dropout applies to
    whole rows. Blocks of the vocabulary then add du = dlogits·B and dB = dlogitsᵀ·u. The rest is as
    for any layer: dA = duᵀ·drop(hidden) and mask·(du·A).
    """

    u: Tensor  # scaling · dropout(hidden)·Aᵀ of all rows, (rows, r) float32
    du: Tensor  # its gradient of label rows, zero elsewhere, once there is one
    of_b: Tensor  # accumulates the gradient of B

    def __init__(self, g: Graph, hidden: Tensor, lora: Lora, batch: BatchBuffers) -> None:
        self._g, self._hidden, self._lora, self._batch = g, hidden, lora, batch
        self.u = g.float32("lora u", hidden.rows, lora.r)
        DOWN.launch(g, LoraA(hidden, lora, self.u, batch.info))

    @classmethod
    def of(cls, g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers) -> LoraHead | None:
        return None if head.pair is None else cls(g, hidden, head.pair, batch)

    def begin(self) -> None:
        g, lora = self._g, self._lora
        self.du = g.float32("d u of the head", self._batch.rows, lora.r)
        fill_zero(g, self.du)
        self.of_b = lora.grad_b
        if lora.grad_b.dtype != "float32":  # it would be rounded with every chunk of rows
            nbytes = lora.grad_b.nbytes // ITEM_SIZE[lora.grad_b.dtype] * 4
            storage = Storage("gradient of the head's B", "gradients", nbytes)
            self.of_b = matrix("d B of the head", *lora.b.shape, "float32", storage)
            fill_zero(g, self.of_b)

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the launches of all chunks of rows write."""
        return [self.du]

    def chunk(self, count: int) -> Tensor:
        return self._g.float32("d u of rows", count, self._lora.r)

    def take(
        self, dlogits: Tensor, turned: Tensor, row0: int, first: int, chunk: Tensor, part: int
    ) -> None:
        """Adds the contribution of the head's rows from ``row0`` for label rows from ``first``.

        ``turned`` is dlogits transposed, with zeros if there is no label row; du of these rows is
        summed in ``chunk``, which is overwritten if row0 is 0, in partial sums of ``part`` terms,
        as for the head's own.
        """
        g, lora, rows = self._g, self._lora, dlogits.columns
        b = rows_from(lora.b, row0, rows)
        product = Gemm(
            dlogits, b, chunk, False, scale=lora.scaling, accumulate=row0 > 0, part=part,
            batch_info=self._batch.info, first_row=first, label="lm_head/lora_backward",
        )  # fmt: skip
        GEMM.launch(g, product)
        u = gather(g, self.u, dlogits.rows, first, self._batch)
        of_b = rows_from(self.of_b, row0, rows)
        product = Gemm(turned, u, of_b, False, accumulate=True, label="lm_head/lora_backward")
        GEMM.launch(g, product)

    def put(self, chunk: Tensor, first: int) -> None:
        scatter(self._g, chunk, self.du, first, self._batch)

    def end(self, factors: Tensor | None) -> None:
        g, lora, hidden = self._g, self._lora, self._hidden
        if factors is not None:
            scale_label_rows(g, self.du, factors, self._batch)
        if self.of_b is not lora.grad_b:
            add_to(g, lora.grad_b, self.of_b)
        with summed(g, lora.grad_a) as grad_a:
            of_a = LoraWeightGrad(hidden, self.du, grad_a, True, lora.mask, self._batch.info)
            FACTOR_GRAD.launch(g, of_a)
        if not hidden.requires_grad:
            return
        dhidden = g.float32(f"d {hidden.name}", *hidden.shape)
        GEMM.launch(g, Gemm(self.du, lora.a, dhidden, False, label="lm_head/lora_backward"))
        if lora.mask is not None:
            dhidden = masked(g, dhidden, lora.mask, self._batch, "float32")
        g.add_gradient(hidden, dhidden)
