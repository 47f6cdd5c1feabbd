"""How models write calls of functions, and calls told apart from text while it comes."""

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
from qlora_wgpu.generation.text import beginning

# ---- formats -------------------------------------------------------------------------------------

Tools = Mapping[str, Mapping[str, Any]]
_SHORT_ID = 9  # letters and digits of Mistral's ids, which its templates insist on
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL
)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str  # the function's
    arguments: str  # a JSON object as text


@dataclass(frozen=True)
class ToolCallFormat:
    """How models of a kind write calls."""

    opener: str  # what a call begins with
    closer: str  # what it ends with; empty where it goes on to the answer's end
    # The calls within, by the functions that are offered; raises ValueError or DataError
    parse: Callable[[str, Tools], list[Call]]
    bare: bool = False  # whether an answer that begins with a brace is a call without the opener
    markers: tuple[str, ...] = ()  # special tokens that it is told by
    short_ids: bool = False  # whether ids are Mistral's

    def begins_at(self, text: str, *, said: bool) -> int | None:
        """Where a call begins, if anywhere; ``said`` tells of text before it."""
        blank = len(text) - len(text.lstrip())
        if self.bare and not said and text[blank : blank + 1] == "{":
            return blank
        place = text.find(self.opener)
        return None if place < 0 else place

    def size(self, text: str, *, to_end: bool) -> int | None:
        """Characters of the call that a text begins with; None where more may come."""
        place = text.find(self.closer) if self.closer else -1
        if place >= 0:
            return place + len(self.closer)
        return len(text) if to_end else None

    def read(self, text: str, tools: Tools) -> list[Call]:
        """The calls that a text is; none where it is malformed."""
        inner = text.removeprefix(self.opener)
        if self.closer:
            inner = inner.strip().removesuffix(self.closer)
        try:
            return self.parse(inner, tools)
        except (ValueError, DataError, RecursionError):
            return []

    def new_id(self) -> str:
        """An id for a call."""
        if self.short_ids:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(_SHORT_ID))
        return f"call_{secrets.token_hex(12)}"


def _call_of(value: Any) -> Call:
    """A call as an object with a name and arguments, or parameters."""
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
    """Objects one after the other, semicolons between them if at all."""
    calls = []
    while text := text.lstrip(" \t\r\n;"):
        value, end = raw_decode(text, 0)
        calls.append(_call_of(value))
        text = text[end:]
    return calls


def _list(text: str, tools: Tools) -> list[Call]:
    """A list of objects; or names, each with its arguments behind it."""
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
    """A function's tag with one for each parameter; the schema says which are no texts."""
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
    """How a model with this chat template writes calls; None where nothing tells it."""
    if "<tool_call>" in template:
        return QWEN3_CODER if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "<|python_tag|>" in template or _LLAMA_WORDS in template else None


_LLAMA_WORDS = 'Respond in the format {"name": function name, "parameters"'


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolSet:
    """Functions that a request offers, and how the model writes calls of them."""

    form: ToolCallFormat  # how
    tools: Mapping[str, Mapping[str, Any]]  # each function's JSON schema, by its name
    several: bool = True  # whether an answer may have more than one call

    def read(self, text: str) -> list[Call]:
        """The calls that a text is made of; none where it is not, or of other functions."""
        calls = self.form.read(text, self.tools)
        if not calls or any(call.name not in self.tools for call in calls):
            return []
        return calls if self.several else calls[:1]


class ToolCallParser:
    """Reads an answer as it comes.

    What is no whole call of a function that is offered stays text.
    """

    def __init__(self, offered: ToolSet) -> None:
        self.ended = False  # whether it has the only call that it may have: no more is read
        self._offered = offered
        self.form = offered.form
        self._rest = ""
        self._within = False
        self._calls = self._said = False

    def push(self, text: str) -> list[str | Call]:
        """Takes more of the answer; what can be told of it by now."""
        self._rest += text
        return list(self._read())

    def end(self) -> list[str | Call]:
        """What was held back, once nothing follows."""
        read = list(self._read(to_end=True))
        if self._rest and not self.ended and not (self._calls and self._rest.isspace()):
            read.append(self._rest)
        self._rest = ""
        return read

    def _read(self, *, to_end: bool = False) -> Iterator[str | Call]:
        while self._rest and not self.ended:
            if not self._within:
                place = self.form.begins_at(self._rest, said=self._said)
                before = self._shown(len(self._rest) if place is None else place, place is None)
                if before:
                    self._said = True
                    yield before
                if place is None:
                    return
                self._within = True
            size = self.form.size(self._rest, to_end=to_end)
            if size is None:
                return
            whole, self._rest, self._within = self._rest[:size], self._rest[size:], False
            calls = self._offered.read(whole)
            if not calls:
                self._said = True
                yield whole
            self._calls |= bool(calls)
            yield from calls
            self.ended = bool(calls) and not self._offered.several

    def _shown(self, end: int, is_open: bool) -> str:
        """What is shown of the text before a call: white space at its end is not."""
        text = self._rest[:end]
        if is_open:
            text = text[: end - beginning(text, self.form.opener)]
        shown = text.rstrip()
        self._rest = self._rest[len(shown) if is_open else end :]
        return shown


def names_of(tools: Collection[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's tools by their names."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}
