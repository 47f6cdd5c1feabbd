"""The SPIR-V that a WebGPU implementation makes of a shader, caught on its way to the driver.

Neither naga nor Tint gives it out. But both look the driver's functions up by name, by ``dlsym``
first, so that a stranger's function can stand before ``vkCreateShaderModule``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from compilers.elf import replace_import
from compilers.spirv import empty_module, interface
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.wgsl import Shader

_Pointer, _Name = ctypes.c_void_p, ctypes.c_char_p
_Lookup = ctypes.CFUNCTYPE(_Pointer, _Pointer, _Name)
_CreateModule = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, _Pointer, _Pointer)
_GetProperties = ctypes.CFUNCTYPE(None, _Pointer, _Pointer)
_SHARED_MEMORY_AT = 296 + 216  # of a VkPhysicalDeviceProperties' maxComputeSharedMemorySize
_SHARED_MEMORY = 49_152  # bytes a workgroup, on NVIDIA's cards; AMD's have 64 KiB
_SUBGROUP_SIZES = 1000225000  # VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES
_ListMatrices = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, _Pointer)


class _ModuleInfo(ctypes.Structure):
    """VkShaderModuleCreateInfo."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", _Pointer),
        ("flags", ctypes.c_uint32),
        ("nbytes", ctypes.c_size_t),
        ("code", _Pointer),
    )


class _MatrixProperties(ctypes.Structure):
    """VkCooperativeMatrixPropertiesKHR; the rest are element types and what shares a product."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", _Pointer),
        ("m", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("rest", ctypes.c_uint32 * 6),
    )


class _SubgroupSizes(ctypes.Structure):
    """VkPhysicalDeviceSubgroupSizeControlProperties, as far as it is looked at."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", _Pointer),
        ("least", ctypes.c_uint32),
        ("most", ctypes.c_uint32),
    )


class Capture:
    """Catches shader modules on their way to the driver.

    To the WebGPU implementation, the driver's matrix units are those of a card, its subgroups may
    be as wide, and its workgroups have a card's memory.
    """

    def __init__(self, units: MatrixShape) -> None:
        """Sees nothing yet.

        Args:
            units: What the card's matrix units multiply, and the subgroup that does it.
        """
        self._units = units
        self._catches = False
        self._caught: bytes | None = None
        self._real: dict[bytes, Any] = {}
        # C calls them for as long as the process lives.
        self._look_up = {
            b"vkGetInstanceProcAddr": _Lookup(self._instance_function),
            b"vkGetDeviceProcAddr": _Lookup(self._device_function),
        }
        self._own: dict[bytes, Any] = {
            b"vkCreateShaderModule": _CreateModule(self._create_module),
            b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR": _ListMatrices(self._matrices),
        }
        self._own[b"vkGetPhysicalDeviceProperties"] = _GetProperties(self._limits)
        for name in (b"vkGetPhysicalDeviceProperties2", b"vkGetPhysicalDeviceProperties2KHR"):
            self._own[name] = _GetProperties(partial(self._properties, name))
        self._dlsym = _Lookup(self._symbol)
        self._real[b"dlsym"] = ctypes.CDLL(None).dlsym
        self._real[b"dlsym"].argtypes, self._real[b"dlsym"].restype = (_Pointer, _Name), _Pointer

    def install(self, package: ModuleType) -> None:
        """Lets a package's libraries find functions here; before they open a driver.

        Raises:
            DeviceError: If the package cannot be seen through in this way.
        """
        folder = Path(str(package.__file__)).parent
        import_module(f"{package.__name__}.backends.auto")  # it loads its libraries late
        try:
            replace_import(folder, "dlsym", _address(self._dlsym))
        except LookupError as err:
            raise DeviceError(f"the shaders of {package.__name__} cannot be caught: {err}") from err

    def spirv(self, device: Device, shader: Shader) -> bytes:
        """What a device's implementation makes of a shader that it has not compiled yet.

        Raises:
            DeviceError: If the shader cannot be compiled.
        """
        return self.caught(partial(device.pipeline, shader), shader.label)

    def caught(self, compiles: Callable[[], object], label: str) -> bytes:
        """What an implementation makes of a shader that a function compiles for the first time.

        Raises:
            DeviceError: If none was seen.
        """
        self._caught, self._catches = None, True
        try:
            compiles()
        finally:
            self._catches = False
        if self._caught is None:
            raise DeviceError(f"{label}: no SPIR-V was seen on its way to the driver")
        return self._caught

    def _symbol(self, handle: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"dlsym"](handle, name))

    def _instance_function(self, instance: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"vkGetInstanceProcAddr"](instance, name))

    def _device_function(self, device: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"vkGetDeviceProcAddr"](device, name))

    def _instead(self, name: bytes, function: int | None) -> int | None:
        own: Any = self._own.get(name) or self._look_up.get(name)
        if own is None or function is None:
            return function
        self._real[name] = type(own)(function)
        return _address(own)

    def _create_module(self, device: int, info: int, allocator: int | None, module: int) -> int:
        if self._catches:  # the driver, whose code nobody runs, gets a module that does nothing
            made = _ModuleInfo.from_address(info)
            self._caught = ctypes.string_at(made.code, made.nbytes)
            empty = empty_module(interface(self._caught)[0])
            kept = ctypes.create_string_buffer(empty)
            other = _ModuleInfo(made.type, None, 0, len(empty), ctypes.addressof(kept))
            info = ctypes.addressof(other)
        result: int = self._real[b"vkCreateShaderModule"](device, info, allocator, module)
        return result

    def _limits(self, physical: int, properties: int) -> None:
        self._real[b"vkGetPhysicalDeviceProperties"](physical, properties)
        shared = ctypes.c_uint32.from_address(properties + _SHARED_MEMORY_AT)
        shared.value = max(shared.value, _SHARED_MEMORY)

    def _properties(self, name: bytes, physical: int, properties: int) -> None:
        self._real[name](physical, properties)
        at: int | None = properties
        while at:
            sizes = _SubgroupSizes.from_address(at)
            if sizes.type == _SUBGROUP_SIZES:
                sizes.most = max(sizes.most, self._units.threads)
            at = sizes.next

    def _matrices(self, physical: int, count: int, rows: int | None) -> int:
        name = b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
        result: int = self._real[name](physical, count, rows)
        if rows is not None:
            listed = _MatrixProperties * ctypes.c_uint32.from_address(count).value
            for row in listed.from_address(rows):
                row.m, row.n, row.k = self._units.m, self._units.n, self._units.k
        return result


def _address(function: Any) -> int:
    address = ctypes.cast(function, _Pointer).value
    assert address is not None
    return address
