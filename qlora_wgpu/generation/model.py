"""A model with its tokenizer, which generates text."""

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

_PROMPT = (
    "a prompt must be a string, a list of token ids, or a list of messages such as "
    "[{'role': 'user', 'content': '...'}]"
)


class QLoRAModel(qlora_model.QLoRAModel):
    """A frozen base with an adapter and a tokenizer, which generates text.

    ``from_pretrained`` opens a base with a new adapter, ``open_adapter`` a trained adapter.
    ``close``, or leaving a ``with`` block, frees the memory.

    Attributes:
        device: The device of the model.
        layout: The modules, the adapter, and the plans of the steps.
        adapter: The layout of the adapter's parameters.
        architecture: The architecture, from config.json.
        options: How training steps are computed; replaced as a whole.
        active_adapter: The name of the active adapter.
        read_prompts: Reads the prompt format of an adapter's folder, if the folder's own files are
            not sufficient.
    """

    read_prompts: Callable[[str], PromptFormat] | None = None

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
        """Completes a text or token ids, or answers a conversation.

        Args:
            prompt: A string; messages such as ``{"role": "user", "content": "Hi"}``, which the
                chat template formats; or token ids.
            max_new_tokens: Maximum number of tokens to generate.
            temperature: Sampling temperature; 0 is greedy.
            top_k: Number of most likely tokens to sample from; 0 for all.
            top_p: Probability of the smallest set of most likely tokens to sample from.
            seed: Random seed; None for a new one each time.
            chat_template: Replaces the run's or the tokenizer's template: a ``.jinja`` file, a
                template or a built-in name.
            stop_ids: Token ids that end the generation; by default the tokenizer's and the
                template's.
            min_p: Minimum probability of a token, relative to the most likely one.
            repetition_penalty: Penalty of tokens that have occurred; 1 for none.
            logit_bias: Added to the logits of tokens, by token id; -100 bans a token.

        Returns:
            The completion: token ids if the prompt was token ids, else text.

        Raises:
            ConfigError: If the prompt is none of these, or a parameter is out of range.
            DataError: If the prompt is empty or longer than the model's maximum.
            TokenizerError: If the tokenizer is missing, or the chat template for messages.
        """
        is_text = isinstance(prompt, str)
        if not is_text and not _is_listed(prompt):
            raise ConfigError(f"{_PROMPT}, got {type(prompt).__name__}")
        is_chat = not is_text and any(isinstance(part, Mapping) for part in prompt)
        written = (
            self._prompt_format(chat_template) if is_chat else PromptFormat.text(self.tokenizer)
        )
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

    def _text(self, tokens: Iterator[int], stop_text: str, context: Sequence[int]) -> str:
        stream = TextStream(self.tokenizer, [stop_text], context)
        for token in tokens:
            stream.push(token)
            if stream.stopped:
                break
        return stream.text

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


def _is_listed(prompt: Any) -> bool:
    """Whether it is a sequence, not a single message or number."""
    return isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes)
