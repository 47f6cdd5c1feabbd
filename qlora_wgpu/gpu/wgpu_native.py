"""wgpu-py on wgpu-native: the implementation that is always installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from qlora_wgpu.gpu.backend import Backend, Dispatch


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

    def record(self, compute_pass: Any, dispatches: Iterable[Dispatch]) -> None:
        """Encodes dispatches by wgpu-native's own functions.

        wgpu-py looks for an error after each call, which takes ten times as long as the call;
        what is wrong with a dispatch is told by the submit as well.
        """
        try:
            native = self.module.backends.wgpu_native
            set_pipeline = native.lib.wgpuComputePassEncoderSetPipeline
            set_bind_group = native.lib.wgpuComputePassEncoderSetBindGroup
            dispatch = native.lib.wgpuComputePassEncoderDispatchWorkgroups
            handle, null = compute_pass._internal, native.ffi.NULL
            handles = [(p._internal, g._internal, w) for p, g, w in dispatches]
        except AttributeError:  # private names, which another version may not have
            super().record(compute_pass, dispatches)
            return
        current = None
        for pipeline, group, workgroups in handles:
            if pipeline is not current:
                set_pipeline(handle, pipeline)
                current = pipeline
            set_bind_group(handle, 0, group, 0, null)
            dispatch(handle, *workgroups)

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds of a tick, which wgpu-native leaves as the driver counts it."""
        try:
            library = self.module.backends.wgpu_native.lib
            return float(library.wgpuQueueGetTimestampPeriod(device.queue._internal))
        except AttributeError:  # a private call, which another version may not have
            return 1.0
