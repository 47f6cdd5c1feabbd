"""What a GPU's compiler makes of the kernels of training, without a GPU: Mesa's for five vendors.

usage: python benchmarks/gpu_compiler.py [--json FILE] [--driver amd] [--family navi21]
           [--shim FILE] [--subgroup N] [--model NAME ...] [--products KIND ...] [--backend NAME]
           [--rank N] [--targets NAME ...] [--dropout P] [--dora] [--checkpointing]
           [--compute-dtype TYPE]
           [--only PREFIX ...] [--seq N] [--layers N] [--assembly FOLDER]

Every kernel of the models' training plans is made into SPIR-V by the WebGPU implementation on
Mesa's software GPU, and compiled for a family of a vendor's cards: registers and what of them
spills to scratch memory, workgroup memory (LDS), waves that run at once, and the compiler's own
estimates of cycles, which take every loop for a few turns. Linux, and the package
mesa-vulkan-drivers, are all it takes for AMD's (up to Mesa 25); others take a library that pretends
a card, from the package mesa-drm-shim, or as ``--shim`` names it. Kernels for matrix units are
among them with ``--backend dawn``, a Mesa whose software GPU has some (which passes for the
family's: 16 x 16 x 16 in f16, Intel's 8 x 8 x 16 or 8 x 16 x 16), and a family that has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from compilers.capture import Capture
from compilers.driver import Compiler, Outcome, driver_file, only
from compilers.drivers import DRIVERS
from compilers.plans import MODELS, profiles, trace
from compilers.published import STEPS, Step, step_of
from compilers.report import show, to_json

from qlora_wgpu.errors import ConfigError, DeviceError, QLoRAError
from qlora_wgpu.gpu.adapters import BACKENDS
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import gpu_profile, has_few_registers, hoists_loads
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.wgsl import Shader


class Front:
    """A WebGPU implementation on Mesa's software GPU, and the SPIR-V that it makes."""

    def __init__(self, backend: str, units: MatrixShape) -> None:
        os.environ.update(only(driver_file("lvp")))
        # With 256 bits Mesa 26's workgroups have 512 invocations at most; sampling asks for 1,024.
        os.environ.setdefault("LP_NATIVE_VECTOR_WIDTH", "512")
        self._backend = BACKENDS[backend]
        self._capture = Capture(units)

    @cached_property
    def _device(self) -> Device:
        """Opened when the first shader is there, or someone asks for matrix units."""
        self._capture.install(self._backend.module)
        device = Device(backend=self._backend.name)
        # A card's subgroups are not of the software GPU's size, which it would refuse to take.
        device.features -= {"subgroup-size-control"}
        device.params_at_once = False  # nor are a card's shaders begun as the software GPU's
        return device

    @property
    def has_matrix_units(self) -> bool:
        """Whether its shaders reach any here."""
        return (
            "subgroup-matrix" in self._backend.features
            and "subgroup-matrix" in self._device.features
        )

    def write(self, shader: Shader, file: Path) -> Outcome | None:
        """Writes a shader's SPIR-V; what became of it where it does not compile."""
        try:
            file.write_bytes(self._capture.spirv(self._device, shader))
        except DeviceError as err:
            return Outcome(None, f"no SPIR-V: {err}")
        return None


def compiled(
    front: Front, compiler: Compiler, shaders: Iterable[Shader], assembly: Path | None
) -> dict[str, Outcome]:
    """What becomes of each kernel, by its label."""
    outcomes: dict[str, Outcome] = {}
    modules: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, shader in enumerate(shaders):
            name = shader.path.removesuffix(".wgsl").replace("/", "-")
            module = (assembly or Path(folder)) / f"{number:03}-{name}.spv"
            module.with_suffix(".label").write_text(shader.label, encoding="utf-8")
            if failed := front.write(shader, module):
                outcomes[shader.label] = failed
            else:
                modules[shader.label] = module
        compiled = compiler.compile(list(modules.values()), assembly=assembly is not None)
        return outcomes | dict(zip(modules, compiled, strict=True))


def steps(args: argparse.Namespace) -> dict[str, Step]:
    """What is asked for, by its name, trained as is asked for beside that."""
    asked: dict[str, object] = {
        "r": args.rank, "lora_dropout": args.dropout, "use_dora": args.dora or None,
        "target_modules": args.targets,
    }  # fmt: skip
    lora = {name: value for name, value in asked.items() if value is not None}
    found = {name: step_of(name) for name in (STEPS if "all" in args.model else args.model)}
    return {
        name: replace(
            step,
            lora=step.lora | lora,
            compute_dtype=args.compute_dtype or step.compute_dtype,
            checkpointing=args.checkpointing or step.checkpointing,
        )
        for name, step in found.items()
    }


def run(args: argparse.Namespace) -> dict[str, object]:
    driver = DRIVERS[args.driver]
    compiler = Compiler(driver, args.family, args.shim, args.subgroup)
    front = Front(args.backend, compiler.units)
    vendor = {"vendor": args.driver}
    own = gpu_profile(
        None, few_registers=has_few_registers(vendor), hoists_loads=hoists_loads(vendor)
    )
    wanted = front.has_matrix_units or not {"matrix", "deep"}.isdisjoint(args.products)
    looked_at = profiles(own, args.products, compiler.units if wanted else None)
    plans = [
        trace(model, step, kind, profile, args.seq, args.layers)
        for model, step in steps(args).items()
        for kind, profile in looked_at.items()
    ]
    shaders = {
        label: shader
        for plan in plans
        for label, shader in plan.shaders.items()
        if label.startswith(tuple(args.only))
    }
    if not shaders:
        raise ConfigError(f"no kernel of these plans begins with {' or '.join(args.only)}")
    if args.assembly:
        args.assembly.mkdir(parents=True, exist_ok=True)
    outcomes = compiled(front, compiler, shaders.values(), args.assembly)
    return to_json(driver.name, compiler.family, plans, outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--driver", choices=DRIVERS, default="amd", help="the cards' vendor")
    parser.add_argument("--family", help="the cards, as the driver calls them")
    parser.add_argument("--shim", type=Path, help="the library that pretends a card to the driver")
    parser.add_argument("--subgroup", type=int, help="its size where it multiplies matrices")
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(MODELS),
        metavar="NAME",
        help=f"what is trained: {', '.join(STEPS)}, or all; a shape of `bench`, or a config.json",
    )
    parser.add_argument("--rank", type=int, help="of the adapter, in place of 8")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="modules that have one")
    parser.add_argument("--dropout", type=float, help="of the adapter")
    parser.add_argument("--dora", action="store_true", help="the adapter's kind")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--products",
        nargs="+",
        choices=("default", "register", "tiled", "matrix", "deep"),
        default=[],
        help="kinds of products; all if not given, but for deep tiles on matrix units",
    )
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="wgpu")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels that begin like this")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="in place of the models' own number")
    parser.add_argument("--assembly", type=Path, help="a folder for SPIR-V and the cards' code")
    args = parser.parse_args()
    try:
        report = run(args)
    except QLoRAError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    print(show(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["failure"] for row in report["kernels"]) else 0


if __name__ == "__main__":
    sys.exit(main())
