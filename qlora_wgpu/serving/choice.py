"""One of the answers of a request, as it is written."""

from __future__ import annotations

from qlora_wgpu.serving.forms import Form, Object, Told
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
        self._text += piece.text
        self.tokens = piece.tokens
        new = self._new_told(piece)
        parts: list[Object] = []
        if piece.text or new:
            parts.append(self._choice(self._form.piece(piece.text), new, None))
        if piece.finish_reason is not None:
            self._reason = _REASONS[piece.finish_reason]
            parts.append(self._choice(self._form.piece(""), None, self._reason))
        return parts

    def whole(self) -> Object:
        """All of it."""
        return self._choice(self._form.all_of(self._text), self._told, self._reason)

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
