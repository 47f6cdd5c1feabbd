"""Continuous batching: texts join when they come, get a token a turn, and leave at their end."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError, DataError
from qlora_wgpu.generation.prefill import Prefill, prefill_batch, prompt_length
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.memory_plan import are_copied
from qlora_wgpu.model.programs import Choice, DecodePrograms, Programs
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import NONE, make_seen

_AHEAD_SECONDS = 0.12  # of decoding before its tokens are looked at
_PROMPT_SECONDS = 0.25  # of prefill between two tokens of other texts

Logits = npt.NDArray[np.float32] | None
"""Of each text, where they are asked for."""


class Engine:
    """Generates several texts at once; none depends on the others.

    Each has a place in a cache. Its prompt is computed, together with others of similar length;
    then each turn gives a token to all texts that have a place. Where turns are short, several are
    computed at once, so that the device need not wait for the host, which drops what comes after a
    text's end. One thread at a time.
    """

    def __init__(
        self, model: QLoRAModel, texts: int, capacity: int, *, packs_weights: bool | None = None
    ) -> None:
        """Allocates nothing yet, for so many texts at a time of so many tokens, prompts included.

        Base and adapter are as they are at each turn: where the adapter changes, texts are computed
        anew. Weights are packed for software GPUs, which takes memory, by default where the machine
        has room (``model/memory_plan.py``).
        """
        self._model = model
        if packs_weights is None:
            packs_weights = are_copied(model.layout, model.device.budget)
        self._cache = KVCache(capacity, texts, packs_weights=packs_weights)
        self._seen = make_seen(texts, model.architecture.vocab_size)
        self._programs: WeakKeyDictionary[Programs, dict[tuple[int, int, bool], DecodePrograms]]
        self._programs = WeakKeyDictionary()
        self._waiting: list[Request] = []  # in the order of their turns
        self._turn = 0  # of the text that began last
        self._growing: list[Request] = []
        self._to_prefill: list[Request] = []  # those of them that have to be computed, or again
        self._prefill: Prefill | None = None  # of some of these, while it pauses
        self._free = list(range(texts))[::-1]  # places
        self._seconds = math.inf  # of a turn
        self._version = model.parameters_version

    @property
    def capacity(self) -> int:
        """Most tokens of a text, its prompt included."""
        return self._cache.capacity

    @property
    def texts(self) -> int:
        """Most texts at a time."""
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
        number: int = 0,
    ) -> Request:
        """Adds a text, which waits for its turn; by default the likeliest tokens are taken.

        It ends after ``max_new_tokens``, where the capacity does, or before one of ``stop_ids``.
        Beside each token's log probability so many of the likeliest's are kept. ``number`` is how
        many texts of the same request come before it: requests take turns, so that one for many
        texts does not hold up those after it.
        """
        ids = [int(token) for token in prompt_ids]
        max_new_tokens = check_count("max_new_tokens", max_new_tokens)
        if not ids:
            raise DataError("the prompt is empty: give at least one token to go on from")
        self.check_room(len(ids), max_new_tokens)
        vocab = self._model.architecture.vocab_size
        batch_encoding.checked_ids([ids], vocab)
        sampling = sampling or Sampling()
        sampling.check_tokens(vocab)
        count = min(max_new_tokens, self.capacity - len(ids))
        text = Request(self.step, ids, sampling, count, stop_ids, logprobs)
        if text.finish_reason is None:
            text.turn = self._turn + 1 + number
            insort(self._waiting, text, key=lambda each: each.turn)
        return text

    def check_room(self, prompt_tokens: int, max_new_tokens: int | None) -> None:
        """Refuses a prompt that leaves no room for an answer, if there is to be one."""
        if prompt_tokens >= self.capacity and max_new_tokens != 0:
            raise DataError(
                f"the prompt has {prompt_tokens} tokens, and a text may have {self.capacity} in all"
            )

    def step(self) -> list[Request]:
        """Gives each text its next token, and waiting texts that find a place their first."""
        with self._model.device.in_turn:
            return self._step()

    def _step(self) -> list[Request]:
        for text in [text for text in self._growing if text.finish_reason is not None]:
            self._leave(text)
        self._find_stale()
        if any(text.ahead for text in self._growing):  # as many of each
            going = self._going()
            self._append_tokens(going, [text.ahead.popleft() for text in going], None)
            return going
        self._to_prefill += [text for text in self._going() if self._rope_changes(text)]
        going = self._going()
        if going:
            tokens, logits = self._next_tokens(going)
            for text, chosen in zip(going, tokens, strict=True):
                text.ahead.extend(chosen)
            self._append_tokens(going, [text.ahead.popleft() for text in going], logits)
        if any(text.ahead for text in self._growing):
            return going
        while self._waiting and self._free:
            text = self._waiting.pop(0)
            self._turn = max(self._turn, text.turn)
            if text.finish_reason is None:
                text.place = self._free.pop()
                self._growing.append(text)
                self._to_prefill.append(text)
        return going + self._prefill_prompts(_PROMPT_SECONDS if going else math.inf)

    def _going(self) -> list[Request]:
        """Texts whose prompts are computed."""
        return [text for text in self._growing if text not in self._to_prefill]

    def _find_stale(self) -> None:
        """Has all texts computed anew where the adapter has changed."""
        if self._version == self._model.parameters_version:
            return
        self._version = self._model.parameters_version
        for text in self._growing:
            text.ahead.clear()
        self._to_prefill, self._prefill = list(self._growing), None

    def _append_tokens(
        self, texts: Sequence[Request], tokens: Sequence[int], logits: Logits
    ) -> None:
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

    def _leave(self, text: Request) -> None:
        text.ahead.clear()
        self._growing.remove(text)
        if text in self._to_prefill:
            self._to_prefill.remove(text)
        self._free.append(text.place)

    def _rope_changes(self, text: Request) -> bool:
        """Whether the rotation of its earlier tokens changes with its length."""
        made = [program for each in self._programs.values() for program in each.values()]
        rotations = {r for program in made for r in program.batch.angles}
        return not all(r.is_same(text.length, text.rotated_length) for r in rotations)

    def _prefill_prompts(self, seconds: float) -> list[Request]:
        """Computes the texts that wait for it, and chooses the tokens after them."""
        done: list[Request] = []
        end = time.perf_counter() + seconds
        while self._to_prefill:
            if self._prefill is None or not set(self._prefill.texts) & set(self._to_prefill):
                self._prefill = self._begin_prefill()
            prefill, self._prefill = self._prefill, None
            if not prefill.go_on(end - time.perf_counter() if self._pauses else math.inf):
                self._prefill = prefill
                break
            tokens, logits = prefill.end()
            # Texts that were cancelled meanwhile have left.
            rows = [row for row, text in enumerate(prefill.texts) if text in self._to_prefill]
            texts = [prefill.texts[row] for row in rows]
            self._to_prefill = [text for text in self._to_prefill if text not in texts]
            self._append_tokens(
                texts, [tokens[row] for row in rows], None if logits is None else logits[rows]
            )
            done += texts
            if time.perf_counter() >= end:
                break
        return done

    @property
    def _pauses(self) -> bool:
        """Whether new tokens may come in the middle of a prompt, whose states would be partial."""
        return not self._cache.states

    @property
    def _beside(self) -> bool:
        """Whether prompts may be computed together: states are kept for one text at a time."""
        return bool(self._cache.layers) and not self._cache.states

    def _begin_prefill(self) -> Prefill:
        texts = (
            prefill_batch(self._to_prefill, self.capacity) if self._beside else self._to_prefill[:1]
        )
        length = prompt_length(max(text.length for text in texts), self.capacity)
        told = texts[0].logprobs is not None
        return Prefill(self._program(len(texts), length, told=told), texts)

    def _next_tokens(self, texts: Sequence[Request]) -> tuple[list[list[int]], Logits]:
        """Computes the last token of each text and chooses the one after it, or several.

        Where a text's logits are asked for, it is one: only those of the last are kept.
        """
        rows = next(size for size in self.sizes if size >= len(texts))
        extra = rows - len(texts)
        # Rows without a text write at a place that holds nothing yet.
        spares = [*self._free, *(text.place for text in self._to_prefill)]
        ids = [text.all_ids[-1] for text in texts] + [0] * extra
        past = [text.length - 1 for text in texts] + [self.capacity] * extra
        places = [text.place for text in texts] + spares[:1] * extra
        column = np.array([ids, past, places])[..., None]
        choices = [text.choice for text in texts] + [Choice(Sampling(), 0, 0)] * extra
        told = any(text.logprobs is not None for text in texts)
        program = self._program(rows, 1, told=told)
        alone = told or self._to_prefill or (self._waiting and self._free)
        count = 1 if alone else min(self._turns_at_once(texts), program.most_ahead)
        begin = time.perf_counter()
        tokens = program.run(column[0], column[1], column[2], choices, count=count)
        self._seconds = (time.perf_counter() - begin) / count
        return tokens[: len(texts)], None if program.kept is None else program.logits()

    def _turns_at_once(self, texts: Sequence[Request]) -> int:
        """How many turns are computed at once: few enough in time, and within every text's end."""
        least = min(text.max_new_tokens - len(text.ids) for text in texts)
        return max(min(least, int(_AHEAD_SECONDS / max(self._seconds, 1e-4))), 1)

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of decoding; each turn takes the smallest that has room for its texts."""
        return batch_sizes(self.texts)

    def _program(self, rows: int, length: int, *, told: bool) -> DecodePrograms:
        # An adapter of another shape has programs of its own, over the same cache.
        programs, key = self._model.programs, (rows, length, told)
        made = self._programs.setdefault(programs, {})
        if key not in made:
            made[key] = programs.tokens(rows, length, self._cache, self._seen, keep_logits=told)
        return made[key]


def batch_sizes(texts: int) -> list[int]:
    """The powers of two below a number of texts, and the number itself."""
    return [1 << n for n in range((texts - 1).bit_length())] + [texts]
