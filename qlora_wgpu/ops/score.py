"""Objectives over whole sequences: reward models with TRL's loss, classifiers with transformers'.

The head ``score`` multiplies one hidden state per sequence, that of its last token other than
padding, in float32. It is trained whole: product, loss and gradients read and write the adapter's
own rows, and no logits of the vocabulary are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import one_row, row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import gather, scatter
from qlora_wgpu.ops.tensor import fill_zero
from qlora_wgpu.ops.trained import SavedModule

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
PAIR_METRICS = (
    "pairs", "accuracy", "mean_reward", "margin", "max_reward", "min_reward", "batches",
)  # fmt: skip
"""The sums in stats from ``STATS_METRICS`` on, of a reward model; of a batch's largest and smallest
reward, which TRL averages over batches."""
LABEL_METRICS = ("sequences", "accuracy", "mae")
"""The same of sequences with labels."""


@dataclass(frozen=True)
class Scoring:
    """An objective over sequences."""

    objective: Literal["reward", "classification"]
    classes: int = 1  # rows of the head
    problem_type: ProblemType = "single_label_classification"  # of classification
    class_weights: tuple[float, ...] = ()  # of a single label's classes; empty if all are one
    center: float = 0.0  # TRL's center_rewards_coefficient
    labels: tuple[str, ...] = ()  # names of the classes; empty if unknown

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scores, by default transformers'."""
        if self.labels:
            return self.labels
        if self.is_paired:
            return ("reward",)
        return tuple(f"LABEL_{number}" for number in range(self.classes))

    @property
    def is_paired(self) -> bool:
        """Whether sequences come in pairs, chosen before rejected."""
        return self.objective == "reward"

    @property
    def width(self) -> int:
        """The number of a sequence's targets: a margin, a class, or a value for each class."""
        is_vector = not self.is_paired and self.problem_type != "single_label_classification"
        return self.classes if is_vector else 1

    def divisor(self, targets: npt.NDArray[np.float32]) -> float:
        """What the loss of sequences with these targets is divided by: pairs, rows or weights."""
        if self.is_paired:
            return len(targets) / 2
        if self.class_weights:
            return float(np.array(self.class_weights)[targets[:, 0].astype(np.int64)].sum())
        return float(len(targets))

    @property
    def has_reference(self) -> bool:
        return False

    @property
    def has_divergence(self) -> bool:
        return False


def score(
    g: Graph,
    hidden: Tensor,
    head: SavedModule,
    batch: BatchBuffers,
    stats: Tensor,
    given: Scoring,
    *,
    gradient: bool,
) -> Tensor:
    """Adds the loss of sequences or pairs, their number and metrics to ``stats``; starts backward.

    The batch's label rows are the sequences' pooled rows. With ``gradient``, that of the head is
    added to the sum over micro-batches. Returns the scores, float32 (sequences · classes).
    """
    assert batch.sequence_targets is not None, "the batch was laid out without targets"
    ((_, w),), ((_, dw),) = head.rows, head.gradients
    rows = batch.batch
    x = gather(g, hidden, rows, 0, batch)
    scores = g.float_vector("scores", rows * given.classes)
    g.launch(
        "score/forward.wgsl",
        row_workgroups(g, scores.columns),
        {"x": x, "w": w, "scores": scores},
        {"scores": scores.columns},
        row_constants(g),
    )
    dscores = g.float_vector("d scores", rows * given.classes)
    tensors = {
        "scores": scores,
        "targets": batch.sequence_targets,
        "batch_info": batch.info,
        "dscores": dscores,
        "stats": stats,
    }
    if given.is_paired:
        g.launch(
            "score/pairs.wgsl", (1, 1, 1), tensors, {"center": given.center}, one_row(g),
        )  # fmt: skip
    else:
        weights = None
        if given.class_weights:
            weights = g.constant("class weights", np.array(given.class_weights, np.float32))
        kind = given.problem_type
        g.launch(
            "score/labels.wgsl",
            (1, 1, 1),
            {**tensors, "class_weights": weights},
            {"rows": rows, "classes": given.classes},
            {
                "SINGLE": kind == "single_label_classification",
                "MULTI": kind == "multi_label_classification",
                **one_row(g),
            },
            turns=ceil_div(rows, g.profile.threads_per_row) * given.classes,
        )
    if gradient:
        g.launch(
            "score/weight_gradient.wgsl",
            dw.rows * dw.units(4),
            {"x": x, "dscores": dscores, "gradient": dw},
            constants={"ACCUMULATE": True},
            turns=rows,
        )
    if gradient and hidden.requires_grad:
        dx = g.float32("d pooled", rows, hidden.columns)
        g.launch(
            "score/hidden_gradient.wgsl",
            rows * dx.units(4),
            {"w": w, "dscores": dscores, "dx": dx},
            turns=given.classes,
        )
        dhidden = g.float32(f"d {hidden.name}", hidden.rows, hidden.columns)
        fill_zero(g, dhidden)
        scatter(g, dx, dhidden, 0, batch)
        g.add_gradient(hidden, dhidden)
    return scores


def means(sums: Sequence[float], given: Scoring) -> dict[str, float]:
    """The logged metrics, by TRL's names, from the sums in stats."""
    if given.is_paired:
        found: Mapping[str, float] = dict(zip(PAIR_METRICS, sums, strict=False))
        pairs, batches = found["pairs"], found["batches"]
        if not pairs:
            return {}
        return {
            "accuracy": found["accuracy"] / pairs,
            "margin": found["margin"] / pairs,
            "mean_reward": found["mean_reward"] / (2 * pairs),
            "min_reward": found["min_reward"] / batches,
            "max_reward": found["max_reward"] / batches,
        }
    found = dict(zip(LABEL_METRICS, sums, strict=False))
    if not found["sequences"]:
        return {}
    name = "mae" if given.problem_type == "regression" else "accuracy"
    return {name: found[name] / found["sequences"]}
