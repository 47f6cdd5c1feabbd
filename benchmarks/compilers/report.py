"""The figures of all kernels and plans, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compilers.driver import Outcome
from compilers.plans import KernelPlan

# Those that a driver has, by the heads of their columns.
_COLUMNS = {
    "subgroup_size": "subgroup", "registers": "registers", "live_registers": "live",
    "spilled": "spilled", "filled": "filled", "scratch": "scratch", "lds": "LDS", "waves": "waves",
    "threads": "threads", "barriers": "barriers", "instructions": "instr.", "latency": "latency",
    "inverse_throughput": "1/thr.", "cycles": "cycles",
}  # fmt: skip
_ADDED_UP = ("latency", "inverse_throughput", "cycles")


def _by_badness(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Labels, the worst first: what failed, what spills, what takes most registers."""

    def badness(label: str) -> tuple[int, ...]:
        f = outcomes[label].figures
        if f is None:
            return (True,)
        worst = (f.get(name, 0) for name in ("scratch", "registers", "inverse_throughput"))
        return (False, _spilled(f), *worst)

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
        "spilling": sum(_spilled(f) > 0 for _, f in launched),
        **{
            name: worst(f[name] for _, f in launched)
            for name, worst in (("registers", max), ("lds", max), ("waves", min))
            if launched and name in launched[0][1]
        },
        **{
            name: sum(count * f[name] for count, f in launched)
            for name in _ADDED_UP
            if launched and name in launched[0][1]
        },
    }


def _spilled(figures: Mapping[str, int]) -> int:
    return figures.get("spilled", 0) + figures.get("scalar_spilled", 0)


def to_json(
    driver: str, family: str, plans: Sequence[KernelPlan], outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    """All that is known, the worst kernel first."""
    told = [outcome for outcome in outcomes.values() if outcome.driver]
    return {
        "driver": driver,
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
    told = {name for row in report["kernels"] for name in row}
    columns = {name: head for name, head in _COLUMNS.items() if name in told}
    lines.append(" ".join(f"{head:>9}" for head in columns.values()) + "  kernel")
    for row in report["kernels"]:
        cells = " ".join(f"{row.get(name, '?'):>9}" for name in columns)
        failure = f" FAILED: {row['failure']}" if row["failure"] else ""
        lines.append(f"{cells}  {row['kernel']}{failure}")
    lines += ["", "of one wave of each launch, a loop taken as the compiler takes it:"]
    for name, plan in report["plans"].items():
        figures = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in plan.items())
        lines.append(f"{name}: {figures}")
    return "\n".join(lines)
