"""Finding Mesa's drivers, and asking one about kernels, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compilers.spirv import barriers
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.matrix import MatrixShape

_FOLDERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_LIBRARIES = ("lib", "lib64", "lib/*")  # in /usr
UNITS = MatrixShape(16, 16, 16, 32)  # AMD's and NVIDIA's
_SCRIPT = Path(__file__).with_name("compile_each.py")


@dataclass(frozen=True)
class Driver:
    """One of Mesa's drivers.

    Attributes:
        name: What Mesa calls it.
        file: What the loader's description of it begins with.
        shim: The library that pretends a card to it.
        forced: Environment variables that choose a family of cards.
        family: The family where none is asked for.
        figures: The driver's names of figures by ours; a version may lack some.
        needs_shim: Whether it compiles nothing without that library.
        origin: Where the library comes from.
        units: What a family's matrix units multiply, by the smallest subgroup that does.
    """

    name: str
    file: str
    shim: str
    forced: Callable[[str], Mapping[str, str]]
    family: str
    figures: Mapping[str, str]
    needs_shim: bool = True
    origin: str = "the package mesa-drm-shim has it"
    units: Callable[[str], MatrixShape] = lambda family: UNITS


@dataclass(frozen=True)
class Outcome:
    """What became of a kernel.

    Attributes:
        figures: The driver's figures by our names; None where it could not be compiled.
        failure: Why it could not, or its code could not be written.
        driver: The driver's version, where it lived to tell.
        device: What it compiled for.
    """

    figures: dict[str, int] | None
    failure: str = ""
    driver: str = ""
    device: str = ""


def driver_file(driver: str) -> Path:
    """The loader's description of one of Mesa's drivers, such as ``"radeon"`` or ``"lvp"``.

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


class Compiler:
    """A driver's compiler for a family of cards that are not there.

    Attributes:
        family: The family.
        units: What its matrix units multiply.
    """

    def __init__(
        self,
        driver: Driver,
        family: str | None = None,
        shim: Path | None = None,
        subgroup: int | None = None,
    ) -> None:
        """Looks for the driver.

        Args:
            driver: The driver.
            family: Such as ``"navi21"``; the driver's own choice by default.
            shim: The library that pretends the card; one that is installed by default.
            subgroup: Invocations that multiply matrices together; the family's by default.

        Raises:
            DeviceError: If the driver, or a library that it needs, is not there.
        """
        self.family = family or driver.family
        units = driver.units(self.family)
        self.units = replace(units, threads=subgroup) if subgroup else units
        self._driver = driver
        self._environment: Mapping[str, str] = {
            **os.environ,
            **only(driver_file(driver.file)),
            **driver.forced(self.family),
            **_preloaded(driver, shim),
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
        command = [sys.executable, str(_SCRIPT), str(self.units.threads), str(int(assembly))]
        child = subprocess.run(
            [*command, *map(str, modules)],
            env=self._environment,
            capture_output=True,
            encoding="utf-8",
        )
        answers = [json.loads(line) for line in child.stdout.splitlines()]
        if len(answers) < len(modules):
            said = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            raise DeviceError(
                f"{self._driver.name} compiles nothing for {self.family} ({said}): choose a "
                f"family that this Mesa knows; Mesa 26 and later want {self._driver.shim}, too: "
                f"{self._driver.origin}"
            )
        return [self._outcome(*pair) for pair in zip(modules, answers, strict=True)]

    def _outcome(self, module: Path, answer: Mapping[str, Any]) -> Outcome:
        figures = answer["figures"]
        if figures is not None:
            told = figures["statistics"]
            named = self._driver.figures.items()
            figures = {name: int(told[own]) for name, own in named if own in told}
            figures["subgroup_size"] = int(answer["figures"]["subgroup_size"])
            figures["barriers"] = barriers(module.read_bytes())
        failure = answer["failure"] and f"{self._driver.name} {answer['failure']}"
        return Outcome(figures, failure, answer["driver"], answer["device"])


def _preloaded(driver: Driver, shim: Path | None) -> dict[str, str]:
    """The environment variable that lets a driver see a card that a library pretends.

    RADV needs none up to Mesa 25: it takes a family by its name.
    """
    if shim is not None and not shim.is_file():
        raise DeviceError(f"{shim} is not there: --shim names the file {driver.shim}")
    named = (f for at in _LIBRARIES for f in Path("/usr").glob(f"{at}/{driver.shim}"))
    file = shim or next(named, None)
    if file is None:
        if driver.needs_shim:
            raise DeviceError(
                f"{driver.name} compiles nothing without {driver.shim}: {driver.origin}; --shim "
                "names the file"
            )
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, [str(file), os.environ.get("LD_PRELOAD")]))}
