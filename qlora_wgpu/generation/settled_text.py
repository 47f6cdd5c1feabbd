"""The text of tokens as they come, each decoded beside a few that came before it."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.data import Tokenizer

CONTEXT = 16
"""Tokens that are decoded beside others: decoders look at their neighbours only."""

_HALF = "\ufffd"  # what half a character decodes to
_MOST_WAIT = 32  # tokens: a character has four bytes
_UNFINISHED = 3  # tokens that a character may lack


class SettledText:
    """What tokens add to the text of those before them.

    Tokens wait while their text ends in half a character. A text whose ids are no characters at all
    is cut where both sides decode as they do together. So each token is decoded with some forty
    others at most, however long the text is.

    Attributes:
        waiting: The text of the tokens that wait, which may still change.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Begins behind a context, of which nothing is told."""
        self.waiting = ""
        self._tokenizer = tokenizer
        self._near = list(context)[-CONTEXT:]  # tokens whose text is settled
        self._before = tokenizer.decode(self._near) if self._near else ""
        self._ends = [len(self._near)]  # of whole characters among them
        self._unsettled: list[int] = []

    def push(self, token: int) -> str:
        """Takes a token; the text that is settled by it."""
        self._unsettled.append(token)
        ids = [*self._near, *self._unsettled]
        whole = self._tokenizer.decode(ids)
        new = self._beyond(whole)
        if not new.endswith(_HALF):
            return self._settle(len(self._unsettled), whole, new)
        self.waiting = new
        return self._cut(whole) if len(self._unsettled) >= _MOST_WAIT else ""

    def _beyond(self, whole: str) -> str:
        """The text of the tokens that wait, of all of it with those near them."""
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        begun = self._before.rstrip(_HALF)
        if begun != self._before and whole.startswith(begun):  # its last character goes on
            return whole[len(begun) :]
        # Bytes that are no character spoil those before them, which were told as they were.
        return self._tokenizer.decode(self._unsettled)

    def _cut(self, whole: str) -> str:
        """Settles what no later token changes, of tokens that are no characters."""
        for count in range(len(self._unsettled) - _UNFINISHED, 0, -1):
            first = self._tokenizer.decode([*self._near, *self._unsettled[:count]])
            if first + self._tokenizer.decode(self._unsettled[count:]) == whole:
                return self._settle(count, first, self._beyond(first))
        return ""

    def _settle(self, count: int, whole: str, new: str) -> str:
        self.waiting = self.waiting[len(new) :] if count < len(self._unsettled) else ""
        self._near += self._unsettled[:count]
        self._ends.append(len(self._near))
        self._before, self._unsettled = whole, self._unsettled[count:]
        if len(self._near) > 2 * CONTEXT:
            begin = max(end for end in self._ends if end <= len(self._near) - CONTEXT)
            self._near, self._ends = (
                self._near[begin:],
                [e - begin for e in self._ends if e > begin],
            )
            self._before = self._tokenizer.decode(self._near)
        return new
