"""Texts that are generated before, in and after training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.data.dataset import Subset
from qlora_wgpu.generation import continuation, generate
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training import Sample
from qlora_wgpu.training.result import Written

_SHORTEST, _LONGEST = 24, 160  # tokens of a continuation, by the length of the data's
_TEXTS = 3
OWN_TOKENS = 64  # of an answer to a prompt of the configuration
_LONG = 10.0  # seconds after which no further text is begun


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text."""

    ids: list[int]  # its tokens
    answer: list[int]  # how the data goes on; empty where nobody says it
    most: int | None = None  # most tokens that the model adds; None goes by the answer

    @property
    def new_tokens(self) -> int:
        """Most tokens that the model adds."""
        if self.most is not None:
            return self.most
        return min(max(3 * len(self.answer), _SHORTEST), _LONGEST)


Writer = Callable[[list[int], int, list[int], int], list[int]]
"""Continues a text: its ids, most tokens to add, what ends it, tokens of the longest text."""


def writer_of(model: QLoRAModel) -> Writer:
    """Writes with a model of this process."""
    engine: Engine | None = None

    def write(ids: list[int], more: int, stop_ids: list[int], longest: int) -> list[int]:
        nonlocal engine
        if engine is None or engine.capacity < longest:
            engine = Engine(model, 1, longest, packs_weights=False)  # as was planned
        added = generate(model, ids, max_new_tokens=more, stop_ids=stop_ids, engine=engine)
        return list(added)

    return write


class SampleTexts:
    """Some prompts, continued by the model as it is at each call."""

    def __init__(
        self, write: Writer, tokenizer: Tokenizer, prompts: Sequence[Prompt], *,
        ends: Collection[int] = (), all_of_them: bool = False,
    ) -> None:  # fmt: skip
        """Takes prompts.

        Args:
            write: Who continues them.
            tokenizer: The model's.
            prompts: The prompts.
            ends: Tokens that end a text; by default the tokenizer's.
            all_of_them: Whether all are continued, however long that takes.
        """
        self._write = write
        self._tokenizer = tokenizer
        self._prompts = tuple(prompts)
        self._longest = longest_sample(prompts)
        self._ends = sorted(ends or tokenizer.eos_token_ids)
        self._all = all_of_them
        self._first: tuple[Written, ...] = ()

    @property
    def first(self) -> tuple[Written, ...]:
        """What was written before training."""
        return self._first

    def before(self) -> tuple[Sample, ...]:
        """The texts before training: the first, and more of them where that does not take long."""
        began = time.monotonic()
        texts: list[Written] = []
        for text in self.write():
            texts.append(text)
            if not self._all and time.monotonic() - began > _LONG / _TEXTS:
                break
        self._first, self._prompts = tuple(texts), self._prompts[: len(texts)]
        return tuple(Sample(each.prompt, each.expected, each.text) for each in texts)

    def write(self) -> Iterator[Written]:
        """Continues one prompt after another, greedily."""
        for prompt in self._prompts:
            ids = self._write(prompt.ids, prompt.new_tokens, self._ends, self._longest)
            yield Written(
                prompt=self._tokenizer.decode(prompt.ids),
                expected=continuation(self._tokenizer, prompt.ids, prompt.answer),
                text=continuation(self._tokenizer, prompt.ids, ids),
            )


def sample_prompts(data: Dataset) -> list[Prompt]:
    """Prompts from the beginning, the middle and the end of a data set; of pairs the chosen."""
    if data.unit > 1:
        present = np.flatnonzero(data.lengths)
        good = present[present % 2 == 0]
        data = Subset(data, good if len(good) else present)
    chosen = sorted({round(i * (len(data) - 1) / max(_TEXTS - 1, 1)) for i in range(_TEXTS)})
    return [_prompt(data, index) for index in chosen]


def longest_sample(prompts: Sequence[Prompt]) -> int:
    """Most tokens that one of them has with its continuation."""
    return max(len(prompt.ids) + prompt.new_tokens for prompt in prompts)


def _prompt(data: Dataset, index: int) -> Prompt:
    example = data[index]
    learnt = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
    # Before the first learnt token stands the prompt; where all is learnt, take the beginning.
    length = learnt[0] if learnt and learnt[0] > 1 else max(1, min(16, len(example) // 2))
    ids = [int(i) for i in example.input_ids]
    return Prompt(ids[:length], ids[length : length + _LONGEST])
