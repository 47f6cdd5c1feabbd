"""The endpoints of OpenAI's API, and the responses of completions, whole or streamed.

There is no authentication, so the server only listens on the loopback address. Web pages of other
sites, opened in a browser on this machine, cannot use it: CORS forbids them to send JSON, and
requests with another host's name are refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
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

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.json_rows import parse_json
from qlora_wgpu.errors import ConfigError, DataError, ShapeError, brief
from qlora_wgpu.generation.text import TokenLogprobs, continuation
from qlora_wgpu.limits import REQUEST_BYTES
from qlora_wgpu.serving.requests import BaseRequest, ChatRequest, CompletionRequest
from qlora_wgpu.serving.tool_calls import ToolCallParser
from qlora_wgpu.serving.writer import Chunk, Generation, GenerationWorker, ServedModel, client_error

# ---- endpoints -----------------------------------------------------------------------------------

HOSTS = ["127.0.0.1", "localhost"]


class ChatServer:
    """The endpoints."""

    def __init__(self, models: Mapping[str, ServedModel], writer: GenerationWorker) -> None:
        self.models = models  # by name
        self._writer = writer
        self._created = int(time.time())
        self._bodies = RequestBodies()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._text, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _unknown_endpoint},
            middleware=[Middleware(OwnHost)],
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(n) for n in self.models]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._card(name)) if name in self.models else self._no_model(name)

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "qlora-wgpu"}

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, ChatRequest, ChatForm())

    async def _text(self, request: Request) -> Response:
        return await self._complete(request, CompletionRequest, TextForm())

    async def _complete(
        self, request: Request, kind: type[ChatRequest | CompletionRequest], form: TextForm
    ) -> Response:
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json":
            return error(415, "the request's Content-Type must be application/json")
        try:
            api_request = kind.read(json_of(await self._bodies.read(request)))
            if api_request.model not in self.models:
                return self._no_model(api_request.model)
            model = self.models[api_request.model]
            answers = await unless_disconnected(request, self._writer.submit(model, api_request))
            if not api_request.stream:
                try:
                    return await unless_disconnected(
                        request, self._whole(api_request, answers, form)
                    )
                finally:
                    await _cancel(answers)
        except (ConfigError, DataError, ShapeError) as err:
            return error(400, str(err))
        except HTTPException as err:
            return error(err.status_code, err.detail)
        except TimeoutError:
            return error(408, f"the request was not received within {_READING:g} seconds")
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        except Exception as err:  # no traceback, for the client or in the terminal
            return error(500, str(client_error(err)))
        events = self._events(api_request, answers, form)
        # The generator is never started if the client has already disconnected
        cleanup = BackgroundTask(_cancel, answers)
        return StreamingResponse(events, media_type="text/event-stream", background=cleanup)

    def _no_model(self, name: str) -> Response:
        known = ", ".join(map(repr, self.models))
        return error(404, f"unknown model {brief(name)} (available: {known})", "model_not_found")

    async def _whole(
        self, request: BaseRequest, answers: Sequence[Generation], form: TextForm
    ) -> Response:
        choices = [Choice(*each, form) for each in enumerate(answers)]
        try:
            async with aclosing(merged(answers)) as pieces:
                async for number, piece in pieces:
                    choices[number].take(piece)
        except Exception as err:
            return error(500, str(client_error(err)))
        head = _head(form.prefix, form.whole, request.model)
        contents = [choice.whole() for choice in choices]
        return JSONResponse(head | {"choices": contents, "usage": _usage(request, choices)})

    async def _events(
        self, request: BaseRequest, answers: Sequence[Generation], form: TextForm
    ) -> AsyncIterator[str]:
        choices = [Choice(*each, form) for each in enumerate(answers)]
        head = _head(form.prefix, form.chunk, request.model)
        if request.include_usage:
            head["usage"] = None
        try:
            async with aclosing(merged(answers)) as pieces:
                for choice in choices:
                    if (first := choice.first_delta()) is not None:
                        yield _event(head | {"choices": [first]})
                async for number, piece in pieces:
                    for part in choices[number].take(piece):
                        yield _event(head | {"choices": [part]})
            if request.include_usage:
                yield _event(head | {"choices": [], "usage": _usage(request, choices)})
            yield "data: [DONE]\n\n"
        except Exception as err:
            yield _event(_problem(str(client_error(err)), "server_error"))
        finally:
            await _cancel(answers)


async def _cancel(answers: Sequence[Generation]) -> None:
    for answer in answers:
        answer.is_cancelled = True


async def _unknown_endpoint(request: Request, err: Exception) -> Response:
    """The response to another path or method."""
    assert isinstance(err, HTTPException)
    endpoint = f"{request.method} {request.url.path}"
    known = "GET /v1/models, POST /v1/chat/completions, POST /v1/completions"
    return error(err.status_code, f"unknown endpoint {brief(endpoint)} (available: {known})")


# ---- requests ------------------------------------------------------------------------------------

T = TypeVar("T")

_READING = 60.0  # seconds within which a request must be received
_ALL_BYTES = 4 * REQUEST_BYTES  # of all requests that are being received


class RequestBodies:
    """Reads requests, with a limit on the bytes of all that are being received."""

    def __init__(self) -> None:
        self._receiving = 0  # bytes

    async def read(self, request: Request) -> bytes:
        """Reads a request; discards one that is too long, so that the client gets an error."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_READING):
                async for part in request.stream():
                    size += len(part)
                    self._receiving += len(part)
                    if self._receiving > _ALL_BYTES or size > 2 * REQUEST_BYTES:
                        break
                    if size <= REQUEST_BYTES:
                        parts.append(part)
        finally:
            self._receiving -= size
        if size > REQUEST_BYTES:
            raise HTTPException(413, f"the request is longer than {REQUEST_BYTES:,} bytes")
        if self._receiving + size > _ALL_BYTES:
            raise HTTPException(503, "too many long requests at once: retry later")
        return b"".join(parts)


class OwnHost:
    """Refuses requests for another host name (DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on requests for this host."""
        host = Headers(scope=scope).get("host", "")
        if scope["type"] == "http" and host.split(":")[0] not in HOSTS:
            refused = error(400, f"unknown host {brief(host)}: this server is {' or '.join(HOSTS)}")
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work for a request; cancels it if the client disconnects."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_of(content: bytes) -> Any:
    """A request's JSON."""
    try:
        return parse_json(content.decode())
    except UnicodeDecodeError as err:
        raise DataError(f"the request is not UTF-8: {err}") from err
    except DataError as err:
        raise DataError(f"cannot parse the request: {err}") from err


# ---- responses -----------------------------------------------------------------------------------


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
        "model": model,
    }  # fmt: skip


def _usage(request: BaseRequest, choices: Sequence[Choice]) -> dict[str, int]:
    """Token counts; each prompt counts once, however many answers it has."""
    prompt = sum(choice.prompt_tokens for choice in choices[:: request.n])
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def error(status: int, text: str, code: str | None = None) -> Response:
    """The response to a request that failed, in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(_problem(text, kind, code), status_code=status)


def _problem(text: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


# ---- shutdown ------------------------------------------------------------------------------------

_CLOSED = 0.3  # seconds within which it stops accepting requests
_POLL = 0.1  # seconds between two checks for another Ctrl-C


class StoppableServer(uvicorn.Server):
    """A server that ends answers in progress when it shuts down, instead of finishing them."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting requests, and waits until answers have ended or for a second Ctrl-C."""
        self._stop()
        ending = asyncio.ensure_future(super().shutdown(sockets))
        # Since Python 3.12 it would also wait for idle connections
        await asyncio.wait({ending}, timeout=_CLOSED)
        while not (ending.done() or self.force_exit):
            await asyncio.wait({ending}, timeout=_POLL)
        if not ending.done():
            ending.cancel()
            await asyncio.wait({ending})
        elif not ending.cancelled():
            ending.result()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal; after a second Ctrl-C, errors of aborted requests are not logged."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True


# ---- the answers of a request --------------------------------------------------------------------


async def merged(answers: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yields chunks of all answers as they are generated, each with its answer's index.

    Answers are cancelled if the caller stops iterating.
    """
    remaining = len(answers)
    try:
        while remaining:
            # All answers of a request share the queue
            number, piece = await answers[0].pieces.get()
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
