"""What of an answer is sent: text and calls in the order in which they come."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.serving.app import ChatForm, Choice, TextForm
from qlora_wgpu.serving.tool_calls import HERMES, ToolSet, by_name
from qlora_wgpu.serving.writer import Chunk

TOOLS = by_name([{"type": "function", "function": {"name": "add", "parameters": {}}}])
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def answer(*, parallel=True, offered=True):
    tools = ToolSet(HERMES, TOOLS, parallel) if offered else None
    prompt = SimpleNamespace(tools=tools, context=(), ids=[1, 2])
    model = SimpleNamespace(prompts=SimpleNamespace(tokenizer=None))
    request = SimpleNamespace(logprobs=None)
    return SimpleNamespace(prompt=prompt, model=model, request=request, is_cancelled=False)


def sent(choice, *pieces):
    """The deltas of pieces, the last of which says why it ended."""
    return [part["delta"] for piece in pieces for part in choice.take(piece)]


def test_text_and_calls_of_one_piece_all_come():
    own = answer()
    choice = Choice(1, own, ChatForm())
    first, name, arguments, second, *end = sent(choice, Chunk(f"Well. {CALL} So.", 9, "stop"))
    assert first["content"].strip() == "Well." and second["content"].strip() == "So."
    assert name["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    assert arguments["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert end[-1] == {} and not own.is_cancelled
    whole = choice.whole()
    assert (whole["index"], whole["finish_reason"], choice.tokens) == (1, "tool_calls", 9)
    assert len(whole["message"]["tool_calls"]) == 1 and choice.prompt_tokens == 2


def test_an_answer_is_cancelled_after_the_only_call_that_it_may_have():
    own = answer(parallel=False)
    choice = Choice(0, own, ChatForm())
    deltas = sent(choice, Chunk(CALL[:20], 3), Chunk(CALL[20:] + CALL, 9))
    assert [delta["tool_calls"][0]["index"] for delta in deltas] == [0, 0] and own.is_cancelled


@pytest.mark.parametrize(("reason", "told"), [
    ("stop", "stop"), ("length", "length"), ("cancelled", "stop")
])  # fmt: skip
def test_why_an_answer_ended_is_told_with_its_last_part(reason, told):
    choice = Choice(0, answer(offered=False), TextForm())
    first = choice.take(Chunk("a", 1))
    assert [part["text"] for part in first] == ["a"] and first[0]["finish_reason"] is None
    assert choice.take(Chunk("", 2)) == []
    *_, last = choice.take(Chunk("b", 3, reason))
    assert (last["text"], last["finish_reason"]) == ("", told)
    assert choice.whole()["text"] == "ab" and choice.first_delta() is None


def test_a_call_that_was_cut_off_ends_for_its_length():
    choice = Choice(0, answer(), ChatForm())
    sent(choice, Chunk(CALL, 9), Chunk("", 10, "length"))
    assert choice.whole()["finish_reason"] == "length"
