"""The thread that writes: texts of all requests grow together in one engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.growing_text import FinishReason, Text
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.serving.chat_request import ChatRequest


@dataclass(frozen=True)
class Piece:
    """What has come of an answer.

    Attributes:
        text: What follows what came before.
        tokens: Tokens so far.
        finish_reason: Why it has ended, with the last piece.
    """

    text: str
    tokens: int
    finish_reason: FinishReason | None = None


class Answer:
    """An answer that grows in the writer's thread; its pieces come in the event loop's.

    Attributes:
        request: What was asked for.
        prompt_ids: The conversation's tokens.
        is_wanted: Whether somebody still waits for it.
    """

    def __init__(self, request: ChatRequest, prompt_ids: list[int], stream: TextStream) -> None:
        """Has not begun; to be made in the event loop."""
        self.request = request
        self.prompt_ids = prompt_ids
        self.is_wanted = True
        self._text: Text | None = None
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    # -- in the event loop ---------------------------------------------------------------------

    async def begun(self) -> None:
        """Waits until it has its turn to be looked at.

        Raises:
            QLoRAError: If it cannot be written.
        """
        await self._begun

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until its end.

        Raises:
            QLoRAError: If it could not be computed.
        """
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    # -- in the writer's thread ----------------------------------------------------------------

    def begin(self, text: Text) -> None:
        """Takes its text in the engine."""
        self._text = text
        self._tell(self._set_begun, None)

    def read(self) -> bool:
        """Takes in what the engine has made; whether it has ended."""
        text, stream, shown = self._text, self._stream, ""
        assert text is not None
        while len(text.ids) > stream.count and not stream.stopped:
            shown += stream.push(text.ids[stream.count])
        if stream.stopped:
            text.cancel("stop")
            text.finish_reason = "stop"
        elif not self.is_wanted:
            text.cancel()
        if text.finish_reason is not None and not stream.stopped:
            shown += stream.rest()
        if shown or text.finish_reason is not None:
            piece = Piece(shown, len(text.ids), text.finish_reason)
            self._tell(self._pieces.put_nowait, piece)
        return text.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        if self._text is None:
            self._tell(self._set_begun, error)
            return
        self._text.cancel()
        self._tell(self._pieces.put_nowait, error)

    def _set_begun(self, error: Exception | None) -> None:
        if self._begun.done():
            return
        if error is None:
            self._begun.set_result(None)
        else:
            self._begun.set_exception(error)

    def _tell(self, what: object, value: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, value)  # type: ignore[arg-type]


class Writer:
    """Owns an engine, in a thread of its own."""

    def __init__(self, engine: Engine, written: PromptFormat) -> None:
        """Starts the thread.

        Args:
            engine: Nobody else uses it.
            written: How conversations are written.
        """
        self._engine = engine
        self._written = written
        self._changed = threading.Condition()
        self._asked: list[Answer] = []
        self._growing: list[Answer] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    async def ask(self, request: ChatRequest) -> Answer:
        """Begins an answer.

        Raises:
            DataError: If the conversation has no room, or the template refuses it.
            ConfigError: If a setting is out of its range.
        """
        written = self._written
        stops = (*request.stop, written.stop_text)
        answer = Answer(
            request, written.ids(request.messages), TextStream(written.tokenizer, stops)
        )
        with self._changed:
            self._asked.append(answer)
            self._changed.notify()
        await answer.begun()
        return answer

    def close(self) -> None:
        """Ends the thread after its turn."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked or self._growing)
                if self._closed:
                    return
                asked, self._asked = self._asked, []
            for answer in asked:
                self._begin(answer)
            if self._growing:
                self._turn()

    def _begin(self, answer: Answer) -> None:
        most = answer.request.max_new_tokens
        try:
            text = self._engine.add(
                answer.prompt_ids,
                answer.request.sampling,
                max_new_tokens=self._engine.capacity if most is None else most,
                stop_ids=self._written.stop_ids,
            )
        except QLoRAError as err:
            answer.fail(err)
            return
        answer.begin(text)
        self._growing.append(answer)

    def _turn(self) -> None:
        try:
            if not self._engine.is_idle:
                self._engine.step()
        except QLoRAError as err:
            for answer in self._growing:
                answer.fail(err)
            self._growing = []
            return
        self._growing = [answer for answer in self._growing if not answer.read()]
