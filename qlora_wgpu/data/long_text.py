"""Documents as token ids, in pieces: what a tokenizer takes grows with what it is given at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.limits import MAX_AT_ONCE

# Before a word that begins a line: there, tokenizers that split text at all split it, too.
_SEAM = re.compile(r"\n(?=\S)")


def pieces_of(parts: Iterable[str]) -> Iterator[str]:
    """Cuts a text into pieces for a tokenizer: one, unless it is large.

    Args:
        parts: The text, cut anywhere.

    Yields:
        Pieces of at most ``MAX_AT_ONCE`` bytes that end where a line does, if there is one.
    """
    rest = ""
    for part in parts:
        rest += part
        while len(rest) > MAX_AT_ONCE or size_of(rest) > MAX_AT_ONCE:
            end = _seam(rest)
            yield rest[:end]
            rest = rest[end:]
    yield rest


def document_ids(
    tokenizer: Tokenizer, parts: Iterable[str], add_special_tokens: bool = True
) -> Iterator[list[int]]:
    """Token ids of a document, piece by piece.

    Args:
        tokenizer: The model's tokenizer.
        parts: The text, cut anywhere.
        add_special_tokens: Whether the document, not every piece, begins and ends as the tokenizer
            says.
    """
    pieces = pieces_of(parts)
    piece = next(pieces)
    following = next(pieces, None)
    if following is None:
        yield tokenizer.encode(piece, add_special_tokens)
        return
    front, back = tokenizer.added_around if add_special_tokens else ([], [])
    yield [*front, *tokenizer.encode(piece, False)]
    while following is not None:
        piece, following = following, next(pieces, None)
        yield [*tokenizer.encode(piece, False), *(back if following is None else ())]


def size_of(text: str) -> int:
    """Bytes of a text."""
    return len(text) if text.isascii() else len(_bytes(text))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # the tokenizer says what is wrong with it


def _seam(text: str) -> int:
    """Where the first piece of a text ends: after its last line, else its last word that fits."""
    longest = len(_bytes(text)[:MAX_AT_ONCE].decode("utf-8", "ignore"))
    head = text[: longest + 1]
    seams = [match.end() for match in _SEAM.finditer(head, longest // 2)]
    return next((end for end in reversed(seams) if end <= longest), 0) or (
        head.rfind(" ", longest // 2, longest) if " " in head[longest // 2 : longest] else longest
    )
