"""Mesa's drivers by the vendors of their cards."""

from __future__ import annotations

from compilers.driver import Driver
from compilers.drivers import amd, apple, intel, nvidia, qualcomm

DRIVERS: dict[str, Driver] = {
    "amd": amd.DRIVER,
    "intel": intel.DRIVER,
    "apple": apple.DRIVER,
    "nvidia": nvidia.DRIVER,
    "qualcomm": qualcomm.DRIVER,
}
