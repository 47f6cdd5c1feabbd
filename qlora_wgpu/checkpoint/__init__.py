"""Model folders and their files, read; and files that are written atomically."""

from qlora_wgpu.checkpoint.atomic import (
    FileLock,
    append_line,
    atomic_folder,
    flush_file,
    recover,
    recover_all,
    remove,
    write_file,
)
from qlora_wgpu.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile, write_safetensors

__all__ = [
    "MANIFEST",
    "FileLock",
    "ModelFolder",
    "SafetensorsFile",
    "append_line",
    "atomic_folder",
    "flush_file",
    "read_manifest",
    "recover",
    "recover_all",
    "remove",
    "write_file",
    "write_manifest",
    "write_safetensors",
]
