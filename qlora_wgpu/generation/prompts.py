"""Which prompts are computed together: those of like length, in few shapes.

A text's own length decides nothing of its digits, nor do those beside it: a row's sums have one
order, and causal attention ends with the row's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.data import bucket_length
from qlora_wgpu.generation.growing_text import Text

_MOST_TOKENS = 512  # of prompts that are computed together, padding included
_MOST_PROMPTS = 8


def prompt_length(tokens: int, capacity: int) -> int:
    """The padded length of a prompt by itself."""
    return max(bucket_length(tokens, capacity), 2)


def most_together(length: int, texts: int) -> int:
    """How many prompts of a padded length are computed at once, a power of two."""
    most = min(_MOST_TOKENS // length, _MOST_PROMPTS, texts)
    return 1 << max(most, 1).bit_length() - 1


def together(texts: Sequence[Text], capacity: int) -> list[Text]:
    """The text that waits for longest, and others whose prompts are computed with it.

    Their number is a power of two, and all are padded to the first's length, none to more than
    twice its own.

    Args:
        texts: What waits, at least one.
        capacity: Most tokens of a text.
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
    """Prompts and tokens of the largest batch of prompts, for a plan of its memory.

    Args:
        longest: Tokens of the longest prompt.
        capacity: Most tokens of a text.
        texts: How many texts grow at a time.
    """
    ends = {prompt_length(tokens, capacity) for tokens in range(1, longest + 1)}
    shapes = [(most_together(length, texts), length) for length in ends]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]))
