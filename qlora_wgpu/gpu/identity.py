"""The identity of a device in caches: its GPU, driver, this version and its shaders."""

from __future__ import annotations

import hashlib
import json
from functools import cache

from qlora_wgpu.files import file_bytes
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.wgsl import shader_folder
from qlora_wgpu.limits import MIB
from qlora_wgpu.version import __version__


def identity(device: Device) -> str:
    info = device.gpu.info
    parts = [
        [device.name, info["description"], info["backend_type"], device.backend.name],
        __version__,
        shader_hash(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@cache
def shader_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(shader_folder().rglob("*.wgsl")):
        digest.update(file_bytes(path, MIB))
    return digest.hexdigest()
