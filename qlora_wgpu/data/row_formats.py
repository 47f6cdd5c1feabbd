"""Rows of every format as text, and as token ids and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.chat_template import ChatTemplate, suitable_template
from qlora_wgpu.data.columns import CHAT_PAIR, CHATS, EmptyRow, keys_of
from qlora_wgpu.data.conversations import Conversation, Span, check_flags
from qlora_wgpu.data.examples import document_ids, size_of
from qlora_wgpu.data.masking import Masked, Masking, TrainOn, flags_apply
from qlora_wgpu.data.messages import (
    alpaca_prompt,
    canonical_options,
    canonical_tools,
    checked_messages,
    first_holds,
    from_json,
    from_sharegpt,
    has_content,
    history_of,
    kind_of,
    with_system,
)
from qlora_wgpu.data.row_images import (
    MARK,
    check_marks,
    has_images,
    images_of_row,
    measured_images,
    with_image_parts,
)
from qlora_wgpu.data.tokenizer import Tokenizer, Tokens
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError
from qlora_wgpu.images.placeholders import ImageFiles, ImageTokens
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MAX_AT_ONCE, MAX_TEXT

# ---- rows as token ids ---------------------------------------------------------------------------

_RENDERED = 1 << 20  # characters of conversations that are rendered at once
_TOKENIZED = 1 << 17  # characters that are tokenized at once
_NOWHERE = (1 << 62, 1 << 62)  # after all spans


class RowImages(NamedTuple):
    """The images of a row's text."""

    sources: Sequence[ImageSource]
    spans: Sequence[Span]  # what stands for each, in characters
    runs: Sequence[int]  # how many placeholders each one in the text is


class RenderedRow(NamedTuple):
    """A row as text."""

    text: str
    spans: Sequence[Span] | None  # ranges that the loss is taken on, ascending; None for all
    add_special_tokens: bool  # by the tokenizer; chat templates write their own
    add_eos: bool = True  # whether the EOS token is appended and trained on
    roles: frozenset[str] = frozenset()  # of a conversation
    left_out: Sequence[str] = ()  # what the template omits, in words
    has_excluded: bool = False  # whether flags exclude turns that would be trained on
    images: RowImages | None = None


@dataclass(frozen=True)
class TokenizedExample:
    """A row, or one of its answers, as tokens."""

    ids: list[int]
    labels: list[int]  # the ids that the loss is taken on, else -100
    text: str | None = None  # None for a truncated row
    roles: frozenset[str] = frozenset()  # as of ``RenderedRow``
    left_out: Sequence[str] = ()
    has_excluded: bool = False
    answer: str = ""  # such as "chosen", for an answer of a preference row
    weight: float = 1.0  # of its tokens in the loss
    continues: bool = False  # whether it is another window of the document before it
    images: Sequence[ImageSource] = ()  # in the order of their placeholders
    image_span: Span = (0, 0)  # the tokens from the first image to the last one
    targets: tuple[float, ...] = ()  # as of ``Example``


class RowEncoder:
    """Encodes rows as token ids and labels.

    Labels are the ids where the loss is taken and -100 elsewhere, not shifted. ``train_on`` chooses
    them: in chats the assistant's turns (auto, assistant) or the last turn (last_turn, completion),
    in other rows the answer or the whole ``text``, or every token (all). Turns with ``weight: 0``
    or ``train: false`` are always masked; with auto and assistant, ``train: true`` includes turns
    of other roles. Except in chats, which the template renders completely, the tokenizer's special
    tokens are added (never a second BOS token), and with ``add_eos`` an EOS token at the end, which
    is trained on. No loss is taken on what stands for an image.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn = "auto",
        *,
        use_flags: bool = True,
        images: ImageFiles | None = None,
        add_eos: bool = True,
    ) -> None:
        self._add_eos = add_eos
        self._tokenizer = tokenizer
        self._images = images
        self._template = template
        self._how = how = Masking(train_on, tokenizer.eos_token, use_flags)
        self._checks = template is not None and flags_apply(
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
        """Encodes rows of known formats in batches of a few megabytes; yields errors in place."""
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
                raise EmptyRow(f"{needed} must be a list of messages or text, got nothing")
            return self.writers[row_format](row)
        except QLoRAError as err:
            return err

    def _conversation(self, key: str, row: Mapping[str, Any]) -> Conversation:
        conversation = _conversation(
            key, row, checks=self._checks, reads_images=self._images is not None
        )
        if self._template is None:
            raise DataError(
                "the rows are conversations but the tokenizer has no chat template: set "
                "data.chat_template to a .jinja file or a built-in name, such as "
                f"{suitable_template(self._tokenizer)}, which fits its tokens"
            )
        return conversation

    def _prompt_completion(self, row: Mapping[str, Any]) -> RenderedRow:
        return self._answer(row, _text_of(row, "prompt"), _text_of(row, "completion"))

    def _instruction(self, row: Mapping[str, Any]) -> RenderedRow:
        extra = "" if row.get("input") is None else _text_of(row, "input")
        system = "" if row.get("system") is None else _text_of(row, "system")
        prompt = alpaca_prompt(_text_of(row, "instruction"), extra, system, history_of(row))
        output = _text_of(row, "output")
        _check_not_blank(row["instruction"] + extra + output)
        return self._answer(row, prompt, output)

    def _text(self, row: Mapping[str, Any]) -> RenderedRow:
        if self._how.train_on not in ("auto", "all"):
            raise DataError(
                f"data.train_on: {self._how.train_on} requires turns, but 'text' has none: set it "
                "to all"
            )
        (text,), images = self._marked(row, _text_of(row, "text"))
        _check_not_blank(text)
        _check_size(text, MAX_TEXT)
        written = RenderedRow(text, None, self._needs_special_tokens(text), self._add_eos)
        return self._with_images(written, images)

    def _needs_special_tokens(self, text: str) -> bool:
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _answer(self, row: Mapping[str, Any], prompt: str, answer: str) -> RenderedRow:
        (prompt, answer), images = self._marked(row, prompt, answer)
        text = prompt + answer
        _check_not_blank(text)
        _check_size(text, MAX_AT_ONCE)
        answered = None if self._how.train_on == "all" else [(len(prompt), len(text))]
        written = RenderedRow(text, answered, self._needs_special_tokens(text), self._add_eos)
        return self._with_images(written, images)

    def _marked(self, row: Mapping[str, Any], *texts: str) -> tuple[list[str], list[Any]]:
        """Texts with the model's markers at ``<image>``, and the images of the row's column."""
        if self._images is None or not has_images(row):
            return list(texts), []
        images = images_of_row(row)
        check_marks("".join(texts), len(images))
        mark = self._images.tokens.mark
        return [text.replace(MARK, mark) for text in texts], images

    def _with_images(self, written: RenderedRow, images: Sequence[Any]) -> RenderedRow:
        if not images or self._images is None:
            return written
        return _expanded(written, measured_images(images, Path()), self._images)

    def _rendered(
        self, written: Sequence[Conversation | RenderedRow | QLoRAError]
    ) -> list[RenderedRow | QLoRAError]:
        """Rows as text; the template renders all conversations in one call."""
        conversations = [each for each in written if isinstance(each, Conversation)]
        if not conversations or self._template is None:
            return [each for each in written if not isinstance(each, Conversation)]
        masked = zip(conversations, self._template.mask_many(conversations, self._how), strict=True)
        return [
            _as_row(*next(masked), self._images) if isinstance(each, Conversation) else each
            for each in written
        ]

    # -- as tokens -----------------------------------------------------------------------------

    def _encoded(
        self, written: Sequence[RenderedRow | QLoRAError]
    ) -> Iterator[TokenizedExample | QLoRAError]:
        groups = groupby(written, lambda w: isinstance(w, RenderedRow) and w.add_special_tokens)
        for special, rows in groups:
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
        """Tokenizes texts in parallel, or one by one if each needs its own error."""
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

    def _labelled(self, written: RenderedRow, tokens: Tokens) -> TokenizedExample | QLoRAError:
        ids, offsets = tokens
        labels = list(ids)
        if written.spans is not None:
            loss_mask = tokens_in_spans(offsets, written.spans)
            labels = np.where(loss_mask, ids, IGNORE_INDEX).tolist()
        eos = self._tokenizer.eos_token_id
        if written.add_eos and eos is not None:
            if not ids or ids[-1] != eos:
                ids.append(eos)
                labels.append(eos)
            labels[-1] = eos
        about = written.roles, written.left_out, written.has_excluded
        made = TokenizedExample(ids, labels, written.text, *about)
        if written.images is None or self._images is None:
            return made
        return _with_placeholders(made, written.images, offsets, self._images.tokens)


_Item = TypeVar("_Item")


def encoded_or_raised(encoded: TokenizedExample | QLoRAError, where: str = "") -> TokenizedExample:
    """Returns an encoded row, or raises its error with the row's location."""
    if isinstance(encoded, TokenizedExample):
        return encoded
    if not where or not isinstance(encoded, DataError | TokenizerError):
        raise encoded
    kind = DataError if isinstance(encoded, DataError) else TokenizerError
    raise kind(f"{where}: {encoded}") from encoded


def _as_row(
    conversation: Conversation, masked: Masked | QLoRAError, images: ImageFiles | None
) -> RenderedRow | QLoRAError:
    if isinstance(masked, QLoRAError):
        return masked
    roles = frozenset(message["role"] for message in conversation.messages)
    text, spans, has_excluded, left_out = masked
    row = RenderedRow(text, spans, False, False, roles, left_out, has_excluded)
    try:
        _check_size(text, MAX_AT_ONCE)
        if conversation.images and images is not None:
            row = _expanded(row, measured_images(conversation.images, Path()), images)
    except QLoRAError as err:
        return err
    return row


def _expanded(row: RenderedRow, sources: Sequence[ImageSource], images: ImageFiles) -> RenderedRow:
    """A row with what stands for its images in place of their markers."""
    tokens = images.tokens
    text, spans, runs = expanded = tokens.expanded(row.text, sources)
    _check_size(text, MAX_AT_ONCE)
    trained = [(0, len(row.text))] if row.spans is None else row.spans
    return row._replace(
        text=text,
        spans=expanded.moved(trained, len(tokens.marker)),
        images=RowImages(sources, spans, runs),
    )


def _with_placeholders(
    example: TokenizedExample, images: RowImages, offsets: Sequence[Span], tokens: ImageTokens
) -> TokenizedExample | QLoRAError:
    """An example whose runs of placeholders have their lengths."""
    try:
        counts = tokens.repeats(example.ids, images.runs)
    except DataError as err:
        return err
    inside = np.flatnonzero(tokens_in_spans(offsets, images.spans))
    ends = np.cumsum(counts)
    first, last = int(inside[0]), int(inside[-1])
    return replace(
        example,
        ids=np.repeat(example.ids, counts).tolist(),
        labels=np.repeat(example.labels, counts).tolist(),
        images=images.sources,
        image_span=(int(ends[first] - counts[first]), int(ends[last])),
    )


def _groups(items: Iterable[_Item], most: int) -> Iterator[list[_Item]]:
    """Groups neighbours of up to ``most`` characters; a larger item is alone."""
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
    """Which tokens have a character in one of the ascending spans.

    Added special tokens have the range ``(0, 0)``. Spaces that a tokenizer omits from its offsets
    belong to the token after them.
    """
    flat = chain.from_iterable(offsets)  # three times as fast as pairs
    starts, ends = np.fromiter(flat, np.int64, 2 * len(offsets)).reshape(-1, 2).T
    firsts, lasts = np.array([*spans, _NOWHERE], np.int64).T
    covered = np.maximum.accumulate(np.append(0, ends))[:-1]
    begins = np.minimum(starts, covered)
    # The first span that ends after the latest start of a token so far.
    nearest = np.searchsorted(lasts[:-1], np.maximum.accumulate(begins), "right")
    inside: npt.NDArray[np.bool_] = np.maximum(begins, firsts[nearest]) < np.minimum(
        ends, lasts[nearest]
    )
    return inside


# ---- rows as conversations -----------------------------------------------------------------------


def _messages_of_pair(
    row: Mapping[str, Any], *, checks: bool, reads_images: bool
) -> tuple[list[dict[str, Any]], int]:
    parts = []
    for key in ("prompt", "completion"):
        value = row[key]
        if not isinstance(value, list):
            raise DataError(
                "'prompt' and 'completion' must both be lists of messages or both be text, got "
                f"{kind_of(value)} as '{key}'"
            )
        parts.append(checked_messages(value, key, images=reads_images) if value else [])
        if checks:
            check_flags(parts[-1], "message {} of " + repr(key))
    if not any(parts):
        raise EmptyRow("'prompt' and 'completion' have no messages")
    return [*parts[0], *parts[1]], len(parts[0])


def _conversation(
    key: str, row: Mapping[str, Any], *, checks: bool, reads_images: bool
) -> Conversation:
    """The conversation of a row in a chat format; ``checks`` refuses invalid flags."""
    first, name = 0, "message {}"
    turns = None if key == CHAT_PAIR else from_json(row[key])
    if key == CHAT_PAIR:
        messages, first = _messages_of_pair(row, checks=checks, reads_images=reads_images)
    elif first_holds(turns, "role") or (key == "messages" and not first_holds(turns, "from")):
        messages = checked_messages(turns, key, images=reads_images)
    else:
        messages, name = from_sharegpt(turns), "turn {}"
    if checks and key != CHAT_PAIR:
        check_flags(messages, name)
    if not any(map(has_content, messages)):
        raise EmptyRow("the messages have no text")
    own, messages = len(messages), with_system(messages, row)
    if key == CHAT_PAIR:
        first += len(messages) - own
    options = canonical_options(row.get("chat_template_kwargs"))
    images: Sequence[Any] = ()
    if reads_images:
        messages, images = with_image_parts(messages, images_of_row(row))
    return Conversation(messages, canonical_tools(row.get("tools")), first, options, images)


def _check_size(text: str, limit: int) -> None:
    if size_of(text) > limit:
        raise DataError(
            f"its text has {size_of(text):,} bytes, more than {limit:,}: split it into several "
            "rows, or put a document into a .txt file"
        )


def _check_not_blank(text: str) -> None:
    if not text.strip():
        raise EmptyRow("the row has no text")


def _text_of(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"'{key}' must be text, got {kind_of(value)}")
    return value
