"""Where a workload lies: on the device, dequantized, recomputed or in host memory, or refused.

What was there before is asked of the system; what comes is planned. Three figures are of a driver,
measured: they are those of Mesa's lavapipe, which compiles for the processor, and more than a
card's driver needs.
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
    planned,
    reading_memory,
    waiting_in_words,
)
from qlora_wgpu.model.memory_plan import KeepDequantized, copied_bytes, has_room, with_kept
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs.workload import TrainingWorkload, Workload
from qlora_wgpu.supervision.processes import container_limit
from qlora_wgpu.training import Observer

# ---- fitting -------------------------------------------------------------------------------------

_OTHER_LENGTHS = 8  # programs of texts and rows that are kept beside those that are planned


@dataclass(frozen=True)
class Placement:
    """A workload laid out within the memory of a device."""

    layout: ModelPlan  # to be loaded
    workload: Workload  # a training's layers may be recomputed that were not to be
    plans: Sequence[Plan]  # of all programs
    memory: Counter[str]  # bytes on the device by kind
    on_host: Counter[str]  # bytes of what waits in host memory, by kind
    words: str  # what is recomputed, waits or is given up, for a sentence; empty for nothing

    @property
    def trains(self) -> bool:
        """Whether it is a training."""
        return isinstance(self.workload, TrainingWorkload)


def fit(
    workload: Workload, layout: ModelPlan, device: Device, observer: Observer,
    asked: KeepDequantized = False,
) -> Placement:  # fmt: skip
    """Places a workload within ``device.memory``, or refuses it before a weight is read.

    The observer is told what is planned, and what waits; ``asked`` is ``device.keep_dequantized``.
    """
    limit = limit_of(device)
    if isinstance(workload, TrainingWorkload):
        placed = _fit_training(workload, layout, device, asked)
    else:
        placed = _fit_inference(workload, layout, device, asked)
    check_binding_limits(placed.layout, placed.plans, device)
    if limit is None and not placed.trains:
        return placed
    observer.planned(placed.memory)
    if placed.words and limit is not None:
        observer.note(f"to keep within {limit / MIB:,.0f} MiB of device memory, {placed.words}")
    check_host_memory(placed, device, observer)
    return placed


def limit_of(device: Device) -> int | None:
    """Bytes of a device that may be taken: those that are told, else what it has."""
    return device.budget if device.budget is not None else room(device)


def _fit_training(
    workload: TrainingWorkload, layout: ModelPlan, device: Device, asked: KeepDequantized
) -> Placement:
    limit = limit_of(device)

    @lru_cache(maxsize=1)
    def plans_of(layout: ModelPlan, step: StepOptions) -> Sequence[Plan]:
        """Those that were asked about last are mostly those that run: texts are traced anew."""
        return replace(workload, step=step).plans(layout)

    def memory_of(layout: ModelPlan, step: StepOptions) -> Counter[str]:
        return workload.memory(layout, plans_of(layout, step))

    def beside(layout: ModelPlan, step: StepOptions) -> int:
        return memory_of(layout, step).total() - layout.memory(step).total()

    found = fit_to_budget(
        layout, workload.step, limit, accumulation=workload.accumulation,
        flops_per_second=device.pace.flops_per_second,
        bytes_per_second=device.pace.bytes_per_second, beside=beside,
    )  # fmt: skip
    step, kept = found.options, found.layout
    if asked is True and not kept.offload.dequantized:
        raise _no_room(kept, "training", limit or 0)
    if asked == "auto" and (kept.offload.dequantized or device.budget is not None):
        kept = kept_dequantized(
            kept, asked, lambda other: memory_of(other, step).total(),
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


def _fit_inference(
    workload: Workload, layout: ModelPlan, device: Device, asked: KeepDequantized
) -> Placement:
    limit = limit_of(device)
    copies = copied_bytes(layout, device.budget) if workload.writes else 0
    if limit is not None:
        memory = reading_memory(workload.plans(layout))
        limit -= of_other_lengths(memory)
        layout = fit_inference_to_budget(layout, workload.plans, limit)
    may_keep = asked is True or device.is_cpu or device.budget is not None
    if workload.measures and may_keep:

        def taken(kept: ModelPlan) -> int:
            return copies + reading_memory(workload.plans(kept), kept).total()

        layout = kept_dequantized(layout, asked, taken, limit=limit, is_cpu=device.is_cpu)
    waiting = waiting_in_words(layout.offload, layout.num_layers)
    buffers = IN_BUFFERS if layout.offload.in_buffers else ""
    words = "; ".join(filter(None, (waiting and f"{waiting} in host memory", buffers)))
    plans, on_host = workload.plans(layout), layout.weights_on_host()
    return Placement(layout, workload, plans, workload.memory(layout, plans), on_host, words)


def of_other_lengths(memory: Counter[str]) -> int:
    """Bytes that programs of other lengths take beside: their parameters and inputs."""
    return _OTHER_LENGTHS * (memory["uniforms"] + memory["inputs"] + memory["tables"])


def kept_dequantized(
    layout: ModelPlan, asked: KeepDequantized, taken: Callable[[ModelPlan], int | None], *,
    limit: int | None, is_cpu: bool,
) -> ModelPlan:  # fmt: skip
    """A layout whose quantized weights are kept dequantized beside, as is asked or there is room.

    By itself a software GPU, or a budget that is told, keeps them: where nothing is streamed, all
    that is ``taken`` fits, and a software GPU leaves the machine most of its memory.
    """
    is_kept = layout.offload.dequantized
    if asked is False or not (is_kept or layout.dequantized_bytes):
        return layout
    kept = layout if is_kept else with_kept(layout)
    total = None if layout.offload.streamed_layers else taken(kept)
    fits = total is not None and (limit is None or total <= limit)
    if asked is True and not fits:
        raise _no_room(layout, "measuring", limit or 0)
    if fits and (asked is True or not is_cpu or has_room(total or 0)):
        return kept
    return with_kept(layout, kept=False) if is_kept else layout


def _no_room(layout: ModelPlan, what: str, limit: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "device.keep_dequantized has no room: weights that are kept dequantized take "
        f"{layout.dequantized_bytes / MIB:,.0f} MiB, and {what} with them more than "
        f"the {limit / MIB:,.0f} MiB there are; set it to auto, or raise device.memory"
    )


# ---- host memory ---------------------------------------------------------------------------------

_PROCESS = 128 * MIB  # where the system does not tell: interpreter, libraries, driver
# Bytes that the driver keeps for each character of a shader: products are unrolled the most.
_COMPILED, _COMPILED_PRODUCT = 80, 270
_UPLOADS = UPLOAD_CHUNK  # what the driver keeps of uploads once weights are there
_WORK = 48 * MIB  # traces, recorded work, queues, rows that are encoded
_READING = 3  # copies of an adapter: as its file has it, as the device takes it, what does nothing


def host_memory(placed: Placement) -> Counter[str]:
    """Bytes of host memory by kind at the peak, without pages of the files that are read."""
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
        adapter=_trained(layout.adapter) if placed.trains else _READING * one,
        uploads=min(_UPLOADS, uploaded),
        work=_WORK,
    )
    # Weights are read before anything is compiled.
    memory["loading"] = max(layout.placement.loading_bytes - memory["kernels"] - memory["work"], 0)
    return +(memory + placed.on_host)


def _trained(adapter: AdapterLayout) -> int:
    """The most of an adapter and its moments that is in host memory at a time.

    All of them before a resumed run's go to the device; two adapters where an ended run's is
    written. One more was measured of some runs. What began as a part of the base stays, and is
    written with as much beside it; else what does nothing stays, of which only the base's own rows
    are more than untouched zeros.
    """
    one = adapter.parameters.nbytes
    if adapter.config.changes_base:
        return 2 * one + max(one + adapter.moments.nbytes, 3 * one)
    names = [tensor_name(module, TOKENS) for module in adapter.trained_rows]
    names += [tensor_name(module, WHOLE) for module in adapter.trained_whole]
    own = sum(4 * adapter[name].size for name in names)
    return own + one + max(one + adapter.moments.nbytes, 2 * one)


def check_host_memory(placed: Placement, device: Device, observer: Observer) -> None:
    """Tells what is planned of host memory, and ends where there is not so much.

    Where nothing is trained it is told only of what waits there.
    """
    memory = host_memory(placed)
    mapped = placed.layout.placement.mapped_bytes
    if placed.trains or placed.on_host or mapped:
        observer.planned_on_host(memory, mapped)
    shared = placed.memory.total() if device.is_cpu else 0
    needed = memory.total() - memory["process"] + shared  # the process is there
    free = _free_bytes()
    if free is None or needed <= free:
        return
    most = f", of which {shared / MIB:,.0f} MiB are {device.name}'s" if shared else ""
    raise OutOfMemoryError(
        f"this takes about {needed / MIB:,.0f} MiB of host memory{most}, and "
        f"{free / MIB:,.0f} MiB are free, {(needed - free) / MIB:,.0f} MiB too few: "
        f"{_remedy(placed)}"
    )


def _free_bytes() -> int | None:
    """Host memory that can be had, also where a limit is of this process's own control group."""
    limit, taken = container_limit(), process_bytes()
    left = None if limit is None or taken is None else max(limit - taken, 0)
    return min((size for size in (available_bytes(), left) if size is not None), default=None)


def _remedy(placed: Placement) -> str:
    layout = placed.layout
    if placed.on_host["streamed weights"] and not layout.keep:
        return "set model.cache to true, so that layers wait on disk, or end other programs"
    if layout.placement.problem:
        return layout.placement.problem
    if placed.on_host:
        return "raise device.memory, lower data.max_seq_length or lora.r, or end other programs"
    return "lower data.max_seq_length or lora.r, or end other programs"


# ---- bindings and textures -----------------------------------------------------------------------


def check_binding_limits(layout: ModelPlan, plans: Sequence[Plan], device: Device) -> None:
    """Sees, before a weight is read, that nothing is beyond what the device binds in one piece."""
    most, texture = device.max_binding, device.max_texture
    if (too_large := layout.adapter.beyond_a_binding(most)) is not None:
        name, nbytes = too_large
        what = f"the adapter of {name} with r {layout.adapter.config.r}"
        advice = "lower lora.r or leave it out of lora.target_modules"
    elif beyond := beyond_a_binding(plans, most):
        what, nbytes, advice = beyond
    elif beyond := beyond_a_texture(plans, texture):
        (what, nbytes, advice), most = beyond, texture
    else:
        return
    raise OutOfMemoryError(
        f"{what} takes {nbytes:,} bytes in one piece, and {device.name} allows {most:,}: {advice}"
    )


def beyond_a_binding(plans: Sequence[Plan], most: int) -> tuple[str, int, str] | None:
    """The largest buffer of some plans that no binding shows: what it is, its bytes, what to do.

    Textures are not bound as buffers are, and what comes and goes has buffers of its own.
    """
    wholes = (storage.whole for plan in plans for storage in plan.storages)
    buffers = (s for s in wholes if not s.texture and s.group is None and s.on_host is None)
    largest = max(buffers, key=lambda storage: storage.nbytes, default=None)
    if largest is not None and largest.nbytes > most:
        advice = "choose a GPU that allows as much (device.gpu), or a smaller model"
        if largest.kind == "kv cache":
            advice = "ask for shorter texts, or fewer at once"
        return largest.label, largest.nbytes, advice
    return _beyond(plans, most, texture=False)


def beyond_a_texture(plans: Sequence[Plan], most: int) -> tuple[str, int, str] | None:
    """The same of the largest intermediate that no texture holds; weights are cut to fit one."""
    return _beyond(plans, most, texture=True)


def _beyond(plans: Sequence[Plan], most: int, *, texture: bool) -> tuple[str, int, str] | None:
    tensors = (each for plan in plans for each in plan.slot_of if each.texture == texture)
    made = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    if made is None or made.nbytes <= most:
        return None
    advice = "lower the batch size or data.max_seq_length"
    return f"{made.name} of {made.rows:,} rows", made.nbytes, advice
