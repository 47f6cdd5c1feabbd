"""A run's start: a new folder, or an old one that belongs to it, with its newest checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import config_of_run
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.section import RenamedKeyWarning
from qlora_wgpu.errors import CheckpointError, ConfigError, command, option
from qlora_wgpu.files import exists
from qlora_wgpu.training.checkpoints import load_best, load_newest
from qlora_wgpu.training.optimizer import learning_rates, warmup_steps
from qlora_wgpu.training.run_folder import (
    checkpoint_folders,
    refuse_existing_run,
    refuse_other_settings,
    require_writable,
    settle_run,
)

if TYPE_CHECKING:
    from qlora_wgpu.training.run import Run


def refuse_both(*, overwrite: bool, resume: bool) -> None:
    """Refuses to replace a run and to go on with it at once."""
    if overwrite and resume:
        mark = "--" if command() else ""
        raise ConfigError(f"{mark}overwrite and {mark}resume exclude each other: choose one")


def check_output(config: Config, *, overwrite: bool, resume: bool) -> None:
    """Makes sure that nothing is lost or mixed up, before anything takes time."""
    path = Path(config.output.dir)
    require_writable(path)
    if not (overwrite or resume):
        refuse_existing_run(path)
    settle_run(path)
    if resume:
        check_resumable(path, config)


def check_resumable(path: Path, config: Config) -> bool:
    """Whether a folder holds a run to go on with; False if one may begin there."""
    has_checkpoint, has_adapter = bool(checkpoint_folders(path)), exists(RunPaths(path).adapter)
    if exists(RunPaths(path).config):
        check_same_run(path, config)
    elif has_checkpoint or has_adapter:
        raise ConfigError(
            f"{path} holds a run without its config.yaml, so nothing says whether it is the same "
            f"run: put the file back, or train with {option('overwrite')} to begin anew"
        )
    if has_adapter and not has_checkpoint:
        raise ConfigError(
            f"the run in {path} has an adapter, but no checkpoint to go on from: use it as it is, "
            f"or train with {option('overwrite')} to begin anew"
        )
    return has_checkpoint


def check_same_run(path: Path, config: Config) -> None:
    """Makes sure that a run is not continued as another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)  # the file is ours, not the user's
        before = config_of_run(path)
    refuse_other_settings(before.fixed_settings(), config.fixed_settings(), str(path))


def start_or_resume(run: Run) -> None:
    """Goes on with the run in the folder, or begins one where there is none."""
    if check_resumable(run.folder.path, run.config):
        _resume(run)
    else:
        run.folder.begin(run.config.to_yaml())


def _resume(run: Run) -> None:
    folder, path = run.folder, str(run.folder.path)

    def refuse_other(manifest: Mapping[str, Any]) -> None:
        run.identity.refuse_other(manifest, path)

    checkpoint, state, passed = load_newest(
        checkpoint_folders(folder.path), run.model, refuse_other
    )
    for sentence in passed:
        run.events.warning(sentence)
    run.state, run.saved_at = state, state.step
    _load_best(run)
    folder.forget_after(state.step, state.logged_step, state.eval_step)
    if state.log_digest not in (None, folder.log.digest):
        run.events.warning(
            f"the rows of metrics.jsonl up to step {state.step} are not those that the run has "
            "written: they were changed, or some are missing; its report shows them as they are"
        )
    try:
        folder.write_config(run.config.to_yaml())
    except CheckpointError as err:
        run.events.warning(f"{err}; it stays as it was")
    run.events.resumed(checkpoint, state.step)


def _load_best(run: Run) -> None:
    """Takes the best adapter from its folder.

    One of a later step than the checkpoint's is of this run, too: it was killed after that
    evaluation, which will be made again.
    """
    state, folder = run.state, run.folder.best
    if not run.keeps_best or state.best_loss is None:
        return
    try:
        best = load_best(folder, run.model, state.aim)
        if best is not None and best.step <= state.step and best.step != state.best_step:
            raise CheckpointError(f"{folder} holds the adapter of step {best.step}")
    except CheckpointError as err:
        lost = f"{err}, where the best adapter so far was kept, of step {state.best_step}"
        if state.finished:
            run.events.warning(lost)
            return
        raise CheckpointError(
            f"{lost}: put it back from a copy, or remove {folder} to look for the best from here on"
        ) from err
    if best is not None:
        run.best = best
    elif not state.finished:
        run.events.warning(
            f"the adapter with the best evaluation so far, of step {state.best_step}, was not "
            "kept: the best one is looked for from here on"
        )
        state.forget_best()


def reset_best_metric(run: Run) -> None:
    """Begins to look for the best anew, where it is another figure that says what is best."""
    state, aim = run.state, run.config.eval.aim
    if state.aim == aim:
        return
    if run.keeps_best or state.plateau is not None:
        run.events.note(
            f"the best evaluation is the one with the {aim} now, not the {state.aim}: it is looked "
            "for from here on"
        )
    state.aim, run.best = aim, None
    state.forget_best()
    if state.plateau is not None:
        state.plateau.best, state.plateau.bad = None, 0


def refuse_fewer_steps(run: Run) -> None:
    """Refuses to go on with a run that has more steps behind it than it is to have."""
    total = run.total_steps
    if run.state.step > total:
        raise ConfigError(
            f"the run in {run.folder.path} has done {run.state.step:,} steps, more than the "
            f"{total:,} of train.num_train_epochs or train.max_steps: raise these to go on, or "
            "begin a new run in another output.dir"
        )


def tell_of_length(run: Run) -> None:
    """Notes how many steps a run is to have, and tells where that was another number.

    Its learning rate is that of the new length from here on, as with Hugging Face's Trainer: what
    is done has followed the old one. Also told of is a run too short for its warm-up: a single
    step has a learning rate of 0, and changes nothing.
    """
    total = run.total_steps
    before, run.state.total_steps = run.state.total_steps, total
    warmup = warmup_steps(run.config.optim, total)
    if total <= warmup:
        last = learning_rates(run.config.optim, total, range(total - 1, total))[0]
        run.events.warning(
            f"optim.learning_rate is not reached: warm-up takes {warmup:,} of the run's {total:,} "
            f"steps, and the last has {last:.2g}; lower train.gradient_accumulation_steps for more "
            "steps, or optim.warmup_ratio and warmup_steps"
        )
    if run.saved_at < 0 or before in (0, total):
        return
    kind = run.config.optim.lr_scheduler_type
    rates = learning_rates(run.config.optim, total, range(run.state.step, run.state.step + 1))
    changed = f" ({kind}, of {total:,} steps from the first)"
    if kind.startswith("constant") or run.state.plateau is not None:
        changed = ""
    rate = rates[0] if run.state.plateau is None else run.state.plateau.rate
    rate *= run.state.rate_factor
    run.events.note(
        f"the run has {total:,} steps now, where it had {before:,}: after step {run.state.step:,} "
        f"the learning rate goes on at {rate:.2g}{changed}"
    )
