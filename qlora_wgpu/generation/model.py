"""A model that answers in text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, read_prompt_files
from qlora_wgpu.errors import ConfigError, TokenizerError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.generate import generate, token_ids
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.model import qlora_model

_PROMPT = "a prompt is a text, token ids, or messages such as [{'role': 'user', 'content': '...'}]"


class QLoRAModel(qlora_model.QLoRAModel):
    """A frozen base with an adapter, its tokenizer, and the text that they generate.

    ``from_pretrained`` opens a base with a fresh adapter, ``open_adapter`` one as it was trained.
    ``close``, or the end of a ``with``, frees its memory.

    Attributes:
        device: The device that holds it.
        layout: The modules, the adapter, and the plans of the steps.
        adapter: The layout of the adapter's parameters.
        architecture: The architecture by config.json.
        options: How training steps are computed; replaced as a whole.
        active_adapter: The name of the adapter that computes.
        read_prompts: Reads how prompts are written for an adapter's folder, where it is not the
            folder alone that says it.
    """

    read_prompts: Callable[[str], PromptFormat] | None = None

    @property
    def prompts(self) -> PromptFormat:
        """How prompts are written: as the active adapter's run wrote them, else as the base says.

        Raises:
            TokenizerError: If there is no tokenizer, or a file of it is damaged.
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
        """Those that were read, by the folders that say it."""
        return {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read the first time that it is asked for.

        Raises:
            TokenizerError: If there is none, or it is damaged.
        """
        return self.prompts.tokenizer

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
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
    ) -> Any:
        """Continues a text or token ids, or answers a conversation.

        Args:
            prompt: A text; messages such as ``{"role": "user", "content": "Hi"}``, which are
                written by the chat template; or token ids.
            max_new_tokens: Most tokens to add.
            temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
            top_k: Sample among this many of the likeliest tokens; 0 for all.
            top_p: Sample among the likeliest tokens that together have this probability.
            seed: Seed of the sampling; None takes another each time.
            chat_template: Chat template instead of the run's or the tokenizer's: a ``.jinja`` file,
                the template itself or a built-in name.
            stop_ids: Tokens that end the text; by default the tokenizer's and the template's.
            min_p: Sample among tokens that have this share of the likeliest's probability.
            repetition_penalty: What positive logits of tokens that the text has are divided by.
            logit_bias: What is added to the logits of tokens, by their ids; -100 bans one.

        Returns:
            What was added: the ids where ids were given, else text.

        Raises:
            ConfigError: If the prompt is none of these, or a setting is out of its range.
            DataError: If the prompt is empty or longer than the model takes.
            TokenizerError: If there is no tokenizer, or no chat template for messages.
        """
        is_text = isinstance(prompt, str)
        if not is_text and not _is_listed(prompt):
            raise ConfigError(f"{_PROMPT}, got {type(prompt).__name__}")
        is_chat = not is_text and any(isinstance(part, Mapping) for part in prompt)
        written = self._written(chat_template) if is_chat else PromptFormat.text(self.tokenizer)
        ids = _ids_of(prompt) if not is_text and not is_chat else written.ids(_messages_of(prompt))
        tokens = generate(
            self,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            stop_ids=written.stop_ids if stop_ids is None else stop_ids,
            max_length=self.max_length,
        )
        if not is_text and not is_chat:
            return list(tokens)
        return self._text(tokens, written.stop_text, ids if is_text else ())

    def _written(self, chat_template: str | None) -> PromptFormat:
        """How messages are written."""
        prompts = self.prompts
        if chat_template is not None:
            template = find_chat_template(chat_template, prompts.tokenizer)
            prompts = PromptFormat("chat", prompts.tokenizer, template)
        if prompts.kind == "chat" and prompts.template is None:
            raise TokenizerError(
                "the model has no chat template: name one with chat_template, a .jinja file or a "
                "built-in name, or give a text instead of messages"
            )
        return prompts

    def _text(self, tokens: Iterator[int], stop_text: str, context: Sequence[int]) -> str:
        stream = TextStream(self.tokenizer, [stop_text], context)
        for token in tokens:
            stream.push(token)
            if stream.stopped:
                break
        return stream.text

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model was made for, where its config.json says it."""
        return longest_text(self.folder.config)


def _messages_of(prompt: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, or a text as the only one."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _ids_of(prompt: Any) -> list[int]:
    try:
        return token_ids(prompt)
    except ConfigError:
        raise ConfigError(_PROMPT) from None


def _is_listed(prompt: Any) -> bool:
    """Whether it is a list of something, and no single message or number."""
    return isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes)
