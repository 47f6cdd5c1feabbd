"""A run's end: the last evaluation, the final adapter, and a checkpoint that knows it is over."""

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
from qlora_wgpu.errors import CallbackError, CheckpointError, option
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import KIB
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.training.evaluation import Evaluator
from qlora_wgpu.training.result import TrainResult
from qlora_wgpu.training.step_log import log_window

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run

# ---- the end of a run ----------------------------------------------------------------------------


def finish(run: Run, evaluator: Evaluator) -> None:
    """Measures and writes what a run ends with; the model has the final adapter then.

    A kill at any point leaves a run that goes on and ends in the same way: that it is finished is
    written last.
    """
    log_window(run)
    if run.saved_at != run.state.step:
        run.save()  # measuring may take long, and an adapter alone cannot be gone on with
    if evaluator.is_pending:
        evaluator.measure(run.state.step)
    _adopt_best(run)
    with _final_parameters(run):
        _save_adapter(run)
    run.state.finished = True
    if not run.save():
        run.state.finished = False
    for folder in forget_rescued(run.folder.path) if run.state.finished else ():
        run.events.note(f"{folder} is removed: the run has ended, and its adapter is in place")
    _put_best(run)


def interrupt(run: Run) -> None:
    """Writes what a stopped run goes on from."""
    run.model.zero_gradient()
    saved = run.saved_at == run.state.step or run.save()
    _save_adapter(run)
    if not saved:
        raise CheckpointError(
            f"the run was stopped after step {run.state.step}, and its state could not be saved: "
            f"{option('resume')} goes on from an older checkpoint, if there is one in "
            f"{run.folder.checkpoints}; its adapter is in {run.folder.adapter}"
        )


def reopen_finished(run: Run) -> None:
    """Makes sure that a finished run has its adapter, and gives it to the model."""
    run.events.note(
        f"the run in {run.folder.path} is finished, after {run.state.step} steps: nothing is left "
        "to train"
    )
    if not _is_whole(run):
        _adopt_best(run)
        with _final_parameters(run):
            _save_adapter(run)
    _put_best(run)


def check_ended(run: Run, failure: CallbackError | None) -> None:
    """Raises the error of a callback or observer that has failed at a run's end."""
    if failure is None:
        return
    what = f"finished, and its adapter is in {run.folder.adapter}"
    if not run.state.finished:
        what = f"saved after step {run.state.step}, and {option('resume')} goes on"
    raise CallbackError(f"{failure}; the run is {what}") from failure.__cause__


def _adopt_best(run: Run) -> None:
    """The best adapter that is kept is the one that the result names."""
    if not run.config.eval.load_best_model_at_end:
        return
    if run.best is None:
        if run.state.best_loss is not None and run.state.best_step != run.state.step:
            run.events.warning("the best adapter was not kept: the last one is the final one")
        return
    state, best = run.state, run.best
    state.best_loss, state.best_figure, state.best_step = best.loss, best.figure, best.step
    if run.best.step == 0:
        run.events.warning(
            "no evaluation was better than the one before training: the final adapter is the one "
            "that the run began with"
        )


@contextmanager
def _final_parameters(run: Run) -> Iterator[None]:
    """While it is entered, the model has the final adapter; checkpoints keep the last one."""
    last = run.model.read_flat(run.model.adapter.parameters).copy()
    _put_best(run)
    try:
        yield
    finally:
        run.model.write_parameters(last)


def _put_best(run: Run) -> None:
    if run.config.eval.load_best_model_at_end and run.best is not None:
        run.model.write_parameters(run.best.parameters)


def _is_whole(run: Run) -> bool:
    try:
        load_adapter(run.folder.adapter)
    except CheckpointError:
        return False
    return True


def _save_adapter(run: Run) -> None:
    try:
        run.folder.require_own()
        recover(run.folder.adapter)
        run.model.save_adapter(run.folder.adapter)
    except CheckpointError as err:
        elsewhere = save_elsewhere(run.folder.path, run.model.save_adapter)
        where = f"is in {elsewhere}" if elsewhere else "could not be saved anywhere else, either"
        raise CheckpointError(f"{err}; the adapter after step {run.state.step} {where}") from err
    run.tidy()
    run.wrote(run.folder.adapter)


def result_of(run: Run, *, was_finished: bool) -> TrainResult:
    """The figures of a run that has ended."""
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


# ---- an adapter that its run's folder does not take ----------------------------------------------

_RUN = "run.txt"  # in a rescued adapter's folder: the path of its run


def save_elsewhere(run: Path, save: Callable[[Path], None]) -> Path | None:
    """Saves something in the first place that takes it; its folder, or None without one."""
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
    """Removes what was rescued of a run that has ended well since; the folders."""
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
"""The user's cache, the system's temporary folder, the present one."""
