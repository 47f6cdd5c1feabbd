"""``generate``: text from a base model, with or without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from qlora_wgpu.cli._opening import (
    ModelOptions,
    opening_options,
    prompt_format,
    require_template,
    stream,
)
from qlora_wgpu.cli._options import batch_option, chat_template_option, sampling_options
from qlora_wgpu.cli._terminal import Terminal, write, write_json
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation import generate as generate_tokens
from qlora_wgpu.generation.generate import complete
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.prompts import prompts_of, read_prompts
from qlora_wgpu.runs.workload import GenerationWorkload


def _with_prompts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wants a prompt before RUN is looked for, as which a text without its option is taken."""

    @wraps(command)
    def checked(**options: Any) -> Any:
        if (options["prompt"] is None) == (options["file"] is None):
            raise ConfigError("give either --prompt TEXT or --prompts FILE")
        return command(**options)

    return checked


@click.command()
@_with_prompts
@opening_options()
@click.option("--prompt", help="Text to continue, or to answer.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(),
    help="File of prompts instead: rows of prompt, messages or text. Each row is printed as JSON, "
    "with its completion and why that ended.",
)
@batch_option("How many prompts of the file are computed at a time; each is as if it were alone.")
@click.option(
    "--chat/--no-chat",
    default=None,
    show_default="as RUN was trained; --no-chat with --model",
    help="Whether the prompt is put into the chat template as a user's turn (or into Alpaca's "
    "prompt, where RUN was trained on that), or continued as it is.",
)
@chat_template_option
@sampling_options
def generate(
    opening: ModelOptions,
    prompt: str | None,
    file: str | None,
    batch: int,
    chat: bool | None,
    template_name: str | None,
    **sampling: Any,
) -> None:
    """Generate text with what a run has trained, or with any model and adapter.

    RUN is a run's folder, such as runs/first, or an adapter's or a model's. An adapter in the
    folder of its run is opened as the run's config.yaml says it was trained.
    """
    source = OpenedModel.open(opening.model)
    written = prompt_format(source, opening.adapter, template_name)
    is_trained = opening.by_run and opening.adapter is not None  # whose prompts are turns
    answered = (is_trained and written.template is not None) if chat is None else chat
    if prompt is None:
        assert file is not None
        _complete_file(source, opening, written, file, batch, sampling, answered=answered)
        return
    form = written if answered else PromptFormat.text(written.tokenizer)
    ids = require_template(form).ids([{"role": "user", "content": prompt}])
    texts = GenerationWorkload.of(source.pretrained, len(ids), sampling["max_new_tokens"])
    model = opening.load(Terminal(stderr=True), source, texts)
    if not answered:
        write(prompt)
    stops = written if template_name else form
    tokens = generate_tokens(
        model, ids, stop_ids=stops.stop_ids, max_length=model.max_length, **sampling
    )
    stream(written.tokenizer, tokens, stops.stop_text, () if answered else ids)


def _complete_file(
    source: OpenedModel,
    opening: ModelOptions,
    written: PromptFormat,
    file: str,
    batch: int,
    sampling: dict[str, Any],
    *,
    answered: bool,
) -> None:
    """Prints the rows of a file of prompts, completed, in their order."""
    if answered:
        require_template(written)
    rows, count = read_prompts(file), sampling.pop("max_new_tokens")
    prompts = prompts_of(rows, written, answered=answered)
    longest = max(len(prompt.ids) for prompt in prompts)
    texts = GenerationWorkload.of(source.pretrained, longest, count, min(batch, len(prompts)))
    model = opening.load(Terminal(stderr=True), source, texts)
    made = complete(
        model, written.tokenizer, prompts, max_new_tokens=count, batch=batch,
        sampling=Sampling(**sampling), max_length=model.max_length,
    )  # fmt: skip
    for (_, row), each in zip(rows, made, strict=True):
        write_json({**row, "completion": each.text, "finish_reason": each.finish_reason})
