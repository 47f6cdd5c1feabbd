"""Dropout's parameters: a mask is a function of (micro-batch key, module key, element)."""

from __future__ import annotations

from qlora_wgpu.ops.modules import Lora


def dropout_params(lora: Lora | None) -> dict[str, int | float]:
    """The uniform fields that ``common/dropout.wgsl`` reads."""
    if lora is None or lora.dropout == 0:
        return {"module_key": 0, "keep_below": 0, "keep_scale": 1.0}
    return {
        "module_key": lora.key,
        "keep_below": min(round((1 - lora.dropout) * 2**32), 2**32 - 1),
        "keep_scale": 1 / (1 - lora.dropout),
    }
