"""``classify``: scores and labels of text or chats by a reward model or classifier."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import click

from qlora_wgpu.cli._opening import ModelOptions, opening_options, prompt_format
from qlora_wgpu.cli._options import batch_option, chat_template_option, count
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.generation.scores import (
    Classification,
    encoded_inputs,
    scores_of,
    scoring_of_model,
)
from qlora_wgpu.lora.scoring_files import default_scoring, read_scoring
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.prompts import read_prompts
from qlora_wgpu.runs.workload import LossWorkload

_AT_ONCE = 64  # batches whose rows are sorted by length and printed together


@click.command()
@opening_options()
@click.option("--text", help="Text to score.")
@click.option(
    "--rows",
    "file",
    type=click.Path(),
    help="File of text or messages instead, with rows of text or messages. Each row is printed as "
    "JSON, with its score, or with its label, probabilities and scores.",
)
@batch_option("Number of rows to compute at a time; scores do not depend on it.")
@click.option(
    "--max-length",
    type=count(),
    show_default="the run's data.max_seq_length, or the model's maximum",
    help="Maximum number of tokens of a row, whose start is kept.",
)
@chat_template_option
def classify(
    opening: ModelOptions,
    text: str | None,
    file: str | None,
    batch: int,
    max_length: int | None,
    template_name: str | None,
) -> None:
    """Score text or chats with a reward model or classifier.

    RUN is the folder of a run with train.objective: reward or classification, of its adapter, or of
    such a model. Prints a JSON object per row.
    """
    if (text is None) == (file is None):
        raise ConfigError("pass either --text TEXT or --rows FILE")
    rows = [("--text", {"text": text})] if file is None else read_prompts(file)
    inputs = [_input(where, row) for where, row in rows]
    source = OpenedModel.open(opening.model).for_adapter(opening.adapter)
    classes = source.architecture.classes
    if not classes:
        raise ConfigError(
            f"{opening.adapter or opening.model} is a language model, which has no scores: pass a "
            "run with train.objective: reward or classification"
        )
    written = prompt_format(source, opening.adapter, template_name)
    if max_length is None:
        run = None if opening.adapter is None else find_run(opening.adapter)
        limit = longest_text(source.pretrained.config)
        max_length = limit if run is None else config_of_run(run).data.max_seq_length
    known = (
        default_scoring(classes)
        if opening.adapter is None
        else read_scoring(opening.adapter, classes)
    )
    sequences = encoded_inputs(inputs, written, known, max_length)
    size = min(batch, len(sequences))
    workload = LossWorkload.of_scores(source.pretrained, size, max(map(len, sequences)))
    model = opening.load(Terminal(stderr=True), source, workload)
    scoring = scoring_of_model(model)
    places = iter(range(len(rows)))
    while chosen := list(islice(places, _AT_ONCE * size)):
        part = [sequences[i] for i in chosen]
        found: dict[int, dict[str, Any]] = {}
        for numbers, scores in scores_of(model, part, size):
            for number, values in zip(numbers, scores, strict=True):
                found[number] = Classification.of(values, scoring).to_json()
        for number, i in enumerate(chosen):
            write_json({**rows[i][1], **found[number]})


def _input(where: str, row: Mapping[str, Any]) -> Any:
    """The text or the messages of a row."""
    for key in ("messages", "text"):
        if row.get(key):
            return row[key]
    raise DataError(f"{where}: a row must have 'text' or 'messages'")
