"""Which characters of a conversation are learnt: by whose turns they are, and what turns say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from qlora_wgpu.data.chat import ChatTemplate, Conversation
from qlora_wgpu.data.masking import assistant_spans, spans_from, turns_of_anyone
from qlora_wgpu.data.messages import is_left_out
from qlora_wgpu.data.spans import Span, joined, without
from qlora_wgpu.data.turn_begins import begins_of_turns
from qlora_wgpu.data.turn_marks import decides, is_asked_for, is_spared
from qlora_wgpu.errors import DataError

TrainOn = Literal["auto", "assistant", "last_turn", "completion", "all"]


@dataclass(frozen=True)
class LearntTurns:
    """A conversation as text, and what is learnt of it.

    Attributes:
        text: The text.
        spans: Ascending character ranges.
        is_spared: Whether turns that would be learnt say that they are not.
    """

    text: str
    spans: list[Span]
    is_spared: bool = False


class TurnChooser:
    """Finds what is learnt of conversations.

    Attributes:
        checks: Whether what turns say of themselves counts here, and so has to be sound.
    """

    def __init__(
        self, template: ChatTemplate, train_on: TrainOn, eos_token: str | None, *, heeds: bool
    ) -> None:
        """Builds one.

        Args:
            template: The chat template.
            train_on: The turns that are learnt.
            eos_token: Text that some templates put after the very last turn only.
            heeds: Whether turns decide by what they say of themselves. A template that marks what
                is learnt by what they say decides alone, unless everything is learnt.
        """
        self._template = template
        self._train_on = train_on
        self._eos_token = eos_token
        self.checks = heeds and (train_on == "all" or not decides(template))

    def choose(self, conversation: Conversation) -> LearntTurns:
        """Renders a conversation and finds what is learnt of it.

        Raises:
            DataError: If the template refuses the conversation, or a turn cannot be found for
                certain.
        """
        messages = conversation.messages
        first = self._first(conversation)
        is_whole = self._train_on == "all"
        spared = {
            i for i, message in enumerate(messages)
            if is_spared(message) and (is_whole or (i >= first and _is_own(message)))
        }  # fmt: skip
        if is_whole:
            text = self._template.render(messages, tools=conversation.tools).text
            spans = [(0, len(text))]
            if self.checks and spared:
                spans = without(spans, self._turns(conversation, text, sorted(spared)))
            return LearntTurns(text, spans, bool(spared))
        text, spans = self._from(first, conversation)
        if self.checks:
            if spared:
                spans = self._without(spared, first, conversation, text, spans)
            if self._train_on in ("auto", "assistant"):
                spans = self._with_others(first, conversation, text, spans)
        return LearntTurns(text, spans, bool(spared))

    def _first(self, conversation: Conversation) -> int:
        """The first message that may be learnt."""
        is_last = self._train_on == "last_turn"
        if is_last or (self._train_on == "completion" and not conversation.first):
            return len(conversation.messages) - 1
        return conversation.first

    def _from(self, first: int, conversation: Conversation) -> tuple[str, list[Span]]:
        """The conversation as text, and the assistant's spans from one message on."""
        messages, tools, _ = conversation
        if not first:
            return assistant_spans(self._template, messages, tools, self._eos_token)
        return spans_from(self._template, messages, first, tools, self._eos_token)

    def _without(
        self,
        spared: set[int],
        first: int,
        conversation: Conversation,
        text: str,
        spans: Sequence[Span],
    ) -> list[Span]:
        """The assistant's spans without those of some turns.

        A template may mark several passages of a turn: turns that are learnt are told from others
        by where the first of each begins.
        """
        messages, tools, _ = conversation
        turns = [i for i in range(first, len(messages)) if _is_own(messages[i])]
        if not self._template.marks_assistant:
            return [span for i, span in zip(turns, spans, strict=True) if i not in spared]
        _, every = assistant_spans(self._template, messages, tools, self._eos_token)
        runs = [(kept, next(run)) for kept, run in groupby(turns, lambda i: i not in spared)]
        later = [turn for _, turn in runs[1:]]
        begins = [0]
        found = begins_of_turns(self._template, messages, later, tools, text, every)
        for turn, begin in zip(later, found, strict=True):
            if begin is None:
                raise DataError(
                    f"message {turn + 1} is to be learnt or not otherwise than the turn before it, "
                    "and they cannot be told apart in the rendered chat: use another "
                    "data.chat_template"
                )
            begins.append(begin)
        ends = [*begins[1:], len(text)]
        return [
            span
            for (kept, _), begin, end in zip(runs, begins, ends, strict=True)
            for span in spans
            if kept and begin < span[1] <= end
        ]

    def _with_others(
        self, first: int, conversation: Conversation, text: str, spans: list[Span]
    ) -> list[Span]:
        """The spans with the turns of others that say they are learnt."""
        messages = conversation.messages
        asked = [
            i for i in range(first, len(messages))
            if not _is_own(messages[i]) and is_asked_for(messages[i])
        ]  # fmt: skip
        return joined([*spans, *self._turns(conversation, text, asked)]) if asked else spans

    def _turns(self, conversation: Conversation, text: str, numbers: Sequence[int]) -> list[Span]:
        """The spans of some messages, of those that the template has written."""
        messages, tools, _ = conversation
        shown = [i for i in numbers if not is_left_out(messages[i], text)]
        return turns_of_anyone(self._template, messages, tools, self._eos_token, text, shown)


def _is_own(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")
