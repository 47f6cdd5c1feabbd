"""A step: its options, what it traces, and where its inputs are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.families.family import Architecture, Family, Modules
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.batch import BatchBuffers, RouterSums, make_batch_buffers
from qlora_wgpu.ops.logits import logits_of_rows, rows_of_a_text
from qlora_wgpu.ops.loss import PLAIN, Objective, cross_entropy, label_losses
from qlora_wgpu.ops.modules import DenseMatrix, Head, trained_rows
from qlora_wgpu.ops.optimizers import SATURATED_OFFSET, STATS_LENGTH
from qlora_wgpu.ops.preference import divergence, summed_logps
from qlora_wgpu.ops.routing import balance_loss
from qlora_wgpu.ops.trained import TrainableTokens, overwrite, write_whole
from qlora_wgpu.ops.trained_gradients import sum_up

StepKind = Literal["train", "loss", "sums", "divergence"]


@dataclass(frozen=True)
class StepOptions:
    """One step's shape and what is computed; equal options make equal programs."""

    # ``"train"`` for loss and gradient, ``"loss"`` for the loss alone, ``"sums"`` for the log
    # probability of each sample's answer, ``"divergence"`` for how far that is from the
    # reference's.
    kind: StepKind
    batch: int  # sequences
    seq: int  # tokens of each, padding included
    checkpointing: bool = False  # whether layers are recomputed in the backward
    objective: Objective = PLAIN  # the loss that is minimized
    noise: float = 0.0  # NEFTune's α
    # Factor of the loss that balances experts; None leaves it to config.json.
    router_aux_loss_coef: float | None = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether each sample of a micro-batch counts by itself."""
        return self.objective.preference is not None or self.kind in ("sums", "divergence")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a model's training steps, whatever their shape."""

    checkpointing: bool = False  # whether layers are recomputed in the backward
    objective: Objective = PLAIN  # the loss that is minimized
    noise: float = 0.0  # NEFTune's α
    router_aux_loss_coef: float | None = None  # as in ``StepOptions``

    def train(self, batch: int, seq: int) -> StepOptions:
        """A training step of this shape."""
        return StepOptions(
            "train",
            batch,
            seq,
            self.checkpointing,
            self.objective,
            self.noise,
            self.router_aux_loss_coef,
        )

    def step(self, kind: StepKind, batch: int, seq: int) -> StepOptions:
        """A step of this kind; the loss is that of training for preferences, else the plain one."""
        if kind == "train":
            return self.train(batch, seq)
        if kind == "loss" and self.objective.preference is not None:
            return StepOptions(kind, batch, seq, objective=self.objective)
        return StepOptions(kind, batch, seq)


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PreferenceInputs:
    """What is known of a micro-batch's samples besides their tokens, in the order of their rows.

    Pairs are neighbours, chosen before rejected, and every sample has a label.
    """

    references: FloatArray  # the reference's summed log probability of each answer
    # What the objective reads of each: with DPO 1 where the answer's first token is not predicted,
    # since no prompt is before it; with ORPO what the losses of the chosen answer and its prompt
    # are multiplied by; with KTO 1 where it is desirable.
    numbers: FloatArray
    # (batch, seq), the targets of prompts that have a loss; None for none.
    prompts: npt.NDArray[np.bool_] | None = None

    @classmethod
    def plain(cls, count: int) -> PreferenceInputs:
        """Samples of which nothing is known."""
        return cls(np.zeros(count, np.float32), np.zeros(count, np.float32))


def encode_samples(
    samples: PreferenceInputs, segments: IntArray, rows: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Encodes samples as kernels read them.

    Args:
        samples: The samples.
        segments: (batch, seq), 0 for padding, else one more than where the token's sample begins.
        rows: The label rows, rising.

    Returns:
        For each label row twice its sample's number, one more where it is the prompt's; and the
        table (samples, 4) of ``SampleBuffers``.
    """
    seq = segments.shape[1]
    places = rows // seq * (seq + 1) + segments.reshape(-1)[rows]
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    count = len(samples.references)
    if len(begins) != count or len(samples.numbers) != count:
        raise ShapeError(f"{len(begins)} samples have a label, but {count} are told of")
    numbers = np.repeat(np.arange(count), np.diff(begins, append=len(rows)))
    of_rows = 2 * numbers
    if samples.prompts is not None:
        of_rows += samples.prompts.reshape(-1)[rows]
    table = np.empty((count, 4), np.uint32)
    table[:, 0], table[:, 1] = begins, np.append(begins[1:], len(rows))
    table[:, 2] = samples.references.astype(np.float32).view(np.uint32)
    table[:, 3] = samples.numbers.astype(np.float32).view(np.uint32)
    return of_rows.astype(np.uint32), table


class LossSums(NamedTuple):
    """Sums over the label tokens of some batches."""

    loss: float  # the loss, in nats
    tokens: int  # the label tokens
    correct: int  # those whose logit is the largest, or as large as it


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
    def _trained(self) -> list[TrainableTokens]:
        """The rows of the embedding and of the head that are trained; of a tied one once."""
        both = (trained_rows(each) for each in (self.modules.embedding, self.modules.head))
        return list(dict.fromkeys(trained for trained in both if trained is not None))

    def _hidden(self, g: Graph, batch: BatchBuffers, *, checkpointing: bool) -> Tensor:
        config = self.architecture.config
        # A text's prompt has written them before its new tokens.
        written = () if batch.decodes else (self.modules.embedding, self.modules.head)
        for weight in dict.fromkeys(written):
            if isinstance(weight, DenseMatrix) and weight.trained is not None:
                overwrite(g, weight.trained, weight.resident)
            if isinstance(weight, DenseMatrix) and weight.whole is not None:
                write_whole(g, weight.whole, weight.resident)
        return self.family.forward(g, config, self.modules, batch, checkpointing=checkpointing)


@dataclass(frozen=True)
class PlannedStep:
    """A traced step."""

    batch: BatchBuffers  # where its inputs are written
    plan: Plan
    sums: Tensor | None = None  # the result of a step of kind ``sums``


def trace_step(graph: Graph, network: Network, options: StepOptions, stats: Tensor) -> PlannedStep:
    """Traces a step."""
    trains = options.kind == "train"
    coefficient = network.architecture.balance_coefficient(options.router_aux_loss_coef)
    batch = make_batch_buffers(
        options.batch,
        options.seq,
        noise=options.noise,
        weighted=options.objective.weighted,
        routers=RouterSums() if coefficient else None,
        drops=trains,
        sampled=options.is_sampled,
    )
    if options.kind == "sums":
        sums = network.trace_sums(graph, batch)
        return PlannedStep(batch, compile_plan(graph), sums)
    if options.kind == "divergence":
        network.trace_divergence(graph, batch, stats)
        return PlannedStep(batch, compile_plan(graph))
    network.trace_loss(
        graph,
        batch,
        stats,
        gradient=trains,
        checkpointing=options.checkpointing,
        objective=options.objective,
        router_aux_loss_coef=coefficient,
    )
    return PlannedStep(batch, compile_plan(graph))


def make_sums(*, counts: bool) -> tuple[Tensor, Tensor | None]:
    """What micro-batches are summed into, and what kernels count in, read back as one."""
    nbytes = SATURATED_OFFSET + 16 if counts else 4 * STATS_LENGTH
    storage = Storage("stats", "inputs", nbytes)
    saturated = vector("saturated", 4, "uint32", storage, SATURATED_OFFSET) if counts else None
    return vector("stats", STATS_LENGTH, "float32", storage), saturated
