"""The endpoints: ``/v1/models`` and ``/v1/chat/completions``, as OpenAI's clients know them.

Whoever can reach the address can use it, so it is the loopback's alone. Pages of other sites, which
a browser on this machine shows, cannot: they may send neither JSON without leave nor another host's
name.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qlora_wgpu.errors import ConfigError, DataError, QLoRAError
from qlora_wgpu.serving.chat_request import ChatRequest
from qlora_wgpu.serving.writer import Answer, Piece, Writer

HOSTS = ["127.0.0.1", "localhost"]
_MOST_BYTES = 16 << 20  # of a request
_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class ChatServer:
    """What the endpoints do.

    Attributes:
        name: The model's name.
    """

    def __init__(self, name: str, writer: Writer) -> None:
        """Takes who writes.

        Args:
            name: The model's name, which requests must give.
            writer: Writes answers.
        """
        self.name = name
        self._writer = writer
        self._since = int(time.time())

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            return self._no_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name, "object": "model", "created": self._since, "owned_by": "qlora-wgpu",
        }  # fmt: skip

    async def _complete(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return _error(415, "the request's Content-Type must be application/json")
        try:
            asked = ChatRequest.read(json.loads(await _body(request)))
            if asked.model != self.name:
                return self._no_model(asked.model)
            answer = await self._writer.ask(asked)
        except json.JSONDecodeError as err:
            return _error(400, f"the request is not valid JSON: {err}")
        except (ConfigError, DataError) as err:
            return _error(400, str(err))
        if asked.streamed:
            events = self._events(request, answer, counted=asked.counted)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(request, answer)

    def _no_model(self, name: str) -> Response:
        return _error(
            404, f"there is no model {name!r} here, only {self.name!r}", "model_not_found"
        )

    async def _whole(self, request: Request, answer: Answer) -> Response:
        text, last = "", Piece("", 0)
        try:
            async for piece in answer.pieces():
                text, last = text + piece.text, piece
                if await request.is_disconnected():
                    break
        except QLoRAError as err:
            return _error(500, str(err))
        finally:
            answer.is_wanted = False
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": _reason(last), "logprobs": None}
        head = self._head("chat.completion")
        return JSONResponse(head | {"choices": [choice], "usage": _usage(answer, last)})

    async def _events(
        self, request: Request, answer: Answer, *, counted: bool
    ) -> AsyncIterator[str]:
        head, last = self._head("chat.completion.chunk"), Piece("", 0)
        if counted:
            head["usage"] = None
        try:
            yield _event(head | {"choices": [_delta({"role": "assistant", "content": ""})]})
            async for piece in answer.pieces():
                last = piece
                if piece.text:
                    yield _event(head | {"choices": [_delta({"content": piece.text})]})
            yield _event(head | {"choices": [_delta({}, _reason(last))]})
            if counted:
                yield _event(head | {"choices": [], "usage": _usage(answer, last)})
            yield "data: [DONE]\n\n"
        except QLoRAError as err:
            yield _event(_problem(str(err), "server_error"))
        finally:
            answer.is_wanted = False  # whoever asked may have gone

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
            "model": self.name,
        }  # fmt: skip


async def _body(request: Request) -> bytes:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise DataError(f"the request has more than {_MOST_BYTES:,} bytes")
    return content


def _delta(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}


def _reason(piece: Piece) -> str | None:
    return None if piece.finish_reason is None else _REASONS[piece.finish_reason]


def _usage(answer: Answer, last: Piece) -> dict[str, int]:
    prompt = len(answer.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": last.tokens,
        "total_tokens": prompt + last.tokens,
    }


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(status: int, text: str, code: str | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(_problem(text, kind, code), status_code=status)


def _problem(text: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}
