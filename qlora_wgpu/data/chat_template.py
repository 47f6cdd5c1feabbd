"""Chat templates, from messages to the text a model was trained on: built-in ones, and others.

The built-in ones are the files in ``templates/``, each of which stands alone and marks what the
assistant writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template
from qlora_wgpu.data.canonical_messages import REASONING_KEYS, TemplateForms
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError, reason
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import TEMPLATE_BYTES
from qlora_wgpu.sandbox.process import ChildProcess, Stopped
from qlora_wgpu.sandbox.templates import (
    SPAN_END,
    SPAN_START,
    marks_assistant,
    render,
    render_many,
    render_with_prefixes,
)

# ---- built-in templates --------------------------------------------------------------------------

_FOLDER = Path(__file__).parent / "templates"
BUILT_IN_TEMPLATES = {
    name: file_text(_FOLDER / f"{name}.jinja", TEMPLATE_BYTES, "utf-8")
    for name in BUILT_IN_CHAT_TEMPLATES
}
"""Sources by name."""

# Templates of no family begin as the tokenizer begins a text, and write its end token so that it
# is one; the others do as their family does.
_OF_NO_FAMILY = ("alpaca", "plain")
_BEGINNING = "{{- bos_token -}}\n"
_END, _END_OF_A_WORD = "+ eos_token", "+ ' ' + eos_token"
# What a tokenizer knows that was made for a template: the token that ends a turn, then others.
# A template comes before those whose tokens are among its own.
_TOKENS = {
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<end_of_turn>", "<start_of_turn>"),
    "granite": ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    "command-r": (
        *("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
        *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    ),
    "phi4": ("<|im_end|>", "<|im_start|>", "<|im_sep|>"),
    "chatml": ("<|im_end|>", "<|im_start|>"),
    "phi": ("<|end|>", "<|user|>", "<|assistant|>"),
}
_TURNS_OF_MISTRAL = ("[INST]", "[/INST]")


def built_in_template(name: str, tokenizer: Tokenizer) -> str:
    """The source of a template, for a tokenizer."""
    source = BUILT_IN_TEMPLATES[name]
    if name not in _OF_NO_FAMILY:
        return source
    if not tokenizer.begins_with_bos:
        source = source.replace(_BEGINNING, "")
    end = tokenizer.eos_token
    if end is not None and not tokenizer.knows(end) and tokenizer.knows(end, before=" "):
        source = source.replace(_END, _END_OF_A_WORD)
    return source


def suitable_template(tokenizer: Tokenizer) -> str:
    """The name of the template that fits what a tokenizer knows.

    Each of a template's special tokens must be one token of the vocabulary, and its end of a turn
    one that counts as special. Where no family's are there, it is ``plain``, which needs nothing
    but the end-of-sequence token.
    """
    for name, tokens in _TOKENS.items():
        end = tokenizer.first_special(tokenizer.encode(tokens[0], False))
        if end == tokens[0] and all(map(tokenizer.knows, tokens)):
            return name
    if tokenizer.eos_token is not None and all(map(tokenizer.knows, _TURNS_OF_MISTRAL)):
        return "mistral"
    return "plain"


def is_built_in(source: str) -> bool:
    """Whether a template's source is this package's own, as it is for some tokenizer."""
    return _for_all(source) in map(_for_all, BUILT_IN_TEMPLATES.values())


def _for_all(source: str) -> str:
    """A template without what ``built_in_template`` changes for a tokenizer."""
    return source.replace(_BEGINNING, "").replace(_END_OF_A_WORD, _END)


# ---- rendering -----------------------------------------------------------------------------------

_MOST_OTHERS = 64  # templates with options that are remembered


class Conversation(NamedTuple):
    """A conversation."""

    messages: Sequence[Mapping[str, Any]]  # its messages
    # The JSON schemas of functions that the model may call
    tools: Sequence[Mapping[str, Any]] | None = None
    first: int = 0  # the first message that is no part of the prompt
    # What else the chat template is given, by name
    options: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation."""

    text: str  # the text that the model reads
    # Half-open character ranges of what the assistant writes, or None where the template does not
    # mark it with ``{% generation %}``
    spans: list[tuple[int, int]] | None


class ChatTemplate:
    """A compiled chat template with the special tokens it may print.

    Attributes:
        source: The template's Jinja source.
        tool_source: That of the template for conversations with tools, if it is another one.
        marks_assistant: Whether it has ``{% generation %}`` blocks.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            special_tokens: Texts by name, such as ``{"bos_token": "<s>"}``, and what else the
                template is given.
            tool_source: That of the template for conversations with tools, if it is another one.
        """
        self.source = source
        self.tool_source = tool_source
        self._stopped = ""
        self.marks_assistant: bool = self._call(marks_assistant, source)
        self._special_tokens = dict(special_tokens or {})
        self._ahead = _Ahead((), None, ())
        self._ready: dict[int, tuple[Conversation, Any]] = {}
        self._looks_ahead = not is_built_in(source)
        self._forms = TemplateForms(source, self._tried)
        self._others: dict[str, ChatTemplate] = {}

    def suited(self, conversation: Conversation) -> ChatTemplate:
        """The template that writes a conversation, with the options that it gives.

        As in transformers, it is the one for tools where there are any.
        """
        has_tools = conversation.tools and self.tool_source is not None
        source = self.tool_source if has_tools and self.tool_source else self.source
        if source == self.source and not conversation.options:
            return self
        key = json.dumps([source, dict(conversation.options)], sort_keys=True, default=str)
        if key not in self._others:
            if len(self._others) >= _MOST_OTHERS:
                self._others.clear()
            variables = {**self._special_tokens, **_plain(conversation.options)}
            self._others[key] = ChatTemplate(source, variables)
        return self._others[key]

    def _tried(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The text of messages as they are, or None where the template refuses them."""
        try:
            text, _ = self._call(render, self.source, self._special_tokens, messages, None, False)
        except QLoRAError:
            return None
        return str(text)

    def _given(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Messages as the template is given them."""
        return [_plain(_with_reasoning(self._forms.adapted(message))) for message in messages]

    def look_ahead(self, conversations: Sequence[Conversation]) -> None:
        """Renders conversations that ``render`` will be asked for soon, in a single call.

        Calling another process for each would cost more than rendering it. What goes wrong is told
        when the conversation is asked for.

        Args:
            conversations: The very objects that will be given to ``render``.
        """
        self._ready = {}
        if not self._looks_ahead or self._stopped or not conversations:
            return
        plain = [(self._given(each.messages), _plain(each.tools)) for each in conversations]
        try:
            rendered = templates_process().call(
                render_many, self.source, self._special_tokens, plain
            )
        except Exception:  # one by one, each has its own time and its own error
            self._looks_ahead = False
            return
        pairs = zip(conversations, rendered, strict=True)
        self._ready = {id(c.messages): (c, r) for c, r in pairs if r is not None}

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
        """
        text = self._ahead.text_of(messages, add_generation_prompt, tools)
        if text is not None:
            return RenderedChat(text, None)
        (text, spans), prefixes = self._rendered(messages, add_generation_prompt, tools)
        if prefixes:
            self._ahead = _Ahead(messages, tools, prefixes)
        marked = [(int(first), int(end)) for first, end in spans]
        return RenderedChat(text, marked if self.marks_assistant else None)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Any:
        """The text with its marks, and what ``render_with_prefixes`` gives beside it."""
        conversation, ready = self._ready.get(id(messages), (Conversation(()), None))
        is_same = conversation.messages is messages and conversation.tools is tools
        if is_same and not add_generation_prompt:
            return ready
        given = self.source, self._special_tokens, self._given(messages), _plain(tools)
        try:
            if add_generation_prompt or self.marks_assistant:
                return self._call(render, *given, add_generation_prompt), ()
            return self._call(render_with_prefixes, *given)
        except QLoRAError:
            raise
        except Exception as err:  # what cannot be handed to another process
            raise DataError(f"the chat template cannot render this conversation: {err}") from err

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the sandbox: here for templates of this package's own."""
        if is_built_in(self.source):
            return function(*args)
        if self._stopped:  # once is enough
            raise TokenizerError(self._stopped)
        try:
            return templates_process().call(function, *args)
        except Stopped as err:
            self._stopped = f"the chat template is stopped: it {err}"
            raise TokenizerError(self._stopped) from err


class _Ahead:
    """Beginnings of the conversation rendered last: asked for next, and not worth another call."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object,
        prefixes: Iterable[tuple[int, bool, str | None]],
    ) -> None:
        self._messages = list(messages)
        self._tools = tools
        self._texts = {(length, prompt): text for length, prompt, text in prefixes}

    def text_of(
        self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: object
    ) -> str | None:
        """The text of the very same messages, if it is known."""
        text = self._texts.get((len(messages), prompt))
        if text is None or tools is not self._tools:
            return None
        same = all(a is b for a, b in zip(messages, self._messages, strict=False))
        return text if same else None


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
    """
    if setting is None:
        source = tokenizer.chat_template
    elif setting in BUILT_IN_TEMPLATES:
        source = built_in_template(setting, tokenizer)
    elif is_inline_template(setting):
        source = setting
    else:
        source = _read_template(Path(setting))
    own = tokenizer.tool_template if setting is None else None
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens, own)


@lru_cache(maxsize=1)
def templates_process() -> ChildProcess:
    """The process that renders the templates of strangers, one for all."""
    return ChildProcess("templates")


def _read_template(path: Path) -> str:
    try:
        return file_text(path, TEMPLATE_BYTES, "utf-8-sig")
    except FileNotFoundError:
        raise TokenizerError(
            f"the chat template {path} does not exist: give a .jinja file, the template "
            f"itself, or one of {', '.join(BUILT_IN_TEMPLATES)}"
        ) from None
    except (OSError, ValueError) as err:
        raise TokenizerError(f"the chat template {path} cannot be read: {reason(err)}") from err


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
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
    return value.item() if isinstance(value, np.generic) else value
