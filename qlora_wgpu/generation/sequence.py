"""A request of an engine."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.generation.text import TokenLogprobs
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.programs import Choice

FinishReason = Literal["stop", "length", "cancelled"]


class Request:
    """A prompt and its generated tokens; iterating runs the engine for all its requests."""

    def __init__(
        self,
        step: Callable[[], object],
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Collection[int],
        logprobs: int | None,
        images: Sequence[ImageFeatures] = (),
        rope_delta: int = 0,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.images = images  # of the prompt
        self.rope_delta = rope_delta  # what M-RoPE adds to positions of generated tokens
        self.ids: list[int] = []  # generated tokens
        self.token_logprobs: list[TokenLogprobs] = []  # of each of them, if requested
        self.logprobs = logprobs
        # Set when it has ended
        self.finish_reason: FinishReason | None = None if max_new_tokens else "length"
        self.stop_token: int | None = None  # the one of ``stop_ids`` that ended it
        self.sampling = sampling
        seed = sampling.seed
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.slot = -1
        self.turn = 0
        self.ahead: deque[int] = deque()
        self.rotated_length = 0
        self._step = step

    @property
    def all_ids(self) -> list[int]:
        """Tokens of the prompt, and generated ones."""
        return self.prompt_ids + self.ids

    @property
    def length(self) -> int:
        """Number of tokens so far, prompt included."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def choice(self) -> Choice:
        """The sampling of its next token."""
        return Choice(self.sampling, self.seed, len(self.ids))

    def take(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Appends a sampled token."""
        if token in self.stop_ids:
            self.finish_reason, self.stop_token = "stop", token
            return
        self.ids.append(token)
        if self.logprobs is not None and logits is not None:
            self.token_logprobs.append(TokenLogprobs.of(logits, token, self.logprobs))
        if len(self.ids) >= self.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self) -> None:
        """Ends it before its next token, which frees its slot."""
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
