"""Lion over the flat adapter, all on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.pieces import Pieces
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.adamw import gradient_norm
from qlora_wgpu.ops.host_moments import MomentsPart, updated_parts
from qlora_wgpu.ops.tensor import in_words


@dataclass(frozen=True)
class LionConfig:
    """Lion's constants; a ``max_grad_norm`` of 0 does not clip.

    Attributes:
        beta1: How much of the moment is in what gives an update its sign.
        beta2: Decay rate of the moment.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Largest global norm of the gradient.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class LionState:
    """Flat vectors of one layout, in the same pieces, and what the host tells of the step.

    All are float32, but a gradient may be bfloat16.

    Attributes:
        parameters: The adapter.
        gradient: Summed over the step's label tokens.
        moment: m.
        step_info: Learning rate of A, two numbers that are not looked at, learning rate of B.
        stats: See ``AdamWState``.
        split: Where B begins, in floats, a multiple of four; None where all have A's rate.
        passing: Parts of the moment that pass through the device one after another, where it is in
            host memory.
    """

    parameters: Tensor | Pieces
    gradient: Tensor | Pieces
    moment: Tensor | Pieces
    step_info: Tensor
    stats: Tensor
    split: int | None = None
    passing: Sequence[MomentsPart] = ()


def lion(g: Graph, state: LionState, config: LionConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed."""
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    vectors = state.parameters, state.gradient
    for begin, (p, gradient, m), part in updated_parts(vectors, [state.moment], state.passing):
        units, in_halves = p.units(4), gradient.dtype == "bfloat16"
        g.launch(
            "lion/update.wgsl",
            units,
            {
                "step_info": state.step_info,
                "stats": state.stats,
                "p": p,
                "gradient": in_words(gradient) if in_halves else gradient,
                "m": m,
            },
            {
                "units": units,
                "beta1": config.beta1,
                "beta2": config.beta2,
                "weight_decay": config.weight_decay,
                "one_minus_beta1": 1 - config.beta1,
                "one_minus_beta2": 1 - config.beta2,
                "split": units if state.split is None else max(state.split - begin, 0) // 4,
            },
            {"GRADIENT_HALVES": in_halves},
        )
        if part is not None:
            g.launches[-1].fetches = g.launches[-1].saves = {"m": part.kept[0]}
