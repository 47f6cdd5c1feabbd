"""wgpu-py on wgpu-native: the implementation that is always installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from qlora_wgpu.gpu.backend import Backend


class WgpuNative(Backend):
    """wgpu-py; shaders are compiled by naga."""

    name: ClassVar[str] = "wgpu"
    package: ClassVar[str] = "wgpu"
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "timestamp-query": ("timestamp-query",),
        "shader-f16": ("shader-f16",),
        # "subgroups" is accepted as well, and enables nothing.
        "subgroups": ("subgroup", "subgroup-barrier"),
    }

    def load(self) -> Any:
        """Imports wgpu."""
        import wgpu

        return wgpu

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds of a tick, which wgpu-native leaves as the driver counts it."""
        try:
            library = self.module.backends.wgpu_native.lib
            return float(library.wgpuQueueGetTimestampPeriod(device.queue._internal))
        except AttributeError:  # a private call, which another version may not have
            return 1.0
