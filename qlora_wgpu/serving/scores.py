"""The API of a reward model or classifier: scores of text and chats."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError, DataError, ShapeError, brief
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.scores import (
    Classification,
    encoded_inputs,
    scores_of,
    scoring_of_model,
)
from qlora_wgpu.serving.app import OwnHost, RequestBodies, error, json_of
from qlora_wgpu.serving.writer import client_error

_MOST_INPUTS = 1024  # of a request
_KEYS = frozenset(("model", "input", "user"))


class ScoreServer:
    """The endpoints: ``/v1/models`` and ``/v1/score``."""

    def __init__(
        self, name: str, model: QLoRAModel, prompts: PromptFormat, batch: int, context: int
    ) -> None:
        self._name, self._model, self._prompts = name, model, prompts
        self._batch, self._context = batch, context
        self._created = int(time.time())
        self._bodies = RequestBodies()
        self._lock = threading.Lock()  # one request computes at a time

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/score", self._score, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _unknown_endpoint},
            middleware=[Middleware(OwnHost)],
        )

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._name, "object": "model", "created": self._created, "owned_by": "qlora-wgpu",
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def _score(self, request: Request) -> Response:
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json":
            return error(415, "the request's Content-Type must be application/json")
        try:
            values = json_of(await self._bodies.read(request))
            inputs = self._inputs(values)
            data, tokens = await run_in_threadpool(self._computed, inputs)
        except (ConfigError, DataError, ShapeError) as err:
            return error(400, str(err))
        except HTTPException as err:
            return error(err.status_code, err.detail)
        except TimeoutError:
            return error(408, "the request was not received in time")
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as err:  # no traceback, for the client or in the terminal
            return error(500, str(client_error(err)))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "model": self._name, "data": data, "usage": usage})

    def _inputs(self, values: Any) -> list[Any]:
        if not isinstance(values, Mapping):
            raise ConfigError("the request must be a JSON object")
        if unknown := sorted(values.keys() - _KEYS):
            raise ConfigError(f"unknown field {brief(unknown[0])} (supported: model, input)")
        if values.get("model", self._name) != self._name:
            raise HTTPException(
                404, f"unknown model {brief(values['model'])} (available: {self._name!r})"
            )
        given = values.get("input")
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list) or not given:
            raise ConfigError("'input' must be a string, messages, or a list of them")
        inputs = [given] if all(isinstance(each, Mapping) for each in given) else given
        if len(inputs) > _MOST_INPUTS:
            raise ConfigError(f"'input' must have at most {_MOST_INPUTS:,} items")
        return inputs

    def _computed(self, inputs: list[Any]) -> tuple[list[dict[str, Any]], int]:
        """The scores of inputs, and the number of their tokens."""
        model = self._model
        scoring = scoring_of_model(model)
        sequences = encoded_inputs(inputs, self._prompts, scoring, None)
        for number, ids in enumerate(sequences):
            if len(ids) > self._context:
                raise DataError(
                    f"input {number} has {len(ids):,} tokens, more than the server's --context "
                    f"{self._context:,}"
                )
        rows = np.zeros((len(sequences), scoring.classes), np.float32)
        with self._lock:
            for numbers, made in scores_of(model, sequences, self._batch):
                rows[numbers] = made
        data = [
            {"index": index, "object": "score", **Classification.of(row, scoring).to_json()}
            for index, row in enumerate(rows)
        ]
        return data, sum(map(len, sequences))


async def _unknown_endpoint(request: Request, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    endpoint = f"{request.method} {request.url.path}"
    known = "GET /v1/models, POST /v1/score"
    return error(
        err.status_code,
        f"unknown endpoint {brief(endpoint)} (available: {known}): the model is a reward model or "
        "classifier",
    )
