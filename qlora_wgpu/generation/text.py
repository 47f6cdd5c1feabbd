"""The text of tokens as they come, and their log probabilities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.marker_words import common_prefix

CONTEXT = 16
"""Tokens that are decoded beside others: decoders look at their neighbours only."""

_HALF = "\ufffd"  # what half a character decodes to
_MOST_WAIT = 32  # tokens: a character has four bytes
_UNFINISHED = 3  # tokens that a character may lack


class IncrementalDetokenizer:
    """What tokens add to the text of those before them.

    Tokens wait while their text ends in half a character. A text whose ids are no characters at all
    is cut where both sides decode as they do together. So each token is decoded with some forty
    others at most, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Begins behind a context, whose text is not returned."""
        self.waiting = ""  # the text of the tokens that wait, which may still change
        self._tokenizer = tokenizer
        self._near = list(context)[-CONTEXT:]  # tokens whose text is settled
        self._before = tokenizer.decode(self._near) if self._near else ""
        self._ends = [len(self._near)]  # of whole characters among them
        self._unsettled: list[int] = []

    def push(self, token: int) -> str:
        """Takes a token; returns the text that it settles."""
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
        # Bytes that are no character spoil those before them, whose text was returned already.
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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities by the model's own logits, before penalties, temperature and the like."""

    logprob: float  # the chosen token's
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and theirs, the likeliest first

    @classmethod
    def of(cls, logits: npt.NDArray[np.floating[Any]], token: int, count: int) -> TokenLogprobs:
        """Those of a token, and of so many of the likeliest."""
        exact = logits.astype(np.float64)
        largest = exact.max()
        exact -= largest + np.log(np.exp(exact - largest).sum())
        count = min(count, len(exact))
        likeliest = np.argpartition(-exact, count - 1)[:count] if count else np.array([], np.int64)
        # Of equals the first comes first, as in the device's choice.
        ordered = sorted(likeliest.tolist(), key=lambda i: (-exact[i], i))
        return cls(float(exact[token]), tuple((i, float(exact[i])) for i in ordered))


def continuation(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens as it goes on after that of others.

    By themselves tokens may lose their first space: decoders of SentencePiece's kind leave out the
    one that stands at the beginning of a text.
    """
    before = list(context)[-CONTEXT:]
    whole = tokenizer.decode([*before, *ids])
    return whole[common_prefix(tokenizer.decode(before), whole) :]


class TextStream:
    """The text of tokens as they come: whole characters, and nothing of what ends it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Collection[str] = (),
        context: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """Begins with no token."""
        self.stopped = False  # whether a stop string came
        self.count = 0  # tokens so far
        self._tokenizer = tokenizer
        self._stop = [each for each in stop if each]
        self._special = shown or {}
        self._tokens = IncrementalDetokenizer(tokenizer, context)
        self._shown: list[str] = []
        self._held = ""  # what may be the beginning of the end

    @property
    def text(self) -> str:
        """All of it so far, without what ended it."""
        waiting = "" if self.stopped else self._tokens.waiting
        return "".join((*self._shown, self._held, waiting))

    def push(self, token: int) -> str:
        """Takes a token; returns the text that can be shown now."""
        self.count += 1
        if token in self._special:
            self._held += self._tokens.waiting + self._special[token]
            self._tokens = IncrementalDetokenizer(self._tokenizer)
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
        waiting, self._tokens = self._tokens.waiting, IncrementalDetokenizer(self._tokenizer)
        return self._show(self._held + waiting, "")

    def _show(self, text: str, held: str) -> str:
        self._shown.append(text)
        self._held = held
        return text


def beginning(text: str, other: str) -> int:
    """The length of the longest end of a text that begins another one."""
    sizes = range(min(len(other), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(other[:n])), 0)
