"""Prefill: which prompts are computed together, those of similar length in few shapes.

A text's digits depend neither on the padding nor on the texts beside it: a row's sums have one
order, and causal attention ends with the row's own tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import bucket_length
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.model.programs import DecodePrograms

_MOST_TOKENS = 512  # of prompts that are computed together, padding included
_MOST_PROMPTS = 8


class Prefill:
    """Prompts that are being computed, a few dispatches at a time."""

    def __init__(self, program: DecodePrograms, texts: Sequence[Request]) -> None:
        """Computes nothing yet."""
        self.texts = list(texts)
        self._program = program
        self._prompts = [text.all_ids for text in texts]
        self._places = [text.place for text in texts]
        for text in texts:
            text.rotated_length = text.length
        program.write_prefill_inputs(self._prompts, self._places)
        self._pieces: Iterator[None] | None = None

    def go_on(self, seconds: float) -> bool:
        """Computes for so long, at least some dispatches; returns whether that was all."""
        if self._pieces is None and math.isinf(seconds):
            self._program.hidden.run()  # does not wait
            return True
        self._pieces = self._pieces or self._program.hidden.run_preemptible()
        end = time.perf_counter() + seconds
        return not any(time.perf_counter() >= end for _ in self._pieces)

    def end(self) -> tuple[list[int], npt.NDArray[np.float32] | None]:
        """The tokens after them, and the logits where they are asked for."""
        program, texts = self._program, self.texts
        tokens = program.end_prompts(
            self._prompts,
            self._places,
            [text.choice for text in texts],
        )
        return tokens, None if program.kept is None else program.logits()


def prompt_length(tokens: int, capacity: int) -> int:
    """The padded length of a prompt by itself."""
    return max(bucket_length(tokens, capacity), 2)


def most_together(length: int, texts: int) -> int:
    """How many prompts of a padded length are computed at once, a power of two."""
    most = min(_MOST_TOKENS // length, _MOST_PROMPTS, texts)
    return 1 << max(most, 1).bit_length() - 1


def prefill_batch(texts: Sequence[Request], capacity: int) -> list[Request]:
    """The text that waits for longest, and others whose prompts are computed with it.

    Their number is a power of two, and all are padded to the first's length, none to more than
    twice its own.
    """
    first = texts[0]
    length = prompt_length(first.length, capacity)
    told = first.logprobs is not None
    alike = [
        text
        for text in texts
        if length // 2 < prompt_length(text.length, capacity) <= length
        and (text.logprobs is not None) == told
    ]
    return alike[: most_together(length, len(alike))]


def largest_batch(longest: int, capacity: int, texts: int) -> tuple[int, int]:
    """Prompts and tokens of the largest batch of prompts, for a plan of its memory."""
    ends = {prompt_length(tokens, capacity) for tokens in range(1, longest + 1)}
    shapes = [(most_together(length, texts), length) for length in ends]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
