"""The memory that a device has, which WebGPU does not tell."""

from __future__ import annotations

import ctypes
import os
import sys

from qlora_wgpu.files import file_text
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB

_VULKAN = {"linux": "libvulkan.so.1", "win32": "vulkan-1.dll"}
_INSTANCE_CREATE_INFO = 1  # VkStructureType
_NAME = 20  # where VkPhysicalDeviceProperties has the name, after five numbers
_HEAPS = 260  # where VkPhysicalDeviceMemoryProperties has the heaps, after 32 kinds of memory
_DEVICE_LOCAL = 1
_MOST_GPUS = 16


def memory_size(device: Device) -> int | None:
    """Bytes that a device can have: a card's own, or for a software GPU the machine's free ones.

    None where nobody tells.
    """
    if device.is_cpu:
        return available_bytes()
    own = _own_memory(device.name)
    if own is None and device.gpu.info["adapter_type"] != "DiscreteGPU":
        return _host_memory()  # which it shares, as Apple's do
    return own


def available_bytes() -> int | None:
    """Host memory that can be taken without swapping; None where the system does not tell."""
    sizes = [size for size in (_unused(), _container_room()) if size is not None]
    return min(sizes, default=None)


def _unused() -> int | None:
    try:
        for line in file_text("/proc/meminfo", MIB, "ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _container_room() -> int | None:
    """What the control group of a container leaves; None without a limit."""
    try:
        limit, used = (
            file_text(f"/sys/fs/cgroup/memory.{name}", MIB, "ascii") for name in ("max", "current")
        )
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return None


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


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
    """A card's largest heap, as Vulkan tells it of the one that has this name."""
    try:
        vulkan = ctypes.CDLL(_VULKAN.get(sys.platform, ""))
        instance = ctypes.c_void_p()
        info = _InstanceCreateInfo(kind=_INSTANCE_CREATE_INFO)
        if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint32(_MOST_GPUS)
        gpus = (ctypes.c_void_p * _MOST_GPUS)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), gpus)
        sizes = [
            _largest_heap(vulkan, gpu)
            for gpu in gpus[: count.value]
            if gpu is not None and _name_of(vulkan, gpu) == name
        ]
        return max(sizes, default=0) or None
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _name_of(vulkan: ctypes.CDLL, gpu: int) -> str:
    properties = ctypes.create_string_buffer(4096)
    vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(gpu), properties)
    return properties.raw[_NAME : _NAME + 256].partition(b"\0")[0].decode(errors="replace")


def _largest_heap(vulkan: ctypes.CDLL, gpu: int) -> int:
    """Bytes of the largest heap that is the card's own."""
    properties = ctypes.create_string_buffer(4096)
    vulkan.vkGetPhysicalDeviceMemoryProperties(ctypes.c_void_p(gpu), properties)
    raw = properties.raw
    sizes = [0]
    for index in range(int.from_bytes(raw[_HEAPS : _HEAPS + 4], sys.byteorder)):
        at = _HEAPS + 4 + 16 * index
        if raw[at + 8] & _DEVICE_LOCAL:
            sizes.append(int.from_bytes(raw[at : at + 8], sys.byteorder))
    return max(sizes)
