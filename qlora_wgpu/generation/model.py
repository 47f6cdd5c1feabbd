"""A model with its tokenizer, which generates text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, Unpack, overload

import numpy as np

from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, read_prompt_files
from qlora_wgpu.errors import ConfigError, TokenizerError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.generate import Prompt, complete, generate, token_ids
from qlora_wgpu.generation.sampling import Sampling, check_count, check_stop_ids
from qlora_wgpu.generation.scores import (
    Classification,
    FloatArray,
    encoded_inputs,
    scores_of,
    scoring_of_model,
)
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.images.placeholders import ImageFiles, image_files
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model import qlora_model
from qlora_wgpu.model.feature_store import prompt_features
from qlora_wgpu.model.image_inputs import ImageFeatures

Messages = Sequence[Mapping[str, Any]]
_PROMPT = (
    "a prompt must be a string, a list of token ids, or a list of messages such as "
    "[{'role': 'user', 'content': '...'}]"
)


class _Options(TypedDict, total=False):
    """The options of ``generate``, for its overloads."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    chat_template: str | None
    stop_ids: Collection[int] | None
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    batch_size: int


_OTHER_NAMES = {
    "do_sample": "temperature",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "eos_token_id": "stop_ids",
    "stop_token_ids": "stop_ids",
    "streamer": "stream",
}
"""Names of options elsewhere, by which they are looked for here."""


@dataclass(frozen=True)
class _TextPrompt(Prompt):
    """A prompt whose completion is text or token ids."""

    has_text: bool = True  # whether the completion is text


_PUBLIC = (
    "active_adapter", "active_adapters", "adapter_off", "adapter_state_dict", "adapters",
    "base_state_dict", "classify", "close", "delete_adapter", "device", "disable_adapter",
    "from_pretrained", "generate", "get_nb_trainable_parameters", "load_adapter", "logits",
    "loss_and_grads",
    "max_length", "peft_config", "print_trainable_parameters", "save_adapter", "save_pretrained",
    "score", "set_adapter", "tokenizer",
)  # fmt: skip
_ELSEWHERE = {
    "merge_and_unload": "save the adapter with save_pretrained and merge it with qlora_wgpu.merge",
    "push_to_hub": "upload a run's adapter with qlora_wgpu.push",
    "train": "use a qlora_wgpu.Trainer, or qlora_wgpu.train",
    "eval": "leave it out, since only training uses dropout",
    "config": "use peft_config for the adapter's settings",
    "unload": "use disable_adapter for the base alone",
    "get_base_model": "use disable_adapter for the base alone",
    "merge_adapter": "save the adapter with save_pretrained and merge it with qlora_wgpu.merge",
    "add_adapter": "use load_adapter, or from_pretrained(..., lora=...)",
    "apply_chat_template": "use tokenizer.apply_chat_template, or generate with messages",
    "chat": "use generate with messages",
    "gradient_checkpointing_enable": "use from_pretrained(..., gradient_checkpointing=True)",
    "resize_token_embeddings": "use the setting model.add_tokens",
    "parameters": "use adapter_state_dict or base_state_dict",
    "named_parameters": "use adapter_state_dict or base_state_dict",
    "to": "choose the GPU with from_pretrained(..., device=...)",
    "cuda": "choose the GPU with from_pretrained(..., device=...)",
    "state_dict": "use adapter_state_dict or base_state_dict",
    "forward": "use logits or loss_and_grads",
}
"""Methods that people look for here, and what to use instead."""


class _PublicMembers(type):
    """``dir`` and ``help`` of the class show what users need, not the engine's methods."""

    def __dir__(cls) -> list[str]:
        return list(_PUBLIC)


class QLoRAModel(qlora_model.QLoRAModel, metaclass=_PublicMembers):
    """A frozen base with an adapter and a tokenizer, which generates text.

    ``from_pretrained`` opens a base with a new adapter, ``open_adapter`` a trained adapter.
    ``close``, or leaving a ``with`` block, frees the memory.

    Attributes:
        device: The device of the model.
        active_adapter: The name of the active adapter.
        adapters: All adapters by name.
        tokenizer: The tokenizer.
    """

    read_prompts: Callable[[str], PromptFormat] | None = None

    def __dir__(self) -> list[str]:
        return list(_PUBLIC)

    if not TYPE_CHECKING:  # else a checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if vars(self) and name in _ELSEWHERE:
                raise AttributeError(f"QLoRAModel has no {name!r}: {_ELSEWHERE[name]}")
            super().__getattr__(name)

    @property
    def prompts(self) -> PromptFormat:
        """The prompt format of the active adapter's run, else of the base.

        Raises:
            TokenizerError: If the tokenizer is missing or damaged.
        """
        path = self.adapters[self.active_adapter].path
        if (path, self.prompt_folder) not in self._prompts:
            read = self.read_prompts
            folder = self.prompt_folder
            prompts = read_prompt_files(folder) if read is None or path is None else read(path)
            self._prompts[path, folder] = prompts
        return self._prompts[path, self.prompt_folder]

    @cached_property
    def _prompts(self) -> dict[tuple[str | None, Path], PromptFormat]:
        """Cached prompt formats, by adapter and base folder."""
        return {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded on first use.

        Raises:
            TokenizerError: If it is missing or damaged.
        """
        return self.prompts.tokenizer

    @overload
    def generate(
        self,
        prompt: str | Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> str: ...

    @overload
    def generate(
        self, prompt: Sequence[int], *, stream: Literal[False] = False, **options: Unpack[_Options]
    ) -> list[int]: ...

    @overload
    def generate(
        self,
        prompt: list[str] | Sequence[Messages],
        *,
        stream: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Sequence[int]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[_Options],
    ) -> list[list[int]]: ...

    @overload
    def generate(
        self, prompt: str | Messages, *, stream: Literal[True], **options: Unpack[_Options]
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self, prompt: Sequence[int], *, stream: Literal[True], **options: Unpack[_Options]
    ) -> Iterator[int]: ...

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = 0,
        chat_template: str | None = None,
        stop_ids: Collection[int] | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        stream: bool = False,
        batch_size: int = 8,
        **_unknown: Any,
    ) -> Any:
        """Completes a text or token ids, or answers a conversation.

        Args:
            prompt: A string; messages such as ``{"role": "user", "content": "Hi"}``, which the
                chat template formats; a list of token ids; or a list of such prompts, each of which
                gets the completion that it would get alone. The content of a message of a
                vision-language model may be a list of parts such as ``{"type": "image", "path":
                "cat.jpg"}`` and ``{"type": "text", "text": "What is it?"}``.
            max_new_tokens: Maximum number of tokens to generate.
            temperature: Sampling temperature; 0 is greedy.
            top_k: Number of most likely tokens to sample from; 0 for all.
            top_p: Probability of the smallest set of most likely tokens to sample from.
            seed: Random seed, plus the prompt's index in a list; None for a new one each time.
            chat_template: Replaces the run's or the tokenizer's template: a ``.jinja`` file, a
                template or a built-in name.
            stop_ids: Token ids that end the generation; by default the tokenizer's and the
                template's.
            min_p: Minimum probability of a token, relative to the most likely one.
            repetition_penalty: Penalty of tokens that have occurred; 1 for none.
            logit_bias: Added to the logits of tokens, by token id; -100 bans a token.
            stream: Whether to return an iterator over pieces of the completion.
            batch_size: Number of prompts of a list that are batched.

        Returns:
            The completion: token ids if the prompt was token ids, else text; for a list of prompts,
            a list.

        Raises:
            ConfigError: If the prompt is none of these, or a parameter is out of range.
            DataError: If the prompt is empty or longer than the model's maximum.
            TokenizerError: If the tokenizer is missing, or the chat template for messages.
        """
        for name in _unknown:
            near = (
                [_OTHER_NAMES[name]]
                if name in _OTHER_NAMES
                else get_close_matches(
                    name, [*_Options.__annotations__, "stream"], n=1, cutoff=0.75
                )
            )
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown option {name}{hint}")
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise ConfigError(f"{_PROMPT}, got {type(prompt).__name__}")
        check_stop_ids(stop_ids)
        biases = {} if logit_bias is None else logit_bias
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty, biases)
        if not isinstance(prompt, str):
            prompt = list(prompt)
            if prompt and all(map(_is_prompt, prompt)):
                if stream:
                    raise ConfigError("stream=True takes one prompt, got a list of prompts")
                prompts = [self._prompt(each, chat_template, stop_ids) for each in prompt]
                return self._complete(prompts, max_new_tokens, batch_size, sampling)
        one = self._prompt(prompt, chat_template, stop_ids)
        tokens = generate(
            self, one.ids, max_new_tokens=max_new_tokens, stop_ids=one.stop_ids,
            max_length=self.max_length, images=one.images, **vars(sampling),
        )  # fmt: skip
        if one.has_text:
            pieces = self._text(tokens, one)
            return pieces if stream else "".join(pieces)
        return tokens if stream else list(tokens)

    def score(self, inputs: Any, *, batch_size: int = 8, max_length: int | None = None) -> Any:
        """Scores of sequences by a reward model or classifier, without dropout.

        Args:
            inputs: A string; messages, which the chat template formats; token ids; or a list of
                such inputs. A reward model's text or messages contain prompt and answer.
            batch_size: Number of inputs that are computed at a time; scores do not depend on it.
            max_length: Maximum number of tokens of an input, whose start is kept; by default the
                model's maximum.

        Returns:
            For a list of inputs, float32 (inputs) with a single score each, as of a reward model,
            or (inputs, classes); for one input, a float or float32 (classes).

        Raises:
            ConfigError: If the model is a language model, or an argument is invalid.
            DataError: If an input is empty.
            TokenizerError: If the tokenizer is missing, or the chat template for messages.
        """
        several, rows = self._scored(inputs, batch_size, max_length)
        made = rows[:, 0] if rows.shape[1] == 1 else rows
        if several:
            return made
        return float(made[0]) if made.ndim == 1 else made[0]

    def classify(self, inputs: Any, *, batch_size: int = 8, max_length: int | None = None) -> Any:
        """Labels, probabilities and scores of sequences by a reward model or classifier.

        Args:
            inputs: As for ``score``.
            batch_size: As for ``score``.
            max_length: As for ``score``.

        Returns:
            A ``Classification``; for a list of inputs, a list.

        Raises:
            QLoRAError: As ``score`` does.
        """
        several, rows = self._scored(inputs, batch_size, max_length)
        scoring = scoring_of_model(self)
        made = [Classification.of(row, scoring) for row in rows]
        return made if several else made[0]

    def _scored(
        self, inputs: Any, batch_size: int, max_length: int | None
    ) -> tuple[bool, FloatArray]:
        """Whether there are several inputs, and a row of scores for each."""
        scoring = scoring_of_model(self)
        if check_count("batch_size", batch_size) == 0:
            raise ConfigError("batch_size must be at least 1, got 0")
        if max_length is not None and check_count("max_length", max_length) == 0:
            raise ConfigError("max_length must be at least 1, got 0")
        if isinstance(inputs, bytes | Mapping) or not isinstance(inputs, Iterable):
            raise ConfigError(f"{_PROMPT}, got {type(inputs).__name__}")
        given = inputs if isinstance(inputs, str) else list(inputs)
        several = not isinstance(given, str) and all(map(_is_prompt, given))
        limit = min(filter(None, (max_length, self.max_length)), default=None)
        each = given if several else [given]
        sequences = encoded_inputs(each, self.prompts, scoring, limit)
        rows = np.zeros((len(sequences), scoring.classes), np.float32)
        for numbers, made in scores_of(self, sequences, batch_size):
            rows[numbers] = made
        return several, rows

    def _prompt(
        self, prompt: Any, chat_template: str | None, stop_ids: Collection[int] | None
    ) -> _TextPrompt:
        """A prompt's tokens, and what ends its completion."""
        is_text = isinstance(prompt, str)
        is_chat = not is_text and any(isinstance(part, Mapping) for part in prompt)
        written = (
            self._prompt_format(chat_template) if is_chat else PromptFormat.text(self.tokenizer)
        )
        features: list[ImageFeatures] = []
        if is_chat:
            files = self._image_files
            ids, images = written.encoded(_messages_of(prompt), images=files, folder=Path())
            features = self._features_of(images) if images else []
        else:
            ids = written.ids(_messages_of(prompt)) if is_text else _ids_of(prompt)
        ends = written.stop_ids if stop_ids is None else stop_ids
        has_text = is_text or is_chat
        return _TextPrompt(ids, ends, (written.stop_text,), is_text, features, has_text)

    @cached_property
    def _image_files(self) -> ImageFiles | None:
        base = self.layout.pretrained
        if base.architecture.images is None or base.folder is None:
            return None
        return image_files(base.folder.path, base.config, lambda i: self.tokenizer.token(i))

    @cached_property
    def _features_of(self) -> Callable[[Sequence[ImageSource]], list[ImageFeatures]]:
        assert self._image_files is not None
        base, dtype = self.layout.pretrained, self.compute_dtype
        return prompt_features(base, self._image_files, self.device, dtype)

    def _complete(
        self, prompts: Sequence[_TextPrompt], max_new_tokens: int, batch: int, sampling: Sampling
    ) -> list[Any]:
        """The completions of several prompts, batched."""
        if check_count("batch_size", batch) == 0:
            raise ConfigError("batch_size must be at least 1, got 0")
        made = complete(
            self, self.tokenizer, prompts, batch=batch, sampling=sampling,
            max_new_tokens=check_count("max_new_tokens", max_new_tokens),
            max_length=self.max_length,
        )  # fmt: skip
        return [
            each.text if prompt.has_text else list(each.ids)
            for prompt, each in zip(prompts, made, strict=True)
        ]

    def _prompt_format(self, chat_template: str | None) -> PromptFormat:
        prompts = self.prompts
        if chat_template is not None:
            template = find_chat_template(chat_template, prompts.tokenizer)
            prompts = PromptFormat("chat", prompts.tokenizer, template)
        if prompts.kind == "chat" and prompts.template is None:
            raise TokenizerError(
                "the model has no chat template: set chat_template to a .jinja file or a built-in "
                "name, or use a string instead of messages"
            )
        return prompts

    def _text(self, tokens: Iterator[int], prompt: Prompt) -> Iterator[str]:
        """The text of tokens, in pieces, up to what ends it."""
        context = prompt.ids if prompt.is_text else ()
        stream = TextStream(self.tokenizer, prompt.stop, context)
        for token in tokens:
            if text := stream.push(token):
                yield text
            if stream.stopped:
                return
        if text := stream.rest():
            yield text

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens, if config.json has it."""
        return longest_text(self.folder.config)


def _messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, or a text as its only message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _ids_of(prompt: Any) -> list[int]:
    try:
        return token_ids(prompt)
    except ConfigError:
        raise ConfigError(_PROMPT) from None


def _is_prompt(part: Any) -> bool:
    """Whether a part of a list is a prompt itself, not a message or token."""
    return isinstance(part, Iterable) and not isinstance(part, Mapping | bytes)
