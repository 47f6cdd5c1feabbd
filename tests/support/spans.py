"""The assistant's turns in a rendered conversation, as rows are learnt; rendered here."""

from __future__ import annotations

from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.masking import Masking, loss_spans


def assistant_spans(template, messages, tools=None, eos_token=None, train_on="assistant"):
    """The text, and what of it is learnt."""
    conversation = Conversation(messages, tools)
    own, _ = template.sources.suited(conversation)
    text, spans, *_ = loss_spans(own, conversation, Masking(train_on, eos_token))
    return text, spans


def last_turn_spans(template, messages, tools=None, eos_token=None):
    """The same of the last turn alone."""
    return assistant_spans(template, messages, tools, eos_token, "last_turn")
