"""``data``: a preview of a run's training examples, their loss mask and lengths."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qlora_wgpu import runs
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._options import overrides_argument
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example, Tokenizer, content_digest, encoded_examples
from qlora_wgpu.data.dataset import Subset
from qlora_wgpu.data.row_source import ANSWER_NAMES
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.images.placeholders import ImageFiles, image_files
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.images.thumbnails import thumbnail
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.report import DataSample, write_samples
from qlora_wgpu.runs.data import data_path, read_data, tokenizer_of
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.training import Observer
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.data import preparation, source_shares
from qlora_wgpu.training.scoring import with_labels
from qlora_wgpu.visible import visible

_BARS, _BAR_WIDTH = 10, 40
_BLOCKS = "█▏"  # a bar's character, and the one for a bar shorter than that
_SHOWN_TOKENS = 400
_TRAINED_ON = "bold green"


@click.command()
@click.argument("config", type=click.Path())
@overrides_argument
@click.option("--samples", default=3, type=click.IntRange(0), help="Number of samples to show.")
@click.option("--eval", "held_out", is_flag=True, help="Show the held-out data instead.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON object per sample instead: text, input_ids, labels, and answer (such as "
    "chosen) where rows have several, or targets of scored rows.",
)
@click.option(
    "--html", type=click.Path(), help="Also write the preview, with images, to this HTML file."
)
def data(
    config: str,
    overrides: tuple[str, ...],
    samples: int,
    held_out: bool,
    as_json: bool,
    html: str | None,
) -> None:
    """Preview the training examples of CONFIG and their loss mask.

    CONFIG is a run's YAML or folder. Shows samples with the tokens that the loss is taken on, the
    lengths of rows, and how many are truncated, masked and packed. No weights are read: the model's
    folder only needs its tokenizer.
    """
    settings = as_config(config, overrides)
    if as_json and html is not None:
        raise ConfigError("--json and --html are mutually exclusive")
    if as_json:
        _write_json(settings, held_out=held_out)
        return
    console = Terminal()
    with Display(console) as display:
        prepared = runs.prepare(settings, display, held_out=held_out)
    dataset = prepared.dataset
    shown = list(islice(_titled(settings, dataset), samples))
    for title, example in shown:
        _show_sample(console, colored(example, prepared.tokenizer), title)
        for key in example.images:
            console.print(_image_line(dataset.image_sources[key], prepared.images))
    if samples:
        marked = "tokens in {+ +}" if _is_colorless(console) else "green tokens"
        console.print(f"{marked} are trained on", style="dim")
    bars = _BLOCKS if console.has_characters(_BLOCKS) else "#-"
    console.print(_histogram(dataset.lengths, settings.data.max_seq_length, bars))
    statistics = _statistics(settings, prepared, held_out=held_out)
    console.print(statistics)
    if html is not None:
        about = Console(file=io.StringIO(), width=100, record=True)
        about.print(_histogram(dataset.lengths, settings.data.max_seq_length, _BLOCKS), statistics)
        write_samples(Path(html), prepared.path, _samples_of(shown, prepared), about.export_text())
        console.print(f"{html} written")


_PICTURES = 200  # of a page


def _samples_of(
    shown: Sequence[tuple[str, Example]], prepared: runs.PreparedData
) -> list[DataSample]:
    """Samples for a page, with small copies of their images."""
    found, left = [], _PICTURES
    for title, example in shown:
        text = colored(example, prepared.tokenizer)
        parts = [(text.plain[s.start : s.end], s.style == _TRAINED_ON) for s in text.spans]
        images = []
        for key in example.images:
            image = prepared.dataset.image_sources[key]
            picture = thumbnail(image) if left > 0 else ""
            images.append((picture, _image_line(image, prepared.images)))
            left -= 1
        found.append(DataSample(title, parts, images))
    return found


def _titled(settings: Config, dataset: Dataset) -> Iterator[tuple[str, Example]]:
    """Examples with a title: the row's number, and which of its answers it is."""
    names = ANSWER_NAMES.get(settings.train.objective, ("",))
    rows = len(dataset) // len(names)
    for number in range(len(dataset)):
        row, place = divmod(number, len(names))
        example = dataset[number]
        if len(example):  # a row with one answer has an empty second example
            word = f", {names[place]}" if names[place] else ""
            yield f"{row + 1:,} of {rows:,}{word}: {len(example):,} tokens", example


def _show_sample(console: Terminal, text: Text, title: str) -> None:
    """Prints a sample, in a frame if stdout is a terminal."""
    if _is_colorless(console):
        text = _marked(text)
    if console.is_terminal:
        console.print(Panel(text, title=title, title_align="left"))
    else:
        console.print(f"--- {title}", text, sep="\n")


def _image_line(image: ImageSource, files: ImageFiles | None) -> str:
    """An image's name, size and number of tokens."""
    assert files is not None
    size = f"{image.width:,} x {image.height:,} pixels"
    return visible(f"{image.name}: {size}, {files.tokens.count(image):,} tokens")


def _is_colorless(console: Terminal) -> bool:
    return console.no_color or console.color_system is None


def _marked(text: Text) -> Text:
    """A sample with its label tokens in {+ +}, as in git's word diff, instead of colours."""
    marked = Text()
    for span in text.spans:
        part = text.plain[span.start : span.end]
        marked.append(f"{{+{part}+}}" if span.style == _TRAINED_ON else part)
    return marked


def _write_json(settings: Config, *, held_out: bool) -> None:
    """Prints each sample as a line of JSON."""
    path, split = data_path(settings, held_out=held_out), settings.data.eval_split
    settings = with_labels(settings)
    folder = ModelFolder.without_weights(base_in(settings))
    tokenizer = tokenizer_of(settings, folder)
    images = image_files(folder.path, folder.config, tokenizer.token)
    if settings.data.sources is not None and (not held_out or split is not None):
        mixture = read_data(settings, tokenizer, Observer(), held_out=held_out, images=images)
        for example in mixture:
            ids = example.input_ids.tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            write_json({"text": text, "input_ids": ids, "labels": example.labels.tolist()})
        return
    how = preparation(settings.data, settings.train.objective, settings.train, images)
    chosen = None
    if split is not None:
        part = read_data(settings, tokenizer, Observer(), held_out=True, images=images)
        chosen = {content_digest(example.input_ids) for example in part}
    samples = encoded_examples(path, tokenizer, how, held_out=held_out and split is None)
    for sample in samples:
        if chosen is None or (content_digest(sample.ids) in chosen) == held_out:
            text = tokenizer.decode(sample.ids, False) if sample.text is None else sample.text
            row = {"text": text, "input_ids": sample.ids, "labels": sample.labels}
            answer = {"answer": sample.answer} if sample.answer else {}
            targets = {"targets": list(sample.targets)} if sample.targets else {}
            write_json(row | answer | targets)


def colored(example: Example, tokenizer: Tokenizer) -> Text:
    """An example's text, with label tokens in green and the others dim.

    Of an image's placeholders only the first is shown, with their number.
    """
    text = Text()
    ids, has_loss, counts = _without_runs(example)
    shown = min(len(ids), _SHOWN_TOKENS)
    first = 0
    while first < shown:
        end = first
        while end < shown and has_loss[end] == has_loss[first]:
            end += 1
            if counts[end - 1] > 1:  # its number follows
                break
        style = _TRAINED_ON if has_loss[first] else "dim"
        decoded = tokenizer.decode(ids[first:end], skip_special_tokens=False)
        text.append(visible(decoded), style=style)
        if counts[end - 1] > 1:
            text.append(f"×{counts[end - 1]:,}", style="italic")
        first = end
    if shown < len(ids):
        text.append(f" … and {sum(counts[shown:])} more tokens", style="italic")
    return text


_RUN = 8  # tokens: longer runs of a token without loss are shown as one


def _without_runs(example: Example) -> tuple[list[int], list[bool], list[int]]:
    """Ids, whether the loss is taken on them, and how many equal tokens each stands for."""
    ids: list[int] = []
    has_loss: list[bool] = []
    counts: list[int] = []
    pairs = zip(example.input_ids.tolist(), example.labels.tolist(), strict=True)
    for (token, label), run in groupby(pairs):
        count = sum(1 for _ in run)
        is_run = bool(example.images) and count > _RUN and label == IGNORE_INDEX
        for each in [count] if is_run else [1] * count:
            ids.append(token)
            has_loss.append(label != IGNORE_INDEX)
            counts.append(each)
    return ids, has_loss, counts


def _histogram(lengths: npt.NDArray[np.int64], limit: int, blocks: str) -> Table:
    """Number of rows by length, as bars of ``blocks[0]``, or ``blocks[1]`` for very few."""
    lengths = lengths[lengths > 0]
    longest = int(lengths.max())
    width = max(-(-longest // _BARS), 1)
    counts = np.bincount((lengths - 1) // width, minlength=-(-longest // width))
    table = Table(title="tokens per row", title_justify="left", show_header=False, box=None)
    for i, count in enumerate(counts):
        bar = blocks[0] * round(_BAR_WIDTH * count / counts.max())
        bar = bar or (blocks[1] if count else "")
        table.add_row(f"{i * width + 1:,}–{(i + 1) * width:,}", f"{count:,}", bar)
    table.caption = f"longest {longest:,}, max_seq_length {limit:,}"
    table.caption_justify = "left"
    return table


def _statistics(settings: Config, prepared: runs.PreparedData, *, held_out: bool) -> Table:
    dataset, plan = prepared.dataset, prepared.plan
    counts = dataset.counts
    total, labels = dataset.num_tokens, dataset.num_label_tokens
    table = Table(show_header=False, box=None)
    is_split = settings.data.eval_split is not None and not held_out
    split = dataset.num_others if is_split and isinstance(dataset, Subset) else 0
    held = f", {split:,} held out" if split else ""
    table.add_row("rows", f"{counts.rows:,} read, {dataset.num_rows:,} used{held}")
    for each in source_shares(dataset):
        share = 100 * each.rows / len(dataset)
        table.add_row("", f"{each.name}: {each.rows:,} of {each.of:,} ({share:.1f} %)")
    table.add_row(
        "length",
        f"{counts.truncated:,} truncated; dropped: {counts.dropped:,} too long, "
        f"{counts.without_labels:,} without labels, {counts.empty:,} empty",
    )
    if images := dataset.image_sources:
        assert prepared.images is not None
        counts_of = [prepared.images.tokens.count(image) for image in images.values()]
        table.add_row("images", f"{len(images):,}, of at most {max(counts_of):,} tokens")
    table.add_row(
        "tokens",
        f"{total:,} per epoch, loss on {labels:,} ({100 * labels / total:.1f} %), the rest masked",
    )
    if settings.data.packing and isinstance(plan, BatchSampler):
        row = max(settings.data.max_seq_length, plan.longest)
        full = 100 * total / (len(plan.rows) * row)
        rows = "1 row" if len(plan.rows) == 1 else f"{len(plan.rows):,} rows"
        table.add_row("packed", f"into {rows} of {row:,} tokens, {full:.1f} % full")
    table.add_row(
        "steps",
        f"{plan.steps_per_epoch:,} per epoch, {plan.total_steps:,} in total, of "
        f"{plan.batch_size // plan.sides} x {plan.accumulation} "
        f"{'rows' if isinstance(plan, BatchSampler) else 'completions'}",
    )
    return table
