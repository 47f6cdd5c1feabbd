"""A run for its readers: its log and state, report.html, loss.png and result.json."""

from __future__ import annotations

import importlib
import json
import math
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, ConfigError, command
from qlora_wgpu.files import exists
from qlora_wgpu.report import Facts, TextSample, write_png, write_report
from qlora_wgpu.report.page import inline
from qlora_wgpu.supervision.processes import is_running
from qlora_wgpu.training import Observer, RunSetup, Sample, TrainResult
from qlora_wgpu.training.observers import Row, Written, as_json
from qlora_wgpu.training.run_folder import read_rows
from qlora_wgpu.version import __version__
from qlora_wgpu.visible import without_empty_lines, without_secrets

# ---- the log -------------------------------------------------------------------------------------


class RunHistory:
    """What a run has logged; a notebook shows its curves.

    Attributes:
        rows: The rows of ``metrics.jsonl``, one per logged step and evaluation.
        samples: The rows of ``samples.jsonl``: the texts that the model has generated.
    """

    def __init__(self, rows: Sequence[Row], samples: Sequence[Row] = ()) -> None:
        self.rows, self.samples = list(rows), list(samples)

    @property
    def steps(self) -> list[Row]:
        """The rows of steps."""
        return [row for row in self.rows if "eval_loss" not in row]

    @property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations with a loss."""
        return [row for row in self.rows if row.get("eval_loss") is not None]

    def __repr__(self) -> str:
        last = self.rows[-1]["step"] if self.rows else 0
        return f"RunHistory({len(self.rows):,} rows up to step {last:,})"

    def _repr_html_(self) -> str:
        return inline(self.rows)

    def to_pandas(self) -> Any:
        """A ``DataFrame`` with one row per step, which includes its evaluation.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("pandas is not installed: pip install pandas") from None
        steps: dict[int, Row] = {}
        for row in self.rows:
            steps.setdefault(row["step"], {}).update(row)
        table = pandas.DataFrame([steps[step] for step in sorted(steps)])
        return table.set_index("step") if steps else table


def read_log(run: str | PathLike[str]) -> RunHistory:
    """Reads the log of the run in a folder, also while it is running.

    Raises:
        ConfigError: If the folder contains no run.
        CheckpointError: If the log cannot be read.
    """
    return RunHistory(*_logged(RunPaths(run)))


def _logged(paths: RunPaths) -> tuple[list[Row], list[Row]]:
    if not exists(paths.metrics):
        raise ConfigError(f"{paths.path} contains no run: metrics.jsonl does not exist")
    return read_rows(paths.metrics), read_rows(paths.samples)


class RunStatus(RunHistory):
    """The log of a run and its state; another process may be running it."""

    def __init__(self, run: str | PathLike[str]) -> None:
        paths = RunPaths(run)
        super().__init__(*_logged(paths))
        self.path = paths.path
        progress: Row = {}
        with suppress(CheckpointError):
            progress = read_json_object(paths.progress) if exists(paths.progress) else {}
        total = progress.get("total_steps")
        self.total_steps = total if isinstance(total, int) else 0  # 0 if unknown
        pid, self.is_running = progress.get("pid"), None  # None if unknown
        if not isinstance(pid, int) or pid <= 0:
            self.is_running = False
        elif progress.get("host") == socket.gethostname():
            self.is_running = is_running(pid)

    @property
    def step(self) -> int:
        """The number of steps done, of those that are logged."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def state(self) -> str:
        """The run's state, in words."""
        if self.is_running is None:
            return "unknown: it runs on another machine, or the system does not report processes"
        if self.is_running:
            return "the run is in progress"
        is_complete = 0 < self.total_steps <= self.step
        return "the run has ended" if is_complete else "no process is running it"

    @property
    def latest_samples(self) -> list[Row]:
        """The texts that were generated last."""
        return [row for row in self.samples if row["step"] == self.samples[-1]["step"]]


# ---- the report ----------------------------------------------------------------------------------

_INTERVAL = 5.0  # minimum seconds between two pages during a run
_SHARE = 100  # times the time that writing a page takes: at most one percent of the run
_LARGEST_EXPONENT = 20.0  # of a perplexity worth showing
_IN_PYTHON = "qlora_wgpu.train(...), from Python"


class Reporter(Observer):
    """Writes a run's page at its start, during the run, and at its end.

    The page of a running run reloads itself. Failing to write it does not end the run.
    """

    def __init__(self, settings: Config, observer: Observer) -> None:
        self._settings, self._observer = settings, observer
        self._paths = RunPaths(settings.output.dir)
        now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        self._began = f"began {now}"
        self._setup: RunSetup | None = None
        self._total_steps = 0
        self._memory: Counter[str] | None = None  # until the run has started
        self._warnings: list[str] = []
        self._samples: Sequence[Sample] = ()
        self._pictures: Sequence[Sequence[str]] = ()
        self._next_page = -math.inf

    # -- events ------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Keeps the text for the page."""
        self._warnings.append(text)

    warning = note

    def setup(self, setup: RunSetup) -> None:
        """Keeps the setup for the page."""
        self._setup = setup

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Writes the first page, now that the run owns its folder."""
        self._total_steps, self._memory = total_steps, memory
        with suppress(OSError):
            self._paths.result.unlink()  # of the run that is resumed
        self._refresh()

    def step(self, row: Row) -> None:
        """Updates the page from time to time."""
        self._refresh()

    evaluation = step

    def saved(self, folder: Path) -> None:
        """Updates the page."""
        self._refresh()

    def written(self, step: int, texts: Sequence[Written]) -> None:
        """Updates the page."""
        self._refresh()

    def take_samples(
        self, samples: Sequence[Sample], pictures: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Keeps the samples for the page, and the pictures of their prompts if they are given."""
        self._samples = samples
        self._pictures = self._pictures if pictures is None else pictures

    # -- pages -------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self._memory is not None and time.monotonic() >= self._next_page:
            self._write_page("the run is in progress", is_finished=False)

    def failed(self, error: BaseException) -> None:
        """Writes the page of a run that ended with an error after its start."""
        if self._memory is not None:
            name = str(error) or type(error).__name__
            self._write_page(f"the run ended with an error: {without_secrets(name)}")

    def ended(self, result: TrainResult) -> tuple[Path, ...]:
        """Writes the last page, and with matplotlib a picture of the loss; returns their paths.

        Existing files of a run that was already finished are kept.
        """
        page, picture = self._paths.report, self._paths.plot
        written: list[Path] = []
        if not (result.was_finished and exists(page)) and self._write_page(_ending(result), result):
            written.append(page)
        try:
            rows = read_rows(self._paths.metrics)
            if not (result.was_finished and exists(picture)) and write_png(picture, rows):
                written.append(picture)
        except CheckpointError as err:
            self._observer.warning(str(err))
        return tuple(written)

    def keep(self, result: TrainResult) -> None:
        """Writes ``result.json``; a run that was already finished keeps its own."""
        path = self._paths.result
        if result.was_finished and exists(path):
            return
        try:
            write_file(path, (json.dumps(as_json(result), indent=1) + "\n").encode())
        except CheckpointError as err:
            self._observer.warning(str(err))

    def _write_page(
        self, state: str, result: TrainResult | None = None, *, is_finished: bool = True
    ) -> bool:
        began = time.monotonic()
        try:
            rows = read_rows(self._paths.metrics)
            facts = self._facts(state, self._values(rows, result), is_finished)
            write_report(self._paths.report, facts, rows)
        except CheckpointError as err:
            if is_finished:
                self._observer.warning(str(err))
            return False
        finally:
            now = time.monotonic()
            self._next_page = now + max(_INTERVAL, _SHARE * (now - began))
        return True

    def _texts_between(self) -> dict[tuple[str, int], list[tuple[int, str]]]:
        """The texts generated after the first step, also before the run was resumed.

        They are found by their prompts and, since prompts about several images may be equal, the
        number of earlier ones.
        """
        between: dict[tuple[str, int], list[tuple[int, str]]] = {}
        seen: Counter[tuple[int, str]] = Counter()
        for row in read_rows(self._paths.samples):
            prompt, text, step = row.get("prompt"), row.get("text"), row["step"]
            if step > 0 and isinstance(prompt, str) and isinstance(text, str):
                between.setdefault((prompt, seen[step, prompt]), []).append((step, text))
                seen[step, prompt] += 1
        return between

    def _text_samples(self) -> list[TextSample]:
        between, seen, found = self._texts_between(), Counter[str](), list[TextSample]()
        for number, sample in enumerate(self._samples):
            logged = between.get((sample.prompt, seen[sample.prompt]), ())
            seen[sample.prompt] += 1
            pictures = self._pictures[number] if number < len(self._pictures) else ()
            found.append(_legible(sample, logged, pictures))
        return found

    def _facts(self, state: str, values: dict[str, str], is_finished: bool) -> Facts:
        settings = self._settings
        device, scheme = "", str(settings.quant.scheme)
        if self._setup is not None:
            device, scheme = f"{self._setup.device}; ", self._setup.scheme
        return Facts(
            title=f"{Path(settings.model.path).name} on {settings.data.train_name}",
            subtitle=f"{device}qlora-wgpu {__version__}; {scheme}, "
            f"{settings.train.compute_dtype}, rank {settings.lora.r}",
            values=values,
            samples=self._text_samples(),
            memory=self._memory or Counter(),
            config=settings.to_yaml(),
            command=without_secrets(command() or _IN_PYTHON),
            began=self._began,
            state=state,
            warnings=list(dict.fromkeys(self._warnings)),
            is_finished=is_finished,
        )

    def _values(self, rows: Sequence[Row], result: TrainResult | None) -> dict[str, str]:
        """The values at the top of the page: the result's, or the latest ones in the log."""
        log = RunHistory(rows)
        steps, losses = log.steps, [row["eval_loss"] for row in log.evaluations]
        hits = [h for row in rows if (h := row.get("eval_mean_token_accuracy")) is not None]
        last = steps[-1] if steps else {}
        first, latest = (losses[0], losses[-1]) if losses else (None, None)
        now = "so far" if result is None else "after"
        if result is not None:
            first, latest = result.eval_loss_before, result.eval_loss
            last = {
                "step": result.steps, "loss": result.train_loss, "num_tokens": result.num_tokens,
            }  # fmt: skip
        values = {
            "steps": _steps(last.get("step", 0), self._total_steps),
            "loss": _loss(last.get("loss")),
            "held-out loss before": _loss(first),
            f"held-out loss {now}": _loss(latest),
            "perplexity before": _perplexity(first),
            f"perplexity {now}": _perplexity(latest),
            f"token accuracy {now}": f"{hits[-1]:.1%}" if hits else "",
            "tokens": f"{last.get('num_tokens', 0):,}",
        }
        if sampled := [row for row in rows if row.get("reward") is not None]:
            values = {n: v for n, v in values.items() if not n.startswith(("held-out", "perpl"))}
            values["mean reward"] = f"{sampled[-1]['reward']:.4f}"
            held_out = [row["eval_reward"] for row in log.evaluations if "eval_reward" in row]
            if held_out:
                values["held-out reward before"] = f"{held_out[0]:.4f}"
                values[f"held-out reward {now}"] = f"{held_out[-1]:.4f}"
        if rewards := [row for row in rows if "rewards/margins" in row]:
            values = {n: value for n, value in values.items() if not n.startswith("perplexity")}
            values["reward margin"] = f"{rewards[-1]['rewards/margins']:.3f}"
        if scored := [row for row in rows if {"accuracy", "mae"} & row.keys()]:
            values = {n: value for n, value in values.items() if not n.startswith("perplexity")}
            measured = next((r for r in reversed(rows) if "eval_loss" in r), scored[-1])
            for name, title in _SCORED.items():
                value = measured.get(f"eval_{name}", measured.get(name))
                values[title] = "" if value is None else f"{value:.3f}"
        if result is not None:
            values["seconds"] = f"{result.seconds:,.0f}"
            values["device memory"] = f"{result.peak_bytes / 2**20:,.0f} MiB"
        if self._setup is not None:
            for each in self._setup.sources:
                values[f"rows of {each.name}"] = f"{each.rows:,} of {each.of:,}"
            values["adapter parameters"] = f"{self._setup.adapter_parameters:,}"
        values |= _workers(steps)
        return {name: value for name, value in values.items() if value}


_SCORED = {
    "accuracy": "accuracy", "macro_f1": "macro F1", "margin": "reward margin",
    "mae": "mean absolute error",
}  # fmt: skip


def _ending(result: TrainResult) -> str:
    if result.interrupted:
        reason = f" ({result.stop_reason})" if result.stop_reason else ""
        return f"stopped after step {result.steps}{reason}; it can be resumed"
    if result.stopped_early:
        return f"finished after step {result.steps}: evaluations stopped improving"
    return f"finished after step {result.steps}"


def _workers(steps: Sequence[Row]) -> dict[str, str]:
    """Each cluster worker's mean share of the tokens of the logged steps."""
    logged = [row["workers"] for row in steps if isinstance(row.get("workers"), dict)]
    shares: dict[str, float] = {}
    for workers in logged:
        for name, worker in workers.items():
            shares[name] = shares.get(name, 0.0) + worker["share"] / len(logged)
    return {f"share of worker {name}": f"{share:.0%}" for name, share in shares.items()}


def _steps(done: int, total: int) -> str:
    return f"{done:,}" if done >= total else f"{done:,} of {total:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _perplexity(loss: float | None) -> str:
    return "" if loss is None or loss > _LARGEST_EXPONENT else f"{math.exp(loss):,.4g}"


def _legible(
    sample: Sample, between: Sequence[tuple[int, str]], pictures: Sequence[str]
) -> TextSample:
    """A sample for the page; the text after the last step is not repeated in ``between``."""
    texts = {name: without_empty_lines(text) for name, text in vars(sample).items()}
    logged = [(step, without_empty_lines(text)) for step, text in between]
    between = logged[:-1] if sample.after else logged
    return TextSample(**texts, between=between, pictures=pictures)
