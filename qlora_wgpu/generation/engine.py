"""Texts that grow together: each joins when it comes, has a token a turn, leaves at its end."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import bucket_length
from qlora_wgpu.errors import CheckpointError, DataError
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.generation.token_logprobs import TokenLogprobs
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.programs import Programs, TokenPrograms
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.text_copies import are_copied
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import NONE, make_seen

FinishReason = Literal["stop", "length", "cancelled"]
Logits = npt.NDArray[np.float32] | None
"""Of each text, where they are told."""


class Text:
    """A text in an engine; iterating over it computes its tokens, and those of the others.

    Attributes:
        prompt_ids: What it begins with.
        ids: The tokens so far, without the prompt's.
        told: How likely each of them was, where that is asked for.
        finish_reason: Why it ended, once it has: a stop token came, it is as long as it may be, or
            it was cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Collection[int],
        logprobs: int | None,
    ) -> None:
        """Is waiting; see ``Engine.add``."""
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.told: list[TokenLogprobs] = []
        self.logprobs = logprobs
        self.finish_reason: FinishReason | None = None if max_new_tokens else "length"
        self.sampling = sampling
        seed = sampling.seed
        self.seed = secrets.randbits(64) if seed is None else int(seed)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(stop_ids)
        self.place = -1
        self.rotated_length = 0
        self._engine = engine

    @property
    def all_ids(self) -> list[int]:
        """The prompt and all tokens so far."""
        return self.prompt_ids + self.ids

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.prompt_ids) + len(self.ids)

    def take(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Takes the token that was chosen, of these logits where they are asked for."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        if self.logprobs is not None and logits is not None:
            self.told.append(TokenLogprobs.of(logits, token, self.logprobs))
        if len(self.ids) >= self.max_new_tokens:
            self.finish_reason = "length"

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """Ends it before its next token; its place is free then."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def __iter__(self) -> Iterator[int]:
        given = 0
        while True:
            while given < len(self.ids):
                given += 1
                yield self.ids[given - 1]
            if self.finish_reason is not None:
                return
            self._engine.step()


class Engine:
    """Generates several texts at once; what comes of one does not depend on the others.

    Each has a place in a cache. Its prompt is computed by itself, then each turn computes a token
    of all texts that have a place. One thread at a time.
    """

    def __init__(
        self, model: QLoRAModel, texts: int, capacity: int, *, in_strips: bool | None = None
    ) -> None:
        """Allocates nothing yet.

        Args:
            model: Base and adapter, as they are at each turn.
            texts: Most texts that grow at a time; others wait.
            capacity: Most tokens of a text, its prompt included.
            in_strips: Whether copies of the weights are made that software GPUs read faster; by
                default as ``model/text_copies.py`` says of this machine.

        Raises:
            OutOfMemoryError: If there shall be copies and they have no room now.
        """
        self._model = model
        if in_strips is None:
            in_strips = are_copied(model.layout, model.device.budget)
        self._cache = KVCache(capacity, texts, in_strips=in_strips)
        self._seen = make_seen(texts, model.architecture.vocab_size)
        self._programs: WeakKeyDictionary[Programs, dict[tuple[int, int, bool], TokenPrograms]]
        self._programs = WeakKeyDictionary()
        self._waiting: deque[Text] = deque()
        self._growing: list[Text] = []
        self._free = list(range(texts))[::-1]

    @property
    def capacity(self) -> int:
        """Most tokens of a text, its prompt included."""
        return self._cache.capacity

    @property
    def texts(self) -> int:
        """Most texts that grow at a time."""
        return self._cache.texts

    @property
    def is_idle(self) -> bool:
        """Whether no text waits or grows."""
        return not self._waiting and not self._growing

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        logprobs: int | None = None,
    ) -> Text:
        """A text that waits for its turn.

        Args:
            prompt_ids: Its prompt; at least one token.
            sampling: How its tokens are chosen; the likeliest by default.
            max_new_tokens: Most tokens to add; fewer where the capacity ends.
            stop_ids: Tokens that end it; they are not its own.
            logprobs: Of how many of the likeliest tokens log probabilities are told beside the
                chosen one's; by default nothing is.

        Raises:
            DataError: If the prompt is empty or leaves no room.
            ShapeError: If an id is outside the vocabulary.
            ConfigError: If ``max_new_tokens`` is no count.
        """
        ids = [int(token) for token in prompt_ids]
        check_count("max_new_tokens", max_new_tokens)
        if not ids:
            raise DataError("the prompt is empty: give at least one token to go on from")
        if len(ids) >= self.capacity and max_new_tokens:
            raise DataError(
                f"the prompt has {len(ids)} tokens, and a text may have {self.capacity} in all"
            )
        batch_encoding.checked_ids([ids], self._model.architecture.vocab_size)
        count = min(max_new_tokens, self.capacity - len(ids))
        text = Text(self, ids, sampling or Sampling(), count, stop_ids, logprobs)
        if text.finish_reason is None:
            self._waiting.append(text)
        return text

    def step(self) -> list[Text]:
        """Gives each text its next token, those that wait and find a place their first.

        Returns:
            The texts that got one, or ended.

        Raises:
            CheckpointError: If a text's logits are not finite; it has left.
            DeviceError: If the driver refuses something.
        """
        with self._model.device.in_turn:
            return self._step()

    def _step(self) -> list[Text]:
        for text in [text for text in self._growing if text.finish_reason is not None]:
            self._leave(text)
        turning = [text for text in self._growing if self._turns(text)]
        going = [text for text in self._growing if text not in turning]
        if going:
            self._take(going, *self._next_tokens(going, turning))
        while self._waiting and self._free:
            text = self._waiting.popleft()
            if text.finish_reason is None:
                text.place = self._free.pop()
                self._growing.append(text)
                turning.append(text)
        for text in turning:
            self._take([text], *self._read(text))
        return going + turning

    def _take(self, texts: Sequence[Text], tokens: Sequence[int], logits: Logits) -> None:
        for row, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            if token == NONE:
                text.cancel()
            else:
                text.take(token, None if logits is None else logits[row])
            if text.finish_reason is not None:
                self._leave(text)
        if NONE in tokens:
            raise CheckpointError(
                "the model's logits are not finite: its adapter, or the base model, is damaged"
            )

    def _leave(self, text: Text) -> None:
        self._growing.remove(text)
        self._free.append(text.place)

    def _turns(self, text: Text) -> bool:
        """Whether its next token changes how its earlier ones are rotated."""
        made = [program for each in self._programs.values() for program in each.values()]
        rotations = {r for program in made for r in program.batch.angles}
        return not all(r.is_same(text.length, text.rotated_length) for r in rotations)

    def _read(self, text: Text) -> tuple[list[int], Logits]:
        """Computes all of a text, and chooses the token after it."""
        ids = text.all_ids
        length = max(bucket_length(len(ids), self.capacity), 2)
        row, mask = np.zeros((2, 1, length), np.int64)
        row[0, : len(ids)], mask[0, : len(ids)] = ids, 1
        text.rotated_length = len(ids)
        program = self._program(1, length, told=text.logprobs is not None)
        program.note_seen(text.place, ids)
        places = np.array([[text.place]])
        tokens = program.run(
            row, mask, np.zeros_like(places), places, [text.sampling], [text.seed],
            [len(text.ids)], last=len(ids) - 1,
        )  # fmt: skip
        return tokens, None if program.kept is None else program.logits()

    def _next_tokens(
        self, texts: Sequence[Text], others: Sequence[Text]
    ) -> tuple[list[int], Logits]:
        """Computes a token of each text, and chooses the one after it.

        Args:
            texts: Those texts.
            others: What has a place, too, and will be read anew.
        """
        rows = next(size for size in self.sizes if size >= len(texts))
        extra = rows - len(texts)
        # Rows that no text has write at a place of which nothing is kept.
        spares = [*self._free, *(text.place for text in others)]
        ids = [text.all_ids[-1] for text in texts] + [0] * extra
        past = [text.length - 1 for text in texts] + [self.capacity] * extra
        places = [text.place for text in texts] + spares[:1] * extra
        column = np.array([ids, past, places])[..., None]
        samplings = [text.sampling for text in texts] + [Sampling()] * extra
        program = self._program(rows, 1, told=any(text.logprobs is not None for text in texts))
        tokens = program.run(
            column[0], np.ones_like(column[0]), column[1], column[2], samplings,
            [text.seed for text in texts] + [0] * extra,
            [len(text.ids) for text in texts] + [0] * extra,
        )  # fmt: skip
        return tokens[: len(texts)], None if program.kept is None else program.logits()

    @property
    def sizes(self) -> list[int]:
        """How many rows are computed at a time, the fewest that texts have room in."""
        return batch_sizes(self.texts)

    def _program(self, rows: int, length: int, *, told: bool) -> TokenPrograms:
        # An adapter of another shape has programs of its own, over the same cache.
        programs, key = self._model.programs, (rows, length, told)
        made = self._programs.setdefault(programs, {})
        if key not in made:
            made[key] = programs.tokens(rows, length, self._cache, self._seen, told=told)
        return made[key]


def batch_sizes(texts: int) -> list[int]:
    """Powers of two below a number of texts, and it."""
    return [1 << n for n in range((texts - 1).bit_length())] + [texts]
