"""Tracing of what a model computes: loss with or without gradient, hidden states, logits."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.families.family import Architecture, Family, Modules
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.cross_entropy import PLAIN, Objective, cross_entropy, label_losses
from qlora_wgpu.ops.logits import logits_of_rows, rows_of_a_text
from qlora_wgpu.ops.modules import DenseMatrix, Head, trained_rows
from qlora_wgpu.ops.preference import divergence, summed_logps
from qlora_wgpu.ops.router_balance import balance_loss
from qlora_wgpu.ops.trained_gradient import sum_up
from qlora_wgpu.ops.trained_matrix import write_whole
from qlora_wgpu.ops.trained_rows import TrainedRows, overwrite


@dataclass(frozen=True)
class Network:
    """A family's forward with the weights it runs on; needs no device to be traced."""

    family: Family
    architecture: Architecture
    modules: Modules

    def trace_loss(
        self,
        g: Graph,
        batch: BatchBuffers,
        stats: Tensor,
        *,
        gradient: bool,
        checkpointing: bool,
        objective: Objective = PLAIN,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        """Adds the batch's summed loss to ``stats``, and its gradient to the adapter's if asked."""
        hidden = self._hidden(g, batch, checkpointing=checkpointing and gradient)
        routers = batch.routers
        if routers is not None and routers.sums is not None:
            balance_loss(g, routers.sums, routers.top_k, batch, stats, router_aux_loss_coef)
        cross_entropy(g, hidden, self._head, batch, stats, gradient=gradient, objective=objective)
        if gradient:
            g.backward()
            for trained in self._trained:
                sum_up(g, trained)

    def trace_sums(self, g: Graph, batch: BatchBuffers) -> Tensor:
        """What the model says of each sample's answer (``summed_logps``), kept after the run."""
        sums = summed_logps(g, self._losses(g, batch), batch)
        sums.storage = Storage("sums of samples", "activations", sums.nbytes)
        return sums

    def trace_divergence(self, g: Graph, batch: BatchBuffers, stats: Tensor) -> None:
        """Adds the samples' divergence from the reference to ``stats``."""
        divergence(g, self._losses(g, batch), batch, stats)

    def _losses(self, g: Graph, batch: BatchBuffers) -> Tensor:
        hidden = self._hidden(g, batch, checkpointing=False)
        return label_losses(g, hidden, self._head, batch)

    def trace_hidden(self, g: Graph, batch: BatchBuffers) -> Tensor:
        """The normalized hidden states (rows, hidden_size), kept after the run."""
        hidden = self._hidden(g, batch, checkpointing=False)
        hidden.storage = Storage("hidden states", "activations", hidden.nbytes)
        return hidden

    def trace_logits(self, g: Graph, hidden: Tensor, batch: BatchBuffers) -> Tensor:
        """float32 logits of the first rows that the batch lists, a chunk's worth."""
        count = rows_of_a_text(g, self.modules.head, batch.rows)
        if batch.cache is not None:
            count = batch.batch  # the next token of each text
        return logits_of_rows(g, hidden, self._head, batch, 0, count)

    @property
    def _head(self) -> Head:
        architecture = self.architecture
        return Head(
            self.modules.head,
            architecture.logit_scale,
            architecture.logit_softcap,
            self.modules.head_lora,
            self.modules.norms.get(architecture.head_bias) if architecture.head_bias else None,
        )

    @property
    def _trained(self) -> list[TrainedRows]:
        """The rows of the embedding and of the head that are trained; of a tied one once."""
        both = (trained_rows(each) for each in (self.modules.embedding, self.modules.head))
        return list(dict.fromkeys(trained for trained in both if trained is not None))

    def _hidden(self, g: Graph, batch: BatchBuffers, *, checkpointing: bool) -> Tensor:
        config = self.architecture.config
        # A text's prompt has written them before its new tokens.
        written = () if batch.decodes else (self.modules.embedding, self.modules.head)
        for weight in dict.fromkeys(written):
            if isinstance(weight, DenseMatrix) and weight.trained is not None:
                overwrite(g, weight.trained, weight.pieces)
            if isinstance(weight, DenseMatrix) and weight.whole is not None:
                write_whole(g, weight.whole, weight.pieces)
        return self.family.forward(g, config, self.modules, batch, checkpointing=checkpointing)
