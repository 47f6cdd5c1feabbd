"""Turns of benchmarks/gpu_rivals.py as tables: who trains how fast, and ours to each rival.

usage: python benchmarks/rival_tables.py OUT.jsonl ...
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_rows import read_rows

OURS = "ours"
# Between first losses of the same weights: bfloat16 alone makes 0.001, attention across packed
# samples 0.024.
_FAR = 0.015
_MEMORY = ("own_mib", "driver_mib")
_WHY_SHOWN = 200
Figures = dict[str, Any]


def tables(rows: Iterable[Mapping[str, Any]]) -> Figures:
    """By work, what each participant did, and why one did not.

    A ratio is ours to the rival's tokens a second in the same round; the median of all rounds in
    which both had a turn counts.
    """
    turns: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        work, turn, name = row["key"].split(", ")
        if work != "about":
            turns.setdefault(work, {}).setdefault(name, {})[turn] = row
    return {
        work: {name: _participant(own, given.get(OURS, {})) for name, own in given.items()}
        for work, given in turns.items()
    }


def _participant(
    turns: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]
) -> Figures:
    """Turns by the number of their round."""
    done = {turn: row for turn, row in turns.items() if "failed" not in row}
    failed = [row["failed"] for row in turns.values() if "failed" in row]
    found: Figures = {"rounds": len(done)}
    if failed:
        found["failed"] = failed[0]
    if not done:
        return found
    found["tokens_per_second"] = _spread([row["tokens_per_second"] for row in done.values()])
    pairs = [
        ours[turn]["tokens_per_second"] / row["tokens_per_second"]
        for turn, row in done.items() if "tokens_per_second" in ours.get(turn, {})
    ]  # fmt: skip
    if pairs:
        found["ratio"] = _spread(pairs)
    for name in _MEMORY:
        if seen := [row[name] for row in done.values() if row.get(name)]:
            found[name] = round(max(seen))
    for row in done.values():
        if row.get("fresh"):
            found["first_loss"] = row["first_loss"]
        found |= {name: row[name] for name in ("attention", "graph_breaks") if name in row}
    return found


def _spread(values: list[float]) -> Figures:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def lines(name: str, works: Figures) -> list[str]:
    """A table."""
    text = [f"== {name}: tokens/s, ours / rival in the same round"]
    for work, participants in works.items():
        text.append(f" {work}")
        text += [f"  {who:20} {_line(who, own)}" for who, own in participants.items()]
    return text


def _line(who: str, own: Figures) -> str:
    if "tokens_per_second" not in own:
        return f"failed: {own.get('failed', 'no turn')[:_WHY_SHOWN]}"
    rate = own["tokens_per_second"]
    parts = [f"{rate['median']:10,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})"]
    if who != OURS and "ratio" in own:
        ratio = own["ratio"]
        slower = ", WE ARE SLOWER" if ratio["median"] < 1.0 else ""
        parts.append(f"{_ratio(ratio)} ({_range(ratio)}){slower}")
    memory = [f"{own[key]:,} MiB" for key in _MEMORY if key in own]
    parts += [" by the driver ".join(memory)] if memory else []
    if "first_loss" in own:
        parts.append(f"first loss {own['first_loss']:.4f}")
    parts += [own["attention"]] if "attention" in own else []
    parts += [f"{own['graph_breaks']} graph breaks"] if own.get("graph_breaks") else []
    if "failed" in own:
        parts.append(f"later failed: {own['failed'][:_WHY_SHOWN]}")
    return ", ".join(parts)


def short(name: str, works: Figures) -> list[str]:
    """A line a work: our rate, then what it is of each rival's."""
    text = []
    for work, participants in works.items():
        ours = participants.get(OURS, {}).get("tokens_per_second")
        told = [f"ours {ours['median']:,.0f} tokens/s" if ours else "ours failed"]
        for who, own in participants.items():
            if who != OURS:
                told.append(f"/ {who} {_ratio(own['ratio']) if 'ratio' in own else 'failed'}")
        text.append(f"{name} {work}: {', '.join(told)}")
    return text


def _ratio(ratio: Figures) -> str:
    return f"{ratio['median']:.2f}"


def _range(ratio: Figures) -> str:
    return f"{ratio['min']:.2f} to {ratio['max']:.2f}"


def failed(works: Figures) -> list[tuple[str, str]]:
    """Work and participant, and why."""
    return [
        (f"{work}, {who}", own["failed"])
        for work, participants in works.items()
        for who, own in participants.items()
        if "failed" in own
    ]


def apart(name: str, works: Figures) -> list[str]:
    """Participants whose first loss, on the same weights and rows, is not ours."""
    text = []
    for work, participants in works.items():
        ours = participants.get(OURS, {}).get("first_loss")
        for who, own in participants.items():
            loss = own.get("first_loss")
            if ours is not None and loss is not None and not abs(loss - ours) < _FAR:  # NaN, too
                text.append(f"WRONG {name} {work}: {who} begins with {loss:.4f}, ours {ours:.4f}")
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print("\n".join(lines(Path(argument).stem, tables(read_rows(Path(argument))))))
