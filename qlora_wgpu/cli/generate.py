"""``generate``: text from a base model, with or without an adapter."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from qlora_wgpu.cli._model import base_options, open_adapted, sampling_options
from qlora_wgpu.cli._text import chat_ids, chat_template, longest, stop_ids, stop_text, stream
from qlora_wgpu.data import ChatTemplate, find_chat_template
from qlora_wgpu.generation import generate as generate_tokens
from qlora_wgpu.runs import OpenedModel


@click.command()
@base_options
@click.option("--prompt", required=True, help="Text to continue.")
@click.option(
    "--chat", is_flag=True, help="Put the prompt into the chat template as a user's turn."
)
@click.option(
    "--chat-template",
    "wanted",
    help="Chat template instead of the tokenizer's: a .jinja file, or chatml.",
)
@sampling_options
def generate(
    model_path: str,
    adapter: str | None,
    scheme: str,
    compute_dtype: str,
    gpu: str,
    prompt: str,
    chat: bool,
    wanted: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    """Generate text with a model, and an adapter if one is given."""
    source = OpenedModel.open(model_path)
    tokenizer = source.tokenizer
    template: ChatTemplate | None
    if chat:
        template = found = chat_template(tokenizer, wanted)
        prompt_ids = chat_ids(tokenizer, found, [{"role": "user", "content": prompt}])
    else:
        template = find_chat_template(wanted, tokenizer) if wanted is not None else None
        prompt_ids = tokenizer.encode(prompt)
    model = open_adapted(Console(stderr=True), source, adapter, scheme, compute_dtype, gpu)
    if not chat:
        sys.stdout.write(prompt)
    tokens = generate_tokens(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids(tokenizer, template),
        max_length=longest(model),
    )
    stream(tokenizer, tokens, stop_text(tokenizer, template))
