"""A request for a completion: a text, or its tokens, that the model goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.limits import ANSWERS
from qlora_wgpu.serving.asked import Asked, number_of_logprobs, read_common

_KNOWN = {"prompt", "logprobs"}
_DEFAULTS: Mapping[str, Any] = {"echo": False, "suffix": "", "best_of": 1}
_MOST_TOKENS = 16  # where nobody says how many, as OpenAI has it

Prompt = str | list[int]


@dataclass(frozen=True)
class CompletionRequest(Asked):
    """What is asked for.

    Attributes:
        prompts: Texts, or their tokens.
    """

    prompts: list[Prompt]

    @classmethod
    def read(cls, body: Any) -> CompletionRequest:
        """Reads a request's JSON.

        Raises:
            DataError: If it is no such request.
            ConfigError: If it asks for something that is not computed.
        """
        common = read_common(body, _KNOWN, _DEFAULTS)
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
