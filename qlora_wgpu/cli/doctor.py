"""``doctor``: what this machine offers, and what to do where it offers nothing."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.adapters import (
    INSTALL_HINT,
    FoundAdapter,
    installed_backends,
    list_adapters,
)
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.tuning.cache import choices_for

_SHOWN_FEATURES = ("shader-f16", "subgroups", "timestamp-query")


@click.command()
def doctor() -> None:
    """Show the GPU adapters found, their driver, limits and features.

    Exits with code 2, and says what to install, where there is none.
    """
    console = Console()
    backends = installed_backends()
    packages = ", ".join(f"{b.package} {version(b.package)}" for b in backends)
    console.print(
        f"qlora-wgpu {version('qlora-wgpu')}, {packages}, "
        f"Python {platform.python_version()}, {sys.platform} {platform.machine()}",
        highlight=False,
    )
    found = [list_adapters(backend.name) for backend in backends]
    if not any(found):
        raise DeviceError(f"no GPU adapter was found: {INSTALL_HINT}")
    device = Device()
    for backend, adapters in zip(backends, found, strict=True):
        if not adapters:
            console.print(f"{backend.package} finds no adapter that it can use", highlight=False)
        for index, adapter in enumerate(adapters):
            chosen = index == 0 and backend is device.backend
            console.print(_describe(index, adapter, chosen))
    kind = "software adapter (cpu kernels)" if device.is_cpu else "GPU kernels"
    console.print(
        f"device.adapter: auto opens {device.name} through {device.backend.package}: {kind}",
        highlight=False,
    )
    if device.profile.images:
        console.print(
            f"operands are read from images, by subgroups of {device.profile.image_lanes}: both "
            "gave the right values here",
            highlight=False,
        )
    for entry in choices_for(device):
        shape = entry["shape"]
        console.print(
            f"timed for hidden {shape['hidden_size']}, batch {entry['batch']} x {entry['seq']}: "
            f"{'; '.join(entry['notes'])}",
            highlight=False,
        )


def _describe(index: int, found: FoundAdapter, chosen: bool) -> Table:
    info, limits = found.raw.info, found.raw.limits
    table = Table(
        title=f"{index}: {found.name}, device.backend: {found.backend.name}"
        f"{' (auto)' if chosen else ''}",
        show_header=False,
    )
    table.title_justify = "left"
    table.add_row("type", f"{info['adapter_type']} via {info['backend_type']}")
    table.add_row("driver", info["description"] or "not told")
    table.add_row("largest buffer", f"{limits['max-buffer-size'] / 2**20:,.0f} MiB")
    table.add_row(
        "largest binding", f"{limits['max-storage-buffer-binding-size'] / 2**20:,.0f} MiB"
    )
    table.add_row(
        "workgroup",
        f"{limits['max-compute-invocations-per-workgroup']} invocations, "
        f"{limits['max-compute-workgroup-storage-size'] // 1024} KiB shared",
    )
    table.add_row("storage buffers", f"{limits['max-storage-buffers-per-shader-stage']} per shader")
    offered = found.backend.features_of(found.raw)
    features = [f"{f} {'yes' if f in offered else 'no'}" for f in _SHOWN_FEATURES]
    table.add_row("features", ", ".join(features))
    shapes = found.backend.matrix_shapes(found.raw)
    if shapes:
        told = [f"{s.m}x{s.n}x{s.k} by {s.lanes} invocations" for s in shapes]
        table.add_row("matrix units", f"f16 to f32: {', '.join(told)}")
    return table
