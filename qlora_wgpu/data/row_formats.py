"""Formats of rows as text, and as token ids and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qlora_wgpu.data.assistant_mask import TrainOn, TurnChooser
from qlora_wgpu.data.canonical_messages import (
    canonical_options,
    canonical_tools,
    from_json,
    kind_of,
)
from qlora_wgpu.data.chat_template import ChatTemplate, Conversation, suitable_template
from qlora_wgpu.data.columns import (
    CHAT_PAIR,
    CHATS,
    FORMATS,
    EmptyRow,
    detect_format,
    is_blank,
    keys_of,
    weight_of,
    with_columns,
)
from qlora_wgpu.data.examples import document_ids, size_of
from qlora_wgpu.data.marker_words import LeftOut
from qlora_wgpu.data.masking import Span, tokens_in_spans
from qlora_wgpu.data.messages import (
    USUAL_ROLES,
    alpaca_prompt,
    check_marks,
    checked_messages,
    first_holds,
    from_sharegpt,
    history_of,
    roles_in_words,
    says_anything,
    with_system,
)
from qlora_wgpu.data.tokenizer import Tokenizer, Tokens
from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE, MAX_TEXT

__all__ = [
    "CHATS",
    "FORMATS",
    "EmptyRow",
    "Encoded",
    "RowEncoder",
    "TrainOn",
    "alpaca_prompt",
    "detect_format",
    "is_blank",
    "weight_of",
    "with_columns",
]

# ---- rows as text --------------------------------------------------------------------------------

_MOST_TEMPLATES = 64  # of which finders are kept
_AHEAD = 1 << 20  # characters of conversations that are rendered at once


class RowText(NamedTuple):
    """A row as text."""

    text: str  # the text that the model reads
    spans: list[Span] | None  # ascending character ranges of what is learnt; None if all is
    # Whether the tokenizer's own special tokens are added; a chat template writes them itself
    add_special_tokens: bool
    is_ended: bool = True  # whether the end-of-sequence token is put behind, and learnt
    roles: frozenset[str] = frozenset()  # roles in a conversation
    left_out: frozenset[str] = frozenset()  # what of it the template leaves out, in words
    is_spared: bool = False  # whether messages that would be learnt say that they are not


class RowTexts:
    """Writes rows as texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn,
        *,
        heeds_marks: bool = True,
    ) -> None:
        """Takes the model's tokenizer, the chat template, and what is learnt.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
            train_on: What is learnt.
            heeds_marks: Whether messages decide by what they say of themselves.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = train_on
        self._heeds_marks = heeds_marks
        self._finders: dict[ChatTemplate, tuple[TurnChooser, LeftOut]] = {}
        self._checks = template is not None and self._found_by(template)[0].checks
        self._parsed: dict[int, tuple[Mapping[str, Any], Conversation]] = {}
        self.writers: dict[str, Callable[[Mapping[str, Any]], RowText]] = {
            "messages": partial(self._chat, "messages"),
            "conversations": partial(self._chat, "conversations"),
            CHAT_PAIR: partial(self._chat, CHAT_PAIR),
            "prompt/completion": self._prompt_completion,
            "instruction/output": self._instruction,
            "text": self._text,
        }

    def write(self, row: Mapping[str, Any], row_format: str) -> RowText:
        """Writes a row of a known format."""
        if all(row.get(key) is None for key in keys_of(row_format)):
            needed = " or ".join(f"'{key}'" for key in keys_of(row_format))
            raise EmptyRow(f"{needed} must be a list of messages or a text, got nothing")
        return self.writers[row_format](row)

    def look_ahead(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Has the chat template render what these rows hold, which will be written next."""
        self._parsed = {}
        if self._template is None:
            return
        size = 0
        for row, row_format in rows:
            if row_format not in CHATS:
                continue
            try:
                conversation = _conversation(row_format, row, checks=self._checks)
            except (DataError, KeyError):
                continue
            size += sum(len(str(message.get("content"))) for message in conversation.messages)
            if size > _AHEAD:
                break
            self._parsed[id(row)] = row, conversation
        conversations = [conversation for _, conversation in self._parsed.values()]
        own = [each for each in conversations if self._template.suited(each) is self._template]
        self._template.look_ahead(own)

    def _found_by(self, template: ChatTemplate) -> tuple[TurnChooser, LeftOut]:
        """What finds the turns that a template writes, and what it leaves out."""
        if template not in self._finders:
            if len(self._finders) >= _MOST_TEMPLATES:
                self._finders.clear()
            end, heeds = self._tokenizer.eos_token, self._heeds_marks
            chooser = TurnChooser(template, self._train_on, end, heeds=heeds)
            self._finders[template] = chooser, LeftOut(template)
        return self._finders[template]

    def _chat(self, key: str, row: Mapping[str, Any]) -> RowText:
        parsed, conversation = self._parsed.get(id(row), (None, None))
        if conversation is None or parsed is not row:
            conversation = _conversation(key, row, checks=self._checks)
        if self._template is None:
            raise DataError(
                "the rows are conversations but the tokenizer has no chat template: set "
                "data.chat_template to a .jinja file or a built-in name, such as "
                f"{suitable_template(self._tokenizer)}, which fits its tokens"
            )
        messages = conversation.messages
        roles = frozenset(message["role"] for message in messages)
        try:
            chooser, finder = self._found_by(self._template.suited(conversation))
            chosen = chooser.choose(conversation)
        except DataError as err:
            if roles <= USUAL_ROLES:
                raise
            raise DataError(f"{err} (its roles are {roles_in_words(roles)})") from err
        text = chosen.text
        _check_size(text, MAX_AT_ONCE)
        learnt = chosen.turns if self._train_on != "all" else frozenset()
        left_out = finder.of(conversation, text, learnt)
        # The template writes the special tokens itself, the beginning-of-sequence token included.
        return RowText(text, chosen.spans, False, False, roles, left_out, chosen.is_spared)

    def _prompt_completion(self, row: Mapping[str, Any]) -> RowText:
        return self._answer(_text_of(row, "prompt"), _text_of(row, "completion"))

    def _instruction(self, row: Mapping[str, Any]) -> RowText:
        extra = "" if row.get("input") is None else _text_of(row, "input")
        system = "" if row.get("system") is None else _text_of(row, "system")
        prompt = alpaca_prompt(_text_of(row, "instruction"), extra, system, history_of(row))
        output = _text_of(row, "output")
        _check_not_blank(row["instruction"] + extra + output)
        return self._answer(prompt, output)

    def _text(self, row: Mapping[str, Any]) -> RowText:
        if self._train_on not in ("auto", "all"):
            raise DataError(
                f"data.train_on is {self._train_on}, but a 'text' has no turns: set it to all"
            )
        text = _text_of(row, "text")
        _check_not_blank(text)
        _check_size(text, MAX_TEXT)
        return RowText(text, None, self._needs_special_tokens(text))

    def _needs_special_tokens(self, text: str) -> bool:
        """Whether a row's text does not begin with a special token of its own."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _answer(self, prompt: str, answer: str) -> RowText:
        text = prompt + answer
        _check_not_blank(text)
        _check_size(text, MAX_AT_ONCE)
        answered = None if self._train_on == "all" else [(len(prompt), len(text))]
        return RowText(text, answered, self._needs_special_tokens(text))


def _messages_of_pair(row: Mapping[str, Any], *, checks: bool) -> tuple[list[dict[str, Any]], int]:
    """A prompt's messages and its completion's, and how many are the prompt's."""
    parts = []
    for key in ("prompt", "completion"):
        value = row[key]
        if not isinstance(value, list):
            raise DataError(
                f"'{key}' must be a list of messages, as the other of 'prompt' and 'completion' "
                f"is, got {kind_of(value)}"
            )
        parts.append(checked_messages(value, key) if value else [])
        if checks:
            _check_marks(parts[-1], "message {} of " + repr(key))
    if not any(parts):
        raise EmptyRow("'prompt' and 'completion' hold no message")
    return [*parts[0], *parts[1]], len(parts[0])


def _conversation(key: str, row: Mapping[str, Any], *, checks: bool) -> Conversation:
    """What a row of a chat format holds under that format's key.

    With ``checks`` what its messages say of themselves is checked, too.
    """
    first, name = 0, "message {}"
    turns = None if key == CHAT_PAIR else from_json(row[key])
    if key == CHAT_PAIR:
        messages, first = _messages_of_pair(row, checks=checks)
    elif first_holds(turns, "role") or (key == "messages" and not first_holds(turns, "from")):
        messages = checked_messages(turns, key)
    else:
        messages, name = from_sharegpt(turns), "turn {}"
    if checks and key != CHAT_PAIR:
        _check_marks(messages, name)
    if not any(map(says_anything, messages)):
        raise EmptyRow("the messages hold no text at all")
    own, messages = len(messages), with_system(messages, row)
    if key == CHAT_PAIR:
        first += len(messages) - own
    options = canonical_options(row.get("chat_template_kwargs"))
    return Conversation(messages, canonical_tools(row.get("tools")), first, options)


def _check_marks(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    for number, message in enumerate(messages, start=1):
        check_marks(message, name.format(number))


def _check_size(text: str, limit: int) -> None:
    if size_of(text) > limit:
        raise DataError(
            f"its text has {size_of(text):,} bytes, more than {limit:,}: cut it into several rows, "
            "or put a document into a .txt file"
        )


def _check_not_blank(text: str) -> None:
    if not text.strip():
        raise EmptyRow("the row has no text at all")


def _text_of(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"'{key}' must be text, got {kind_of(value)}")
    return value


# ---- rows as tokens ------------------------------------------------------------------------------

_TOKENS_AHEAD = 1 << 17  # characters that become tokens at once; a last row may double it


class Encoded(NamedTuple):
    """A row as tokens."""

    ids: list[int]  # its token ids
    labels: list[int]  # equally many: the ids that are learnt, and -100
    # The text that they stand for; None where the row was cut, since few ask for it
    text: str | None


@dataclass
class _Ready:
    """A row that has been written, and perhaps encoded."""

    row: Mapping[str, Any]  # so that its id is no other's
    written: RowText
    tokens: Tokens | None = None

    def adds(self, special_tokens: bool) -> bool:
        """Whether its text, which is not too long, becomes tokens with special ones or without."""
        text, adds = self.written.text, self.written.add_special_tokens
        return adds == special_tokens and len(text) <= _TOKENS_AHEAD


class RowEncoder:
    """Turns rows into token ids and labels.

    Labels are the ids themselves where the model learns and -100 elsewhere; they are not shifted.
    What is learnt is ``train_on``: in chats the assistant's turns (auto, assistant) or the last of
    them (last_turn, completion), in rows with an answer the answer, and of a ``text`` all; or (all)
    everything. Messages that say that they are not learnt (``weight: 0``, ``train: false``) are not
    in any case, and with auto and assistant others are that say ``train: true``. Except in chats,
    where the template decides, the tokenizer's special tokens are added in front (never a second
    beginning-of-sequence token) and the end-of-sequence token behind, which is learnt.

    Attributes:
        roles: Roles in the conversation encoded last; none for another row.
        is_spared: Whether messages of it that would be learnt say that they are not.
        left_out: What of that conversation the template leaves out, in words.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn = "auto",
        *,
        heeds_marks: bool = True,
    ) -> None:
        """Builds an encoder.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
            train_on: The tokens that are learnt.
            heeds_marks: Whether messages decide by what they say of themselves.
        """
        self._tokenizer = tokenizer
        self._texts = RowTexts(tokenizer, template, train_on, heeds_marks=heeds_marks)
        self.roles: frozenset[str] = frozenset()
        self.is_spared = False
        self.left_out: frozenset[str] = frozenset()
        self._ready: dict[int, _Ready] = {}

    def encode(self, row: Mapping[str, Any], row_format: str) -> Encoded:
        """Encodes a row of a known format."""
        ready = self._ready.pop(id(row), None)
        if ready is None:
            ready = _Ready(row, self._texts.write(row, row_format))
        written = ready.written
        self.roles, self.is_spared = written.roles, written.is_spared
        self.left_out = written.left_out
        return self._encoded(written, ready.tokens or self._tokens(written))

    def look_ahead(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Encodes rows that ``encode`` will be asked for next, on all processors."""
        self._texts.look_ahead(rows)
        self._ready = {}
        if not self._tokenizer.encodes_at_once:
            return
        size = 0
        for row, row_format in rows:
            try:
                ready = _Ready(row, self._texts.write(row, row_format))
            except (DataError, TokenizerError, KeyError):
                continue
            self._ready[id(row)] = ready
            size += len(ready.written.text)
            if size > _TOKENS_AHEAD:
                break
        for special in (False, True):
            self._encode_ahead([r for r in self._ready.values() if r.adds(special)], special)

    def _encode_ahead(self, rows: Sequence[_Ready], add_special_tokens: bool) -> None:
        try:
            texts = [row.written.text for row in rows]
            tokens = self._tokenizer.encode_batch(texts, add_special_tokens)
        except TokenizerError:  # one by one, each has its own error
            return
        for row, its_tokens in zip(rows, tokens, strict=True):
            row.tokens = its_tokens

    def _tokens(self, written: RowText) -> Tokens:
        text, special = written.text, written.add_special_tokens
        if size_of(text) <= MAX_AT_ONCE:
            return self._tokenizer.encode_with_offsets(text, special)
        pieces = document_ids(self._tokenizer, [text], special)
        return [i for piece in pieces for i in piece], []

    def _encoded(self, written: RowText, tokens: Tokens) -> Encoded:
        ids, offsets = tokens
        labels = list(ids)
        if written.spans is not None:
            learnt = tokens_in_spans(offsets, written.spans)
            labels = np.where(learnt, ids, IGNORE_INDEX).tolist()
        eos = self._tokenizer.eos_token_id
        if written.is_ended and eos is not None:
            if not ids or ids[-1] != eos:
                ids.append(eos)
                labels.append(eos)
            labels[-1] = eos
        return Encoded(ids, labels, written.text)
