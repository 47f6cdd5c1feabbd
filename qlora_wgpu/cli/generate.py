"""``generate``: text from a model, with or without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._opening import (
    ModelOptions,
    features_of_prompt,
    opening_options,
    prompt_format,
    require_template,
    stream,
    with_images,
)
from qlora_wgpu.cli._options import batch_option, chat_template_option, sampling_options
from qlora_wgpu.cli._terminal import Terminal, write, write_json
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation import generate as generate_tokens
from qlora_wgpu.generation.generate import complete
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.images import ImagesOfPrompt, images_with_own_device
from qlora_wgpu.runs.opening import load_adapted
from qlora_wgpu.runs.prompts import prompts_of, read_prompts
from qlora_wgpu.runs.workload import GenerationWorkload


def _with_prompts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Requires a prompt before RUN is opened, which a prompt without its option is taken for."""

    @wraps(command)
    def checked(**options: Any) -> Any:
        if (options["prompt"] is None) == (options["file"] is None):
            raise ConfigError("pass either --prompt TEXT or --prompts FILE")
        return command(**options)

    return checked


@click.command()
@_with_prompts
@opening_options()
@click.option("--prompt", help="Text to answer or continue.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(),
    help="File of prompts instead, with rows of prompt, messages or text. Each row is printed as "
    "JSON, with its completion and finish_reason. Rows may have images as training data has.",
)
@batch_option("Number of prompts to compute at a time; completions do not depend on it.")
@click.option(
    "--image",
    "images",
    type=click.Path(),
    multiple=True,
    help="File of an image to answer about, for vision-language models; can be repeated.",
)
@click.option(
    "--chat/--no-chat",
    default=None,
    show_default="as RUN was trained; --no-chat with --model",
    help="Format the prompt as a user's turn with the chat template (or as Alpaca's prompt, if RUN "
    "was trained on it), or continue it as plain text.",
)
@chat_template_option
@sampling_options
def generate(
    opening: ModelOptions,
    prompt: str | None,
    file: str | None,
    batch: int,
    images: tuple[str, ...],
    chat: bool | None,
    template_name: str | None,
    **sampling: Any,
) -> None:
    """Generate text with a run's model, or any model and adapter.

    RUN is the folder of a run, such as runs/first, or of an adapter or a model. An adapter in its
    run's folder is opened with the settings of the run's config.yaml.
    """
    source = OpenedModel.open(opening.model)
    written = prompt_format(source, opening.adapter, template_name)
    is_trained = opening.by_run and opening.adapter is not None
    answered = (is_trained and written.template is not None) if chat is None else chat
    answered = answered or (bool(images) and chat is None)
    if images and (prompt is None or not answered):
        raise ConfigError(
            "--image requires --prompt and the chat template: remove --no-chat; rows of --prompts "
            "have images of their own"
        )
    if prompt is None:
        assert file is not None
        _complete_file(source, opening, written, file, batch, sampling, answered=answered)
        return
    form = written if answered else PromptFormat.text(written.tokenizer)
    messages = [{"role": "user", "content": with_images(prompt, images)}]
    ids, sources = require_template(form).encoded(messages, images=source.images, folder=Path())
    texts = GenerationWorkload.of(
        source.pretrained, len(ids), sampling["max_new_tokens"], images=bool(images)
    )
    model = opening.load(Terminal(stderr=True), source, texts)
    features = features_of_prompt(source, model, sources)
    if not answered:
        write(prompt)
    stops = written if template_name else form
    tokens = generate_tokens(
        model, ids, stop_ids=stops.stop_ids, max_length=model.max_length, images=features,
        **sampling,
    )  # fmt: skip
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
    """Prints the completed rows of a file of prompts, in order."""
    if answered:
        require_template(written)
    rows, count = read_prompts(file), sampling.pop("max_new_tokens")
    files = source.images
    given = rows if files is None else read_prompts(file, with_bytes=True)
    found = prompts_of(given, written, answered=answered, images=files, folder=Path(file).parent)
    images = {image.key: image for _, own in found for image in own}
    longest = max(len(prompt.ids) for prompt, _ in found)
    texts = GenerationWorkload.of(
        source.pretrained, longest, count, min(batch, len(found)), images=bool(images),
        encoded=True,
    )  # fmt: skip
    with Display(Terminal(stderr=True)) as display:
        settings = opening.settings(display)
        features = images_with_own_device(settings, source, images, display)
        model = load_adapted(source, opening.adapter, settings, display, texts)
    prompts = [
        replace(prompt, images=ImagesOfPrompt(features or {}, [image.key for image in own]))
        for prompt, own in found
    ]
    made = complete(
        model, written.tokenizer, prompts, max_new_tokens=count, batch=batch,
        sampling=Sampling(**sampling), max_length=model.max_length,
    )  # fmt: skip
    for (_, row), each in zip(rows, made, strict=True):
        write_json({**row, "completion": each.text, "finish_reason": each.finish_reason})
