"""Formats of models' tool calls, and a parser that separates calls from streamed text."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data.json_rows import parse_json, raw_decode
from qlora_wgpu.errors import DataError
from qlora_wgpu.generation.text import overlap

# ---- formats -------------------------------------------------------------------------------------

Tools = Mapping[str, Mapping[str, Any]]
_SHORT_ID = 9  # letters and digits of Mistral's ids, which its templates require
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL
)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str  # of the function
    arguments: str  # a JSON object


@dataclass(frozen=True)
class ToolCallFormat:
    """The format of tool calls of a kind of model."""

    opener: str  # text before a call
    closer: str  # text after a call; empty if it ends with the answer
    # Parses the text between; raises ValueError or DataError
    parse: Callable[[str, Tools], list[Call]]
    bare: bool = False  # whether an answer that begins with a brace is a call
    markers: tuple[str, ...] = ()  # special tokens of the format
    short_ids: bool = False  # Mistral's ids

    def begins_at(self, text: str, *, follows_text: bool) -> int | None:
        """Where a call begins; ``follows_text`` if there was other text before."""
        blank = len(text) - len(text.lstrip())
        if self.bare and not follows_text and text[blank : blank + 1] == "{":
            return blank
        place = text.find(self.opener)
        return None if place < 0 else place

    def size(self, text: str, *, to_end: bool) -> int | None:
        """Length of the call at the beginning of a text; None if it is incomplete."""
        place = text.find(self.closer) if self.closer else -1
        if place >= 0:
            return place + len(self.closer)
        return len(text) if to_end else None

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Parses the calls of a text; none if it is malformed."""
        inner = text.removeprefix(self.opener)
        if self.closer:
            inner = inner.strip().removesuffix(self.closer)
        try:
            return self.parse(inner, tools)
        except (ValueError, DataError, RecursionError):
            return []

    def new_id(self) -> str:
        """A random id of a call."""
        if self.short_ids:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(_SHORT_ID))
        return f"call_{secrets.token_hex(12)}"


def _call_of(value: Any) -> Call:
    """Reads an object with a name and arguments, or parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _object(text: str, tools: Tools) -> list[Call]:
    return [_call_of(parse_json(text))]


def _objects(text: str, tools: Tools) -> list[Call]:
    """Reads consecutive objects, optionally separated by semicolons."""
    calls = []
    while text := text.lstrip(" \t\r\n;"):
        value, end = raw_decode(text, 0)
        calls.append(_call_of(value))
        text = text[end:]
    return calls


def _list(text: str, tools: Tools) -> list[Call]:
    """Reads a list of objects; or names, each followed by its arguments."""
    if text.lstrip().startswith("["):
        listed = parse_json(text)
        return [_call_of(value) for value in listed]
    calls = []
    while text := text.strip().removeprefix("[TOOL_CALLS]"):
        named = _NAMED.match(text)
        if named is None:
            raise ValueError
        arguments, end = raw_decode(text, named.end())
        calls.append(_call_of({"name": named[1], "arguments": arguments}))
        text = text[end:]
    return calls


def _tags(text: str, tools: Tools) -> list[Call]:
    """Reads a tag of a function with a tag for each parameter, typed by the schema."""
    function = _FUNCTION.fullmatch(text)
    if function is None or _PARAMETER.sub("", function[2]).strip():
        raise ValueError
    schema = tools.get(function[1], {}).get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    kinds = properties if isinstance(properties, dict) else {}
    arguments = {
        name: _value(value, kinds.get(name)) for name, value in _PARAMETER.findall(function[2])
    }
    return [Call(function[1], json.dumps(arguments, ensure_ascii=False))]


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return text
    try:
        return parse_json(text)
    except DataError:
        return text


_TAGGED = ("<tool_call>", "</tool_call>")
HERMES = ToolCallFormat(*_TAGGED, _object, markers=_TAGGED)
QWEN3_CODER = ToolCallFormat(*_TAGGED, _tags, markers=_TAGGED)
MISTRAL = ToolCallFormat(
    "[TOOL_CALLS]", "", _list, markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_ids=True
)
LLAMA = ToolCallFormat("<|python_tag|>", "", _objects, bare=True, markers=("<|python_tag|>",))


def call_format(template: str) -> ToolCallFormat | None:
    """Detects the format from a chat template; None if it is unknown."""
    if "<tool_call>" in template:
        return QWEN3_CODER if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "<|python_tag|>" in template or _LLAMA_WORDS in template else None


_LLAMA_WORDS = 'Respond in the format {"name": function name, "parameters"'


# ---- parsing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolSet:
    """Functions of a request, and the format in which the model calls them."""

    format: ToolCallFormat
    tools: Mapping[str, Mapping[str, Any]]  # the functions' definitions, by name
    parallel: bool = True  # whether an answer may contain more than one call

    def read(self, text: str) -> list[Call]:
        """Parses the calls of a text; none if it is malformed or calls an unknown function."""
        calls = self.format.read(text, self.tools)
        if not calls or any(call.name not in self.tools for call in calls):
            return []
        return calls if self.parallel else calls[:1]


class ToolCallParser:
    """Parses an answer while it is generated.

    Anything that is not a complete call of an offered function stays text.
    """

    def __init__(self, offered: ToolSet) -> None:
        self.ended = False  # after the only call that is allowed; the rest is ignored
        self._offered = offered
        self.format = offered.format
        self._rest = ""
        self._in_call = False
        self._calls = self._has_text = False

    def push(self, text: str) -> list[str | Call]:
        """Adds text; returns text and calls that are certain so far."""
        self._rest += text
        return list(self._read())

    def end(self) -> list[str | Call]:
        """Returns the text and calls that were held back."""
        read = list(self._read(to_end=True))
        if self._rest and not self.ended and not (self._calls and self._rest.isspace()):
            read.append(self._rest)
        self._rest = ""
        return read

    def _read(self, *, to_end: bool = False) -> Iterator[str | Call]:
        while self._rest and not self.ended:
            if not self._in_call:
                place = self.format.begins_at(self._rest, follows_text=self._has_text)
                before = self._shown(len(self._rest) if place is None else place, place is None)
                if before:
                    self._has_text = True
                    yield before
                if place is None:
                    return
                self._in_call = True
            size = self.format.size(self._rest, to_end=to_end)
            if size is None:
                return
            whole, self._rest, self._in_call = self._rest[:size], self._rest[size:], False
            calls = self._offered.read(whole)
            if not calls:
                self._has_text = True
                yield whole
            self._calls |= bool(calls)
            yield from calls
            self.ended = bool(calls) and not self._offered.parallel

    def _shown(self, end: int, is_open: bool) -> str:
        """Takes the text before a call, without white space at its end."""
        text = self._rest[:end]
        if is_open:
            text = text[: end - overlap(text, self.format.opener)]
        shown = text.rstrip()
        self._rest = self._rest[len(shown) if is_open else end :]
        return shown


def by_name(tools: Collection[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's tools by name."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}
