"""Which characters of a rendered conversation the assistant wrote, and which tokens they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.exchanges import Exchange, exchanges, holds_what_is_written
from qlora_wgpu.data.message_places import Place, message_places
from qlora_wgpu.data.spans import Span
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.data.turn_begins import common_prefix, end_by_exchange, end_by_omission, unused
from qlora_wgpu.errors import DataError, TokenizerError

Message = Mapping[str, Any]

_WHOLE = re.compile(r".*[\s>\]]", re.DOTALL)  # up to where no special token is cut in two
_FEW_TURNS = 16


def assistant_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    eos_token: str | None = None,
) -> tuple[str, list[Span]]:
    """Renders a conversation and finds the assistant's turns in it.

    A turn includes what the template writes after it, up to the next turn: the end-of-turn token.
    If the template marks the assistant's text with ``{% generation %}``, the marks decide. If not,
    each turn lies between the rendering of what comes before it (with the generation prompt) and
    the rendering up to and with it, provided that both begin the whole text. Templates that treat
    earlier turns differently (Qwen3 leaves their thoughts out) break this; then the turn is found
    by exchanging its content and looking at what changes.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of functions that the model may call.
        eos_token: Text that some templates put after the very last turn only.

    Returns:
        The text, and ascending half-open character ranges.

    Raises:
        DataError: If the template refuses the conversation, or a turn cannot be found for certain.
    """
    rendered = template.render(messages, tools=tools)
    if rendered.spans is not None:
        return rendered.text, rendered.spans
    finder = _TurnFinder(template, messages, tools, rendered.text, eos_token or "")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[Span] = []
    for index, span in finder.spans(turns).items():
        if span is None or (spans and span[0] < spans[-1][1]):
            raise DataError(
                f"the assistant's turn in message {index + 1} cannot be told apart in the rendered "
                "chat: use a chat template with {% generation %} blocks (data.chat_template)"
            )
        spans.append(span)
    return rendered.text, spans


def last_turn_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    eos_token: str | None = None,
) -> tuple[str, list[Span]]:
    """Renders a conversation and finds the assistant's last turn, the last message, in it.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of functions that the model may call.
        eos_token: Text that some templates put after the very last turn only.

    Returns:
        The text, and ascending half-open character ranges: none where the assistant has not spoken
        last.

    Raises:
        DataError: If the template refuses the conversation, or the turn cannot be found for
            certain.
    """
    return spans_from(template, messages, len(messages) - 1, tools, eos_token)


def spans_from(
    template: ChatTemplate,
    messages: Sequence[Message],
    first: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    eos_token: str | None = None,
) -> tuple[str, list[Span]]:
    """Renders a conversation and finds the assistant's turns in it from one message on.

    A template may mark several passages of a turn, such as its thoughts, its answer and its end,
    and nothing at the marks says whose turn they are in. So they are told apart by where the
    message before the first turn ends: in what the template makes of the conversation up to there,
    or, where that changes earlier turns, by an exchange of that message's content.

    Args:
        template: The chat template.
        messages: The conversation.
        first: The first message that counts, from 0.
        tools: JSON schemas of functions that the model may call.
        eos_token: Text that some templates put after the very last turn only.

    Returns:
        The text, and ascending half-open character ranges; none where the assistant does not speak
        from there on.

    Raises:
        DataError: If the template refuses the conversation, or a turn cannot be found for certain.
    """
    text, spans = assistant_spans(template, messages, tools, eos_token)
    if not any(message["role"] == "assistant" for message in messages[first:]):
        return text, []
    earlier = sum(message["role"] == "assistant" for message in messages[:first])
    if not template.marks_assistant:
        return text, spans[earlier:]
    if not earlier:
        return text, spans
    begin = end_by_omission(template, messages, first, tools, text, spans)
    if begin is None:
        begin = end_by_exchange(template, messages, first, tools, text)
    if begin is None:
        last = first == len(messages) - 1
        turns = "last turn" if last else f"turns from message {first + 1} on"
        raise DataError(
            f"the assistant's {turns} cannot be told apart in the rendered chat: set "
            "data.train_on to assistant, or use another data.chat_template"
        )
    return text, [span for span in spans if span[1] > begin]


def turns_of_anyone(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    eos_token: str | None,
    text: str,
    numbers: Sequence[int],
) -> list[Span]:
    """Finds turns in a rendered conversation, whoever they are from, by exchanging their contents.

    A turn of the assistant is what ``assistant_spans`` finds without marks; another one is what it
    says, and what the template writes after it, where that can be told.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of functions that the model may call.
        eos_token: Text that some templates put after the very last turn only.
        text: The rendered conversation.
        numbers: The messages that the turns are, from 0.

    Raises:
        DataError: If a turn cannot be found for certain.
    """
    found = _TurnFinder(template, messages, tools, text, eos_token or "").spans(numbers)
    for index, span in found.items():
        if span is None:
            raise DataError(
                f"the turn in message {index + 1}, which says of itself whether it is learnt, "
                "cannot be told apart in the rendered chat: use another data.chat_template"
            )
    return [span for span in found.values() if span is not None]


class _TurnFinder:
    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        text: str,
        eos_token: str,
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._text = text
        self._eos_token = eos_token

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """The text, or None where the template refuses this part of the conversation."""
        if not messages:
            return None
        try:
            return self._template.render(messages, prompt, self._tools).text
        except DataError:
            return None

    def spans(self, turns: Sequence[int]) -> dict[int, Span | None]:
        """The spans of turns, by the numbers of their messages; None where one cannot be told.

        Finding a turn takes time with the whole conversation. In a long one, turns around which the
        template writes the same are begun and ended alike: a few of each kind are found, and where
        these agree, the others are theirs.
        """
        if len(turns) <= _FEW_TURNS:
            return {turn: self.span(turn) for turn in turns}
        places = message_places(self._render, self._messages, self._text, unused(self._text))
        spans: dict[int, Span | None] = {}
        for kind in _kinds(self._messages, turns, places):
            spans |= self._spans_of_a_kind(kind, places)
        return {turn: spans[turn] for turn in turns}

    def _spans_of_a_kind(
        self, turns: Sequence[int], places: Mapping[int, Place]
    ) -> dict[int, Span | None]:
        samples = {turn: self.span(turn) for turn in {turns[0], turns[len(turns) // 2], turns[-1]}}
        margins = {_margins(span, places.get(turn)) for turn, span in samples.items()}
        margin = margins.pop() if len(margins) == 1 else None
        if margin is None:
            return {turn: samples.get(turn) or self.span(turn) for turn in turns}
        return {turn: _with_margins(places[turn], margin) for turn in turns}

    def span(self, index: int) -> Span | None:
        """A turn, or None where it cannot be told, or what is written in it stands elsewhere."""
        is_own = self._messages[index]["role"] == "assistant"
        span = (self.by_prefix(index) if is_own else None) or self.by_exchange(index)
        if span is None or not holds_what_is_written(self._messages[index], self._text, span):
            return None
        return span

    def by_prefix(self, index: int) -> Span | None:
        """The turn between two renderings that both begin the whole text."""
        before = self._render(self._messages[:index], prompt=True)
        if index + 1 == len(self._messages):
            through: str | None = self._text
        else:
            through = self._render(self._messages[: index + 1])
        if before is None or through is None or len(through) <= len(before):
            return None
        if not (self._text.startswith(through) and through.startswith(before)):
            return None
        return len(before), len(through)

    def by_exchange(self, index: int) -> Span | None:
        """The turn as what changes in the text when its content does, or what a call is given."""
        sentinel = unused(self._text)
        ways = exchanges(self._messages[index], sentinel)
        return next(filter(None, (self._by(turn, index, sentinel) for turn in ways)), None)

    def _by(self, turn: Exchange, index: int, sentinel: str) -> Span | None:
        exchanged = [*self._messages[:index], turn.message, *self._messages[index + 1 :]]
        whole = self._render(exchanged)
        if whole is None or whole.count(sentinel) != 1:
            return None
        head, tail = whole.split(sentinel)
        end = len(self._text) - len(tail)
        fits = self._text.startswith(head) and self._text.endswith(tail) and end >= len(head)
        if not fits or not turn.may_become(self._text[len(head) : end]):
            return None
        ending = self._ending(exchanged[: index + 1], sentinel, tail, index)
        if ending is None and self._messages[index]["role"] != "assistant":
            ending = 0  # such as a system message within a turn of the user
        return None if ending is None else (self._start(index, head), end + ending)

    def _start(self, index: int, head: str) -> int:
        """Where a turn begins whose content, or the like, stands behind ``head``.

        What the template writes between its prompt and the content is the turn's. Where the prompt
        goes on otherwise than the turn does (with an empty thought), it ends where both, and a turn
        of a single word, part.
        """
        before = self._render(self._messages[:index], prompt=True)
        if before is None or self._messages[index]["role"] != "assistant":
            return len(head)
        if head.startswith(before):
            return len(before)
        plain = self._render(self._messages[:index])
        bare = {"role": "assistant", "content": unused(self._text)}
        alone = self._render([*self._messages[:index], bare])
        if plain is None or alone is None:
            return len(head)
        begin = min(common_prefix(before, head), common_prefix(alone, head))
        header = _WHOLE.match(head[len(plain) : begin]) if head.startswith(plain) else None
        return len(head) if header is None else len(plain) + header.end()

    def _ending(self, exchanged: list[Message], sentinel: str, tail: str, index: int) -> int | None:
        """How many characters of the tail close the turn."""
        cut = self._render(exchanged)
        if cut is None or cut.count(sentinel) != 1:
            return None
        ending = cut.split(sentinel)[1]
        # Some templates close the whole text once more, or in white space, after the last turn.
        bare = ending.removesuffix(self._eos_token) if self._eos_token else ending
        for closing in (ending, bare, ending.rstrip(), bare.rstrip()):
            if tail.startswith(closing):
                return len(closing)
        # Others close the last turn in a way of its own, unless another is to follow (gpt-oss).
        followed = self._render(exchanged, prompt=True)
        before, plain = (
            self._render(self._messages[:index], True),
            self._render(self._messages[:index]),
        )
        if followed is None or before is None or plain is None or not before.startswith(plain):
            return None
        prompt = before[len(plain) :]
        closing = followed.rpartition(sentinel)[2].removesuffix(prompt)
        is_closed = bool(prompt) and followed.endswith(prompt) and tail.startswith(closing)
        return len(closing) if is_closed and closing else None


def _kinds(
    messages: Sequence[Message], turns: Sequence[int], places: Mapping[int, Place]
) -> list[list[int]]:
    """Turns of a role around which the template writes the same, together; or of unknown place."""
    kinds: dict[tuple[str, tuple[str, str] | None], list[int]] = {}
    for turn in turns:
        place = places.get(turn)
        around = None if place is None else (place.before, place.after)
        kinds.setdefault((messages[turn]["role"], around), []).append(turn)
    return list(kinds.values())


def _margins(span: Span | None, place: Place | None) -> Span | None:
    """How far a turn reaches beyond its content; None if that is not known."""
    if span is None or place is None:
        return None
    return place.start - span[0], span[1] - place.end


def _with_margins(place: Place, margin: Span) -> Span:
    return place.start - margin[0], place.end + margin[1]


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Id of the special token that the template writes after an assistant's turn, or None."""
    name = tokenizer.first_special(tokenizer.encode(closing_text(template), False))
    return None if name is None else tokenizer.token_id(name)


def closing_text(template: ChatTemplate) -> str:
    """The text that a template writes after an assistant's last turn, stripped of white space."""
    answer = unused("")
    try:
        text = template.render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        ).text
    except (DataError, TokenizerError):  # told where a row is rendered
        return ""
    return text.rpartition(answer)[2].strip()
