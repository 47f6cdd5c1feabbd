"""``train``: a YAML file in, a PEFT adapter out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from qlora_wgpu import runs
from qlora_wgpu.cli._display import TrainingDisplay
from qlora_wgpu.cli._options import overrides_argument
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.config import Config
from qlora_wgpu.data import prompt_kind
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs.settings import as_config, require_own_peers
from qlora_wgpu.shell_words import shell_command, shell_word
from qlora_wgpu.supervision.journal import Journal
from qlora_wgpu.training import Observer, Sample, TrainResult, checkpoint_folders
from qlora_wgpu.training.observers import EventRows, Events, Unwatched
from qlora_wgpu.training.observers import as_json as result_as_json
from qlora_wgpu.visible import without_empty_lines


@click.command()
@click.argument("config", type=click.Path())
@overrides_argument
@click.option("--overwrite", is_flag=True, help="Replace a run that output.dir already holds.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in output.dir from its newest complete checkpoint, with the same bits "
    "as if it had not stopped; begins a run if there is none. A finished one stays as it is, or "
    "continues with more epochs or steps.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON object for each event instead, one a line, and the result at the end.",
)
@click.option("--quiet", is_flag=True, help="Print warnings and errors alone, on stderr.")
@click.pass_obj
def train(
    journal: Journal | None, config: str, overrides: tuple[str, ...], overwrite: bool, resume: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Fine-tune a model as CONFIG, a YAML file or the folder of a run, says.

    Values of CONFIG can be replaced: `qlora-wgpu train run.yaml optim.learning_rate=1e-4`.
    The run's folder (output.dir) gets adapter/, checkpoints/, config.yaml, metrics.jsonl,
    report.html and result.json. Ctrl-C stops it with its state saved, and
    `qlora-wgpu train RUN --resume`, with the run's folder, continues it with the overrides it was
    begun with.
    """
    if as_json and quiet:
        raise ConfigError("--json and --quiet exclude each other: choose one")
    console = Terminal(lasting=True, stderr=as_json or quiet)
    settings = as_config(config, overrides)
    require_own_peers(config, settings, overrides)
    again, noted = _command(config, overrides, "--resume"), Noted(journal)
    try:
        if as_json or quiet:
            lines = (EventRows(partial(write_json, lasting=True)),) if as_json else ()
            watchers = (*lines, Unwatched(), noted)  # warnings are on stderr
            result = _watched_run(settings, watchers, overwrite=overwrite, resume=resume)
        else:
            result = shown_run(console, settings, noted, overwrite=overwrite, resume=resume)
    except KeyboardInterrupt:  # before the steps, or twice: in between it is a result
        if (noted.has_folder or not overwrite) and checkpoint_folders(Path(settings.output.dir)):
            left = f"stopped; what was saved before is kept, and `{again}` goes on"
        else:  # what is to be replaced is still there
            anew = _command(config, overrides, "--overwrite") if overwrite else again
            left = f"stopped before anything was saved; `{anew}` begins the run"
        console.print(left, style="yellow", soft_wrap=True)
        raise
    if as_json:
        write_json({"event": "result", **result_as_json(result)}, lasting=True)
    elif not quiet:
        show_result(console, result, again)
    if result.stop_signal is not None:
        sys.exit(128 + result.stop_signal)  # as shells tell a signal, so that no `&&` goes on


def shown_run(
    console: Terminal, settings: Config, *observers: Observer, **options: Any
) -> TrainResult:
    """Trains, and shows it; the observers are told after what is shown."""
    with TrainingDisplay(console) as display:
        return _watched_run(settings, (display, *observers), **options)


def _watched_run(settings: Config, observers: Sequence[Observer], **options: Any) -> TrainResult:
    events = Events()
    for each in observers:
        events.subscribe(each)
    return runs.train(settings, events, **options)


def _command(config: str, overrides: tuple[str, ...], flag: str) -> str:
    """The command that goes on with a run, or begins it again."""
    return shell_command(["qlora-wgpu", "train", config, *overrides, flag])


class Noted(Observer):
    """Notes what a run could go on from, also for the supervising process if there is one."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        # Whether output.dir is the run's own: till then it may hold one that is to be replaced.
        self.has_folder = False

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """The run's folder is its own now."""
        self.has_folder = True
        if self._journal is not None:
            self._journal.note_opened()

    def resumed(self, checkpoint: Path, step: int) -> None:
        """The run goes on from a checkpoint."""
        self.saved(checkpoint)

    def saved(self, folder: Path) -> None:
        """A checkpoint, or the adapter at the very end, was written."""
        if self._journal is not None:
            self._journal.note_checkpoint(folder)


def show_result(console: Terminal, result: TrainResult, again: str = "--resume") -> None:
    """Prints what a run has come to, and what goes ``again`` on with one that was stopped."""
    if result.was_finished:
        console.print("to go on with it, raise train.num_train_epochs or train.max_steps")
    console.facts(_figures(result))
    if result.reports:
        page, *pictures = result.reports
        named = "".join(f" and {picture.name}" for picture in pictures)
        console.print(f"{page}{named} written")
    if result.interrupted:
        console.print(
            f"stopped after step {result.steps}; its state is saved, and `{again}` goes on",
            style="yellow",
            soft_wrap=True,  # a command that is copied is in one piece
        )
    else:
        run, kind = shell_word(str(result.run_dir)), prompt_kind(result.adapter_dir)
        verb = f'generate {run} --prompt "..."' if kind == "text" else f"chat {run}"
        console.print(f"qlora-wgpu {verb}", soft_wrap=True)


def _figures(result: TrainResult) -> dict[str, str]:
    figures = {}
    if result.eval_loss_before is not None and result.eval_loss is not None:
        losses = f"{result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after"
        figures["held-out loss"] = losses
    if result.best_step is not None and result.best_step != result.steps:
        best = f"{result.best_eval_loss:.4f}"
        if result.best_metric is not None and result.metric_for_best_model != "loss":
            best += f", {result.metric_for_best_model} {result.best_metric:.4f},"
        figures["best"] = f"{best} after step {result.best_step}"
    if result.sample is not None:
        figures |= _texts(result.sample, ended=not result.interrupted)
    figures["trained"] = (
        f"{result.num_tokens:,} tokens in {result.seconds:,.0f} s, device memory at most "
        f"{result.peak_bytes / 2**20:,.1f} MiB"
    )
    figures["adapter"] = str(result.adapter_dir)
    return figures


def _texts(sample: Sample, *, ended: bool) -> dict[str, str]:
    """A text before and after; what the model left empty is said, since it says something."""
    texts = {name: without_empty_lines(text) for name, text in vars(sample).items()}
    written = ("before", "after") if ended else ("before",)
    return {name: text or "(nothing)" for name, text in texts.items() if text or name in written}
