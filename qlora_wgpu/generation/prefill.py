"""Prefill: prompts of similar length are batched, in few shapes.

Results depend neither on padding nor on the other rows: a row's sums have a fixed order, and causal
attention ends at the row's own tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import bucket_length
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.model.image_inputs import ImageInputs, image_inputs
from qlora_wgpu.model.programs import DecodePrograms

_MAX_TOKENS = 512  # of a batch of prompts, padding included
_MAX_PROMPTS = 8


class Prefill:
    """A batch of prompts, computed a few dispatches at a time.

    Requests with the same prompt share its row; their parts of the KV cache are copies.
    """

    def __init__(
        self, program: DecodePrograms, groups: Sequence[Sequence[Request]], of: Architecture
    ) -> None:
        """Begins with the requests of each row."""
        self._program = program
        self._rows = {text: row for row, group in enumerate(groups) for text in group}
        firsts = [group[0] for group in groups]
        self._prompts = [text.all_ids for text in firsts]
        self._places = [text.slot for text in firsts]
        for text in self._rows:
            text.rotated_length = text.length
        program.write_prefill_inputs(self._prompts, self._places, self._images(firsts, of))
        self._pieces: Iterator[None] | None = None

    def _images(self, texts: Sequence[Request], of: Architecture) -> ImageInputs | None:
        """The prompts' images; generated placeholders are ordinary tokens."""
        if self._program.batch.image_rows is None:
            return None
        ids, mask = self._program.padded(self._prompts)
        for row, text in enumerate(texts):
            ids[row, len(text.prompt_ids) :] = -1
        return image_inputs(ids, mask, [text.images for text in texts], of)

    @property
    def texts(self) -> list[Request]:
        """The requests, those of a row next to each other."""
        return list(self._rows)

    def advance(self, seconds: float) -> bool:
        """Computes for some ``seconds``, at least a few dispatches; returns whether it is done."""
        if self._pieces is None and math.isinf(seconds):
            self._program.hidden.run()  # does not wait
            return True
        self._pieces = self._pieces or self._program.hidden.run_preemptible()
        end = time.perf_counter() + seconds
        return not any(time.perf_counter() >= end for _ in self._pieces)

    def copies(self, texts: Sequence[Request]) -> Iterator[tuple[int, int, list[int]]]:
        """Source, tokens and other places of each prompt that several of these requests have."""
        for row, (source, prompt) in enumerate(zip(self._places, self._prompts, strict=True)):
            places = [text.slot for text in texts if self._rows[text] == row]
            if others := [place for place in places if place != source]:
                yield source, len(prompt), others

    def sample(self, texts: Sequence[Request]) -> tuple[list[int], npt.NDArray[np.float32] | None]:
        """Samples the first tokens of some of its requests; with their logits, if requested."""
        program, tokens, logits = self._program, [], []
        for first in range(0, len(texts), program.samples):
            part = texts[first : first + program.samples]
            rows = [self._rows[text] for text in part]
            tokens += program.end_prompts(
                [self._prompts[row] for row in rows],
                rows,
                [text.slot for text in part],
                [text.choice for text in part],
            )
            if program.kept is not None:
                logits.append(program.logits()[: len(part)])
        return tokens, np.concatenate(logits) if logits else None


def prompt_length(tokens: int, capacity: int) -> int:
    """The padded length of a prompt."""
    return max(bucket_length(tokens, capacity), 2)


def batch_size(length: int, texts: int) -> int:
    """The batch size of prompts of a padded length, a power of two."""
    limit = min(_MAX_TOKENS // length, _MAX_PROMPTS, texts)
    return 1 << max(limit, 1).bit_length() - 1


def prefill_batch(texts: Sequence[Request], capacity: int) -> list[Request]:
    """The first request, and others that are batched with it.

    Their number is a power of two. All are padded to the first one's length, which is less than
    twice their own.
    """
    first = texts[0]
    length = prompt_length(first.length, capacity)
    with_logits = first.logprobs is not None
    similar = [
        text
        for text in texts
        if length // 2 < prompt_length(text.length, capacity) <= length
        and (text.logprobs is not None) == with_logits
        and bool(text.images) == bool(first.images)
    ]
    return similar[: batch_size(length, len(similar))]


def prompt_batches(prompts: Iterable[int], capacity: int, texts: int) -> list[tuple[int, int]]:
    """Batch sizes and padded lengths of all prefills of some prompts, the largest first."""
    lengths = {prompt_length(tokens, capacity) for tokens in prompts}
    shapes = [
        (1 << power, length)
        for length in lengths
        for power in range(batch_size(length, texts).bit_length())
    ]
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[0]))


def by_prompt(texts: Sequence[Request]) -> dict[Request, list[Request]]:
    """The requests with the same prompt as each first one, itself included."""
    groups: dict[object, list[Request]] = {}
    for text in texts:
        # Generated tokens are no images' placeholders, so the prompt's length counts, too
        images = (len(text.prompt_ids), *text.images) if text.images else ()
        key = tuple(text.all_ids), images, text.logprobs is None
        groups.setdefault(key, []).append(text)
    return {group[0]: group for group in groups.values()}


def sample_count(rows: int, length: int, texts: int) -> int:
    """How many tokens are sampled at once after a prefill of ``rows`` prompts for more requests."""
    return max(rows, min(_MAX_PROMPTS, rows * length, texts))


def largest_batch(longest: int, capacity: int, texts: int) -> tuple[int, int]:
    """Batch size and padded length of the largest prefill, for planning memory."""
    lengths = {prompt_length(tokens, capacity) for tokens in range(1, longest + 1)}
    shapes = [(batch_size(length, texts), length) for length in lengths]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
