"""A model with an adapter, as it was trained."""

from __future__ import annotations

from functools import partial
from os import PathLike

from qlora_wgpu.config import Config, ModelConfig, QuantConfig
from qlora_wgpu.config.as_trained import without_none
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.model.qlora_model import ComputeDtype
from qlora_wgpu.runs.locating import adapter_in, existing_base
from qlora_wgpu.runs.opening import OpenedModel, load_adapted, opened_as_trained
from qlora_wgpu.runs.prompts import prompt_for
from qlora_wgpu.training import Observer
from qlora_wgpu.training.observer import Unwatched


def _checked(memory: str | int | None) -> str | int | None:
    """A size as the configuration takes it.

    Raises:
        ConfigError: If it is none.
    """
    if memory is None:
        return None
    settings = {"model": {"path": "."}, "device": {"memory": memory}}
    return Config.model_validate(settings).device.memory


def open_adapter(
    adapter: str | PathLike[str],
    model: str | PathLike[str] | None = None,
    observer: Observer | None = None,
    *,
    quant: QuantConfig | None = None,
    compute_dtype: ComputeDtype | None = None,
    gpu: str | None = None,
    backend: str | None = None,
    memory: str | int | None = None,
) -> QLoRAModel:
    """Opens an adapter on its base as it was trained: by its run's config.yaml, where it has one.

    Args:
        adapter: Folder of a run, or of a PEFT adapter such as one of a run's checkpoints.
        model: Folder or hub name of the base; by default what the run or the adapter names.
        observer: Is told what goes on, and if it is not known how the adapter was trained.
        quant: How the base's linear layers are stored, whatever the run says.
        compute_dtype: Element type of matmul operands, likewise.
        gpu: The GPU, likewise.
        backend: The WebGPU implementation, likewise.
        memory: Memory of the device that may be taken, such as ``"8GiB"``, likewise; what has no
            room waits in host memory.

    Raises:
        ConfigError: If there is no adapter, nothing names a base, or the run's config.yaml is
            damaged.
        CheckpointError: If the adapter or the base is missing or damaged, or they do not fit.
        UnsupportedModelError: If one of them asks for something that is not computed here.
        DeviceError: If there is no usable GPU.
    """
    observer = observer or Unwatched()
    adapter = adapter_in(str(adapter)) or str(adapter)
    settings = Config(model=ModelConfig(path=str(model or existing_base(adapter))))
    given = {
        "quant": {} if quant is None else quant.model_dump(),
        "train": {"compute_dtype": compute_dtype},
        "device": {"gpu": gpu, "backend": backend, "memory": _checked(memory)},
    }
    settings = opened_as_trained(settings, adapter, observer, without_none(given))
    source = OpenedModel.open(settings.model.path)
    opened = load_adapted(source, adapter, settings, observer)
    opened.read_prompts = partial(prompt_for, source)
    return opened
