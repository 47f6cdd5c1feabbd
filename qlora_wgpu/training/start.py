"""A run's start: a new folder, or the newest checkpoint in an existing one."""

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
from qlora_wgpu.training.checkpoints import load_best, load_newest, load_rollout
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
    """Refuses both options together."""
    if overwrite and resume:
        mark = "--" if command() else ""
        raise ConfigError(f"{mark}overwrite and {mark}resume are mutually exclusive: choose one")


def check_output(config: Config, *, overwrite: bool, resume: bool) -> None:
    """Checks that the run may be written or resumed, before anything takes time."""
    path = Path(config.output.dir)
    require_writable(path)
    if not (overwrite or resume):
        refuse_existing_run(path)
    settle_run(path)
    if resume:
        check_resumable(path, config)


def check_resumable(path: Path, config: Config) -> bool:
    """Whether a folder contains a run to resume; False if a new one may start there."""
    has_checkpoint, has_adapter = bool(checkpoint_folders(path)), exists(RunPaths(path).adapter)
    if exists(RunPaths(path).config):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RenamedKeyWarning)  # we wrote the file, not the user
            before = config_of_run(path)
        refuse_other_settings(before.fixed_settings(), config.fixed_settings(), str(path))
    elif has_checkpoint or has_adapter:
        raise ConfigError(
            f"{path} contains a run without its config.yaml, so it cannot be checked: restore the "
            f"file, or train with {option('overwrite')} to start again"
        )
    if has_adapter and not has_checkpoint:
        raise ConfigError(
            f"the run in {path} has an adapter, but no checkpoint to resume from: use it as it is, "
            f"or train with {option('overwrite')} to start again"
        )
    return has_checkpoint


def load_run(run: Run) -> None:
    """Loads the newest checkpoint of the run in the folder, and removes what comes after it."""
    folder, path = run.folder, str(run.folder.path)

    def refuse_other(manifest: Mapping[str, Any]) -> None:
        run.identity.refuse_other(manifest, path)

    checkpoint, state, skipped = load_newest(
        checkpoint_folders(folder.path), run.model, refuse_other
    )
    for reason in skipped:
        run.events.warning(reason)
    run.state, run.saved_at = state, state.step
    if run.rollouts is not None:
        run.rollouts.restore(state.step, load_rollout(checkpoint))
    _load_best(run)
    folder.forget_after(state.step, state.logged_step, state.eval_step)
    if state.log_digest not in (None, folder.log.digest):
        run.events.warning(
            f"the rows of metrics.jsonl up to step {state.step} were changed since the run wrote "
            "them, or some are missing; the report shows them as they are"
        )
    try:
        folder.write_config(run.config.to_yaml())
    except CheckpointError as err:
        run.events.warning(f"{err}; it is unchanged")
    run.events.resumed(checkpoint, state.step)


def _load_best(run: Run) -> None:
    """Loads the best adapter from its folder.

    It may be of a later step than the checkpoint, if the run was killed after that evaluation,
    which will be repeated.
    """
    state, folder = run.state, run.folder.best
    if not run.keeps_best or state.best_loss is None:
        return
    try:
        best = load_best(folder, run.model, state.aim)
        if best is not None and best.step <= state.step and best.step != state.best_step:
            raise CheckpointError(f"{folder} contains the adapter of step {best.step}")
    except CheckpointError as err:
        lost = f"{err}; it should contain the best adapter so far, of step {state.best_step}"
        if state.finished:
            run.events.warning(lost)
            return
        raise CheckpointError(
            f"{lost}: restore it from a copy, or remove {folder} to select the best from here on"
        ) from err
    if best is not None:
        run.best = best
    elif not state.finished:
        run.events.warning(
            f"the adapter with the best evaluation so far, of step {state.best_step}, was not "
            "kept: the best one is selected from here on"
        )
        state.forget_best()


def reset_best_metric(run: Run) -> None:
    """Forgets the best evaluation if metric_for_best_model has changed."""
    state, aim = run.state, run.config.eval.aim
    if state.aim == aim:
        return
    if run.keeps_best or state.plateau is not None:
        run.events.note(
            f"the best evaluation is now the one with the {aim}, not the {state.aim}: it is "
            "selected from here on"
        )
    state.aim, run.best = aim, None
    state.forget_best()
    if state.plateau is not None:
        state.plateau.best, state.plateau.bad = None, 0


def refuse_fewer_steps(run: Run) -> None:
    """Refuses to resume a run that has done more steps than are now configured."""
    total = run.total_steps
    if run.state.step > total:
        raise ConfigError(
            f"the run in {run.folder.path} has done {run.state.step:,} steps, more than the "
            f"{total:,} of train.num_train_epochs or train.max_steps: raise these to continue, or "
            "start a new run in another output.dir"
        )


def note_total_steps(run: Run) -> None:
    """Records the number of steps; a note if it has changed, a warning if warm-up never ends.

    As with Hugging Face's Trainer, the schedule is that of the new length from here on. A run of a
    single step has a learning rate of 0 and changes nothing.
    """
    total = run.total_steps
    before, run.state.total_steps = run.state.total_steps, total
    warmup = warmup_steps(run.config.optim, total)
    if total <= warmup:
        last = learning_rates(run.config.optim, total, range(total - 1, total))[0]
        run.events.warning(
            f"optim.learning_rate is not reached: warm-up takes {warmup:,} of the run's {total:,} "
            f"steps, and the last has {last:.2g}; lower train.gradient_accumulation_steps to get "
            "more steps, or lower optim.warmup_ratio or warmup_steps"
        )
    if run.saved_at < 0 or before in (0, total):
        return
    kind = run.config.optim.lr_scheduler_type
    rates = learning_rates(run.config.optim, total, range(run.state.step, run.state.step + 1))
    changed = f" ({kind} over {total:,} steps)"
    if kind.startswith("constant") or run.state.plateau is not None:
        changed = ""
    rate = rates[0] if run.state.plateau is None else run.state.plateau.rate
    rate *= run.state.rate_factor
    run.events.note(
        f"the run now has {total:,} steps instead of {before:,}: after step {run.state.step:,} "
        f"the learning rate continues at {rate:.2g}{changed}"
    )
