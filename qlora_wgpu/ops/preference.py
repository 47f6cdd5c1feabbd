"""Objectives over whole answers: DPO and its variants, ORPO, KTO, with TRL's names and formulas.

Each is a function of the answers' summed log probabilities, so its gradient is that of the rows'
losses times a factor per sample. The head computes all losses in one pass; kernels sum them per
sample, compute loss, metrics and factors, and apply the factors to the label rows
(``ops/label_rows.py``). The reference's log probabilities are an input of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import one_row, row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers, SampleBuffers

PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "sigmoid_norm",
)  # fmt: skip
"""DPO's values of ``loss_type``, in the order of shaders/preference/pairs.wgsl."""
SINGLE_LOSSES = ("kto", "apo_zero_unpaired")
"""KTO's values of ``loss_type``."""
METRICS = (
    "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "chosen", "rejected",
    "rewards/accuracies", "nll_loss", "log_odds_ratio", "log_odds_chosen", "divergence",
    "divergent", "correct_tokens", "chosen_tokens",
)  # fmt: skip
"""The sums in stats from ``STATS_METRICS`` on: TRL's metrics, numbers of answers, KTO's KL
divergence and its number of answers, and the chosen answers' correct predictions and labels."""


@dataclass(frozen=True)
class Preference:
    """An objective over answers."""

    objective: Literal["dpo", "orpo", "kto"]
    loss_type: str  # one of ``PAIR_LOSSES`` or ``SINGLE_LOSSES``; orpo has only one
    beta: float = 0.1  # β
    label_smoothing: float = 0.0  # ε of robust and exo_pair
    desirable_weight: float = 1.0  # weight of KTO's desirable answers
    undesirable_weight: float = 1.0  # weight of KTO's undesirable answers

    @property
    def is_paired(self) -> bool:
        """Whether samples come in pairs, chosen before rejected."""
        return self.objective != "kto"

    @property
    def has_reference(self) -> bool:
        return self.objective != "orpo"

    @property
    def has_divergence(self) -> bool:
        """Whether it uses the KL divergence over answers of other prompts."""
        return self.loss_type == "kto"

    @property
    def learns_prompts(self) -> bool:
        """Whether the loss is also taken on prompts of chosen answers."""
        return self.objective == "orpo"


def summed_logps(g: Graph, losses: Tensor, batch: BatchBuffers) -> Tensor:
    """Per sample: log p of the answer, its label rows, losses of all label rows, correct labels.

    From the loss and correctness of each label row; float32 (4 · capacity for samples).
    """
    samples = _samples(batch)
    sums = g.float_vector("sums of samples", 4 * samples.capacity)
    g.launch(
        "preference/sums.wgsl",
        row_workgroups(g, samples.capacity),
        {
            "losses": losses,
            "samples": samples.table,
            "row_samples": samples.of_rows,
            "batch_info": batch.info,
            "sums": sums,
        },
        constants=row_constants(g),
    )
    return sums


def preference(
    g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor, given: Preference
) -> Tensor:
    """Adds the loss of samples or pairs, their number and metrics to ``stats``.

    Elements 0 and 1 get loss and number, those from ``STATS_METRICS`` on the ``METRICS``. Returns
    the factor of each label row's gradient.
    """
    samples, sums = _samples(batch), summed_logps(g, losses, batch)
    weights = g.float_vector("weights of samples", 2 * samples.capacity)
    tensors = {
        "sums": sums,
        "samples": samples.table,
        "batch_info": batch.info,
        "weights": weights,
        "stats": stats,
    }
    if given.is_paired:
        path, kind = "preference/pairs.wgsl", {"ODDS": given.objective == "orpo"}
        number = PAIR_LOSSES.index(given.loss_type) if given.objective == "dpo" else 0
        own: dict[str, float] = {"loss_type": number, "smoothing": given.label_smoothing}
    else:
        path, kind = "preference/singles.wgsl", {"ZERO": not given.has_divergence}
        own = {"desirable": given.desirable_weight, "undesirable": given.undesirable_weight}
    g.launch(path, (1, 1, 1), tensors, {"beta": given.beta, **own}, {**one_row(g), **kind})
    factors = g.float_vector("factors of label rows", batch.rows)
    spread = {"weights": weights, "row_samples": samples.of_rows, "batch_info": batch.info}
    g.launch("preference/spread.wgsl", batch.rows, {**spread, "factors": factors})
    return factors


def divergence(g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor) -> None:
    tensors = {
        "sums": summed_logps(g, losses, batch),
        "samples": _samples(batch).table,
        "batch_info": batch.info,
        "stats": stats,
    }
    g.launch("preference/divergence.wgsl", (1, 1, 1), tensors, constants=one_row(g))


def means(sums: Mapping[str, float], given: Preference) -> dict[str, float]:
    """TRL's logged metrics from ``sums``, which has the names of ``METRICS`` and ``count``."""
    shown: dict[str, float] = {}
    for name in ("chosen", "rejected"):
        if (number := sums[name]) > 0:
            for kind in ("rewards", "logps"):
                shown[f"{kind}/{name}"] = sums[f"{kind}/{name}"] / number
    if sums["chosen"] > 0 and sums["rejected"] > 0:
        shown["rewards/margins"] = shown["rewards/chosen"] - shown["rewards/rejected"]
    if given.is_paired and sums["chosen"] > 0:
        shown["rewards/accuracies"] = sums["rewards/accuracies"] / sums["chosen"]
    if given.objective == "dpo" and sums["chosen_tokens"] > 0:
        shown["mean_token_accuracy"] = sums["correct_tokens"] / sums["chosen_tokens"]
    if given.objective == "orpo" and sums["chosen"] > 0:
        for name in ("nll_loss", "log_odds_ratio", "log_odds_chosen"):
            shown[name] = sums[name] / sums["chosen"]
    if given.has_divergence and sums["divergent"] > 0:
        shown["kl"] = max(sums["divergence"] / sums["divergent"], 0.0)
    return shown


def _samples(batch: BatchBuffers) -> SampleBuffers:
    assert batch.samples is not None, "the batch was laid out without samples"
    return batch.samples
