"""The memory plan of a training run, from config.json alone: before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.model.keeping import KeepDequantized, laid_out_for
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.text_copies import copied_bytes


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

    It is the sum of the very plan that training runs, so the two cannot disagree but for what
    shorter batches and sample texts add (a few per cent).

    Args:
        config: A config.json.
        lora: The adapter.
        quant: How the frozen linear layers are stored.
        compute_dtype: ``"bfloat16"`` or ``"float32"``.
        batch_size: Sequences of a micro-batch.
        seq: Tokens of each, padded.
        gradient_checkpointing: Whether layers are recomputed in the backward.
        max_binding: The GPU's largest binding.
        profile: How kernels are cut for the GPU.
        keep_dequantized: Whether quantized weights are kept dequantized, too; ``"auto"`` as on a
            device without a budget.
        is_cpu: Whether it is a software GPU, which ``"auto"`` asks for.

    Raises:
        UnsupportedModelError: If the model asks for something that is not computed here.
    """
    layout = ModelLayout(
        Pretrained.from_config(config),
        lora,
        quant,
        compute_dtype,
        profile=profile,
        max_binding=max_binding,
    )
    copies = copied_bytes(layout, None)
    layout = laid_out_for(layout, keep_dequantized, is_cpu=is_cpu, budget=None, beside=copies)
    return layout.memory(StepOptions("train", batch_size, seq, gradient_checkpointing))
