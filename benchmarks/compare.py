"""Training speed of qlora-wgpu beside its peers': one run, in turns, same adapter and tokens.

usage: python benchmarks/compare.py SHAPE [--seq N] [--batch N] [--rank N] [--rounds N]
           [--peft PYTHON] [--tinygrad PYTHON] [--only NAME ...] [--json FILE]

PYTHON is an interpreter that has the peer's packages; tinygrad finds Dawn's library by
WEBGPU_PATH. Each contender is started anew in every round; its first two steps are left out. A
ratio is the median over rounds of ours to the peer's tokens per second in that round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shapes import config_of, write_random_model

from qlora_wgpu import LoraConfig
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora import save_adapter
from qlora_wgpu.lora.layout import AdapterLayout

PEERS = Path(__file__).parent / "peers"
WARM_UP = 2


def write_adapter(folder: Path, shape: str, rank: int) -> Path:
    """The adapter that all start from, as PEFT stores it."""
    config = config_of(shape)
    linears = find_family(config).read(config).linears
    adapter = AdapterLayout(LoraConfig(r=rank, lora_alpha=2 * rank), linears)
    save_adapter(folder, adapter.split(adapter.initial(0)), adapter.peft)
    return folder


def contenders(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each, by name."""
    ours = [sys.executable, str(PEERS / "ours_step.py")]
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "ours-bfloat16": ([*ours, "--compute", "bfloat16"], {}),
        "ours-float32": ([*ours, "--compute", "float32"], {}),
    }
    if args.peft:
        peft = [args.peft, str(PEERS / "peft_step.py")]
        for compute in ("float32", "bfloat16"):
            commands[f"peft-nf4-{compute}"] = ([*peft, "--compute", compute], {})
        commands["peft-dense-float32"] = ([*peft, "--compute", "float32", "--quant", "none"], {})
    if args.tinygrad:
        tiny = [args.tinygrad, str(PEERS / "tinygrad_step.py")]
        commands["tinygrad-webgpu"] = (tiny, {"DEV": "WEBGPU"})
        commands["tinygrad-cpu"] = (tiny, {"DEV": "CPU"})
    if args.only:
        commands = {name: commands[name] for name in args.only}
    return commands


def run(command: list[str], environment: dict[str, str], args: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, *args],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peft")
    parser.add_argument("--tinygrad")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [f"--{name}={getattr(args, name)}" for name in ("seq", "batch", "rank", "steps")]
    commands = contenders(args)
    rates: dict[str, list[float]] = {name: [] for name in commands}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", args.shape)
        adapter = write_adapter(Path(folder) / "adapter", args.shape, args.rank)
        for _ in range(args.rounds):
            for name, (command, environment) in commands.items():
                results[name] = run(
                    command, environment, [str(model), f"--adapter={adapter}", *sizes]
                )
                median = statistics.median(results[name]["seconds"][WARM_UP:])
                rates[name].append(args.batch * args.seq / median)
                print(f"{name:22} {rates[name][-1]:9.1f} tokens/s", flush=True)
    report = summary(args, rates, results)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def summary(
    args: argparse.Namespace, rates: dict[str, list[float]], results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    ours = next(iter(rates))
    rows = {}
    for name, own_rates in rates.items():
        result = results[name]
        pairs = [a / b for a, b in zip(rates[ours], own_rates, strict=True)]
        rows[name] = {
            "tokens_per_second": round(statistics.median(own_rates), 1),
            "spread": [round(min(own_rates), 1), round(max(own_rates), 1)],
            "ours_to_this": round(statistics.median(pairs), 3),
            "peak_rss_mib": round(result["rss_mib"]),
            "losses": [round(v, 5) for v in result["losses"][:3]],
            "versions": result["versions"],
        }
    device = next((r["device"] for r in results.values() if "device" in r), "")
    driver = next((r["driver"] for r in results.values() if "driver" in r), "")
    shown = {name: getattr(args, name) for name in ("shape", "seq", "batch", "rank", "rounds")}
    return {**shown, "device": device, "driver": driver, "cpu": processor(), "contenders": rows}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} x {len(models)}"


if __name__ == "__main__":
    main()
