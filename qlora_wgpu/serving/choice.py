"""One of the answers of a request, as it is written."""

from __future__ import annotations

from qlora_wgpu.serving.calls import CallReader
from qlora_wgpu.serving.forms import Form, Object, Told, pieces_of_call, whole_call
from qlora_wgpu.serving.writer import Answer, Piece

_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class Choice:
    """What has come of an answer.

    Attributes:
        tokens: Its tokens so far.
    """

    def __init__(self, number: int, answer: Answer, form: Form) -> None:
        """Nothing has come.

        Args:
            number: Its place among the answers.
            answer: What is written.
            form: How it is written.
        """
        self.tokens = 0
        self._number, self._answer, self._form = number, answer, form
        self._text = ""
        offered = answer.wanted.offered
        self._reader = None if offered is None else CallReader(offered)
        self._calls: list[Object] = []
        self._reason: str | None = None
        self._ids: list[int] = []
        self._told: list[Told] = []
        self._offset = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self._answer.wanted.prompt_ids)

    def begun(self) -> Object | None:
        """What comes first where it is streamed, if anything."""
        begun = self._form.begun()
        return None if begun is None else self._choice(begun, None, None)

    def take(self, piece: Piece) -> list[Object]:
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

    def _made_of(self, piece: Piece) -> list[Object]:
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
            call = whole_call(each, self._reader.new_id())
            made += pieces_of_call(len(self._calls), call)
            self._calls.append(call)
        if self._reader.ended:
            self._answer.is_wanted = False
        return made

    def _new_told(self, piece: Piece) -> list[Told]:
        tokenizer, context = self._answer.served.written.tokenizer, self._answer.wanted.context
        new: list[Told] = []
        for token, logprobs in zip(piece.ids, piece.told, strict=False):
            before = [*context, *self._ids]
            new.append(Told(tokenizer, before, token, logprobs, self._offset))
            self._ids.append(token)
            self._offset += len(new[-1].text)
        self._told += new
        return new

    def _choice(self, what: Object, told: list[Told] | None, reason: str | None) -> Object:
        wants = self._answer.asked.logprobs is not None and told is not None
        logprobs = self._form.logprobs(told or []) if wants else None
        return {"index": self._number, **what, "logprobs": logprobs, "finish_reason": reason}
