"""Chat templates: this package's own, the tokenizer's, and files.

The built-in ones are the files in ``templates/``; each has ``{% generation %}`` blocks.
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

# These belong to no family: they write the BOS token only if the tokenizer adds one, and the EOS
# token so that the tokenizer recognizes it. The others write what their family's template writes.
_OF_NO_FAMILY = ("alpaca", "plain")
_BEGINNING = "{{- bos_token -}}\n"
_END, _END_OF_A_WORD = "+ eos_token", "+ ' ' + eos_token"
# Special tokens of each template, the end-of-turn token first. A template comes before those
# whose tokens are a subset of its own.
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
    """The source of a built-in template, adapted to a tokenizer."""
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
    """The name of the built-in template whose special tokens a tokenizer has, or else ``plain``.

    Each must be a single token of the vocabulary, and the end-of-turn token marked as special.
    """
    for name, tokens in _TOKENS.items():
        end = tokenizer.first_special(tokenizer.encode(tokens[0], False))
        if end == tokens[0] and all(map(tokenizer.knows, tokens)):
            return name
    if tokenizer.eos_token is not None and all(map(tokenizer.knows, _TURNS_OF_MISTRAL)):
        return "mistral"
    return "plain"


def is_built_in(source: str) -> bool:
    """Whether a source is one of this package's own, for whichever tokenizer."""

    def without_changes(text: str) -> str:
        return text.replace(_BEGINNING, "").replace(_END_OF_A_WORD, _END)

    return without_changes(source) in map(without_changes, BUILT_IN_TEMPLATES.values())


# ---- rendering -----------------------------------------------------------------------------------


class ChatTemplate:
    """A chat template with its special tokens, rendered in a sandboxed child process.

    This package's own templates are rendered in this process.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """Compiles a template; it may print special tokens such as ``{"bos_token": "<s>"}``."""
        self.source = source
        self.tool_source = tool_source  # of a separate template for conversations with tools
        self.sources = Sources(source, tool_source, dict(special_tokens or {}))
        self._is_own = all(map(is_built_in, {source, tool_source or source}))
        self._stopped = ""
        self.marks_assistant: bool = self._call(marks_assistant, source)  # {% generation %} blocks

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Renders a conversation; the generation prompt is the header of an assistant's turn."""
        conversation = _plain(Conversation(messages, tools, 0, options or {}))
        with _rendering_errors():
            text, spans = self._call(
                masking.render_chat, self.sources, conversation, add_generation_prompt
            )
        return RenderedChat(text, spans and [(first, end) for first, end in spans])

    def left_out(self, conversation: Conversation) -> frozenset[str]:
        """Names the parts of a conversation that the template omits."""
        return frozenset(self._call(masking.left_out, self.sources, _plain(conversation)))

    def mask_many(
        self, conversations: Sequence[Conversation], how: Masking
    ) -> list[Masked | QLoRAError]:
        """Each conversation's text and loss mask, or its error."""
        given = list(map(_plain, conversations))
        messages = sum(len(each.messages) for each in given)
        if len(given) > 1 and not self._stopped:
            try:
                return _masked(self._ask(mask_many, self.sources, given, how, items=messages))
            except Exception:  # one by one, each has its own time limit and its own error
                return [self.mask_many([each], how)[0] for each in given]
        try:
            with _rendering_errors():
                return _masked(self._call(mask_many, self.sources, given, how, items=messages))
        except QLoRAError as err:
            return [err] * len(given)

    def _ask(self, function: Callable[..., Any], *args: Any, items: int = 1) -> Any:
        """Calls a function in the process that may render the template."""
        if self._is_own:
            return function(*args)
        return templates_process().call(function, *args, items=items)

    def _call(self, function: Callable[..., Any], *args: Any, items: int = 1) -> Any:
        """Calls a function, unless the template has exceeded its limits before."""
        if not self._stopped:
            try:
                return self._ask(function, *args, items=items)
            except SandboxError as err:
                self._stopped = f"the chat template was stopped: it {err}"
        raise TokenizerError(self._stopped)


def _plain(conversation: Conversation) -> Conversation:
    return Conversation(*map(without_span_marks, conversation))


def _masked(answers: Sequence[Sequence[Any]]) -> list[Masked | QLoRAError]:
    """Decodes a child process's answers; an error is its class's name and its message."""
    return [Masked(*each) if len(each) > 2 else error_of(*each) for each in answers]


@contextmanager
def _rendering_errors() -> Iterator[None]:
    """Reports values that cannot be sent to another process as errors of the conversation."""
    try:
        yield
    except QLoRAError:
        raise
    except Exception as err:
        raise DataError(f"the chat template cannot render this conversation: {err}") from err


def find_chat_template(setting: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that ``data.chat_template`` names; None if the tokenizer has none either.

    The setting is a built-in name, a file, the template itself, or None for the tokenizer's own.
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
    """The process that renders all templates but this package's own."""
    return SandboxProcess("data.masking")


def _read_template(path: Path) -> str:
    try:
        return file_text(path, TEMPLATE_BYTES, "utf-8-sig")
    except FileNotFoundError:
        raise TokenizerError(
            f"the chat template {path} does not exist: use a .jinja file, the template "
            f"itself, or one of {', '.join(BUILT_IN_TEMPLATES)}"
        ) from None
    except (OSError, ValueError) as err:
        raise TokenizerError(f"cannot read the chat template {path}: {reason(err)}") from err


# ---- end of a turn -------------------------------------------------------------------------------


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Id of the special token that the template writes after an assistant's turn, or None."""
    name = tokenizer.first_special(tokenizer.encode(closing_text(template), False))
    return None if name is None else tokenizer.token_id(name)


def closing_text(template: ChatTemplate) -> str:
    """The text that a template writes after the assistant's last turn, stripped."""
    answer = make_sentinel("")
    try:
        text = template.render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        ).text
    except (DataError, TokenizerError):  # reported when a row is rendered
        return ""
    return text.rpartition(answer)[2].strip()
