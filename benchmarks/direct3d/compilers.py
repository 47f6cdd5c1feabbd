"""naga by Node, and Direct3D's compilers FXC and DXC by Wine, on a folder of shaders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qlora_wgpu.errors import ConfigError

_HERE = Path(__file__).parent
_LIBRARIES = ("d3dcompiler_47.dll", "dxcompiler.dll")
# FXC is told of shader model 5.1, DXC of 6.0, which has what our kernels need.
TARGETS = {"fxc": ("cs_5_1", "sm51"), "dxc": ("cs_6_0", "sm60")}


@dataclass(frozen=True)
class Outcome:
    """What became of a shader.

    Attributes:
        seconds: Of the processor, for compiling it.
        nbytes: Of code; 0 if it is refused, -1 if it took too long.
        errors: The compiler's lines about what is wrong, or about what it doubts.
    """

    seconds: float
    nbytes: int
    errors: tuple[str, ...] = ()


def translate(package: Path, folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """What naga refuses to translate, by name and target; files stand beside the shaders.

    Raises:
        ConfigError: If naga does not run.
    """
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
    command = ["node", str(_HERE / "naga.mjs"), str(package), str(folder)]
    made = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    if made.returncode:
        raise ConfigError(f"naga does not run ({made.stderr.strip()[-300:]}): npm pack naga-wasm")
    refused: dict[str, dict[str, str]] = json.loads(made.stdout)
    return refused


def build(libraries: Path, folder: Path) -> None:
    """Puts the program and the libraries of Direct3D's compilers into a folder.

    Raises:
        ConfigError: If one is missing.
    """
    for name in _LIBRARIES:
        if not (libraries / name).is_file():
            raise ConfigError(f"{libraries} has no {name}: npm pack webgpu, dist/win32-x64")
        shutil.copy(libraries / name, folder)
    program = ["x86_64-w64-mingw32-gcc", "-O1", str(_HERE / "compile.c"), "-o", "compile.exe"]
    for tool in (program[0], "wine"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is missing: apt-get install wine64 gcc-mingw-w64-x86-64")
    subprocess.run(program, cwd=folder, check=True)


def compiled(folder: Path, compiler: str, names: list[str], seconds: float) -> dict[str, Outcome]:
    """What a compiler makes of each shader, given up after so many seconds of the processor."""
    target, suffix = TARGETS[compiler]
    environment = os.environ | {
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "d3dcompiler_47=n;dxcompiler=n",
    }
    outcomes: dict[str, Outcome] = {}
    while left := [name for name in names if name not in outcomes]:
        lines = [f"{compiler} {target} {name}.{suffix} {name}.{compiler}\n" for name in left]
        (folder / "list.txt").write_text("".join(lines), encoding="utf-8")
        made = subprocess.run(
            ["wine", "compile.exe", "list.txt", str(seconds)],
            cwd=folder, env=environment, capture_output=True, check=False,
            encoding="utf-8",
        )  # fmt: skip
        if not made.stdout and made.returncode < 0:
            raise ConfigError(f"wine crashes: {made.stderr.strip()[-300:]}")
        known = len(outcomes)
        for line in made.stdout.splitlines():
            took, nbytes, result = line.split()
            name = result.removesuffix(f".{compiler}")
            outcomes[name] = Outcome(float(took), int(nbytes), _complaints(folder / result))
        if len(outcomes) == known:  # the compiler itself ended
            outcomes[left[0]] = Outcome(0.0, 0, ("the compiler crashed",))
    return outcomes


def _complaints(file: Path) -> tuple[str, ...]:
    """Errors, and warnings that tell of other results; none of style or of what is unrolled."""
    if not file.is_file():
        return ()
    lines = file.read_bytes().decode(errors="replace").replace("\0", "").splitlines()
    doubts = ("error", "uninitialized", "race condition", "precision", "NaN", "infinity")
    return tuple(line for line in lines if any(doubt in line for doubt in doubts))
