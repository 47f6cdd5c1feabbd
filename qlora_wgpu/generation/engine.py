"""Continuous batching: requests join and leave the batch at any step."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Collection, Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError, DataError
from qlora_wgpu.generation.plans import batch_sizes, fitting_sequences
from qlora_wgpu.generation.prefill import (
    Prefill,
    by_prompt,
    prefill_batch,
    prompt_length,
    sample_count,
)
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.model.image_inputs import ImageFeatures, image_inputs, rope_delta
from qlora_wgpu.model.memory_plan import are_copied
from qlora_wgpu.model.programs import Choice, CopyProgram, DecodePrograms, Programs
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import NONE, make_seen

_AHEAD_SECONDS = 0.12  # of decoding before tokens are read back
_PREFILL_SECONDS = 0.25  # of prefill between two tokens of other requests

_Shape = tuple[int, int, int, bool, bool]
"""Of programs: rows, tokens, samples, whether logits are kept, and whether rows have images."""

Logits = npt.NDArray[np.float32] | None
"""Logits of each request, if requested."""


class Engine:
    """Generates for several requests at once; results do not depend on the batch.

    Each request has a slot of the KV cache. Its prompt is prefilled, batched with others of similar
    length, and only once for all requests with the same one; then each step decodes a token of all
    requests in a slot. If steps are short, several are submitted at once, so that the device does
    not wait for the host; tokens after a request's end are dropped. Not thread-safe.
    """

    def __init__(
        self, model: QLoRAModel, texts: int, capacity: int, *, packs_weights: bool | None = None
    ) -> None:
        """Sets the maximum number of requests at a time, and of tokens of each, prompt included.

        There are fewer requests at a time if memory or a binding's size does not allow them all
        (``texts`` has the number). Memory is allocated later. If the adapter changes, the KV cache
        is recomputed. Packed copies of the weights for software GPUs take memory: by default they
        are used if there is enough (``model/memory_plan.py``).
        """
        self._model = model
        if packs_weights is None:
            packs_weights = are_copied(model.layout, model.device.budget)
        texts = fitting_sequences(model.layout, model.device, capacity, texts)
        self._cache = KVCache(capacity, texts, packs_weights=packs_weights)
        self._seen = make_seen(texts + 1, model.architecture.vocab_size)
        self._programs: WeakKeyDictionary[Programs, dict[_Shape, DecodePrograms]]
        self._programs = WeakKeyDictionary()
        self._waiting: list[Request] = []  # sorted by turn
        self._turn = 0  # of the request that started last
        self._active: list[Request] = []
        self._to_prefill: list[Request] = []  # active requests without a valid KV cache
        self._prefill: Prefill | None = None  # an interrupted one
        self._free = list(range(texts))[::-1]  # slots
        self._seconds = math.inf  # of a decoding step
        self._version = model.parameters_version

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a request, prompt included."""
        return self._cache.capacity

    @property
    def texts(self) -> int:
        """Maximum number of requests at a time."""
        return self._cache.texts

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests."""
        return not self._waiting and not self._active

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        logprobs: int | None = None,
        number: int = 0,
        images: Sequence[ImageFeatures] = (),
    ) -> Request:
        """Queues a request; sampling is greedy by default.

        It ends after ``max_new_tokens``, at the engine's capacity, or before one of ``stop_ids``.
        With ``logprobs``, log probabilities of each token and of that many most likely ones are
        kept. ``number`` is the index among the answers of a client's request: clients take turns,
        so that many answers of one do not delay the others. ``images`` are those of the prompt's
        image tokens, in order.
        """
        max_new_tokens = check_count("max_new_tokens", max_new_tokens)
        ids = self.checked(prompt_ids, max_new_tokens)
        sampling = sampling or Sampling()
        sampling.check_tokens(self._model.architecture.vocab_size)
        count = min(max_new_tokens, self.capacity - len(ids))
        delta = self._rope_delta(ids, images) if images else 0
        text = Request(self.step, ids, sampling, count, stop_ids, logprobs, images, delta)
        if text.finish_reason is None:
            text.turn = self._turn + 1 + number
            insort(self._waiting, text, key=lambda each: each.turn)
        return text

    def checked(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """The token ids of a prompt that leaves room for new tokens."""
        ids = [int(token) for token in prompt_ids]
        if not ids:
            raise DataError("the prompt is empty: at least one token is required")
        self.check_room(len(ids), max_new_tokens)
        self._model.checked_ids([ids])
        return ids

    def _rope_delta(self, ids: list[int], images: Sequence[ImageFeatures]) -> int:
        row = np.array([ids])
        inputs = image_inputs(row, np.ones_like(row), [images], self._model.architecture)
        return rope_delta(inputs, 0, len(ids))

    def check_room(self, prompt_tokens: int, max_new_tokens: int | None) -> None:
        """Refuses a prompt that leaves no room for new tokens, unless none are requested."""
        if prompt_tokens >= self.capacity and max_new_tokens != 0:
            raise DataError(
                f"the prompt has {prompt_tokens} tokens, the maximum with its answer is "
                f"{self.capacity}"
            )

    def step(self) -> list[Request]:
        """Generates the next token of each request, and the first one of new requests."""
        with self._model.device.in_turn:
            return self._step()

    def _step(self) -> list[Request]:
        for text in [text for text in self._active if text.finish_reason is not None]:
            self._leave(text)
        self._find_stale()
        if any(text.ahead for text in self._active):  # the same number for each
            decoding = self._decoding()
            self._append_tokens(decoding, [text.ahead.popleft() for text in decoding], None)
            return decoding
        self._to_prefill += [text for text in self._decoding() if self._rope_changes(text)]
        decoding = self._decoding()
        if decoding:
            tokens, logits = self._next_tokens(decoding)
            for text, chosen in zip(decoding, tokens, strict=True):
                text.ahead.extend(chosen)
            self._append_tokens(decoding, [text.ahead.popleft() for text in decoding], logits)
        if any(text.ahead for text in self._active):
            return decoding
        while self._waiting and self._free:
            text = self._waiting.pop(0)
            self._turn = max(self._turn, text.turn)
            if text.finish_reason is None:
                text.slot = self._free.pop()
                self._active.append(text)
                self._to_prefill.append(text)
        return decoding + self._prefill_prompts(_PREFILL_SECONDS if decoding else math.inf)

    def _decoding(self) -> list[Request]:
        """Requests whose prompts are prefilled."""
        return [text for text in self._active if text not in self._to_prefill]

    def _find_stale(self) -> None:
        """Marks all requests for prefill if the adapter has changed."""
        if self._version == self._model.parameters_version:
            return
        self._version = self._model.parameters_version
        for text in self._active:
            text.ahead.clear()
        self._to_prefill, self._prefill = list(self._active), None

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
        self._active.remove(text)
        if text in self._to_prefill:
            self._to_prefill.remove(text)
        self._free.append(text.slot)

    def _rope_changes(self, text: Request) -> bool:
        """Whether RoPE of its earlier tokens changes with its length."""
        made = [program for each in self._programs.values() for program in each.values()]
        rotations = {r for program in made for r in program.batch.angles}
        return not all(r.is_same(text.length, text.rotated_length) for r in rotations)

    def _prefill_prompts(self, seconds: float) -> list[Request]:
        """Prefills requests and samples their first tokens."""
        done: list[Request] = []
        end = time.perf_counter() + seconds
        while self._to_prefill:
            if self._prefill is None or not set(self._prefill.texts) & set(self._to_prefill):
                self._prefill = self._begin_prefill()
            prefill, self._prefill = self._prefill, None
            # An interrupted prefill would leave recurrent states half updated
            is_interruptible = not self._cache.states
            if not prefill.advance(end - time.perf_counter() if is_interruptible else math.inf):
                self._prefill = prefill
                break
            # Requests that were cancelled in between have left
            texts = [text for text in prefill.texts if text in self._to_prefill]
            for copy in prefill.copies(texts):
                self._copying.run(*copy)
            tokens, logits = prefill.sample(texts)
            self._to_prefill = [text for text in self._to_prefill if text not in texts]
            self._append_tokens(texts, tokens, logits)
            done += texts
            if time.perf_counter() >= end:
                break
        return done

    def _begin_prefill(self) -> Prefill:
        # Recurrent states are kept for one request at a time
        is_batched = self._cache.layers and not self._cache.states
        groups = by_prompt(self._to_prefill)
        texts = prefill_batch([*groups], self.capacity) if is_batched else [*groups][:1]
        length = prompt_length(max(text.length for text in texts), self.capacity)
        requests = sum(len(groups[text]) for text in texts)
        samples = sample_count(len(texts), length, self.texts) if requests > len(texts) else 0
        with_logits = texts[0].logprobs is not None
        program = self._program(
            len(texts), length, samples=samples, with_logits=with_logits,
            with_images=bool(texts[0].images),
        )  # fmt: skip
        return Prefill(program, [groups[text] for text in texts], self._model.architecture)

    @cached_property
    def _copying(self) -> CopyProgram:
        return self._model.programs.copies(self._cache)

    def _next_tokens(self, texts: Sequence[Request]) -> tuple[list[list[int]], Logits]:
        """Decodes one token of each request, or several.

        With logits it is one, since only the last logits are kept.
        """
        rows = next(size for size in self.sizes if size >= len(texts))
        extra = rows - len(texts)
        # Unused rows write to a slot without valid contents
        spares = [*self._free, *(text.slot for text in self._to_prefill)]
        ids = [text.all_ids[-1] for text in texts] + [0] * extra
        past = [text.length - 1 for text in texts] + [self.capacity] * extra
        places = [text.slot for text in texts] + spares[:1] * extra
        column = np.array([ids, past, places])[..., None]
        choices = [text.choice for text in texts] + [Choice(Sampling(), 0, 0)] * extra
        with_logits = any(text.logprobs is not None for text in texts)
        deltas = np.array([text.rope_delta for text in texts] + [0] * extra)
        program = self._program(rows, 1, with_logits=with_logits, with_images=bool(deltas.any()))
        alone = with_logits or self._to_prefill or (self._waiting and self._free)
        remaining = min(text.max_new_tokens - len(text.ids) for text in texts)
        steps = max(min(remaining, int(_AHEAD_SECONDS / max(self._seconds, 1e-4))), 1)
        count = 1 if alone else min(steps, program.most_ahead)
        begin = time.perf_counter()
        rotated = column[1] + deltas[:, None]
        tokens = program.run(column[0], column[1], column[2], choices, count=count, rotated=rotated)
        self._seconds = (time.perf_counter() - begin) / count
        return tokens[: len(texts)], None if program.kept is None else program.logits()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of decoding; each step uses the smallest that is sufficient."""
        return batch_sizes(self.texts)

    def _program(
        self, rows: int, length: int, *, samples: int = 0, with_logits: bool, with_images: bool
    ) -> DecodePrograms:
        # An adapter of another shape has its own programs, with the same KV cache
        programs, key = self._model.programs, (rows, length, samples, with_logits, with_images)
        compiled = self._programs.setdefault(programs, {})
        if key not in compiled:
            compiled[key] = programs.tokens(
                rows, length, self._cache, self._seen, samples=samples,
                keep_logits=with_logits, with_images=with_images,
            )  # fmt: skip
        return compiled[key]
