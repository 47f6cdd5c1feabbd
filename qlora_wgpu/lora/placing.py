"""Where each tensor of an adapter lies in its flat vectors, and where these are cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.dtype import padded
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.flat_vector import FlatVector, Group, Place, aligned, cut
from qlora_wgpu.lora.moments import most_words
from qlora_wgpu.lora.names import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TOKENS,
    WHOLE,
    parse_name,
    tensor_name,
)
from qlora_wgpu.lora.tokens import Vocabulary

_VIEW_ROWS = 256  # of any width, that a view of a matrix may begin at a multiple of


def place_all(
    flat: FlatVector,
    peft: AdapterConfig,
    targets: Sequence[LinearSpec],
    embedding: LinearSpec | None,
    vocabulary: Vocabulary | None,
    tokens: Mapping[str, Sequence[int]],
    saved: Sequence[str],
    *,
    use_dora: bool,
) -> int:
    """Gives all A's their places, and trained rows and matrices; then B's and magnitudes.

    LoRA+ has a rate for B's and vectors, and another one for all else, both of an embedding.

    Args:
        flat: The places, none yet.
        peft: The adapter's ranks.
        targets: The adapted layers, but the embedding.
        embedding: The embedding, if it is adapted.
        vocabulary: The matrices that may have trained rows.
        tokens: The trained rows of each module.
        saved: The modules that are trained whole.
        use_dora: Whether layers have magnitudes.

    Returns:
        Where B's begin, in floats.
    """
    for spec in targets:
        flat.append(tensor_name(spec.name, LORA_A), peft.rank_of(spec.name), spec.in_features)
    if embedding is not None:
        name, rank = embedding.name, peft.rank_of(embedding.name)
        flat.append(tensor_name(name, EMBEDDING_A), rank, embedding.in_features)
        flat.append(tensor_name(name, EMBEDDING_B), embedding.out_features, rank)
    if vocabulary is not None:
        for module, indices in tokens.items():
            flat.append(tensor_name(module, TOKENS), len(indices), vocabulary.columns)
        for module in saved:
            flat.append(tensor_name(module, WHOLE), vocabulary.rows, vocabulary.columns)
    b_begin = flat.end
    for spec in targets:
        flat.append(tensor_name(spec.name, LORA_B), spec.out_features, peft.rank_of(spec.name))
    if use_dora:
        for spec in targets:
            flat.append(tensor_name(spec.name, MAGNITUDE), 0, spec.out_features)
    return b_begin


def slack_of(flat: FlatVector, stacks: Sequence[ExpertSpec]) -> int:
    """Floats at the end: bindings of experts' matrices are counted in rows, and may pass it."""
    stacked = {spec.name for stack in stacks for spec in stack.linears}
    rows = [
        padded(place.columns)
        for name, place in flat.items()
        if (parsed := parse_name(name)) is not None and parsed[0] in stacked
    ]
    return aligned(max(rows, default=0))


def cuts_of(flat: FlatVector, stacks: Sequence[ExpertSpec], most: int) -> tuple[int, ...]:
    """Where the pieces of the flat vectors begin, in floats, but the first.

    Kernels bind layers of one input as one, which therefore stay together if they can.

    Args:
        flat: The places.
        stacks: The adapted experts, which are never cut apart.
        most: Floats that a piece may take.
    """
    of_stacks = {spec.name: stack.name for stack in stacks for spec in stack.linears}
    begins, sizes, groups = [], [], []
    for name, place in flat.items():
        module, leaf = parse_name(name) or (name, "")
        stack = of_stacks.get(module)
        kind = module.rpartition(".")[0] if stack is None else stack
        if leaf == WHOLE:
            for begin, size in _row_blocks(place, most):
                begins.append(begin)
                sizes.append(size)
                groups.append(Group(name))
            continue
        begins.append(place.offset)
        sizes.append(max(aligned(place.size), most_words(place)))
        groups.append(Group(f"{kind}.{leaf}", always=stack is not None))
    return tuple(begins[i] for i in cut(sizes, groups, most))


def is_within(flat: FlatVector, cut: int) -> bool:
    """Whether a piece begins within a tensor."""
    return any(place.offset < cut < place.offset + place.size for _, place in flat.items())


def _row_blocks(place: Place, most: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows that a matrix may be cut into, each within ``most`` floats: place and size."""
    stride = place.size // place.rows
    rows = max(most // stride // _VIEW_ROWS * _VIEW_ROWS, _VIEW_ROWS)
    for first in range(0, place.rows, rows):
        count = min(rows, place.rows - first)
        yield place.offset + first * stride, aligned(count * stride)
