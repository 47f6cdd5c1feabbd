"""Gradient norm, clipping, AdamW (in 32 or 8 bits) and Lion over the flat adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.sharded_vector import ShardedVector, as_sharded
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.common import row_constants, row_workgroups
from qlora_wgpu.ops.moments import BLOCK, BlockTable, MomentsPart, updated_parts
from qlora_wgpu.ops.tensor import fill_zero, in_words

_MOST_SUMS = 512  # partial sums of squares
_LEAST_UNITS = 16  # that an invocation adds up, where there are enough
STATS_LOSS, STATS_TOKENS, STATS_NORM, STATS_FACTOR = range(4)
STATS_CORRECT, STATS_BALANCE = range(4, 6)
STATS_METRICS, STATS_LENGTH = 8, 22  # the first of those of ops/preference.py, and all
SATURATED_OFFSET = 256  # bytes; the largest alignment of a binding


# ---- AdamW -----------------------------------------------------------------------------------


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
    """Flat vectors of one layout, in the same pieces, and what the host tells of the step.

    All are float32, but a gradient may be bfloat16.
    """

    parameters: Tensor | ShardedVector  # the adapter
    gradient: Tensor | ShardedVector  # summed over the step's label tokens
    first_moment: Tensor | ShardedVector  # m
    second_moment: Tensor | ShardedVector  # v
    step_info: Tensor  # learning rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), learning rate of B
    stats: Tensor  # loss sum, label tokens, gradient norm, update factor; the rest is not looked at
    # Where B begins, in floats, a multiple of four; None where all have A's rate.
    split: int | None = None
    passing: Sequence[MomentsPart] = ()  # of moments in host memory, for one launch each


def gradient_norm(
    g: Graph, gradient: Tensor | ShardedVector, stats: Tensor, max_grad_norm: float
) -> None:
    """Puts the norm of the mean gradient, and the factor that averages and clips, into stats.

    Sums do not depend on the pieces: an invocation continues in each where it was before.
    """
    rows, whole = row_constants(g), as_sharded(gradient)
    threads = g.profile.threads_per_row
    sums = min(ceil_div(whole.columns // 4, _LEAST_UNITS * threads), _MOST_SUMS)
    sums = round_up(sums, g.profile.rows_per_group)
    squares = g.float_vector("sums of squares", sums)
    carried = None
    if len(whole.shards) > 1:
        carried = g.float_vector("sums of squares of invocations", sums * threads)
    for begin, piece in whole.numbered():
        g.launch(
            "adamw/norm_partial.wgsl",
            row_workgroups(g, sums),
            {"g": piece, "squares": squares, "carried": carried},
            {"begin": begin // 4},
            {"SUMS": sums, **rows},
        )
    del rows["ROWS"]
    g.launch(
        "adamw/clip.wgsl",
        (1, 1, 1),
        {"squares": squares, "stats": stats},
        {"max_norm": max_grad_norm},
        {"SUMS": sums, **rows},
    )


def adamw(g: Graph, state: AdamWState, config: AdamWConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed."""
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    vectors = state.parameters, state.gradient
    moments = state.first_moment, state.second_moment
    for begin, tensors, part in updated_parts(vectors, moments, state.passing):
        _update(g, state, config, begin, tensors)
        if part is not None:
            kept = dict(zip("mv", part.kept, strict=True))
            g.launches[-1].fetches = g.launches[-1].saves = kept


def _update(
    g: Graph, state: AdamWState, config: AdamWConfig, begin: int, vectors: tuple[Tensor, ...]
) -> None:
    """The update of parameters, with gradient and moments, from an element of the adapter on."""
    p, gradient, m, v = vectors
    units, in_halves = p.units(4), gradient.dtype == "bfloat16"
    split = units if state.split is None else max(state.split - begin, 0) // 4
    g.launch(
        "adamw/update.wgsl",
        units,
        {
            "step_info": state.step_info,
            "stats": state.stats,
            "p": p,
            "gradient": in_words(gradient) if in_halves else gradient,
            "m": m,
            "v": v,
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


# ---- Lion ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LionConfig:
    """Lion's constants; a ``max_grad_norm`` of 0 does not clip."""

    beta1: float = 0.9  # how much of the moment is in what gives an update its sign
    beta2: float = 0.99  # decay rate of the moment
    weight_decay: float = 0.0  # decoupled weight decay
    max_grad_norm: float = 1.0  # largest global norm of the gradient


@dataclass(frozen=True)
class LionState:
    """Flat vectors of one layout, in the same pieces, and what the host tells of the step.

    All are float32, but a gradient may be bfloat16.
    """

    parameters: Tensor | ShardedVector  # the adapter
    gradient: Tensor | ShardedVector  # summed over the step's label tokens
    moment: Tensor | ShardedVector  # m
    step_info: Tensor  # learning rate of A, two numbers that are not looked at, learning rate of B
    stats: Tensor  # see ``AdamWState``
    split: int | None = None  # see ``AdamWState``
    passing: Sequence[MomentsPart] = ()  # likewise


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


# ---- AdamW in 8 bits -------------------------------------------------------------------------

_QUADS = BLOCK // 4
_NO_SPLIT = (1 << 32) - 1


@dataclass(frozen=True)
class _Part:
    """Blocks from ``begin`` to ``end``, and what is bound."""

    begin: int
    end: int
    first_word: int  # where ``m`` and ``v`` begin in the whole moments
    first_element: int  # where ``p`` and ``gradient`` begin in the whole vectors
    p: Tensor  # the piece of the parameters that has the blocks' tensors
    gradient: Tensor  # the same piece of the gradient
    m: Tensor  # the blocks' words
    v: Tensor  # likewise


def adamw_8bit(g: Graph, state: AdamWState, blocks: BlockTable, config: AdamWConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed.

    Args:
        g: The graph.
        state: Its moments are words, as ``blocks`` lays them out.
        blocks: Where each tensor's blocks lie.
        config: AdamW's constants.
    """
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    vectors = list(
        zip(as_sharded(state.parameters).numbered(), as_sharded(state.gradient).shards, strict=True)
    )
    if not state.passing:
        moments = as_sharded(state.first_moment).shards, as_sharded(state.second_moment).shards
        for ((first, p), gradient), piece, m, v in zip(
            vectors, blocks.pieces, *moments, strict=True
        ):
            part = _Part(piece.block, piece.end, piece.word, first, p, gradient, m, v)
            _update_8bit(g, state, blocks, config, part)
    for passing in state.passing:
        (first, p), gradient = vectors[passing.piece]
        m, v = passing.moments
        part = _Part(passing.block, passing.end, passing.begin, first, p, gradient, m, v)
        _update_8bit(g, state, blocks, config, part)
        kept = dict(zip("mv", passing.kept, strict=True))
        g.launches[-1].fetches = g.launches[-1].saves = kept
    if as_sharded(state.gradient).dtype == "bfloat16":
        fill_zero(g, state.gradient)


def _update_8bit(
    g: Graph, state: AdamWState, blocks: BlockTable, config: AdamWConfig, part: _Part
) -> None:
    in_halves = part.gradient.dtype == "bfloat16"
    constants, tensors = row_constants(g), len(blocks.tensors)
    if not g.profile.textures:
        constants["THREADS"] = min(g.profile.threads_per_row, _QUADS)
    count = part.end - part.begin
    split = _NO_SPLIT if state.split is None else max(state.split - part.first_element, 0)
    g.launch(
        "adamw/update_8bit.wgsl",
        row_workgroups(g, count),
        {
            "step_info": state.step_info,
            "stats": state.stats,
            "p": part.p,
            "gradient": in_words(part.gradient) if in_halves else part.gradient,
            "m": part.m,
            "v": part.v,
            "table": blocks.table,
        },
        {
            "first_block": part.begin,
            "blocks": count,
            "first_word": part.first_word,
            "first_element": part.first_element,
            "tensors": tensors,
            "search": 1 << (tensors - 1).bit_length() >> 1,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "epsilon": config.adam_epsilon,
            "weight_decay": config.weight_decay,
            "one_minus_beta1": 1 - config.adam_beta1,
            "one_minus_beta2": 1 - config.adam_beta2,
            "split": split,
        },
        {"GRADIENT_HALVES": in_halves, **constants},
    )
