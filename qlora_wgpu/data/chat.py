"""Chat templates: from a list of messages to the text a model was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError

from qlora_wgpu.config.paths import is_inline_template
from qlora_wgpu.data.sandbox import (
    MAX_CHARACTERS,
    SPAN_END,
    SPAN_START,
    ChatEnvironment,
    GenerationExtension,
    LimitExceeded,
    RefusedConversation,
    start_counting,
)
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import TEMPLATE_BYTES

BUILT_IN_TEMPLATES = {
    "chatml": """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
}

# Other names under which data sets keep what templates read as `reasoning_content`.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        text: The text that the model reads.
        spans: Half-open character ranges of what the assistant writes, or None where the template
            does not mark it with ``{% generation %}``.
    """

    text: str
    spans: list[tuple[int, int]] | None


class ChatTemplate:
    """A compiled chat template with the special tokens it may print.

    Attributes:
        source: The template's Jinja source.
        marks_assistant: Whether it has ``{% generation %}`` blocks.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            special_tokens: Texts by name, such as ``{"bos_token": "<s>"}``.

        Raises:
            TokenizerError: If the template is no valid Jinja.
        """
        self.source = source
        self._template, self.marks_assistant = _compile(source)
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedChat:
        """Renders a conversation.

        Args:
            messages: Mappings with ``role`` and ``content``.
            add_generation_prompt: Whether to end with the header of an assistant turn.
            tools: JSON schemas of functions that the model may call.

        Raises:
            DataError: If the template refuses or cannot take the conversation.
            TokenizerError: If the template exceeds its bounds.
        """
        start_counting()
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=[_plain(_with_reasoning(message)) for message in messages],
                tools=_plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise LimitExceeded(f"it writes more than {MAX_CHARACTERS:,} characters")
                pieces.append(piece)
        except RefusedConversation as err:
            raise DataError(f"the chat template refuses this conversation: {err}") from err
        except SecurityError as err:
            raise TokenizerError(f"the chat template is stopped: {err}") from err
        except (jinja2.TemplateError, RecursionError, MemoryError) as err:
            raise DataError(f"the chat template cannot render this conversation: {err}") from err
        except Exception as err:  # a template can raise anything its filters and operators raise
            raise DataError(f"the chat template cannot render this conversation: {err}") from err
        text, spans = _take_marks("".join(pieces))
        return RenderedChat(text, spans if self.marks_assistant else None)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RenderedChat:
    """Renders a conversation with a template given as text; see ``ChatTemplate``."""
    return ChatTemplate(template, special_tokens).render(messages, add_generation_prompt, tools)


def find_chat_template(setting: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that a run uses.

    Args:
        setting: ``data.chat_template``: a built-in name, the template itself, a file, or None for
            the tokenizer's own.
        tokenizer: Gives its template and its special tokens.

    Returns:
        The template, or None if there is none at all.

    Raises:
        TokenizerError: If a file cannot be read or the template is broken.
    """
    if setting is None:
        source = tokenizer.chat_template
    elif setting in BUILT_IN_TEMPLATES:
        source = BUILT_IN_TEMPLATES[setting]
    elif is_inline_template(setting):
        source = setting
    else:
        source = _read_template(Path(setting))
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def _read_template(path: Path) -> str:
    try:
        return file_text(path, TEMPLATE_BYTES, "utf-8-sig")
    except FileNotFoundError:
        raise TokenizerError(
            f"the chat template {path} does not exist: data.chat_template is a .jinja file, "
            f"the template itself, or one of {', '.join(BUILT_IN_TEMPLATES)}"
        ) from None
    except (OSError, ValueError) as err:
        raise TokenizerError(f"the chat template {path} cannot be read: {err}") from err


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
        raise TokenizerError(f"the chat template is broken: {err}") from err
    marks = any(
        node.identifier == GenerationExtension.identifier
        for node in tree.find_all(jinja2.nodes.ExtensionAttribute)
    )
    return template, marks


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key)), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of JSON values without the marks that only this module may set."""
    if isinstance(value, str):
        return value.replace(SPAN_START, "\ufffd").replace(SPAN_END, "\ufffd")
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _take_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks and returns where they stood; nested ones count as the outermost."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = depth = start = 0
    for piece in re.split(f"([{SPAN_START}{SPAN_END}])", marked):
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
