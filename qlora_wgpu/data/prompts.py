"""The prompt format of a model: that of its training rows, saved next to an adapter.

``prompt_format.json`` is this package's own file; it says whether prompts are turns of a chat,
Alpaca's prompt or plain text, which the tokenizer's files cannot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.checkpoint.tokenizer_files import (
    CONFIG,
    GENERATION,
    PROMPT_FORMAT,
    TEMPLATE,
    TOKENS,
    copy_tokenizer,
)
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data.chat_template import (
    BUILT_IN_TEMPLATES,
    ChatTemplate,
    closing_text,
    end_of_turn,
    find_chat_template,
)
from qlora_wgpu.data.columns import CHATS
from qlora_wgpu.data.examples import size_of
from qlora_wgpu.data.messages import canonical_options, canonical_tools, checked_messages
from qlora_wgpu.data.row_images import MARK, check_marks, measured_images, with_image_parts
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import CheckpointError, DataError, brief
from qlora_wgpu.files import is_there
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.limits import MAX_AT_ONCE, TOKENIZER_CONFIG_BYTES

# ---- prompts -------------------------------------------------------------------------------------

_NO_TOKENS = {"bos_token": "", "eos_token": ""}
_ANSWER = "A"
PromptKind = Literal["chat", "alpaca", "text"]


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt is rendered, and which tokens end its answer."""

    kind: PromptKind
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None for text, and for chats without a known template

    @classmethod
    def of_rows(cls, row_format: str, tokenizer: Tokenizer, setting: str | None) -> PromptFormat:
        """The prompt format of training rows, by their format and ``data.chat_template``."""
        if row_format in CHATS:
            return cls("chat", tokenizer, find_chat_template(setting, tokenizer))
        return cls.alpaca(tokenizer) if row_format == "instruction/output" else cls.text(tokenizer)

    @classmethod
    def alpaca(cls, tokenizer: Tokenizer) -> PromptFormat:
        """Alpaca's prompt."""
        return cls("alpaca", tokenizer, find_chat_template("alpaca", tokenizer))

    @classmethod
    def text(cls, tokenizer: Tokenizer) -> PromptFormat:
        """Plain text that the model continues."""
        return cls("text", tokenizer, None)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation with the generation prompt; of text, the last message's."""
        return self.encoded(messages, tools, options)[0]

    def encoded(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        images: ImageFiles | None = None,
        folder: Path | None = None,
        own: Sequence[Any] = (),
    ) -> tuple[list[int], list[ImageSource]]:
        """The same with the conversation's images, in the order of their placeholders.

        Without ``images`` messages must not have any. Paths are relative to ``folder``; without
        one they are refused. ``own`` are images of placeholders without one, as in a row's column.
        """
        if self.template is None:
            text = str(messages[-1]["content"])
            if not own or images is None:
                return self._as_rows(text), []
            check_marks(text, len(own))
            return self._expanded(text.replace(MARK, images.tokens.mark), own, images, folder)
        messages = checked_messages(messages, "messages", images=images is not None)
        messages, values = with_image_parts(messages, own)
        _check_size(*(part for message in messages for part in message.values()))
        if values and self.kind == "alpaca":
            raise DataError("Alpaca's prompt cannot have images: leave them out")
        if self.kind == "alpaca":  # rows have an EOS token only after the last answer
            alpaca = ChatTemplate(BUILT_IN_TEMPLATES["alpaca"], _NO_TOKENS)
            return self._as_rows(alpaca.render(messages).text), []
        given = canonical_tools(tools), canonical_options(options)
        text = self.template.render(messages, True, *given).text
        if not values or images is None:
            return self._before_an_answer(text, add_special_tokens=False), []
        return self._expanded(text, values, images, folder)

    def _expanded(
        self, text: str, values: Sequence[Any], images: ImageFiles, folder: Path | None
    ) -> tuple[list[int], list[ImageSource]]:
        """Token ids of a text whose markers stand for images."""
        sources = measured_images(values, folder)
        expanded = images.tokens.expanded(text, sources)
        if self.template is None:
            ids = self._as_rows(expanded.text)
        else:
            ids = self._before_an_answer(expanded.text, add_special_tokens=False)
        counts = images.tokens.repeats(ids, expanded.runs)
        return np.repeat(ids, counts).tolist(), sources

    def _as_rows(self, text: str) -> list[int]:
        bos = self.tokenizer.bos_token
        special = not (bos and text.startswith(bos))
        if self.template is None:
            _check_size(text)
            return self._open(text, add_special_tokens=special)[0]
        return self._before_an_answer(text, add_special_tokens=special)

    def _before_an_answer(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt as in a row, where an answer follows.

        Some tokenizers merge white space differently at the end of a text than before a word.
        """
        _check_size(text)
        ids, places = self._open(text + _ANSWER, add_special_tokens=add_special_tokens)
        answer = next((i for i, (_, end) in enumerate(places) if end > len(text)), len(ids))
        before, after = ids[:answer], ids[answer:]
        begins = answer < len(ids) and places[answer][0] >= len(text)
        if begins and self.tokenizer.decode(after, False) == _ANSWER:  # no token spans both
            return before
        alone, _ = self._open(text, add_special_tokens=add_special_tokens)
        is_same = self.tokenizer.decode(before, False) == self.tokenizer.decode(alone, False)
        return before if is_same else alone

    def _open(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and offsets of a text without the tokenizer's own EOS token at the end."""
        ids, places = self.tokenizer.encode_with_offsets(text, add_special_tokens)
        suffix = self.tokenizer.added_around[1] if add_special_tokens else []
        end = len(ids) - len(suffix)
        return ids[:end], places[:end]

    @property
    def turn_end(self) -> int | None:
        """Id of the end-of-turn token, or None."""
        return None if self.template is None else end_of_turn(self.template, self.tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's EOS tokens and the end-of-turn token."""
        end = self.turn_end
        return self.tokenizer.eos_token_ids | ({end} if end is not None else set())

    @property
    def stop_text(self) -> str:
        """The text that ends a turn; empty if a single token does."""
        if self.template is None or self.turn_end is not None:
            return ""
        return closing_text(self.template)


def _check_size(*texts: Any) -> None:
    """Refuses texts whose tokenization would take seconds and gigabytes."""
    size = sum(size_of(text) for text in texts if isinstance(text, str))
    if size > MAX_AT_ONCE:
        raise DataError(
            f"the prompt has {size:,} bytes of text, more than {MAX_AT_ONCE:,}: shorten it"
        )


# ---- files next to an adapter --------------------------------------------------------------------

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_prompt_files(folder: Path, base: Path, prompt: PromptFormat, name: str | None) -> None:
    """Writes the tokenizer, chat template, EOS tokens and prompt format."""
    own = prompt.template is None or prompt.template.source == prompt.tokenizer.chat_template
    copy_tokenizer(base, folder, templates=own)
    _write(folder / CONFIG, _tokenizer_config(base, prompt, own=own))
    if not own and prompt.template is not None:
        write_file(folder / TEMPLATE, prompt.template.source.encode())
    if ends := _ends(prompt):
        _write(folder / TOKENS, {**_read(base / TOKENS), **ends})
    _write(folder / GENERATION, _generation_config(base, prompt))
    # Last, as a sign that the others are complete.
    _write(folder / PROMPT_FORMAT, {"prompt_format": prompt.kind, "chat_template": name})


def read_prompt_files(folder: Path) -> PromptFormat:
    """The prompt format of a model's or an adapter's folder; chats by default."""
    tokenizer, kind = Tokenizer.from_folder(folder), prompt_kind(folder)
    if kind == "alpaca":
        return PromptFormat.alpaca(tokenizer)
    if kind == "text":
        return PromptFormat.text(tokenizer)
    return PromptFormat("chat", tokenizer, find_chat_template(None, tokenizer))


def prompt_kind(folder: Path) -> PromptKind:
    """The kind of a model's or an adapter's prompts; chats by default."""
    path = folder / PROMPT_FORMAT
    if not is_there(path):
        return "chat"
    kind = read_json_object(path).get("prompt_format")
    if kind not in get_args(PromptKind):
        raise CheckpointError(
            f"{path}: prompt_format must be chat, alpaca or text, got {brief(kind)}"
        )
    return cast(PromptKind, kind)


def _tokenizer_config(base: Path, prompt: PromptFormat, *, own: bool) -> dict[str, Any]:
    """The tokenizer's, completed by special tokens that only config.json names, by id."""
    config = _read(base / CONFIG) or {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not own:
        config.pop("chat_template", None)
    return {**prompt.tokenizer.special_tokens, **config, **_ends(prompt)}


def _ends(prompt: PromptFormat) -> dict[str, str]:
    """The end-of-turn token as ``eos_token``, unless the tokenizer's files name it already."""
    end, template, tokenizer = prompt.turn_end, prompt.template, prompt.tokenizer
    if end is None or template is None or end in tokenizer.eos_token_ids:
        return {}
    if "eos_token" in template.source:  # the template means the tokenizer's own
        return {}
    return {"eos_token": tokenizer.decode([end], skip_special_tokens=False)}


def _generation_config(base: Path, prompt: PromptFormat) -> dict[str, Any]:
    ids = {**_read(base / "config.json"), **_read(base / GENERATION)}
    known = {name: ids[name] for name in _IDS if ids.get(name) is not None}
    ends = sorted(prompt.stop_ids)
    return {**known, "eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else known


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, TOKENIZER_CONFIG_BYTES) if is_there(path) else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
