"""Which characters of a conversation are learnt: by whose turns they are, and what turns say.

Finding turns takes several renderings, so all of this runs where the template does: for those of
strangers in the child process, which is asked for a batch of rows at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from qlora_wgpu.data.conversations import (
    ASKS_FLAGS,
    REASONING_KEYS,
    USUAL_ROLES,
    Conversation,
    Message,
    RenderedChat,
    Span,
    Template,
    Tools,
    is_asked_for,
    is_spared,
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


_TEMPLATES = 64  # with options, that are remembered


class Masking(NamedTuple):
    """What is learnt of conversations."""

    train_on: TrainOn = "auto"
    eos_token: str | None = None  # text that some templates put after the very last turn only
    heeds_flags: bool = True  # whether messages, and ``{% generation %}``, decide


class Masked(NamedTuple):
    """A conversation as text, and what is learnt of it."""

    text: str
    spans: Sequence[Span]  # ascending character ranges
    is_spared: bool  # whether turns that would be learnt say that they are not
    left_out: Sequence[str]  # what of it the template leaves out, in words


@lru_cache(maxsize=_TEMPLATES)
def flags_count(source: str, marks_assistant: bool, how: Masking) -> bool:
    """Whether what messages say counts: not where a template marks what is learnt by it."""
    knows_better = marks_assistant and ASKS_FLAGS.search(source) is not None
    return how.heeds_flags and (how.train_on == "all" or not knows_better)


# ---- spans ---------------------------------------------------------------------------------------


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in any order as ascending, disjoint ones."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start < whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What is left of ascending, disjoint spans without what is in the holes."""
    left: list[Span] = list(spans)
    for start, end in holes:
        pieces = ((a, min(b, start)) for a, b in left), ((max(a, end), b) for a, b in left)
        left = sorted((a, b) for each in pieces for a, b in each if a < b)
    return left


# ---- turns ---------------------------------------------------------------------------------------

_WHOLE = re.compile(r".*[\s>\]]", re.DOTALL)  # up to where no special token is cut in two
_FEW_TURNS = 16
_ASKED: Message = {"role": "user", "content": "?"}


class RenderedTurns:
    """A rendered conversation, and which of its characters are whose turn.

    A turn includes what the template writes after it, up to the next turn: the end-of-turn token.
    If the template marks the assistant's text with ``{% generation %}``, the marks decide. If not,
    each turn lies between the rendering of what comes before it (with the generation prompt) and
    the rendering up to and with it, provided that both begin the whole text. Templates that treat
    earlier turns differently (Qwen3 leaves their thoughts out) break this; then the turn is found
    by marker words in what it says, and may be in several pieces.

    Attributes:
        text: The text.
    """

    def __init__(
        self, template: Template, messages: Sequence[Message], tools: Tools, eos_token: str | None,
        *, heeds_generation: bool = True,
    ) -> None:  # fmt: skip
        """Renders a conversation.

        The end token is one that some templates put after the very last turn only. Without
        ``heeds_generation``, ``{% generation %}`` does not decide what the assistant's turns are.
        """
        rendered = template.render(messages, tools=tools)
        self.text = rendered.text
        self._marked = rendered.spans if heeds_generation else None
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._eos_token = eos_token or ""
        self._known: dict[int, list[ContentSpan]] = {}

    def spans_of(self, turns: set[int]) -> list[Span]:
        """The spans of some of the assistant's turns, ascending."""
        if self._marked is not None:
            return list(self._marked_of(turns))
        found = self._spans(sorted(turns))
        for turn, spans in found.items():
            if not spans:
                raise DataError(
                    f"the assistant's turn in message {turn + 1} cannot be told apart in the "
                    "rendered chat: use a chat template with {% generation %} blocks "
                    "(data.chat_template)"
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

    def turns_of_anyone(self, turns: Sequence[int]) -> list[Span]:
        """The spans of turns, whoever they are from.

        A turn of another than the assistant is what it says, and what the template writes after it,
        where that can be told. One that a template is free to leave out is none.
        """
        found = self._spans(turns)
        for turn, spans in found.items():
            if not spans and not self._may_be_left_out(turn):
                raise DataError(
                    f"the turn in message {turn + 1}, which says of itself whether it is learnt, "
                    "cannot be told apart in the rendered chat: use another data.chat_template"
                )
        return [span for spans in found.values() for span in spans]

    def _may_be_left_out(self, turn: int) -> bool:
        """Whether a template may leave a message out, and has."""
        role = self._messages[turn]["role"]
        marked = self._all_marked.marked
        whole = self._render(marked.messages)
        is_free = role == "system" or role not in USUAL_ROLES
        return is_free and whole is not None and Part(turn, "content") in marked.left_out(whole)

    # -- where the template marks them ---------------------------------------------------------

    def _marked_of(self, turns: set[int]) -> Iterator[Span]:
        """Yields what the template marks of turns.

        Nothing at its marks says whose turn they are in, and there may be several in one: a span
        belongs to whose words are in it, or else to the turn that has begun before it.
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
                    f"the assistant's {which} cannot be told apart in the rendered chat: set "
                    "data.train_on to assistant, or use another data.chat_template"
                )
            if owners <= turns:
                yield span

    def _owners(self, span: Span, own: set[int]) -> set[int]:
        """The assistant's turns to which a marked span may belong."""
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
        # Those that say nothing, before whoever speaks next, and the one that has spoken.
        silent = {turn for turn in own if last < turn < until}
        return silent | ({last} & own) or {turn for turn in own if turn >= last}

    # -- where it does not ---------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """The text, or None where the template refuses this part of the conversation."""
        if not messages:
            return None
        try:
            return self._template.render(messages, prompt, self._tools).text
        except DataError:
            return None

    def _new(self) -> MarkedConversation:
        return MarkedConversation(self.text, list(self._messages), self._tools)

    def _exchanged(self, marked: MarkedConversation) -> Exchanged:
        return Exchanged(marked, marked.places(self._render(marked.messages)))

    @cached_property
    def _all_marked(self) -> Exchanged:
        marked = self._new()
        for number in range(len(self._messages)):
            marked.mark(number)
        return self._exchanged(marked)

    def _ways(self, turn: int) -> Iterator[Exchanged]:
        """Yields the conversation with words exchanged, in the ways that may tell where a turn is.

        The text is another one where a template goes by what is exchanged: by another turn, or by
        this one's content.
        """
        yield self._all_marked
        alone = self._new()
        alone.mark(turn)
        if alone.parts:
            yield self._exchanged(alone)
        whole = self._new()
        whole.mark_content(turn, text_of(self._messages[turn].get("content")))
        yield self._exchanged(whole)

    def _places_of(self, turn: int) -> list[ContentSpan]:
        """Where the text has what a turn says; nothing where that is not known."""
        if turn not in self._known:
            ways = (way.places.get(turn) for way in self._ways(turn))
            self._known[turn] = next(filter(None, ways), [])
        return self._known[turn]

    def _spans(self, turns: Sequence[int]) -> dict[int, list[Span]]:
        """The spans of turns by the numbers of their messages; none where one cannot be told.

        Finding a turn takes time with the whole conversation. In a long one, turns around which the
        template writes the same are begun and ended alike: a few of each kind are found, and where
        these agree, the others are theirs.
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
        """How far a turn of one piece reaches beyond what it says; None if that is not known."""
        places = self._all_marked.places.get(turn)
        if places is None or len(spans) != 1:
            return None
        return places[0].start - spans[0][0], spans[0][1] - places[-1].end

    def _kinds(self, turns: Sequence[int]) -> list[list[int]]:
        """Turns of a role around which the template writes the same; others by themselves."""
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
        """A turn, in as many pieces as others stand between; none where it cannot be told."""
        message = self._messages[turn]
        span = self._by_prefix(turn) if message["role"] == "assistant" else None
        if span is not None:
            more = message.get("tool_calls") or any(map(message.get, REASONING_KEYS))
            places = self._all_marked.places.get(turn, ()) if more else ()
            if all(span[0] <= place.start and place.end <= span[1] for place in places):
                return [span]
        return next(filter(None, (self._around(turn, way) for way in self._ways(turn))), [])

    def _by_prefix(self, turn: int) -> Span | None:
        """The turn between two renderings that both begin the whole text."""
        before = self._render(self._messages[:turn], prompt=True)
        is_last = turn + 1 == len(self._messages)
        through = self.text if is_last else self._render(self._messages[: turn + 1])
        if before is None or through is None or len(through) <= len(before):
            return None
        if not (self.text.startswith(through) and through.startswith(before)):
            return None
        return len(before), len(through)

    def _around(self, turn: int, way: Exchanged) -> list[Span]:
        """A turn around the places of what it says."""
        own = way.places.get(turn)
        if not own:
            return []
        others = [p.start for other, each in way.places.items() if other != turn for p in each]
        end = self._end(turn, way, own[-1])
        if end is None:
            return []
        spans, begin = [], self._start(turn, own[0].start)
        for before, after in pairwise(own):
            if any(before.end <= start < after.start for start in others):
                spans.append((begin, self._end_of_piece(turn, way, before)))
                begin = after.start
        return [*spans, (begin, end)]

    def _start(self, turn: int, at: int) -> int:
        """Where a turn begins of which the first that it says stands at a place.

        What the template writes between its prompt and the content is the turn's. Where the prompt
        goes on otherwise than the turn does (with an empty thought), it ends where both, and a turn
        of a single word, part.
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
        return self._behind_header(at)

    def _behind_header(self, at: int) -> int:
        """Where a turn begins behind the header of any, if that stands before a place."""
        plain, before = self._render([_ASKED]), self._render([_ASKED], prompt=True)
        if plain is None or before is None or not before.startswith(plain):
            return at
        header = before[len(plain) :]
        every = (place for each in self._all_marked.places.values() for place in each)
        said = max((place.end for place in every if place.end <= at), default=0)
        begin = self.text.rfind(header, said, at) if header.strip() else -1
        return at if begin < 0 else begin + len(header)

    def _end_of_piece(self, turn: int, way: Exchanged, place: ContentSpan) -> int:
        """Where a piece of a turn ends: what is written after it without what stands between."""
        cut = way.after(place, self._render(way.messages[: turn + 1]))
        return place.behind + common_prefix(self.text[place.behind :], cut or "")

    def _end(self, turn: int, way: Exchanged, place: ContentSpan) -> int | None:
        """Where a turn ends of which a place is the last that it says."""
        tail = self.text[place.behind :]
        for earlier in (way.messages[:turn], [_ASKED]):  # some refuse an answer to nothing
            closing = self._closing(earlier, way.messages[turn], way, place, tail)
            if closing is not None:
                return place.behind + len(closing)
        # Such as a system message within a turn of the user, or an answer that goes on.
        every = ((p.start, i) for i, each in way.places.items() for p in each)
        follows = min((each for each in every if each[0] >= place.end), default=(0, turn))[1]
        is_open = follows != turn and self._messages[follows]["role"] == "assistant"
        return None if self._messages[turn]["role"] == "assistant" and not is_open else place.end

    def _closing(
        self,
        earlier: list[Message],
        message: Message,
        way: Exchanged,
        place: ContentSpan,
        tail: str,
    ) -> str | None:
        """What the template writes after a turn, where the tail begins so."""
        ending = way.after(place, self._render([*earlier, message]))
        if ending is None:
            return None
        # Some templates close the whole text once more, or in white space, after the last turn.
        bare = ending.removesuffix(self._eos_token) if self._eos_token else ending
        for closing in (ending, bare, ending.rstrip(), bare.rstrip()):
            if tail.startswith(closing):
                return closing
        # Others close the last turn in a way of its own, unless another is to follow (gpt-oss).
        followed = way.after(place, self._render([*earlier, message], prompt=True))
        before, plain = self._render(earlier, prompt=True), self._render(earlier)
        if followed is None or before is None or plain is None or not before.startswith(plain):
            return None
        prompt = before[len(plain) :]
        closing = followed.removesuffix(prompt)
        is_closed = bool(prompt) and followed.endswith(prompt) and tail.startswith(closing)
        return closing if is_closed and closing else None


class Exchanged(NamedTuple):
    """A conversation with words exchanged, and where the text has what these stand for."""

    marked: MarkedConversation
    places: dict[int, list[ContentSpan]]

    @property
    def messages(self) -> list[Message]:
        """The exchanged messages."""
        return self.marked.messages

    def after(self, place: ContentSpan, text: str | None) -> str | None:
        """What a text of such messages has after the word that stands at a place."""
        if text is None:
            return None
        ends = (end for number, (_, end) in self.marked.found(text) if number == place.number)
        end = next(ends, None)
        return None if end is None else text[end:]


# ---- what is learnt ------------------------------------------------------------------------------


def _masked(
    template: Template, left_out: LeftOut, conversation: Conversation, how: Masking
) -> Masked:
    """Renders a conversation and finds what is learnt of it."""
    messages = conversation.messages
    try:
        text, spans, is_spared, learnt = learnt_turns(template, conversation, how)
    except DataError as err:
        roles = {message["role"] for message in messages}
        if roles <= USUAL_ROLES:
            raise
        raise DataError(f"{err} (its roles are {roles_in_words(roles)})") from err
    unseen = left_out.of(conversation, text, learnt if how.train_on != "all" else frozenset())
    return Masked(text, spans, is_spared, sorted(unseen))


def learnt_turns(
    template: Template, conversation: Conversation, how: Masking
) -> tuple[str, list[Span], bool, set[int]]:
    """The text, what is learnt of it, whether turns are spared, and the assistant's learnt ones."""
    messages = conversation.messages
    first, is_whole = _first_learnt(conversation, how), how.train_on == "all"
    own = {i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"}
    spared = {i for i in (range(len(messages)) if is_whole else own) if is_spared(messages[i])}
    rendered = RenderedTurns(
        template, messages, conversation.tools, how.eos_token, heeds_generation=how.heeds_flags
    )
    heeds = flags_count(template.source, template.marks_assistant, how)
    silent = spared if heeds else set()
    if is_whole:
        holes = rendered.turns_of_anyone(sorted(silent)) if silent else []
        spans = without([(0, len(rendered.text))], holes)
    else:
        spans = rendered.spans_of(own - silent)
    if heeds and how.train_on in ("auto", "assistant"):
        others = set(range(first, len(messages))) - own
        if asked := [i for i in sorted(others) if is_asked_for(messages[i])]:
            spans = joined([*spans, *rendered.turns_of_anyone(asked)])
    return rendered.text, spans, bool(spared), own - silent


def _first_learnt(conversation: Conversation, how: Masking) -> int:
    """The first message that may be learnt."""
    is_last = how.train_on == "last_turn"
    if is_last or (how.train_on == "completion" and not conversation.first):
        return len(conversation.messages) - 1
    return conversation.first


# ---- what the child process is asked for ---------------------------------------------------------


class Sources(NamedTuple):
    """The templates of a tokenizer, and the special tokens that they may print."""

    source: str
    tool_source: str | None  # of the template for conversations with tools, if it is another one
    variables: Mapping[str, Any]

    def suited(self, conversation: Conversation) -> tuple[Template, LeftOut]:
        """The template that writes a conversation, with the options that it gives.

        As in transformers, it is the one for tools where there are any.
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
    """A conversation's text, and what the template marks of it."""
    template, _ = sources.suited(conversation)
    return template.render(conversation.messages, add_generation_prompt, conversation.tools)


def left_out(sources: Sources, conversation: Conversation) -> list[str]:
    """What of a conversation the template leaves out, in words."""
    return sorted(sources.suited(conversation)[1].of(conversation, "", frozenset()))


def mask_many(
    sources: Sources, conversations: Sequence[Conversation], how: Masking
) -> list[Masked | tuple[str, str]]:
    """Each conversation's text with what is learnt; an error, by its name, in its place."""
    return [_masked_or_error(sources, each, how) for each in conversations]


def _masked_or_error(
    sources: Sources, conversation: Conversation, how: Masking
) -> Masked | tuple[str, str]:
    try:
        return _masked(*sources.suited(conversation), conversation, how)
    except QLoRAError as err:
        return type(err).__name__, str(err)
