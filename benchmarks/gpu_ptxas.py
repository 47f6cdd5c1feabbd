"""What NVIDIA's own compiler makes of the kernels, without a card and without its driver.

usage: python benchmarks/gpu_ptxas.py FOLDER [--arch sm_90] [--json FILE] [--only PREFIX ...]
           [--spirv-cross PROGRAM] [--slangc PROGRAM] [--nvcc PROGRAM] [--nvdisasm PROGRAM]

FOLDER has kernels as ``gpu_compiler.py --assembly FOLDER`` writes them: NAME.spv, and its label in
NAME.label. SPIRV-Cross (the package spirv-cross; Debian 12's knows no matrix units) writes them as
GLSL, Slang's compiler (the Python package slangtorch) that as CUDA, and nvcc compiles it for a
card: registers, what of them spills, workgroup memory, and the instructions of loops around
multiplications (nvdisasm, the Python package nvidia-cuda-nvdisasm). NVIDIA's driver for Vulkan has
a front of its own before the same part that gives out registers, so figures are near a card's, not
a card's.

Kernels that use subgroups otherwise than for matrix units are left out: Slang drops such calls.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda.matrices import Units
from cuda.sass import loops, main_turn

_SUBGROUPS = re.compile(r"\bsubgroup(?!Barrier)\w+\(")
_EMPTY = re.compile(r"(__device__ (?!void\b)\w+\s+(\w+)\([^)]*\)\s*\{)(?:\s|#line.*)*\}")
_BODIES = {"WorkgroupCount": "return make_uint3(gridDim.x, gridDim.y, gridDim.z);"}


def prepared(code: str) -> str:
    """SPIRV-Cross's GLSL as Slang takes it."""
    half = "#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require\n"
    code = re.sub(r"#if defined\(GL_AMD.*?#endif\n", half, code, flags=re.DOTALL)
    code = code.replace("#extension GL_EXT_spirv_intrinsics : require\n", "")
    code = re.sub(r"^spirv_instruction\(.*\n", "", code, flags=re.MULTILINE)
    for name in ("Clamp", "Min", "Max"):
        code = code.replace(f"spvN{name}", name.lower())
    code = code.replace("std140) uniform", "std430) readonly buffer")
    # Arrays of arrays that begin with zeros.
    code = re.sub(r"^(\w+ \w+(?:\[\d+\]){2,}) = \w+\[\]\[\]\((?:vec4|0\.0|[\[\](), ])*\);",
                  r"\1 = {};", code, flags=re.MULTILINE)  # fmt: skip
    # Loads and stores that are atomic alone are plain instructions; Slang drops them.
    code = re.sub(r"\batomicAdd\(([^(),]+), 0u\)", r"\1", code)
    code = re.sub(r"\batomicExchange\(([^(),]+), (.+)\);", r"\1 = \2;", code)
    # They begin as zero, which neither GLSL nor CUDA sees to.
    begins = re.findall(r"^shared uint (\w+)(?:\[(\d+)\])?;", code, flags=re.MULTILINE)
    zeros = [f"{n}[{i}u]" for n, count in begins for i in range(int(count or 0))]
    zeros += [n for n, count in begins if not count]
    stores = "".join(f"    {zero} = 0u;\n" for zero in zeros)
    code = code.replace("void main()\n{\n", f"void main()\n{{\n{stores}")
    code = code.replace("subgroupBarrier();", "AllMemoryBarrier();")
    code = code.replace("memoryBarrierShared();", "")
    return re.sub(r"(?<!\w)barrier\(\);", "GroupMemoryBarrierWithGroupSync();", code)


class Failure(Exception):
    """A tool did not do its part."""


def completed(code: str) -> str:
    """Slang's CUDA with bodies of functions that it left empty, which nvcc takes as never called.

    Raises:
        Failure: If one is not known.
    """

    def body(found: re.Match[str]) -> str:
        name = re.sub(r"_\d+$", "", found[2])
        if name not in _BODIES:
            raise Failure(f"Slang left {name} empty")
        return f"{found[1]}\n    {_BODIES[name]}\n}}"

    return _EMPTY.sub(body, code)


def called(*command: str | Path) -> str:
    made = subprocess.run(command, capture_output=True, check=False, encoding="utf-8")
    if made.returncode:
        wrong = [line for line in (made.stderr + made.stdout).splitlines() if "error" in line]
        raise Failure(f"{Path(command[0]).name}: {(wrong or ['failed'])[0][:200]}")
    return made.stdout + made.stderr


def label_of(spirv: Path) -> str:
    return spirv.with_suffix(".label").read_text(encoding="utf-8")


def compiled(spirv: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a kernel, or why there are none."""
    label = label_of(spirv)
    try:
        return {"kernel": label} | figures(spirv, folder / spirv.stem, args)
    except (Failure, ValueError) as err:
        return {"kernel": label, "failure": str(err)}


def figures(spirv: Path, stem: Path, args: argparse.Namespace) -> dict[str, Any]:
    glsl, cuda, cubin = (stem.with_suffix(end) for end in (".comp", ".cu", ".cubin"))
    called(args.spirv_cross, "-V", "--version", "460", spirv, "--stage", "comp", "--output", glsl)
    units = Units()
    code = prepared(units.as_functions(glsl.read_text(encoding="utf-8")))
    if _SUBGROUPS.search(code):
        raise Failure("uses subgroups")
    glsl.write_text(code, encoding="utf-8")
    called(args.slangc, "-ignore-capabilities", "-lang", "glsl", "-allow-glsl", "-target", "cuda",
           "-entry", "main", "-stage", "compute", "-o", cuda, glsl)  # fmt: skip
    code = units.as_instructions(completed(cuda.read_text(encoding="utf-8")))
    if "GroupMemoryBarrier" in glsl.read_text(encoding="utf-8") and "__syncthreads();" not in code:
        raise Failure("Slang dropped the barriers")
    threads = 1
    for size in re.findall(r"local_size_[xyz] = (\d+)", glsl.read_text(encoding="utf-8")):
        threads *= int(size)
    # Threads as the driver knows them, from the shader; exp and quotients as Vulkan has them.
    bound = f"__global__ void __launch_bounds__({threads}) main_0"
    cuda.write_text(code.replace("__global__ void main_0", bound), encoding="utf-8")
    flags = "-DSLANG_CUDA_ENABLE_HALF", "--use_fast_math", "-cubin", "-O3", "-w"
    arch = f"-arch={args.arch}"
    told = called(args.nvcc, *flags, arch, "--ptxas-options=-v", cuda, "-o", cubin)
    instructions, inner = loops(called(args.nvdisasm, "-c", cubin))
    return {
        "threads": threads,
        "registers": number(r"Used (\d+) registers", told),
        "spill_stores": number(r"(\d+) bytes spill stores", told),
        "spill_loads": number(r"(\d+) bytes spill loads", told),
        "stack": number(r"(\d+) bytes stack frame", told),
        "workgroup_bytes": number(r"(\d+) bytes smem", told),
        "instructions": instructions,
        "turn": asdict(main_turn(inner)),
        "loops": [asdict(loop) for loop in inner],
    }


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def show(row: dict[str, Any]) -> str:
    name = row["kernel"][:60]
    if "failure" in row:
        return f"{name:60}  {row['failure']}"
    turns = [
        f"{loop['instructions']} ({loop['counts'].get('HMMA') or loop['counts'].get('FFMA', 0)})"
        for loop in row["loops"]
    ]
    spilled = row["spill_stores"] + row["spill_loads"]
    return f"{name:60} {row['registers']:9} {spilled:8} {row['instructions']:7}  {', '.join(turns)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90", help="the card, as nvcc calls it")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels that begin like this")
    for program in ("spirv-cross", "slangc", "nvcc", "nvdisasm"):
        parser.add_argument(f"--{program}", default=program, help="where this program is")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.spv"))
    files = [file for file in files if label_of(file).startswith(tuple(args.only))]
    if not files:
        parser.error(f"{args.folder} has no such *.spv: gpu_compiler.py --assembly writes them")
    try:
        version = called(args.nvcc, "--version").splitlines()[-1]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            rows = list(pool.map(lambda file: compiled(file, Path(folder), args), files))
    except OSError as err:
        print(f"error: {err.filename} does not run ({err.strerror})", file=sys.stderr)
        return 2
    print(f"{args.arch}, {version}\n")
    print(f"{'kernel':60} registers  spilled  instr.  instructions (products) a turn")
    print("\n".join(map(show, rows)))
    if args.json:
        report = {"arch": args.arch, "compiler": version, "kernels": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
