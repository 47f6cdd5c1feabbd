"""Memory and kernels of a run, settled before a weight is read."""

from __future__ import annotations

from functools import lru_cache

from qlora_wgpu.config import Config, DeviceConfig
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import room
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.budget import Fit, fit_to_budget
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs.data import RunData
from qlora_wgpu.runs.inference_memory import settled, with_dequantized
from qlora_wgpu.runs.memory import require_bindings, require_host_room
from qlora_wgpu.runs.opening import checking_device
from qlora_wgpu.runs.run_memory import RunShapes
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.tuning.cache import key_of, known_keys, tuned
from qlora_wgpu.tuning.tuner import Task

# Multiply-adds' worth of a few minutes: what tuning may gain in less does not pay for it.
_WORTH = {True: 2e13, False: 2e15}  # by Device.is_cpu


def plan_layout(
    settings: Config, pretrained: Pretrained, data: RunData, device: Device, observer: Observer
) -> Fit:
    """Plans the longest step, and cuts kernels for it as the tuner finds best.

    Where it takes more than ``device.memory``, some of it waits in host memory.

    Returns:
        The layout, to be loaded; its longest step is traced.
    """
    train, quant = settings.train, settings.quant
    weighted = training_options(train, weighted=settings.data.has_weights)
    options = weighted.step("train", settings.rows_at_once, data.length)

    def laid_out() -> ModelPlan:
        forms = AdapterDtypes.of(settings)
        plain = device_layout(
            pretrained, settings.lora, quant, train.compute_dtype, device, forms=forms,
            keep=settings.model.cache,
        )  # fmt: skip
        return with_dequantized(plain, settings, device)

    layout = laid_out()
    layout.memory(options)  # what is too large is said before kernels are timed
    task = Task(
        pretrained.config, settings.lora, quant, train.compute_dtype, options.batch, options.seq
    )
    tokens = data.computed_tokens
    tune_device(settings.device, device, task, pretrained.architecture, tokens, observer)
    if device.profile != layout.profile:
        layout = laid_out()
    layout.step(options)  # which runs, where all of it fits
    shapes = RunShapes.of(settings, data)
    return within_room(settings, layout, options, device, observer, shapes)


def within_room(
    settings: Config,
    layout: ModelPlan,
    options: StepOptions,
    device: Device,
    observer: Observer,
    shapes: RunShapes,
) -> Fit:
    """A layout that keeps within ``device.memory``: what has no room waits in host memory.

    Args:
        settings: The run's.
        layout: The model, cut for the device.
        options: Of the longest step.
        device: The device.
        observer: Told what is planned, and what waits.
        shapes: All that the run computes.
    """
    budget = device.budget if device.budget is not None else room(device)

    @lru_cache(maxsize=1)
    def plans_of(layout: ModelPlan, options: StepOptions) -> list[Plan]:
        """Those that were asked about last are mostly those that run: texts are traced anew."""
        return shapes.plans(layout, options, settings)

    def beside(layout: ModelPlan, options: StepOptions) -> int:
        plans = plans_of(layout, options)
        step, run = layout.memory(options), shapes.memory(layout, options, settings, plans)
        return sum(run.values()) - sum(step.values())

    accumulation = settings.train.gradient_accumulation_steps
    fitted = fit_to_budget(
        layout,
        options,
        budget,
        accumulation=accumulation,
        flops_per_second=device.pace.flops_per_second,
        bytes_per_second=device.pace.bytes_per_second,
        beside=beside,
    )
    fitted = settled(fitted, settings.device, device, budget, accumulation, beside)
    plans = plans_of(fitted.layout, fitted.options)
    require_bindings(fitted.layout, plans, device)
    memory = shapes.memory(fitted.layout, fitted.options, settings, plans)
    observer.planned(memory)
    changed = fitted.options != options or fitted.offload.saves_memory
    if changed and budget is not None:
        size = f"{budget / MIB:,.0f} MiB"
        observer.note(f"to keep within {size} of device memory, {fitted.in_words()}")
    require_host_room(
        fitted.layout, fitted.host_memory, device, sum(memory.values()), observer, plans,
        trains=True,
    )  # fmt: skip
    return fitted


def use_known_kernels(
    settings: Config, pretrained: Pretrained, length: int, device: Device
) -> None:
    """Gives the device the fastest profile, if kernels were timed here before.

    Args:
        settings: The run's.
        pretrained: The base.
        length: Tokens of the longest row.
        device: The device, whose profile is set.
    """
    train = settings.train
    rows = settings.rows_at_once
    task = Task(pretrained.config, settings.lora, settings.quant, train.compute_dtype, rows, length)
    if settings.device.tune != "never" and key_of(device, task) in known_keys():
        tuned(device, task, lambda: checking_device(settings.device))


def tune_device(
    settings: DeviceConfig,
    device: Device,
    task: Task,
    architecture: Architecture,
    tokens: int,
    observer: Observer,
) -> None:
    """Gives the device the fastest known profile, timing kernels first if the run is long.

    Args:
        settings: Whether, and on which GPU.
        device: The device, whose profile is set.
        task: The training to time kernels for.
        architecture: The model's.
        tokens: About how many will be computed.
        observer: Who is told.
    """
    if settings.tune == "never":
        return
    is_known = key_of(device, task) in known_keys()
    worth = _work(architecture, tokens) >= _WORTH[device.is_cpu]
    if settings.tune == "auto" and not is_known and not worth:
        return
    observer.activity("timing kernels")
    choice = tuned(device, task, lambda: checking_device(settings), observer.activity)
    observer.activity("")
    observer.tuned(choice.notes)


def _work(architecture: Architecture, tokens: int) -> float:
    """Operations of the products: two each for the forward and the gradient of their inputs."""
    weights = sum(spec.out_features * spec.in_features for spec in architecture.every_linear)
    return 4.0 * tokens * (weights + architecture.vocab_size * architecture.hidden_size)
