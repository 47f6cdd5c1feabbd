"""The loss mask of a rendered conversation: which characters the loss is taken on.

Locating turns takes several renderings, so all of this runs where the template is rendered: in the
sandboxed process, in batches of rows, or in this one for built-in templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from qlora_wgpu.data.conversations import (
    READS_FLAGS,
    REASONING_KEYS,
    USUAL_ROLES,
    Conversation,
    Message,
    RenderedChat,
    Span,
    Template,
    Tools,
    is_excluded,
    is_included,
    roles_in_words,
    text_of,
)
from qlora_wgpu.data.marker_words import (
    ContentSpan,
    LeftOut,
    MarkedConversation,
    Part,
    common_prefix,
    make_sentinel,
)
from qlora_wgpu.errors import DataError, QLoRAError

TrainOn = Literal["auto", "assistant", "last_turn", "completion", "all"]


_TEMPLATES = 64  # with options, in the cache


class Masking(NamedTuple):
    """How loss masks of conversations are chosen."""

    train_on: TrainOn = "auto"
    eos_token: str | None = None  # some templates write it after the very last turn only
    use_flags: bool = True  # whether flags of turns and ``{% generation %}`` blocks count


class Masked(NamedTuple):
    """A conversation as text, with its loss mask."""

    text: str
    spans: Sequence[Span]  # character ranges that the loss is taken on, ascending
    has_excluded: bool  # whether flags exclude turns that would be trained on
    left_out: Sequence[str]  # what the template omits, in words


@lru_cache(maxsize=_TEMPLATES)
def flags_apply(source: str, marks_assistant: bool, how: Masking) -> bool:
    """Whether turns' flags count: not if a template's ``{% generation %}`` marks follow them."""
    decides = marks_assistant and READS_FLAGS.search(source) is not None
    return how.use_flags and (how.train_on == "all" or not decides)


# ---- spans ---------------------------------------------------------------------------------------


def joined(spans: Sequence[Span]) -> list[Span]:
    """Merges spans in any order into ascending, disjoint ones."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start < whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Subtracts holes from ascending, disjoint spans."""
    left: list[Span] = list(spans)
    for start, end in holes:
        pieces = ((a, min(b, start)) for a, b in left), ((max(a, end), b) for a, b in left)
        left = sorted((a, b) for each in pieces for a, b in each if a < b)
    return left


# ---- turns ---------------------------------------------------------------------------------------

_WHOLE = re.compile(r".*[\s>\]]", re.DOTALL)  # up to a position that splits no special token
_FEW_TURNS = 16
_PROMPT: Message = {"role": "user", "content": "?"}


class RenderedTurns:
    """A rendered conversation, and the spans of its turns.

    A turn includes what the template writes after it up to the next one, such as the end-of-turn
    token. ``{% generation %}`` blocks tell the assistant's turns. Without them, a turn is what the
    rendering up to it adds to the rendering of the messages before it (with the generation prompt),
    if both are prefixes of the whole text. Templates that render earlier turns differently (Qwen3
    omits their thoughts) break this; then marker words locate the turn, possibly in several pieces.
    """

    def __init__(
        self, template: Template, messages: Sequence[Message], tools: Tools, eos_token: str | None,
        *, use_generation_marks: bool = True,
    ) -> None:  # fmt: skip
        rendered = template.render(messages, tools=tools)
        self.text = rendered.text
        self._marked = rendered.spans if use_generation_marks else None
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._eos_token = eos_token or ""
        self._known: dict[int, list[ContentSpan]] = {}

    def spans_of(self, turns: set[int]) -> list[Span]:
        """The ascending spans of some of the assistant's turns."""
        if self._marked is not None:
            return list(self._marked_of(turns))
        found = self._spans(sorted(turns))
        for turn, spans in found.items():
            if not spans:
                raise DataError(
                    f"cannot locate the assistant's turn in message {turn + 1} in the rendered "
                    "chat: use a chat template with {% generation %} blocks (data.chat_template)"
                )
        flat = [(span, turn) for turn, spans in found.items() for span in spans]
        for (before, _), (after, turn) in pairwise(sorted(flat)):
            if after[0] < before[1]:
                raise DataError(
                    f"the assistant's turn in message {turn + 1} overlaps another one in the "
                    "rendered chat: use a chat template with {% generation %} blocks "
                    "(data.chat_template)"
                )
        return sorted(span for span, _ in flat)

    def spans_of_any_role(self, turns: Sequence[int]) -> list[Span]:
        """The spans of turns of any role.

        A turn of another role than the assistant is its content, with what the template writes
        after it if that can be located. Messages that templates may omit are skipped.
        """
        found = self._spans(turns)
        for turn, spans in found.items():
            if not spans and not self._may_be_left_out(turn):
                raise DataError(
                    f"cannot locate the turn in message {turn + 1}, which has a flag such as "
                    "train, in the rendered chat: use another data.chat_template"
                )
        return [span for spans in found.values() for span in spans]

    def _may_be_left_out(self, turn: int) -> bool:
        role = self._messages[turn]["role"]
        marked = self._all_marked.marked
        whole = self._render(marked.messages)
        is_free = role == "system" or role not in USUAL_ROLES
        return is_free and whole is not None and Part(turn, "content") in marked.left_out(whole)

    # -- with {% generation %} blocks ----------------------------------------------------------

    def _marked_of(self, turns: set[int]) -> Iterator[Span]:
        """Yields the marked spans of turns.

        A mark does not tell its turn, and a turn may have several: a span belongs to the turns
        whose words are in it, or else to the turn that began before it.
        """
        assert self._marked is not None
        own = {i for i, message in enumerate(self._messages) if message["role"] == "assistant"}
        if turns == own:
            yield from self._marked
            return
        for span in self._marked if turns else ():
            owners = self._owners(span, own)
            if len({owner in turns for owner in owners}) != 1:
                which = "last turn" if turns == {max(own)} else "turns"
                raise DataError(
                    f"cannot locate the assistant's {which} in the rendered chat: set "
                    "data.train_on to assistant, or use another data.chat_template"
                )
            if owners <= turns:
                yield span

    def _owners(self, span: Span, own: set[int]) -> set[int]:
        within = {
            turn for turn in own for place in self._places_of(turn)
            if place.start < span[1] and place.end > span[0]
        }  # fmt: skip
        if within:
            return within
        before = [
            i for i in range(len(self._messages))
            if any(place.end <= span[0] for place in self._places_of(i))
        ]  # fmt: skip
        last = max(before, default=-1)
        after = [i for i in range(last + 1, len(self._messages)) if self._places_of(i)]
        until = min(after, default=len(self._messages))
        # Empty turns before the next one with content, and the last one with content.
        silent = {turn for turn in own if last < turn < until}
        return silent | ({last} & own) or {turn for turn in own if turn >= last}

    # -- without {% generation %} blocks -------------------------------------------------------

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """The text, or None if the template refuses this part of the conversation."""
        if not messages:
            return None
        try:
            return self._template.render(messages, prompt, self._tools).text
        except DataError:
            return None

    def _new(self) -> MarkedConversation:
        return MarkedConversation(self.text, list(self._messages), self._tools)

    def _substituted(self, marked: MarkedConversation) -> Substituted:
        return Substituted(marked, marked.places(self._render(marked.messages)))

    @cached_property
    def _all_marked(self) -> Substituted:
        marked = self._new()
        for number in range(len(self._messages)):
            marked.mark(number)
        return self._substituted(marked)

    def _substitutions(self, turn: int) -> Iterator[Substituted]:
        """Yields the conversation with different markers: a template may depend on contents."""
        yield self._all_marked
        alone = self._new()
        alone.mark(turn)
        if alone.parts:
            yield self._substituted(alone)
        whole = self._new()
        whole.mark_content(turn, text_of(self._messages[turn].get("content")))
        yield self._substituted(whole)

    def _places_of(self, turn: int) -> list[ContentSpan]:
        """Where a turn's contents are in the text; empty if unknown."""
        if turn not in self._known:
            found = (each.places.get(turn) for each in self._substitutions(turn))
            self._known[turn] = next(filter(None, found), [])
        return self._known[turn]

    def _spans(self, turns: Sequence[int]) -> dict[int, list[Span]]:
        """The spans of turns by their messages' indices; empty for one that cannot be located.

        Locating a turn takes renderings of the whole conversation. In a long one, only a few turns
        of each kind (with the same text around them) are located; if these extend equally far
        around their contents, so do the others.
        """
        if len(turns) <= _FEW_TURNS:
            return {turn: self._span(turn) for turn in turns}
        spans: dict[int, list[Span]] = {}
        for kind in self._kinds(turns):
            spans |= self._spans_of_a_kind(kind)
        return {turn: spans[turn] for turn in turns}

    def _spans_of_a_kind(self, turns: Sequence[int]) -> dict[int, list[Span]]:
        samples = {turn: self._span(turn) for turn in {turns[0], turns[len(turns) // 2], turns[-1]}}
        margins = {self._margins(turn, spans) for turn, spans in samples.items()}
        margin = margins.pop() if len(margins) == 1 else None
        if margin is None:
            return {turn: samples.get(turn) or self._span(turn) for turn in turns}
        places = self._all_marked.places
        return {
            turn: [(places[turn][0].start - margin[0], places[turn][-1].end + margin[1])]
            for turn in turns
        }

    def _margins(self, turn: int, spans: Sequence[Span]) -> Span | None:
        """How far a turn in one piece extends around its contents; None if unknown."""
        places = self._all_marked.places.get(turn)
        if places is None or len(spans) != 1:
            return None
        return places[0].start - spans[0][0], spans[0][1] - places[-1].end

    def _kinds(self, turns: Sequence[int]) -> list[list[int]]:
        """Groups turns by role and the text around them; a turn with unknown text is alone."""
        places = self._all_marked.places
        ordered = sorted((p.start, p.end, turn) for turn, each in places.items() for p in each)
        begins: dict[int, str] = {}
        ends: dict[int, str] = {}
        for (_, end, before), (start, _, after) in pairwise([(0, 0, -1), *ordered]):
            begins.setdefault(after, self.text[end:start])
            ends[before] = self.text[end:start]
        kinds: dict[Any, list[int]] = {}
        for turn in turns:
            around = begins.get(turn), ends.get(turn)
            role = self._messages[turn]["role"]
            kinds.setdefault(turn if None in around else (role, around), []).append(turn)
        return list(kinds.values())

    def _span(self, turn: int) -> list[Span]:
        """A turn's pieces, with other turns between them; empty if it cannot be located."""
        message = self._messages[turn]
        span = self._by_prefix(turn) if message["role"] == "assistant" else None
        if span is not None:
            more = message.get("tool_calls") or any(map(message.get, REASONING_KEYS))
            places = self._all_marked.places.get(turn, ()) if more else ()
            if all(span[0] <= place.start and place.end <= span[1] for place in places):
                return [span]
        found = (self._around(turn, each) for each in self._substitutions(turn))
        return next(filter(None, found), [])

    def _by_prefix(self, turn: int) -> Span | None:
        """The turn between two renderings, if both are prefixes of the whole text."""
        before = self._render(self._messages[:turn], prompt=True)
        is_last = turn + 1 == len(self._messages)
        through = self.text if is_last else self._render(self._messages[: turn + 1])
        if before is None or through is None or len(through) <= len(before):
            return None
        if not (self.text.startswith(through) and through.startswith(before)):
            return None
        return len(before), len(through)

    def _around(self, turn: int, chat: Substituted) -> list[Span]:
        """A turn's pieces around the places of its contents."""
        own = chat.places.get(turn)
        if not own:
            return []
        others = [p.start for other, each in chat.places.items() if other != turn for p in each]
        end = self._end(turn, chat, own[-1])
        if end is None:
            return []
        spans, begin = [], self._start(turn, own[0].start)
        for before, after in pairwise(own):
            if any(before.end <= start < after.start for start in others):
                # The piece ends after what the template writes without the turns in between.
                alone = chat.after(before, self._render(chat.marked.messages[: turn + 1]))
                rest = self.text[before.after_marker :]
                spans.append((begin, before.after_marker + common_prefix(rest, alone or "")))
                begin = after.start
        return [*spans, (begin, end)]

    def _start(self, turn: int, at: int) -> int:
        """The start of a turn whose content begins at a position.

        What the template writes between the generation prompt and the content belongs to the turn.
        If the prompt ends differently (with an empty thought), the turn starts where the prompt,
        the turn and a turn of a single word diverge.
        """
        if self._messages[turn]["role"] != "assistant":
            return at
        head, earlier = self.text[:at], self._messages[:turn]
        before, plain = self._render(earlier, prompt=True), self._render(earlier)
        if before is not None and head.startswith(before):
            return len(before)
        alone = self._render([*earlier, {"role": "assistant", "content": make_sentinel(self.text)}])
        if before is not None and alone is not None and plain is not None:
            begin = min(common_prefix(before, head), common_prefix(alone, head))
            header = _WHOLE.match(head[len(plain) : begin]) if head.startswith(plain) else None
            if header is not None:
                return len(plain) + header.end()
        return self._after_header(at)

    def _after_header(self, at: int) -> int:
        """The start of a turn after the assistant's usual header before a position, if any."""
        plain, before = self._render([_PROMPT]), self._render([_PROMPT], prompt=True)
        if plain is None or before is None or not before.startswith(plain):
            return at
        header = before[len(plain) :]
        every = (place for each in self._all_marked.places.values() for place in each)
        said = max((place.end for place in every if place.end <= at), default=0)
        begin = self.text.rfind(header, said, at) if header.strip() else -1
        return at if begin < 0 else begin + len(header)

    def _end(self, turn: int, chat: Substituted, place: ContentSpan) -> int | None:
        """The end of a turn whose last content is at a place."""
        tail, messages = self.text[place.after_marker :], chat.marked.messages
        for earlier in (messages[:turn], [_PROMPT]):  # some refuse an answer without a prompt
            closing = self._closing(earlier, messages[turn], chat, place, tail)
            if closing is not None:
                return place.after_marker + len(closing)
        # Such as a system message within the user's turn, or an answer in several messages.
        every = ((p.start, i) for i, each in chat.places.items() for p in each)
        follows = min((each for each in every if each[0] >= place.end), default=(0, turn))[1]
        is_open = follows != turn and self._messages[follows]["role"] == "assistant"
        return None if self._messages[turn]["role"] == "assistant" and not is_open else place.end

    def _closing(
        self,
        earlier: list[Message],
        message: Message,
        chat: Substituted,
        place: ContentSpan,
        tail: str,
    ) -> str | None:
        """What the template writes after a turn, if the tail begins with it."""
        ending = chat.after(place, self._render([*earlier, message]))
        if ending is None:
            return None
        # Some templates write an EOS token or white space only after the last turn.
        bare = ending.removesuffix(self._eos_token) if self._eos_token else ending
        for closing in (ending, bare, ending.rstrip(), bare.rstrip()):
            if tail.startswith(closing):
                return closing
        # Others end the last turn differently, unless a generation prompt follows (gpt-oss).
        followed = chat.after(place, self._render([*earlier, message], prompt=True))
        before, plain = self._render(earlier, prompt=True), self._render(earlier)
        if followed is None or before is None or plain is None or not before.startswith(plain):
            return None
        prompt = before[len(plain) :]
        closing = followed.removesuffix(prompt)
        is_closed = bool(prompt) and followed.endswith(prompt) and tail.startswith(closing)
        return closing if is_closed and closing else None


class Substituted(NamedTuple):
    """A conversation with markers, and where the original contents are in the text."""

    marked: MarkedConversation
    places: dict[int, list[ContentSpan]]

    def after(self, place: ContentSpan, text: str | None) -> str | None:
        """What follows the marker of a place in a rendering of such messages."""
        if text is None:
            return None
        ends = (end for number, (_, end) in self.marked.found(text) if number == place.number)
        end = next(ends, None)
        return None if end is None else text[end:]


# ---- loss masks ----------------------------------------------------------------------------------


def _masked(
    template: Template, left_out: LeftOut, conversation: Conversation, how: Masking
) -> Masked:
    messages = conversation.messages
    try:
        text, spans, has_excluded, trained = loss_spans(template, conversation, how)
    except DataError as err:
        roles = {message["role"] for message in messages}
        if roles <= USUAL_ROLES:
            raise
        raise DataError(f"{err} (its roles are {roles_in_words(roles)})") from err
    unseen = left_out.of(conversation, text, trained if how.train_on != "all" else frozenset())
    return Masked(text, spans, has_excluded, sorted(unseen))


def loss_spans(
    template: Template, conversation: Conversation, how: Masking
) -> tuple[str, list[Span], bool, set[int]]:
    """The text, its loss spans, whether flags exclude turns, and the assistant's trained turns."""
    messages = conversation.messages
    first, is_whole = conversation.first, how.train_on == "all"
    if how.train_on == "last_turn" or (how.train_on == "completion" and not first):
        first = len(messages) - 1
    own = {i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"}
    candidates = range(len(messages)) if is_whole else own
    excluded = {i for i in candidates if is_excluded(messages[i])}
    rendered = RenderedTurns(
        template, messages, conversation.tools, how.eos_token, use_generation_marks=how.use_flags
    )
    with_flags = flags_apply(template.source, template.marks_assistant, how)
    masked = excluded if with_flags else set()
    if is_whole:
        holes = rendered.spans_of_any_role(sorted(masked)) if masked else []
        spans = without([(0, len(rendered.text))], holes)
    else:
        spans = rendered.spans_of(own - masked)
    if with_flags and how.train_on in ("auto", "assistant"):
        others = set(range(first, len(messages))) - own
        if included := [i for i in sorted(others) if is_included(messages[i])]:
            spans = joined([*spans, *rendered.spans_of_any_role(included)])
    return rendered.text, spans, bool(excluded), own - masked


# ---- functions of the sandboxed process ----------------------------------------------------------


class Sources(NamedTuple):
    """The templates of a tokenizer, and the special tokens that they may print."""

    source: str
    tool_source: str | None  # of a separate template for conversations with tools
    variables: Mapping[str, Any]

    def suited(self, conversation: Conversation) -> tuple[Template, LeftOut]:
        """The template that renders a conversation with its options.

        As in transformers, it is the separate one if there are tools.
        """
        source = self.tool_source if conversation.tools and self.tool_source else self.source
        variables = {**self.variables, **conversation.options}
        return _opened(source, json.dumps(variables, default=str))


@lru_cache(maxsize=_TEMPLATES)
def _opened(source: str, variables: str) -> tuple[Template, LeftOut]:
    template = Template(source, json.loads(variables))
    return template, LeftOut(template)


def render_chat(
    sources: Sources, conversation: Conversation, add_generation_prompt: bool
) -> RenderedChat:
    """A conversation's text and the spans of its ``{% generation %}`` blocks."""
    template, _ = sources.suited(conversation)
    return template.render(conversation.messages, add_generation_prompt, conversation.tools)


def left_out(sources: Sources, conversation: Conversation) -> list[str]:
    """Names the parts of a conversation that the template omits."""
    return sorted(sources.suited(conversation)[1].of(conversation, "", frozenset()))


def mask_many(
    sources: Sources, conversations: Sequence[Conversation], how: Masking
) -> list[Masked | tuple[str, str]]:
    """Each conversation's text and loss mask, or its error's class and message."""
    masked: list[Masked | tuple[str, str]] = []
    for conversation in conversations:
        try:
            masked.append(_masked(*sources.suited(conversation), conversation, how))
        except QLoRAError as err:
            masked.append((type(err).__name__, str(err)))
    return masked
