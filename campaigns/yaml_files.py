"""Mutated YAML and bombs: a configuration, or a message of few lines, soon.

``python -m campaigns.yaml_files --count N --seed S``
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from pathlib import Path

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.config import load_config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import YAML_BYTES

SLOW, MUCH, LONGEST = 10.0, 2**30, 20_000
EXAMPLE = Path(__file__).parents[1] / "configs" / "example.yaml"

# Repeated as often as the file has room.
REPEATED = [
    "a: ", "- ", "? ", "[", "{", "[],", "{},", '"",', "a,", "1,", "a: 1,", "a: 1\n", "- [1]\n",
    "#\n", "\n",
    " ", "\t", "\\x41", "\\\n", "''", '"', "'", "|\n", ">\n", "&a ", "*a ", "!a ", "!!", "%41",
    "%YAML 1.1\n",
    "%TAG ! b\n", "---\n", "...\n", "<<: {}\n", "<<: *a\n", ": ", ":", "a b\n c", "b\n", "1_",
    "0x", ".5", "e9",
    "漢", "\x85", "\u2028", "\ufeff", "\x00", "\r", "\r\n", "a#", "a:b", "- a\n", "  - ", "@", "`",
    "~", "\\",
    "(a|b)", "(", "\\d+", "a{9}",
]  # fmt: skip
PLACES = [
    "{}", "a: {}", "a: [{}]", "a: {{{}}}", 'a: "{}"', "a: '{}'", "a: |\n  {}", "{}: 1", '"{}": 1',
    "? {}",
    "lora: {{target_modules: [{}]}}", "lora: {{target_modules: '{}'}}",
    "lora: {{rank_pattern: {{{}}}}}",
    "train: {{seed: {}}}", "optim: {{learning_rate: {}}}", "log: {{report_to: [{}]}}",
    "data: {{columns: {{{}}}}}",
    "lora: {{layers_to_transform: [{}]}}", "data: {{chat_template: '{}'}}", "lora: [{}]", "# {}",
    "model: {}",
]  # fmt: skip
NUMBERED = ["k{}: 1\n", "k{},", "k{}: 0,", "lora_{}:\n", "  r{}: 1\n", "{},", "a{}: [1]\n"]


def bomb(rng: random.Random) -> str:
    """One thing again and again, somewhere."""
    size = rng.choice([2000, 20_000, YAML_BYTES - 200, YAML_BYTES + 10, 1 << 20])
    if rng.random() < 0.3:
        pattern = rng.choice(NUMBERED)
        piece = "".join(pattern.format(i) for i in range(size // (len(pattern) + 4)))
    else:
        pattern = "".join(rng.choices(REPEATED, k=rng.choice([1, 1, 2, 3])))
        piece = pattern * (size // len(pattern))
    text = rng.choice(PLACES).format(piece)
    if rng.random() < 0.1:
        closing = {"[": "]", "{": "}", "(": ")"}.get(pattern, "")
        text += closing * (size // 2)
    return "model: {path: x}\n" + text + "\n"


def nested(rng: random.Random) -> str:
    """Deep in one of several ways, aliases that expand, or lines that are ever longer."""
    depth = rng.choice([10, 16, 17, 100, 450])
    return "model: {path: x}\n" + rng.choice(
        [
            "".join(f"{' ' * i}a:\n" for i in range(depth)),
            "a: &a [x]\n" + "".join(f"a{i}: &a{i} [*a,*a,*a]\n" for i in range(depth)),
            "a: " + "[" * depth + "]" * depth + "\n",
            "a: " + "{a: " * depth + "1" + "}" * depth + "\n",
            "a: |\n" + "\n".join(" " * i for i in range(depth)) + "\n",
            "- " * depth + "\n",
            "".join("a" * i + ": 1\n" for i in range(1, depth)),
        ]
    )


def mutated(rng: random.Random, example: str) -> str:
    """The example with lines moved, doubled and changed."""
    lines = example.splitlines(keepends=True)
    for _ in range(rng.choice([1, 2, 3, 8])):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 1:
            del lines[at]
        elif kind == 2:
            cut = rng.randrange(len(lines[at]) + 1)
            piece = rng.choice(REPEATED) * rng.choice([1, 3])
            lines[at] = lines[at][:cut] + piece + lines[at][cut:]
        elif kind == 3:
            lines[at] = " " * rng.randrange(4) + lines[at].lstrip(" ")
        else:
            text = lines[at]
            cut = rng.randrange(len(text) + 1)
            lines[at] = (
                text[:cut]
                + chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)]))
                + text[cut:]
            )
    return "".join(lines)


def content(rng: random.Random, example: str) -> bytes:
    kind = rng.random()
    text = bomb(rng) if kind < 0.4 else nested(rng) if kind < 0.5 else mutated(rng, example)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.1 and raw:
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def outcome_of(path: Path) -> str:
    try:
        load_config(path)
    except ConfigError as err:
        short = len(str(err)) < LONGEST and str(err).count("\n") < 25
        return "refused" if short else "WRONG: a message of many lines"
    except Exception as err:
        return f"WRONG: {type(err).__name__}: {err}"[:160]
    return "read"


def run(count: int, seed: int, tally: Tally) -> None:
    rng, example, slowest = random.Random(seed), EXAMPLE.read_text(encoding="utf-8"), 0.0
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(place) / "run.yaml"
        for number in range(count):
            if tally.over:
                break
            raw = content(rng, example)
            path.write_bytes(raw)
            begin = time.process_time()
            outcome = outcome_of(path)
            seconds = time.process_time() - begin
            slowest = max(slowest, seconds)
            if seconds > SLOW:
                outcome = f"WRONG: {seconds:.0f} s"
            if outcome.startswith("WRONG: "):
                tally.fail(outcome.removeprefix("WRONG: "), f"number {number}: {raw[:200]!r}")
            else:
                tally.add(outcome)
    grown = peak_bytes() - before
    if grown > MUCH:
        tally.fail("too much memory", f"{grown / 2**20:.0f} MB")
    print(f"{grown / 2**20:.0f} MB more at most, {slowest:.1f} s")


if __name__ == "__main__":
    campaign("mutated YAML and bombs", run, 3_000)
