"""Regular expressions of strangers: in adapter_config.json and in the user's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from campaigns.strangers import attempt, costly
from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.adapter_config import read_adapter_config
from qlora_wgpu.lora.targets import targeted

NAMES = [
    f"model.layers.{i}.{leaf}"
    for i in range(32)
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
]
LINEARS = [LinearSpec(name, 8, 8) for name in NAMES]

# Each searches back for ever in a name of some forty characters that it does not fit.
HANGING = (
    r"(\w+\.?)+!", r"(.*)*!", r"(a|a|.)*!", r"((\w|\.)+)+!", r"(.*.*)*!", r"(\S+)+\s", r"(.+)+\1!",
    r".*.*.*.*.*.*.*.*!", r"(?:.?){60}.{60}!", r"(\w*\.*)*!", r"(?=(.+)+!).*", r"(?:(?:.)*?)*!",
    r"(.|\w|[a-z])+!", r"^(([a-z_0-9])+.)+[A-Z]([a-z])+$", r"(" + "(.?" * 30 + ")" * 30 + r")+!",
)  # fmt: skip
ORDINARY = (
    "q_proj", "self_attn.q_proj", r"layers\.\d+\.mlp\..*", r"^(?!.*visual).*(?:q_proj|v_proj).*$",
    r".*\.(q|k|v|o)_proj", r"[qv]_proj", r".*layers\.(1[0-9]|2)\..*", "(", "a{99999999999}", "*",
    r"model.layers.(?:[0-9]|1[0-5]).(?:self_attn|mlp).(?:q_proj|v_proj)", "(?P<a>.)(?P=b)", "",
    r"(?s:.)*proj", "(?<=a.*)b", "\\", "[", "(?i)Q_PROJ", "x" * 200_000, "(" * 5000 + ")" * 5000,
)  # fmt: skip
ATOMS = (r"\w", ".", "[a-z]", "a", r"\.", r"\S", "(?:a|b)", "proj", "(.)", r"[^!]", "layers", "_")
REPEATS = ("*", "+", "?", "{2,}", "{1,30}", "*?", "+?", "", "", "*+", "{,9}")


SHAPES = ("({})", "({}|a)", "(?:{}|{})", "{}", "(?={})", "{}!", "({})+!")
repeats = st.sampled_from(REPEATS)
made = st.recursive(
    st.builds(str.__add__, st.sampled_from(ATOMS), repeats),
    lambda parts: st.builds(
        lambda shape, inner, repeat: shape.replace("{}", "".join(inner)) + repeat,
        st.sampled_from(SHAPES), st.lists(parts, min_size=1, max_size=3), repeats,
    ),
    max_leaves=30,
)  # fmt: skip
patterns = st.one_of(
    st.sampled_from(HANGING),
    st.sampled_from(ORDINARY),
    st.builds(str.__add__, st.sampled_from(("", "^", "(?!.*visual)")), made),
)


def in_adapter(place: Path, key: str, value: Any) -> None:
    """Reads an adapter's settings, and what they say of each layer."""
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    path = place / "adapter_config.json"
    path.write_text(json.dumps(fields | {key: value}))
    config = read_adapter_config(path, NAMES)
    for name in NAMES:
        config.rank_of(name), config.alpha_of(name)


def as_target(place: Path, pattern: str) -> None:
    assert targeted(LINEARS, LoraConfig(target_modules=pattern).target_modules), "nothing fits"


PLACES = {
    "rank_pattern": lambda place, p: in_adapter(place, "rank_pattern", {p: 2}),
    "alpha_pattern": lambda place, p: in_adapter(place, "alpha_pattern", {"q_proj": 3, p: 2}),
    "target_modules": lambda place, p: in_adapter(place, "target_modules", p),
    "exclude_modules": lambda place, p: in_adapter(place, "exclude_modules", p),
    "layers_pattern": lambda place, p: in_adapter(place, "layers_pattern", p),
    "lora.target_modules": as_target,
    "lora.rank_pattern": lambda place, p: LoraConfig(rank_pattern={p: 3}),
}


@costly
@given(where=st.sampled_from(list(PLACES)), pattern=patterns)
def test_a_pattern_ends(place: Path, where: str, pattern: str) -> None:
    attempt(lambda: PLACES[where](place, pattern))
