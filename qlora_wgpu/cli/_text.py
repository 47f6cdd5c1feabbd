"""Streaming of generated text, and where it stops, for the commands that write some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qlora_wgpu.cli._terminal import write
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template, suitable_template
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.generation.text import TextStream
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
    stream = TextStream(tokenizer, [stop_text], context)
    for token in tokens:
        write(stream.push(token))
        if stream.stopped:
            break
    write(stream.rest() + "\n")
    return stream.text


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
            f"({suitable_template(prompt.tokenizer)} fits its tokenizer), or let it go on with "
            "texts: qlora-wgpu generate --no-chat"
        )
    return prompt
