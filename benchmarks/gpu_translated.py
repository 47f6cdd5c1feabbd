"""What Direct3D's compilers make of the kernels, and whether naga writes them for Metal.

usage: python benchmarks/gpu_translated.py --naga FOLDER --libraries FOLDER [--json FILE]
           [--model NAME ...] [--compilers dxc fxc] [--only PREFIX ...] [--seconds S]

Every kernel of the models' training and generating plans goes through naga, wgpu's and Firefox's
translator, to HLSL and Metal's language, and HLSL on through DXC and FXC under Wine. That tells,
on Linux, what is refused, what is doubted and how long it takes; nothing is run, Metal's code is
not compiled, and kernels for matrix units, which are Dawn's alone, are not among them.

--naga is the npm package naga-wasm, unpacked; --libraries has d3dcompiler_47.dll and
dxcompiler.dll, as the npm package webgpu has them (dist/win32-x64). Debian's wine64 and
gcc-mingw-w64-x86-64 are needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from compilers.plans import profiles, trace
from compilers.published import STEPS
from direct3d.compilers import TARGETS, Outcome, build, compiled, translate

from qlora_wgpu.errors import ConfigError, QLoRAError
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.gpu.wgsl import Shader


def gathered(models: list[str], only: tuple[str, ...]) -> list[Shader]:
    """Each kernel of the models' plans once.

    Raises:
        ConfigError: If there is none.
    """
    found: dict[str, Shader] = {}
    for model in models:
        for kind, profile in profiles(GPU_PROFILE, [], matrix=False).items():
            found |= trace(model, STEPS[model], kind, profile, 1024, 2).shaders
    shaders = [shader for label, shader in found.items() if label.startswith(only)]
    if not shaders:
        raise ConfigError(f"no kernel of these plans begins with {' or '.join(only)}")
    return shaders


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    models = list(STEPS) if "all" in args.model else args.model
    shaders = {
        f"{number:04}": shader for number, shader in enumerate(gathered(models, tuple(args.only)))
    }
    for name, shader in shaders.items():
        (folder / f"{name}.wgsl").write_text(shader.code, encoding="utf-8")
    refused = translate(args.naga, folder, list(shaders))
    rows: list[dict[str, object]] = [
        {"kernel": shaders[name].label, "by": f"naga, {target}", "seconds": 0.0, "nbytes": 0,
         "errors": why.splitlines()[:1]}
        for name, targets in refused.items()
        for target, why in targets.items()
    ]  # fmt: skip
    if args.compilers:
        build(args.libraries, folder)
    for compiler in args.compilers:
        names = [name for name in shaders if TARGETS[compiler][1] not in refused.get(name, {})]
        for name, outcome in compiled(folder, compiler, names, args.seconds).items():
            rows.append({"kernel": shaders[name].label, "by": compiler, **asdict(outcome)})
            _show(shaders[name], compiler, outcome)
    print(f"{len(shaders)} kernels, {len(refused)} refused by naga")
    return rows


def _show(shader: Shader, compiler: str, outcome: Outcome) -> None:
    state = {0: "REFUSED", -1: "TOO LONG"}.get(outcome.nbytes, f"{outcome.nbytes} bytes")
    print(f"{compiler} {outcome.seconds:7.2f} s  {state:>14}  {shader.label[:90]}", flush=True)
    for line in outcome.errors[:3]:
        print(f"    {line[:160]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--naga", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, default=Path())
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--model", nargs="+", choices=(*STEPS, "all"), default=["llama-3.2-1b"])
    parser.add_argument("--compilers", nargs="*", choices=tuple(TARGETS), default=["dxc"])
    parser.add_argument("--only", nargs="+", default=[""], help="kernels that begin like this")
    parser.add_argument("--seconds", type=float, default=60.0, help="most for a kernel")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = run(args, Path(folder))
        except QLoRAError as err:
            print(f"error: {err}", file=sys.stderr)
            return 2
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["nbytes"] in (0, -1) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
