"""Untrusted chat templates, in Jinja's sandbox and without access to addresses of objects.

Jinja's sandbox prevents access to Python's internals and changes to values, but neither endless
loops nor unlimited output: the process that renders limits time and memory (``process.py``).
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from qlora_wgpu.errors import DataError, TokenizerError

# ---- the environment -----------------------------------------------------------------------------

_WITH_ADDRESS = (BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, BlockReference)
_STREAMS = (
    *("batch", "items", "map", "reject", "rejectattr"),
    *("reverse", "select", "selectattr", "slice", "unique"),
)

# Noncharacters around the assistant's text. Unlike counted positions they stay correct if a
# template captures a block in a variable or a macro before printing it.
SPAN_START, SPAN_END = "\ufdd0", "\ufdd1"


class RefusedConversation(Exception):
    """A template called ``raise_exception``."""


class _Function:
    """A function or method that a template may call but not inspect."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return "<function>"  # Python's shows the address


class _Stream:
    """The lazy result of a filter."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[Any]:
        return self._pieces

    def __next__(self) -> Any:
        return next(self._pieces)

    def __repr__(self) -> str:
        return "<generator>"


def _hidden(value: Any) -> Any:
    """Hides the address of a function or method."""
    return _Function(value) if callable(value) and isinstance(value, _WITH_ADDRESS) else value


def _streaming(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose iterators do not show their addresses."""

    @functools.wraps(original)  # with Jinja's attributes
    def stream(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return _Stream(result) if isinstance(result, Iterator) else result

    return stream


class GenerationExtension(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """Parses the block as a call of ``_marked`` around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{SPAN_START}{caller()}{SPAN_END}"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for.

    As in transformers, blocks are trimmed, loops have ``break`` and ``continue``, and there are
    ``raise_exception``, ``strftime_now`` and a plain ``tojson``.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
        )
        now = datetime.now()  # fixed, so that the date cannot change between two renderings
        self.filters["tojson"] = _tojson
        self.globals["range"] = _Function(safe_range)
        self.globals["raise_exception"] = _Function(_raise_exception)
        self.globals["strftime_now"] = _Function(now.strftime)
        for name in _STREAMS:
            self.filters[name] = _streaming(self.filters[name])
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or item; functions hide their addresses."""
        return _hidden(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or attribute; functions hide their addresses."""
        return _hidden(super().getitem(obj, argument))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method."""
        called = obj.function if isinstance(obj, _Function) else obj
        return super().call(context, called, *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise RefusedConversation(str(message))


# What Jinja, MarkupSafe and Python load lazily: the sandboxed process cannot open files then.
for _module in ("html.entities", "jinja2.debug", "unicodedata"):
    importlib.import_module(_module)
for _codec in ("ascii", "latin-1", "raw_unicode_escape", "unicode_escape", "utf-16", "utf-32"):
    codecs.lookup(_codec)

# ---- rendering -----------------------------------------------------------------------------------

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MARKS = re.compile(f"([{SPAN_START}{SPAN_END}])")


def marks_assistant(source: str) -> bool:
    """Whether a template has ``{% generation %}`` blocks."""
    return _compile(source)[1]


def render(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and the character ranges of its ``{% generation %}`` blocks."""
    template = _compile(source)[0]
    try:
        text = template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except RefusedConversation as err:
        raise DataError(f"the chat template refuses this conversation: {_message(err)}") from err
    except SecurityError as err:
        raise TokenizerError(f"the chat template was stopped: {_message(err)}") from err
    except MemoryError:
        raise  # reported by the process that this runs in
    except Exception as err:  # a template can raise anything its filters and operators raise
        raise DataError(
            f"the chat template cannot render this conversation: {_message(err)}"
        ) from err
    return _take_marks(text)


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    if SPAN_START in source or SPAN_END in source:
        raise TokenizerError("the chat template must not have the noncharacters U+FDD0 and U+FDD1")
    environment = ChatEnvironment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as err:
        raise TokenizerError(f"the chat template is invalid (line {err.lineno}): {err}") from err
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as err:
        raise TokenizerError(f"the chat template is invalid: {_message(err)}") from err
    marks = any(
        node.identifier == GenerationExtension.identifier
        for node in tree.find_all(jinja2.nodes.ExtensionAttribute)
    )
    return template, marks


def _message(err: Exception) -> str:
    """An error's message without addresses, at most 300 characters."""
    message = _ADDRESS.sub("", str(err))
    return message if len(message) <= 300 else f"{message[:300]}…"


def _take_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks and returns their spans; nested ones count as the outermost."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = depth = start = 0
    for piece in _MARKS.split(marked):
        if piece == SPAN_START:
            start = length if depth == 0 else start
            depth += 1
        elif piece == SPAN_END:
            depth -= 1
            if depth == 0 and length > start:
                spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans
