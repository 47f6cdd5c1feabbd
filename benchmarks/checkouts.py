"""Steps and kernels of this checkout beside another one's: the same GPU, in turns.

usage: python benchmarks/checkouts.py OTHER SHAPE [--seq N] [--batch N] [--rank N] [--dtype TYPE]
           [--checkpointing] [--rounds N] [--steps N] [--gpu GPU] [--backend NAME]
           [--no-kernels] [--json FILE]

OTHER is a folder with another state of the project: a clone, or where ``pip install --target`` has
put a wheel. Both models are loaded once and stay, so the GPU has to have room for two. A ratio is
the median over rounds of this checkout's tokens per second to the other's in that round. Where the
GPU has timestamps, the time of all launches of a label follows, of each checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OWN, OTHER = "this", "other"


class Waiting:
    """A process that has a checkout's model loaded, and measures when asked."""

    def __init__(self, checkout: Path, asked: Mapping[str, Any]) -> None:
        """Starts it; ``wait`` returns once it is ready."""
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peers" / "waiting_step.py")],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self._write(json.dumps(asked))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            SystemExit: If it ends without one; what it says of that is on stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, what: str) -> dict[str, Any]:
        """Has something measured."""
        self._write(what)
        return self.wait()

    def end(self) -> None:
        """Lets it go."""
        self._process.communicate()


def compared(rounds: Sequence[Mapping[str, float]], tokens: int) -> dict[str, Any]:
    """Tokens per second of each, and the ratio.

    Args:
        rounds: Seconds of a step in each round, by whose it is.
        tokens: Tokens of a step.
    """
    rates = {name: [tokens / each[name] for each in rounds] for name in (OWN, OTHER)}
    pairs = [each[OTHER] / each[OWN] for each in rounds]
    return {
        "tokens_per_second": {name: round(statistics.median(r), 1) for name, r in rates.items()},
        "spread": {name: [round(min(r), 1), round(max(r), 1)] for name, r in rates.items()},
        "ratio": round(statistics.median(pairs), 3),
        "ratios": [round(min(pairs), 3), round(max(pairs), 3)],
    }


def kernel_lines(times: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """A table of what all launches of a label take, the longest first.

    Args:
        times: For each checkout launches and seconds by label.
    """
    labels = dict.fromkeys(label for name in (OTHER, OWN) for label in times[name])
    longest = sorted(labels, key=lambda label: -max(_seconds(times, label).values()))
    lines = [f"{'ms a step':28} {'other':>9} {'this':>9} {'ratio':>6}  launches"]
    for label in longest:
        seconds = _seconds(times, label)
        ratio = f"{seconds[OTHER] / seconds[OWN]:.2f}" if all(seconds.values()) else "-"
        counts = " and ".join(f"{times[name].get(label, (0, 0.0))[0]:.0f}" for name in (OTHER, OWN))
        lines.append(
            f"{label:28} {1e3 * seconds[OTHER]:9.3f} {1e3 * seconds[OWN]:9.3f} {ratio:>6}  {counts}"
        )
    return lines


def _seconds(times: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> dict[str, float]:
    return {name: times[name].get(label, (0, 0.0))[1] for name in (OTHER, OWN)}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed as it comes."""
    names = ("shape", "seq", "batch", "rank", "dtype", "checkpointing", "steps", "gpu", "backend")
    asked = {name: getattr(args, name) for name in names}
    both = {OTHER: Waiting(args.other, asked), OWN: Waiting(HERE.parent, asked)}
    about = {name: process.wait() for name, process in both.items()}
    for name, values in about.items():
        print(f"{name:6} {values['package']}: {values['launches']:,} launches", flush=True)
    rounds, last = [], {}
    for turn in range(args.rounds):
        # Neither is always the first.
        order = (OTHER, OWN) if turn % 2 == 0 else (OWN, OTHER)
        last = {name: both[name].ask(f"steps {args.steps}") for name in order}
        rounds.append({name: values["seconds"] for name, values in last.items()})
        shown = ", ".join(f"{name} {1e3 * rounds[-1][name]:.2f} ms" for name in (OTHER, OWN))
        print(f"round {turn + 1}: {shown}", flush=True)
    result = {**asked, "about": about, **compared(rounds, args.batch * args.seq), "last": last}
    print(f"{result['ratio']:.3f} ({result['ratios'][0]:.3f} to {result['ratios'][1]:.3f})")
    if args.kernels:
        result["kernels"] = {name: process.ask("kernels") for name, process in both.items()}
        print("\n".join(kernel_lines(result["kernels"])), flush=True)
    for process in both.values():
        process.end()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gpu", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not (args.other / "qlora_wgpu").is_dir():
        parser.error(f"{args.other} holds no qlora_wgpu: give a clone of the project")
    result = measured(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
