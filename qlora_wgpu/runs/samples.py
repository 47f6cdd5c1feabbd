"""Texts that are generated before and after training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.generation import continuation, generate
from qlora_wgpu.generation.decoder import Decoder
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training import Sample

_SHORTEST, _LONGEST = 24, 160  # tokens of a continuation, by the length of the data's
_TEXTS = 3
_LONG = 10.0  # seconds after which no further text is begun


@dataclass(frozen=True)
class Prompt:
    """The beginning of an example, and how it goes on."""

    ids: list[int]
    answer: list[int]

    @property
    def new_tokens(self) -> int:
        """Most tokens that the model adds."""
        return min(max(3 * len(self.answer), _SHORTEST), _LONGEST)


Writer = Callable[[list[int], int, list[int], int], list[int]]
"""Continues a text: its ids, most tokens to add, what ends it, tokens of the longest text."""


def writer_of(model: QLoRAModel) -> Writer:
    """Writes with a model of this process."""
    decoder: Decoder | None = None

    def write(ids: list[int], more: int, stop_ids: list[int], longest: int) -> list[int]:
        nonlocal decoder
        if decoder is None or decoder.capacity < longest:
            decoder = Decoder(model, longest)
        added = generate(model, ids, max_new_tokens=more, stop_ids=stop_ids, decoder=decoder)
        return list(added)

    return write


class SampleTexts:
    """Some prompts of the data, continued by the model as it is at each call."""

    def __init__(self, write: Writer, tokenizer: Tokenizer, data: Dataset) -> None:
        """Takes examples from the beginning, the middle and the end of a data set."""
        self._write = write
        self._tokenizer = tokenizer
        self._prompts = sample_prompts(data)
        self._longest = longest_text(self._prompts)

    def before(self) -> tuple[Sample, ...]:
        """The texts before training: the first, and more of them where that does not take long."""
        began = time.monotonic()
        samples: list[Sample] = []
        for prompt in self._prompts:
            if samples and time.monotonic() - began > _LONG / _TEXTS:
                break
            samples.append(self._sample(prompt))
        return tuple(samples)

    def after(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """The same texts after training."""
        pairs = zip(samples, self._prompts, strict=False)
        return tuple(replace(sample, after=self._text(prompt)) for sample, prompt in pairs)

    def _sample(self, prompt: Prompt) -> Sample:
        return Sample(
            prompt=self._tokenizer.decode(prompt.ids),
            expected=continuation(self._tokenizer, prompt.ids, prompt.answer),
            before=self._text(prompt),
        )

    def _text(self, prompt: Prompt) -> str:
        """The model's present continuation, greedily."""
        ends = sorted(self._tokenizer.eos_token_ids)
        ids = self._write(prompt.ids, prompt.new_tokens, ends, self._longest)
        return continuation(self._tokenizer, prompt.ids, ids)


def sample_prompts(data: Dataset) -> list[Prompt]:
    """Prompts from the beginning, the middle and the end of a data set."""
    chosen = sorted({round(i * (len(data) - 1) / max(_TEXTS - 1, 1)) for i in range(_TEXTS)})
    return [_prompt(data, index) for index in chosen]


def longest_text(prompts: Sequence[Prompt]) -> int:
    """Most tokens that one of them has with its continuation."""
    return max(len(prompt.ids) + prompt.new_tokens for prompt in prompts)


def _prompt(data: Dataset, index: int) -> Prompt:
    example = data[index]
    learnt = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
    # Before the first learnt token stands the prompt; where all is learnt, take the beginning.
    length = learnt[0] if learnt and learnt[0] > 1 else max(1, min(16, len(example) // 2))
    ids = [int(i) for i in example.input_ids]
    return Prompt(ids[:length], ids[length : length + _LONGEST])
