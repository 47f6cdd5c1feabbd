"""Answers as OpenAI's API writes them: of chats, and of texts that are gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.generation.text import TokenLogprobs, continuation
from qlora_wgpu.serving.call_formats import Call

Object = dict[str, Any]


class Form(Protocol):
    """How answers of a kind are written.

    Attributes:
        prefix: What ids of answers begin with.
        whole: The kind of an answer that comes at once.
        chunk: The kind of a piece of a streamed one.
    """

    prefix: str
    whole: str
    chunk: str

    def begun(self) -> Object | None:
        """What of a choice comes first where it is streamed, if anything."""

    def piece(self, text: str) -> Object:
        """What of a choice has come."""

    def all_of(self, text: str, calls: Sequence[Object] = ()) -> Object:
        """A choice that has ended."""

    def logprobs(self, tokens: Sequence[Told]) -> Object:
        """How likely tokens were."""


class Told:
    """A token, its text, and how likely it was.

    Attributes:
        text: The token's text within its answer.
        logprobs: How likely it was.
        others: The likeliest tokens' texts and logarithms.
        offset: Characters of the answer before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], token: int, logprobs: TokenLogprobs,
        offset: int,
    ) -> None:  # fmt: skip
        """Takes a token of an answer.

        Args:
            tokenizer: The model's.
            before: The tokens before it.
            token: Its id.
            logprobs: How likely it was.
            offset: Characters of the answer before it.
        """
        self.text = continuation(tokenizer, before, [token])
        self.logprobs = logprobs
        self.others = [(continuation(tokenizer, before, [i]), p) for i, p in logprobs.top]
        self.offset = offset


class ChatForm:
    """Chat completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begun(self) -> Object | None:
        """Whose turn it is."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Object:
        """More of the turn."""
        return {"delta": {"content": text} if text else {}}

    def all_of(self, text: str, calls: Sequence[Object] = ()) -> Object:
        """The turn."""
        message: Object = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        return {"message": message}

    def logprobs(self, tokens: Sequence[Told]) -> Object:
        """Tokens with their likeliest alternatives."""
        content = [
            _likely(each.text, each.logprobs.logprob)
            | {"top_logprobs": [_likely(*other) for other in each.others]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


class TextForm:
    """Completions of texts."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def begun(self) -> Object | None:
        """Nothing."""
        return None

    def piece(self, text: str) -> Object:
        """More of the text."""
        return {"text": text}

    def all_of(self, text: str, calls: Sequence[Object] = ()) -> Object:
        """The text."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[Told]) -> Object:
        """Tokens, side by side with what belongs to each."""
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprobs.logprob for each in tokens],
            "top_logprobs": [dict(reversed(each.others)) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }


def whole_call(call: Call, identity: str) -> Object:
    """A call of a function."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identity, "type": "function", "function": function}


def pieces_of_call(number: int, call: Object) -> list[Object]:
    """What of a choice has come with a call, where it is streamed: the name, then the arguments."""
    function = call["function"]
    begun = {"index": number, **call, "function": {**function, "arguments": ""}}
    rest = {"index": number, "function": {"arguments": function["arguments"]}}
    return [{"delta": {"tool_calls": [each]}} for each in (begun, rest)]


def _likely(text: str, logprob: float) -> Object:
    """A token; its bytes are not known where it is half a character."""
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
