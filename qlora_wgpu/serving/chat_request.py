"""A request for a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data.canonical_messages import canonical_options
from qlora_wgpu.data.messages import checked_messages
from qlora_wgpu.errors import ConfigError, DataError, brief
from qlora_wgpu.serving.asked import Asked, flag, number_of_logprobs, read_common

_KNOWN = {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "chat_template_kwargs",
}  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


@dataclass(frozen=True)
class ChatRequest(Asked):
    """What is asked for.

    Attributes:
        messages: The conversation.
        tools: JSON schemas of functions that the model may call, if there are any.
        several_calls: Whether an answer may have more than one call.
        options: What else the chat template is given, as by rows and by vLLM's
            ``chat_template_kwargs``.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    several_calls: bool
    options: dict[str, Any]

    @classmethod
    def read(cls, body: Any) -> ChatRequest:
        """Reads a request's JSON.

        Raises:
            DataError: If it is no such request.
            ConfigError: If it asks for something that is not computed.
        """
        common = read_common(body, _KNOWN, _DEFAULTS)
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
