"""All kernels of GPUs on workgroup memory that begins with NaN instead of zero.

usage: python -m campaigns.poisoned_memory [--count CASES] [--seed S]

WGSL promises zeros, which drivers are told to do without where the implementation is Dawn. Every
self-check runs on shaders that fill their workgroup memory with NaN first; CASES of them, drawn by
S, if a count is given.
"""

from __future__ import annotations

import argparse
import random
import sys

from support.workgroup_memory import poisoned

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.selfcheck import results
from qlora_wgpu.selfcheck.runner import Runner


def poison(device: Device) -> None:
    """Lets a device compile shaders that fill their memory."""
    dialect = device.backend.dialect
    device.backend.dialect = (  # type: ignore[method-assign]
        lambda code, subgroup_size=0: dialect(poisoned(code), subgroup_size)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = Device()
    cases = results.cases_of(device, GPU_PROFILE, "bfloat16")
    random.Random(args.seed).shuffle(cases)
    poison(device)
    wrong = 0
    for case in cases[: args.count]:
        run = Runner(device, GPU_PROFILE, "bfloat16")
        case.function(run, *case.arguments)
        if not run.excess <= 1.0:
            wrong += 1
            print(f"WRONG {case.check}{case.arguments}: {run.excess} times what is allowed")
        else:
            print(f"right {case.check}{case.arguments}", flush=True)
    print(f"{len(cases[: args.count])} self-checks, {wrong} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
