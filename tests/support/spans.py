"""Conversations rendered here, and the spans of the assistant's turns that are trained on."""

from __future__ import annotations

from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.masking import Masking, loss_spans


def render_chat(
    source, messages, add_generation_prompt=False, special_tokens=None, tools=None, options=None
):
    """A conversation rendered by a template's source."""
    template = ChatTemplate(source, special_tokens)
    return template.render(messages, add_generation_prompt, tools, options)


def assistant_spans(template, messages, tools=None, eos_token=None, train_on="assistant"):
    """The text, and the spans that the loss is taken on."""
    conversation = Conversation(messages, tools)
    own, _ = template.sources.suited(conversation)
    text, spans, *_ = loss_spans(own, conversation, Masking(train_on, eos_token))
    return text, spans


def last_turn_spans(template, messages, tools=None, eos_token=None):
    """The same of the last turn alone."""
    return assistant_spans(template, messages, tools, eos_token, "last_turn")
