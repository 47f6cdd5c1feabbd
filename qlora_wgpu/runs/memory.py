"""Memory and bindings of host and device: told, and required, before a weight is read.

What was there before is asked of the system; what comes is planned. Three figures are of a driver,
measured: they are those of Mesa's lavapipe, which compiles for the processor, and more than a
card's driver needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import UPLOAD_CHUNK, Device
from qlora_wgpu.gpu.memory import available_bytes, process_bytes
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import TOKENS, WHOLE, tensor_name
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import make_seen
from qlora_wgpu.supervision.control_groups import container_limit
from qlora_wgpu.training import Observer

# ---- host memory ---------------------------------------------------------------------------------

_PROCESS = 128 * MIB  # where the system does not tell: interpreter, libraries, driver
# Bytes that the driver keeps for each character of a shader: products are unrolled the most.
_COMPILED, _COMPILED_PRODUCT = 80, 270
_UPLOADS = UPLOAD_CHUNK  # what the driver keeps of uploads once weights are there
_WORK = 48 * MIB  # traces, recorded work, queues, rows that are encoded
_READING = 3  # copies of an adapter: as its file has it, as the device takes it, what does nothing


def host_memory(
    layout: ModelPlan, waiting: Counter[str], plans: Sequence[Plan], *, trains: bool
) -> Counter[str]:
    """Bytes of host memory by kind at the peak, without pages of the files that are read."""
    every = {launch.shader.label: launch for plan in plans for launch in plan.launches}
    taken = process_bytes()
    memory = Counter(
        process=_PROCESS if taken is None else taken,
        kernels=sum(
            (_COMPILED_PRODUCT if launch.kernel == "gemm" else _COMPILED) * len(launch.shader.code)
            for launch in every.values()
        ),
        adapter=_of_training(layout.adapter) if trains else _of_reading(layout.adapter),
        uploads=min(_UPLOADS, sum(storage.nbytes for storage in _weights(plans))),
        work=_WORK,
    )
    # Weights are read before anything is compiled.
    memory["loading"] = max(layout.placement.loading_bytes - memory["kernels"] - memory["work"], 0)
    return +(memory + waiting)


def _of_reading(adapter: AdapterLayout) -> int:
    return _READING * adapter.parameters.nbytes


def _of_training(adapter: AdapterLayout) -> int:
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


def _weights(plans: Sequence[Plan]) -> Iterator[Storage]:
    """What is uploaded before anything runs."""
    every = dict.fromkeys(storage for plan in plans for storage in plan.storages)
    return (each for each in every if each.kind == "base" and each.group is None)


def require_host_room(
    layout: ModelPlan,
    waiting: Counter[str],
    device: Device,
    on_device: int,
    observer: Observer,
    plans: Sequence[Plan],
    *,
    trains: bool,
) -> None:
    """Tells what is planned of host memory, and ends where there is not so much.

    Where nothing is trained it is told only of what waits there.
    """
    memory = host_memory(layout, waiting, plans, trains=trains)
    if trains or waiting or layout.placement.mapped_bytes:
        observer.planned_on_host(memory, layout.placement.mapped_bytes)
    needed = sum(memory.values()) - memory["process"]  # which is there
    shared = on_device if device.is_cpu else 0
    free = _free_bytes()
    if free is None or needed + shared <= free:
        return
    most = f", of which {shared / MIB:,.0f} MiB are {device.name}'s" if shared else ""
    raise OutOfMemoryError(
        f"this takes about {(needed + shared) / MIB:,.0f} MiB of host memory{most}, and "
        f"{free / MIB:,.0f} MiB are free, {(needed + shared - free) / MIB:,.0f} MiB too few: "
        f"{_remedy(layout, waiting)}"
    )


def _free_bytes() -> int | None:
    """Host memory that can be had, also where a limit is of this process's own control group."""
    limit, taken = container_limit(), process_bytes()
    left = None if limit is None or taken is None else max(limit - taken, 0)
    return min((size for size in (available_bytes(), left) if size is not None), default=None)


def _remedy(layout: ModelPlan, waiting: Counter[str]) -> str:
    """What to change."""
    if waiting["streamed weights"] and not layout.keep:
        return "set model.cache to true, so that layers wait on disk, or end other programs"
    if layout.placement.problem:
        return layout.placement.problem
    if waiting:
        return "raise device.memory, lower data.max_seq_length or lora.r, or end other programs"
    return "lower data.max_seq_length or lora.r, or end other programs"


# ---- bindings and textures -----------------------------------------------------------------------


def require_bindings(layout: ModelPlan, plans: Sequence[Plan], device: Device) -> None:
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
    buffers = {
        storage.whole: storage.whole.nbytes
        for plan in plans
        for storage in plan.storages
        if not storage.whole.texture
        and storage.whole.group is None
        and storage.whole.on_host is None
    }
    largest = max(buffers, key=buffers.__getitem__, default=None)
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


def text_plans(
    layout: ModelPlan, cache: KVCache, sizes: Iterable[tuple[int, int]]
) -> Iterator[Plan]:
    """The plans of an engine's programs, two of each, in the order in which they are made ready."""
    seen = make_seen(cache.texts, layout.pretrained.architecture.vocab_size)
    for texts, tokens in sizes:
        graphs = layout.token_graphs(texts, tokens, cache, seen)
        yield compile_plan(graphs.hidden, apart=graphs.apart)
        yield compile_plan(graphs.head, apart=graphs.apart)
