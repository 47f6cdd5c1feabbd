"""ANV: Intel's GPUs, by Mesa's names of platforms (``dg2``, ``bmg``, ``tgl``, ``adl``).

A register is of 32 bytes, from ``lnl`` and ``bmg`` on of 64, and a thread has 128. An invocation of
a subgroup of 8, from then on of 16, has as many of 4 bytes; of one twice as wide, half of them.
"""

from __future__ import annotations

from compilers.driver import Driver
from qlora_wgpu.gpu.matrix import MatrixShape

# As the driver lists them from Battlemage and Lunar Lake on, and for Arc's Alchemist before.
_WIDE, _NARROW = MatrixShape(8, 16, 16, 16), MatrixShape(8, 8, 16, 8)

DRIVER = Driver(
    name="ANV",
    file="intel",
    shim="libintel_noop_drm_shim.so",
    forced=lambda family: {"INTEL_STUB_GPU_PLATFORM": family},
    family="dg2",
    units=lambda family: _NARROW if family.startswith("dg2") else _WIDE,
    origin="Mesa's sources have it, Debian's packages do not",
    figures={
        "registers": "GRF registers",
        "live_registers": "Max live registers",
        "spilled": "Spills",
        "filled": "Fills",
        "scratch": "Scratch Memory Size",
        "lds": "Workgroup Memory Size",
        "instructions": "Instructions",
        "sends": "SENDs",
        "cycles": "Cycles",
    },
)
