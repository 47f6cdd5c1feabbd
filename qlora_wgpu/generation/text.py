"""The text of generated tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.marker_words import common_prefix
from qlora_wgpu.generation.settled_text import CONTEXT, SettledText


def continuation(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens as it goes on after that of others.

    By themselves tokens may lose their first space: decoders of SentencePiece's kind leave out the
    one that stands at the beginning of a text.

    Args:
        tokenizer: The model's tokenizer.
        context: The tokens before; none where the text begins.
        ids: The tokens.
    """
    before = list(context)[-CONTEXT:]
    whole = tokenizer.decode([*before, *ids])
    return whole[common_prefix(tokenizer.decode(before), whole) :]


class TextStream:
    """The text of tokens as they come: whole characters, and nothing of what ends it.

    Attributes:
        stopped: Whether a stop string came.
        count: Tokens so far.
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
        self.stopped = False
        self.count = 0
        self._tokenizer = tokenizer
        self._stop = [each for each in stop if each]
        self._special = shown or {}
        self._tokens = SettledText(tokenizer, context)
        self._shown: list[str] = []
        self._held = ""  # what may be the beginning of the end

    @property
    def text(self) -> str:
        """All of it so far, without what ended it."""
        waiting = "" if self.stopped else self._tokens.waiting
        return "".join((*self._shown, self._held, waiting))

    def push(self, token: int) -> str:
        """Takes a token; what can be shown by now and was not."""
        self.count += 1
        if token in self._special:
            self._held += self._tokens.waiting + self._special[token]
            self._tokens = SettledText(self._tokenizer)
        else:
            self._held += self._tokens.push(token)
        # What was shown is no part of a stop string.
        new = self._held + self._tokens.waiting
        ends = [place for each in self._stop if (place := new.find(each)) >= 0]
        if ends:
            self.stopped = True
            return self._show(new[: min(ends)], "")
        # Half a character decodes to the replacement sign: wait for its other half. What may be
        # the beginning of the end is held back, too.
        if self._tokens.waiting:
            return ""
        held = max((beginning(new, each) for each in self._stop), default=0)
        return self._show(new[: len(new) - held], new[len(new) - held :])

    def rest(self) -> str:
        """What was held back, once no token follows."""
        if self.stopped:
            return ""
        waiting, self._tokens = self._tokens.waiting, SettledText(self._tokenizer)
        return self._show(self._held + waiting, "")

    def _show(self, text: str, held: str) -> str:
        self._shown.append(text)
        self._held = held
        return text


def beginning(text: str, other: str) -> int:
    """The number of characters at the end of a text that begin another one."""
    sizes = range(min(len(other), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(other[:n])), 0)
