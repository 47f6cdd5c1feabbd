"""Changed YAML and bombs: a configuration, or a message of few lines, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.strangers import Content, attempt, damaged
from qlora_wgpu.config import load_config
from qlora_wgpu.limits import YAML_BYTES

EXAMPLE = (Path(__file__).parents[1] / "configs" / "example.yaml").read_text(encoding="utf-8")
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
SIZES = [2000, 20_000, YAML_BYTES - 200, YAML_BYTES + 10, 1 << 20]
CLOSING = {"[": "]", "{": "}", "(": ")"}


@st.composite
def bombs(draw: st.DrawFn) -> str:
    """One thing again and again, somewhere."""
    size = draw(st.sampled_from(SIZES))
    if draw(st.integers(0, 3)) == 3:
        pattern = draw(st.sampled_from(NUMBERED))
        piece = "".join(pattern.format(i) for i in range(size // (len(pattern) + 4)))
    else:
        pattern = "".join(draw(st.lists(st.sampled_from(REPEATED), min_size=1, max_size=3)))
        piece = pattern * (size // len(pattern))
    closing = CLOSING.get(pattern, "") if draw(st.booleans()) else ""
    return draw(st.sampled_from(PLACES)).format(piece) + closing * (size // 2) + "\n"


@st.composite
def nests(draw: st.DrawFn) -> str:
    """Deep in one of several ways, aliases that expand, or lines that are ever longer."""
    depth = draw(st.sampled_from((10, 16, 17, 100, 450)))
    shapes = (
        "".join(f"{' ' * i}a:\n" for i in range(depth)),
        "a: &a [x]\n" + "".join(f"a{i}: &a{i} [*a,*a,*a]\n" for i in range(depth)),
        "a: " + "[" * depth + "]" * depth + "\n",
        "a: " + "{a: " * depth + "1" + "}" * depth + "\n",
        "a: |\n" + "\n".join(" " * i for i in range(depth)) + "\n",
        "- " * depth + "\n",
        "".join("a" * i + ": 1\n" for i in range(1, depth)),
    )
    return draw(st.sampled_from(shapes))


@st.composite
def mixed(draw: st.DrawFn) -> str:
    """The example with lines moved, doubled, gone, indented and changed."""
    lines = EXAMPLE.splitlines(keepends=True)
    for _ in range(draw(st.sampled_from((1, 2, 3, 8)))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines.pop(at)
        cut = draw(st.integers(0, len(line)))
        piece = draw(st.one_of(st.sampled_from(REPEATED), st.characters(exclude_categories=())))
        changes = (
            ([line], [line]), ([], []), ([], [line]),
            ([line[:cut] + piece * draw(st.sampled_from((1, 3))) + line[cut:]], []),
            ([" " * draw(st.integers(0, 3)) + line.lstrip(" ")], []),
        )  # fmt: skip
        here, elsewhere = draw(st.sampled_from(changes))
        lines[at:at] = here
        other = draw(st.integers(0, len(lines)))
        lines[other:other] = elsewhere
    return "".join(lines)


@st.composite
def files(draw: st.DrawFn) -> Content:
    head = "model: {path: x}\n"
    text = draw(st.one_of(mixed(), nests().map(head.__add__), bombs().map(head.__add__)))
    raw = text.encode("utf-8", "surrogatepass")
    return draw(damaged(raw)) if draw(st.integers(0, 9)) == 9 else Content(raw)


@pytest.mark.filterwarnings("ignore")
@given(files())
def test_a_changed_file_is_read_or_refused(place: Path, content: bytes) -> None:
    path = place / "run.yaml"
    path.write_bytes(content)
    attempt(lambda: load_config(path), longest=20_000, lines=25)
