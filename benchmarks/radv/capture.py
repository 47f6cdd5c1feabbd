"""The SPIR-V that a WebGPU implementation makes of a shader, caught on its way to the driver.

Neither naga nor Tint gives it out. But both look the driver's functions up by name, by ``dlsym``
first, so that a stranger's function can stand before ``vkCreateShaderModule``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.wgsl import Shader
from radv.elf import replace_import

_Pointer, _Name = ctypes.c_void_p, ctypes.c_char_p
_Lookup = ctypes.CFUNCTYPE(_Pointer, _Pointer, _Name)
_CreateModule = ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, _Pointer, _Pointer, _Pointer)


class _ModuleInfo(ctypes.Structure):
    """VkShaderModuleCreateInfo."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", _Pointer),
        ("flags", ctypes.c_uint32),
        ("nbytes", ctypes.c_size_t),
        ("code", _Pointer),
    )


class Capture:
    """Sees every shader module that a process makes from now on."""

    def __init__(self) -> None:
        """Sees nothing yet."""
        self._newest: bytes | None = None
        self._real: dict[bytes, Any] = {}
        # C calls them for as long as the process lives.
        self._look_up = {
            b"vkGetInstanceProcAddr": _Lookup(self._instance_function),
            b"vkGetDeviceProcAddr": _Lookup(self._device_function),
        }
        self._create = _CreateModule(self._create_module)
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
        self._newest = None
        device.pipeline(shader)
        if self._newest is None:
            raise DeviceError(f"{shader.label}: no SPIR-V was seen on its way to the driver")
        return self._newest

    def _symbol(self, handle: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"dlsym"](handle, name))

    def _instance_function(self, instance: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"vkGetInstanceProcAddr"](instance, name))

    def _device_function(self, device: int | None, name: bytes) -> int | None:
        return self._instead(name, self._real[b"vkGetDeviceProcAddr"](device, name))

    def _instead(self, name: bytes, function: int | None) -> int | None:
        own: Any = self._create if name == b"vkCreateShaderModule" else self._look_up.get(name)
        if own is None or function is None:
            return function
        kind: Callable[[int], Any] = type(own)
        self._real[name] = kind(function)
        return _address(own)

    def _create_module(self, device: int, info: int, allocator: int | None, module: int) -> int:
        made = _ModuleInfo.from_address(info)
        self._newest = ctypes.string_at(made.code, made.nbytes)
        result: int = self._real[b"vkCreateShaderModule"](device, info, allocator, module)
        return result


def _address(function: Any) -> int:
    address = ctypes.cast(function, _Pointer).value
    assert address is not None
    return address
