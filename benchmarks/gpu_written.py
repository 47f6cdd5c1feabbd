"""What the parts of benchmarks/gpu.py found, as a page of text.

usage: python benchmarks/gpu_written.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import rival_tables
from gpu_summary import Figures, summary

_FULL_CLOCK = 0.95  # of the highest that was seen
_BAD_SHOWN, _KERNELS_SHOWN, _LAUNCHES_SHOWN = 12, 12, 16
_WHY_SHOWN, _DRIVER_SHOWN = 300, 30
_MOST_LOSS, _FAR_LOSS = 20.0, 0.01  # of random weights; between bfloat16 and float32


def written(figures: Figures) -> str:
    lines: list[str] = []
    for part in (_devices, _check_lines, _ceiling_lines, _layer_lines, _attention_lines,
                 _explored_lines, _step_lines, _rival_lines, _generation_lines, _other_lines,
                 _loss_lines, _test_lines, _part_lines):  # fmt: skip
        lines += part(figures)
    return "\n".join(lines) + "\n"


def _devices(figures: Figures) -> list[str]:
    lines = ["== devices"]
    for backend, rows in figures["devices"].items():
        about, sizes = rows.get("about", {}), rows.get("subgroups", {}).get("sizes")
        driver = about.get("info", {}).get("description", "")
        lines.append(
            f"{backend}: {about.get('name')} ({driver}), subgroups {sizes}, matrices "
            f"{about.get('matrix_shapes')}, chosen {about.get('matrix_shape_chosen')}"
        )
        lines += [f"  {note}" for note in about.get("notes", ())]
    return lines


def _check_lines(figures: Figures) -> list[str]:
    checks = figures["checks"]
    bad = [f"  {text[:200]}" for text in checks["bad"]]
    more = [f"  and {len(bad) - _BAD_SHOWN} more"] if len(bad) > _BAD_SHOWN else []
    return [f"== checks {checks['rows']}, {len(bad)} bad", *bad[:_BAD_SHOWN], *more]


def _ceiling_lines(figures: Figures) -> list[str]:
    lines = ["== ceilings"]
    for name, values in figures["ceilings"].items():
        rates = {
            k: f"{v / 1e9:,.0f} G/s" for k, v in values.items() if isinstance(v, float) and v > 1.0
        }
        gaps = {k: f"{1e6 * v:.1f} us" for k, v in values.get("gaps", {}).items()}
        lines.append(f"{name}: {rates} {gaps or ''}")
    return lines


def _layer_lines(figures: Figures) -> list[str]:
    lines = []
    for name, layer in figures["layers"].items():
        if not (layer["total_us"] or layer["failed"]):
            continue
        lines.append(f"== {name}: us of a layer and the head")
        lines += [
            f"  {us:,.0f}: {key[:90]}{_clock(layer['clocks'][key])}"
            for key, us in layer["total_us"].items()
        ]
        lines += [f"  failed: {key}: {why[:150]}" for key, why in layer["failed"].items()]
        # What the first launches, the default unless it failed: slow ones have others.
        first = next(iter(layer["total_us"]), "")
        own = {label: kernel for label, kernel in layer["kernels"].items() if first in kernel["us"]}
        kernels = sorted(own.items(), key=lambda kv: -kv[1]["us"][first])
        for label, kernel in kernels[:_LAUNCHES_SHOWN]:
            lines.append(
                f"  {label}: {kernel['us'][first]:,.0f} us, "
                f"best {kernel['us'][kernel['best']]:,.0f} ({kernel['best'][:60]}), "
                f"{kernel['gflops']:,.0f} GFLOP/s, {kernel['of_nearest']:.0%} of "
                f"{kernel['nearest']}"
            )
    return lines


def _attention_lines(figures: Figures) -> list[str]:
    lines = []
    for name, rows in figures["attention"].items():
        if not rows:
            continue
        lines.append(f"== {name}")
        for row in rows:
            shown = row.get("failed", "")[:150] or ", ".join(
                f"{label.removeprefix('attention/')} {us:,.0f} us"
                + (f" {row['gflops'][label]:,.0f} GFLOP/s" if label in row["gflops"] else "")
                for label, us in row["us"].items()
            )
            lines.append(f"  {row['key']}: {shown}{_clock(row.get('clock', 1.0))}")
    return lines


def _explored_lines(figures: Figures) -> list[str]:
    found = figures["explored"].items()
    return [line for name, lines in found for line in (f"== {name}", *lines)]


def _clock(share: float) -> str:
    """Named where it makes a time that cannot be compared."""
    return f" (AT {share:.0%} OF THE CLOCK)" if share < _FULL_CLOCK else ""


def _step_lines(figures: Figures) -> list[str]:
    lines = ["== steps"]
    for name, step in {**figures["steps"], **figures["peers"]}.items():
        if not step:
            continue
        rate = step["tokens_per_second"]
        compiled = step.get("seconds", {}).get("compile")
        lines.append(
            f"{name}: {rate['median']:,.0f} tokens/s ({rate['min']:,.0f} to {rate['max']:,.0f}), "
            f"{step['own_mib']:,} MiB (driver {step['driver_mib']}), loss {step['loss']:.4f}"
            + (f", {_gap(step['gap_ms'])}, compiled in {compiled:.1f} s" if compiled else "")
        )
        for kernel in (step.get("kernels") or [])[:_KERNELS_SHOWN]:
            lines.append(
                f"  {kernel['label']}: {kernel['launches']} x, {1e3 * kernel['seconds']:.2f} ms, "
                f"{kernel['share']:.1%}, {kernel['of_nearest_ceiling']:.0%} of "
                f"{kernel['nearest_ceiling']}"
            )
    lines += [f"ours / peft {name}: {pair}" for name, pair in figures["ratios"].items()]
    return lines


def _rival_lines(figures: Figures) -> list[str]:
    return [
        line for name, works in figures["rivals"].items() if works
        for line in rival_tables.lines(name, works)
    ]  # fmt: skip


def _generation_lines(figures: Figures) -> list[str]:
    """Beside rows of the same in full, which have bytes, too."""
    lines = ["== new tokens/s"] if figures["generation"] else []
    for shape, table in figures["generation"].items():
        for texts, own in table.items():
            shown = [f"{who} {rate:,.0f}" for who, rate in own.items() if who != "ratio"]
            ratio = [f"ours / transformers {own['ratio']:.2f}"] if "ratio" in own else []
            lines.append(f"{shape}, {texts} at a time: {', '.join([*shown, *ratio])}")
    return lines


def _gap(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "no kernel timed"
    if milliseconds < 0.0:
        return f"kernels by themselves take {-milliseconds} ms longer than the step"
    return f"gap {milliseconds} ms"


def _other_lines(figures: Figures) -> list[str]:
    lines = []
    for name, rows in figures["others"].items():
        if not rows:
            continue
        lines.append(f"== {name}")
        for key, row in rows.items():
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            lines.append(
                f"  {key}: {', '.join(f'{k} {v}' for k, v in shown.items() if k != 'key')}"
            )
    return lines


def _loss_lines(figures: Figures) -> list[str]:
    lines = [f"{name}: {losses}" for name, losses in figures["losses"].items() if losses]
    return ["== first losses", *lines]


def _test_lines(figures: Figures) -> list[str]:
    lines = ["== tests"]
    for name, outcome in figures["tests"].items():
        counts = {key: value for key, value in outcome.items() if key != "failed"}
        lines.append(f"{name}: {counts}")
        lines += [f"  {text[:200]}" for text in outcome["failed"][:_BAD_SHOWN]]
    return lines


def _part_lines(figures: Figures) -> list[str]:
    lines = ["== parts"]
    for name, part in figures["parts"].items():
        clocks = part.get("driver", {}).get("clocks.sm")
        shown = f"{part.get('seconds', 0)} s" + (f", SM clocks {clocks}" if clocks else "")
        why = "" if part["status"] == "done" else f" ({part.get('why', '')[:200]})"
        lines.append(f"{name}: {part['status']}, {shown}{why}")
    return lines


# -- in short ----------------------------------------------------------------------------------


def in_short(figures: Figures) -> str:
    """What went wrong, then what it comes to: the least that has to come back of a call."""
    lines = ["== IN SHORT", *_wrong(figures), *_results(figures), *_left(figures)]
    return "\n".join(lines) + "\n"


def _wrong(figures: Figures) -> list[str]:
    lines = []
    if not any(_card(rows) for rows in figures["devices"].values()):
        told = (f"  {x[:_WHY_SHOWN]}" for x in figures["driver"].splitlines()[:_DRIVER_SHOWN])
        lines += ["NO CARD was opened; Vulkan lists, by environment:", *told]
    if len(figures["cards"]) > 1:
        lines.append(f"SEVERAL CARDS were measured: {', '.join(figures['cards'])}")
    for name, part in figures["parts"].items():
        if part["status"] in ("failed", "stopped") and "the call's time" not in part.get("why", ""):
            lines.append(f"FAILED {name}: {part.get('why', '')[:_WHY_SHOWN]} ({name}.log)")
    for name, failed in _failed_rows(figures).items():
        key, why = failed[0]
        lines.append(f"FAILED in {name}: {len(failed)}, {key}: {why[:_WHY_SHOWN]}")
    for kind in ("own_checks", "checks"):
        bad = figures[kind]["bad"]
        lines += [f"WRONG {text[:_WHY_SHOWN]}" for text in bad[:_BAD_SHOWN]]
        lines += [f"WRONG, {len(bad)} in all"] if len(bad) > _BAD_SHOWN else []
    for name, tests in figures["tests"].items():
        if tests["failed"]:
            lines.append(f"FAILED tests of {name}: {len(tests['failed'])}, {tests['failed'][0]}")
    for name, step in {**figures["steps"], **figures["peers"]}.items():
        if step and not step["loss"] < _MOST_LOSS:  # NaN, too
            lines.append(f"WRONG {name}: its loss is {step['loss']}")
    lines += [line for name, works in figures["rivals"].items()
              for line in rival_tables.apart(name, works)]  # fmt: skip
    return [*lines, *_apart(figures["losses"])] or ["nothing failed"]


def _failed_rows(figures: Figures) -> dict[str, list[tuple[str, str]]]:
    """What failed within parts that went on, by part: keys and why."""
    found = {name: list(layer["failed"].items()) for name, layer in figures["layers"].items()}
    found |= {name: rival_tables.failed(works) for name, works in figures["rivals"].items()}
    rows = {name: list(others.values()) for name, others in figures["others"].items()}
    for name, own in {**rows, **figures["attention"]}.items():
        found[name] = [(row["key"], row["failed"]) for row in own if "failed" in row]
    return {name: failed for name, failed in found.items() if failed}


def _card(rows: Figures) -> bool:
    kind = rows.get("about", {}).get("info", {}).get("adapter_type", "CPU")
    return bool(kind != "CPU")


def _apart(losses: Figures) -> list[str]:
    """Losses on the same weights that are not the peer's."""
    expected = losses.get("losses-peft")
    lines = []
    for name, own in losses.items():
        if own and expected:
            apart = [abs(a - b) for a, b in zip(own, expected, strict=False)]
            if not all(each < _FAR_LOSS for each in apart):  # NaN, too
                shown = ", ".join(f"{each:.3g}" for each in apart)
                lines.append(f"WRONG {name}: {shown} away from PEFT's losses")
    return lines


def _results(figures: Figures) -> list[str]:
    lines = _devices(figures)[1:]
    for kind in ("own_checks", "checks"):
        for backend, count in figures[kind]["rows"].items():
            bad = sum(text.startswith(f"{backend} ") for text in figures[kind]["bad"])
            lines.append(
                f"{kind.replace('_', ' ')} through {backend}: {count - bad} of {count} good"
            )
    for name, step in {**figures["steps"], **figures["peers"]}.items():
        if step:
            lines.append(
                f"{name}: {step['tokens_per_second']['median']:,.0f} tokens/s, "
                f"{step['own_mib']:,} MiB (driver {step['driver_mib']}), loss {step['loss']:.3f}"
            )
    for name, pair in figures["ratios"].items():
        lines.append(f"ours / PEFT, {name}: {pair}")
    for name, works in figures["rivals"].items():
        lines += rival_tables.short(name, works)
    return [*lines, *_generation_lines(figures)[1:]]


def _left(figures: Figures) -> list[str]:
    parts = figures["parts"]
    left = [
        name
        for name, part in parts.items()
        if part["status"] in ("left out", "under way") or "the call's time" in part.get("why", "")
    ]
    done = sum(part["status"] == "done" for part in parts.values())
    return [f"{done} parts done; left: {', '.join(left) or 'none of those begun'}"]


if __name__ == "__main__":
    found = summary(Path(sys.argv[1]))
    print(f"{written(found)}\n{in_short(found)}")
