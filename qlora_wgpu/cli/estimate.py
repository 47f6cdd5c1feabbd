"""``estimate``: what training will take of a device's memory, and what fits, from config.json."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from qlora_wgpu import runs
from qlora_wgpu.cli._options import (
    DTYPE,
    FILE_OR_FOLDER,
    ReadBy,
    counted,
    json_option,
    one_of,
    overrides_argument,
    read_bytes,
    write_figures,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.adapters import cards
from qlora_wgpu.limits import GIB, RANK
from qlora_wgpu.model.budget import LINK, Fit
from qlora_wgpu.runs.estimation import FLOPS, MOST_TOKENS, GpuPlan, of_several
from qlora_wgpu.runs.settings import as_config

# ---- cards and budgets ---------------------------------------------------------------------------


def cards_table(plans: tuple[GpuPlan, ...], batch: int, seq: int) -> Table:
    """A row for each card; what waits is that of the planned batch and sequence."""
    caption = (
        "longest: tokens of one row, layers recomputed. slow-down: against everything on a card, "
        f"reckoned at {FLOPS / 1e12:g} TFLOP/s and {LINK / 1e9:g} GB/s from the host, none hidden"
    )
    table = Table(
        box=None, padding=(0, 2, 0, 0), caption=caption, caption_justify="left", min_width=60
    )
    table.add_column("card")
    table.add_column("longest", justify="right")
    table.add_column("with host memory", justify="right")
    table.add_column(f"{batch} x {seq:,} tokens: what is recomputed or waits", overflow="fold")
    table.add_column("host", justify="right")
    table.add_column("slow-down", justify="right")
    for plan in plans:
        table.add_row(f"{plan.gib} GB", *_lengths(plan), *_planned(plan))
    if plans and plans[-1].gib < 80:
        table.add_row("more", "", "", "as the last", "", "")
    return table


def _lengths(plan: GpuPlan) -> tuple[str, str]:
    return _tokens(plan.resident_seq), _tokens(plan.longest_seq)


def _tokens(seq: int) -> str:
    if not seq:
        return "-"
    return f"{seq:,}+" if seq >= MOST_TOKENS else f"{seq:,}"


def _planned(plan: GpuPlan) -> tuple[str, str, str]:
    if plan.fitted is None or plan.slow_down is None:
        return "does not fit", "", ""
    waiting = sum(plan.fitted.host_memory.values())
    host = f"{waiting / GIB:.1f} GiB" if waiting else "-"
    return _measures(plan.fitted), host, f"{plan.slow_down:.2f}x"


def _measures(fitted: Fit) -> str:
    offload = fitted.offload
    again = ""
    if fitted.options.checkpointing:
        again = f"{fitted.recomputed} recomputed"
    elif offload.remakes:
        again = "norms and gated units made again"
    waits = [short for short, _ in offload.in_words(fitted.layout.num_layers)]
    waiting = f"{', '.join(waits)} on the host" if waits else ""
    return "; ".join(filter(None, (again, waiting))) or "nothing"


def fitted_in_json(fitted: Fit) -> dict[str, Any]:
    """How training keeps a budget, as ``--json`` writes it."""
    return {
        "bytes": dict(fitted.memory),
        "total": fitted.total,
        "host_bytes": dict(fitted.host_memory),
        "moved_bytes": fitted.moved,
        "gradient_checkpointing": fitted.options.checkpointing,
        **asdict(fitted.offload),
    }


def in_json(plan: GpuPlan) -> dict[str, Any]:
    """A card's plan as ``--json`` writes it."""
    fitted = plan.fitted
    return {
        "card_gb": plan.gib,
        "room": plan.room,
        "resident_seq": plan.resident_seq,
        "longest_seq": plan.longest_seq,
        "fits": fitted is not None,
        "slow_down": plan.slow_down,
        "fitted": None if fitted is None else fitted_in_json(fitted),
    }


# ---- the command ---------------------------------------------------------------------------------

_SHOWN = 2**20 / 20  # bytes of a kind that are more than 0.0 MiB
_BESIDE = (
    "of the longest step; train plans by its data what texts, evaluations and batches of other "
    "lengths take beside it, and tells the sum before it reads a weight"
)


@click.command()
@click.argument("target", type=FILE_OR_FOLDER)
@overrides_argument
@click.option(
    "--batch", type=counted(), show_default="the run's, or 1", help="Rows of a micro-batch."
)
@click.option("--seq", type=counted(), show_default="the run's, or 1024", help="Tokens of a row.")
@click.option(
    "--rank", type=counted(RANK), show_default="the run's, or 16", help="Rank of the adapter."
)
@click.option(
    "--checkpointing/--no-checkpointing",
    default=None,
    show_default="the run's, or checkpointing",
    help="Whether layers are recomputed in the backward pass.",
)
@click.option(
    "--scheme",
    type=one_of("nf4", "none"),
    show_default="the run's, or nf4",
    help="How frozen layers are stored.",
)
@click.option(
    "--dtype",
    "compute_dtype",
    type=DTYPE,
    show_default="the run's, or bfloat16",
    help="Type of matmul operands.",
)
@click.option(
    "--budget",
    type=ReadBy("SIZE", read_bytes),
    show_default="the run's device.memory",
    help="Memory there is, such as 8GiB: shows what fits.",
)
@click.option("--cards", is_flag=True, help="Plan it for cards from 4 to 80 GB, too.")
@json_option("File to write the figures to.")
def estimate(
    target: str, overrides: tuple[str, ...], json_file: Path | None, **workload: Any
) -> None:
    """Show how much memory training will take, without reading weights or using a GPU.

    TARGET is a run's YAML (with overrides, as for train), a config.json, a model's folder or its
    name on the hub, or a shape's name, as for bench. The figures are the sum of the plan that
    training runs.
    """
    what: Config | str = target
    if Path(target).suffix in (".yaml", ".yml"):
        what, overrides = as_config(target, overrides), ()
    console = Terminal()
    with console.status("planning"):  # cards and budgets take up to a minute
        result = runs.estimate(what, overrides=overrides, by_data=True, **workload)
    _show(console, target, result)
    if (there := result.on_cluster) is not None:
        console.print(
            f"on a cluster: {_size(there.worker)} on the GPU of each worker, {_size(there.owner)} "
            "on that of the owner, which may be one of these GPUs"
        )
    if json_file is not None:
        _write(json_file, result)


def _show(console: Terminal, target: str, result: runs.Estimate) -> None:
    workload = result.workload
    checkpointed = ", gradient checkpointing" if workload.step.checkpointing else ""
    scheme = workload.pretrained.scheme(workload.quant)
    console.print(
        f"{target}: batch {workload.step.batch}, sequence {workload.step.seq}, "
        f"rank {workload.lora.r}, {scheme}, {workload.compute_dtype}{checkpointed}; "
        f"planned for {result.device}"
    )
    for text in workload.pretrained.notes:
        console.note(text)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("on the device")
    table.add_column("MiB", justify="right")
    for kind, nbytes in result.memory.most_common():
        if nbytes < _SHOWN:
            break
        table.add_row(kind, f"{nbytes / 2**20:,.1f}")
    table.add_row("total", f"{result.total / 2**20:,.1f}", style="bold")
    console.print(table)
    console.print(_BESIDE, style="dim", soft_wrap=True)
    if result.budget is not None and result.fits is not None:
        console.print(_verdict(result, result.budget, result.fits))
    elif result.device_memory is not None:
        verdict = "fits" if result.remedy is None else "does not fit"
        size = _size(result.device_memory)
        console.print(f"{result.device} has {size}: {verdict}")
    if result.text_copies:
        more = _size(result.text_copies)
        console.print(
            f"texts that are generated later (generate, chat, serve) take {more} more, for copies "
            "of the weights; with --memory they do without",
            soft_wrap=True,
        )
    if text := of_several(len(_gpus())):
        console.print(text)
    if result.fitted is not None:
        room = result.device_memory if result.budget is None else result.budget
        text = f"train keeps within {_size(room or 0)} all the same: {result.fitted.in_words()}"
        console.print(text, soft_wrap=True)
    if result.cards:
        console.print()
        console.print(cards_table(result.cards, workload.step.batch, workload.step.seq))
    if result.remedy is not None:
        console.print(_remedy(result.remedy), style="yellow", soft_wrap=True)


def _gpus() -> list[str]:
    """This machine's GPUs; none where they cannot be listed, which an estimate does not need."""
    try:
        return cards()
    except DeviceError:
        return []


def _remedy(keys: str) -> str:
    if not keys:
        return "no shorter row, smaller micro-batch or checkpointing makes all of it fit"
    return f"all of it would fit with: {keys}"


def _verdict(result: runs.Estimate, budget: int, fits: runs.Fits) -> str:
    seq = result.workload.step.seq
    verdict = "fits" if result.total <= budget else "does not fit"
    most = f"nothing fits at sequence {seq}"
    if fits.batch:
        most = f"at most batch {fits.batch} at sequence {seq}"
    row = f", or sequence {fits.seq} at batch 1" if fits.seq else ""
    return f"{_size(budget)}: {verdict}; {most}{row}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def _write(path: Path, result: runs.Estimate) -> None:
    workload = result.workload
    figures = {
        "batch": workload.step.batch,
        "seq": workload.step.seq,
        "rank": workload.lora.r,
        "scheme": workload.pretrained.scheme(workload.quant),
        "compute_dtype": workload.compute_dtype,
        "gradient_checkpointing": workload.step.checkpointing,
        "device": result.device,
        "bytes": dict(result.memory),
        "total": result.total,
        "budget": result.budget,
        "fits": None if result.fits is None else asdict(result.fits),
        "device_memory": result.device_memory,
        "remedy": result.remedy,
        "fitted": None if result.fitted is None else fitted_in_json(result.fitted),
        "cards": [in_json(plan) for plan in result.cards],
        "text_copies": result.text_copies,
        "on_cluster": None if result.on_cluster is None else asdict(result.on_cluster),
    }
    write_figures(path, figures)
