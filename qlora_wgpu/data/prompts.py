"""How a prompt is written for a model: as its rows were, with files beside an adapter.

``prompt_format.json`` is this package's own, and says what the others cannot: whether prompts are
turns of the chat template, Alpaca's, or text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

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
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import CheckpointError, DataError, brief
from qlora_wgpu.files import is_there
from qlora_wgpu.limits import MAX_AT_ONCE, TOKENIZER_CONFIG_BYTES

# ---- prompts -------------------------------------------------------------------------------------

_NO_TOKENS = {"bos_token": "", "eos_token": ""}
_ANSWER = "A"
PromptKind = Literal["chat", "alpaca", "text"]


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt is written, and where its answer ends."""

    kind: PromptKind  # turns of a chat template; Alpaca's instruction; or the text itself
    tokenizer: Tokenizer  # the model's tokenizer
    # What writes turns; None for text, and for chats of which nobody knows the turns
    template: ChatTemplate | None

    @classmethod
    def of_rows(cls, row_format: str, tokenizer: Tokenizer, setting: str | None) -> PromptFormat:
        """The format of what is learnt, by the rows' format and ``data.chat_template``."""
        if row_format in CHATS:
            return cls("chat", tokenizer, find_chat_template(setting, tokenizer))
        return cls.alpaca(tokenizer) if row_format == "instruction/output" else cls.text(tokenizer)

    @classmethod
    def alpaca(cls, tokenizer: Tokenizer) -> PromptFormat:
        """The prompt of Alpaca's rows."""
        return cls("alpaca", tokenizer, find_chat_template("alpaca", tokenizer))

    @classmethod
    def text(cls, tokenizer: Tokenizer) -> PromptFormat:
        """A text that is to be continued."""
        return cls("text", tokenizer, None)

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation up to where the model is to speak; of text, the last message's.

        The chat template is given tools, and options as a row's ``chat_template_kwargs``.
        """
        if self.template is None:
            return self._as_rows(str(messages[-1]["content"]))
        messages = checked_messages(messages, "messages")
        _check_size(*(part for message in messages for part in message.values()))
        if self.kind == "alpaca":  # rows have an end token behind the last answer alone
            alpaca = ChatTemplate(BUILT_IN_TEMPLATES["alpaca"], _NO_TOKENS)
            return self._as_rows(alpaca.render(messages).text)
        given = canonical_tools(tools), canonical_options(options)
        text = self.template.render(messages, True, *given).text
        return self._before_an_answer(text, add_special_tokens=False)

    def _as_rows(self, text: str) -> list[int]:
        """Tokens of a text as rows that are no chats have them."""
        bos = self.tokenizer.bos_token
        special = not (bos and text.startswith(bos))
        if self.template is None:
            _check_size(text)
            return self._open(text, add_special_tokens=special)[0]
        return self._before_an_answer(text, add_special_tokens=special)

    def _before_an_answer(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a prompt as rows have them, where an answer follows.

        Some tokenizers join white space otherwise at the end of a text than before a word.
        """
        _check_size(text)
        ids, places = self._open(text + _ANSWER, add_special_tokens=add_special_tokens)
        answer = next((i for i, (_, end) in enumerate(places) if end > len(text)), len(ids))
        before, after = ids[:answer], ids[answer:]
        begins = answer < len(ids) and places[answer][0] >= len(text)
        if begins and self.tokenizer.decode(after, False) == _ANSWER:  # none holds some of both
            return before
        alone, _ = self._open(text, add_special_tokens=add_special_tokens)
        is_same = self.tokenizer.decode(before, False) == self.tokenizer.decode(alone, False)
        return before if is_same else alone

    def _open(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text that goes on, and their places.

        An end token of the tokenizer's own, which rows have behind the answer, would end it.
        """
        ids, places = self.tokenizer.encode_with_offsets(text, add_special_tokens)
        behind = self.tokenizer.added_around[1] if add_special_tokens else []
        open_end = len(ids) - len(behind)
        return ids[:open_end], places[:open_end]

    @property
    def turn_end(self) -> int | None:
        """Id of the special token that ends a turn, or None."""
        return None if self.template is None else end_of_turn(self.template, self.tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text: the tokenizer's, and what ends a turn."""
        end = self.turn_end
        return self.tokenizer.eos_token_ids | ({end} if end is not None else set())

    @property
    def stop_text(self) -> str:
        """The text that ends a turn; empty where a single token does."""
        if self.template is None or self.turn_end is not None:
            return ""
        return closing_text(self.template)


def _check_size(*texts: Any) -> None:
    """Ends before texts take seconds and gigabytes to become more tokens than any model takes."""
    size = sum(size_of(text) for text in texts if isinstance(text, str))
    if size > MAX_AT_ONCE:
        raise DataError(
            f"the prompt has {size:,} bytes of text, more than {MAX_AT_ONCE:,}: give a shorter one"
        )


# ---- files beside an adapter ---------------------------------------------------------------------

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_prompt_files(folder: Path, base: Path, prompt: PromptFormat, name: str | None) -> None:
    """Writes tokenizer files, the chat template, where answers end, and the prompt's format."""
    own = prompt.template is None or prompt.template.source == prompt.tokenizer.chat_template
    copy_tokenizer(base, folder, templates=own)
    _write(folder / CONFIG, _tokenizer_config(base, prompt, own=own))
    if not own and prompt.template is not None:
        write_file(folder / TEMPLATE, prompt.template.source.encode())
    if ends := _ends(prompt):
        _write(folder / TOKENS, {**_read(base / TOKENS), **ends})
    _write(folder / GENERATION, _generation_config(base, prompt))
    # The last: where it is, all are.
    _write(folder / PROMPT_FORMAT, {"prompt_format": prompt.kind, "chat_template": name})


def read_prompt_files(folder: Path) -> PromptFormat:
    """How prompts are written for what a folder holds: a model, or an adapter with a tokenizer.

    Where nothing says it, it is chats, with the tokenizer's template if there is one.
    """
    tokenizer, kind = Tokenizer.from_folder(folder), prompt_kind(folder)
    if kind == "alpaca":
        return PromptFormat.alpaca(tokenizer)
    if kind == "text":
        return PromptFormat.text(tokenizer)
    return PromptFormat("chat", tokenizer, find_chat_template(None, tokenizer))


def prompt_kind(folder: Path) -> PromptKind:
    """The kind of a model's or an adapter's prompts; chats where nothing says it."""
    path = folder / PROMPT_FORMAT
    if not is_there(path):
        return "chat"
    kind = read_json_object(path).get("prompt_format")
    if kind not in get_args(PromptKind):
        raise CheckpointError(f"{path}: prompt_format is {brief(kind)}, not chat, alpaca or text")
    return cast(PromptKind, kind)


def _tokenizer_config(base: Path, prompt: PromptFormat, *, own: bool) -> dict[str, Any]:
    """The tokenizer's, with the special tokens that were known by their ids alone."""
    config = _read(base / CONFIG) or {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not own:
        config.pop("chat_template", None)
    return {**prompt.tokenizer.special_tokens, **config, **_ends(prompt)}


def _ends(prompt: PromptFormat) -> dict[str, str]:
    """What ends a turn as the end-of-sequence token, where nobody would know of it otherwise."""
    end, template, tokenizer = prompt.turn_end, prompt.template, prompt.tokenizer
    if end is None or template is None or end in tokenizer.eos_token_ids:
        return {}
    if "eos_token" in template.source:  # it means another one
        return {}
    return {"eos_token": tokenizer.decode([end], skip_special_tokens=False)}


def _generation_config(base: Path, prompt: PromptFormat) -> dict[str, Any]:
    """The ids that begin and end a text: Hugging Face's programs stop at any of the latter."""
    ids = {**_read(base / "config.json"), **_read(base / GENERATION)}
    told = {name: ids[name] for name in _IDS if ids.get(name) is not None}
    ends = sorted(prompt.stop_ids)
    return {**told, "eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else told


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, TOKENIZER_CONFIG_BYTES) if is_there(path) else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
