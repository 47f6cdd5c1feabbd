"""In which form each linear layer lies on the device: as its folder stores it, or as asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized.planned import PlannedFormats
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.quantized_weights import own_format
from qlora_wgpu.model.weight_names import stored_name
from qlora_wgpu.quant import WeightFormat


class StorageForms:
    """Chooses between quantized forms and floats, layer by layer.

    A folder that is quantized decides for each of its layers: what it keeps in 16 bits was kept so
    on purpose. The scheme quantizes a folder that is not.
    """

    def __init__(
        self,
        quant: QuantConfig,
        folder: ModelFolder | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Looks at what the folder holds.

        Args:
            quant: The scheme.
            folder: The weights, if they are there.
            config: A config.json, which tells what is known of a folder without its weights.
        """
        self._quant = quant
        self._folder = folder if folder is not None and folder.is_quantized else None
        plan = None if folder is not None or config is None else config.get("quantization_config")
        self._planned = PlannedFormats(plan) if isinstance(plan, Mapping) else None

    def of(self, names: Sequence[str], columns: int) -> WeightFormat | None:
        """The quantized format of a layer, or of the layers of several experts; None for floats.

        Args:
            names: The tensors as the files call them. Where some are quantized and others are not,
                all are floats.
            columns: Their in_features.

        Raises:
            CheckpointError: If what a file says of its format is damaged.
        """
        if self._quant.scheme == "none":
            return None
        if self._planned is not None:
            return self._planned.format(names[0], columns)
        if self._folder is None:
            return own_format(self._quant)
        forms = [self._form(self._folder, name) for name in names]
        return None if None in forms else forms[0]

    def _form(self, folder: ModelFolder, name: str) -> WeightFormat | None:
        if folder.must_requantize(name):
            return own_format(self._quant)
        return folder.weight_format(name)


def stored_formats(folder: ModelFolder, architecture: Architecture) -> Counter[str]:
    """How many linear layers a quantized folder has in each format, by its name.

    Of the experts of a layer the first tells for all. Layers in floats, or in a form that no kernel
    has, are left out.
    """
    counts: Counter[str] = Counter()
    if not folder.is_quantized:
        return counts
    several = [(stack.linears[0], len(stack.linears)) for stack in architecture.experts]
    for spec, count in [*((spec, 1) for spec in architecture.linears), *several]:
        form = folder.weight_format(stored_name(folder, architecture, f"{spec.name}.weight"))
        if form is not None:
            counts[form.name] += count
    return counts


def planned_formats(config: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """The names of the formats that a config.json says its linear layers have."""
    plan = config.get("quantization_config")
    if not isinstance(plan, Mapping):
        return []
    planned = PlannedFormats(plan)
    forms = [planned.format(f"{s.name}.weight", s.in_features) for s in architecture.linears]
    return sorted({form.name for form in forms if form is not None})


def kept_in_floats(folder: ModelFolder, architecture: Architecture) -> list[str]:
    """The linear layers that a quantized folder keeps as floats; none of one that is not."""
    if not folder.is_quantized:
        return []
    return [
        spec.name
        for spec in architecture.every_linear
        if not folder.holds_quantized(stored_name(folder, architecture, f"{spec.name}.weight"))
    ]
