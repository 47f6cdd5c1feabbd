"""The text of generated tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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


class TextStream:
    """The text of tokens as they come: whole characters, and nothing of what ends it.

    Attributes:
        text: All of it so far, without what ended it.
        stopped: Whether a stop string came.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Collection[str] = (),
        context: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """Begins with no token.

        Args:
            tokenizer: The model's tokenizer.
            stop: Strings that end the text, which are no part of it; empty ones end nothing.
            context: Tokens of the text that they go on with.
            shown: Special tokens that are part of the text, and what they are there.
        """
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = [each for each in stop if each]
        self._context = context
        self._special = shown or {}
        self._ids: list[int] = []
        self._before, self._first = "", 0  # the text up to the last special token, and past it
        self._shown = 0

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def push(self, token: int) -> str:
        """Takes a token; what can be shown by now and was not."""
        self._ids.append(token)
        if token in self._special:
            self._before, self._first = self._decoded(-1) + self._special[token], self.count
        self.text = self._decoded(self.count)
        ends = [place for each in self._stop if (place := self.text.find(each)) >= 0]
        if ends:
            self.stopped, self.text = True, self.text[: min(ends)]
            return self.rest()
        # Half a character decodes to the replacement sign: wait for its other half. What may be
        # the beginning of the end is held back, too.
        if self.text.endswith("\ufffd"):
            return ""
        held = max((beginning(self.text, each) for each in self._stop), default=0)
        return self._show(len(self.text) - held)

    def _decoded(self, end: int) -> str:
        context = () if self._first else self._context
        return self._before + continuation(self._tokenizer, context, self._ids[self._first : end])

    def rest(self) -> str:
        """What was held back, once no token follows."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        shown, self._shown = self._shown, max(self._shown, end)
        return self.text[shown : self._shown]


def beginning(text: str, other: str) -> int:
    """The number of characters at the end of a text that begin another one."""
    sizes = range(min(len(other), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(other[:n])), 0)
