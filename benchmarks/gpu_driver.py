"""Where a card's Vulkan driver is, in containers that do not say so.

usage: python benchmarks/gpu_driver.py

Prints the shell's lines after which Vulkan lists a card, and to stderr what was tried. A driver's
library may be there without the JSON file by which Vulkan's loader finds it, with one at a place
where the loader does not look, or hidden behind a software GPU's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOTS = tuple(map(Path, ("/usr/local", "/opt", "/usr/share", "/etc", "/usr/lib", "/run")))
_JSON, _EGL_JSON = "nvidia_icd", "10_nvidia.json"
_LIBRARIES = ("libGLX_nvidia.so.0", "libEGL_nvidia.so.0")  # the second does without X11
_SKIPPED = ("site-packages", "dist-packages", "python3", "node_modules", "doc", "locale")
_SOFTWARE = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU
_SECONDS = 60.0
_DEEPEST = 8


@dataclass(frozen=True)
class Tried:
    """An environment, and what Vulkan lists in it.

    Attributes:
        environment: Beside this process's.
        cards: Names of GPUs that are none of software.
        words: What the loader says, or what else is listed.
    """

    environment: Mapping[str, str]
    cards: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"{shown or 'as it is'}: {', '.join(self.cards) or 'no card'} {self.words}".strip()


def find_driver(roots: Iterable[Path] = ROOTS, folder: Path | None = None) -> list[Tried]:
    """What was tried, until an environment lists a card; that one is the last.

    Args:
        roots: Where drivers are looked for.
        folder: Where a driver's JSON file is written that is not there.
    """
    tried = [_look({})]
    if not tried[0].cards:
        for environment in _environments(list(roots), folder or Path(tempfile.gettempdir())):
            tried.append(_look(environment))
            if tried[-1].cards:
                break
    return tried


def _environments(roots: list[Path], folder: Path) -> Iterator[dict[str, str]]:
    """Files of the driver's own first, then files that are written for its libraries."""
    found = list(_files(roots))
    egl = [path for path in found if path.name == _EGL_JSON]
    libraries = [p for name in _LIBRARIES for p in found if p.name == name]
    beside = {"__EGL_VENDOR_LIBRARY_FILENAMES": str(egl[0])} if egl else {}
    if libraries:  # the JSON file names it without its folder
        paths = [str(libraries[0].parent), os.environ.get("LD_LIBRARY_PATH", "")]
        beside["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    for path in found:
        if path.name.startswith(_JSON) and path.suffix == ".json":
            yield {"VK_DRIVER_FILES": str(path), **beside}
    for number, library in enumerate(libraries):
        path = folder / f"nvidia_icd_{number}.json"
        path.write_text(json.dumps({
            "file_format_version": "1.0.1",
            "ICD": {"library_path": str(library), "api_version": "1.3.0"},
        }), encoding="utf-8")  # fmt: skip
        yield {"VK_DRIVER_FILES": str(path), **beside}


def _files(roots: Iterable[Path]) -> Iterator[Path]:
    """A driver's files, the nearest to each root first."""
    names = (*_LIBRARIES, _EGL_JSON)
    for root in roots:
        for at, folders, files in os.walk(root):
            deep = len(Path(at).relative_to(root).parts) >= _DEEPEST
            folders[:] = [] if deep else sorted(f for f in folders if not f.startswith(_SKIPPED))
            for name in sorted(files):
                if name in names or name.startswith(_JSON):
                    yield Path(at, name)


def _look(environment: Mapping[str, str]) -> Tried:
    """Asks Vulkan in a process of its own, since drivers crash."""
    command = [sys.executable, str(Path(__file__)), "--list"]
    whole = {**os.environ, "VK_LOADER_DEBUG": "error", **environment}
    try:
        done = subprocess.run(
            command, env=whole, capture_output=True, errors="replace", timeout=_SECONDS,
            check=False, encoding="utf-8",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Tried(environment, (), f"(no answer in {_SECONDS:.0f} s)")
    said = " | ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    try:
        devices = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Tried(environment, (), f"(code {done.returncode}: {said[-500:]})")
    cards = tuple(name for kind, name in devices if kind != _SOFTWARE)
    others = ", ".join(name for kind, name in devices if kind == _SOFTWARE)
    words = "; ".join(filter(None, (f"software: {others}" if others else "", said[-500:])))
    return Tried(environment, cards, f"({words})" if words and not cards else "")


def list_devices() -> list[tuple[int, str]]:
    """Kinds and names of what Vulkan lists.

    Raises:
        OSError: If its loader is not there.
        RuntimeError: If it or a driver fails.
    """
    vulkan = ctypes.CDLL("libvulkan.so.1")

    class Create(ctypes.Structure):
        _fields_ = (
            ("kind", ctypes.c_uint32), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32),
            ("application", ctypes.c_void_p), ("layers", ctypes.c_uint32),
            ("layer_names", ctypes.c_void_p), ("extensions", ctypes.c_uint32),
            ("extension_names", ctypes.c_void_p),
        )  # fmt: skip

    create, instance, count = Create(kind=1), ctypes.c_void_p(), ctypes.c_uint32()
    _check(vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)))
    _check(vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None))
    devices = (ctypes.c_void_p * count.value)()
    _check(vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices))
    listed = []
    for device in devices[: count.value]:
        properties = ctypes.create_string_buffer(4096)
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), properties)
        kind = int.from_bytes(properties.raw[16:20], sys.byteorder)
        name = properties.raw[20:276].split(b"\0")[0].decode(errors="replace")
        listed.append((kind, name))
    return listed


def _check(code: int) -> None:
    if code < 0:
        raise RuntimeError(f"Vulkan's error {code}")


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        print(json.dumps(list_devices()))
        return
    tried = find_driver()
    print("\n".join(map(str, tried)), file=sys.stderr)
    if tried[-1].cards:
        for name, value in tried[-1].environment.items():
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
