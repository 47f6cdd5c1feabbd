"""The table of ``estimate --cards``: a training on cards of the usual sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from qlora_wgpu.limits import GIB
from qlora_wgpu.model.budget import LINK, Fit
from qlora_wgpu.runs.cards import FLOPS, CardPlan
from qlora_wgpu.runs.what_fits import MOST_TOKENS


def cards_table(plans: tuple[CardPlan, ...], batch: int, seq: int) -> Table:
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


def _lengths(plan: CardPlan) -> tuple[str, str]:
    return _tokens(plan.resident_seq), _tokens(plan.longest_seq)


def _tokens(seq: int) -> str:
    if not seq:
        return "-"
    return f"{seq:,}+" if seq >= MOST_TOKENS else f"{seq:,}"


def _planned(plan: CardPlan) -> tuple[str, str, str]:
    if plan.fitted is None or plan.slow_down is None:
        return "does not fit", "", ""
    waiting = sum(plan.fitted.host_memory.values())
    host = f"{waiting / GIB:.1f} GiB" if waiting else "-"
    return _measures(plan.fitted), host, f"{plan.slow_down:.2f}x"


def _measures(fitted: Fit) -> str:
    residency = fitted.residency
    again = ""
    if fitted.options.checkpointing:
        again = f"{fitted.recomputed} recomputed"
    elif residency.remakes:
        again = "norms and gated units made again"
    waits = [short for short, _ in residency.waiting(fitted.layout.num_layers)]
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
        **asdict(fitted.residency),
    }


def in_json(plan: CardPlan) -> dict[str, Any]:
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
