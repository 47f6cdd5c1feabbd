"""Responses of OpenAI's API, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.generation.text import TokenLogprobs, continuation
from qlora_wgpu.serving.tool_calls import ToolCallParser
from qlora_wgpu.serving.writer import Chunk, Generation

# ---- formats -------------------------------------------------------------------------------------

Object = dict[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer with its log probability."""

    text: str  # as decoded within the answer
    logprobs: TokenLogprobs
    others: list[tuple[str, float]]  # the most likely tokens and their log probabilities
    offset: int  # characters of the answer before it

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, before: Sequence[int], token: int, logprobs: TokenLogprobs,
        offset: int,
    ) -> TokenLogprob:  # fmt: skip
        """Decodes a token and its alternatives after other tokens."""
        others = [(continuation(tokenizer, before, [i]), p) for i, p in logprobs.top]
        return cls(continuation(tokenizer, before, [token]), logprobs, others, offset)


class TextForm:
    """The format of completions."""

    # Prefix of ids, and object types of a whole response and of a streamed chunk.
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def first_delta(self) -> Object | None:
        """The first chunk of a stream, if there is one before the text."""
        return None

    def delta(self, text: str) -> Object:
        """A streamed piece of text."""
        return {"text": text}

    def all_of(self, text: str, calls: Sequence[Object]) -> Object:
        """A complete choice."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Object:
        """Log probabilities, as parallel lists."""
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprobs.logprob for each in tokens],
            "top_logprobs": [dict(reversed(each.others)) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }


class ChatForm(TextForm):
    """The format of chat completions, with tool calls."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_delta(self) -> Object:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> Object:
        """A streamed piece of the message."""
        return {"delta": {"content": text} if text else {}}

    def all_of(self, text: str, calls: Sequence[Object]) -> Object:
        """The complete message."""
        message: Object = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        return {"message": message}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Object:
        """Tokens with their most likely alternatives."""
        content = [
            _likely(each.text, each.logprobs.logprob)
            | {"top_logprobs": [_likely(*other) for other in each.others]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


def _likely(text: str, logprob: float) -> Object:
    """A token; its bytes are unknown if it is part of a character."""
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def tool_call_deltas(number: int, call: Object) -> list[Object]:
    """The chunks of a streamed tool call: the name, then the arguments."""
    function = call["function"]
    head = {"index": number, **call, "function": {**function, "arguments": ""}}
    rest = {"index": number, "function": {"arguments": function["arguments"]}}
    return [{"delta": {"tool_calls": [each]}} for each in (head, rest)]


# ---- the answers of a request --------------------------------------------------------------------


async def merged(answers: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields chunks of all answers as they are generated, each with its answer's index.

    Answers are cancelled if the caller stops iterating.
    """
    remaining = len(answers)
    try:
        while remaining:
            number, piece = await answers[
                0
            ].pieces.get()  # all answers of a request share the queue
            if isinstance(piece, Exception):
                raise piece
            remaining -= piece.finish_reason is not None
            yield number, piece
    finally:
        for answer in answers:
            answer.is_cancelled = True


_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class Choice:
    """An answer as a choice of the response."""

    def __init__(self, number: int, answer: Generation, form: TextForm) -> None:
        self.tokens = 0  # so far
        self._number, self._answer, self._form = number, answer, form
        self._text = ""
        tools = answer.prompt.tools
        self._parser = None if tools is None else ToolCallParser(tools)
        self._calls: list[Object] = []
        self._reason: str | None = None
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._offset = 0

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of its prompt."""
        return len(self._answer.prompt.ids)

    def first_delta(self) -> Object | None:
        """The first chunk of a stream, if there is one before the text."""
        first = self._form.first_delta()
        return None if first is None else self._choice(first, None, None)

    def take(self, piece: Chunk) -> list[Object]:
        """Adds a chunk; returns what a stream sends for it."""
        self.tokens = piece.tokens
        new = self._new_logprobs(piece)
        deltas = self._deltas(piece)
        if new and not deltas:
            deltas = [self._form.delta("")]
        parts = [self._choice(each, new if each is deltas[0] else None, None) for each in deltas]
        if piece.finish_reason is not None:
            called = self._calls and piece.finish_reason != "length"
            self._reason = "tool_calls" if called else _REASONS[piece.finish_reason]
            parts.append(self._choice(self._form.delta(""), None, self._reason))
        return parts

    def whole(self) -> Object:
        """The complete choice."""
        return self._choice(
            self._form.all_of(self._text, self._calls), self._logprobs, self._reason
        )

    def _deltas(self, piece: Chunk) -> list[Object]:
        """Text and tool calls of a chunk."""
        if self._parser is None:
            self._text += piece.text
            return [self._form.delta(piece.text)] if piece.text else []
        parsed = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parsed += self._parser.end()
        deltas: list[Object] = []
        for each in parsed:
            if isinstance(each, str):
                self._text += each
                deltas.append(self._form.delta(each))
                continue
            function = {"name": each.name, "arguments": each.arguments}
            call = {"id": self._parser.format.new_id(), "type": "function", "function": function}
            deltas += tool_call_deltas(len(self._calls), call)
            self._calls.append(call)
        if self._parser.ended:
            self._answer.is_cancelled = True
        return deltas

    def _new_logprobs(self, piece: Chunk) -> list[TokenLogprob]:
        tokenizer, context = self._answer.model.prompts.tokenizer, self._answer.prompt.context
        new: list[TokenLogprob] = []
        for token, logprobs in zip(piece.ids, piece.logprobs, strict=False):
            before = [*context, *self._ids]
            new.append(TokenLogprob.of(tokenizer, before, token, logprobs, self._offset))
            self._ids.append(token)
            self._offset += len(new[-1].text)
        self._logprobs += new
        return new

    def _choice(
        self, content: Object, tokens: list[TokenLogprob] | None, reason: str | None
    ) -> Object:
        is_requested = self._answer.request.logprobs is not None and tokens is not None
        logprobs = self._form.logprobs(tokens or []) if is_requested else None
        return {"index": self._number, **content, "logprobs": logprobs, "finish_reason": reason}
