"""Requests of OpenAI's API for chat completions and completions, and their validation."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.data.messages import canonical_options, checked_messages
from qlora_wgpu.errors import ConfigError, DataError, brief
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.limits import ANSWERS, LOGPROBS, STOP_TEXTS

# ---- common parameters ---------------------------------------------------------------------------

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_COMMON = {
    "model", "stream", "stream_options", "stop", "max_tokens", "n", "logit_bias", *_SAMPLING,
    # Parameters without an effect on the answer.
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# Parameters that are supported with their default only.
_COMMON_DEFAULTS: Mapping[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0}
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}  # the latter is ignored


@dataclass(frozen=True)
class BaseRequest:
    """Parameters of all requests."""

    model: str
    sampling: Sampling  # by default with OpenAI's temperature of 1
    max_new_tokens: int | None  # None for as many as fit into the context
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool  # whether a stream ends with token counts
    n: int  # answers to each prompt
    # Number of most likely tokens to return with each token's log probability; None for neither
    logprobs: int | None

    def sampling_of(self, number: int) -> Sampling:
        """The sampling of one of the answers, which has its own seed."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + number)


def _parameters(body: Any, known: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A request's parameters without nulls; refuses unknown and unsupported ones."""
    if not isinstance(body, dict):
        raise DataError("the request must be a JSON object")
    if unknown := sorted(set(body) - _COMMON - set(known) - set(defaults)):
        raise ConfigError(f"unknown parameter {brief(unknown[0])}: remove it")
    for name, default in defaults.items():
        value = body.get(name)
        if value and value != default:
            instead = "use repetition_penalty or " if name in _COMMON_DEFAULTS else ""
            raise ConfigError(f"{name} = {brief(value)} is not supported: {instead}remove it")
    return {name: value for name, value in body.items() if value is not None}


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``BaseRequest`` except logprobs."""
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise DataError("stream_options must be an object")
    if unknown := sorted(set(options) - _STREAM_OPTIONS):
        raise ConfigError(f"unknown stream option {brief(unknown[0])}: remove it")
    if not isinstance(model := given.get("model"), str):
        raise DataError("'model' must be the name of a model")
    limits = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    return {
        "model": model,
        "sampling": _sampling(given),
        "max_new_tokens": check_count(limits[0], given[limits[0]]) if limits else None,
        "stop": _stops(given.get("stop", [])),
        "stream": _flag(given, "stream"),
        "include_usage": _flag(options, "include_usage"),
        "n": _n(given.get("n", 1)),
    }


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"'{name}' must be true or false")
    return default if value is None else value


def _number_of_logprobs(name: str, value: Any) -> int:
    count = check_count(name, value)
    if count > LOGPROBS:
        raise ConfigError(f"{name} must be at most {LOGPROBS}, got {brief(value)}")
    return count


def _sampling(given: Mapping[str, Any]) -> Sampling:
    values = {name: given[name] for name in _SAMPLING if name in given}
    if type(seed := values.get("seed")) is int and -(2**63) <= seed < 0:
        values["seed"] = seed + 2**64  # OpenAI's seeds are signed
    biases = given.get("logit_bias", {})  # JSON keys are strings
    if not isinstance(biases, dict):
        raise DataError("'logit_bias' must be an object that maps token ids to numbers")
    for token in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise DataError(f"'logit_bias' contains {brief(token)}, which is not a token id")
    numbers = {int(token): bias for token, bias in biases.items()}
    return Sampling(**{"temperature": 1.0, "seed": None, **values}, logit_bias=numbers)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise DataError("'stop' must be a string or a list of strings")
    if len(stops) > STOP_TEXTS:
        raise DataError(f"'stop' may have at most {STOP_TEXTS} strings, got {len(stops)}")
    return tuple(stops)


def _n(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= ANSWERS:
        raise ConfigError(f"n must be an integer from 1 to {ANSWERS}, got {brief(value)}")
    return value


# ---- chat completions ----------------------------------------------------------------------------

_CHAT = {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "chat_template_kwargs",
}  # fmt: skip
_CHAT_DEFAULTS = {
    **_COMMON_DEFAULTS, "response_format": {"type": "text"}, "modalities": ["text"],
}  # fmt: skip


@dataclass(frozen=True)
class ChatRequest(BaseRequest):
    """A request for a chat completion."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None  # functions that the model may call
    parallel_tool_calls: bool  # whether an answer may contain more than one call
    chat_template_kwargs: dict[str, Any]

    @classmethod
    def read(cls, body: Any) -> ChatRequest:
        """Validates the parsed JSON of a request."""
        given = _parameters(body, _CHAT, _CHAT_DEFAULTS)
        return cls(
            **_common(given),
            logprobs=_logprobs(given),
            messages=checked_messages(given.get("messages"), "messages", images=True),
            tools=_tools(given),
            parallel_tool_calls=_flag(given, "parallel_tool_calls", default=True),
            chat_template_kwargs=canonical_options(given.get("chat_template_kwargs")),
        )


def _logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs", 0)
    if _flag(given, "logprobs"):
        return _number_of_logprobs("top_logprobs", top)
    if top:
        raise ConfigError("top_logprobs requires logprobs: true")
    return None


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise DataError("'tools' must be a list of functions")
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise DataError(
                f"tool {number} must be an object with the type 'function' and a 'function' that "
                "has a 'name'"
            )
    if choice not in ("auto", "none"):
        raise ConfigError(
            f"tool_choice = {brief(choice)} is not supported (supported: 'auto', 'none')"
        )
    return None if choice == "none" else tools or None


# ---- completions ---------------------------------------------------------------------------------

_COMPLETION = {"prompt", "logprobs"}
_COMPLETION_DEFAULTS = {**_COMMON_DEFAULTS, "echo": False, "suffix": "", "best_of": 1}
_MAX_TOKENS = 16  # OpenAI's default

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionRequest(BaseRequest):
    """A request for completions."""

    prompts: list[Prompt]

    @classmethod
    def read(cls, body: Any) -> CompletionRequest:
        """Validates the parsed JSON of a request."""
        given = _parameters(body, _COMPLETION, _COMPLETION_DEFAULTS)
        common = _common({"max_tokens": _MAX_TOKENS, **given})
        prompts, logprobs = _prompts(given.get("prompt")), given.get("logprobs")
        if len(prompts) * common["n"] > ANSWERS:
            raise ConfigError(
                f"{len(prompts)} prompts with n = {common['n']} are more than {ANSWERS} answers: "
                "send fewer at a time"
            )
        if logprobs is not None:
            logprobs = _number_of_logprobs("logprobs", logprobs)
        return cls(**common, logprobs=logprobs, prompts=prompts)


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise DataError("'prompt' must be a string, a list of strings, or token ids")
    for prompt in prompts:
        if not isinstance(prompt, str) and not _are_tokens(prompt):
            raise DataError("'prompt' must be a string, a list of strings, or token ids")
        if not isinstance(prompt, str) and not all(0 <= token < 2**31 for token in prompt):
            raise DataError("'prompt' contains a number that is not a token id")
    return prompts


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
