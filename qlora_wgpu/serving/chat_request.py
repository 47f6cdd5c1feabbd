"""A request for a chat completion, in the form of OpenAI's API, and what of it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data.messages import checked_messages
from qlora_wgpu.errors import ConfigError, DataError, brief
from qlora_wgpu.generation.sampling import Sampling, check_count

# What changes nothing of the answer.
_SAYS_NOTHING = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# What is computed only as it is by default.
_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_KNOWN = {
    "model", "messages", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens",
    *_SAMPLING, *_SAYS_NOTHING, *_DEFAULTS,
}  # fmt: skip
_MOST_STOPS = 16


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for.

    Attributes:
        model: The name of the model.
        messages: The conversation.
        sampling: How tokens are chosen; OpenAI's temperature of 1 by default.
        max_new_tokens: Most tokens of the answer; None for as many as there is room for.
        stop: Strings that end it.
        streamed: Whether it is sent as it comes.
        counted: Whether a streamed answer ends with the number of tokens.
    """

    model: str
    messages: list[dict[str, Any]]
    sampling: Sampling
    max_new_tokens: int | None
    stop: tuple[str, ...]
    streamed: bool
    counted: bool

    @classmethod
    def read(cls, body: Any) -> ChatRequest:
        """Reads a request's JSON.

        Raises:
            DataError: If it is no such request.
            ConfigError: If it asks for something that is not computed.
        """
        if not isinstance(body, dict):
            raise DataError("the request must be a JSON object")
        _refuse(body)
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise DataError("stream_options must be an object")
        model = body.get("model")
        if not isinstance(model, str):
            raise DataError("'model' must be the name of a model")
        return cls(
            model=model,
            messages=checked_messages(body.get("messages"), "messages"),
            sampling=_sampling(body),
            max_new_tokens=_most_tokens(body),
            stop=_stops(body.get("stop")),
            streamed=_flag(body, "stream"),
            counted=_flag(options, "include_usage"),
        )


def _refuse(body: Mapping[str, Any]) -> None:
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not known here: leave it out")
    for name, default in _DEFAULTS.items():
        value = body.get(name)
        if value is not None and value != default and value:
            raise ConfigError(f"{name} = {brief(value)} is not computed here: leave it out")


def _sampling(body: Mapping[str, Any]) -> Sampling:
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    return Sampling(**{"temperature": 1.0, "seed": None, **given})


def _most_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            check_count(name, value)
            return int(value)
    return None


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise DataError("'stop' must be a text or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise DataError(f"'stop' has {len(stops)} texts, more than {_MOST_STOPS}")
    return tuple(stops)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"'{name}' must be true or false")
    return bool(value)
