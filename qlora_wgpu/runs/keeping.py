"""Weights that a run keeps dequantized, as ``device.keep_dequantized`` says and memory allows."""

from __future__ import annotations

from qlora_wgpu.config import Config
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.fit import Fit, planned
from qlora_wgpu.model.keeping import has_room, laid_out_for, with_kept
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.ways import Beside


def kept_as_asked(layout: ModelLayout, settings: Config, device: Device) -> ModelLayout:
    """A run's layout to begin with, which ``settled`` may change."""
    asked = settings.device.keep_dequantized
    return laid_out_for(layout, asked, is_cpu=device.is_cpu, budget=device.budget)


def settled(
    fitted: Fit,
    settings: DeviceConfig,
    device: Device,
    budget: int | None,
    accumulation: int,
    beside: Beside,
) -> Fit:
    """A fitted step with dequantized weights, or without, now that its memory is known.

    Args:
        fitted: The step.
        settings: Whether they are kept.
        device: The device.
        budget: Bytes of it that there are, if they are bounded.
        accumulation: Micro-batches of an optimizer step.
        beside: Bytes that the run takes beside a step that is planned so.

    Raises:
        OutOfMemoryError: If they were asked for, and the budget has no room for them.
    """

    def taken(way: Fit) -> int:
        return way.total + beside(way.layout, way.options)

    def again(*, kept: bool) -> Fit:
        return planned(with_kept(fitted.layout, kept=kept), fitted.options, accumulation)

    asked, is_kept = settings.keep_dequantized, fitted.residency.dequantized
    if asked is True and not is_kept:
        assert budget is not None
        raise OutOfMemoryError(
            f"device.keep_dequantized has no room: weights that are kept dequantized take "
            f"{fitted.layout.dequantized_bytes / MIB:,.0f} MiB, and training with them more than "
            f"the {budget / MIB:,.0f} MiB there are; set it to auto, or raise device.memory"
        )
    if asked != "auto":
        return fitted
    if is_kept:
        return fitted if has_room(taken(fitted)) else again(kept=False)
    if device.budget is None or fitted.residency.streamed_layers:
        return fitted
    kept = again(kept=True)
    fits = taken(kept) <= device.budget and (not device.is_cpu or has_room(taken(kept)))
    return kept if fits and kept.layout.filling is not None else fitted
