"""Calls of functions within an answer, told apart from its text while it comes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.generation.text import beginning
from qlora_wgpu.serving.call_formats import Call, CallFormat


@dataclass(frozen=True)
class Offered:
    """Functions that a request offers, and how the model writes calls of them.

    Attributes:
        form: How.
        tools: Each function's JSON schema, by its name.
        several: Whether an answer may have more than one call.
    """

    form: CallFormat
    tools: Mapping[str, Mapping[str, Any]]
    several: bool = True

    def read(self, text: str) -> list[Call]:
        """The calls that a text is made of; none where it is not, or of other functions."""
        calls = self.form.read(text, self.tools)
        if not calls or any(call.name not in self.tools for call in calls):
            return []
        return calls if self.several else calls[:1]


class CallReader:
    """Reads an answer as it comes.

    What is no whole call of a function that is offered stays text.

    Attributes:
        ended: Whether it has the only call that it may have: what follows is not read.
    """

    def __init__(self, offered: Offered) -> None:
        """Has read nothing."""
        self.ended = False
        self._offered = offered
        self._form = offered.form
        self._rest = ""
        self._within = False
        self._calls = self._said = False

    def new_id(self) -> str:
        """An id for a call."""
        return self._form.new_id()

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
                place = self._form.begins_at(self._rest, said=self._said)
                before = self._shown(len(self._rest) if place is None else place, place is None)
                if before:
                    self._said = True
                    yield before
                if place is None:
                    return
                self._within = True
            size = self._form.size(self._rest, to_end=to_end)
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
            text = text[: end - beginning(text, self._form.opener)]
        shown = text.rstrip()
        self._rest = self._rest[len(shown) if is_open else end :]
        return shown


def names_of(tools: Collection[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's tools by their names."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}
