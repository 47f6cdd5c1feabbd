"""The endpoints: models, chat completions and completions, as OpenAI's clients know them.

Whoever can reach the address can use it, so it is the loopback's alone. Pages of other sites, which
a browser on this machine shows, cannot: they may send neither JSON without leave nor another host's
name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qlora_wgpu.data.json_rows import parse_json
from qlora_wgpu.errors import ConfigError, DataError, ShapeError, brief
from qlora_wgpu.limits import REQUEST_BYTES
from qlora_wgpu.serving.requests import Asked, ChatRequest, CompletionRequest
from qlora_wgpu.serving.responses import ChatForm, Choice, TextForm, together
from qlora_wgpu.serving.writer import Generation, GenerationWorker, ServedModel, told

T = TypeVar("T")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of the work for a request, which ends as soon as its client has gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_READING = 60.0  # seconds in which a request has to come
_ALL_BYTES = 4 * REQUEST_BYTES  # of all requests that are coming
HOSTS = ["127.0.0.1", "localhost"]


class _OwnHost:
    """Refuses requests that mean another host, as pages of other sites send them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if scope["type"] == "http" and host.split(":")[0] not in HOSTS:
            refused = _error(400, f"this server is for {' and '.join(HOSTS)}, not {brief(host)}")
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ChatServer:
    """What the endpoints do."""

    def __init__(self, models: Mapping[str, ServedModel], writer: GenerationWorker) -> None:
        self.models = models  # by the names that requests give
        self._writer = writer
        self._since = int(time.time())
        self._held = 0  # bytes of requests that are coming

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._text, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _no_such},
            middleware=[Middleware(_OwnHost)],
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(n) for n in self.models]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._card(name)) if name in self.models else self._no_model(name)

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "qlora-wgpu"}

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, ChatRequest, ChatForm())

    async def _text(self, request: Request) -> Response:
        return await self._complete(request, CompletionRequest, TextForm())

    async def _complete(
        self, request: Request, kind: type[ChatRequest | CompletionRequest], form: TextForm
    ) -> Response:
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json":
            return _error(415, "the request's Content-Type must be application/json")
        try:
            asked = kind.read(_json(await self._body(request)))
            if asked.model not in self.models:
                return self._no_model(asked.model)
            model = self.models[asked.model]
            answers = await unless_gone(request, self._writer.ask(model, asked))
            if not asked.streamed:
                try:
                    return await unless_gone(request, self._whole(asked, answers, form))
                finally:
                    await _leave(answers)
        except (ConfigError, DataError, ShapeError) as err:
            return _error(400, str(err))
        except HTTPException as err:
            return _error(err.status_code, err.detail)
        except TimeoutError:
            return _error(408, f"the request did not come within {_READING:g} seconds")
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except Exception as err:  # no traceback for clients, nor in the terminal
            return _error(500, str(told(err)))
        events = self._events(asked, answers, form)
        # Which are not begun where the client has gone by now.
        left = BackgroundTask(_leave, answers)
        return StreamingResponse(events, media_type="text/event-stream", background=left)

    async def _body(self, request: Request) -> bytes:
        """A request's bytes; of one that is too long a part is passed over, so that it is told."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_READING):
                async for part in request.stream():
                    size += len(part)
                    self._held += len(part)
                    if self._held > _ALL_BYTES or size > 2 * REQUEST_BYTES:
                        break
                    if size <= REQUEST_BYTES:
                        parts.append(part)
        finally:
            self._held -= size
        if size > REQUEST_BYTES:
            raise HTTPException(413, f"the request has more than {REQUEST_BYTES:,} bytes")
        if self._held + size > _ALL_BYTES:
            raise HTTPException(503, "too many long requests come at once: send it again")
        return b"".join(parts)

    def _no_model(self, name: str) -> Response:
        known = ", ".join(map(repr, self.models))
        return _error(404, f"there is no model {brief(name)} here, only {known}", "model_not_found")

    async def _whole(self, asked: Asked, answers: Sequence[Generation], form: TextForm) -> Response:
        choices = [Choice(*each, form) for each in enumerate(answers)]
        try:
            async with aclosing(together(answers)) as pieces:
                async for number, piece in pieces:
                    choices[number].take(piece)
        except Exception as err:
            return _error(500, str(told(err)))
        head = _head(form.prefix, form.whole, asked.model)
        made = [choice.whole() for choice in choices]
        return JSONResponse(head | {"choices": made, "usage": _usage(asked, choices)})

    async def _events(
        self, asked: Asked, answers: Sequence[Generation], form: TextForm
    ) -> AsyncIterator[str]:
        choices = [Choice(*each, form) for each in enumerate(answers)]
        head = _head(form.prefix, form.chunk, asked.model)
        if asked.counted:
            head["usage"] = None
        try:
            async with aclosing(together(answers)) as pieces:
                for choice in choices:
                    if (begun := choice.begun()) is not None:
                        yield _event(head | {"choices": [begun]})
                async for number, piece in pieces:
                    for part in choices[number].take(piece):
                        yield _event(head | {"choices": [part]})
            if asked.counted:
                yield _event(head | {"choices": [], "usage": _usage(asked, choices)})
            yield "data: [DONE]\n\n"
        except Exception as err:
            yield _event(_problem(str(told(err)), "server_error"))
        finally:
            await _leave(answers)


async def _leave(answers: Sequence[Generation]) -> None:
    """Ends what nobody waits for any more."""
    for answer in answers:
        answer.is_wanted = False


async def _no_such(request: Request, err: Exception) -> Response:
    """What asks for something else, or otherwise, than there is."""
    assert isinstance(err, HTTPException)
    asked = f"{request.method} {request.url.path}"
    there = "/v1/models, /v1/chat/completions and /v1/completions"
    return _error(err.status_code, f"there is no {brief(asked)} here, only {there}")


def _json(content: bytes) -> Any:
    """A request's value."""
    try:
        return parse_json(content.decode())
    except UnicodeDecodeError as err:
        raise DataError(f"the request is not text in UTF-8: {err}") from err
    except DataError as err:
        raise DataError(f"the request cannot be read: {err}") from err


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
        "model": model,
    }  # fmt: skip


def _usage(asked: Asked, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens of each prompt once, however many answers there are to it, and of all answers."""
    prompt = sum(choice.prompt_tokens for choice in choices[:: asked.count])
    written = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(status: int, text: str, code: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(_problem(text, kind, code), status_code=status)


def _problem(text: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


_CLOSED = 0.3  # seconds in which it takes no more requests, come what may
_LOOK = 0.1  # seconds between two looks at whether there was another Ctrl-C


class StoppableServer(uvicorn.Server):
    """Ends answers that are being written, for whose end it would wait else."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for the ends of answers, until a second Ctrl-C."""
        self._stop()
        ending = asyncio.ensure_future(super().shutdown(sockets))
        # Since Python 3.12 it would wait for clients that stay connected, too, whatever comes.
        await asyncio.wait({ending}, timeout=_CLOSED)
        while not (ending.done() or self.force_exit):
            await asyncio.wait({ending}, timeout=_LOOK)
        if not ending.done():
            ending.cancel()
            await asyncio.wait({ending})
        elif not ending.cancelled():
            ending.result()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; a second Ctrl-C waits for nobody, and requests cut off are no errors."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
