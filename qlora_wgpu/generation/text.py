"""The text of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.masking import common_prefix

_CONTEXT = 16  # tokens: decoders look at their neighbours only


def continuation(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens as it goes on after that of others.

    By themselves tokens may lose their first space: decoders of SentencePiece's kind leave out the
    one that stands at the beginning of a text.

    Args:
        tokenizer: The model's tokenizer.
        context: The tokens before; none where the text begins.
        ids: The tokens.
    """
    before = list(context)[-_CONTEXT:]
    whole = tokenizer.decode([*before, *ids])
    return whole[common_prefix(tokenizer.decode(before), whole) :]
