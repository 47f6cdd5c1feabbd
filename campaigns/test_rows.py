"""Data files that are malformed, hostile or large: each works, or ends in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from support.tiny_tokenizer import tiny_tokenizer

from campaigns.strangers import Content, attempt, costly, damaged
from qlora_wgpu.data import Preparation, load_dataset

CHAT = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "input": "", "output": "b"},
    {"text": "some text"},
]
PIECES = [
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\x1b[2J", b"\r", b"[", b"{", b'"', b"}",
    b"null", b"1e999", b"9" * 5000, b"NaN", b"\xe2\x80\xae", b"\\u0000",
]  # fmt: skip
BLANK = [b"{}", b'{"text": ""}', b'{"messages": []}', b'{"text": null}', b"", b"null"]
NO_MARKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
TABLES: list[Any] = [
    *({"text": ["a" * 10**6] * n} for n in (10, 500)),
    *({"text": ["a" * n]} for n in (10**6, 5 * 10**7)),
    {"messages": [CHAT] * 300, "id": range(300)},
    {"text": [None, "", "a"] * 100},
    *({f"c{i}": ["a"] for i in range(n)} for n in (10, 5000)),
]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
File = tuple[str, Content]
suffixes = st.sampled_from(SUFFIXES)


@st.composite
def mutated(draw: st.DrawFn) -> File:
    """Whole rows with some bytes changed, doubled or cut out, by lines or in a list."""
    row = json.dumps(draw(st.sampled_from(ROWS))).encode()
    raw = draw(damaged((row + b"\n") * draw(st.integers(1, 4)), PIECES))
    if draw(st.booleans()):
        return draw(suffixes), raw
    return ".json", Content(b"[" + raw.replace(b"\n", b",") + b"]")


@st.composite
def deep(draw: st.DrawFn) -> File:
    depth = draw(st.sampled_from((50, 70, 500, 950, 5000, 100_000, 5_000_000)))
    opening, closing = draw(st.sampled_from(((b"[", b"]"), (b'{"a":', b"}"))))
    nest = opening * depth + b"1" + closing * depth
    as_text = json.dumps({"messages": nest.decode()}).encode()
    inside = b'{"text": "a\\u0041", "x": ' + nest + b"}"
    return draw(st.sampled_from(SUFFIXES[:2])), Content(
        draw(st.sampled_from((inside, as_text, nest)))[: 15 << 20]
    )


@st.composite
def long(draw: st.DrawFn) -> File:
    size = draw(
        st.sampled_from((100_000, 1_500_000, 4_000_000, 20_000_000, 30_000_000, 100_000_000))
    )
    unit = draw(
        st.sampled_from(("a", "lorem ipsum ", "0", "\n", " ", "你", "🙂", "\u202e", "ab\n"))
    )
    text = unit * (size // len(unit.encode()))
    rows = {"text": text}, {"prompt": "a", "completion": text}, {"messages": [CHAT[0], {
        "role": "assistant", "content": text}]}  # fmt: skip
    suffix = draw(st.sampled_from(SUFFIXES[:3]))
    if suffix == ".csv":
        return suffix, Content(b'text\n"' + text.encode() + b'"\n')
    line = json.dumps(draw(st.sampled_from(rows)), ensure_ascii=draw(st.booleans())).encode()
    return suffix, Content(b"[" + line + b"]" if suffix == ".json" else line)


@st.composite
def wide(draw: st.DrawFn) -> File:
    names = [f"c{i}" for i in range(draw(st.sampled_from((1000, 5000, 1_000_000))))]
    if draw(st.booleans()):
        return ".csv", Content((",".join(names) + "\n" + "," * (len(names) - 1) + "\n").encode())
    row = dict.fromkeys(names, draw(st.sampled_from((None, 1, "x"))))
    text = draw(st.sampled_from(({"text": "a"}, {})))
    return ".jsonl", Content(json.dumps({**text, **row}).encode())


@st.composite
def many(draw: st.DrawFn) -> File:
    """Many messages, many tools, many tiny values."""
    count = draw(st.sampled_from((100, 1000, 4000, 100_000)))
    rows = {"messages": CHAT * count}, {"messages": [CHAT[0]] * count}, {
        "messages": CHAT, "tools": [{}] * count}  # fmt: skip
    if draw(st.integers(0, 3)) == 3:
        return ".jsonl", Content(b'{"text": "a", "x": [' + b"[]," * 5_000_000 + b"[]]}")
    return ".jsonl", Content(json.dumps(draw(st.sampled_from(rows))).encode())


@st.composite
def binary(draw: st.DrawFn) -> File:
    raw = draw(st.randoms(use_true_random=False)).randbytes(draw(st.sampled_from((10, 1000))))
    heads = b"", b"PAR1", b"\x1f\x8b", b"\xff\xfe", b'{"text": "', b"[", b"text\n"
    head, tail = draw(st.sampled_from(heads)), draw(st.sampled_from((b"", b"PAR1", b'"}')))
    return draw(suffixes), Content(head + raw * draw(st.sampled_from((1, 100))) + tail)


@st.composite
def tables(draw: st.DrawFn) -> File:
    out = pyarrow.BufferOutputStream()
    table = TABLES[draw(st.integers(0, len(TABLES) - 1))]
    parquet.write_table(pyarrow.table(table), out, compression="zstd")
    raw = out.getvalue().to_pybytes()
    return ".parquet", draw(damaged(raw)) if draw(st.booleans()) else Content(raw)


@st.composite
def empty(draw: st.DrawFn) -> File:
    lines = draw(st.lists(st.sampled_from([*BLANK, b'{"text": "a"}']), min_size=1, max_size=6))
    return ".jsonl", Content(b"\n".join(lines) + b"\n")


@costly
@given(
    file=st.one_of(mutated(), deep(), long(), wide(), many(), binary(), tables(), empty()),
    template=st.sampled_from(("chatml", NO_MARKS)),
)
def test_a_file_is_read_or_refused(place: Path, file: File, template: str) -> None:
    suffix, raw = file
    path = place / f"data{suffix}"
    path.write_bytes(raw)
    how = Preparation(1024, chat_template=template)
    attempt(lambda: load_dataset(path, tiny_tokenizer(), 1024, how=how))
