"""wgpu-py on wgpu-native: the implementation that is always installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from qlora_wgpu.gpu.backend import Backend, Dispatch, checks_everything

_BOUNDS_CHECKS = 1  # WGPUShaderRuntimeChecks: bounds checks, but no loop limits


class WgpuNative(Backend):
    """wgpu-py; shaders are compiled by naga."""

    name: ClassVar[str] = "wgpu"
    package: ClassVar[str] = "wgpu"
    leaves_out: ClassVar[bool] = True
    install: ClassVar[str] = 'pip install "wgpu>=0.32,<0.33"'
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "timestamp-query": ("timestamp-query",),
        "shader-f16": ("shader-f16",),
        # "subgroups" is accepted as well, and enables nothing.
        "subgroups": ("subgroup", "subgroup-barrier"),
    }

    def load(self) -> Any:
        import wgpu
        from wgpu.backends import wgpu_native

        with suppress(AttributeError):  # private names, which another version may not have
            _parse_types_by_what_they_name(wgpu_native.ffi)
        return wgpu

    def adapters(self, apis: Sequence[str] = ()) -> list[Any]:
        if apis:
            names = {"D3D12": "DX12"}
            with suppress(RuntimeError):  # the program has already listed them
                self.module.backends.wgpu_native.extras.set_instance_extras(
                    backends=[names.get(api, api) for api in apis]
                )
        return super().adapters()

    def compile(self, device: Any, code: str, label: str) -> Any:
        """A shader module whose loops are trusted to end, unless all checks are on.

        naga adds a counter to untrusted loops, which drivers then cannot unroll.
        """
        if checks_everything():
            return super().compile(device, code, label)
        try:
            api = self.module.backends.wgpu_native._api
            ffi, create = api.ffi, api.libf.wgpuDeviceCreateShaderModuleTrusted
            source = api.new_struct_p("WGPUShaderSourceWGSL *", code=api.to_c_string_view(code))
            source[0].chain.next = ffi.NULL
            source[0].chain.sType = api.lib.WGPUSType_ShaderSourceWGSL
            descriptor = api.new_struct_p(
                "WGPUShaderModuleDescriptor *",
                nextInChain=ffi.cast("WGPUChainedStruct *", source),
                label=api.to_c_string_view(label),
            )
            make = api.GPUShaderModule
        except AttributeError:  # private names, which another version may not have
            return super().compile(device, code, label)
        return make(label, create(device._internal, descriptor, _BOUNDS_CHECKS), device)

    def record(self, compute_pass: Any, dispatches: Iterable[Dispatch]) -> None:
        """Encodes dispatches with wgpu-native's own functions.

        wgpu-py checks for an error after each call, which takes ten times as long as the call; the
        submit also reports errors of dispatches.
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
        """Nanoseconds of a tick, which are the driver's in wgpu-native."""
        try:
            library = self.module.backends.wgpu_native.lib
            return float(library.wgpuQueueGetTimestampPeriod(device.queue._internal))
        except AttributeError:  # a private call, which another version may not have
            return 1.0


def _parse_types_by_what_they_name(ffi: Any) -> None:
    """Lets cffi parse a type with only the declarations that it names, instead of all 440.

    Opening a device parses 45 types, which took most of a process's start.
    """
    parser = ffi._parser
    parse, declarations = type(parser).parse_type, parser._declarations

    def parse_type(text: str) -> Any:
        names = set(re.findall(r"\w+", text))
        parser._declarations = {
            key: what for key, what in declarations.items() if key.rsplit(" ", 1)[-1] in names
        }
        try:
            return parse(parser, text)
        finally:
            parser._declarations = declarations

    parser.parse_type = parse_type
