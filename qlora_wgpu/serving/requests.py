"""Requests for chat completions and completions, in OpenAI's form, and what of them is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.data.canonical_messages import canonical_options
from qlora_wgpu.data.messages import checked_messages
from qlora_wgpu.errors import ConfigError, DataError, brief
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.limits import ANSWERS, LOGPROBS, STOP_TEXTS

# ---- what all requests have ----------------------------------------------------------------------

# What changes nothing of the answer.
_SAYS_NOTHING = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# What is computed only as it is by default.
_COMMON_DEFAULTS: Mapping[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0}
_INSTEAD = {
    "presence_penalty": "; repetition_penalty is",
    "frequency_penalty": "; repetition_penalty is",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_COMMON = {
    "model", "stream", "stream_options", "stop", "max_tokens", "n", "logit_bias", *_SAMPLING,
    *_SAYS_NOTHING, *_COMMON_DEFAULTS,
}  # fmt: skip
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}  # the latter says nothing


@dataclass(frozen=True)
class Asked:
    """What is asked for."""

    model: str  # the name of the model
    sampling: Sampling  # how tokens are chosen; OpenAI's temperature of 1 by default
    max_new_tokens: int | None  # most tokens of an answer; None for as many as there is room for
    stop: tuple[str, ...]  # strings that end it
    streamed: bool  # whether it is sent as it comes
    counted: bool  # whether a streamed answer ends with the number of tokens
    count: int  # answers to each prompt
    # How many of the likeliest tokens are told with their log probabilities, beside the chosen one;
    # None for not even that
    logprobs: int | None

    def sampling_of(self, number: int) -> Sampling:
        """How tokens of one of the answers are chosen: with a seed of its own."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + number)


def read_common(body: Any, known: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What all requests have, but for logprobs, as arguments of ``Asked``.

    Args:
        body: The request's JSON.
        known: What requests of this kind may have beside.
        defaults: What of it is computed only as it is by default.
    """
    if not isinstance(body, dict):
        raise DataError("the request must be a JSON object")
    _refuse(body, known, defaults)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise DataError("stream_options must be an object")
    if unknown := sorted(set(options) - _STREAM_OPTIONS):
        raise ConfigError(f"stream_options: {brief(unknown[0])} is not known here: leave it out")
    model = body.get("model")
    if not isinstance(model, str):
        raise DataError("'model' must be the name of a model")
    return {
        "model": model,
        "sampling": _sampling(body),
        "max_new_tokens": _most_tokens(body),
        "stop": _stops(body.get("stop")),
        "streamed": flag(body, "stream"),
        "counted": flag(options, "include_usage"),
        "count": _count(body.get("n")),
    }


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A truth value."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"'{name}' must be true or false")
    return default if value is None else value


def number_of_logprobs(name: str, value: Any) -> int:
    """How many of the likeliest tokens are told."""
    check_count(name, value)
    if value > LOGPROBS:
        raise ConfigError(f"{name} = {brief(value)} is more than {LOGPROBS}")
    return int(value)


def _refuse(body: Mapping[str, Any], known: Collection[str], more: Mapping[str, Any]) -> None:
    unknown = sorted(set(body) - _COMMON - set(known) - set(more))
    if unknown:
        raise ConfigError(f"{brief(unknown[0])} is not known here: leave it out")
    for name, default in {**_COMMON_DEFAULTS, **more}.items():
        value = body.get(name)
        if value is not None and value != default and value:
            instead = _INSTEAD.get(name, "")
            raise ConfigError(
                f"{name} = {brief(value)} is not computed here{instead}: leave it out"
            )


def _sampling(body: Mapping[str, Any]) -> Sampling:
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    if type(seed := given.get("seed")) is int and -(2**63) <= seed < 0:
        given["seed"] = seed + 2**64  # OpenAI's have a sign
    biases = _biases(body.get("logit_bias"))
    return Sampling(**{"temperature": 1.0, "seed": None, **given}, logit_bias=biases)


def _biases(value: Any) -> dict[int, float]:
    """Biases by tokens' ids, which are texts in JSON."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError("'logit_bias' must be an object of tokens' ids and numbers")
    for token in value:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise DataError(f"'logit_bias' has {brief(token)}, which is no token's id")
    return {int(token): bias for token, bias in value.items()}


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
    if len(stops) > STOP_TEXTS:
        raise DataError(f"'stop' has {len(stops)} texts, more than {STOP_TEXTS}")
    return tuple(stops)


def _count(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= ANSWERS:
        raise ConfigError(f"n must be a whole number from 1 to {ANSWERS}, got {brief(value)}")
    return value


# ---- chat completions ----------------------------------------------------------------------------

_CHAT_KEYS = {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "chat_template_kwargs",
}  # fmt: skip
_CHAT_DEFAULTS: Mapping[str, Any] = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


@dataclass(frozen=True)
class ChatRequest(Asked):
    """What a request for a chat completion asks for."""

    messages: list[dict[str, Any]]  # the conversation
    # JSON schemas of functions that the model may call, if there are any
    tools: list[dict[str, Any]] | None
    several_calls: bool  # whether an answer may have more than one call
    # What else the chat template is given: ``chat_template_kwargs``, as rows and vLLM have them
    options: dict[str, Any]

    @classmethod
    def read(cls, body: Any) -> ChatRequest:
        """Reads a request's JSON."""
        common = read_common(body, _CHAT_KEYS, _CHAT_DEFAULTS)
        return cls(
            **common,
            logprobs=_logprobs(body),
            messages=checked_messages(body.get("messages"), "messages"),
            tools=_tools(body),
            several_calls=flag(body, "parallel_tool_calls", default=True),
            options=canonical_options(body.get("chat_template_kwargs")),
        )


def _logprobs(body: Mapping[str, Any]) -> int | None:
    top = body.get("top_logprobs")
    if not flag(body, "logprobs"):
        if top:
            raise ConfigError("top_logprobs is told only where logprobs is true")
        return None
    return number_of_logprobs("top_logprobs", 0 if top is None else top)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise DataError("'tools' must be a list of functions")
    for number, tool in enumerate(tools or (), start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or tool.get("type") != "function":
            raise DataError(
                f"tool {number} is no function: it must be an object with the type 'function' and "
                "a 'function' that has a 'name'"
            )
    if choice not in (None, "auto", "none"):
        raise ConfigError(
            f"tool_choice = {brief(choice)} is not computed here, only 'auto' and 'none': a model "
            "is not made to call a function"
        )
    return None if choice == "none" else tools or None


# ---- completions ---------------------------------------------------------------------------------

_COMPLETION_KEYS = {"prompt", "logprobs"}
_COMPLETION_DEFAULTS: Mapping[str, Any] = {"echo": False, "suffix": "", "best_of": 1}
_MOST_TOKENS = 16  # where nobody says how many, as OpenAI has it

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionRequest(Asked):
    """What a request for completions asks for."""

    prompts: list[Prompt]  # texts, or their tokens

    @classmethod
    def read(cls, body: Any) -> CompletionRequest:
        """Reads a request's JSON."""
        common = read_common(body, _COMPLETION_KEYS, _COMPLETION_DEFAULTS)
        if common["max_new_tokens"] is None:
            common["max_new_tokens"] = _MOST_TOKENS
        prompts, logprobs = _prompts(body.get("prompt")), body.get("logprobs")
        if len(prompts) * common["count"] > ANSWERS:
            raise ConfigError(
                f"{len(prompts)} prompts with n = {common['count']} are more than {ANSWERS} "
                "answers: ask for fewer at a time"
            )
        told = None if logprobs is None else number_of_logprobs("logprobs", logprobs)
        return cls(**common, logprobs=told, prompts=prompts)


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise DataError("'prompt' must be a text, a list of texts, or tokens")
    for prompt in prompts:
        if not isinstance(prompt, str) and not _are_tokens(prompt):
            raise DataError("'prompt' must be a text, a list of texts, or tokens")
        if not isinstance(prompt, str) and not all(0 <= token < 2**31 for token in prompt):
            raise DataError("'prompt' has a number that is no token")
    return prompts


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
