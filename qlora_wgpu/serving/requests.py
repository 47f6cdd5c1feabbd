"""Requests for chat completions and completions, in OpenAI's form, and what of them is refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.data.messages import canonical_options, checked_messages
from qlora_wgpu.errors import ConfigError, DataError, brief
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.limits import ANSWERS, LOGPROBS, STOP_TEXTS

# ---- what all requests have ----------------------------------------------------------------------

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_COMMON = {
    "model", "stream", "stream_options", "stop", "max_tokens", "n", "logit_bias", *_SAMPLING,
    # What changes nothing of the answer.
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# What is computed only as it is by default.
_COMMON_DEFAULTS: Mapping[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0}
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


def _given(body: Any, known: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says, without nulls; refuses what is not known, or not computed so."""
    if not isinstance(body, dict):
        raise DataError("the request must be a JSON object")
    if unknown := sorted(set(body) - _COMMON - set(known) - set(defaults)):
        raise ConfigError(f"{brief(unknown[0])} is not known here: leave it out")
    for name, default in defaults.items():
        value = body.get(name)
        if value and value != default:
            instead = "; repetition_penalty is" if name in _COMMON_DEFAULTS else ""
            raise ConfigError(
                f"{name} = {brief(value)} is not computed here{instead}: leave it out"
            )
    return {name: value for name, value in body.items() if value is not None}


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    """What all requests say, but for logprobs, as arguments of ``Asked``."""
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise DataError("stream_options must be an object")
    if unknown := sorted(set(options) - _STREAM_OPTIONS):
        raise ConfigError(f"stream_options: {brief(unknown[0])} is not known here: leave it out")
    if not isinstance(model := given.get("model"), str):
        raise DataError("'model' must be the name of a model")
    return {
        "model": model,
        "sampling": _sampling(given),
        "max_new_tokens": _most_tokens(given),
        "stop": _stops(given.get("stop", [])),
        "streamed": _flag(given, "stream"),
        "counted": _flag(options, "include_usage"),
        "count": _count(given.get("n", 1)),
    }


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"'{name}' must be true or false")
    return default if value is None else value


def _number_of_logprobs(name: str, value: Any) -> int:
    count = check_count(name, value)
    if count > LOGPROBS:
        raise ConfigError(f"{name} = {brief(value)} is more than {LOGPROBS}")
    return count


def _sampling(given: Mapping[str, Any]) -> Sampling:
    said = {name: given[name] for name in _SAMPLING if name in given}
    if type(seed := said.get("seed")) is int and -(2**63) <= seed < 0:
        said["seed"] = seed + 2**64  # OpenAI's have a sign
    biases = given.get("logit_bias", {})  # by tokens' ids, which are texts in JSON
    if not isinstance(biases, dict):
        raise DataError("'logit_bias' must be an object of tokens' ids and numbers")
    for token in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise DataError(f"'logit_bias' has {brief(token)}, which is no token's id")
    numbers = {int(token): bias for token, bias in biases.items()}
    return Sampling(**{"temperature": 1.0, "seed": None, **said}, logit_bias=numbers)


def _most_tokens(given: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if name in given:
            return check_count(name, given[name])
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise DataError("'stop' must be a text or a list of texts")
    if len(stops) > STOP_TEXTS:
        raise DataError(f"'stop' has {len(stops)} texts, more than {STOP_TEXTS}")
    return tuple(stops)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= ANSWERS:
        raise ConfigError(f"n must be a whole number from 1 to {ANSWERS}, got {brief(value)}")
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
        given = _given(body, _CHAT, _CHAT_DEFAULTS)
        return cls(
            **_common(given),
            logprobs=_logprobs(given),
            messages=checked_messages(given.get("messages"), "messages"),
            tools=_tools(given),
            several_calls=_flag(given, "parallel_tool_calls", default=True),
            options=canonical_options(given.get("chat_template_kwargs")),
        )


def _logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs", 0)
    if _flag(given, "logprobs"):
        return _number_of_logprobs("top_logprobs", top)
    if top:
        raise ConfigError("top_logprobs is told only where logprobs is true")
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
                f"tool {number} is no function: it must be an object with the type 'function' and "
                "a 'function' that has a 'name'"
            )
    if choice not in ("auto", "none"):
        raise ConfigError(
            f"tool_choice = {brief(choice)} is not computed here, only 'auto' and 'none': a model "
            "is not made to call a function"
        )
    return None if choice == "none" else tools or None


# ---- completions ---------------------------------------------------------------------------------

_COMPLETION = {"prompt", "logprobs"}
_COMPLETION_DEFAULTS = {**_COMMON_DEFAULTS, "echo": False, "suffix": "", "best_of": 1}
_MOST_TOKENS = 16  # where nobody says how many, as OpenAI has it

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionRequest(Asked):
    """What a request for completions asks for."""

    prompts: list[Prompt]  # texts, or their tokens

    @classmethod
    def read(cls, body: Any) -> CompletionRequest:
        """Reads a request's JSON."""
        given = _given(body, _COMPLETION, _COMPLETION_DEFAULTS)
        common = _common({"max_tokens": _MOST_TOKENS, **given})
        prompts, logprobs = _prompts(given.get("prompt")), given.get("logprobs")
        if len(prompts) * common["count"] > ANSWERS:
            raise ConfigError(
                f"{len(prompts)} prompts with n = {common['count']} are more than {ANSWERS} "
                "answers: ask for fewer at a time"
            )
        told = None if logprobs is None else _number_of_logprobs("logprobs", logprobs)
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
