"""Regular expressions of strangers: in adapter_config.json and in the user's configuration."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.support import Tally, campaign
from campaigns.watched import Case, watched
from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.config import read_adapter_config
from qlora_wgpu.lora.targets import targeted

NAMES = [
    f"model.layers.{i}.{leaf}"
    for i in range(32)
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
]
_LINEARS = [LinearSpec(name, 8, 8) for name in NAMES]

# Each searches back for ever in a name of some forty characters that it does not fit.
HANGING = (
    r"(\w+\.?)+!", r"(.*)*!", r"(a|a|.)*!", r"((\w|\.)+)+!", r"(.*.*)*!", r"(\S+)+\s", r"(.+)+\1!",
    r".*.*.*.*.*.*.*.*!", r"(?:.?){60}.{60}!", r"(\w*\.*)*!", r"(?=(.+)+!).*", r"(?:(?:.)*?)*!",
    r"(.|\w|[a-z])+!", r"^(([a-z_0-9])+.)+[A-Z]([a-z])+$", r"(" + "(.?" * 30 + ")" * 30 + r")+!",
)  # fmt: skip
_ORDINARY = (
    "q_proj", "self_attn.q_proj", r"layers\.\d+\.mlp\..*", r"^(?!.*visual).*(?:q_proj|v_proj).*$",
    r".*\.(q|k|v|o)_proj", r"[qv]_proj", r".*layers\.(1[0-9]|2)\..*", "(", "a{99999999999}", "*",
    r"model.layers.(?:[0-9]|1[0-5]).(?:self_attn|mlp).(?:q_proj|v_proj)", "(?P<a>.)(?P=b)", "",
    r"(?s:.)*proj", "(?<=a.*)b", "\\", "[", "(?i)Q_PROJ", "x" * 200_000, "(" * 5000 + ")" * 5000,
)  # fmt: skip
_ATOMS = (r"\w", ".", "[a-z]", "a", r"\.", r"\S", "(?:a|b)", "proj", "(.)", r"[^!]", "layers", "_")
_REPEATS = ("*", "+", "?", "{2,}", "{1,30}", "*?", "+?", "", "", "*+", "{,9}")


def cases(count: int, seed: int) -> Iterator[Case]:
    """Every known one at each place, and then what a seed makes."""
    known = [
        (f"{p[:60]} at {where}", (p, where)) for p in (*HANGING, *_ORDINARY) for where in _PLACES
    ]
    yield from known[:count]
    for number in range(count - len(known)):
        draw = random.Random(f"{seed}/{number}")
        pattern = draw.choice(("", "^", "(?!.*visual)")) + _made(draw, draw.randrange(1, 5))
        place = draw.choice([*_PLACES])
        yield f"seed {seed}, number {number}: {pattern[:80]} at {place}", (pattern, place)


def _made(draw: random.Random, depth: int) -> str:
    """A pattern of patterns, repeated and repeated again."""
    if depth == 0:
        return draw.choice(_ATOMS) + draw.choice(_REPEATS)
    parts = "".join(_made(draw, depth - 1) for _ in range(draw.randrange(1, 4)))
    shape = draw.choice(("({})", "({}|a)", "(?:{}|{})", "{}", "(?={})", "{}!", "({})+!"))
    return shape.replace("{}", parts) + draw.choice(_REPEATS)


def _in_adapter(key: str, value: Any) -> str:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter_config.json"
        path.write_text(json.dumps(fields | {key: value}))
        config = read_adapter_config(path, NAMES)
        return f"read, {len({(config.rank_of(n), config.alpha_of(n)) for n in NAMES})} kinds"


def _as_target(pattern: str) -> str:
    names = targeted(_LINEARS, LoraConfig(target_modules=pattern).target_modules)
    return "fits" if names else "WRONG: nothing fits without a word"


def _as_rank(pattern: str) -> str:
    LoraConfig(rank_pattern={pattern: 3})
    return "read"


_PLACES = {
    "rank_pattern": lambda p: _in_adapter("rank_pattern", {p: 2}),
    "alpha_pattern": lambda p: _in_adapter("alpha_pattern", {"q_proj": 3, p: 2}),
    "target_modules": lambda p: _in_adapter("target_modules", p),
    "exclude_modules": lambda p: _in_adapter("exclude_modules", p),
    "layers_pattern": lambda p: _in_adapter("layers_pattern", p),
    "lora.target_modules": _as_target,
    "lora.rank_pattern": _as_rank,
}


def attempt(case: tuple[str, str]) -> str:
    """Reads a pattern where it stands, and looks for the layers that it means."""
    pattern, place = case
    outcome: str = _PLACES[place](pattern)
    return outcome.partition(",")[0]


def body(count: int, seed: int, tally: Tally) -> None:
    """Runs the campaign: every known one at each place, and what the seed makes, shuffled."""
    each = [(p, where) for p in (*HANGING, *_ORDINARY) for where in _PLACES]
    known = [(f"{p[:60]} at {where}", (p, where)) for p, where in each][: count // 2]
    chosen = [*known, *cases(count - len(known), seed)]
    random.Random(seed).shuffle(chosen)
    watched(iter(chosen), attempt, tally)


if __name__ == "__main__":
    campaign("patterns", body, 1000)
