"""Data files that are malformed, hostile or large: each works, or ends in one sentence.

Every file is read and tokenized in a process of its own, whose time and memory are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SECONDS, MEBIBYTES = 10.0, 1024
ROOT = Path(__file__).parents[1]
CHAT = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
ROWS: list[dict[str, object]] = [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "input": "", "output": "b"},
    {"text": "some text"},
]
Make = Callable[[random.Random], tuple[str, bytes]]


def _mutated(rng: random.Random) -> tuple[str, bytes]:
    """Whole rows with some bytes changed, doubled or cut out."""
    row = json.dumps(rng.choice(ROWS)).encode()
    raw = bytearray((row + b"\n") * rng.randint(1, 4))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(raw) + 1)
        piece = rng.choice(
            [b"\x00", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\x1b[2J", b"\r", b"[", b"{", b'"',
             b"}", b"null", b"1e999", b"9" * 5000, b"NaN", b"\xe2\x80\xae", b"\\u0000", b""]
        )  # fmt: skip
        raw[at : at + rng.choice([0, 1, 5])] = piece
    return rng.choice([".jsonl", ".json", ".csv", ".parquet", ".txt"]), bytes(raw)


def _list(rng: random.Random) -> tuple[str, bytes]:
    _, raw = _mutated(rng)
    return ".json", b"[" + raw.replace(b"\n", b",") + b"]"


def _deep(rng: random.Random) -> tuple[str, bytes]:
    depth = rng.choice([50, 70, 500, 950, 5000, 100_000, 5_000_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    nest = opening * depth + b"1" + closing * depth
    as_text = json.dumps({"messages": nest.decode()}).encode()
    whole = rng.choice([b'{"text": "a\\u0041", "x": ' + nest + b"}", as_text, nest])
    return rng.choice([".jsonl", ".json"]), whole[: 15 << 20] if depth > 10**6 else whole


def _long(rng: random.Random) -> tuple[str, bytes]:
    size = rng.choice([100_000, 1_500_000, 4_000_000, 20_000_000, 30_000_000, 100_000_000])
    unit = rng.choice(["a", "lorem ipsum ", "0", "\n", " ", "你", "🙂", "\u202e", "ab\n"])
    text = (unit * (size // len(unit.encode()) + 1))[: size // len(unit.encode())]
    row = rng.choice([{"text": text}, {"prompt": "a", "completion": text},
                      {"messages": [CHAT[0], {"role": "assistant", "content": text}]}])  # fmt: skip
    kind = rng.choice([".jsonl", ".json", ".csv"])
    if kind == ".csv":
        return kind, b'text\n"' + text.encode() + b'"\n'
    line = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode()
    return kind, b"[" + line + b"]" if kind == ".json" else line


def _wide(rng: random.Random) -> tuple[str, bytes]:
    count = rng.choice([1000, 5000, 1_000_000])
    names = [f"c{i}" for i in range(count)]
    if rng.random() < 0.5:
        return ".csv", ",".join(names).encode() + b"\n" + b"," * (count - 1) + b"\n"
    row = {"text": "a", **dict.fromkeys(names, rng.choice([None, 1, "x"]))}
    return ".jsonl", json.dumps(row if rng.random() < 0.5 else dict.fromkeys(names)).encode()


def _many(rng: random.Random) -> tuple[str, bytes]:
    """Many messages, many tools, many tiny values."""
    count = rng.choice([100, 1000, 4000, 100_000])
    row = rng.choice([{"messages": CHAT * count}, {"messages": [CHAT[0]] * count},
                      {"messages": CHAT, "tools": [{}] * count}])  # fmt: skip
    tiny = b'{"text": "a", "x": [' + b"[]," * 5_000_000 + b"[]]}"
    return ".jsonl", rng.choice([json.dumps(row).encode(), tiny])


def _binary(rng: random.Random) -> tuple[str, bytes]:
    raw = rng.randbytes(rng.choice([10, 1000, 100_000]))
    head = rng.choice([b"", b"PAR1", b"\x1f\x8b", b"\xff\xfe", b'{"text": "', b"[", b"text\n"])
    tail = rng.choice([b"", b"PAR1", b'"}'])
    return rng.choice([".jsonl", ".json", ".csv", ".parquet", ".txt"]), head + raw + tail


def _parquet(rng: random.Random) -> tuple[str, bytes]:
    import pyarrow
    from pyarrow import parquet

    table = rng.choice([
        {"text": ["a" * 10**6] * rng.choice([10, 500])},
        {"text": ["a" * rng.choice([10**6, 5 * 10**7])]},
        {"messages": [CHAT] * 300, "id": range(300)},
        {"text": [None, "", "a"] * 100},
        {f"c{i}": ["a"] for i in range(rng.choice([10, 5000]))},
    ])  # fmt: skip
    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(table), out, compression="zstd")
    raw = bytearray(out.getvalue().to_pybytes())
    for _ in range(rng.choice([0, 0, 1, 20])):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return ".parquet", bytes(raw)


def _empty(rng: random.Random) -> tuple[str, bytes]:
    blank = [b"{}", b'{"text": ""}', b'{"messages": []}', b'{"text": null}', b"", b"null"]
    lines = [rng.choice(blank) for _ in range(rng.randint(1, 6))]
    return ".jsonl", b"\n".join([*lines, *([b'{"text": "a"}'] * rng.randint(0, 1))]) + b"\n"


KINDS: dict[str, Make] = {
    "mutated": _mutated, "list": _list, "deep": _deep, "long": _long, "wide": _wide, "many": _many,
    "binary": _binary, "parquet": _parquet, "empty": _empty,
}  # fmt: skip

_CHILD = """
import resource, sys, time
from support.tiny_tokenizer import tiny_tokenizer
from qlora_wgpu.data import PreprocessConfig, load_dataset
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.visible import visible
begin = time.process_time()
how = PreprocessConfig(1024, chat_template=sys.argv[2] or "chatml")
try:
    print("works", len(load_dataset(sys.argv[1], tiny_tokenizer(), 1024, how=how)))
except QLoRAError as err:
    print("sentence", visible(str(err)))
children = resource.getrusage(resource.RUSAGE_CHILDREN)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
own = int(status["VmHWM"].split()[0])  # unlike ru_maxrss without what the process before had
largest = own + (children.ru_maxrss if children.ru_utime else 0)
print(time.process_time() - begin + children.ru_utime, largest / 1024)
"""
_NO_MARKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"


def judged(path: Path, template: str) -> tuple[str, str, float, float]:
    """What becomes of a file: an outcome, what was said, seconds of a processor, and MiB."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), template],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    lines = child.stdout.splitlines()
    if child.returncode or len(lines) != 2:
        return "crash", f"{child.returncode}: {child.stderr.strip()[-300:]}", 0.0, 0.0
    seconds, mebibytes = map(float, lines[1].split())
    outcome, _, said = lines[0].partition(" ")
    if seconds > SECONDS:
        outcome = "slow"
    elif mebibytes > MEBIBYTES:
        outcome = "large"
    elif len(said) > 1000:
        outcome = "long-winded"
    return outcome, said, seconds, mebibytes


def run(count: int, seed: int, seconds: float) -> int:
    """Tries files until all are done or the time is over; returns how many went wrong."""
    outcomes: Counter[tuple[str, str]] = Counter()
    slowest = largest = 0.0
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            if time.monotonic() > end:
                break
            rng = random.Random(f"{seed} {number}")
            kind = list(KINDS)[number % len(KINDS)]
            suffix, raw = KINDS[kind](rng)
            path = Path(folder, f"data{suffix}")
            path.write_bytes(raw)
            outcome, said, took, mebibytes = judged(path, rng.choice(["", _NO_MARKS]))
            path.unlink()
            outcomes[kind, outcome] += 1
            slowest, largest = max(slowest, took), max(largest, mebibytes)
            if outcome not in ("works", "sentence"):
                print(f"{kind} {number}: {outcome}, {took:.1f} s, {mebibytes:.0f} MiB: {said}")
    for (kind, outcome), times in sorted(outcomes.items()):
        print(f"{kind:10} {outcome:12} {times:5}")
    print(f"{sum(outcomes.values())} files; at most {slowest:.1f} s, {largest:.0f} MiB")
    return sum(n for (_, o), n in outcomes.items() if o not in ("works", "sentence"))


def main() -> None:
    """Runs it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600)
    options = parser.parse_args()
    sys.exit(1 if run(options.count, options.seed, options.seconds) else 0)


if __name__ == "__main__":
    main()
