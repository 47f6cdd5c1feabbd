"""What the parts of benchmarks/gpu.py found, as JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rival_tables
from gpu_rows import best_ways, read_rows

_WARM_UP = 2
_DRIVER_MEMORY = "memory.used"
Figures = dict[str, Any]


def summary(folder: Path) -> Figures:
    """All figures; a part that is missing or half done gives what there is of it."""
    state = _json(folder / "state.json")
    devices = {n.removeprefix("device-"): _keyed(folder, n) for n in state if "device-" in n}
    ceilings = {n.removeprefix("ceilings-"): _ceilings(folder, n) for n in _named(state, "ceil")}
    torch = _json(folder / "torch.json")
    figures: Figures = {
        "parts": state,
        "driver": _text(folder / "driver.txt"),
        "cards": _list(folder / "cards.json"),
        "devices": devices,
        "own_checks": _checks(folder, _named(state, "own-")),
        "checks": _checks(folder, _named(state, "checks-")),
        "ceilings": {**ceilings, **({"torch": torch} if torch else {})},
        "layers": {n: _layers(folder, n, ceilings) for n in _named(state, "layers-")},
        "attention": {n: read_rows(folder / f"{n}.jsonl") for n in _named(state, "attention-")},
        "explored": {
            n: list(best_ways(folder / f"{n}.jsonl", 5)) for n in _named(state, "explore")
        },
        "others": {n: _others(folder, n, ceilings) for n in _named(state, "others-")},
        "steps": {n: _step(folder, n, state) for n in _named(state, "bench-")},
        "peers": {n: _peer(folder, n, state) for n in _named(state, "peft-")},
        "rivals": {n: _rivals(folder, n) for n in _named(state, "rivals-")},
        "generation": _generation(folder, state),
        "losses": {n: _json(folder / f"{n}.json").get("losses") for n in _named(state, "losses-")},
        "tests": {n: _tests(folder / f"{n}.log") for n in _named(state, "tests-")},
    }
    return {**figures, "ratios": _ratios(figures)}


def _named(state: Figures, prefix: str) -> list[str]:
    return [name for name in state if name.startswith(prefix)]


def _json(path: Path) -> Figures:
    try:
        loaded: Figures = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded


def _list(path: Path) -> list[Any]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def _text(path: Path) -> str:
    return path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""


def _keyed(folder: Path, name: str) -> Figures:
    return {row["key"]: row for row in read_rows(folder / f"{name}.jsonl")}


def _ceilings(folder: Path, name: str) -> Figures:
    """The higher of the attempts."""
    rows = _keyed(folder, name)
    gaps = rows.pop("gaps", {})
    best: Figures = {}
    for row in rows.values():
        for key, value in row.items():
            if isinstance(value, float):
                best[key] = max(value, best.get(key, 0.0))
    return {**best, "gaps": {k: v for k, v in gaps.items() if k != "key"}}


def _checks(folder: Path, names: Iterable[str]) -> Figures:
    total: Counter[str] = Counter()
    bad = []
    for name in names:
        backend = name.split("-")[1]
        for row in read_rows(folder / f"{name}.jsonl"):
            total[backend] += 1
            if not row.get("good"):
                why = row.get("refusal") or row.get("failed") or f"error {row['error']:.1e}"
                bad.append(f"{backend} {row['key']}: {why}")
    return {"rows": dict(total), "bad": bad}


def _layers(folder: Path, name: str, ceilings: Figures) -> Figures:
    """By kernel and shape, each variant's microseconds and the best one's rate."""
    most = ceilings.get(name.rsplit("-", 1)[1], {})
    table: dict[str, Figures] = {}
    totals, clocks, failed = {}, {}, {}
    for row in read_rows(folder / f"{name}.jsonl"):
        if "failed" in row:
            failed[row["key"]] = row["failed"]
            continue
        clocks[row["key"]] = row.get("clock", 1.0)
        totals[row["key"]] = round(sum(launch["us"] for launch in row["launches"]), 1)
        for launch in row["launches"]:
            shapes = ", ".join(f"{n} {r}x{c}" for n, (r, c) in launch["shapes"].items())
            kernel = table.setdefault(f"{_label(launch)} ({shapes})", {"us": Counter()})
            kernel["us"][row["key"]] += launch["us"]
            for key in ("flops", "bytes", "matrix_units"):
                kernel.setdefault(key, {}).setdefault(row["key"], 0)
                kernel[key][row["key"]] += launch[key]
    for kernel in table.values():
        _rate(kernel, most)
    return {"total_us": totals, "clocks": clocks, "kernels": table, "failed": failed}


def _label(launch: Figures) -> str:
    """Its label; a copy for a product bears the product's, and is told by its file, too."""
    label = str(launch["label"])
    file = launch["path"].removesuffix(".wgsl")
    return label if launch["flops"] or file.startswith(label) else f"{label}, {file}"


def _rate(kernel: Figures, most: Figures) -> None:
    # Nothing, less what timestamps show of a launch that does nothing, tells no rate.
    told = {name: us for name, us in kernel["us"].items() if us} or kernel["us"]
    best = min(told, key=told.__getitem__)
    each = 1e6 / told[best] if told[best] else 0.0
    units = kernel["matrix_units"][best]
    top = most.get("matrix_flops_per_second" if units else "flops_per_second") or 0
    shares = {
        "operations": kernel["flops"][best] * each / top if top else 0.0,
        "bytes": kernel["bytes"][best] * each / most["bytes_per_second"]
        if most.get("bytes_per_second")
        else 0.0,
    }
    nearest = max(shares, key=shares.__getitem__)
    kernel |= {
        "best": best,
        "gflops": round(kernel["flops"][best] * each / 1e9, 1),
        "nearest": nearest,
        "of_nearest": round(shares[nearest], 3),
    }


def _others(folder: Path, name: str, ceilings: Figures) -> Figures:
    """Rows by their keys, those of texts with their share of the bytes a card copies."""
    rows = _keyed(folder, name)
    most = ceilings.get(name.rsplit("-", 1)[1], {}).get("bytes_per_second")
    for row in rows.values():
        if most and "bytes_per_second" in row:
            row["of_bytes"] = round(row["bytes_per_second"] / most, 3)
    return rows


def _driver_mib(state: Figures, name: str) -> float | None:
    """What the driver gave away during a part, less what was given away before."""
    seen = state.get(name, {}).get("driver", {}).get(_DRIVER_MEMORY)
    return seen[2] - seen[0] if seen else None


def _step(folder: Path, name: str, state: Figures) -> Figures:
    found = _json(folder / f"{name}.json")
    if not found:
        return {}
    work, median = found.get("work_seconds"), found["step_seconds"]["median"]
    return {
        "tokens_per_second": found["tokens_per_second"],
        "gflops": round(found["flops_per_second"] / 1e9, 1),
        "own_mib": round(found["memory"]["peak"] / 2**20),
        "driver_mib": _driver_mib(state, name),
        "host_share": found["host_share"],
        "seconds": found["seconds"],
        "gap_ms": None if work is None else round(1e3 * (median - work), 3),
        "loss": found["loss"],
        "kernels": found["kernels"],
    }


def _peer(folder: Path, name: str, state: Figures) -> Figures:
    found = _json(folder / f"{name}.json")
    if not found:
        return {}
    tokens = found.get("tokens_per_step", 0)
    seconds = found["seconds"][_WARM_UP:]
    rates = [tokens / statistics.median(seconds), tokens / max(seconds), tokens / min(seconds)]
    return {
        "tokens_per_second": dict(zip(("median", "min", "max"), rates, strict=True)),
        "own_mib": round(found.get("device_mib", 0)),
        "driver_mib": _driver_mib(state, name),
        "loss": found["losses"][-1],
        "versions": found["versions"],
    }


def _rivals(folder: Path, name: str) -> Figures:
    return rival_tables.tables(read_rows(folder / f"{name}.jsonl"))


def _generation(folder: Path, state: Figures) -> Figures:
    """New tokens a second by shape and number of texts, ours and transformers'."""
    table: dict[str, dict[str, Figures]] = {}
    for name in _named(state, "others-"):
        shape, _, rest = name.removeprefix("others-").partition("-texts")
        for row in read_rows(folder / f"{name}.jsonl") if rest else ():
            if row["key"].startswith("texts ") and "failed" not in row:
                texts = row["key"].removeprefix("texts ")
                own = table.setdefault(shape, {}).setdefault(texts, {})
                own[f"ours {rest.rsplit('-', 1)[1]}"] = row["tokens_per_second"]
    for name in _named(state, "generation-"):
        shape = name.removeprefix("generation-")
        for texts, row in _json(folder / f"{name}.json").items():
            own = table.setdefault(shape, {}).setdefault(texts, {})
            own["transformers"] = row["tokens_per_second"]
    for own in (own for texts in table.values() for own in texts.values()):
        ours = max((rate for who, rate in own.items() if who != "transformers"), default=None)
        if ours and own.get("transformers"):
            own["ratio"] = ours / own["transformers"]
    return table


def _tests(log: Path) -> Figures:
    """Counted from the log, so that tests that were cut off count."""
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
    words = ("PASSED", "FAILED", "ERROR")
    outcomes = Counter(word for line in lines for word in words if f" {word} " in f"{line} ")
    failed = sorted({line.strip() for line in lines if line.startswith(("FAILED", "ERROR"))})
    return {**outcomes, "last": lines[-1] if lines else "", "failed": failed}


def _ratios(figures: Figures) -> Figures:
    """Ours to the peer's tokens a second and memory, wherever both ran."""
    quotients = {}
    for name, ours in figures["steps"].items():
        workload = name.removeprefix("bench-").replace("-tune", "").rsplit("-", 1)[0]
        theirs = figures["peers"].get(f"peft-{workload}")
        if not ours or not theirs:
            continue
        pair = {"speed": _quotient(ours["tokens_per_second"], theirs["tokens_per_second"])}
        for kind in ("own_mib", "driver_mib"):
            if ours[kind] and theirs[kind]:
                pair[kind] = round(ours[kind] / theirs[kind], 3)
        quotients[name] = pair
    return quotients


def _quotient(ours: Figures, theirs: Figures) -> float:
    return round(ours["median"] / theirs["median"], 3)
