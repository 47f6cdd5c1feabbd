"""Streaming of generated text, and where it stops, for the commands that write some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qlora_wgpu.cli._terminal import write
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, suitable_template
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.generation import continuation
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.prompts import prompt_for


def stream(
    tokenizer: Tokenizer,
    tokens: Iterable[int],
    stop_text: str = "",
    context: Sequence[int] = (),
) -> str:
    """Writes tokens to stdout as they come; returns their text.

    Args:
        tokenizer: The model's tokenizer.
        tokens: What is generated.
        stop_text: The text that ends it, which is not written.
        context: Tokens of the text that they go on with.
    """
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = continuation(tokenizer, context, ids)
        if stop_text and stop_text in text:
            break
        # Half a character decodes to the replacement sign: wait for its other half. What may be
        # the beginning of the end is held back, too.
        held = _beginning(text, stop_text)
        if not text.endswith("\ufffd") and len(text) - held > len(shown):
            write(text[len(shown) : len(text) - held])
            shown = text[: len(text) - held]
    text = continuation(tokenizer, context, ids)
    text = text.partition(stop_text)[0] if stop_text else text
    write(text[len(shown) :] + "\n")
    return text


def _beginning(text: str, stop_text: str) -> int:
    """The number of characters at the end of a text that begin another one."""
    sizes = range(min(len(stop_text), len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(stop_text[:n])), 0)


def prompt_format(source: OpenedModel, adapter: str | None, setting: str | None) -> PromptFormat:
    """How prompts are written: as the adapter was trained, or with a chat template by its name.

    Raises:
        TokenizerError: If the template is broken, or a file of the tokenizer damaged.
        CheckpointError: If what is kept beside the adapter is damaged.
    """
    prompt = prompt_for(source, adapter)
    if setting is None:
        return prompt
    return PromptFormat("chat", prompt.tokenizer, find_chat_template(setting, prompt.tokenizer))


def require_template(prompt: PromptFormat) -> PromptFormat:
    """The prompt's format, if it can write what somebody says.

    Raises:
        TokenizerError: If it is chats, and no template is known.
    """
    if prompt.kind == "chat" and prompt.template is None:
        raise TokenizerError(
            "the model has no chat template: give --chat-template a .jinja file or a built-in name "
            f"({suitable_template(prompt.tokenizer)} fits its tokenizer), or generate without "
            "--chat"
        )
    return prompt
