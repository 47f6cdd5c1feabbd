"""``qlora_wgpu.train``: a run with the display of the command line, or of a notebook."""

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
    """Fine-tunes a model, with the same steps and display as ``qlora-wgpu train``.

    The driver is verified the first time, memory is planned before weights are read, kernels are
    autotuned if the run is long, and ``output.dir`` gets the adapter, checkpoints, metrics.jsonl,
    config.yaml and report.html. Ctrl-C (in a notebook, interrupting the kernel), SIGTERM and an
    observer's ``stop_run`` stop the run early, with a checkpoint.

    A run from Python has no supervising process: a driver that crashes ends this process, and one
    that hangs blocks it. A lost device raises ``DeviceLostError``. In each case the last checkpoint
    is complete, and ``resume=True`` continues from it.

    Args:
        config: A ``Config``, the path of a YAML file, or a mapping with its sections.
        observer: Receives the run's events, in addition to the display.
        overwrite: Whether a run in ``output.dir`` may be replaced.
        resume: Whether to continue the run in ``output.dir``, bit-exactly, from its latest complete
            checkpoint; starts a run if there is none. A finished run is unchanged.
        overrides: Strings such as ``"optim.learning_rate=1e-4"``, for a YAML file.
        quiet: Whether to show nothing.
        on_step: Called with a ``Step`` after each step; it may stop, save and evaluate the run, and
            change its learning rate.
        on_evaluate: Called in the same way after each evaluation, also the one before training.
        on_save: Called in the same way after a checkpoint or the adapter was written.
        **settings: Values that replace the configuration's, by key (``learning_rate=1e-4``), by
            section (``optim={"learning_rate": 1e-4}``), or by both
            (``**{"optim.learning_rate": 1e-4}``).

    Returns:
        The run's metrics, a sample before and after training, and the files written.

    Raises:
        ConfigError: If the configuration is invalid, or ``output.dir`` has another run.
        CheckpointError: If the model or a checkpoint is missing or damaged, or the final adapter
            could not be written into ``output.dir``; the message says where it is.
        UnsupportedModelError: If the model uses something that is not supported.
        DataError: If the data cannot be read, or has no tokens to train on.
        DeviceError: If there is no usable GPU, the driver miscomputes, or the GPU was lost.
        OutOfMemoryError: If the model does not fit into the device's memory.
        TrainingError: If the loss is not finite or diverges.
        CallbackError: If a callback or an observer failed; the run is saved.
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
