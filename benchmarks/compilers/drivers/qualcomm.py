"""Turnip: Qualcomm's Adreno, by number (``630``, ``660``, ``740``).

Registers are vectors of four numbers.
"""

from __future__ import annotations

from compilers.driver import Driver

DRIVER = Driver(
    name="Turnip",
    file="freedreno",
    shim="libfreedreno_noop_drm_shim.so",
    forced=lambda family: {"FD_GPU_ID": family},
    family="630",
    figures={
        "registers": "Registers used",
        "spilled": "STP Count",
        "filled": "LDP Count",
        "waves": "Max Waves Per Core",
        "instructions": "Instruction Count",
    },
)
