"""Gradient norm, clipping and AdamW over the flat adapter, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor

PARTIALS = 256
STATS_LOSS, STATS_TOKENS, STATS_NORM, STATS_FACTOR, STATS_LENGTH = 0, 1, 2, 3, 4
SATURATED_OFFSET = 256  # bytes; the largest alignment of a binding


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW's constants, by Hugging Face's names; a ``max_grad_norm`` of 0 does not clip."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class AdamWState:
    """Flat float32 vectors of one layout, and what the host tells of the step.

    Attributes:
        parameters: The adapter.
        gradient: Summed over the step's label tokens.
        first_moment: m.
        second_moment: v.
        step_info: Learning rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), learning rate of B.
        stats: Loss sum, label tokens, gradient norm, update factor.
        split: Where B begins, in floats, a multiple of four; None where all have A's rate.
    """

    parameters: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    step_info: Tensor
    stats: Tensor
    split: int | None = None


def gradient_norm(g: Graph, gradient: Tensor, stats: Tensor, max_grad_norm: float) -> None:
    """Puts the norm of the mean gradient, and the factor that averages and clips, into stats."""
    partial = g.float_vector("partial sums", PARTIALS)
    g.launch(
        "adamw/norm_partial.wgsl",
        PARTIALS,
        {"g": gradient, "partial": partial},
        {"units": gradient.units(4)},
        {"PARTIALS": PARTIALS},
    )
    g.launch(
        "adamw/clip.wgsl",
        (1, 1, 1),
        {"partial": partial, "stats": stats},
        {"max_norm": max_grad_norm},
        {"PARTIALS": PARTIALS},
    )


def adamw(g: Graph, state: AdamWState, config: AdamWConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed."""
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    units = state.parameters.units(4)
    g.launch(
        "adamw/update.wgsl",
        units,
        {
            "step_info": state.step_info,
            "stats": state.stats,
            "p": state.parameters,
            "gradient": state.gradient,
            "m": state.first_moment,
            "v": state.second_moment,
        },
        {
            "units": units,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "epsilon": config.adam_epsilon,
            "weight_decay": config.weight_decay,
            "one_minus_beta1": 1 - config.adam_beta1,
            "one_minus_beta2": 1 - config.adam_beta2,
            "split": units if state.split is None else state.split // 4,
        },
    )
