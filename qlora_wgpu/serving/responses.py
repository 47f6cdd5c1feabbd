"""Answers as OpenAI's API writes them, several of a request at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.generation.text import TokenLogprobs, continuation
from qlora_wgpu.serving.tool_calls import ToolCallParser
from qlora_wgpu.serving.writer import Chunk, Generation

# ---- forms of answers ----------------------------------------------------------------------------

Object = dict[str, Any]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and how likely it was."""

    text: str  # its text within the answer
    logprobs: TokenLogprobs  # how likely it was
    others: list[tuple[str, float]]  # the likeliest tokens' texts and logarithms
    offset: int  # characters of the answer before it

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, before: Sequence[int], token: int, logprobs: TokenLogprobs,
        offset: int,
    ) -> TokenLogprob:  # fmt: skip
        """A token behind others."""
        others = [(continuation(tokenizer, before, [i]), p) for i, p in logprobs.top]
        return cls(continuation(tokenizer, before, [token]), logprobs, others, offset)


class TextForm:
    """Completions of texts."""

    # What ids of answers begin with, the kind of one that comes at once, and of a streamed piece.
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def begun(self) -> Object | None:
        """What of a choice comes first where it is streamed, if anything."""
        return None

    def piece(self, text: str) -> Object:
        """What of a choice has come."""
        return {"text": text}

    def all_of(self, text: str, calls: Sequence[Object]) -> Object:
        """A choice that has ended."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Object:
        """How likely tokens were, side by side with what belongs to each."""
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprobs.logprob for each in tokens],
            "top_logprobs": [dict(reversed(each.others)) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }


class ChatForm(TextForm):
    """Chat completions: turns, and calls of functions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begun(self) -> Object:
        """Whose turn it is."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Object:
        """More of the turn."""
        return {"delta": {"content": text} if text else {}}

    def all_of(self, text: str, calls: Sequence[Object]) -> Object:
        """The turn."""
        message: Object = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        return {"message": message}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> Object:
        """Tokens with their likeliest alternatives."""
        content = [
            _likely(each.text, each.logprobs.logprob)
            | {"top_logprobs": [_likely(*other) for other in each.others]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


def _likely(text: str, logprob: float) -> Object:
    """A token; its bytes are not known where it is half a character."""
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def pieces_of_call(number: int, call: Object) -> list[Object]:
    """What of a choice has come with a call, where it is streamed: the name, then the arguments."""
    function = call["function"]
    begun = {"index": number, **call, "function": {**function, "arguments": ""}}
    rest = {"index": number, "function": {"arguments": function["arguments"]}}
    return [{"delta": {"tool_calls": [each]}} for each in (begun, rest)]


# ---- several answers at a time -------------------------------------------------------------------


async def together(answers: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields pieces as they come, each with its answer's number, until all have ended.

    Whoever stops earlier leaves the answers to nobody.
    """
    growing = len(answers)
    try:
        while growing:
            number, piece = await answers[0].pieces.get()  # which all of a request have
            if isinstance(piece, Exception):
                raise piece
            growing -= piece.finish_reason is not None
            yield number, piece
    finally:
        for answer in answers:
            answer.is_wanted = False


_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class Choice:
    """What has come of an answer."""

    def __init__(self, number: int, answer: Generation, form: TextForm) -> None:
        self.tokens = 0  # so far
        self._number, self._answer, self._form = number, answer, form
        self._text = ""
        offered = answer.wanted.offered
        self._reader = None if offered is None else ToolCallParser(offered)
        self._calls: list[Object] = []
        self._reason: str | None = None
        self._ids: list[int] = []
        self._told: list[TokenLogprob] = []
        self._offset = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self._answer.wanted.prompt_ids)

    def begun(self) -> Object | None:
        """What comes first where it is streamed, if anything."""
        begun = self._form.begun()
        return None if begun is None else self._choice(begun, None, None)

    def take(self, piece: Chunk) -> list[Object]:
        """Takes what has come; what is sent of it where it is streamed."""
        self.tokens = piece.tokens
        new = self._new_told(piece)
        made = self._made_of(piece)
        if new and not made:
            made = [self._form.piece("")]
        parts = [self._choice(each, new if each is made[0] else None, None) for each in made]
        if piece.finish_reason is not None:
            called = self._calls and piece.finish_reason != "length"
            self._reason = "tool_calls" if called else _REASONS[piece.finish_reason]
            parts.append(self._choice(self._form.piece(""), None, self._reason))
        return parts

    def whole(self) -> Object:
        """All of it."""
        return self._choice(self._form.all_of(self._text, self._calls), self._told, self._reason)

    def _made_of(self, piece: Chunk) -> list[Object]:
        """What of the choice has come: text, and calls of functions."""
        if self._reader is None:
            self._text += piece.text
            return [self._form.piece(piece.text)] if piece.text else []
        read = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            read += self._reader.end()
        made: list[Object] = []
        for each in read:
            if isinstance(each, str):
                self._text += each
                made.append(self._form.piece(each))
                continue
            function = {"name": each.name, "arguments": each.arguments}
            call = {"id": self._reader.form.new_id(), "type": "function", "function": function}
            made += pieces_of_call(len(self._calls), call)
            self._calls.append(call)
        if self._reader.ended:
            self._answer.is_wanted = False
        return made

    def _new_told(self, piece: Chunk) -> list[TokenLogprob]:
        tokenizer, context = self._answer.served.written.tokenizer, self._answer.wanted.context
        new: list[TokenLogprob] = []
        for token, logprobs in zip(piece.ids, piece.told, strict=False):
            before = [*context, *self._ids]
            new.append(TokenLogprob.of(tokenizer, before, token, logprobs, self._offset))
            self._ids.append(token)
            self._offset += len(new[-1].text)
        self._told += new
        return new

    def _choice(self, what: Object, told: list[TokenLogprob] | None, reason: str | None) -> Object:
        wants = self._answer.asked.logprobs is not None and told is not None
        logprobs = self._form.logprobs(told or []) if wants else None
        return {"index": self._number, **what, "logprobs": logprobs, "finish_reason": reason}
