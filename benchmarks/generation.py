"""Tokens per second of many sequences at once, next to transformers' generate.

    python benchmarks/generation.py S --batch 1 8 64 --peer venv/bin/python

The model has random weights (NF4, doubly quantized) and an adapter of rank 8 on all linear layers.
Each batch has two rows per turn: ``decode``, of tokens after the first one, and ``group``, the
prefill of that many samples of one prompt. ``--peer`` names a Python with torch, transformers and
peft, which decodes the same shape in float32 and bfloat16, in turns with this one. Processor time
is measured, too: on a machine with other work only that can be compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engines import PROMPT, engines_of, medians

from qlora_wgpu.generation import Engine

_PEER = Path(__file__).parent / "peers" / "transformers_generate.py"


def measured(engine: Engine, prompt: list[int], count: int) -> dict[str, dict[str, float]]:
    """Prefill of as many samples of one prompt as fit, and decoding of ``count`` tokens of each."""
    clock = time.perf_counter(), time.process_time()
    texts = [engine.add(prompt, max_new_tokens=count + 1) for _ in range(engine.texts)]
    while not all(text.ids for text in texts):
        engine.step()
    between = time.perf_counter(), time.process_time()
    first = sum(len(text.ids) for text in texts)
    while not engine.is_idle:
        engine.step()
    end = time.perf_counter(), time.process_time()
    tokens = sum(len(text.ids) for text in texts) - first
    return {
        "group": _rates(len(texts), clock, between),
        "decode": _rates(tokens, between, end),
    }


def _rates(tokens: int, begin: tuple[float, float], end: tuple[float, float]) -> dict[str, float]:
    return {
        "tokens_per_second": tokens / (end[0] - begin[0]),
        "cpu_milliseconds_per_token": 1e3 * (end[1] - begin[1]) / tokens,
    }


def of_peer(python: str, config: Path, batch: int, count: int, compute: str) -> dict[str, float]:
    """The same of transformers, which decodes after a prefill of all prompts."""
    command = [
        python, str(_PEER), str(config), "--prompt", str(PROMPT), "--tokens", str(count),
        "--batch", str(batch), "--quant", "none", "--compute", compute,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "tokens_per_second": found["tokens_per_second"],
        "cpu_milliseconds_per_token": 1e3 * found["cpu_seconds_per_token"],
    }


def main() -> None:
    """Measures and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="a Python with torch, transformers and peft")
    args = parser.parse_args()
    engines, prompt, config, device = engines_of(args.shape, args.batch)
    for engine in engines.values():
        measured(engine, prompt, 2)  # compiles
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        for _ in range(args.rounds):
            for batch, engine in engines.items():
                for name, rates in measured(engine, prompt, args.tokens).items():
                    runs.setdefault(f"{name} {batch}", []).append(rates)
                for compute in ("float32", "bfloat16") if args.peer else ():
                    rates = of_peer(args.peer, path, batch, args.tokens, compute)
                    runs.setdefault(f"transformers {compute} {batch}", []).append(rates)
    result = {"device": device.name, "shape": args.shape, "median": medians(runs), "runs": runs}
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
