"""Commands as functions of the package: init, train, merge, export, quantize and push."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu import runs
from qlora_wgpu.cli._display import NotebookCurves
from qlora_wgpu.cli._opening import ModelOptions, located
from qlora_wgpu.cli._terminal import Terminal, in_notebook
from qlora_wgpu.cli.exporting import path_in_run
from qlora_wgpu.cli.init import InitResult, write_run_file
from qlora_wgpu.cli.train import show_result, shown_run
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.config.loading import located as located_settings
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.exporting import merge as merge_adapter
from qlora_wgpu.exporting import quantize_folder
from qlora_wgpu.exporting.merge import Base
from qlora_wgpu.model.qlora_model import ComputeDtype
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.exporting import (
    ExportResult,
    MergeResult,
    export_adapter,
    export_model,
    merge_drift,
)
from qlora_wgpu.runs.hub_upload import push as push_to_hub
from qlora_wgpu.runs.settings import AnyConfig, as_config, require_own_peers
from qlora_wgpu.training import Observer, TrainerCallback, TrainResult
from qlora_wgpu.training.callbacks import check_callbacks
from qlora_wgpu.training.observers import Unwatched

_ARGUMENTS = ("callbacks", "overwrite", "resume", "overrides", "quiet", "allow_code")
_OTHER_ARGUMENTS = {
    "observer": "callbacks", "observers": "callbacks", "peft_config": "lora",
    "resume_from_checkpoint": "resume", "overwrite_output_dir": "overwrite", "verbose": "quiet",
}  # fmt: skip

FilePath = str | PathLike[str]
Scheme = Literal["nf4", "none"]
Backend = Literal["auto", "wgpu", "dawn"]


def init(
    model: FilePath | None = None,
    data: FilePath | Sequence[FilePath] = (),
    *,
    eval: FilePath | None = None,
    columns: Mapping[str, str] | None = None,
    from_: FilePath | None = None,
    out: FilePath = "run.yaml",
    overwrite: bool = False,
) -> InitResult:
    """Writes a commented YAML for a model and its data, like ``qlora-wgpu init``.

    Args:
        model: Folder or hub name of the base model.
        data: File, folder or hub name of the training data; several are mixed.
        eval: Held-out data in the same format.
        columns: Columns of the data by the names that the format expects, such as
            ``{"prompt": "question"}``.
        from_: A configuration file of another trainer to convert; ``model``, ``data`` and ``eval``
            override its values.
        out: The file to write.
        overwrite: Whether to replace an existing file.

    Raises:
        ConfigError: If an argument is missing or invalid, or the file exists.
        DataError: If the data cannot be read.
    """
    paths = [data] if isinstance(data, str | PathLike) else data or ()
    if not isinstance(columns, Mapping | None):
        raise ConfigError(
            f"columns must be a mapping such as {{'prompt': 'question'}}, got {columns!r}"
        )
    return write_run_file(
        str(out),
        model=None if model is None else str(model),
        data=[str(path) for path in paths],
        held_out=None if eval is None else str(eval),
        columns=dict(columns or {}),
        other=None if from_ is None else str(from_),
        overwrite=overwrite,
    )


def train(
    config: AnyConfig,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    overwrite: bool = False,
    resume: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    reward_funcs: Sequence[Callable[..., Any]] = (),
    allow_code: bool = False,
    **settings: Any,
) -> TrainResult:
    """Fine-tunes a model and prints the progress, like ``qlora-wgpu train``.

    ``output.dir`` gets the adapter, checkpoints, metrics.jsonl, config.yaml and report.html.
    Ctrl-C (in a notebook, interrupting the kernel) and SIGTERM stop the run after the current
    micro-batch and save a checkpoint; so does a callback's ``step.stop()``.

    Runs from Python are not supervised: a driver that crashes ends this process, and one that
    hangs blocks it. A lost device raises ``DeviceLostError``. The latest checkpoint is complete in
    each case, and ``resume=True`` resumes from it.

    Args:
        config: A ``Config``, the path of a YAML file or of a run's folder, or a mapping with the
            sections of a configuration.
        callbacks: ``TrainerCallback`` objects that watch and steer the run.
        overwrite: Whether a run in ``output.dir`` may be replaced.
        resume: Whether to resume the run in ``output.dir`` from its latest complete checkpoint,
            bit-exactly, or to start it if there is none. A finished run is not trained again.
        overrides: Strings such as ``"optim.learning_rate=1e-4"``, for a YAML file.
        quiet: Whether to print nothing.
        reward_funcs: Reward functions of GRPO and RLOO with TRL's signature, in addition to those
            of ``grpo.reward_funcs``.
        allow_code: Whether ``grpo.reward_funcs`` may name functions in files, which run with your
            rights.
        **settings: Settings that override the configuration's: by key (``learning_rate=1e-4``), by
            section (``optim={"learning_rate": 1e-4}``), or by both
            (``**{"optim.learning_rate": 1e-4}``).

    Returns:
        The run's metrics, a sample before and after training, and the files written.

    Raises:
        ConfigError: If the configuration is invalid, or ``output.dir`` has another run.
        CheckpointError: If the model or a checkpoint is missing or damaged, or the final adapter
            cannot be written to ``output.dir``; the message says where it is instead.
        UnsupportedModelError: If the model uses something that is not supported.
        DataError: If the data cannot be read, or has no tokens to train on.
        DeviceError: If there is no usable GPU, the driver miscomputes, or the GPU was lost.
        OutOfMemoryError: If the model does not fit into the device's memory.
        TrainingError: If the loss is not finite or diverges.
        CallbackError: If a callback failed; the run is saved.
        RewardError: If a reward function failed; the run is saved.
    """
    check_callbacks(callbacks)
    _refuse_other_arguments(settings)
    values = as_config(as_config(config, overrides) if overrides else config, settings)
    named = (*overrides, *(f"{section}.{key}=" for section, key in located_settings(settings)))
    require_own_peers(config, values, named)
    options: dict[str, Any] = {
        "overwrite": overwrite, "resume": resume, "callbacks": callbacks,
        "reward_funcs": reward_funcs, "allow_code": allow_code,
    }  # fmt: skip
    if quiet:
        return runs.train(values, **options)
    console = Terminal(ignore_errors=True)
    observers: list[Observer] = [NotebookCurves()] if in_notebook() else []
    result = shown_run(console, values, *observers, **options)
    show_result(console, result, again="resume=True")
    return result


def _refuse_other_arguments(settings: Mapping[str, Any]) -> None:
    """Refuses misspelled arguments of ``train``, which would be taken for settings."""
    for name in settings:
        near = get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        for meant in filter(None, (_OTHER_ARGUMENTS.get(name), *near)):
            raise ConfigError(f"unknown argument '{name}': did you mean '{meant}'?")


def merge(
    run: FilePath | None = None,
    *,
    model: FilePath | None = None,
    adapter: FilePath | None = None,
    config: FilePath | None = None,
    out: FilePath | None = None,
    base: Base = "original",
    check: bool = True,
    scheme: Scheme | None = None,
    compute_dtype: ComputeDtype | None = None,
    backend: Backend | None = None,
    memory: int | str | None = None,
    gpu: str | None = None,
) -> MergeResult:
    """Merges an adapter into its base model, like ``qlora-wgpu merge``.

    The result is a model folder in the base's 16-bit floats, which transformers and vLLM load.

    Args:
        run: Folder of a run, such as ``runs/first``, or of an adapter.
        model: Folder or hub name of the base model, instead of the run's.
        adapter: Folder of a PEFT adapter, instead of ``run``.
        config: YAML of the run that trained the adapter; by default that of the run that the
            adapter is in.
        out: The new folder; by default ``merged`` in the run's folder.
        base: Whether to add the adapter to the original weights, or to the dequantized ones that
            it was trained with.
        check: Whether to measure on a GPU how far the logits of the merged model drift.
        scheme: Storage of linear weights for the check; by default as trained.
        compute_dtype: Type of matmul operands for the check; by default as trained.
        backend: WebGPU implementation for the check.
        memory: Device memory that the check may use, such as ``"8GiB"``.
        gpu: The GPU of the check: its index or a part of its name.

    Raises:
        ConfigError: If no adapter is named, or ``out`` is missing or invalid.
        CheckpointError: If the model or the adapter is missing or damaged, or they do not match.
        UnsupportedModelError: If the model is not supported.
        DeviceError: If the check finds no usable GPU; the merged model is complete.
    """
    opening, folder = _adapter(
        run, model, adapter, config, scheme=scheme, compute_dtype=compute_dtype, backend=backend,
        memory=memory, gpu=gpu,
    )  # fmt: skip
    observer = Unwatched()
    settings = opening.settings(observer)
    target = Path(path_in_run(folder, "merged", "out") if out is None else out)
    merge_adapter(opening.model, folder, target, base=base, quant=settings.quant)
    if not check:
        return MergeResult(target, None)
    source = OpenedModel.open(opening.model)
    return MergeResult(target, merge_drift(source, folder, target, settings, observer))


def export(
    run: FilePath | None = None,
    *,
    model: FilePath | None = None,
    adapter: FilePath | None = None,
    config: FilePath | None = None,
    gguf: FilePath | None = None,
    type: str | None = None,
    adapter_only: bool = False,
    base: Base = "original",
    check: bool = True,
    scheme: Scheme | None = None,
    compute_dtype: ComputeDtype | None = None,
    backend: Backend | None = None,
    memory: int | str | None = None,
    gpu: str | None = None,
) -> ExportResult:
    """Writes a GGUF file for llama.cpp, Ollama and LM Studio, like ``qlora-wgpu export``.

    Args:
        run: Folder of a run, such as ``runs/first``, or of an adapter.
        model: Folder or hub name of the base model, instead of the run's.
        adapter: Folder of a PEFT adapter, instead of ``run``.
        config: YAML of the run that trained the adapter; by default that of the run that the
            adapter is in.
        gguf: The file to write; by default ``model.gguf``, or ``adapter.gguf``, in the run's
            folder.
        type: Storage type of matrices, such as ``"q8_0"``; by default the base's floats.
        adapter_only: Whether to write the adapter alone, for llama.cpp's ``--lora``.
        base: Whether to add the adapter to the original weights, or to the dequantized ones that
            it was trained with.
        check: Whether to measure on a GPU how far the logits of the file drift, and to delete a
            file that is wrong.
        scheme: Storage of linear weights for the check; by default as trained.
        compute_dtype: Type of matmul operands for the check; by default as trained.
        backend: WebGPU implementation for the check.
        memory: Device memory that the check may use, such as ``"8GiB"``.
        gpu: The GPU of the check: its index or a part of its name.

    Raises:
        ConfigError: If no adapter is named, or the file exists or has an invalid name or type.
        CheckpointError: If the model or the adapter is missing or damaged, or the file is wrong.
        UnsupportedModelError: If the model is not supported.
        DeviceError: If the check finds no usable GPU.
    """
    opening, folder = _adapter(
        run, model, adapter, config, scheme=scheme, compute_dtype=compute_dtype, backend=backend,
        memory=memory, gpu=gpu,
    )  # fmt: skip
    name = "adapter.gguf" if adapter_only else "model.gguf"
    file = Path(path_in_run(folder, name, "gguf") if gguf is None else gguf)
    if adapter_only:
        if type is not None:
            raise ConfigError("type and adapter_only are mutually exclusive: an adapter is float32")
        export_adapter(opening.model, folder, file)
        return ExportResult(file, file.stat().st_size, "f32", None, ())
    observer = Unwatched()
    settings = opening.settings(observer)
    return export_model(
        opening.model, folder, file, type_name=type, base=base, quant=settings.quant,
        settings=settings if check else None, observer=observer,
    )  # fmt: skip


def quantize(
    model: FilePath,
    out: FilePath,
    *,
    blocksize: int = 64,
    double_quant: bool = True,
    experts: bool = False,
) -> Path:
    """Writes a model with 4-bit linear layers (NF4), like ``qlora-wgpu quantize``.

    Training on the new folder gives the same result and starts sooner. transformers with
    bitsandbytes loads it, too, unless experts are quantized.

    Args:
        model: Folder or hub name of the model.
        out: The new folder.
        blocksize: Number of weights that share a scale.
        double_quant: Whether to quantize the scales to 8 bits.
        experts: Whether to quantize experts, too.

    Returns:
        The new folder.

    Raises:
        ConfigError: If an argument is invalid.
        CheckpointError: If the model is missing or damaged, or the folder exists.
        UnsupportedModelError: If the model is not supported or already quantized.
    """
    values = {"blocksize": blocksize, "double_quant": double_quant}
    quantize_folder(model, out, QuantConfig.model_validate(values), experts=experts)
    return Path(out)


def push(
    run: FilePath,
    name: str,
    *,
    base: str | None = None,
    merged: FilePath | None = None,
    gguf: FilePath | None = None,
    private: bool = True,
) -> str:
    """Uploads a trained adapter to the Hugging Face Hub, like ``qlora-wgpu push --yes``.

    A model card is made from the run unless there is one. The token is Hugging Face's own
    (``hf auth login``, or ``HF_TOKEN``).

    Args:
        run: Folder of a run, such as ``runs/first``, or of an adapter.
        name: Name on the Hub, ``owner/name``.
        base: The base model's name on the Hub, if the adapter was trained on a local folder.
        merged: Folder of a merged model to upload instead of the adapter.
        gguf: GGUF file to upload instead of the adapter.
        private: Whether a new repository is private.

    Returns:
        The address of its page.

    Raises:
        ConfigError: If a name is invalid, or both ``merged`` and ``gguf`` are given.
        CheckpointError: If there is nothing to upload, or the upload failed.
    """
    adapter = located(str(run), None, None, needs_adapter=True).adapter
    assert adapter is not None
    page = push_to_hub(
        adapter, name, base=base, private=private,
        merged=None if merged is None else str(merged), gguf=None if gguf is None else str(gguf),
    )  # fmt: skip
    assert page is not None  # without a confirmation it is always uploaded
    return page


def _adapter(
    run: FilePath | None,
    model: FilePath | None,
    adapter: FilePath | None,
    config: FilePath | None,
    **device: Any,
) -> tuple[ModelOptions, str]:
    """How an adapter is opened, and its folder."""
    run, model, adapter, config = (
        None if path is None else str(path) for path in (run, model, adapter, config)
    )
    opening = ModelOptions.of(run, model, adapter, config, needs_adapter=True, **device)
    assert opening.adapter is not None
    return opening, opening.adapter
