"""Finding Mesa's drivers, and asking RADV about kernels, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import DeviceError
from radv.spirv import barriers

_FOLDERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_SHIMS = tuple(f"{at}/libamdgpu_noop_drm_shim.so" for at in ("lib", "lib64", "lib/*"))
_SCRIPT = Path(__file__).with_name("compile_each.py")
# Our names for RADV's.
_FIGURES = {
    "registers": "VGPRs",
    "spilled": "Spilled VGPRs",
    "scalar_registers": "SGPRs",
    "scalar_spilled": "Spilled SGPRs",
    "scratch": "Scratch size",
    "lds": "LDS size",
    "waves": "Subgroups per SIMD",
    "instructions": "Instructions",
    "latency": "Latency",
    "inverse_throughput": "Inverse Throughput",
}


@dataclass(frozen=True)
class Outcome:
    """What became of a kernel.

    Attributes:
        figures: RADV's figures by our names; None where it could not be compiled.
        failure: Why it could not, or its code could not be written.
        driver: The driver's version, where it lived to tell.
        device: What it compiled for.
    """

    figures: dict[str, int] | None
    failure: str = ""
    driver: str = ""
    device: str = ""


def driver_file(driver: str) -> Path:
    """The loader's description of one of Mesa's drivers, ``"radeon"`` or ``"lvp"``.

    Raises:
        DeviceError: If it is not installed.
    """
    for folder in _FOLDERS:
        for file in sorted(Path(folder).glob(f"{driver}_icd*.json")):
            return file
    raise DeviceError(
        f"Mesa's Vulkan driver {driver!r} is not installed: apt-get install mesa-vulkan-drivers"
    )


def only(file: Path) -> dict[str, str]:
    """Environment variables that let Vulkan's loader see one driver alone."""
    return {"VK_ICD_FILENAMES": str(file), "VK_DRIVER_FILES": str(file)}


class Radv:
    """Mesa's compiler for a family of AMD's cards."""

    def __init__(self, family: str) -> None:
        """Looks for the driver.

        Args:
            family: Such as ``"navi21"``.

        Raises:
            DeviceError: If it is not installed.
        """
        self._family = family
        self._environment: Mapping[str, str] = {
            **os.environ,
            **only(driver_file("radeon")),
            **_without_card(family),
            "MESA_SHADER_CACHE_DISABLE": "true",
        }

    def compile(self, modules: Sequence[Path], *, assembly: bool = False) -> list[Outcome]:
        """Compiles modules.

        Args:
            modules: Their files.
            assembly: Whether the processor's code is written beside them, as ``.s``.

        Raises:
            DeviceError: If the driver offers no such cards.
        """
        command = [sys.executable, str(_SCRIPT), *(["--assembly"] if assembly else [])]
        child = subprocess.run(
            [*command, *map(str, modules)], env=self._environment, capture_output=True, text=True
        )
        answers = [json.loads(line) for line in child.stdout.splitlines()]
        if len(answers) < len(modules):
            said = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            raise DeviceError(
                f"RADV compiles nothing for {self._family} ({said}): choose a family that this "
                "Mesa knows; Mesa 26 and later also want the package mesa-drm-shim"
            )
        return [_outcome(*pair) for pair in zip(modules, answers, strict=True)]


def _without_card(family: str) -> dict[str, str]:
    """Environment variables that let RADV compile for cards that are not there.

    Up to Mesa 25 it takes a family by its name; later, it sees a card that a library pretends.
    """
    forced = {"RADV_FORCE_FAMILY": family, "AMDGPU_GPU_ID": family}
    if file := next((str(f) for shim in _SHIMS for f in Path("/usr").glob(shim)), None):
        forced["LD_PRELOAD"] = " ".join(filter(None, [file, os.environ.get("LD_PRELOAD")]))
    return forced


def _outcome(module: Path, answer: Mapping[str, Any]) -> Outcome:
    figures = answer["figures"]
    if figures is not None:
        statistics = figures["statistics"]
        figures = {name: int(statistics[own]) for name, own in _FIGURES.items()} | {
            "subgroup_size": int(figures["subgroup_size"]),
            "barriers": barriers(module.read_bytes()),
        }
    return Outcome(figures, answer["failure"], answer["driver"], answer["device"])
