"""Chat templates of strangers, rendered in a process of their own: no code, no endlessness.

Jinja's sandbox stops access to Python's internals and changes to values. It does not stop loops
without end or texts without bound: steps are counted here and single values held to a size, so that
most of them end with a sentence. What goes on within filters and comparisons cannot be counted;
the process that this runs in is held to its time and memory (``process.py``).
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.visitor
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from qlora_wgpu.errors import DataError, TokenizerError

# ---- an environment with bounds ------------------------------------------------------------------

MAX_CHARACTERS = 10_000_000
MAX_STEPS = 250_000
_LARGEST = {"*": 10**9, "**": 100}  # operands: products and powers of such stay small
_MAX_WIDTH = 100_000  # of a padded or indented text

_TELL_ADDRESSES = (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    BlockReference,
)
_STREAMS = (
    *("batch", "items", "map", "reject", "rejectattr"),
    *("reverse", "select", "selectattr", "slice", "unique"),
)

# Private-use characters around assistant text. Unlike counted positions they stay right when a
# template captures a block in a variable or a macro before printing it.
SPAN_START, SPAN_END = "\ufdd0", "\ufdd1"

_steps: ContextVar[list[int]] = ContextVar("template_steps")


class RefusedConversation(Exception):
    """A template called ``raise_exception``."""


class LimitExceeded(SecurityError):
    """A template runs or grows without reasonable bound."""


def start_counting() -> None:
    """Begins the step count of one rendering."""
    _steps.set([0])


def _tick() -> str:
    count = _steps.get()
    count[0] += 1
    if count[0] > MAX_STEPS:
        raise LimitExceeded(f"it takes more than {MAX_STEPS:,} steps")
    return ""


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise LimitExceeded(f"it builds a value of more than {MAX_CHARACTERS:,} characters")


def _concat(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


class _Guard(jinja2.visitor.NodeTransformer):
    """Adds a step to every loop and macro, and bounds ``~``, which Jinja compiles to a join."""

    def _count(self, node: Any) -> Any:
        self.generic_visit(node)
        call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(node.lineno))
        if getattr(node, "test", None) is not None:  # tried even where the body is not run
            node.test = jinja2.nodes.And(jinja2.nodes.Not(call), node.test)
        return node

    visit_For = visit_Macro = visit_CallBlock = _count

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        concat = jinja2.nodes.EnvironmentAttribute("bounded_concat")
        return jinja2.nodes.Call(concat, node.nodes, [], None, None).set_lineno(node.lineno)


class _Function:
    """A function or method that a template got hold of: to be called, not to be looked at."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return "<function>"  # Python's own tells addresses


class _Stream:
    """What a filter gives piece by piece."""

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
    """A value without what Python would write of its address."""
    return _Function(value) if callable(value) and isinstance(value, _TELL_ADDRESSES) else value


def _streaming(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose iterators do not tell their addresses."""

    @functools.wraps(original)  # Jinja's marks included
    def stream(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return _Stream(result) if isinstance(result, Iterator) else result

    return stream


class GenerationExtension(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """Turns the block into a call of ``_marked`` around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{SPAN_START}{caller()}{SPAN_END}"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, with bounds.

    Blocks are trimmed, loops have ``break`` and ``continue``, and ``raise_exception``,
    ``strftime_now`` and a plain ``tojson`` exist, as in transformers.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    tick = staticmethod(_tick)
    bounded_concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationExtension, jinja2.ext.loopcontrols],
        )
        now = datetime.now()  # one moment, so that a date cannot change between two renderings
        self.filters["tojson"] = _tojson
        self.globals["range"] = _Function(safe_range)
        self.globals["raise_exception"] = _Function(_raise_exception)
        self.globals["strftime_now"] = _Function(lambda pattern: _strftime(now, pattern))
        for name in ("center", "indent", "format", "replace", "join", "wordwrap", "urlize"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        for name in _STREAMS:
            self.filters[name] = _streaming(self.filters[name])
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Guard().visit(super()._parse(source, name, filename))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or item, functions without their addresses."""
        return _hidden(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or attribute, functions without their addresses."""
        return _hidden(super().getitem(obj, argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes ``left operator right`` after a look at how large it would be."""
        sizes = [len(v) if isinstance(v, (str, list, tuple)) else None for v in (left, right)]
        if operator == "+" and None not in sizes:
            _check_length(sum(size for size in sizes if size is not None))
        elif operator == "*" and sizes != [None, None]:
            size = next(s for s in sizes if s is not None)
            times = right if sizes[0] is not None else left
            _check_length(size * times if isinstance(times, int) else 0)
        elif operator in _LARGEST and any(abs(v) > _LARGEST[operator] for v in (left, right)):
            raise LimitExceeded("it computes with huge numbers")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method after a look at how large its result would be."""
        obj = obj.function if isinstance(obj, _Function) else obj
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, method.__name__, args)
        return super().call(context, obj, *args, **kwargs)


def _check_text_method(text: str, method: str, args: Sequence[Any]) -> None:
    if method in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_width(args)
    elif method in ("format", "format_map"):
        _check_format(text)
    elif method == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        _check_length(text.count(args[0]) * len(args[1]) + len(text))
    elif method == "join" and args and isinstance(args[0], (list, tuple, str)):
        _check_length(len(text) * len(args[0]) + sum(len(str(part)) for part in args[0]))


def _check_width(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and value > _MAX_WIDTH for value in values):
        raise LimitExceeded(f"it pads a text to more than {_MAX_WIDTH:,} characters")


def _check_format(text: str) -> None:
    if re.search(r"[0-9]{6}|\*", text):
        raise LimitExceeded("it formats a value to a huge width")


def _bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    # Filters have arguments of any name: ours are by position alone.
    def bounded(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        # With a context of Jinja's in front, the value that is filtered comes second.
        passed = hasattr(original, "jinja_pass_arg")
        value, rest = (args[0], args[1:]) if passed else (first, args)
        values = [*rest, *kwargs.values()]
        if name == "replace":
            _check_text_method(str(value), "replace", [str(v) for v in values[:2]])
        elif name == "join":
            separator = str(values[0]) if values else ""
            value = list(value)
            _check_length(len(separator) * len(value))
        elif name == "format":
            _check_format(str(value))
        else:
            _check_width(values)
            _check_length(str(value).count("\n") * max([4, *(_width(v) for v in values)]))
        return (
            original(first, value, *rest, **kwargs) if passed else original(value, *rest, **kwargs)
        )

    if hasattr(original, "jinja_pass_arg"):
        bounded.jinja_pass_arg = original.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _width(value: Any) -> int:
    return value if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    if _width(indent) > 64:
        raise LimitExceeded("it indents JSON by more than 64 characters")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def _strftime(moment: datetime, pattern: str) -> str:
    _check_format(pattern)
    return moment.strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    raise RefusedConversation(str(message))


# What Jinja, MarkupSafe and Python import when they first need it: a process of strangers' code can
# open no file any more by then.
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
    """A conversation's text, and the ranges of characters that the template marks."""
    template = _compile(source)[0]
    start_counting()
    pieces, length = [], 0
    try:
        for piece in template.generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        ):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise LimitExceeded(f"it writes more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except RefusedConversation as err:
        raise DataError(f"the chat template refuses this conversation: {_told(err)}") from err
    except SecurityError as err:
        raise TokenizerError(f"the chat template is stopped: {_told(err)}") from err
    except MemoryError:
        raise  # told by the process that this runs in
    except Exception as err:  # a template can raise anything its filters and operators raise
        raise DataError(f"the chat template cannot render this conversation: {_told(err)}") from err
    return _take_marks("".join(pieces))


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    if SPAN_START in source or SPAN_END in source:
        raise TokenizerError("the chat template holds the noncharacters U+FDD0 or U+FDD1")
    environment = ChatEnvironment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as err:
        raise TokenizerError(f"the chat template is broken (line {err.lineno}): {err}") from err
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as err:
        raise TokenizerError(f"the chat template is broken: {_told(err)}") from err
    marks = any(
        node.identifier == GenerationExtension.identifier
        for node in tree.find_all(jinja2.nodes.ExtensionAttribute)
    )
    return template, marks


def _told(err: Exception) -> str:
    """An error's message as far as it is worth reading."""
    message = _ADDRESS.sub("", str(err))
    return message if len(message) <= 300 else f"{message[:300]}…"


def _take_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks and returns where they stood; nested ones count as the outermost."""
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
