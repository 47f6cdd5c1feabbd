"""What a run reads or writes as one, against the largest binding that a GPU allows."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.model.model_plan import ModelLayout


def require_bindings(layout: ModelLayout, plans: Sequence[Plan], device: Device) -> None:
    """Sees, before a weight is read, that nothing is beyond what the device binds in one piece.

    Args:
        layout: The model.
        plans: What will run of it.
        device: The device.

    Raises:
        OutOfMemoryError: If something is; says what, and what to do.
    """
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
        and storage.whole.section is None
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
