"""Tokens a second of generated text, and what of the processor they take.

    python benchmarks/generate.py M --batch 1 4 8
    python benchmarks/generate.py M --gguf M.gguf --peer venv/bin/python

The model has random weights, quantized here (NF4, doubly), and an adapter of rank 8 on all linear
layers. With ``--gguf``, a file that ``export`` made of such a model, llama.cpp (xllamacpp, in the
Python that ``--peer`` names) generates with that, in turns with ours. Seconds of
the processor are told besides: on a machine that others use, pairs can be compared by these alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from engines import PROMPT, engines_of, medians

from qlora_wgpu.generation import Engine
from qlora_wgpu.graph.launch import Launch

_TOKENS = 24
_PEER_TOKENS = 160  # it makes them faster than a server answers
_PEER = Path(__file__).parent / "peers" / "llama_generate.py"


def measured(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Tokens a second of as many texts as fit, and seconds of the processor a token."""
    for _ in range(engine.texts):
        engine.add(prompt, max_new_tokens=_TOKENS + 4)
    for _ in range(3):
        engine.step()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(_TOKENS):
        engine.step()
    tokens = _TOKENS * engine.texts
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    while not engine.is_idle:
        engine.step()
    return {"tokens_per_second": tokens / wall, "cpu_seconds_per_token": processor / tokens}


def launches_of_a_turn(engine: Engine) -> list[Launch]:
    """What gives a token to all texts that fit."""
    made = engine._program(engine.texts, 1, with_logits=False, with_images=False)
    return [launch for own in (made.hidden, made.head) for launch in own.plan.launches]


def main() -> None:
    """Measures and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", help="the file that llama.cpp reads")
    parser.add_argument("--peer", help="a Python that has xllamacpp")
    args = parser.parse_args()
    engines, prompt, _, device = engines_of(args.shape, args.batch)
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for batch, engine in engines.items():
            found.setdefault(f"batch {batch}", []).append(measured(engine, prompt))
        if args.peer:
            command = [args.peer, str(_PEER), args.gguf, str(PROMPT), str(_PEER_TOKENS), "1"]
            done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
            found.setdefault("llama.cpp", []).append(json.loads(done.stdout.splitlines()[-1]))
    result = {
        "device": device.name,
        "shape": args.shape,
        "prompt": PROMPT,
        "launches_per_token": {
            f"batch {batch}": len(launches_of_a_turn(engine)) for batch, engine in engines.items()
        },
        "median": medians(found),
        "runs": found,
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
