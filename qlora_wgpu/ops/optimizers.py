"""Gradient norm, clipping, AdamW (32-bit or 8-bit) and Lion over the flat adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.sharded_vector import ShardedVector, as_sharded
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.common import one_row, row_constants, row_workgroups
from qlora_wgpu.ops.moments import BLOCK, BlockTable, MomentsPart, UpdatedPart, updated_parts
from qlora_wgpu.ops.tensor import fill_zero, in_words

_MOST_SUMS = 512  # partial sums of squares
_LEAST_UNITS = 16  # per invocation, if there are enough
STATS_LOSS, STATS_TOKENS, STATS_NORM, STATS_FACTOR = range(4)
STATS_CORRECT, STATS_BALANCE = range(4, 6)
STATS_METRICS, STATS_LENGTH = 8, 22  # the first metric of ops/preference.py; the length of stats
SATURATED_OFFSET = 256  # bytes: the maximum alignment of a binding


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer's constants, by Hugging Face's names; a ``max_grad_norm`` of 0 does not clip."""

    adam_beta1: float = 0.9  # for Lion, the weight of the moment in an update's sign
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8  # not Lion's
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class OptimizerState:
    """Flat vectors of one layout, in the same shards, and the step's inputs from the host.

    All are float32, but the gradient may be bfloat16.
    """

    parameters: Tensor | ShardedVector  # the adapter
    gradient: Tensor | ShardedVector  # summed over the step's label tokens
    moments: Sequence[Tensor | ShardedVector]  # m, and AdamW's v; words of blocks in 8 bits
    # Learning rate of A; 1 - β₁ᵗ and √(1 - β₂ᵗ), unused by Lion; learning rate of B.
    step_info: Tensor
    stats: Tensor  # loss sum, label tokens, gradient norm, update factor; the rest is unused
    # Where B begins, in floats, a multiple of four; None if all have A's learning rate.
    split: int | None = None
    passing: Sequence[MomentsPart] = ()  # parts of offloaded moments, one launch each


def gradient_norm(
    g: Graph, gradient: Tensor | ShardedVector, stats: Tensor, max_grad_norm: float
) -> None:
    """Writes the norm of the mean gradient, and the factor that averages and clips, to stats.

    Sums do not depend on the shards: an invocation continues its sum from shard to shard.
    """
    whole = as_sharded(gradient)
    threads = g.profile.threads_per_row
    sums = min(ceil_div(whole.columns // 4, _LEAST_UNITS * threads), _MOST_SUMS)
    sums = round_up(sums, g.profile.rows_per_group)
    squares = g.float_vector("sums of squares", sums)
    carried = None
    if len(whole.shards) > 1:
        carried = g.float_vector("sums of squares of invocations", sums * threads)
    for begin, shard in whole.numbered():
        g.launch(
            "adamw/norm_partial.wgsl",
            row_workgroups(g, sums),
            {"g": shard, "squares": squares, "carried": carried},
            {"begin": begin // 4},
            {"SUMS": sums, **row_constants(g)},
        )
    g.launch(
        "adamw/clip.wgsl",
        (1, 1, 1),
        {"squares": squares, "stats": stats},
        {"max_norm": max_grad_norm},
        {"SUMS": sums, **one_row(g)},
    )


def adamw(
    g: Graph, state: OptimizerState, config: OptimizerConfig, blocks: BlockTable | None = None
) -> None:
    """One step of AdamW from the summed gradient, which is then zeroed.

    For 8-bit moments, ``blocks`` has each tensor's blocks.
    """
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    for part in updated_parts(
        state.parameters, state.gradient, state.moments, state.passing, blocks
    ):
        own = {**_rates(config), "epsilon": config.adam_epsilon}
        if blocks is None:
            _update(g, "adamw/update.wgsl", state, part, own)
        else:
            _update_8bit(g, state, part, own, blocks)
    if blocks is not None and as_sharded(state.gradient).dtype == "bfloat16":
        fill_zero(g, state.gradient)


def lion(g: Graph, state: OptimizerState, config: OptimizerConfig) -> None:
    """One step of Lion (Chen et al., 2023) from the summed gradient, which is then zeroed."""
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    for part in updated_parts(state.parameters, state.gradient, state.moments, state.passing):
        _update(g, "lion/update.wgsl", state, part, _rates(config))


def _rates(config: OptimizerConfig) -> dict[str, int | float]:
    return {
        "beta1": config.adam_beta1,
        "beta2": config.adam_beta2,
        "weight_decay": config.weight_decay,
        "one_minus_beta1": 1 - config.adam_beta1,
        "one_minus_beta2": 1 - config.adam_beta2,
    }


def _bound(
    state: OptimizerState, part: UpdatedPart
) -> tuple[dict[str, Tensor], dict[str, Constant]]:
    p, gradient, *moments = part.tensors
    in_halves = gradient.dtype == "bfloat16"
    return {
        "step_info": state.step_info,
        "stats": state.stats,
        "p": p,
        "gradient": in_words(gradient) if in_halves else gradient,
        **dict(zip("mv", moments, strict=False)),
    }, {"GRADIENT_HALVES": in_halves}


def _update(
    g: Graph, path: str, state: OptimizerState, part: UpdatedPart, rates: dict[str, int | float]
) -> None:
    tensors, constants = _bound(state, part)
    units = tensors["p"].units(4)
    split = units if state.split is None else max(state.split - part.begin, 0) // 4
    g.launch(path, units, tensors, {"units": units, **rates, "split": split}, constants)
    g.launches[-1].fetches = g.launches[-1].saves = part.kept


_QUADS = BLOCK // 4
_NO_SPLIT = (1 << 32) - 1


def _update_8bit(
    g: Graph,
    state: OptimizerState,
    part: UpdatedPart,
    rates: dict[str, int | float],
    blocks: BlockTable,
) -> None:
    tensors, halves = _bound(state, part)
    constants, count = row_constants(g), len(blocks.tensors)
    if not g.profile.textures:
        constants["THREADS"] = min(g.profile.threads_per_row, _QUADS)
    own = part.blocks
    assert own is not None
    g.launch(
        "adamw/update_8bit.wgsl",
        row_workgroups(g, own.end - own.block),
        {**tensors, "table": blocks.table},
        {
            "first_block": own.block,
            "blocks": own.end - own.block,
            "first_word": own.word,
            "first_element": part.begin,
            "tensors": count,
            "search": 1 << (count - 1).bit_length() >> 1,
            **rates,
            "split": _NO_SPLIT if state.split is None else max(state.split - part.begin, 0),
        },
        {**halves, **constants},
    )
    g.launches[-1].fetches = g.launches[-1].saves = part.kept
