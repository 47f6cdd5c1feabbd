"""LoRA on the head: its term of the logits, and the gradients of A and B while they pass by.

u = s·drop(hidden)·Aᵀ is made of all hidden states at once, so that their dropout is that of whole
rows. Blocks of the vocabulary then add du = dlogits·B and dB = dlogitsᵀ·u, and what is left in the
end is as of any layer: dA = duᵀ·drop(hidden) and mask·(du·A).
"""

from __future__ import annotations

from qlora_wgpu.graph.dtype import ITEM_SIZE
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, rows_from
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.kernels.lora_grad import FACTOR_GRAD, FactorGrad
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.dropout import masked
from qlora_wgpu.ops.loss_weights import scale_label_rows
from qlora_wgpu.ops.modules import Head
from qlora_wgpu.ops.rows import gather, scatter
from qlora_wgpu.ops.tensor import add_to, fill_zero, summed


class HeadPair:
    """The adapter of a head within one loss.

    Attributes:
        u: scaling · dropout(hidden)·Aᵀ of all rows, (rows, r) float32.
        du: Its gradient of label rows, zero elsewhere, once there is one.
        of_b: Where the gradient of B is summed up.
    """

    u: Tensor
    du: Tensor
    of_b: Tensor

    def __init__(self, g: Graph, hidden: Tensor, lora: Lora, batch: BatchBuffers) -> None:
        """Makes u.

        Args:
            g: The graph.
            hidden: What the head is given.
            lora: The pair, its scaling times the factor of the head's product.
            batch: The micro-batch.
        """
        self._g, self._hidden, self._lora, self._batch = g, hidden, lora, batch
        self.u = lora_ops.down(g, hidden, lora, batch)

    @classmethod
    def of(cls, g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers) -> HeadPair | None:
        """That of a head which has one."""
        return None if head.pair is None else cls(g, hidden, head.pair, batch)

    def begin(self) -> None:
        """Begins the gradients with zeros."""
        g, lora = self._g, self._lora
        self.du = g.float32("d u of the head", self._batch.rows, lora.r)
        fill_zero(g, self.du)
        self.of_b = lora.grad_b
        if lora.grad_b.dtype != "float32":  # which would be rounded with every chunk of rows
            nbytes = lora.grad_b.nbytes // ITEM_SIZE[lora.grad_b.dtype] * 4
            storage = Storage("gradient of the head's B", "gradients", nbytes)
            self.of_b = matrix("d B of the head", *lora.b.shape, "float32", storage)
            fill_zero(g, self.of_b)

    @property
    def written(self) -> list[Tensor]:
        """What the launches of all chunks of rows write."""
        return [self.du]

    def chunk(self, count: int) -> Tensor:
        """Where du of some label rows is summed up."""
        return self._g.float32("d u of rows", count, self._lora.r)

    def take(
        self, dlogits: Tensor, turned: Tensor, row0: int, first: int, chunk: Tensor, part: int
    ) -> None:
        """Takes what some rows of the head add.

        Args:
            dlogits: (label rows, rows of the head from ``row0`` on).
            turned: The same transposed, with zeros where there is no label row.
            row0: The first row of the head; where that is 0, ``chunk`` is overwritten.
            first: The first of the label rows.
            chunk: du of these.
            part: Terms of each part of the sums, as for the head's own.
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
        """Puts du of some label rows, whose first is given, among the others."""
        scatter(self._g, chunk, self.du, first, self._batch)

    def end(self, factors: Tensor | None) -> None:
        """Adds the gradients.

        Args:
            factors: What each label row's gradient is multiplied by, if by anything; that of B is
                already.
        """
        g, lora, hidden = self._g, self._lora, self._hidden
        if factors is not None:
            scale_label_rows(g, self.du, factors, self._batch)
        if self.of_b is not lora.grad_b:
            add_to(g, lora.grad_b, self.of_b)
        with summed(g, lora.grad_a) as grad_a:
            of_a = FactorGrad(hidden, self.du, grad_a, True, lora.mask, self._batch.info)
            FACTOR_GRAD.launch(g, of_a)
        if not hidden.requires_grad:
            return
        dhidden = g.float32(f"d {hidden.name}", *hidden.shape)
        GEMM.launch(g, Gemm(self.du, lora.a, dhidden, False, label="lm_head/lora_backward"))
        if lora.mask is not None:
            dhidden = masked(g, dhidden, lora.mask, self._batch, "float32")
        g.add_gradient(hidden, dhidden)
