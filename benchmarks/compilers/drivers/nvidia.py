"""NVK: NVIDIA's cards, by their chips or by the number that the kernel's driver has for them."""

from __future__ import annotations

from compilers.driver import Driver

_CHIPS = {"tu102": "162", "ga102": "172", "ad102": "192"}

DRIVER = Driver(
    name="NVK",
    file="nouveau",
    shim="libnouveau_noop_drm_shim.so",
    forced=lambda family: {"NOUVEAU_CHIPSET": _CHIPS.get(family, family)},
    family="ga102",
    figures={
        "registers": "Number of GPRs",
        "spilled": "Spills to memory",
        "filled": "Fills from memory",
        "scratch": "SLM size",
        "waves": "Max warps/SM",
        "instructions": "Instruction count",
        "cycles": "Static cycle count",
    },
)
