"""GPUs that allow less than the one that is there, and are held to that by WebGPU itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from qlora_wgpu.gpu.adapters import FoundAdapter, list_adapters
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.wgpu_native import WgpuNative
from support.matrix_units import emulated

_TAKEN_BY_EMULATION = "max-compute-workgroup-storage-size"  # beyond what units themselves take


@dataclass(frozen=True)
class Offered:
    """What a GPU offers.

    Attributes:
        limits: Those that differ from the GPU's own, by wgpu's names.
        without: Features of the GPU, by wgpu's names, that are not listed.
        kind: Its type, by WebGPU's names; a GPU's kernels are for all but ``CPU``.
        units: Matrix units that it seems to have, which are emulated.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    kind: str = "CPU"
    units: MatrixShape | None = None


class LimitedAdapter:
    """An adapter of which no more can be seen, or had, than is offered."""

    def __init__(self, raw: Any, offered: Offered) -> None:
        self._raw, self._offered = raw, offered
        self.limits = {**raw.limits, **offered.limits}
        self.features = frozenset(raw.features) - offered.without
        self.info = {**raw.info, "adapter_type": offered.kind}

    def request_device_sync(
        self, *, required_features: list[str], required_limits: dict[str, int]
    ) -> Any:
        """A device with just these limits, which WebGPU then enforces."""
        assert not required_limits, "the adapter's own limits are asked for"
        refused = set(required_features) - self.features
        assert not refused, f"these features are not listed: {refused}"
        limits = dict(self.limits)
        if self._offered.units is not None:
            limits[_TAKEN_BY_EMULATION] = self._raw.limits[_TAKEN_BY_EMULATION]
        device = self._raw.request_device_sync(
            required_features=required_features, required_limits=limits
        )
        for name in self._offered.limits:
            assert device.limits[name] == limits[name], (name, device.limits[name])
        device._limits = {**device.limits, **self._offered.limits}
        return device


class LimitedBackend(WgpuNative):
    """wgpu with such an adapter alone."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        if offered.units is not None:
            self.features = {**WgpuNative.features, "subgroup-matrix": ()}  # type: ignore[misc]

    def adapters(self) -> list[Any]:
        """The one that is made up."""
        return [LimitedAdapter(list_adapters("wgpu")[0].raw, self._offered)]

    def compile(self, device: Any, code: str, label: str) -> Any:
        """A shader module; matrix units become plain WGSL."""
        return super().compile(device, emulated(code), label)

    def matrix_shapes(self, adapter: Any) -> tuple[MatrixShape, ...]:
        """What is emulated."""
        return () if self._offered.units is None else (self._offered.units,)


def limited_device(offered: Offered, **options: Any) -> Device:
    """A device of a GPU that offers just that."""
    backend = LimitedBackend(offered)
    (raw,) = backend.adapters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "qlora_wgpu.gpu.device.choose_adapter", lambda *given: FoundAdapter(raw, backend)
        )
        return Device(**options)
