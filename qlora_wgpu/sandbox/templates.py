"""Compiling and rendering of chat templates: what runs in a process of its own for strangers'."""

from __future__ import annotations

import codecs
import importlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError

from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError
from qlora_wgpu.sandbox.jinja import (
    MAX_CHARACTERS,
    SPAN_END,
    SPAN_START,
    ChatEnvironment,
    GenerationExtension,
    LimitExceeded,
    RefusedConversation,
    start_counting,
)

# What Jinja, MarkupSafe and Python import when they first need it: a process of strangers' code can
# open no file any more by then.
for _module in ("html.entities", "jinja2.debug", "unicodedata"):
    importlib.import_module(_module)
for _codec in ("ascii", "latin-1", "raw_unicode_escape", "unicode_escape", "utf-16", "utf-32"):
    codecs.lookup(_codec)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TURNS = 8  # of which the texts before and after are rendered at once
_MARKS = re.compile(f"([{SPAN_START}{SPAN_END}])")


def marks_assistant(source: str) -> bool:
    """Whether a template has ``{% generation %}`` blocks.

    Raises:
        TokenizerError: If it is no valid Jinja.
    """
    return _compile(source)[1]


def render(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and the ranges of characters that the template marks.

    Raises:
        DataError: If the template refuses or cannot take the conversation.
        TokenizerError: If the template exceeds its bounds.
    """
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


def render_with_prefixes(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[tuple[str, list[tuple[int, int]]], list[tuple[int, bool, str | None]]]:
    """A conversation's text, and those that the assistant's turns are found by.

    Returns:
        What ``render`` gives; and for beginnings of the conversation how many messages they have,
        whether the generation prompt follows, and the text, or None where it is refused.
    """
    whole = render(source, special_tokens, messages, tools, False)
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    prefixes = []
    for length, prompt in [(i + ahead, not ahead) for i in turns[:_TURNS] for ahead in (0, 1)]:
        if 0 < length < len(messages):
            prefixes.append(
                (length, prompt, _text(source, special_tokens, messages[:length], tools, prompt))
            )
    return whole, prefixes


def render_many(
    source: str,
    special_tokens: Mapping[str, str],
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]],
) -> list[tuple[tuple[str, list[tuple[int, int]]], list[tuple[int, bool, str | None]]] | None]:
    """What ``render_with_prefixes`` gives for each of some messages and their tools.

    Templates that mark the assistant's text need no prefixes. None stands for what is refused.
    """
    marks = marks_assistant(source)
    rendered: list[Any] = []
    for messages, tools in conversations:
        given = source, special_tokens, messages, tools
        try:
            rendered.append((render(*given, False), []) if marks else render_with_prefixes(*given))
        except QLoRAError:
            rendered.append(None)
    return rendered


def _text(source: str, *args: Any) -> str | None:
    try:
        return render(source, *args)[0]
    except DataError:
        return None


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
