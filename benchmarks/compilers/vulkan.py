"""As much of Vulkan as compiling a compute shader and asking for its statistics takes.

Functions and structures are Vulkan's own, by their names without the prefix.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_float, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from dataclasses import dataclass
from typing import Any

_EXTENSION = b"VK_KHR_pipeline_executable_properties"
_VERSION = 1 << 22 | 3 << 12  # 1.3
_COMPUTE = 0x20
_CAPTURE_STATISTICS, _CAPTURE_TEXTS = 0x40, 0x80
_Text = c_char * 256
_Chained = (("type", c_uint32), ("next", pointer))


class _ApplicationInfo(Structure):
    _fields_ = (
        *_Chained, ("name", c_char_p), ("version", c_uint32), ("engine", c_char_p),
        ("engine_version", c_uint32), ("api_version", c_uint32),
    )  # fmt: skip


class _InstanceInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("application", POINTER(_ApplicationInfo)),
        ("layers", c_uint32), ("layer_names", pointer), ("extensions", c_uint32),
        ("extension_names", pointer),
    )  # fmt: skip


class _QueueInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("family", c_uint32), ("count", c_uint32),
        ("priorities", POINTER(c_float)),
    )  # fmt: skip


class _DeviceInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("queues", c_uint32), ("queue", POINTER(_QueueInfo)),
        ("layers", c_uint32), ("layer_names", pointer), ("extensions", c_uint32),
        ("extension_names", POINTER(c_char_p)), ("features", pointer),
    )  # fmt: skip


class _ExecutableFeatures(Structure):
    _fields_ = (*_Chained, ("executable_info", c_uint32))


class _SubgroupFeatures(Structure):
    _fields_ = (*_Chained, ("size_control", c_uint32), ("full", c_uint32))


class _Features(Structure):
    _fields_ = (*_Chained, ("features", c_uint32 * 55))


class _DriverProperties(Structure):
    _fields_ = (
        *_Chained, ("id", c_uint32), ("name", _Text), ("info", _Text), ("conformance", c_uint32),
    )  # fmt: skip


class _Properties(Structure):
    _fields_ = (
        *_Chained, ("api_version", c_uint32), ("driver_version", c_uint32), ("vendor", c_uint32),
        ("device", c_uint32), ("kind", c_uint32), ("name", _Text), ("rest", c_uint64 * 128),
    )  # fmt: skip


class _ModuleInfo(Structure):
    _fields_ = (*_Chained, ("flags", c_uint32), ("size", ctypes.c_size_t), ("code", c_char_p))


class _LayoutBinding(Structure):
    _fields_ = (
        ("binding", c_uint32), ("kind", c_uint32), ("count", c_uint32), ("stages", c_uint32),
        ("samplers", pointer),
    )  # fmt: skip


class _SetLayoutInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("count", c_uint32), ("bindings", POINTER(_LayoutBinding)),
    )  # fmt: skip


class _LayoutInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("count", c_uint32), ("sets", POINTER(c_uint64)),
        ("ranges", c_uint32), ("constants", pointer),
    )  # fmt: skip


class _StageInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("stage", c_uint32), ("module", c_uint64),
        ("name", c_char_p), ("specialization", pointer),
    )  # fmt: skip


class _SubgroupInfo(Structure):
    _fields_ = (*_Chained, ("size", c_uint32))


class _PipelineInfo(Structure):
    _fields_ = (
        *_Chained, ("flags", c_uint32), ("stage", _StageInfo), ("layout", c_uint64),
        ("base", c_uint64), ("base_index", ctypes.c_int32),
    )  # fmt: skip


class _ExecutableInfo(Structure):
    _fields_ = (*_Chained, ("pipeline", c_uint64), ("index", c_uint32))


class _PipelineHandle(Structure):
    _fields_ = (*_Chained, ("pipeline", c_uint64))


class _ExecutableProperties(Structure):
    _fields_ = (
        *_Chained, ("stages", c_uint32), ("name", _Text), ("description", _Text),
        ("subgroup_size", c_uint32),
    )  # fmt: skip


class _Statistic(Structure):
    _fields_ = (
        *_Chained, ("name", _Text), ("description", _Text), ("format", c_uint32),
        ("value", c_uint64),
    )  # fmt: skip


class _Representation(Structure):
    _fields_ = (
        *_Chained, ("name", _Text), ("description", _Text), ("is_text", c_uint32),
        ("size", ctypes.c_size_t), ("data", pointer),
    )  # fmt: skip


class VulkanError(Exception):
    """A call failed, or there is no such driver."""


@dataclass(frozen=True)
class Compiled:
    """What the driver tells of a pipeline.

    Attributes:
        subgroup_size: Invocations of a subgroup.
        statistics: The driver's figures by its own names.
    """

    subgroup_size: int
    statistics: dict[str, int]


class Compiler:
    """A device of the first driver that Vulkan's loader finds; nothing runs on it.

    Attributes:
        name: The device's name.
        driver: The driver's version, as it tells it.
    """

    def __init__(self) -> None:
        """Opens the device.

        Raises:
            VulkanError: If there is none.
        """
        try:
            self._vk = ctypes.CDLL("libvulkan.so.1")
        except OSError as err:
            raise VulkanError(f"Vulkan's loader is not there ({err})") from err
        physical = self._physical_device()
        driver = _DriverProperties(1000196000)
        properties = _Properties(1000059001, ctypes.addressof(driver))
        self._vk.vkGetPhysicalDeviceProperties2(physical, byref(properties))
        self.name, self.driver = properties.name.decode(), driver.info.decode()
        self._device = self._open(physical)

    def _physical_device(self) -> Any:
        application = _ApplicationInfo(0, None, b"compiler", 0, None, 0, _VERSION)
        info = _InstanceInfo(1, None, 0, ctypes.pointer(application), 0, None, 0, None)
        instance, count = pointer(), c_uint32(1)
        self._call("vkCreateInstance", byref(info), None, byref(instance))
        first = (pointer * 1)()
        # It tells of further devices by a code of its own, which is no error.
        self._vk.vkEnumeratePhysicalDevices(instance, byref(count), first)
        if not count.value:
            raise VulkanError("the driver offers no device")
        return pointer(first[0])

    def _open(self, physical: Any) -> Any:
        features = _Features(1000059000)
        self._vk.vkGetPhysicalDeviceFeatures2(physical, byref(features))
        wanted = _ExecutableFeatures(1000269000, None, 1)
        sizes = _SubgroupFeatures(1000225002, ctypes.addressof(wanted), 1, 1)
        features.next = ctypes.addressof(sizes)
        priority, names = c_float(1.0), (c_char_p * 1)(_EXTENSION)
        queue = _QueueInfo(2, None, 0, 0, 1, ctypes.pointer(priority))
        chain, device = ctypes.addressof(features), pointer()
        info = _DeviceInfo(3, chain, 0, 1, ctypes.pointer(queue), 0, None, 1, names, None)
        self._call("vkCreateDevice", physical, byref(info), None, byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        if result := getattr(self._vk, name)(*arguments):
            raise VulkanError(f"{name} failed with {result}")

    def _made(self, name: str, info: Structure) -> int:
        handle = c_uint64()
        self._call(name, self._device, byref(info), None, byref(handle))
        return handle.value

    def compile(
        self,
        code: bytes,
        entry: bytes,
        sets: dict[int, dict[int, int]],
        *,
        subgroup_size: int | None = None,
        texts: bool = False,
    ) -> int:
        """Compiles a module; returns the pipeline.

        Args:
            code: SPIR-V.
            entry: The entry point's name.
            sets: Types of descriptors by set and binding.
            subgroup_size: Invocations of a subgroup; the driver's choice by default.
            texts: Whether its code can be asked for afterwards.
        """
        module = self._made("vkCreateShaderModule", _ModuleInfo(16, None, 0, len(code), code))
        size = _SubgroupInfo(1000225001, None, subgroup_size or 0)
        chain = ctypes.addressof(size) if subgroup_size else None
        stage = _StageInfo(18, chain, 0, _COMPUTE, module, entry, None)
        flags = _CAPTURE_STATISTICS | (_CAPTURE_TEXTS if texts else 0)
        info = _PipelineInfo(29, None, flags, stage, self._layout(sets), 0, -1)
        pipeline = c_uint64()
        self._call(
            "vkCreateComputePipelines", self._device, c_uint64(0), 1, byref(info), None,
            byref(pipeline),
        )  # fmt: skip
        return pipeline.value

    def _layout(self, sets: dict[int, dict[int, int]]) -> int:
        layouts = []
        for index in range(max(sets, default=-1) + 1):
            bound = [(b, kind, 1, _COMPUTE, None) for b, kind in sets.get(index, {}).items()]
            bindings = (_LayoutBinding * len(bound))(*bound)
            info = _SetLayoutInfo(32, None, 0, len(bound), bindings)
            layouts.append(self._made("vkCreateDescriptorSetLayout", info))
        handles = (c_uint64 * len(layouts))(*layouts)
        return self._made(
            "vkCreatePipelineLayout", _LayoutInfo(30, None, 0, len(layouts), handles, 0, None)
        )

    def look_at(self, pipeline: int) -> Compiled:
        """The driver's figures."""
        (properties,) = self._all(
            "vkGetPipelineExecutablePropertiesKHR",
            _PipelineHandle(1000269001, None, pipeline),
            _ExecutableProperties,
            1000269002,
        )
        executable = _ExecutableInfo(1000269003, None, pipeline, 0)
        statistics = self._all(
            "vkGetPipelineExecutableStatisticsKHR", executable, _Statistic, 1000269004
        )
        return Compiled(
            properties.subgroup_size, {s.name.decode(): int(s.value) for s in statistics}
        )

    def texts(self, pipeline: int) -> dict[str, str]:
        """What the compiler made on its way, the processor's code last, by the driver's names."""
        name = "vkGetPipelineExecutableInternalRepresentationsKHR"
        executable = _ExecutableInfo(1000269003, None, pipeline, 0)
        empty = self._all(name, executable, _Representation, 1000269005)
        buffers = [ctypes.create_string_buffer(r.size) for r in empty]
        for representation, buffer in zip(empty, buffers, strict=True):
            representation.data = ctypes.addressof(buffer)
        count = c_uint32(len(empty))
        self._extension(name)(self._device, byref(executable), byref(count), empty)
        return {r.name.decode(): b.value.decode() for r, b in zip(empty, buffers, strict=True)}

    def _all(self, name: str, about: Structure, kind: type[Structure], number: int) -> Any:
        function, count = self._extension(name), c_uint32()
        function(self._device, byref(about), byref(count), None)
        rows = (kind * count.value)(*[(number,)] * count.value)
        function(self._device, byref(about), byref(count), rows)
        return rows

    def _extension(self, name: str) -> Any:
        self._vk.vkGetDeviceProcAddr.restype = pointer
        address = self._vk.vkGetDeviceProcAddr(self._device, name.encode())
        if not address:
            raise VulkanError(f"the driver has no {name}")
        return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(address)
