"""Compiles SPIR-V modules and prints the driver's figures, a line of JSON for each.

usage: python compile_each.py SUBGROUP ASSEMBLY MODULE.spv ...

Some compilers die of one kernel: each is compiled by a process of its own, a copy of this one with
the driver loaded. SUBGROUP is the size of subgroups that multiply matrices; where ASSEMBLY is 1 and
not 0, the processor's code is written beside the module, as ``.s``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from compilers.spirv import interface, uses_matrix_units
from compilers.vulkan import Compiler, VulkanError

_SECONDS = 120  # for one kernel


def compile_one(compiler: Compiler, module: Path, subgroup: int, assembly: bool) -> None:
    """Compiles one; what is known is written at once, since the rest may fail."""
    code = module.read_bytes()
    described = (code, *interface(code))
    size = subgroup if uses_matrix_units(code) else None
    figures = asdict(compiler.look_at(compiler.compile(*described, subgroup_size=size)))
    module.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")
    if assembly:
        texts = compiler.texts(compiler.compile(*described, subgroup_size=size, texts=True))
        module.with_suffix(".s").write_text(list(texts.values())[-1], encoding="utf-8")


def in_a_copy(compiler: Compiler, module: Path, subgroup: int, assembly: bool) -> str:
    """Compiles one in a copy of this process; what went wrong, or nothing."""
    for suffix in (".json", ".error", ".s"):  # of an earlier run
        module.with_suffix(suffix).unlink(missing_ok=True)
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)
        try:
            compile_one(compiler, module, subgroup, assembly)
        except BaseException as err:
            module.with_suffix(".error").write_text(
                f"failed with {type(err).__name__}: {err}", encoding="utf-8"
            )
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        late = f"took more than {_SECONDS} s"
        return late if -code == signal.SIGALRM else f"died of signal {-code}"
    return module.with_suffix(".error").read_text(encoding="utf-8") if code else ""


def main() -> None:
    subgroup, assembly = int(sys.argv[1]), sys.argv[2] == "1"
    try:
        compiler = Compiler()
    except VulkanError as err:
        sys.exit(str(err))
    for module in map(Path, sys.argv[3:]):
        failure = in_a_copy(compiler, module, subgroup, assembly)
        figures = module.with_suffix(".json")
        answer = {
            "failure": failure,
            "driver": compiler.driver,
            "device": compiler.name,
            "figures": json.loads(figures.read_text(encoding="utf-8"))
            if figures.exists()
            else None,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
