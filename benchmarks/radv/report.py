"""The figures of all kernels and plans, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radv.driver import Outcome
from radv.plans import KernelPlan

_COLUMNS = (
    "registers", "spilled", "scratch", "lds", "waves", "barriers", "instructions", "latency",
    "inverse_throughput",
)  # fmt: skip
_HEADS = (
    "registers", "spilled", "scratch", "LDS", "waves", "barriers", "instr.", "latency", "1/thr.",
)  # fmt: skip


def _by_badness(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Labels, the worst first: what failed, what spills, what takes most registers."""

    def badness(label: str) -> tuple[bool, int, int, int, int]:
        f = outcomes[label].figures
        if f is None:
            return (True, 0, 0, 0, 0)
        spilled = f["spilled"] + f["scalar_spilled"]
        return (False, spilled, f["scratch"], f["registers"], f["inverse_throughput"])

    return sorted(sorted(outcomes), key=badness, reverse=True)


def _of_plan(plan: KernelPlan, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    launched = [
        (count, figures)
        for label, count in plan.launches.items()
        if label in outcomes and (figures := outcomes[label].figures)
    ]
    return {
        "launches": sum(count for count, _ in launched),
        "kernels": len(launched),
        "failed": sum(label in outcomes for label in plan.launches) - len(launched),
        "spilling": sum(f["spilled"] + f["scalar_spilled"] > 0 for _, f in launched),
        "registers": max((f["registers"] for _, f in launched), default=0),
        "lds": max((f["lds"] for _, f in launched), default=0),
        "waves": min((f["waves"] for _, f in launched), default=0),
        "latency": sum(count * f["latency"] for count, f in launched),
        "inverse_throughput": sum(count * f["inverse_throughput"] for count, f in launched),
    }


def to_json(
    family: str, plans: Sequence[KernelPlan], outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    """All that is known, the worst kernel first."""
    told = [outcome for outcome in outcomes.values() if outcome.driver]
    return {
        "mesa": told[0].driver if told else "",
        "device": told[0].device if told else "",
        "family": family,
        "plans": {plan.name: _of_plan(plan, outcomes) for plan in plans},
        "kernels": [
            {
                "kernel": label,
                "launches": {p.name: p.launches[label] for p in plans if label in p.launches},
                "failure": outcomes[label].failure,
                **(outcomes[label].figures or {}),
            }
            for label in _by_badness(outcomes)
        ],
    }


def show(report: Mapping[str, Any]) -> str:
    """The same as text."""
    lines = [f"{report['device']}, {report['mesa']}", ""]
    lines.append(" ".join(f"{head:>9}" for head in _HEADS) + "  kernel")
    for row in report["kernels"]:
        cells = " ".join(f"{row.get(name, '?'):>9}" for name in _COLUMNS)
        failure = f" FAILED: {row['failure']}" if row["failure"] else ""
        lines.append(f"{cells}  {row['kernel']}{failure}")
    lines += ["", "of one wave of each launch, a loop taken as RADV takes it:"]
    for name, plan in report["plans"].items():
        figures = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in plan.items())
        lines.append(f"{name}: {figures}")
    return "\n".join(lines)
