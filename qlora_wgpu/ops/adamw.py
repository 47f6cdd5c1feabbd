"""Gradient norm, clipping and AdamW over the flat adapter, all on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.graph.dtype import ceil_div, round_up
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.host_moments import MomentsPart
from qlora_wgpu.ops.tensor import in_bindings, in_words, part_of

_MOST_SUMS = 512  # of squares, that are made side by side
_LEAST_UNITS = 16  # that an invocation adds up, where there are enough
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
    """Flat vectors of one layout, and what the host tells of the step.

    All are float32, but a gradient may be bfloat16.

    Attributes:
        parameters: The adapter.
        gradient: Summed over the step's label tokens.
        first_moment: m.
        second_moment: v.
        step_info: Learning rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), learning rate of B.
        stats: Loss sum, label tokens, gradient norm, update factor.
        split: Where B begins, in floats, a multiple of four; None where all have A's rate.
        passing: Parts of the moments that pass through the device one after another, where they
            are in host memory.
    """

    parameters: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    step_info: Tensor
    stats: Tensor
    split: int | None = None
    passing: Sequence[MomentsPart] = ()


def gradient_norm(g: Graph, gradient: Tensor, stats: Tensor, max_grad_norm: float) -> None:
    """Puts the norm of the mean gradient, and the factor that averages and clips, into stats."""
    rows, parts = row_constants(g), in_bindings(g, gradient)
    most = max(part.units(4) for part in parts)
    sums = min(ceil_div(most, _LEAST_UNITS * g.profile.threads_per_row), _MOST_SUMS)
    sums = round_up(sums, g.profile.rows_per_group)
    squares = g.float_vector("sums of squares", len(parts) * sums)
    for number, part in enumerate(parts):
        g.launch(
            "adamw/norm_partial.wgsl",
            row_workgroups(g, sums),
            {"g": part, "squares": squares},
            {"units": part.units(4), "first": number * sums},
            {"SUMS": sums, **rows},
        )
    del rows["ROWS"]
    g.launch(
        "adamw/clip.wgsl",
        (1, 1, 1),
        {"squares": squares, "stats": stats},
        {"max_norm": max_grad_norm},
        {"SUMS": len(parts) * sums, **rows},
    )


def adamw(g: Graph, state: AdamWState, config: AdamWConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed."""
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    if not state.passing:
        _update_all(g, state, config)
    for part in state.passing:
        p, gradient = (part.window(whole) for whole in (state.parameters, state.gradient))
        m, v = part.first_moment, part.second_moment
        here = replace(state, parameters=p, gradient=gradient, first_moment=m, second_moment=v)
        _update(g, here, config, part.begin)
        g.launches[-1].fetches = g.launches[-1].saves = {"m": part.first, "v": part.second}


def _update_all(g: Graph, state: AdamWState, config: AdamWConfig) -> None:
    """The update of vectors that are on the device, in parts that bindings show."""
    begin = 0
    for p in in_bindings(g, state.parameters):
        gradient, m, v = (
            part_of(whole, begin, p.columns)
            for whole in (state.gradient, state.first_moment, state.second_moment)
        )
        here = replace(state, parameters=p, gradient=gradient, first_moment=m, second_moment=v)
        _update(g, here, config, begin)
        begin += p.columns


def _update(g: Graph, state: AdamWState, config: AdamWConfig, begin: int) -> None:
    """The update of what begins with so many floats of the adapter."""
    units, in_halves = state.parameters.units(4), state.gradient.dtype == "bfloat16"
    split = units if state.split is None else max(state.split - begin, 0) // 4
    g.launch(
        "adamw/update.wgsl",
        units,
        {
            "step_info": state.step_info,
            "stats": state.stats,
            "p": state.parameters,
            "gradient": in_words(state.gradient) if in_halves else state.gradient,
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
            "split": split,
        },
        {"GRADIENT_HALVES": in_halves},
    )
