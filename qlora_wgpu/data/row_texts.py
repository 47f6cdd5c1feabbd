"""Rows of every format as texts, and what is learnt of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from qlora_wgpu.data.alpaca import alpaca_prompt, history_of
from qlora_wgpu.data.built_in_templates import suitable_template
from qlora_wgpu.data.canonical_messages import (
    canonical_options,
    canonical_tools,
    from_json,
    kind_of,
)
from qlora_wgpu.data.chat import ChatTemplate, Conversation
from qlora_wgpu.data.columns import CHAT_PAIR, CHATS, EmptyRow, keys_of
from qlora_wgpu.data.learnt_turns import TrainOn, TurnChooser
from qlora_wgpu.data.left_out import LeftOut
from qlora_wgpu.data.long_text import size_of
from qlora_wgpu.data.messages import (
    USUAL_ROLES,
    checked_messages,
    first_holds,
    from_sharegpt,
    roles_in_words,
    says_anything,
    with_system,
)
from qlora_wgpu.data.spans import Span
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.data.turn_marks import check_marks
from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import MAX_AT_ONCE, MAX_TEXT

_MOST_TEMPLATES = 64  # of which finders are kept
_AHEAD = 1 << 20  # characters of conversations that are rendered at once


class RowText(NamedTuple):
    """A row as text.

    Attributes:
        text: The text that the model reads.
        spans: Ascending character ranges of what is learnt; None if all is.
        add_special_tokens: Whether the tokenizer's own special tokens are added; a chat template
            writes them itself.
        is_ended: Whether the end-of-sequence token is put behind, and learnt.
        roles: Roles in a conversation.
        left_out: What of it the template leaves out, in words.
        is_spared: Whether messages that would be learnt say that they are not.
    """

    text: str
    spans: list[Span] | None
    add_special_tokens: bool
    is_ended: bool = True
    roles: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    is_spared: bool = False


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
        """Writes a row of a known format.

        Raises:
            EmptyRow: If the row holds nothing but white space.
            DataError: If a value of the row is missing or of the wrong type, or the chat template
                cannot take it.
        """
        if all(row.get(key) is None for key in keys_of(row_format)):
            needed = " or ".join(f"'{key}'" for key in keys_of(row_format))
            raise EmptyRow(f"{needed} must be a list of messages or a text, got nothing")
        return self.writers[row_format](row)

    def look_ahead(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Has the chat template render what these rows hold, which will be written next.

        Args:
            rows: The very rows, and their formats. What is wrong with one is told when it is
                written.
        """
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
