"""Honeykrisp: Apple's M1. Registers are of 16 bits; an invocation has 256 of them at most."""

from __future__ import annotations

from compilers.driver import Driver

DRIVER = Driver(
    name="Honeykrisp",
    file="asahi",
    shim="libasahi_noop_drm_shim.so",
    forced=lambda family: {},  # the library pretends one GPU
    family="g13g",
    figures={
        "registers": "GPRs",
        "uniforms": "Uniforms",
        "spilled": "Spills",
        "filled": "Fills",
        "scratch": "Scratch",
        "threads": "Threads",
        "instructions": "Instructions",
    },
)
