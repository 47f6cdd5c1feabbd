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
from qlora_wgpu.cli._options import allow_code_option, overrides_argument
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.config import Config
from qlora_wgpu.config.values import REWARD
from qlora_wgpu.data import prompt_kind
from qlora_wgpu.errors import ConfigError, shell_command, shell_word
from qlora_wgpu.lora.scoring_files import is_scored_adapter
from qlora_wgpu.runs.settings import as_config, require_own_peers
from qlora_wgpu.supervision.child import Journal
from qlora_wgpu.training import Observer, Sample, TrainResult, checkpoint_folders
from qlora_wgpu.training.observers import EventRows, Events, Unwatched
from qlora_wgpu.training.observers import as_json as result_as_json
from qlora_wgpu.visible import without_empty_lines


@click.command()
@click.argument("config", type=click.Path())
@overrides_argument
@click.option("--overwrite", is_flag=True, help="Replace an existing run in output.dir.")
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run in output.dir, bit-exactly, from its latest complete checkpoint, or start "
    "one if there is none. A finished run is unchanged, or continues with more epochs or steps.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON object per event instead, and the result at the end.",
)
@allow_code_option
@click.option("--quiet", is_flag=True, help="Print only warnings and errors, on stderr.")
@click.pass_obj
def train(
    journal: Journal | None, config: str, overrides: tuple[str, ...], overwrite: bool, resume: bool,
    as_json: bool, quiet: bool, allow_code: bool,
) -> None:  # fmt: skip
    """Fine-tune a model as configured in CONFIG.

    CONFIG is a run's YAML or folder. Overrides replace its values: `qlora-wgpu train run.yaml
    optim.learning_rate=1e-4`. The run's folder (output.dir) gets adapter/, checkpoints/,
    config.yaml, metrics.jsonl, report.html and result.json. Ctrl-C stops the run and saves a
    checkpoint; `qlora-wgpu train RUN --resume`, with the run's folder, continues it with the same
    overrides.
    """
    if as_json and quiet:
        raise ConfigError("--json and --quiet are mutually exclusive")
    console = Terminal(ignore_errors=True, stderr=as_json or quiet)
    settings = as_config(config, overrides)
    require_own_peers(config, settings, overrides)
    flags = ["--allow-code"] if allow_code else []
    again, noted = _command(config, overrides, *flags, "--resume"), JournalObserver(journal)
    options = {"overwrite": overwrite, "resume": resume, "allow_code": allow_code}
    try:
        if as_json or quiet:
            lines = (EventRows(partial(write_json, ignore_errors=True)),) if as_json else ()
            watchers = (*lines, Unwatched(), noted)  # warnings are on stderr
            result = _watched_run(settings, watchers, **options)
        else:
            result = shown_run(console, settings, noted, **options)
    except KeyboardInterrupt:  # before the first step, or a second one; else it is a result
        if (noted.has_folder or not overwrite) and checkpoint_folders(Path(settings.output.dir)):
            message = f"stopped; checkpoints are kept, and `{again}` continues"
        else:  # the run to be replaced still exists
            restart = _command(config, overrides, *flags, "--overwrite") if overwrite else again
            message = f"stopped before the first checkpoint; `{restart}` starts the run again"
        console.print(message, style="yellow", soft_wrap=True)
        raise
    if as_json:
        write_json({"event": "result", **result_as_json(result)}, ignore_errors=True)
    elif not quiet:
        show_result(console, result, again)
    if result.stop_signal is not None:
        sys.exit(128 + result.stop_signal)  # as shells report a signal, so that `&&` stops


def shown_run(
    console: Terminal, settings: Config, *observers: Observer, **options: Any
) -> TrainResult:
    """Trains with a live display, which gets events before the observers."""
    with TrainingDisplay(console) as display:
        return _watched_run(settings, (display, *observers), **options)


def _watched_run(settings: Config, observers: Sequence[Observer], **options: Any) -> TrainResult:
    events = Events()
    for each in observers:
        events.subscribe(each)
    return runs.train(settings, events, **options)


def _command(config: str, overrides: tuple[str, ...], *flags: str) -> str:
    return shell_command(["qlora-wgpu", "train", config, *overrides, *flags])


class JournalObserver(Observer):
    """Notes checkpoints in the journal of a supervised process."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        # Whether output.dir is this run's; before, it may hold a run to be replaced
        self.has_folder = False

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Notes that output.dir is this run's."""
        self.has_folder = True
        if self._journal is not None:
            self._journal.note_opened()

    def resumed(self, checkpoint: Path, step: int) -> None:
        """Notes the checkpoint."""
        self.saved(checkpoint)

    def saved(self, folder: Path) -> None:
        """Notes a checkpoint, or the final adapter."""
        if self._journal is not None:
            self._journal.note_checkpoint(folder)


def show_result(console: Terminal, result: TrainResult, again: str = "--resume") -> None:
    """Prints a run's result; ``again`` is how a stopped one continues."""
    if result.was_finished:
        console.print("to continue it, raise train.num_train_epochs or train.max_steps")
    console.facts(_result_rows(result))
    if result.reports:
        page, *pictures = result.reports
        named = "".join(f" and {picture.name}" for picture in pictures)
        console.print(f"{page}{named} written")
    if result.interrupted:
        console.print(
            f"stopped after step {result.steps}; a checkpoint is saved, and `{again}` continues",
            style="yellow",
            soft_wrap=True,  # so that the command can be copied
        )
    else:
        run, kind = shell_word(str(result.run_dir)), prompt_kind(result.adapter_dir)
        verb = f'generate {run} --prompt "..."' if kind == "text" else f"chat {run}"
        if is_scored_adapter(result.adapter_dir):
            verb = f'classify {run} --text "..."'
        console.print(f"qlora-wgpu {verb}", soft_wrap=True)


def _result_rows(result: TrainResult) -> dict[str, str]:
    rows: dict[str, str] = {}
    if result.metric_for_best_model == REWARD:  # whose loss is its negative
        rows |= _reward_rows(result)
    elif result.eval_loss_before is not None and result.eval_loss is not None:
        losses = f"{result.eval_loss_before:.4f} before, {result.eval_loss:.4f} after"
        rows["held-out loss"] = losses
    is_loss = result.metric_for_best_model != REWARD
    if is_loss and result.best_step is not None and result.best_step != result.steps:
        best = f"{result.best_eval_loss:.4f}"
        if result.best_metric is not None and result.metric_for_best_model != "loss":
            best += f", {result.metric_for_best_model} {result.best_metric:.4f},"
        rows["best"] = f"{best} after step {result.best_step}"
    if result.sample is not None:
        rows |= _sample_rows(result.sample, is_finished=not result.interrupted)
    rows["trained"] = (
        f"{result.num_tokens:,} tokens in {result.seconds:,.0f} s, device memory at most "
        f"{result.peak_bytes / 2**20:,.1f} MiB"
    )
    rows["adapter"] = str(result.adapter_dir)
    return rows


def _reward_rows(result: TrainResult) -> dict[str, str]:
    rows: dict[str, str] = {}
    if result.eval_loss_before is not None and result.eval_loss is not None:
        before, after = -result.eval_loss_before, -result.eval_loss
        rows["held-out reward"] = f"{before:.4f} before, {after:.4f} after"
    if result.best_step is not None and result.best_step != result.steps:
        rows["best"] = f"{result.best_metric:.4f} after step {result.best_step}"
    return rows


def _sample_rows(sample: Sample, *, is_finished: bool) -> dict[str, str]:
    """A sample before and after training, also if the model generated nothing."""
    texts = {name: without_empty_lines(text) for name, text in vars(sample).items()}
    written = ("before", "after") if is_finished else ("before",)
    return {name: text or "(empty)" for name, text in texts.items() if text or name in written}
