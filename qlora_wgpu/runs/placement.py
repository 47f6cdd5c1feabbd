"""Fits a workload into device and host memory: keeps, recomputes and offloads, or refuses it.

The system reports the memory in use; the rest is planned. Three constants were measured with Mesa's
lavapipe, which compiles for the processor and needs more than the driver of a card.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import UPLOAD_CHUNK, Device
from qlora_wgpu.gpu.memory import available_bytes, process_bytes, room
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import TOKENS, WHOLE, tensor_name
from qlora_wgpu.model.budget import (
    IN_BUFFERS,
    fit_inference_to_budget,
    fit_to_budget,
    offloaded_in_words,
    planned,
    reading_memory,
)
from qlora_wgpu.model.memory_plan import KeepDequantized, copied_bytes, has_room, with_kept
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs.workload import GenerationWorkload, TrainingWorkload, Workload
from qlora_wgpu.supervision.processes import container_limit
from qlora_wgpu.training import Observer

# ---- fitting -------------------------------------------------------------------------------------

_OTHER_LENGTHS = 8  # programs of other lengths that are kept in addition to the planned ones


@dataclass(frozen=True)
class Placement:
    """A workload laid out within the memory of a device."""

    layout: ModelPlan  # the layout to load
    workload: Workload  # with the layers that have to be recomputed
    plans: Sequence[Plan]  # of all programs
    memory: Counter[str]  # bytes on the device by kind
    on_host: Counter[str]  # offloaded bytes by kind
    words: str  # what is recomputed, offloaded or disabled, for a sentence; may be empty

    @property
    def trains(self) -> bool:
        """Whether the workload is training."""
        return isinstance(self.workload, TrainingWorkload)


def fit(
    workload: Workload, layout: ModelPlan, device: Device, observer: Observer,
    keep: KeepDequantized = False,
) -> Placement:  # fmt: skip
    """Places a workload within ``device.memory``, or refuses it before weights are read.

    The observer gets the plan, and what is offloaded; ``keep`` is ``device.keep_dequantized``.
    """
    limit = limit_of(device)
    if isinstance(workload, TrainingWorkload):
        placed = _fit_training(workload, layout, device, keep)
    else:
        fewer = workload.within(layout, device.max_binding, limit)
        if isinstance(workload, GenerationWorkload) and fewer != workload:
            assert isinstance(fewer, GenerationWorkload)
            observer.note(
                f"{fewer.count} sequences at a time fit into memory, not {workload.count}"
            )
        placed = _fit_with_tower(fewer, layout, device, keep)
    check_binding_limits(placed.layout, placed.plans, device)
    if limit is None and not placed.trains:
        return placed
    observer.planned(placed.memory)
    if placed.words and limit is not None:
        observer.note(f"to keep within {limit / MIB:,.0f} MiB of device memory, {placed.words}")
    check_host_memory(placed, device, observer)
    return placed


_CACHE_SHARE = 4  # of the device's memory, its inverse: the most that completions' caches may take


def with_fitting_rollouts(workload: TrainingWorkload, device: Device) -> TrainingWorkload:
    """The workload with fewer completions sampled at once, if their KV caches need much memory.

    Results do not depend on how many are sampled at once.
    """
    limit, rollouts = limit_of(device), workload.rollouts
    if limit is None or rollouts is None:
        return workload
    one = replace(workload, rollouts=replace(rollouts, count=1))
    layout = workload.layout(device)
    nbytes = reading_memory(one.rollout_plans(layout))["kv cache"]
    count = rollouts.count
    while count > 1 and count * nbytes > limit // _CACHE_SHARE:
        count = (count + 1) // 2
    return replace(workload, rollouts=replace(rollouts, count=count))


def limit_of(device: Device) -> int | None:
    """Bytes of a device that may be used: ``device.memory``, or else what the driver reports."""
    return device.budget if device.budget is not None else room(device)


def _fit_training(
    workload: TrainingWorkload, layout: ModelPlan, device: Device, keep: KeepDequantized
) -> Placement:
    limit = limit_of(device)

    @lru_cache(maxsize=1)
    def plans_of(layout: ModelPlan, step: StepOptions) -> Sequence[Plan]:
        """Cached, since the last ones are usually those that run, and tracing takes time."""
        return replace(workload, step=step).plans(layout)

    def memory_of(layout: ModelPlan, step: StepOptions) -> Counter[str]:
        return workload.memory(layout, plans_of(layout, step))

    def rest(layout: ModelPlan, step: StepOptions) -> int:
        return memory_of(layout, step).total() - layout.memory(step).total()

    found = fit_to_budget(
        layout, workload.step, limit, accumulation=workload.accumulation,
        flops_per_second=device.pace.flops_per_second,
        bytes_per_second=device.pace.bytes_per_second, besides=rest,
    )  # fmt: skip
    step, kept = found.options, found.layout
    if keep is True and not kept.offload.dequantized:
        raise _no_room(kept, "training", limit or 0)
    if keep == "auto" and (kept.offload.dequantized or device.budget is not None):
        kept = kept_dequantized(
            kept, keep, lambda other: memory_of(other, step).total(),
            limit=device.budget, is_cpu=device.is_cpu,
        )  # fmt: skip
    if kept is not found.layout:
        found = planned(kept, step, workload.accumulation)
    saves = step != workload.step or kept.offload.saves_memory
    plans = plans_of(kept, step)
    return Placement(
        kept, replace(workload, step=step), plans, workload.memory(kept, plans),
        found.host_memory, found.in_words() if saves else "",
    )  # fmt: skip


def _fit_with_tower(
    workload: Workload, layout: ModelPlan, device: Device, keep: KeepDequantized
) -> Placement:
    """Leaves room for a vision tower, or for a streamed one, if there is enough memory.

    Otherwise a tower is placed, or refused, at the first image.
    """
    try:
        return _fit_inference(workload, layout, device, keep)
    except OutOfMemoryError:
        if not isinstance(workload, GenerationWorkload) or not workload.tower:
            raise
        smaller = replace(workload, tower="streamed" if workload.tower == "resident" else "")
        return _fit_with_tower(smaller, layout, device, keep)


def _fit_inference(
    workload: Workload, layout: ModelPlan, device: Device, keep: KeepDequantized
) -> Placement:
    limit = limit_of(device)
    copies = copied_bytes(layout, device.budget) if workload.generates else 0
    if limit is not None:
        memory = reading_memory(workload.plans(layout))
        limit -= of_other_lengths(memory) + workload.tower_bytes(layout)
        layout = fit_inference_to_budget(layout, workload.plans, limit)
    may_keep = keep is True or device.is_cpu or device.budget is not None
    if workload.measures and may_keep:

        def taken(kept: ModelPlan) -> int:
            return copies + reading_memory(workload.plans(kept), kept).total()

        layout = kept_dequantized(layout, keep, taken, limit=limit, is_cpu=device.is_cpu)
    offloaded = offloaded_in_words(layout.offload, layout.num_layers)
    buffers = IN_BUFFERS if layout.offload.in_buffers else ""
    words = "; ".join(filter(None, (offloaded and f"{offloaded} in host memory", buffers)))
    plans, on_host = workload.plans(layout), layout.weights_on_host()
    return Placement(layout, workload, plans, workload.memory(layout, plans), on_host, words)


def of_other_lengths(memory: Counter[str]) -> int:
    """Bytes of the parameters and inputs of programs of other lengths."""
    return _OTHER_LENGTHS * (memory["uniforms"] + memory["inputs"] + memory["tables"])


def kept_dequantized(
    layout: ModelPlan, keep: KeepDequantized, taken: Callable[[ModelPlan], int | None], *,
    limit: int | None, is_cpu: bool,
) -> ModelPlan:  # fmt: skip
    """A layout that also keeps the dequantized weights, if ``keep`` says so and they fit.

    With ``auto`` they are kept on software GPUs and within a budget, if no layer is streamed, all
    that is ``taken`` fits, and a software GPU leaves the machine most of its memory.
    """
    is_kept = layout.offload.dequantized
    if keep is False or not (is_kept or layout.dequantized_bytes):
        return layout
    kept = layout if is_kept else with_kept(layout)
    total = None if layout.offload.streamed_layers else taken(kept)
    fits = total is not None and (limit is None or total <= limit)
    if keep is True and not fits:
        raise _no_room(layout, "measuring", limit or 0)
    if fits and (keep is True or not is_cpu or has_room(total or 0)):
        return kept
    return with_kept(layout, kept=False) if is_kept else layout


def _no_room(layout: ModelPlan, what: str, limit: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "device.keep_dequantized does not fit: the dequantized weights need "
        f"{layout.dequantized_bytes / MIB:,.0f} MiB, and {what} with them more than the "
        f"{limit / MIB:,.0f} MiB available; set it to auto, or raise device.memory"
    )


# ---- host memory ---------------------------------------------------------------------------------

_PROCESS = 128 * MIB  # interpreter, libraries and driver, if the system does not report it
# Bytes that the driver needs per character of a shader: matrix products are unrolled the most.
_COMPILED, _COMPILED_PRODUCT = 80, 270
_UPLOADS = UPLOAD_CHUNK  # what the driver keeps of uploads after loading
_COMPILING = 48 * MIB  # 41 to 55 of LLVM's, where the driver has not kept kernels of earlier runs
_WORK = 48 * MIB  # traces, recorded work, queues, encoded rows
_READING = 3  # copies of an adapter: from its file, for the device, and the neutral one


def host_memory(placed: Placement) -> Counter[str]:
    """Peak bytes of host memory by kind, without pages of mapped files."""
    layout, plans = placed.layout, placed.plans
    every = {launch.shader.label: launch for plan in plans for launch in plan.launches}
    stored = dict.fromkeys(storage for plan in plans for storage in plan.storages)
    uploaded = sum(s.nbytes for s in stored if s.kind == "base" and s.group is None)
    taken, one = process_bytes(), layout.adapter.parameters.nbytes
    memory = Counter(
        process=_PROCESS if taken is None else taken,
        kernels=sum(
            (_COMPILED_PRODUCT if launch.kernel == "gemm" else _COMPILED) * len(launch.shader.code)
            for launch in every.values()
        ),
        compiling=_COMPILING,
        adapter=_adapter_bytes(layout.adapter) if placed.trains else _READING * one,
        uploads=min(_UPLOADS, uploaded),
        work=_WORK,
    )
    # Weights are loaded before anything is compiled.
    later = memory["kernels"] + memory["compiling"] + memory["work"]
    memory["loading"] = max(layout.placement.loading_bytes - later, 0)
    return +(memory + placed.on_host)


def _adapter_bytes(adapter: AdapterLayout) -> int:
    """The maximum of a trained adapter and its moments that is in host memory at a time.

    A resumed run reads all of them before they are uploaded; writing a finished adapter takes two
    copies; one more was measured in some runs. An initial adapter that is part of the base (PiSSA,
    OLoRA) is kept, and written with another copy; otherwise the neutral adapter is kept, of which
    only the base's own rows are more than untouched zeros.
    """
    one = adapter.parameters.nbytes
    if adapter.config.changes_base:
        return 2 * one + max(one + adapter.moments.nbytes, 3 * one)
    names = [tensor_name(module, TOKENS) for module in adapter.trained_rows]
    names += [tensor_name(module, WHOLE) for module in adapter.trained_whole]
    own = sum(4 * adapter[name].size for name in names)
    return own + one + max(one + adapter.moments.nbytes, 2 * one)


def check_host_memory(placed: Placement, device: Device, observer: Observer) -> None:
    """Reports the planned host memory, and refuses the workload if it is not available.

    Without training it is reported only if something is offloaded.
    """
    memory = host_memory(placed)
    mapped = placed.layout.placement.mapped_bytes
    if placed.trains or placed.on_host or mapped:
        observer.planned_on_host(memory, mapped)
    shared = placed.memory.total() if device.is_cpu else 0
    needed = memory.total() - memory["process"] + shared  # the process exists already
    free = _free_bytes()
    if free is None or needed <= free:
        return
    included = f" ({shared / MIB:,.0f} MiB of them for {device.name})" if shared else ""
    raise OutOfMemoryError(
        f"this needs about {needed / MIB:,.0f} MiB of host memory{included}, but only "
        f"{free / MIB:,.0f} MiB are free, {(needed - free) / MIB:,.0f} MiB too few: "
        f"{_remedy(placed)}"
    )


def _free_bytes() -> int | None:
    """Free host memory, within the limit of this process's control group."""
    limit, taken = container_limit(), process_bytes()
    left = None if limit is None or taken is None else max(limit - taken, 0)
    return min((size for size in (available_bytes(), left) if size is not None), default=None)


def _remedy(placed: Placement) -> str:
    layout = placed.layout
    if placed.on_host["streamed weights"] and not layout.keep:
        return (
            "set model.cache to true, so that layers are offloaded to disk, or end other programs"
        )
    if layout.placement.problem:
        return layout.placement.problem
    if placed.on_host:
        return "raise device.memory, lower data.max_seq_length or lora.r, or end other programs"
    return "lower data.max_seq_length or lora.r, or end other programs"


# ---- bindings and textures -----------------------------------------------------------------------


def check_binding_limits(layout: ModelPlan, plans: Sequence[Plan], device: Device) -> None:
    """Refuses, before weights are read, a tensor larger than the device's bindings or textures."""
    limit, texture = device.max_binding, device.max_texture
    if (too_large := layout.adapter.beyond_a_binding(limit)) is not None:
        name, nbytes = too_large
        what = f"the adapter of {name} with r {layout.adapter.config.r}"
        advice = "lower lora.r or leave it out of lora.target_modules"
    elif beyond := beyond_a_binding(plans, limit):
        what, nbytes, advice = beyond
    elif beyond := beyond_a_texture(plans, texture):
        (what, nbytes, advice), limit = beyond, texture
    else:
        return
    raise OutOfMemoryError(
        f"{what} needs {nbytes:,} bytes in one piece, but {device.name} allows {limit:,}: {advice}"
    )


def beyond_a_binding(plans: Sequence[Plan], limit: int) -> tuple[str, int, str] | None:
    """The largest buffer of some plans, if too large for a binding: its name, bytes, and advice.

    Textures are not bound like buffers, and offloaded tensors have buffers of their own.
    """
    wholes = (storage.whole for plan in plans for storage in plan.storages)
    buffers = (s for s in wholes if not s.texture and s.group is None and s.on_host is None)
    largest = max(buffers, key=lambda storage: storage.nbytes, default=None)
    if largest is not None and largest.nbytes > limit:
        advice = "choose a GPU with a higher limit (device.gpu), or a smaller model"
        if largest.kind == "kv cache":
            advice = "generate shorter sequences, or fewer at a time"
        return largest.label, largest.nbytes, advice
    return _beyond(plans, limit, texture=False)


def beyond_a_texture(plans: Sequence[Plan], limit: int) -> tuple[str, int, str] | None:
    """The largest intermediate, if too large for a texture; weights are split to fit one."""
    return _beyond(plans, limit, texture=True)


def _beyond(plans: Sequence[Plan], limit: int, *, texture: bool) -> tuple[str, int, str] | None:
    tensors = (each for plan in plans for each in plan.slot_of if each.texture == texture)
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if largest is None or largest.nbytes <= limit:
        return None
    advice = "lower the batch size or data.max_seq_length"
    return f"{largest.name} of {largest.rows:,} rows", largest.nbytes, advice
