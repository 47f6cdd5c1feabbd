"""GRPO's loss and its kin over completions, with TRL's names and formulas.

Each is a function of a token's log probability, of what it was when the completion was sampled and
of the completion's advantage. The head computes log probabilities in its one pass; a kernel makes
loss and slope of each label row, by which the rows of d hidden are multiplied afterwards. Losses
that TRL sums or averages in different ways differ in the rows' weights alone (``token_weights``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.common import one_row, row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "rloo")
"""The values of ``loss_type``; rloo is that of RLOOTrainer."""
_UNBOUNDED = 3e38
METRICS = (
    "kl", "clipped_low", "clipped_high", "clipped", "batches", "clipping", "least_clipped_low",
    "most_clipped_high", "entropy",
)  # fmt: skip
"""The sums over micro-batches in stats from ``STATS_METRICS`` on: see shaders/policy/total.wgsl."""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Policy:
    """An objective over completions, by TRL's names."""

    loss_type: str = "dapo"  # of ``LOSSES``
    beta: float = 0.0  # β of the KL divergence from the reference
    epsilon: float = 0.2  # ε: how far below one a ratio may be before it is clipped
    epsilon_high: float | None = None  # how far above one, by default ε; of cispo the bound
    delta: float | None = None  # the bound of ratios where the advantage is negative
    sequence_level: bool = False  # whether a completion has one ratio (GSPO)
    temperature: float = 1.0  # by which logits are divided, as when completions are sampled
    use_bias_correction_kl: bool = True  # whether the divergence is multiplied by the ratio
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    # Share of a micro-batch's tokens, those of the highest entropies, that have a policy loss
    top_entropy_quantile: float = 1.0
    # Whether each completion is trained on once, by the adapter that has sampled it: then its old
    # log probabilities are those of the step, so that ratios are 1, also with dropout
    is_on_policy: bool = False

    @property
    def needs_old(self) -> bool:
        """Whether old log probabilities have to be computed before a step."""
        return not self.is_on_policy or (self.loss_type == "rloo" and self.has_reference)

    @property
    def has_reference(self) -> bool:
        """Whether it needs the reference's log probabilities."""
        return self.beta != 0.0

    @property
    def has_divergence(self) -> bool:
        """Whether the KL divergence is a term of the loss; RLOO subtracts it from the rewards."""
        return self.has_reference and self.loss_type != "rloo"

    @property
    def has_sequence_ratios(self) -> bool:
        """Whether a completion has one ratio."""
        return self.sequence_level or self.loss_type == "rloo"


def token_weights(
    loss_type: str, lengths: npt.NDArray[np.integer], items: float, max_completion_length: int
) -> tuple[FloatArray, FloatArray]:
    """How a micro-batch's completions count: each of its tokens, and it in the divisor.

    The gradient of a step is the sum of its tokens' times these weights, divided by the sum of the
    second numbers.

    Args:
        loss_type: One of ``LOSSES``.
        lengths: The tokens of each completion that have a loss.
        items: Tokens that dapo and cispo divide this micro-batch's sum by: those of all that was
            generated together, at least one, divided by the number of micro-batches in it.
        max_completion_length: The maximum, which dr_grpo divides by.
    """
    count = len(lengths)
    ones = np.ones(count)
    if loss_type in ("grpo", "sapo", "rloo"):
        weights, shares = 1 / np.maximum(lengths, 1), ones
    elif loss_type == "bnpo":
        weights, shares = ones / max(lengths.sum(), 1), ones / count
    elif loss_type == "dr_grpo":
        weights, shares = ones / max_completion_length, ones
    elif loss_type == "luspo":
        weights, shares = ones, ones
    else:
        weights, shares = ones, ones * items / count
    return weights.astype(np.float32), shares.astype(np.float32)


def policy_loss(
    g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor, given: Policy
) -> Tensor:
    """Adds loss, divisor and metrics to ``stats``; returns the factor of each row's gradient.

    They go to elements 0 and 1, and as ``METRICS`` from ``STATS_METRICS`` on. ``losses`` are the
    negative log probability and the entropy of each row.
    """
    samples, rows = batch.samples, batch.completions
    assert samples is not None and rows is not None, "the batch was laid out without completions"
    tensors = {"losses": losses, "completions": rows, "batch_info": batch.info}
    ratios = threshold = None
    if given.top_entropy_quantile < 1.0:
        threshold = g.float_vector("threshold of entropies", 1)
        g.launch(
            "policy/threshold.wgsl",
            (1, 1, 1),
            {"losses": losses, "batch_info": batch.info, "threshold": threshold},
            {"quantile": 1.0 - given.top_entropy_quantile},
            one_row(g),
        )
    if given.has_sequence_ratios:
        numbers = 2 if threshold is None else 4
        ratios = g.float_vector("ratios of completions", numbers * samples.capacity)
        g.launch(
            "policy/ratios.wgsl",
            row_workgroups(g, samples.capacity),
            {**tensors, "samples": samples.table, "ratios": ratios, "threshold": threshold},
            constants={
                **row_constants(g),
                "SUMMED": given.loss_type == "rloo",
                "ON_POLICY": given.is_on_policy,
            },
        )
    factors = g.float_vector("factors of label rows", batch.rows)
    terms = matrix("terms of label rows", 1, 4 * batch.rows, "float32")
    high = given.epsilon if given.epsilon_high is None else given.epsilon_high
    loss = {"cispo": 1, "sapo": 2}.get(given.loss_type, 0)
    bound = _UNBOUNDED if given.delta is None or loss else given.delta
    g.launch(
        "policy/losses.wgsl",
        batch.rows,
        {
            **tensors,
            "row_samples": samples.of_rows if given.has_sequence_ratios else None,
            "ratios": ratios,
            "threshold": threshold,
            "terms": terms,
            "factors": factors,
        },
        {
            "loss": loss,
            "beta": given.beta,
            "epsilon": given.epsilon,
            "epsilon_high": high,
            "delta": bound,
            "positive": given.sapo_temperature_pos,
            "negative": given.sapo_temperature_neg,
        },
        {
            "SEQUENCE": given.has_sequence_ratios,
            "SUMMED": given.loss_type == "rloo",
            "ON_POLICY": given.is_on_policy,
            "REFERENCE": given.has_divergence,
            "CORRECTION": given.use_bias_correction_kl,
        },
    )
    highest = high if loss == 1 else 1.0 + high
    of_one = {
        "low": float(min(1.0, bound) < 1.0 - given.epsilon),
        "high": float(min(1.0, bound) > highest),
    }
    g.launch(
        "policy/total.wgsl",
        (1, 1, 1),
        {
            "terms": terms,
            "losses": losses,
            "samples": samples.table,
            "batch_info": batch.info,
            "stats": stats,
        },
        of_one if given.has_sequence_ratios else None,
        constants={
            **one_row(g),
            "SEQUENCE": given.has_sequence_ratios,
            "SUMMED": given.loss_type == "rloo",
        },
    )
    return factors


def means(sums: Mapping[str, float], given: Policy) -> dict[str, float]:
    """TRL's metrics by its names, means over micro-batches, from sums by the names of ``METRICS``.

    Those of completions with a loss are missing if there is none.
    """
    batches = max(sums["batches"], 1.0)
    shown = {"kl": sums["kl"] / batches} if given.has_divergence else {}
    shown["entropy"] = sums["entropy"] / batches
    if given.loss_type == "cispo":
        return shown | {"cispo_clip_ratio": sums["clipped_high"] / batches}
    if given.loss_type == "sapo":
        return shown
    shown |= {
        "clip_ratio/low_mean": sums["clipped_low"] / batches,
        "clip_ratio/high_mean": sums["clipped_high"] / batches,
        "clip_ratio/region_mean": sums["clipped"] / batches,
    }
    if not sums["clipping"]:
        return shown
    return shown | {
        "clip_ratio/low_min": sums["least_clipped_low"] / sums["clipping"],
        "clip_ratio/high_max": sums["most_clipped_high"] / sums["clipping"],
    }
