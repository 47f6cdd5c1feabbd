"""Objectives over whole answers: DPO and its kin, ORPO, KTO, with TRL's names and formulas.

Each is a function of the answers' summed log probabilities, so its gradient is that of the rows'
losses times a factor for each sample. The head computes all losses in its one pass; kernels sum
them up by samples, compute loss, metrics and factors, and spread the factors over the label rows
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
"""What DPO's ``loss_type`` may be, in the order of shaders/preference/pairs.wgsl."""
SINGLE_LOSSES = ("kto", "apo_zero_unpaired")
"""What KTO's ``loss_type`` may be."""
METRICS = (
    "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "chosen", "rejected",
    "rewards/accuracies", "nll_loss", "log_odds_ratio", "log_odds_chosen", "divergence",
    "divergent", "correct_tokens", "chosen_tokens",
)  # fmt: skip
"""The sums that stats hold from ``STATS_METRICS`` on: TRL's names, numbers of answers, KTO's KL
divergence and over how many answers it is summed, and the chosen answers' hits and labels."""


@dataclass(frozen=True)
class Preference:
    """An objective over answers."""

    objective: Literal["dpo", "orpo", "kto"]  # whose formulas
    loss_type: str  # which of them: of ``PAIR_LOSSES`` or ``SINGLE_LOSSES``; orpo has one
    beta: float = 0.1  # β
    label_smoothing: float = 0.0  # ε of robust and exo_pair
    desirable_weight: float = 1.0  # weight of KTO's desirable answers
    undesirable_weight: float = 1.0  # weight of the others

    @property
    def is_paired(self) -> bool:
        """Whether samples come in pairs, chosen before rejected."""
        return self.objective != "kto"

    @property
    def has_reference(self) -> bool:
        """Whether it compares with what the model was before."""
        return self.objective != "orpo"

    @property
    def has_divergence(self) -> bool:
        """Whether it measures from the divergence over answers of other prompts."""
        return self.loss_type == "kto"

    @property
    def learns_prompts(self) -> bool:
        """Whether chosen samples' prompts have a loss, too."""
        return self.objective == "orpo"


def summed_logps(g: Graph, losses: Tensor, batch: BatchBuffers) -> Tensor:
    """Sums of each sample: log p of the answer, its label rows, losses of all label rows, its hits.

    Given the loss of each label row and whether it is a hit; float32 (4 · samples that there is
    room for).
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

    They go to elements 0 and 1, and as ``METRICS`` from ``STATS_METRICS`` on. Returns the factor of
    each label row's gradient.
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
    """Adds the divergence from the reference over a batch's answers to ``stats``."""
    tensors = {
        "sums": summed_logps(g, losses, batch),
        "samples": _samples(batch).table,
        "batch_info": batch.info,
        "stats": stats,
    }
    g.launch("preference/divergence.wgsl", (1, 1, 1), tensors, constants=one_row(g))


def means(sums: Mapping[str, float], given: Preference) -> dict[str, float]:
    """What TRL logs of some sums, by its names; ``sums`` by those of ``METRICS``, and ``count``."""
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
