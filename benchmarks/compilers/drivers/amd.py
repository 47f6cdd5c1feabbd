"""RADV: AMD's cards, by the families' names (``navi21``, ``navi31``, ``gfx1201``)."""

from __future__ import annotations

from compilers.driver import Driver

DRIVER = Driver(
    name="RADV",
    file="radeon",
    shim="libamdgpu_noop_drm_shim.so",
    # The first is read up to Mesa 25, the second by the library.
    forced=lambda family: {"RADV_FORCE_FAMILY": family, "AMDGPU_GPU_ID": family},
    family="navi21",
    needs_shim=False,
    figures={
        "registers": "VGPRs",
        "spilled": "Spilled VGPRs",
        "scalar_registers": "SGPRs",
        "scalar_spilled": "Spilled SGPRs",
        "scratch": "Scratch size",
        "lds": "LDS size",
        "waves": "Subgroups per SIMD",
        "instructions": "Instructions",
        "latency": "Latency",
        "inverse_throughput": "Inverse Throughput",
    },
)
