"""``estimate``: the memory that training needs, and what fits, from config.json alone."""

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
    ParsedType,
    count,
    json_option,
    one_of,
    overrides_argument,
    read_bytes,
    read_size,
    write_json_file,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import Config
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.adapters import cards
from qlora_wgpu.images.placeholders import counted
from qlora_wgpu.limits import GIB, RANK
from qlora_wgpu.model.budget import LINK, Fit
from qlora_wgpu.runs.estimation import (
    FLOPS,
    MOST_TOKENS,
    GpuPlan,
    is_run_config,
    several_gpus_hint,
)
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.tower_estimate import TowerEstimate
from qlora_wgpu.training.images import planned_tower

# ---- sizes of GPUs -------------------------------------------------------------------------------


def cards_table(plans: tuple[GpuPlan, ...], batch: int, seq: int) -> Table:
    """A row for each size of GPU; what is offloaded is for the planned batch and sequence."""
    caption = (
        "longest: maximum tokens of a row with gradient checkpointing, on the GPU alone and with "
        "offloading to host memory. slow-down: estimated against a GPU without a memory limit, at "
        f"{FLOPS / 1e12:g} TFLOP/s and {LINK / 1e9:g} GB/s from the host without overlap"
    )
    table = Table(
        box=None, padding=(0, 2, 0, 0), caption=caption, caption_justify="left", min_width=60
    )
    table.add_column("GPU")
    table.add_column("longest", justify="right")
    table.add_column("offloading", justify="right")
    table.add_column(f"{batch} x {seq:,} tokens: recomputed / offloaded", overflow="fold")
    table.add_column("host", justify="right")
    table.add_column("slow-down", justify="right")
    for plan in plans:
        table.add_row(
            f"{plan.gib} GB", _tokens(plan.resident_seq), _tokens(plan.longest_seq), *_planned(plan)
        )
    if plans and plans[-1].gib < 80:
        table.add_row("more", "", "", "same as the last", "", "")
    return table


def _tokens(seq: int) -> str:
    if not seq:
        return "-"
    return f"{seq:,}+" if seq >= MOST_TOKENS else f"{seq:,}"


def _planned(plan: GpuPlan) -> tuple[str, str, str]:
    if plan.fitted is None or plan.slow_down is None:
        return "does not fit", "", ""
    offloaded = sum(plan.fitted.host_memory.values())
    host = f"{offloaded / GIB:.1f} GiB" if offloaded else "-"
    return _recomputed_and_offloaded(plan.fitted), host, f"{plan.slow_down:.2f}x"


def _recomputed_and_offloaded(fitted: Fit) -> str:
    offload = fitted.offload
    recomputed = ""
    if fitted.options.checkpointing:
        recomputed = f"{fitted.recomputed} recomputed"
    elif offload.remakes:
        recomputed = "norms and gated units recomputed"
    kinds = [short for short, _ in offload.in_words(fitted.layout.num_layers)]
    offloaded = f"{', '.join(kinds)} offloaded" if kinds else ""
    return "; ".join(filter(None, (recomputed, offloaded))) or "nothing"


def _fitted_in_json(fitted: Fit) -> dict[str, Any]:
    return {
        "bytes": dict(fitted.memory),
        "total": fitted.total,
        "host_bytes": dict(fitted.host_memory),
        "moved_bytes": fitted.moved,
        "gradient_checkpointing": fitted.options.checkpointing,
        **asdict(fitted.offload),
    }


def _plan_in_json(plan: GpuPlan) -> dict[str, Any]:
    fitted = plan.fitted
    return {
        "card_gb": plan.gib,
        "room": plan.room,
        "resident_seq": plan.resident_seq,
        "longest_seq": plan.longest_seq,
        "fits": fitted is not None,
        "slow_down": plan.slow_down,
        "fitted": None if fitted is None else _fitted_in_json(fitted),
    }


def _tower_in_json(tower: TowerEstimate) -> dict[str, Any]:
    return {
        "bytes": dict(tower.memory),
        "total": tower.total,
        "host_bytes": tower.host_bytes,
        "images": tower.images,
        "tokens": tower.tokens,
        "feature_bytes": tower.feature_bytes,
        "how": tower.how,
        "problem": tower.problem,
    }


# ---- the command ---------------------------------------------------------------------------------

_MIN_SHOWN = 2**20 / 20  # bytes of a kind that are not shown as 0.0 MiB
_NOTE = (
    "This is the peak of the longest training step. `train` also plans evaluation, sampling and "
    "other batch shapes, and prints the total before it loads weights."
)


@click.command()
@click.argument("target", type=FILE_OR_FOLDER)
@overrides_argument
@click.option("--batch", type=count(), show_default="the run's, or 1", help="Rows per micro-batch.")
@click.option("--seq", type=count(), show_default="the run's, or 1024", help="Tokens per row.")
@click.option(
    "--rank", type=count(RANK), show_default="the run's, or 16", help="Rank of the adapter."
)
@click.option(
    "--checkpointing/--no-checkpointing",
    default=None,
    show_default="the run's, or checkpointing",
    help="Recompute layers in the backward pass.",
)
@click.option(
    "--scheme",
    type=one_of("nf4", "none"),
    show_default="the run's, or nf4",
    help="Quantization of frozen layers.",
)
@click.option(
    "--dtype",
    "compute_dtype",
    type=DTYPE,
    show_default="the run's, or bfloat16",
    help="Type of matmul operands.",
)
@click.option(
    "--image",
    type=ParsedType("WIDTHxHEIGHT", read_size),
    help="Size in pixels of the image of a row.",
    show_default="the data's",
)
@click.option(
    "--budget",
    type=ParsedType("SIZE", read_bytes),
    show_default="the run's device.memory",
    help="Memory budget, such as 8GiB; shows what fits in it.",
)
@click.option("--cards", is_flag=True, help="Also plan for GPUs from 4 to 80 GB.")
@json_option("File to write the estimate to.")
def estimate(
    target: str, overrides: tuple[str, ...], json_file: Path | None, **workload: Any
) -> None:
    """Estimate the GPU memory that training needs.

    TARGET is a run's YAML or folder (with overrides, as for train), a config.json, a model's folder
    or hub name, or a named shape (as for bench). The estimate is the plan that training uses, made
    from config.json without reading weights or using a GPU.
    """
    subject: Config | str = target
    if is_run_config(target):
        subject, overrides = as_config(target, overrides), ()
    console = Terminal()
    with console.status("planning"):  # --cards and --budget take up to a minute
        result = runs.estimate(subject, overrides=overrides, by_data=True, **workload)
    _show(console, target, result)
    if (cluster := result.on_cluster) is not None:
        console.print(
            f"on a cluster: {_size(cluster.worker)} on the GPU of each worker and "
            f"{_size(cluster.owner)} on the owner's, which may be the same GPU"
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
    table.add_column("on the GPU")
    table.add_column("MiB", justify="right")
    for kind, nbytes in result.memory.most_common():
        if nbytes < _MIN_SHOWN:
            break
        table.add_row(kind, f"{nbytes / 2**20:,.1f}")
    table.add_row("total", f"{result.total / 2**20:,.1f}", style="bold")
    console.print(table)
    console.print(_NOTE, style="dim", soft_wrap=True)
    if result.tower is not None:
        _show_tower(console, result.tower, workload.step.seq)
    if result.budget is not None and result.fits is not None:
        console.print(_verdict(result, result.budget, result.fits))
    elif result.device_memory is not None:
        verdict = "fits" if result.remedy is None else "does not fit"
        size = _size(result.device_memory)
        console.print(f"{result.device} has {size}: {verdict}")
    if result.text_copies:
        more = _size(result.text_copies)
        console.print(
            f"generation (generate, chat, serve) needs {more} more for copies of the weights, "
            "unless --memory limits it",
            soft_wrap=True,
        )
    if text := several_gpus_hint(len(_gpus())):
        console.print(text)
    if result.fitted is not None:
        room = result.device_memory if result.budget is None else result.budget
        text = f"train fits into {_size(room or 0)} anyway: {result.fitted.in_words()}"
        console.print(text, soft_wrap=True)
    if result.cards:
        console.print()
        console.print(cards_table(result.cards, workload.step.batch, workload.step.seq))
    if result.remedy is not None:
        console.print(_remedy(result.remedy), style="yellow", soft_wrap=True)


def _show_tower(console: Terminal, tower: TowerEstimate, seq: int) -> None:
    console.print(planned_tower(tower.memory, tower.how), soft_wrap=True)
    size = f"{'' if tower.images == 1 else 'at most '}{tower.tokens:,} tokens"
    console.print(
        f"{counted(tower.images)} of {size}: {_size(tower.feature_bytes)} of features are kept in "
        "the cache folder (data.image_cache: disk) or in host memory",
        soft_wrap=True,
    )
    if tower.problem:
        console.print(tower.problem, style="yellow", soft_wrap=True)
    if tower.tokens >= seq:
        text = (
            f"an image of {tower.tokens:,} tokens does not fit into a row of {seq:,}: raise --seq"
        )
        console.print(text, style="yellow", soft_wrap=True)


def _gpus() -> list[str]:
    """This machine's GPUs; none if they cannot be listed, since an estimate does not need one."""
    try:
        return cards()
    except DeviceError:
        return []


def _remedy(keys: str) -> str:
    if not keys:
        return "it does not fit with a smaller micro-batch, shorter rows or checkpointing either"
    return f"it would fit without offloading with: {keys}"


def _verdict(result: runs.Estimate, budget: int, fits: runs.Fits) -> str:
    seq = result.workload.step.seq
    verdict = "fits" if result.total <= budget else "does not fit"
    maximum = f"no batch fits at sequence {seq}"
    if fits.batch:
        maximum = f"at most batch {fits.batch} at sequence {seq}"
    row = f", or sequence {fits.seq} at batch 1" if fits.seq else ""
    return f"{_size(budget)}: {verdict}; {maximum}{row}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def _write(path: Path, result: runs.Estimate) -> None:
    workload = result.workload
    values = {
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
        "fitted": None if result.fitted is None else _fitted_in_json(result.fitted),
        "cards": [_plan_in_json(plan) for plan in result.cards],
        "text_copies": result.text_copies,
        "tower": None if result.tower is None else _tower_in_json(result.tower),
        "on_cluster": None if result.on_cluster is None else asdict(result.on_cluster),
    }
    write_json_file(path, values)
