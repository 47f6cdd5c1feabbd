"""The shapes of what an objective over answers computes beside its training steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Dataset, bucket_length
from qlora_wgpu.model.steps import StepKind
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.runs.data import RunData
from qlora_wgpu.training.answers import Block, Mismatched, in_blocks

STEPS_LOOKED_AT = 2000  # for the lengths of their batches

Lengths = npt.NDArray[np.int64]


def answer_shapes(
    data: RunData, preference: Preference, batch_size: int, longest: int
) -> tuple[tuple[int, ...], tuple[tuple[StepKind, int], ...]]:
    """Lengths of batches whose loss is measured, and kinds and lengths of the others, in order.

    Args:
        data: The run's.
        preference: The objective.
        batch_size: Rows of a micro-batch.
        longest: Most tokens of a training row.
    """
    measured: dict[int, None] = {}
    others: dict[tuple[StepKind, int], None] = {}
    for dataset in (data.train, data.held_out):
        if dataset is None:
            continue
        most = max(longest, dataset.longest)
        blocks = in_blocks(dataset, preference, batch_size)
        own = _lengths(blocks, dataset.lengths, most)
        asked = list(own) if preference.has_reference else []
        if preference.has_divergence:
            lengths = mismatched_lengths(dataset, most)
            asked += _lengths(blocks, lengths, most)
            steps = blocks if dataset is not data.train else _training_blocks(data)
            compared = _lengths(steps, lengths, most)
            others |= dict.fromkeys(("divergence", length) for length in compared)
        others |= dict.fromkeys(("sums", length) for length in asked)
        if dataset is data.held_out:
            measured |= dict.fromkeys(own)
    return tuple(measured), tuple(others)


def mismatched_lengths(dataset: Dataset, longest: int) -> Lengths:
    """Tokens of each example's prompt with another's answer; 0 where there is no example."""
    examples = Mismatched(dataset, longest)
    return np.array([len(examples[i]) for i in range(len(dataset))], np.int64)


def _training_blocks(data: RunData) -> list[Block]:
    steps = range(min(data.plan.total_steps, STEPS_LOOKED_AT))
    return [block for step in steps for block in data.plan.blocks(step)]


def _lengths(blocks: Iterable[Block], lengths: Lengths, longest: int) -> list[int]:
    found: dict[int, None] = {}
    for block in blocks:
        tokens = max(int(lengths[list(row)].sum()) for row in block)
        found[bucket_length(tokens, max(longest, tokens))] = None
    return list(found)
