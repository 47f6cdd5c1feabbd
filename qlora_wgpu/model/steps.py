"""A step: its options, its trace and its inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ConfigError, ShapeError
from qlora_wgpu.families.family import Architecture, Modules
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.ops.batch import BatchBuffers, RouterSums, make_batch_buffers
from qlora_wgpu.ops.loss import PLAIN, Objective, cross_entropy, label_losses
from qlora_wgpu.ops.modules import DenseMatrix, Head, ScoreHead, trained_rows
from qlora_wgpu.ops.optimizers import SATURATED_OFFSET, STATS_LENGTH
from qlora_wgpu.ops.preference import divergence, summed_logps
from qlora_wgpu.ops.routing import balance_loss
from qlora_wgpu.ops.score import score
from qlora_wgpu.ops.trained import overwrite, write_whole
from qlora_wgpu.ops.trained_gradients import sum_up

StepKind = Literal["train", "loss", "sums", "divergence", "logps"]


@dataclass(frozen=True)
class StepOptions:
    """One step's shape and what it computes; equal options give equal programs."""

    # ``"train"`` for loss and gradient, ``"loss"`` for the loss alone, ``"sums"`` for the log
    # probability of each sample's answer, ``"divergence"`` for how far that is from the
    # reference's, ``"logps"`` for the log probability of each label.
    kind: StepKind
    batch: int  # sequences
    seq: int  # tokens of each, padding included
    checkpointing: bool = False  # whether layers are recomputed in the backward pass
    objective: Objective = PLAIN  # the loss that is minimized
    noise: float = 0.0  # NEFTune's α
    # Factor of the loss that balances experts; None leaves it to config.json.
    router_aux_loss_coef: float | None = 0.0
    image_rows: int = 0  # maximum number of image tokens; 0 if there are no images

    @property
    def is_sampled(self) -> bool:
        """Whether each sample of a micro-batch counts by itself."""
        objective = self.objective
        over_answers = objective.preference is not None or objective.policy is not None
        return self.kind in ("sums", "divergence") or (over_answers and self.kind != "logps")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a model's training steps of any shape."""

    checkpointing: bool = False  # whether layers are recomputed in the backward pass
    objective: Objective = PLAIN  # the loss that is minimized
    noise: float = 0.0  # NEFTune's α
    router_aux_loss_coef: float | None = None  # as in ``StepOptions``

    def step(self, kind: StepKind, batch: int, seq: int, image_rows: int = 0) -> StepOptions:
        """A step of this kind; evaluation uses a preference objective, or else the plain loss."""
        plain = StepOptions(kind, batch, seq, image_rows=image_rows)
        if kind == "train":
            return replace(plain, **vars(self))
        if kind == "logps" or (kind == "loss" and self.objective.of_samples is not None):
            return replace(plain, objective=self.objective)
        return plain


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Parts = list[tuple[Tensor, npt.NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class PreferenceInputs:
    """A micro-batch's per-sample inputs, in the order of their rows.

    Pairs are neighbours, chosen before rejected, and every sample has a label.
    """

    references: FloatArray  # the reference's summed log probability of each answer
    # Per sample: for DPO, 1 if the answer's first token is not predicted because there is no prompt
    # before it; for ORPO, the factor of the losses of the chosen answer and its prompt; for KTO, 1
    # if the answer is desirable.
    numbers: FloatArray
    # (batch, seq), the targets of prompts that the loss is taken on; None for none.
    prompts: npt.NDArray[np.bool_] | None = None

    @classmethod
    def plain(cls, count: int) -> PreferenceInputs:
        return cls(np.zeros(count, np.float32), np.zeros(count, np.float32))

    def __len__(self) -> int:
        return len(self.references)

    def encode(self, batch: BatchBuffers, segments: IntArray, rows: IntArray) -> Parts:
        """The samples, by their tensors in a batch."""
        assert batch.samples is not None
        of_rows, table = encode_samples(self, segments, rows)
        return [(batch.samples.of_rows, of_rows), (batch.samples.table, table)]


@dataclass(frozen=True, eq=False)
class PolicyInputs:
    """What is known of a micro-batch's completions besides their tokens, in the order of rows."""

    shares: FloatArray  # what each adds to the step's divisor; see ``ops.policy.token_weights``
    weights: FloatArray  # the weight of each one's tokens
    advantages: FloatArray
    old_logps: FloatArray  # (batch, seq), of each target when the completion was sampled
    reference_logps: FloatArray  # the same by the reference; zeros without one
    has_loss: npt.NDArray[np.bool_]  # whether each has labels

    def __len__(self) -> int:
        return len(self.shares)

    def encode(self, batch: BatchBuffers, segments: IntArray, rows: IntArray) -> Parts:
        """The samples and ``BatchBuffers.completions``, by their tensors in a batch.

        Samples without labels, whose rows are empty, follow the others.
        """
        assert batch.completions is not None and batch.samples is not None
        own, others = np.flatnonzero(self.has_loss), np.flatnonzero(~self.has_loss)
        known = PreferenceInputs(self.shares[own], self.advantages[own])
        of_rows, table = encode_samples(known, segments, rows)
        empty = np.zeros((len(others), 4), np.uint32)
        empty[:, 2:] = np.stack([self.shares, self.advantages], axis=1)[others].view(np.uint32)
        samples = own[of_rows // 2]  # of each row
        logps = (array.reshape(-1)[rows] for array in (self.old_logps, self.reference_logps))
        numbers = self.weights[samples], self.advantages[samples]
        return [
            (batch.samples.of_rows, of_rows),
            (batch.samples.table, np.concatenate([table, empty])),
            (batch.completions, np.stack([*logps, *numbers], axis=1)),
        ]


@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """A micro-batch's sequences for a scoring objective, one per row, in front."""

    rows: IntArray  # (sequences), the position among all tokens that each is scored at
    targets: FloatArray  # (sequences, ``Scoring.width``)

    def __len__(self) -> int:
        return len(self.rows)

    def encode(self, batch: BatchBuffers, segments: IntArray, rows: IntArray) -> Parts:
        """The targets, by their tensor in a batch."""
        assert batch.sequence_targets is not None
        return [(batch.sequence_targets, self.targets)]


SampleInputs = PreferenceInputs | PolicyInputs | ScoreInputs
"""The inputs of an objective over answers, completions or sequences."""


def kind_of_samples(batch: BatchBuffers) -> type[SampleInputs] | None:
    """The type of the inputs that a batch has space for."""
    if batch.sequence_targets is not None:
        return ScoreInputs
    if batch.completions is not None:
        return PolicyInputs
    return None if batch.samples is None else PreferenceInputs


def encode_samples(
    samples: PreferenceInputs, segments: IntArray, rows: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Encodes samples for kernels.

    ``segments`` (batch, seq) is 0 for padding, else 1 + the position at which the token's sample
    begins; ``rows`` are the label rows, ascending. Returns for each label row twice its sample's
    number, plus one if it is the prompt's, and the table (samples, 4) of ``SampleBuffers``.
    """
    seq = segments.shape[1]
    places = rows // seq * (seq + 1) + segments.reshape(-1)[rows]
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    count = len(samples.references)
    if len(begins) != count or len(samples.numbers) != count:
        raise ShapeError(f"expected {count} samples with labels, got {len(begins)}")
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
    correct: int  # those whose logit is the largest, ties included


# ---- tracing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedStep:
    """A traced step."""

    batch: BatchBuffers  # its inputs
    plan: Plan
    # The result of a step of kind ``sums``; of kind ``loss``, the scores of a scoring objective.
    sums: Tensor | None = None


def trace_step(
    graph: Graph, base: Pretrained, modules: Modules, options: StepOptions, stats: Tensor
) -> PlannedStep:
    trains, of = options.kind == "train", base.architecture
    coefficient = of.balance_coefficient(options.router_aux_loss_coef)
    scoring = options.objective.scoring
    batch = make_batch_buffers(
        options.batch,
        options.seq,
        noise=options.noise,
        weighted=options.objective.weighted,
        routers=RouterSums() if coefficient else None,
        drops=trains,
        sampled=options.is_sampled,
        images=of.images if options.image_rows else None,
        image_rows=options.image_rows,
        completions=trains and options.objective.policy is not None,
        sequence_width=scoring.width if scoring else 0,
    )
    write_trained(graph, modules)
    checkpointing = trains and options.checkpointing
    hidden = base.family.forward(graph, of.config, modules, batch, checkpointing=checkpointing)
    if scoring is not None:
        assert isinstance(modules.head, ScoreHead)
        whole = modules.head.whole
        scores = score(graph, hidden, whole, batch, stats, scoring, gradient=trains)
        if not trains:
            scores.storage = Storage("scores", "activations", scores.nbytes)  # kept after the run
        return _ended(graph, modules, batch, scores, trains=trains)
    refuse_scored(of)
    policy, routers = options.objective.policy, batch.routers
    head = head_of(of, modules, 1.0 if policy is None else policy.temperature)
    if options.kind in ("sums", "divergence", "logps"):
        losses = label_losses(graph, hidden, head, batch, options.objective)
        if options.kind == "logps":
            losses.storage = Storage("losses of label rows", "activations", losses.nbytes)
            return PlannedStep(batch, compile_plan(graph), losses)
        if options.kind == "divergence":
            divergence(graph, losses, batch, stats)
            return PlannedStep(batch, compile_plan(graph))
        sums = summed_logps(graph, losses, batch)
        sums.storage = Storage("sums of samples", "activations", sums.nbytes)  # kept after the run
        return PlannedStep(batch, compile_plan(graph), sums)
    if routers is not None and routers.sums is not None:
        balance_loss(graph, routers.sums, routers.top_k, batch, stats, coefficient)
    cross_entropy(
        graph, hidden, head, batch, stats, gradient=trains, objective=options.objective
    )  # fmt: skip
    return _ended(graph, modules, batch, None, trains=trains)


def _ended(
    graph: Graph, modules: Modules, batch: BatchBuffers, sums: Tensor | None, *, trains: bool
) -> PlannedStep:
    """The step after its loss, with the backward pass if it trains."""
    if trains:
        graph.backward()
        both = map(trained_rows, (modules.embedding, modules.head))  # of a tied one once
        for trained in dict.fromkeys(trained for trained in both if trained is not None):
            sum_up(graph, trained)
    return PlannedStep(batch, compile_plan(graph), sums)


def refuse_scored(architecture: Architecture) -> None:
    """Refuses a reward model or classifier where a language model is required."""
    if architecture.classes:
        raise ConfigError(
            "the adapter or model is a reward model or classifier, which has no lm_head: it "
            "computes scores only (qlora-wgpu classify, model.score)"
        )


def write_trained(g: Graph, modules: Modules) -> None:
    for weight in dict.fromkeys((modules.embedding, modules.head)):
        if isinstance(weight, DenseMatrix) and weight.trained is not None:
            overwrite(g, weight.trained, weight.resident)
        if isinstance(weight, DenseMatrix) and weight.whole is not None:
            write_whole(g, weight.whole, weight.resident)


def head_of(architecture: Architecture, modules: Modules, temperature: float = 1.0) -> Head:
    """A model's head, and what its logits go through; they are divided by the temperature."""
    bias, softcap = None, architecture.logit_softcap
    if architecture.head_bias:
        bias = modules.norms[architecture.head_bias]
        if temperature != 1.0:
            raise ConfigError(
                f"{architecture.head_bias}: a head with a bias needs a temperature of 1"
            )
    softcap = None if softcap is None else softcap / temperature
    scale = architecture.logit_scale / temperature
    return Head(modules.head, scale, softcap, modules.head_lora, bias)


def make_sums(*, counts: bool) -> tuple[Tensor, Tensor | None]:
    """The sums over micro-batches and the kernels' counter, read back together."""
    nbytes = SATURATED_OFFSET + 16 if counts else 4 * STATS_LENGTH
    storage = Storage("stats", "inputs", nbytes)
    saturated = vector("saturated", 4, "uint32", storage, SATURATED_OFFSET) if counts else None
    return vector("stats", STATS_LENGTH, "float32", storage), saturated
