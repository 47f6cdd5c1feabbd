"""Copies of the weights that texts read on software GPUs: decided by the machine alone.

Sums of a product have another order in strips, and so a text's logits other last digits: whether
there are copies must not depend on what other programs take at that moment.
"""

from __future__ import annotations

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.memory_size import available_bytes
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.layout import ModelLayout


def copied_bytes(layout: ModelLayout, budget: int | None) -> int:
    """Bytes, more or less, of the copies that texts of a model get; 0 where they get none.

    Args:
        layout: The model.
        budget: Bytes of ``device.memory``; texts that have to keep one do without copies.
    """
    if budget is not None or not layout.profile.textures:
        return 0
    return layout.copy_sizes.nbytes if layout.copy_sizes.fits else 0


def are_copied(layout: ModelLayout, budget: int | None) -> bool:
    """Whether they get any; what is not made yet has room.

    Raises:
        OutOfMemoryError: If it has none now.
    """
    wanted, free = copied_bytes(layout, budget), available_bytes()
    missing = wanted - layout.strips.nbytes
    if wanted and free is not None and missing > free:
        raise OutOfMemoryError(
            f"texts of this model read copies of its weights, which take {missing / MIB:,.0f} MiB "
            f"of memory, and {free / MIB:,.0f} MiB are free: end other programs, or set "
            "device.memory, with which texts do without copies and may differ in the last digits "
            "of their logits"
        )
    return wanted > 0
