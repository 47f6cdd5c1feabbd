"""Formats of rows as text, and as token ids and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.chat_template import ChatTemplate, suitable_template
from qlora_wgpu.data.columns import (
    CHAT_PAIR,
    CHATS,
    EmptyRow,
    keys_of,
)
from qlora_wgpu.data.conversations import Conversation, Span, check_flags
from qlora_wgpu.data.examples import document_ids, size_of
from qlora_wgpu.data.masking import Masked, Masking, TrainOn, flags_count
from qlora_wgpu.data.messages import (
    alpaca_prompt,
    canonical_options,
    canonical_tools,
    checked_messages,
    first_holds,
    from_json,
    from_sharegpt,
    history_of,
    kind_of,
    says_anything,
    with_system,
)
from qlora_wgpu.data.tokenizer import Tokenizer, Tokens
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE, MAX_TEXT

# ---- rows as token ids ---------------------------------------------------------------------------

_RENDERED = 1 << 20  # characters of conversations that are rendered at once
_TOKENIZED = 1 << 17  # characters that become tokens at once
_NOWHERE = (1 << 62, 1 << 62)  # behind all spans


class RenderedRow(NamedTuple):
    """A row as text."""

    text: str  # the text that the model reads
    spans: Sequence[Span] | None  # ascending character ranges of what is learnt; None if all is
    # Whether the tokenizer's own special tokens are added; a chat template writes them itself
    add_special_tokens: bool
    is_ended: bool = True  # whether the end-of-sequence token is put behind, and learnt
    roles: frozenset[str] = frozenset()  # roles in a conversation
    left_out: Sequence[str] = ()  # what of it the template leaves out, in words
    is_spared: bool = False  # whether messages that would be learnt say that they are not


@dataclass(frozen=True)
class TokenizedExample:
    """A row, or an answer of one, as tokens."""

    ids: list[int]  # its token ids
    labels: list[int]  # equally many: the ids that are learnt, and -100
    # The text that they stand for; None where the row was cut, since few ask for it
    text: str | None = None
    roles: frozenset[str] = frozenset()  # as of ``RenderedRow``
    left_out: Sequence[str] = ()
    is_spared: bool = False
    said: str = ""  # what is said of it, if it is an answer
    weight: float = 1.0  # of its tokens in the loss
    goes_on: bool = False  # whether it is of the same text as the one before


class RowEncoder:
    """Turns rows into token ids and labels.

    Labels are the ids themselves where the model learns and -100 elsewhere; they are not shifted.
    What is learnt is ``train_on``: in chats the assistant's turns (auto, assistant) or the last of
    them (last_turn, completion), in rows with an answer the answer, and of a ``text`` all; or (all)
    everything. Messages that say that they are not learnt (``weight: 0``, ``train: false``) are not
    in any case, and with auto and assistant others are that say ``train: true``. Except in chats,
    where the template decides, the tokenizer's special tokens are added in front (never a second
    beginning-of-sequence token) and the end-of-sequence token behind, which is learnt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn = "auto",
        *,
        heeds_flags: bool = True,
    ) -> None:
        """Builds an encoder.

        Args:
            tokenizer: The model's tokenizer.
            template: The chat template, or None if there is none.
            train_on: The tokens that are learnt.
            heeds_flags: Whether messages decide by what they say of themselves.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._how = how = Masking(train_on, tokenizer.eos_token, heeds_flags)
        self._checks = template is not None and flags_count(
            template.source, template.marks_assistant, how
        )
        self.writers: dict[str, Callable[[Mapping[str, Any]], Conversation | RenderedRow]] = {
            **{key: partial(self._conversation, key) for key in CHATS},
            "prompt/completion": self._prompt_completion,
            "instruction/output": self._instruction,
            "text": self._text,
        }

    def encode(self, row: Mapping[str, Any], row_format: str) -> TokenizedExample:
        """Encodes a row of a known format."""
        return encoded_or_raised(next(self.encode_many([(row, row_format)])))

    def encode_many(
        self, rows: Iterable[tuple[Mapping[str, Any], str]]
    ) -> Iterator[TokenizedExample | QLoRAError]:
        """Yields rows of known formats as tokens, what is wrong with one in its place.

        The template renders many in one call, and many texts become tokens on all processors; more
        than a few megabytes are not held at once.
        """
        written = [self._written(row, row_format) for row, row_format in rows]
        for group in _groups(written, _RENDERED):
            for texts in _groups(self._rendered(group), _TOKENIZED):
                yield from self._encoded(texts)

    # -- as text -------------------------------------------------------------------------------

    def _written(
        self, row: Mapping[str, Any], row_format: str
    ) -> Conversation | RenderedRow | QLoRAError:
        try:
            if not row_format:
                raise EmptyRow("the row has no value")
            if all(row.get(key) is None for key in keys_of(row_format)):
                needed = " or ".join(f"'{key}'" for key in keys_of(row_format))
                raise EmptyRow(f"{needed} must be a list of messages or a text, got nothing")
            return self.writers[row_format](row)
        except QLoRAError as err:
            return err

    def _conversation(self, key: str, row: Mapping[str, Any]) -> Conversation:
        conversation = _conversation(key, row, checks=self._checks)
        if self._template is None:
            raise DataError(
                "the rows are conversations but the tokenizer has no chat template: set "
                "data.chat_template to a .jinja file or a built-in name, such as "
                f"{suitable_template(self._tokenizer)}, which fits its tokens"
            )
        return conversation

    def _prompt_completion(self, row: Mapping[str, Any]) -> RenderedRow:
        return self._answer(_text_of(row, "prompt"), _text_of(row, "completion"))

    def _instruction(self, row: Mapping[str, Any]) -> RenderedRow:
        extra = "" if row.get("input") is None else _text_of(row, "input")
        system = "" if row.get("system") is None else _text_of(row, "system")
        prompt = alpaca_prompt(_text_of(row, "instruction"), extra, system, history_of(row))
        output = _text_of(row, "output")
        _check_not_blank(row["instruction"] + extra + output)
        return self._answer(prompt, output)

    def _text(self, row: Mapping[str, Any]) -> RenderedRow:
        if self._how.train_on not in ("auto", "all"):
            raise DataError(
                f"data.train_on is {self._how.train_on}, but a 'text' has no turns: set it to all"
            )
        text = _text_of(row, "text")
        _check_not_blank(text)
        _check_size(text, MAX_TEXT)
        return RenderedRow(text, None, self._needs_special_tokens(text))

    def _needs_special_tokens(self, text: str) -> bool:
        """Whether a row's text does not begin with a special token of its own."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _answer(self, prompt: str, answer: str) -> RenderedRow:
        text = prompt + answer
        _check_not_blank(text)
        _check_size(text, MAX_AT_ONCE)
        answered = None if self._how.train_on == "all" else [(len(prompt), len(text))]
        return RenderedRow(text, answered, self._needs_special_tokens(text))

    def _rendered(
        self, written: Sequence[Conversation | RenderedRow | QLoRAError]
    ) -> list[RenderedRow | QLoRAError]:
        """Rows as text, conversations among them as the template writes them."""
        conversations = [each for each in written if isinstance(each, Conversation)]
        if not conversations or self._template is None:
            return [each for each in written if not isinstance(each, Conversation)]
        masked = zip(conversations, self._template.mask_many(conversations, self._how), strict=True)
        return [
            _as_row(*next(masked)) if isinstance(each, Conversation) else each for each in written
        ]

    # -- as tokens -----------------------------------------------------------------------------

    def _encoded(
        self, written: Sequence[RenderedRow | QLoRAError]
    ) -> Iterator[TokenizedExample | QLoRAError]:
        alike = groupby(written, lambda w: isinstance(w, RenderedRow) and w.add_special_tokens)
        for special, rows in alike:
            group = list(rows)
            texts = [each.text for each in group if isinstance(each, RenderedRow)]
            tokens = iter(self._tokens_of(texts, special))
            for each in group:
                if isinstance(each, QLoRAError):
                    yield each
                    continue
                made = next(tokens)
                yield made if isinstance(made, QLoRAError) else self._labelled(each, made)

    def _tokens_of(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens | TokenizerError]:
        """Texts as tokens, on all processors; one by one where each has to have its own error."""
        if len(texts) > 1:
            with suppress(TokenizerError):
                return [*self._tokenizer.encode_batch(texts, add_special_tokens)]
        return [self._tokens(text, add_special_tokens) for text in texts]

    def _tokens(self, text: str, add_special_tokens: bool) -> Tokens | TokenizerError:
        try:
            if size_of(text) <= MAX_AT_ONCE:
                return self._tokenizer.encode_with_offsets(text, add_special_tokens)
            pieces = document_ids(self._tokenizer, [text], add_special_tokens)
            return [i for piece in pieces for i in piece], []
        except TokenizerError as err:
            return err

    def _labelled(self, written: RenderedRow, tokens: Tokens) -> TokenizedExample:
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
        besides = written.roles, written.left_out, written.is_spared
        return TokenizedExample(ids, labels, written.text, *besides)


_Item = TypeVar("_Item")


def encoded_or_raised(encoded: TokenizedExample | QLoRAError, where: str = "") -> TokenizedExample:
    """What a row has become; raises what is wrong with it, with where it stands in front."""
    if isinstance(encoded, TokenizedExample):
        return encoded
    if not where or not isinstance(encoded, DataError | TokenizerError):
        raise encoded
    kind = DataError if isinstance(encoded, DataError) else TokenizerError
    raise kind(f"{where}: {encoded}") from encoded


def _as_row(conversation: Conversation, masked: Masked | QLoRAError) -> RenderedRow | QLoRAError:
    """The template writes the special tokens itself, the beginning-of-sequence token included."""
    if isinstance(masked, QLoRAError):
        return masked
    try:
        _check_size(masked.text, MAX_AT_ONCE)
    except DataError as err:
        return err
    roles = frozenset(message["role"] for message in conversation.messages)
    text, spans, is_spared, left_out = masked
    return RenderedRow(text, spans, False, False, roles, left_out, is_spared)


def _groups(items: Iterable[_Item], most: int) -> Iterator[list[_Item]]:
    """Neighbours of so many characters together; what is larger is by itself."""
    group: list[_Item] = []
    size = 0
    for item in items:
        size += (more := _characters(item))
        if group and size > most:
            yield group
            group, size = [], more
        group.append(item)
    if group:
        yield group


def _characters(row: object) -> int:
    if isinstance(row, Conversation):
        return sum(len(str(message.get("content"))) for message in row.messages)
    return len(row.text) if isinstance(row, RenderedRow) else 0


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Marks tokens that stand, at least in part, for characters in one of the ascending spans.

    Added special tokens have the range ``(0, 0)``. Spaces that a tokenizer leaves out of its ranges
    belong to the token after them.
    """
    flat = chain.from_iterable(offsets)  # as pairs, NumPy takes three times as long
    starts, ends = np.fromiter(flat, np.int64, 2 * len(offsets)).reshape(-1, 2).T
    firsts, lasts = np.array([*spans, _NOWHERE], np.int64).T
    covered = np.maximum.accumulate(np.append(0, ends))[:-1]
    begins = np.minimum(starts, covered)
    # The first span that ends behind where tokens have begun so far.
    nearest = np.searchsorted(lasts[:-1], np.maximum.accumulate(begins), "right")
    inside: npt.NDArray[np.bool_] = np.maximum(begins, firsts[nearest]) < np.minimum(
        ends, lasts[nearest]
    )
    return inside


# ---- rows as conversations -----------------------------------------------------------------------


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
            _check_flags(parts[-1], "message {} of " + repr(key))
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
        _check_flags(messages, name)
    if not any(map(says_anything, messages)):
        raise EmptyRow("the messages hold no text at all")
    own, messages = len(messages), with_system(messages, row)
    if key == CHAT_PAIR:
        first += len(messages) - own
    options = canonical_options(row.get("chat_template_kwargs"))
    return Conversation(messages, canonical_tools(row.get("tools")), first, options)


def _check_flags(messages: Sequence[Mapping[str, Any]], name: str) -> None:
    for number, message in enumerate(messages, start=1):
        check_flags(message, name.format(number))


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
