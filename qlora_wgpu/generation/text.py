"""Incremental detokenization, stop strings, and log probabilities of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.marker_words import common_prefix

CONTEXT = 16
"""Number of tokens of context for decoding: decoders depend on neighbours only."""

_HALF = "\ufffd"  # decoded from an incomplete character
_MAX_PENDING = 32  # tokens: a character has four bytes
_UNFINISHED = 3  # maximum number of tokens that a character may lack


class IncrementalDetokenizer:
    """Decodes a stream of tokens into text.

    Tokens are pending while their text ends in an incomplete character. If they never form one,
    they are split where both parts decode as they do jointly. So each token is decoded with at most
    some forty others, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        """Starts after a context, whose text is not returned."""
        self.pending = ""  # text of pending tokens, which may still change
        self._tokenizer = tokenizer
        self._near = list(context)[-CONTEXT:]  # tokens whose text is settled
        self._before = tokenizer.decode(self._near) if self._near else ""
        self._ends = [len(self._near)]  # of complete characters among them
        self._unsettled: list[int] = []

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is final now."""
        self._unsettled.append(token)
        ids = [*self._near, *self._unsettled]
        whole = self._tokenizer.decode(ids)
        new = self._beyond(whole)
        if not new.endswith(_HALF):
            return self._settle(len(self._unsettled), whole, new)
        self.pending = new
        return self._split(whole) if len(self._unsettled) >= _MAX_PENDING else ""

    def _beyond(self, whole: str) -> str:
        """The text of pending tokens, given the text of all near tokens."""
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        begun = self._before.rstrip(_HALF)
        if begun != self._before and whole.startswith(begun):  # its last character is continued
            return whole[len(begun) :]
        # Invalid bytes change the decoding of earlier ones, whose text was already returned
        return self._tokenizer.decode(self._unsettled)

    def _split(self, whole: str) -> str:
        """Settles pending tokens that no later token can change."""
        for count in range(len(self._unsettled) - _UNFINISHED, 0, -1):
            first = self._tokenizer.decode([*self._near, *self._unsettled[:count]])
            if first + self._tokenizer.decode(self._unsettled[count:]) == whole:
                return self._settle(count, first, self._beyond(first))
        return ""

    def _settle(self, count: int, whole: str, new: str) -> str:
        self.pending = self.pending[len(new) :] if count < len(self._unsettled) else ""
        self._near += self._unsettled[:count]
        self._ends.append(len(self._near))
        self._before, self._unsettled = whole, self._unsettled[count:]
        if len(self._near) > 2 * CONTEXT:
            settled = (end for end in self._ends if end <= len(self._near) - CONTEXT)
            begin = max(settled, default=0)  # a long run of invalid bytes has no other end
            self._near, self._ends = (
                self._near[begin:],
                [e - begin for e in self._ends if e > begin],
            )
            self._before = self._tokenizer.decode(self._near)
        return new


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of the raw logits, before penalties and temperature."""

    logprob: float  # of the sampled token
    top: tuple[tuple[int, float], ...]  # most likely tokens, in descending order

    @classmethod
    def of(cls, logits: npt.NDArray[np.floating[Any]], token: int, count: int) -> TokenLogprobs:
        """Log probabilities of a token and of the ``count`` most likely ones."""
        exact = logits.astype(np.float64)
        largest = exact.max()
        exact -= largest + np.log(np.exp(exact - largest).sum())
        count = min(count, len(exact))
        best = np.argpartition(-exact, count - 1)[:count] if count else np.array([], np.int64)
        # Ties are broken by token id, as on the device
        ordered = sorted(best.tolist(), key=lambda i: (-exact[i], i))
        return cls(float(exact[token]), tuple((i, float(exact[i])) for i in ordered))


def continuation(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """Decodes tokens that follow others.

    SentencePiece decoders strip the first space of a text, so tokens must be decoded in context.
    """
    before = list(context)[-CONTEXT:]
    whole = tokenizer.decode([*before, *ids])
    return whole[common_prefix(tokenizer.decode(before), whole) :]


class TextStream:
    """Decodes a stream of tokens up to a stop string, in complete characters."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Collection[str] = (),
        context: Sequence[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self.stopped = False  # by a stop string
        self.count = 0  # of tokens
        self._tokenizer = tokenizer
        self._stop = [each for each in stop if each]
        self._special = shown or {}
        self._tokens = IncrementalDetokenizer(tokenizer, context)
        self._shown: list[str] = []
        self._held = ""  # may be the beginning of a stop string

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        pending = "" if self.stopped else self._tokens.pending
        return "".join((*self._shown, self._held, pending))

    def push(self, token: int) -> str:
        """Adds a token; returns the text that can be shown now."""
        self.count += 1
        if token in self._special:
            self._held += self._tokens.pending + self._special[token]
            self._tokens = IncrementalDetokenizer(self._tokenizer)
        else:
            self._held += self._tokens.push(token)
        # Text that was shown is not part of a stop string
        new = self._held + self._tokens.pending
        ends = [place for each in self._stop if (place := new.find(each)) >= 0]
        if ends:
            self.stopped = True
            return self._show(new[: min(ends)], "")
        # Incomplete characters, and possible beginnings of a stop string, are held back
        if self._tokens.pending:
            return ""
        held = max((overlap(new, each) for each in self._stop), default=0)
        return self._show(new[: len(new) - held], new[len(new) - held :])

    def rest(self) -> str:
        """Returns the text that was held back, after the last token."""
        if self.stopped:
            return ""
        pending, self._tokens = self._tokens.pending, IncrementalDetokenizer(self._tokenizer)
        return self._show(self._held + pending, "")

    def _show(self, text: str, held: str) -> str:
        self._shown.append(text)
        self._held = held
        return text


def overlap(text: str, other: str) -> int:
    """Length of the longest suffix of a text that is a prefix of another one."""
    sizes = range(min(len(other), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(other[:n])), 0)
