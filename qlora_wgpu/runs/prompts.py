"""Prompts: of files, of a run's samples, and in the format that an adapter was trained with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, tokenizer_folder
from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data import Dataset, PromptFormat, Tokenizer, find_chat_template, read_prompt_files
from qlora_wgpu.data.dataset import Subset
from qlora_wgpu.data.messages import with_system
from qlora_wgpu.data.row_images import has_images, images_of_row
from qlora_wgpu.data.sources import check_file, read_rows
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists, is_there
from qlora_wgpu.generation import continuation, generate
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.generate import Prompt
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.training import Sample
from qlora_wgpu.training.data import prompt_of_data
from qlora_wgpu.training.images import Features, prompt_images
from qlora_wgpu.training.observers import Written

# ---- prompts of a file ---------------------------------------------------------------------------

_EXPECTED = (
    "a row must be {'prompt': TEXT or MESSAGES}, {'messages': MESSAGES} or {'text': TEXT}, with "
    "MESSAGES such as [{'role': 'user', 'content': '...'}]"
)


def read_prompts(path: str, *, with_bytes: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a file of prompts, each with its position for error messages.

    Images in tables are read only ``with_bytes``.
    """
    check_file(Path(path))
    rows = list(read_rows(Path(path), with_bytes=with_bytes))
    if not rows:
        raise DataError(f"{path} contains no prompt")
    return rows


PromptWithImages = tuple[Prompt, list[ImageSource]]


def prompts_of(
    rows: Sequence[tuple[str, Mapping[str, Any]]], template: PromptFormat, *, answered: bool,
    images: ImageFiles | None = None, folder: Path | None = None,
) -> list[PromptWithImages]:  # fmt: skip
    """The prompts of rows, and the images of each; an answer at the end of messages is dropped.

    Paths of images are relative to ``folder``. Without ``images`` a row must not have any.
    """
    found = []
    for where, row in rows:
        try:
            if has_images(row) and images is None:
                raise DataError("the row has images, but the model reads none: remove them")
            found.append(_prompt(row, template, images, folder, answered=answered))
        except DataError as err:
            raise DataError(f"{where}: {err}") from err
    return found


def _prompt(
    row: Mapping[str, Any], template: PromptFormat, images: ImageFiles | None,
    folder: Path | None, *, answered: bool,
) -> PromptWithImages:  # fmt: skip
    value = next((row[key] for key in ("messages", "prompt", "text") if key in row), None)
    if isinstance(value, str) and (not answered or "text" in row):
        plain = PromptFormat.text(template.tokenizer)
        turns = [{"role": "user", "content": value}]
        own = images_of_row(row) if images else ()
        ids, sources = plain.encoded(turns, images=images, folder=folder, own=own)
        return Prompt(ids, plain.stop_ids, is_text=True), sources
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    is_chat = isinstance(messages, list) and all(
        isinstance(each, Mapping) and "role" in each and "content" in each for each in messages
    )
    if not is_chat or not messages:
        raise DataError(_EXPECTED)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("there is no message before the answer")
    if isinstance(value, list):
        messages = with_system(messages, row)
    ids, sources = template.encoded(
        messages, images=images, folder=folder, own=images_of_row(row) if images else ()
    )
    return Prompt(ids, template.stop_ids, (template.stop_text,)), sources


# ---- samples of a run ----------------------------------------------------------------------------

_MIN_TOKENS, _MAX_TOKENS = 24, 160  # tokens of a continuation, by the length of the data's
_PROMPTS = 3
_OWN_TOKENS = 64  # of an answer to one of eval.sample_prompts
_MAX_SECONDS = 10.0  # of all texts before training; after a third of it, no other is started


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt of a run's samples."""

    ids: list[int]  # its tokens
    answer: list[int]  # the data's continuation; empty if there is none
    # Maximum number of new tokens; None for a multiple of the answer's
    max_tokens: int | None = None
    images: tuple[str, ...] = ()  # the keys of its images

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens to generate."""
        if self.max_tokens is not None:
            return self.max_tokens
        return min(max(3 * len(self.answer), _MIN_TOKENS), _MAX_TOKENS)


Writer = Callable[..., list[int]]
"""Continues ids, given the maximum of new tokens, stop ids, tokens of the longest text, and then
the features of each of the prompt's images."""


def writer_of(model: QLoRAModel) -> Writer:
    """Greedy generation with a model of this process."""
    engine: Engine | None = None

    def write(
        ids: list[int], more: int, stop_ids: list[int], longest: int, *images: ImageFeatures
    ) -> list[int]:
        nonlocal engine
        if engine is None or engine.capacity < longest:
            engine = Engine(model, 1, longest, packs_weights=False)  # as was planned
        added = generate(
            model, ids, max_new_tokens=more, stop_ids=stop_ids, engine=engine, images=images
        )
        return list(added)

    return write


class SampleTexts:
    """The prompts of a run's samples, continued by the current model at each call."""

    def __init__(
        self, write: Writer, tokenizer: Tokenizer, prompts: Sequence[SamplePrompt], *,
        ends: Collection[int] = (), all_of_them: bool = False,
        features: Features = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """``ends`` are stop ids; ``all_of_them`` ignores how long generation takes."""
        self._features = features
        self._write = write
        self._tokenizer = tokenizer
        self._prompts = tuple(prompts)
        self._longest = longest_sample(prompts)
        self._ends = sorted(ends or tokenizer.eos_token_ids)
        self._all = all_of_them
        self._first: tuple[Written, ...] = ()

    @property
    def first(self) -> tuple[Written, ...]:
        """The texts generated before training."""
        return self._first

    def before(self) -> tuple[Sample, ...]:
        """Generates before training: the first text, and others if that does not take long."""
        began = time.monotonic()
        texts: list[Written] = []
        for text in self.write():
            texts.append(text)
            if not self._all and time.monotonic() - began > _MAX_SECONDS / _PROMPTS:
                break
        self._first, self._prompts = tuple(texts), self._prompts[: len(texts)]
        return tuple(Sample(each.prompt, each.expected, each.text) for each in texts)

    def write(self) -> Iterator[Written]:
        """Continues one prompt after another, greedily."""
        for prompt in self._prompts:
            images = (self._features[key] for key in prompt.images)
            ids = self._write(prompt.ids, prompt.new_tokens, self._ends, self._longest, *images)
            yield Written(
                prompt=self._tokenizer.decode(prompt.ids),
                expected=continuation(self._tokenizer, prompt.ids, prompt.answer),
                text=continuation(self._tokenizer, prompt.ids, ids),
            )


def sample_prompts(data: Dataset, images: ImageFiles | None = None) -> list[SamplePrompt]:
    """Prompts from the beginning, middle and end of a data set; of pairs, the chosen answers."""
    if data.unit > 1:
        present = np.flatnonzero(data.lengths)
        chosen = present[present % 2 == 0]
        data = Subset(data, chosen if len(chosen) else present)
    places = sorted({round(i * (len(data) - 1) / max(_PROMPTS - 1, 1)) for i in range(_PROMPTS)})
    return [_sample_prompt(data, index, images) for index in places]


def longest_sample(prompts: Sequence[SamplePrompt]) -> int:
    """Maximum number of tokens of a prompt with its continuation."""
    return max((len(prompt.ids) + prompt.new_tokens for prompt in prompts), default=0)


def _sample_prompt(data: Dataset, index: int, images: ImageFiles | None) -> SamplePrompt:
    example = data[index]
    if data.prompt_row(index) is not None:
        return SamplePrompt(example.input_ids.tolist(), [])
    labelled = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
    # The prompt ends at the first label; without a prompt, take the beginning of the text.
    length = labelled[0] if labelled and labelled[0] > 1 else max(1, min(16, len(example) // 2))
    length, shown = prompt_images(example, length, data, images)
    ids = [int(i) for i in example.input_ids]
    return SamplePrompt(ids[:length], ids[length : length + _MAX_TOKENS], images=shown)


# ---- prompt formats ------------------------------------------------------------------------------


def prompt_of_run(settings: Config, source: OpenedModel) -> PromptFormat:
    """The prompt format of a run's training data."""
    objective = settings.train.objective
    return prompt_of_data(settings.require_train(), source.tokenizer, objective, source.images)


def run_prompts(
    settings: Config, source: OpenedModel, template: PromptFormat, data: Dataset
) -> tuple[SamplePrompt, ...]:
    """The prompts of ``eval.sample_prompts``, rendered as the run's rows are, or of the data."""
    limit = longest_text(source.pretrained.config)
    own, max_new = settings.eval.sample_prompts, settings.eval.sample_max_new_tokens
    if not own:
        if settings.train.objective in POLICY_OBJECTIVES:
            max_new = max_new or min(settings.grpo.max_completion_length, _MAX_TOKENS)
        of_data = sample_prompts(data, source.images)
        return tuple(replace(prompt, max_tokens=max_new) for prompt in of_data)
    new_tokens = max_new or _OWN_TOKENS
    prompts = []
    for number, text in enumerate(own, 1):
        ids = template.ids([{"role": "user", "content": text}])
        if not ids:
            raise ConfigError(f"eval.sample_prompts: prompt {number} has no tokens")
        if limit is not None and len(ids) + new_tokens > limit:
            raise ConfigError(
                f"eval.sample_prompts: prompt {number} has {len(ids):,} tokens; with the "
                f"{new_tokens:,} of an answer that exceeds the model's maximum of {limit:,}"
            )
        prompts.append(SamplePrompt(ids, [], new_tokens))
    return tuple(prompts)


def tokenizer_for(source: OpenedModel, adapter: str | None) -> Tokenizer:
    """The base's tokenizer, or the one stored with the adapter if that has more tokens."""
    has_none = not is_there(source.path / "tokenizer.json")
    kept = None if adapter is None else tokenizer_folder(adapter)
    own = None if kept is None else Tokenizer.from_folder(kept)
    if own is not None and (has_none or own.vocab_size > source.tokenizer.vocab_size):
        return own
    return source.tokenizer


def prompt_for(source: OpenedModel, adapter: str | None) -> PromptFormat:
    """The prompt format of a base, or of an adapter as it was trained.

    It is the one stored with the adapter, or else the chat template of its run, or the base's.
    """
    folder = source.path if adapter is None else tokenizer_folder(adapter)
    if folder is not None and (adapter is None or exists(folder / PROMPT_FORMAT)):
        return read_prompt_files(folder)
    run = None if adapter is None else find_run(adapter)
    if run is None:
        return read_prompt_files(folder or source.path)
    setting = config_of_run(run).data.chat_template
    return PromptFormat("chat", source.tokenizer, find_chat_template(setting, source.tokenizer))
