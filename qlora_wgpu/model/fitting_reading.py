"""The cheapest way to keep texts and evaluations, which have no gradient, within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.sizes import buffer_bytes, texture_bytes
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.program import pooled_bytes
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.residency import Residency

PlansOf = Callable[[ModelLayout], Sequence[Plan]]


def fit_reading(layout: ModelLayout, plans_of: PlansOf, budget: int) -> ModelLayout:
    """Lays a model out so that what it computes keeps a budget.

    Nothing waits in host memory as long as it need not, for which textures are given up; then
    the input embedding, whose rows are few; then the weights of as few layers as will do; then the
    head.

    Args:
        layout: The model with everything on the device.
        plans_of: All that will be computed of a layout.
        budget: Bytes of device memory.

    Raises:
        OutOfMemoryError: If no way keeps it; says by how much.
    """
    if (least := _total(layout, plans_of)) <= budget:
        return layout
    plain = Residency(in_buffers=layout.profile.in_textures)
    base = replace(plain, host_embedding=layout.embedding_bytes > 0)
    ways = [plain, base]
    for head in layout.head_ways:
        way = replace(base, streamed_layers=layout.num_layers, streamed_head=head)
        waiting = layout.waiting(way)
        all_streamed = _total(waiting, plans_of)
        count = _fewest(waiting.section_bytes, all_streamed, budget)
        least = min(least, all_streamed)
        ways.append(replace(way, streamed_layers=count))
    for way in dict.fromkeys(ways):
        fitted = layout.waiting(way)
        if _total(fitted, plans_of) <= budget:
            return fitted
    there = max(budget, 0)  # inputs and the like may have taken more than all of it
    raise OutOfMemoryError(
        f"this takes at least {least / MIB:,.0f} MiB of device memory, "
        f"{(least - there) / MIB:,.0f} MiB more than the {there / MIB:,.0f} MiB there are, even "
        "with all that can wait in host memory: ask for shorter texts, or raise device.memory "
        "(--memory)"
    )


def reading_memory(plans: Sequence[Plan], layout: ModelLayout | None = None) -> Counter[str]:
    """Bytes on the device by kind of programs that share slots and run in turn.

    Args:
        plans: Theirs.
        layout: The model, where what is kept dequantized is made before them.
    """
    if layout is not None and layout.filling is not None:
        whole = reading_memory([layout.filling, *plans])
        whole["uniforms"] -= layout.filling.uniform_bytes  # which do not stay
        return +whole
    memory: Counter[str] = Counter({"activations": pooled_bytes(plans)})
    for storage in dict.fromkeys(storage for plan in plans for storage in plan.storages):
        if storage.section is None:
            size = texture_bytes if storage.texture else buffer_bytes
            memory[storage.kind] += size(storage.nbytes)
    for stream in dict.fromkeys(stream for plan in plans for stream in plan.streams):
        memory["staging"] += stream.device_bytes
    memory["uniforms"] = sum(plan.uniform_bytes for plan in plans)
    return +memory


def _total(layout: ModelLayout, plans_of: PlansOf) -> int:
    return sum(reading_memory(plans_of(layout)).values())


def _fewest(layers: list[int], all_streamed: int, budget: int) -> int:
    """The fewest layers that have to come and go; all where that does not do, either.

    Each of the others adds its bytes to what is taken if all come and go.
    """
    room, count = budget - all_streamed, len(layers)
    for nbytes in layers:  # the last ones come and go
        room -= nbytes
        if room < 0 or count <= 3:  # two would always be there
            break
        count -= 1
    return count
