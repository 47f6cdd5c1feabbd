"""The memory of a training run by config.json alone, and which copies of weights fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, Profile
from qlora_wgpu.gpu.memory import SPARE_SHARE, available_bytes, machine_bytes
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions

KeepDequantized = bool | Literal["auto"]


def with_kept(plan: ModelPlan, *, kept: bool = True) -> ModelPlan:
    return plan.changed(offload=replace(plan.offload, dequantized=kept))


def laid_out_for(
    plan: ModelPlan,
    keep: KeepDequantized,
    *,
    is_cpu: bool,
    budget: int | None,
    more: int = 0,
) -> ModelPlan:
    """The model with weights kept dequantized, if requested.

    ``"auto"`` keeps them on a software GPU without a memory limit, if they fit: main memory is
    plentiful, and dequantizing is expensive there. No result depends on it.
    """
    nbytes = plan.dequantized_bytes
    if keep is True:
        return with_kept(plan)
    if keep is False or not is_cpu or budget is not None or not nbytes:
        return plan
    return with_kept(plan) if has_room(nbytes + more) else plan


def has_room(nbytes: int) -> bool:
    """Whether this many bytes are free and leave the machine most of its memory."""
    total, free = machine_bytes(), available_bytes()
    return total is not None and SPARE_SHARE * nbytes <= total and (free is None or nbytes <= free)


def copied_bytes(plan: ModelPlan, budget: int | None) -> int:
    """Estimated bytes of the packed weights for generation; 0 if there are none.

    Products with packed weights sum in another order, so logits differ in their last digits:
    whether there are any must not depend on other programs' memory.
    """
    if budget is not None or not plan.profile.textures:
        return 0
    return plan.packed_sizes.nbytes if plan.packed_sizes.fits else 0


def are_copied(plan: ModelPlan, budget: int | None) -> bool:
    """Whether generation uses packed weights; an error if those still missing do not fit."""
    needed, free = copied_bytes(plan, budget), available_bytes()
    missing = needed - plan.packed_weights.nbytes
    if needed and free is not None and missing > free:
        raise OutOfMemoryError(
            f"generation with this model needs {missing / MIB:,.0f} MiB of memory for copies of "
            f"its weights, but only {free / MIB:,.0f} MiB are free: close other programs, or set "
            "device.memory, which skips the copies; logits may then differ in their last digits"
        )
    return needed > 0


def plan_training_memory(
    config: Mapping[str, Any],
    lora: LoraConfig,
    quant: QuantConfig,
    compute_dtype: str,
    *,
    batch_size: int,
    seq: int,
    gradient_checkpointing: bool,
    max_binding: int = 128 << 20,
    profile: Profile = CPU_PROFILE,
    keep_dequantized: KeepDequantized = False,
    is_cpu: bool = False,
) -> Counter[str]:
    """Bytes on the device by kind while training on batches of (batch_size, seq).

    Computed from the plan that training runs, so the two differ only by shorter batches and samples
    (a few percent).
    """
    plan = ModelPlan(
        Pretrained.from_config(config),
        lora,
        quant,
        compute_dtype,
        profile=profile,
        max_binding=max_binding,
    )
    copies = copied_bytes(plan, None)
    plan = laid_out_for(plan, keep_dequantized, is_cpu=is_cpu, budget=None, more=copies)
    return plan.memory(StepOptions("train", batch_size, seq, gradient_checkpointing))
