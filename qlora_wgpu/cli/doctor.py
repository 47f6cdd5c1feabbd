"""``doctor``: this machine's GPUs, what they can train, and what to install if there are none."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from qlora_wgpu.cli._options import OutputFile, gpu_option, write_json_file
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.errors import ConfigError, DeviceError
from qlora_wgpu.gpu.adapters import FoundAdapter, cards, installed_backends, list_adapters, no_gpu
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.driver import under_way
from qlora_wgpu.runs.estimation import several_gpus_hint, training_summary
from qlora_wgpu.runs.machine_report import machine_facts, machine_report
from qlora_wgpu.runs.opening import faster_through_dawn
from qlora_wgpu.selfcheck import Result, avoid_what_is_wrong, check_device, checks, num_checks
from qlora_wgpu.tuning.cache import choices_for
from qlora_wgpu.version import __version__

_SHOWN_FEATURES = ("shader-f16", "subgroups", "timestamp-query")


@click.command()
@click.option("--check", is_flag=True, help="Verify every kernel variant against its reference.")
@click.option(
    "--quick", is_flag=True, help="Skip slow parts: training speed, and which models fit."
)
@click.option(
    "--report",
    type=OutputFile(),
    metavar="FILE",
    help="Write FILE (JSON) for bug reports and other users of this GPU: versions, driver, limits, "
    "checks and step times. Takes up to five minutes; contains no paths, user or machine names.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print versions, GPUs, limits and features as JSON."
)
@gpu_option("The GPU to check: its index or a part of its name.", "--device")
@click.option(
    "--backend",
    default="auto",
    type=click.Choice(["auto", "wgpu", "dawn"]),
    help="WebGPU implementation to check.",
)
def doctor(
    check: bool, quick: bool, report: Path | None, as_json: bool, gpu: str, backend: str
) -> None:
    """Show this machine's GPUs, and what they can train.

    Shows driver, limits and features of each. Exits with code 2 if there is no GPU, and prints what
    to install; with --check, also if the driver miscomputes.
    """
    given = {"--check": check, "--quick": quick, "--report": report is not None, "--json": as_json}
    modes = [option for option, is_given in given.items() if is_given]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} are mutually exclusive")
    console = Terminal()
    if check:
        _check(console, Device(gpu, backend))
    elif report is not None:
        _write_report(console, report, Device(gpu, backend))
    elif as_json:
        device = Device(gpu, backend)
        avoid_what_is_wrong(device)
        write_json(machine_facts(device))
    else:
        _list_gpus(console, gpu, backend, quick=quick)


def _list_gpus(console: Console, gpu: str, backend: str, *, quick: bool) -> None:
    """Shows every GPU, and which one is used."""
    backends = installed_backends()
    packages = ", ".join(f"{b.package} {version(b.package)}" for b in backends)
    console.print(
        f"qlora-wgpu {__version__}, {packages}, "
        f"Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    )
    by_backend = [list_adapters(backend.name) for backend in backends]
    if not any(by_backend):
        raise no_gpu()
    device = Device(gpu, backend)
    avoid_what_is_wrong(device)
    automatic = (gpu, backend) == ("auto", "auto")
    for each, adapters in zip(backends, by_backend, strict=True):
        if not adapters:
            console.print(f"{each.package} finds no usable GPU")
        for index, adapter in enumerate(adapters):
            chosen = automatic and index == 0 and each is device.backend
            console.print(_describe(index, adapter, chosen))
    _show_choice(console, device, gpu)
    if quick:
        skipped = "training speed" if device.is_cpu else "which models fit"
        console.print(f"\nskipped by --quick: {skipped}")
    else:
        doing = "measuring the training speed"
        with console.status(doing), under_way(doing):
            meaning = training_summary(device)
        console.print(f"\n{meaning}", style="bold")
    if text := faster_through_dawn(device, backend):
        console.print(text, style="yellow")
    if text := several_gpus_hint(len(cards())):
        console.print(text)


def _show_choice(console: Console, device: Device, gpu: str) -> None:
    """Shows which GPU ``device.gpu`` opens, with notes and autotuning results."""
    kind = "software GPU (cpu kernels)" if device.is_cpu else "GPU kernels"
    console.print(f"device.gpu: {gpu} opens {device.name} through {device.backend.package}: {kind}")
    for note in device.notes:
        console.print(note, style="yellow")
    for entry in choices_for(device):
        shape = entry["shape"]
        console.print(
            f"autotuned: hidden {shape['hidden_size']}, batch {entry['batch']} x {entry['seq']}: "
            f"{'; '.join(entry['notes'])}"
        )


def _check(console: Console, device: Device) -> None:
    """Shows the error of every check, and fails if one is too large."""
    console.print(
        f"{device.name}, {device.gpu.info['description'] or 'unknown driver'}, through "
        f"{device.backend.package}"
    )
    results: dict[tuple[str, str], dict[str, Result]] = {}
    total = num_checks(device)
    with console.status("checking") as status:
        for done, result in enumerate(check_device(device), 1):
            shown = f"{result.check}, {result.variant}, {result.dtype}"
            status.update(f"checking {done}/{total}: {shown}")
            results.setdefault((result.check, result.variant), {})[result.dtype] = result
    console.print(_errors(results))
    console.print("maximum errors, relative to the largest value", style="dim")
    _report_failures(console, device, results)


def _write_report(console: Console, target: Path, device: Device) -> None:
    """Writes the report after each of its parts, and shows a summary."""
    avoid_what_is_wrong(device)
    with console.status("writing the report") as status:
        for report in machine_report(device, status.update):
            write_json_file(target, report)
    checks_done = report["checks"]
    console.print(
        f"{checks_done['done']} of {checks_done['total']} checks, {checks_done['wrong']} failed"
    )
    for shape, steps in report["steps"].items():
        reason = steps.get("skipped") or steps.get("failed")
        speed = reason or f"{steps['tokens_per_second']['median']:,.0f} tokens/s"
        console.print(f"steps of {shape}: {speed}")
    console.print(f"written to {target}, without paths, user or machine names")


def _errors(results: dict[tuple[str, str], dict[str, Result]]) -> Table:
    """A row per check, a column per variant."""
    shown = list(dict.fromkeys(variant for _, variant in results))
    table = Table(box=None)
    table.add_column("error in\nfloat32\nbfloat16")
    for variant in shown:
        table.add_column(variant, justify="right")
    for name in checks():
        cells = (results[name, variant].values() for variant in shown)
        table.add_row(name, *("\n".join(map(_cell, cell_results)) for cell_results in cells))
    return table


def _report_failures(
    console: Console, device: Device, results: dict[tuple[str, str], dict[str, Result]]
) -> None:
    """Lists the checks that failed; raises if one is for this device's own kernels."""
    failed = [r for by_dtype in results.values() for r in by_dtype.values() if not r.good]
    for result in failed:
        reason = f": {result.refusal}" if result.refusal else ""
        console.print(
            f"failed: {result.check}, {result.variant}, {result.dtype}{reason}", style="red"
        )
    own = [r for r in failed if r.variant == "own"]
    if own:
        raise DeviceError(
            f"{device.name} miscomputes: update the driver, or choose another GPU or backend "
            "(device.gpu, device.backend)"
        )
    console.print(
        f"all {sum(map(len, results.values()))} checks passed"
        if not failed
        else "the kernels that this GPU uses passed",
        style="green",
    )


def _cell(result: Result) -> str:
    return "refused" if result.refusal else f"{result.error:.1e}"


def _describe(index: int, gpu: FoundAdapter, chosen: bool) -> Table:
    info, limits = gpu.raw.info, gpu.raw.limits
    table = Table(
        title=f"{index}: {gpu.name}, device.backend: {gpu.backend.name}"
        f"{' (auto)' if chosen else ''}",
        show_header=False,
    )
    table.title_justify = "left"
    table.add_row("type", f"{info['adapter_type']} via {info['backend_type']}")
    table.add_row("driver", info["description"] or "unknown")
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
    offered = gpu.backend.features_of(gpu.raw)
    features = [f"{f} {'yes' if f in offered else 'no'}" for f in _SHOWN_FEATURES]
    table.add_row("features", ", ".join(features))
    shapes = gpu.backend.matrix_shapes(gpu.raw)
    if shapes:
        table.add_row("matrix units", ", ".join(map(str, shapes)))
    return table
