"""A run from Python that shows what the command line shows, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlora_wgpu import runs
from qlora_wgpu.cli._display import NotebookCurves
from qlora_wgpu.cli._terminal import Terminal, in_notebook
from qlora_wgpu.cli.train import show_result, shown_run
from qlora_wgpu.config.loading import located
from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.runs.settings import AnyConfig, as_config, require_own_peers
from qlora_wgpu.training import Observer, TrainResult
from qlora_wgpu.training.callbacks import Callback, Callbacks


def train(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    on_step: Callback | None = None,
    on_evaluate: Callback | None = None,
    on_save: Callback | None = None,
    **settings: Any,
) -> TrainResult:
    """Fine-tunes a model: all that ``qlora-wgpu train`` does, and shows what it shows.

    The driver is checked the first time, memory is planned before weights are read, kernels are
    timed if the run is long, and ``output.dir`` gets the adapter, checkpoints, metrics.jsonl,
    config.yaml and report.html. Ctrl-C (in a notebook, interrupting the kernel) and SIGTERM end it
    early with its state saved, and so does an observer's ``stop_run``.

    No other process watches over a run from Python: a driver that crashes takes this process with
    it, and one that hangs blocks it. A device that is lost raises ``DeviceLostError``. The last
    checkpoint is complete in each case, and ``resume=True`` continues from it.

    Args:
        config: A ``Config``, the path of a YAML file, or a mapping with its sections.
        observer: Is told what goes on, beside what is shown.
        overwrite: Whether a run in ``output.dir`` may be replaced.
        resume: Whether to continue the run in ``output.dir`` from its newest complete checkpoint,
            with the same bits; begins a run if there is none. A finished one is left as it is.
        overrides: Texts such as ``"optim.learning_rate=1e-4"``, for a YAML file.
        quiet: Whether nothing is shown.
        on_step: Called with a ``Step`` after each step; it may stop, save and evaluate the run, and
            change its learning rate.
        on_evaluate: Called likewise after each evaluation, the one before training included.
        on_save: Called likewise after a checkpoint or the adapter was written.
        **settings: Values that replace the configuration's, by key (``learning_rate=1e-4``), by
            section (``optim={"learning_rate": 1e-4}``), or by both
            (``**{"optim.learning_rate": 1e-4}``).

    Returns:
        The run's figures, a text before and after, and what was written.

    Raises:
        ConfigError: If the configuration is wrong, or ``output.dir`` holds another run.
        CheckpointError: If the model or a checkpoint is missing or damaged, or the final adapter
            could not be written into ``output.dir``; says where it is.
        UnsupportedModelError: If the model asks for something that is not computed here.
        DataError: If the data cannot be read or has nothing to learn.
        DeviceError: If there is no usable GPU, its driver computes wrongly, or it was lost.
        OutOfMemoryError: If the device has no room.
        TrainingError: If the loss is not finite or diverges.
        CallbackError: If a callback or an observer has failed; the run is saved.
    """
    if observer is not None and not isinstance(observer, Observer):
        raise ConfigError(f"observer must be an instance of Observer, got {brief(observer)}")
    callbacks = Callbacks(on_step, on_evaluate, on_save)
    callbacks.check()
    values = as_config(as_config(config, overrides) if overrides else config, settings)
    named = (*overrides, *(f"{section}.{key}=" for section, key in located(settings)))
    require_own_peers(config, values, named)
    options: dict[str, Any] = {
        "overwrite": overwrite, "resume": resume, "callbacks": callbacks,
    }  # fmt: skip
    if quiet:
        return runs.train(values, observer, **options)
    console = Terminal(ignore_errors=True)
    observers: list[Observer] = [NotebookCurves()] if in_notebook() else []
    observers += [] if observer is None else [observer]
    result = shown_run(console, values, *observers, **options)
    show_result(console, result, again="resume=True")
    return result
