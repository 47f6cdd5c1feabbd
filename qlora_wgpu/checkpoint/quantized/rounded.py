"""What AutoRound's config.json says, in the words of AWQ's or GPTQ's, as which it packs weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief

_PACKED = {
    "auto": {"quant_method": "gptq"},
    "auto_round:gptq": {"quant_method": "gptq"},
    "auto_round:auto_gptq": {"quant_method": "gptq"},
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:awq": {"quant_method": "awq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
_ROTATIONS = ("rotation_config", "spinquant_config", "rotation_configs")


def as_awq_or_gptq(quantization: Mapping[str, Any], place: object) -> Mapping[str, Any]:
    """AutoRound's ``quantization_config`` as one of AWQ or GPTQ; any other as it is.

    Args:
        quantization: The ``quantization_config``.
        place: The folder, for messages.

    Raises:
        UnsupportedModelError: If AutoRound packed weights otherwise, or rotated them.
    """
    if quantization.get("quant_method") != "auto-round":
        return quantization
    packing = quantization.get("packing_format", "auto_round:auto_gptq")
    packed = _PACKED.get(packing) if isinstance(packing, str) else None
    if packed is None or quantization.get("data_type", "int") != "int":
        raise UnsupportedModelError(
            f"{place} is quantized with AutoRound and packed as {brief(packing)}, but only its "
            "integers in GPTQ's and AWQ's layouts are read: take the unquantized model"
        )
    if any(quantization.get(key) for key in _ROTATIONS):
        raise UnsupportedModelError(
            f"{place} has weights that AutoRound rotated, which is not computed: take the "
            "unquantized model"
        )
    # Zeros of the second layout are as they are, of the first less one, whatever else is said.
    own = {key: value for key, value in quantization.items() if key != "checkpoint_format"}
    return {**own, **packed}
