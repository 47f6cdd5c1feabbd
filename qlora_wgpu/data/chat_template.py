"""Chat templates, from messages to the text a model was trained on: built-in ones, and others.

The built-in ones are the files in ``templates/``, each of which stands alone and marks what the
assistant writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template
from qlora_wgpu.data import masking
from qlora_wgpu.data.conversations import Conversation, RenderedChat, without_span_marks
from qlora_wgpu.data.marker_words import make_sentinel
from qlora_wgpu.data.masking import Masked, Masking, Sources, mask_many
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError, reason
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import TEMPLATE_BYTES
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess, error_of
from qlora_wgpu.sandbox.templates import marks_assistant

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


class ChatTemplate:
    """A chat template with the special tokens it may print, rendered in a process of its own.

    This package's own templates are rendered in this one.

    Attributes:
        source: The template's Jinja source.
        tool_source: That of the template for conversations with tools, if it is another one.
        marks_assistant: Whether it has ``{% generation %}`` blocks.
        sources: What the process that renders it is given.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """Compiles a template, which is given texts by name, such as ``{"bos_token": "<s>"}``."""
        self.source = source
        self.tool_source = tool_source
        self.sources = Sources(source, tool_source, dict(special_tokens or {}))
        self._is_own = all(map(is_built_in, {source, tool_source or source}))
        self._stopped = ""
        self.marks_assistant: bool = self._call(marks_assistant, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Renders a conversation, with the header of an assistant's turn at the end if asked."""
        conversation = _plain(Conversation(messages, tools, 0, options or {}))
        with _cannot_be_handed_over():
            text, spans = self._call(
                masking.render_chat, self.sources, conversation, add_generation_prompt
            )
        return RenderedChat(text, spans and [(first, end) for first, end in spans])

    def left_out(self, conversation: Conversation) -> frozenset[str]:
        """What of a conversation the template leaves out, in words."""
        return frozenset(self._call(masking.left_out, self.sources, _plain(conversation)))

    def mask_many(
        self, conversations: Sequence[Conversation], how: Masking
    ) -> list[Masked | QLoRAError]:
        """Each conversation's text with what is learnt of it, or what is wrong with it."""
        given = list(map(_plain, conversations))
        messages = sum(len(each.messages) for each in given)
        if len(given) > 1 and not self._stopped:
            try:
                return _masked(self._ask(mask_many, self.sources, given, how, answers=messages))
            except Exception:  # one by one, each has its own time and its own error
                return [self.mask_many([each], how)[0] for each in given]
        try:
            with _cannot_be_handed_over():
                return _masked(self._call(mask_many, self.sources, given, how, answers=messages))
        except QLoRAError as err:
            return [err] * len(given)

    def _ask(self, function: Callable[..., Any], *args: Any, answers: int = 1) -> Any:
        """Calls a function where the template may be rendered."""
        if self._is_own:
            return function(*args)
        return templates_process().call(function, *args, answers=answers)

    def _call(self, function: Callable[..., Any], *args: Any, answers: int = 1) -> Any:
        """Calls a function, unless the template has been stopped: once is enough."""
        if not self._stopped:
            try:
                return self._ask(function, *args, answers=answers)
            except SandboxError as err:
                self._stopped = f"the chat template is stopped: it {err}"
        raise TokenizerError(self._stopped)


def _plain(conversation: Conversation) -> Conversation:
    return Conversation(*map(without_span_marks, conversation))


def _masked(answers: Sequence[Sequence[Any]]) -> list[Masked | QLoRAError]:
    """What a child process answers, which has an error as its name and message."""
    return [Masked(*each) if len(each) > 2 else error_of(*each) for each in answers]


@contextmanager
def _cannot_be_handed_over() -> Iterator[None]:
    """Tells of values that cannot be handed to another process."""
    try:
        yield
    except QLoRAError:
        raise
    except Exception as err:
        raise DataError(f"the chat template cannot render this conversation: {err}") from err


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
    """The template that a run uses, by ``data.chat_template``; None if there is none at all.

    The setting is a built-in name, the template itself, a file, or None for the tokenizer's own.
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
def templates_process() -> SandboxProcess:
    """The process that renders the templates of strangers, one for all."""
    return SandboxProcess("data.masking")


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


# ---- how a turn ends -----------------------------------------------------------------------------


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Id of the special token that the template writes after an assistant's turn, or None."""
    name = tokenizer.first_special(tokenizer.encode(closing_text(template), False))
    return None if name is None else tokenizer.token_id(name)


def closing_text(template: ChatTemplate) -> str:
    """The text that a template writes after an assistant's last turn, stripped of white space."""
    answer = make_sentinel("")
    try:
        text = template.render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        ).text
    except (DataError, TokenizerError):  # told where a row is rendered
        return ""
    return text.rpartition(answer)[2].strip()
