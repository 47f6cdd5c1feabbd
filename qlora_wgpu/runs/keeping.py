"""Weights that a run keeps dequantized, as ``device.keep_dequantized`` says and memory allows."""

from __future__ import annotations

from qlora_wgpu.config import Config
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import Beside, Fit, PlansOf, planned, reading_memory
from qlora_wgpu.model.memory_plan import KeepDequantized, has_room, laid_out_for, with_kept
from qlora_wgpu.model.model_plan import ModelLayout


def kept_as_asked(layout: ModelLayout, settings: Config, device: Device) -> ModelLayout:
    """A run's layout to begin with, which ``settled`` may change."""
    asked = settings.device.keep_dequantized
    return laid_out_for(layout, asked, is_cpu=device.is_cpu, budget=device.budget)


def kept_to_measure(
    layout: ModelLayout,
    plans_of: PlansOf,
    device: Device,
    budget: int | None,
    asked: KeepDequantized,
    copies: int,
) -> ModelLayout:
    """A layout that measures rows with dequantized weights, where they are asked for and fit.

    Args:
        layout: The model without them, as it keeps the budget.
        plans_of: All that will be computed of a layout.
        device: The device.
        budget: Bytes of it that there are, if they are bounded.
        asked: Whether they are kept; ``"auto"`` as training does.
        copies: Bytes of copies that texts read beside.

    Raises:
        OutOfMemoryError: If they were asked for, and the budget has no room for them.
    """
    bounded = device.budget is not None
    if asked is False or not layout.dequantized_bytes:
        return layout
    if asked == "auto" and not bounded and not device.is_cpu:
        return layout
    kept, streams = with_kept(layout), bool(layout.residency.streamed_layers)
    taken = copies + sum(reading_memory(plans_of(kept), kept).values())
    fits = budget is None or (taken <= budget and not streams)
    if asked is True:
        if not fits:
            raise _no_room(layout, "measuring", budget or 0)
        return kept
    return kept if fits and (not device.is_cpu or has_room(taken)) else layout


def _no_room(layout: ModelLayout, what: str, budget: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        "device.keep_dequantized has no room: weights that are kept dequantized take "
        f"{layout.dequantized_bytes / MIB:,.0f} MiB, and {what} with them more than "
        f"the {budget / MIB:,.0f} MiB there are; set it to auto, or raise device.memory"
    )


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
        raise _no_room(fitted.layout, "training", budget)
    if asked != "auto":
        return fitted
    if is_kept:
        return fitted if has_room(taken(fitted)) else again(kept=False)
    if device.budget is None or fitted.residency.streamed_layers:
        return fitted
    kept = again(kept=True)
    fits = taken(kept) <= device.budget and (not device.is_cpu or has_room(taken(kept)))
    return kept if fits and kept.layout.filling is not None else fitted
