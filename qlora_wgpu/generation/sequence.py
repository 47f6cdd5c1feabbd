"""A request of an engine: one text, from its prompt to its end."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.generation.text import TokenLogprobs
from qlora_wgpu.model.programs import Choice

FinishReason = Literal["stop", "length", "cancelled"]


class Request:
    """A text in an engine; iterating over it computes its tokens, and those of the others."""

    def __init__(
        self,
        step: Callable[[], object],
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Collection[int],
        logprobs: int | None,
    ) -> None:
        """Is waiting; see ``Engine.add``."""
        self.prompt_ids = prompt_ids  # what it begins with
        self.ids: list[int] = []  # the tokens so far, without the prompt's
        self.told: list[TokenLogprobs] = []  # of each of them, where they are asked for
        self.logprobs = logprobs
        # Why it ended, once it has.
        self.finish_reason: FinishReason | None = None if max_new_tokens else "length"
        self.stop_token: int | None = None  # the one of ``stop_ids`` that ended it
        self.sampling = sampling
        seed = sampling.seed
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.place = -1
        self.turn = 0
        self.ahead: deque[int] = deque()
        self.rotated_length = 0
        self._step = step

    @property
    def all_ids(self) -> list[int]:
        """The prompt and all tokens so far."""
        return self.prompt_ids + self.ids

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def choice(self) -> Choice:
        """How its next token is chosen."""
        return Choice(self.sampling, self.seed, len(self.ids))

    def take(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Takes the token that was chosen, of these logits where they are asked for."""
        if token in self.stop_ids:
            self.finish_reason, self.stop_token = "stop", token
            return
        self.ids.append(token)
        if self.logprobs is not None and logits is not None:
            self.told.append(TokenLogprobs.of(logits, token, self.logprobs))
        if len(self.ids) >= self.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self) -> None:
        """Ends it before its next token; its place is free then."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def __iter__(self) -> Iterator[int]:
        given = 0
        while True:
            while given < len(self.ids):
                given += 1
                yield self.ids[given - 1]
            if self.finish_reason is not None:
                return
            self._step()
