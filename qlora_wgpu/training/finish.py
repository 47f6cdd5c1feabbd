"""A run's end: the last evaluation, the final adapter, rescued if necessary, and the result."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.checkpoint import recover, remove, write_file
from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data import PromptFormat, save_prompt_files
from qlora_wgpu.errors import CallbackError, CheckpointError, QLoRAError, option
from qlora_wgpu.files import exists, file_text
from qlora_wgpu.limits import KIB
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.observers import Observer, TrainResult
from qlora_wgpu.training.step_log import log_window

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run

# ---- the end of a run ----------------------------------------------------------------------------


def finish(run: Run, evaluator: Evaluator) -> None:
    """Evaluates and writes the final adapter, which the model then has.

    That the run is finished is written last, so a run killed before can be resumed and ends in the
    same way.
    """
    log_window(run)
    if run.saved_at != run.state.step:
        run.save()  # evaluation may take long, and an adapter alone cannot be resumed
    if evaluator.is_pending:
        evaluator.measure(run.state.step)
    _adopt_best(run)
    with _final_parameters(run):
        _save_adapter(run)
    run.state.finished = True
    if not run.save():
        run.state.finished = False
    for folder in forget_rescued(run.folder.path) if run.state.finished else ():
        run.events.note(f"{folder} is removed: the run has ended, and its adapter is in its folder")
    _load_best(run)


def interrupt(run: Run) -> None:
    """Writes a checkpoint and the adapter of a stopped run."""
    run.model.zero_gradient()
    saved = run.saved_at == run.state.step or run.save()
    _save_adapter(run)
    if not saved:
        raise CheckpointError(
            f"the run was stopped after step {run.state.step}, but its state could not be saved: "
            f"{option('resume')} continues from an older checkpoint, if there is one in "
            f"{run.folder.checkpoints}; its adapter is in {run.folder.adapter}"
        )


def reopen_finished(run: Run) -> None:
    """Restores a finished run's adapter, on disk and in the model."""
    run.events.note(
        f"the run in {run.folder.path} is finished after {run.state.step} steps: there is nothing "
        "left to train"
    )
    try:
        load_adapter(run.folder.adapter)
    except CheckpointError:
        _adopt_best(run)
        with _final_parameters(run):
            _save_adapter(run)
    _load_best(run)


def check_ended(run: Run, failure: CallbackError | None) -> None:
    """Raises the error of a callback or observer that has failed at a run's end."""
    if failure is None:
        return
    state = f"finished, and its adapter is in {run.folder.adapter}"
    if not run.state.finished:
        state = f"saved after step {run.state.step}, and {option('resume')} continues it"
    raise CallbackError(f"{failure}; the run is {state}") from failure.__cause__


def _adopt_best(run: Run) -> None:
    """Makes the best adapter the final one, with ``load_best_model_at_end``."""
    if not run.config.eval.load_best_model_at_end:
        return
    if run.best is None:
        if run.state.best_loss is not None and run.state.best_step != run.state.step:
            run.events.warning("the best adapter was not kept: the final adapter is the last one")
        return
    state, best = run.state, run.best
    state.best_loss, state.best_figure, state.best_step = best.loss, best.metric, best.step
    if run.best.step == 0:
        run.events.warning(
            "no evaluation was better than the one before training: the final adapter is the "
            "initial one"
        )


@contextmanager
def _final_parameters(run: Run) -> Iterator[None]:
    """While it is entered, the model has the final adapter, afterwards the last one again."""
    last = run.model.read_flat(run.model.adapter.parameters).copy()
    _load_best(run)
    try:
        yield
    finally:
        run.model.write_parameters(last)


def _load_best(run: Run) -> None:
    if run.config.eval.load_best_model_at_end and run.best is not None:
        run.model.write_parameters(run.best.parameters)


def _save_adapter(run: Run) -> None:
    try:
        run.folder.require_own()
        recover(run.folder.adapter)
        run.model.save_adapter(run.folder.adapter)
    except CheckpointError as err:
        rescued = save_elsewhere(run.folder.path, run.model.save_adapter)
        where = f"is in {rescued}" if rescued else "could not be saved anywhere else either"
        raise CheckpointError(f"{err}; the adapter after step {run.state.step} {where}") from err
    run.tidy()
    run.wrote(run.folder.adapter)


def result_of(run: Run, *, was_finished: bool) -> TrainResult:
    """The result of a run that has ended."""
    state, interrupted = run.state, run.stop.requested
    return TrainResult(
        steps=state.step,
        train_loss=state.last_loss,
        eval_loss_before=state.eval_loss_before,
        eval_loss=state.eval_loss if state.eval_step == state.step else None,
        best_eval_loss=state.best_loss,
        best_metric=state.best_figure,
        metric_for_best_model=state.aim.partition(" ")[2],
        best_step=state.best_step if state.best_step >= 0 else None,
        num_tokens=state.num_tokens,
        seconds=state.seconds,
        interrupted=interrupted,
        stop_reason=run.events.stop_reason if interrupted else None,
        stop_signal=run.stop.number,
        stopped_early=not interrupted and state.step < run.total_steps,
        was_finished=was_finished,
        run_dir=run.folder.path,
        adapter_dir=run.folder.adapter,
        peak_bytes=run.model.device.memory.peak,
    )


# ---- the prompt format of an adapter -------------------------------------------------------------


def keep_prompt(
    settings: Config, source: Path, prompt: PromptFormat, result: TrainResult, observer: Observer
) -> None:
    """Writes the tokenizer, the chat template and the prompt format into the adapter's folder.

    Those of a run that was already finished are kept. A failure is a warning, not an error.
    """
    folder = result.adapter_dir
    if result.was_finished and exists(folder / PROMPT_FORMAT):
        return
    try:
        save_prompt(settings, source, prompt, folder)
    except QLoRAError as err:
        observer.warning(f"the adapter was saved, but its prompt format was not: {err}")


def save_prompt(settings: Config, source: Path, prompt: PromptFormat, folder: Path) -> None:
    """Writes the tokenizer, the chat template and the prompt format into a folder."""
    name = settings.data.chat_template if prompt.kind == "chat" else prompt.kind
    save_prompt_files(folder, source, prompt, name if name in BUILT_IN_CHAT_TEMPLATES else None)


# ---- rescued adapters ----------------------------------------------------------------------------

_RUN = "run.txt"  # in a rescued adapter's folder: the path of its run


def save_elsewhere(run: Path, save: Callable[[Path], None]) -> Path | None:
    """Saves an adapter in the first folder that can be written; None if there is none."""
    for place in _PLACES:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-", dir=place()))
            save(folder)
            write_file(folder / _RUN, f"{run.absolute()}\n".encode())
            return folder
        except (OSError, CheckpointError):
            continue
    return None


def forget_rescued(run: Path) -> list[Path]:
    """Removes the rescued adapters of a run that has ended successfully; returns their folders."""
    removed = []
    for place in _PLACES:
        with suppress(OSError, CheckpointError, UnicodeError):
            for mark in place().glob(f"{glob.escape(run.name)}-*/{_RUN}"):
                is_ours = not hasattr(os, "getuid") or mark.stat().st_uid == os.getuid()
                if is_ours and file_text(mark, 64 * KIB) == f"{run.absolute()}\n":
                    remove(mark.parent)
                    removed.append(mark.parent)
    return removed


def _cache() -> Path:
    folder = cache_path("rescued")
    make_cache_folder(folder)
    return folder


_PLACES: tuple[Callable[[], Path], ...] = (_cache, lambda: Path(tempfile.gettempdir()), Path.cwd)
"""The user's cache, the system's temporary folder, the current one."""
