"""What a chat template leaves out of a conversation, as many do without a word."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from qlora_wgpu.data.chat import ChatTemplate, Conversation
from qlora_wgpu.data.marker_words import MarkedConversation, Part
from qlora_wgpu.errors import DataError
from qlora_wgpu.visible import quoted

_KINDS = {"thought": "thoughts", "call": "tool calls", "tool": "the tools"}
ANSWERS = frozenset({*_KINDS.values(), "messages of the role 'assistant'"})
"""What templates leave out of earlier answers by design, and of tools."""
_MOST_SHAPES = 4096  # that are remembered


class LeftOut:
    """Finds what a template leaves out: that of which a word of its own is not in the text.

    Which parts a template leaves out follows from which there are, so that of conversations of one
    shape one is looked at.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Has looked at none.

        Args:
            template: The chat template.
        """
        self._template = template
        self._known: dict[Any, tuple[Set[Part], Set[Part]]] = {}

    def of(self, conversation: Conversation, text: str, learnt: Set[int]) -> frozenset[str]:
        """What of a conversation is left out, in words.

        Args:
            conversation: The conversation.
            text: Its text.
            learnt: The numbers of the messages that are learnt.

        Raises:
            DataError: If nothing is left of a message that is learnt.
        """
        messages = conversation.messages
        shape = (tuple(map(_shape, messages)), bool(conversation.tools))
        if shape not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._parts(conversation, text)
        parts, left_out = self._known[shape]
        for number in sorted({part.message for part in left_out} & learnt):
            own = {part for part in parts if part.message == number}
            if own <= left_out:
                kinds = " and ".join(sorted({_says(part) for part in own}))
                raise DataError(
                    f"message {number + 1} is learnt, but the chat template leaves its {kinds} "
                    "out, and nothing else is in it: use another data.chat_template"
                )
        return frozenset(_in_words(part, messages) for part in left_out)

    def _parts(self, conversation: Conversation, text: str) -> tuple[Set[Part], Set[Part]]:
        """All parts of a conversation, and those that are left out."""
        marked = MarkedConversation(text, list(conversation.messages), conversation.tools)
        for number in range(len(marked.messages)):
            marked.mark(number)
        marked.mark_tools()
        try:
            whole = self._template.render(marked.messages, tools=marked.tools or None).text
        except DataError:  # which goes by what is exchanged
            return frozenset(), frozenset()
        return marked.parts, marked.left_out(whole)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a message decides which parts it has."""
    content = message.get("content")
    return (
        message["role"],
        tuple(key for key, value in message.items() if value),
        isinstance(content, str) and bool(content.strip()),
        isinstance(content, str) and "</think>" in content,
    )


def _says(part: Part) -> str:
    return {"thought": "thought", "call": "tool call"}.get(part.kind, "content")


def _in_words(part: Part, messages: Any) -> str:
    if part.kind in _KINDS:
        return _KINDS[part.kind]
    role = messages[part.message]["role"]
    return "the system message" if role == "system" else f"messages of the role {quoted(role)}"
