"""AdamW with moments in 8 bits, over the flat adapter, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.adamw import AdamWConfig, AdamWState, gradient_norm
from qlora_wgpu.ops.moments_8bit import BLOCK, BlockTable
from qlora_wgpu.ops.tensor import fill_zero, in_words

_QUADS = BLOCK // 4
_NO_SPLIT = (1 << 32) - 1


@dataclass(frozen=True)
class _Part:
    """Blocks from ``begin`` to ``end``, and where theirs begin in what is bound of m and v."""

    begin: int
    end: int
    first_word: int
    m: Tensor
    v: Tensor


def adamw_8bit(g: Graph, state: AdamWState, blocks: BlockTable, config: AdamWConfig) -> None:
    """One optimizer step from the gradient summed so far, which is zeroed.

    Args:
        g: The graph.
        state: Its moments are words, as ``blocks`` lays them out.
        blocks: Where each tensor's blocks lie.
        config: AdamW's constants.
    """
    gradient_norm(g, state.gradient, state.stats, config.max_grad_norm)
    if not state.passing:
        whole = _Part(0, blocks.blocks, 0, state.first_moment, state.second_moment)
        _update(g, state, blocks, config, whole)
    ends = [*(part.block for part in state.passing[1:]), blocks.blocks]
    for passing, end in zip(state.passing, ends, strict=False):
        moments = passing.first_moment, passing.second_moment
        part = _Part(passing.block, end, passing.begin, *moments)
        _update(g, state, blocks, config, part)
        g.launches[-1].fetches = g.launches[-1].saves = {"m": passing.first, "v": passing.second}
    if _in_halves(state):
        fill_zero(g, state.gradient)


def _in_halves(state: AdamWState) -> bool:
    return state.gradient.dtype == "bfloat16"


def _update(
    g: Graph, state: AdamWState, blocks: BlockTable, config: AdamWConfig, part: _Part
) -> None:
    constants, tensors = row_constants(g), len(blocks.tensors)
    if not g.profile.textures:
        constants["THREADS"] = min(g.profile.threads_per_row, _QUADS)
    count = part.end - part.begin
    g.launch(
        "adamw/update_8bit.wgsl",
        row_workgroups(g, count),
        {
            "step_info": state.step_info,
            "stats": state.stats,
            "p": state.parameters,
            "gradient": in_words(state.gradient) if _in_halves(state) else state.gradient,
            "m": part.m,
            "v": part.v,
            "table": blocks.table,
        },
        {
            "first_block": part.begin,
            "blocks": count,
            "first_word": part.first_word,
            "tensors": tensors,
            "search": 1 << (tensors - 1).bit_length() >> 1,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "epsilon": config.adam_epsilon,
            "weight_decay": config.weight_decay,
            "one_minus_beta1": 1 - config.adam_beta1,
            "one_minus_beta2": 1 - config.adam_beta2,
            "split": _NO_SPLIT if state.split is None else state.split,
        },
        {"GRADIENT_HALVES": _in_halves(state), **constants},
    )
