"""A model that answers in text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.generation.generate import generate
from qlora_wgpu.generation.prompts import EncodedPrompt, encode_chat, encode_ids, encode_text
from qlora_wgpu.generation.text import continuation
from qlora_wgpu.model import qlora_model

_Messages = Sequence[Mapping[str, Any]]


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
    """

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the model's folder, read the first time that it is asked for.

        Raises:
            TokenizerError: If the folder has none, or it is damaged.
        """
        return Tokenizer.from_folder(self.folder.path)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        chat_template: str | None = None,
        stop_ids: Collection[int] | None = None,
    ) -> Any:
        """Goes on with a text, answers a conversation, or goes on with token ids.

        Args:
            prompt: A text; messages such as ``{"role": "user", "content": "Hi"}``, which are
                written by the chat template; or token ids.
            max_new_tokens: Most tokens to add.
            temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
            top_k: Sample among this many of the likeliest tokens; 0 for all.
            top_p: Sample among the likeliest tokens that together have this probability.
            seed: Seed of the sampling.
            chat_template: Chat template instead of the tokenizer's: a ``.jinja`` file, the
                template itself or a built-in name.
            stop_ids: Tokens that end the text; by default the tokenizer's and the template's.

        Returns:
            What was added: the ids where ids were given, else text.

        Raises:
            ConfigError: If the prompt is none of these, or a setting is out of its range.
            DataError: If the prompt is empty or longer than the model takes.
            TokenizerError: If there is no tokenizer, or no chat template for messages.
        """
        is_text = isinstance(prompt, str)
        is_chat = not is_text and any(isinstance(part, Mapping) for part in prompt)
        if is_text:
            encoded = encode_text(str(prompt), self.tokenizer)
        elif is_chat:
            encoded = encode_chat(cast(_Messages, prompt), self.tokenizer, chat_template)
        else:
            encoded = encode_ids(prompt, self.tokenizer)
        tokens = generate(
            self,
            encoded.ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_ids=encoded.stop_ids if stop_ids is None else stop_ids,
            max_length=self.max_length,
        )
        return self._text(encoded, tokens) if is_text or is_chat else list(tokens)

    def _text(self, prompt: EncodedPrompt, tokens: Iterator[int]) -> str:
        ids: list[int] = []
        text = ""
        for token in tokens:
            ids.append(token)
            text = continuation(self.tokenizer, prompt.context, ids)
            if prompt.stop_text and prompt.stop_text in text:
                return text.partition(prompt.stop_text)[0]
        return text

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model was made for, where its config.json says it."""
        length = self.folder.config.get("max_position_embeddings")
        return length if isinstance(length, int) and length > 0 else None
