"""AdamW with moments in 8 bits, over the flat adapter, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.pieces import in_pieces
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.adamw import AdamWConfig, AdamWState, gradient_norm
from qlora_wgpu.ops.moments_8bit import BLOCK, BlockTable
from qlora_wgpu.ops.tensor import fill_zero, in_words

_QUADS = BLOCK // 4
_NO_SPLIT = (1 << 32) - 1


@dataclass(frozen=True)
class _Part:
    """Blocks from ``begin`` to ``end``, and what is bound.

    Attributes:
        begin: The first block.
        end: The block behind the last.
        first_word: Where ``m`` and ``v`` begin in the whole moments.
        first_element: Where ``p`` and ``gradient`` begin in the whole vectors.
        p: The piece of the parameters that has the blocks' tensors.
        gradient: That of the gradient.
        m: Words of the blocks.
        v: The same.
    """

    begin: int
    end: int
    first_word: int
    first_element: int
    p: Tensor
    gradient: Tensor
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
    vectors = list(
        zip(in_pieces(state.parameters).numbered(), in_pieces(state.gradient).pieces, strict=True)
    )
    if not state.passing:
        moments = in_pieces(state.first_moment).pieces, in_pieces(state.second_moment).pieces
        for ((first, p), gradient), piece, m, v in zip(
            vectors, blocks.pieces, *moments, strict=True
        ):
            part = _Part(piece.block, piece.end, piece.word, first, p, gradient, m, v)
            _update(g, state, blocks, config, part)
    for passing in state.passing:
        (first, p), gradient = vectors[passing.piece]
        m, v = passing.moments
        part = _Part(passing.block, passing.end, passing.begin, first, p, gradient, m, v)
        _update(g, state, blocks, config, part)
        kept = dict(zip("mv", passing.kept, strict=True))
        g.launches[-1].fetches = g.launches[-1].saves = kept
    if in_pieces(state.gradient).dtype == "bfloat16":
        fill_zero(g, state.gradient)


def _update(
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
