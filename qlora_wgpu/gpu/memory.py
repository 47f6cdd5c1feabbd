"""The memory of devices, which WebGPU does not report, and of the machine."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass

import psutil

from qlora_wgpu.files import file_text
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB
from qlora_wgpu.supervision.processes import container_limit, container_room

_VULKAN = {"linux": "libvulkan.so.1", "win32": "vulkan-1.dll"}
_INSTANCE_CREATE_INFO = 1  # VkStructureType
_NAME = 20  # offset of the name in VkPhysicalDeviceProperties, after five numbers
_HEAPS = 260  # offset of the heaps in VkPhysicalDeviceMemoryProperties, after 32 memory types
_DEVICE_LOCAL = 1
_API_1_1 = 1 << 22 | 1 << 12
_APPLICATION_INFO, _PROPERTIES_2, _BUDGET = 0, 1000059006, 1000237000  # VkStructureType
_MOST_HEAPS = 16
_RESERVE = 256 * MIB  # for the driver's programs, shaders and uploads
_SHARE = 0.95  # of free memory
_SHARED_SHARE = 0.75  # of memory shared with the processor
_MOST_GPUS = 16
SPARE_SHARE = 3
"""Copies only for speed may take one part in this many of the machine's or container's memory."""
_STATUS = "/proc/self/status"
_TAKEN = re.compile(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)


def memory_size(device: Device) -> int | None:
    """A GPU's own memory, or the machine's free memory for a software GPU; None if unknown."""
    if device.is_cpu:
        return available_bytes()
    own = _own_memory(device.name)
    if own is None and device.gpu.info["adapter_type"] != "DiscreteGPU":
        return _host_memory()  # shared with the host, as on Apple's
    return own


def room(device: Device) -> int | None:
    """Device memory that training may use by default, in bytes.

    That is a GPU's own memory, minus other programs' (if the driver reports it) and a reserve for
    the driver. None for a software GPU, whose memory is the host's, and if it is unknown.
    """
    if device.is_cpu:
        return None
    heap = _own_heap(device.name)
    if heap is None and device.gpu.info["adapter_type"] == "DiscreteGPU":
        return None
    if heap is None or device.gpu.info["adapter_type"] != "DiscreteGPU":
        whole = _host_memory() if heap is None else heap.nbytes
        return None if whole is None else int(_SHARED_SHARE * whole)
    return room_of(heap.free)


def room_of(free: int) -> int:
    return max(int(_SHARE * free) - _RESERVE, 1)


def available_bytes() -> int | None:
    """Host memory available without swapping; None if the system does not report it."""
    sizes = [size for size in (_unused(), container_room()) if size is not None]
    return min(sizes, default=None)


def machine_bytes() -> int | None:
    """All host memory that this process could ever have, free or not; None if unknown."""
    sizes = [size for size in (_host_memory(), container_limit()) if size is not None]
    return min(sizes, default=None)


def process_bytes() -> int | None:
    """Host memory of this process, without pages of files; None if unknown."""
    try:
        # Newer Mesa's software GPUs have device memory in unnamed files.
        kinds = _TAKEN.findall(file_text(_STATUS, MIB, "ascii"))
        if len(kinds) == 2:
            return 1024 * sum(map(int, kinds))
    except (OSError, ValueError):
        pass  # not Linux
    process = psutil.Process()
    try:
        taken = process.memory_info()
        if hasattr(taken, "shared"):  # an old Linux, which only reports the sum of both
            return int(taken.rss - taken.shared)
        return int(process.memory_full_info().uss)
    except (psutil.Error, OSError):
        return None


def _unused() -> int | None:
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError):
        return None


def _host_memory() -> int | None:
    try:
        return int(psutil.virtual_memory().total)
    except (psutil.Error, OSError):
        return None


@dataclass(frozen=True)
class _Heap:
    """A GPU's largest heap, and how much of it this process may take."""

    nbytes: int
    free: int


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    )


class _Budget(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("budget", ctypes.c_uint64 * _MOST_HEAPS),
        ("usage", ctypes.c_uint64 * _MOST_HEAPS),
    )


class _Properties2(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("properties", ctypes.c_uint8 * 1024),
    )


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


def _own_memory(name: str) -> int | None:
    heap = _own_heap(name)
    return None if heap is None else heap.nbytes


def _own_heap(name: str) -> _Heap | None:
    try:
        vulkan = ctypes.CDLL(_VULKAN.get(sys.platform, ""))
        instance = ctypes.c_void_p()
        application = _ApplicationInfo(kind=_APPLICATION_INFO, api_version=_API_1_1)
        pointer = ctypes.cast(ctypes.pointer(application), ctypes.c_void_p)
        info = _InstanceCreateInfo(kind=_INSTANCE_CREATE_INFO, application=pointer)
        if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint32(_MOST_GPUS)
        gpus = (ctypes.c_void_p * _MOST_GPUS)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), gpus)
        heaps = [
            _largest_heap(vulkan, gpu)
            for gpu in gpus[: count.value]
            if gpu is not None and _name_of(vulkan, gpu) == name
        ]
        largest = max(heaps, key=lambda heap: heap.nbytes, default=_Heap(0, 0))
        return largest if largest.nbytes else None
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _name_of(vulkan: ctypes.CDLL, gpu: int) -> str:
    properties = ctypes.create_string_buffer(4096)
    vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(gpu), properties)
    return properties.raw[_NAME : _NAME + 256].partition(b"\0")[0].decode(errors="replace")


def _largest_heap(vulkan: ctypes.CDLL, gpu: int) -> _Heap:
    budget = _Budget(kind=_BUDGET)  # stays 0 if the driver does not report it
    found = _Properties2(kind=_PROPERTIES_2, next=ctypes.addressof(budget))
    vulkan.vkGetPhysicalDeviceMemoryProperties2(ctypes.c_void_p(gpu), ctypes.byref(found))
    raw = bytes(found.properties)
    heaps = [_Heap(0, 0)]
    for index in range(int.from_bytes(raw[_HEAPS : _HEAPS + 4], sys.byteorder)):
        at = _HEAPS + 4 + 16 * index
        if raw[at + 8] & _DEVICE_LOCAL:
            nbytes = int.from_bytes(raw[at : at + 8], sys.byteorder)
            free = budget.budget[index] - budget.usage[index] if budget.budget[index] else nbytes
            heaps.append(_Heap(nbytes, min(max(free, 0), nbytes)))
    return max(heaps, key=lambda heap: heap.nbytes)
