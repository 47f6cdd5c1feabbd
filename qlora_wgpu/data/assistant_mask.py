"""Which characters of a conversation are learnt: by whose turns they are, and what turns say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.data.chat_template import ChatTemplate, Conversation
from qlora_wgpu.data.masking import RenderedTurns, Span, joined, without
from qlora_wgpu.data.messages import decides, is_asked_for, is_spared

TrainOn = Literal["auto", "assistant", "last_turn", "completion", "all"]


@dataclass(frozen=True)
class LearntTurns:
    """A conversation as text, and what is learnt of it."""

    text: str  # the text
    spans: list[Span]  # ascending character ranges
    is_spared: bool  # whether turns that would be learnt say that they are not
    turns: set[int]  # the assistant's that are learnt


class TurnChooser:
    """Finds what is learnt of conversations.

    Attributes:
        checks: Whether what turns say of themselves counts here, and so has to be sound.
    """

    def __init__(
        self, template: ChatTemplate, train_on: TrainOn, eos_token: str | None, *, heeds: bool
    ) -> None:
        """Builds one."""
        self._template = template
        self._train_on = train_on
        self._eos_token = eos_token
        self._heeds = heeds
        self.checks = heeds and (train_on == "all" or not decides(template))

    def choose(self, conversation: Conversation) -> LearntTurns:
        """Renders a conversation and finds what is learnt of it."""
        messages = conversation.messages
        first, is_whole = self._first(conversation), self._train_on == "all"
        own = {i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"}
        may_be_spared = range(len(messages)) if is_whole else own
        spared = {i for i in may_be_spared if is_spared(messages[i])}
        rendered = RenderedTurns(
            self._template, messages, conversation.tools, self._eos_token, heeds=self._heeds
        )
        left_out = spared if self.checks else set()
        if is_whole:
            holes = rendered.turns_of_anyone(sorted(left_out)) if left_out else []
            spans = without([(0, len(rendered.text))], holes)
        else:
            spans = rendered.spans_of(own - left_out)
        if self.checks and self._train_on in ("auto", "assistant"):
            others = set(range(first, len(messages))) - own
            if asked := [i for i in sorted(others) if is_asked_for(messages[i])]:
                spans = joined([*spans, *rendered.turns_of_anyone(asked)])
        return LearntTurns(rendered.text, spans, bool(spared), own - left_out)

    def _first(self, conversation: Conversation) -> int:
        """The first message that may be learnt."""
        is_last = self._train_on == "last_turn"
        if is_last or (self._train_on == "completion" and not conversation.first):
            return len(conversation.messages) - 1
        return conversation.first
