"""Headers and indices of safetensors files: read as the safetensors library does, or refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from campaigns.strangers import Content, attempt, changed, damaged
from qlora_wgpu.checkpoint import SafetensorsFile
from qlora_wgpu.checkpoint.model_folder import open_weights
from qlora_wgpu.checkpoint.safetensors_file import BITS, INDEX
from qlora_wgpu.errors import CheckpointError

NUMBERS = [
    "-1", "-0", "0", "1", "2", "3", "7", "8", "2.0", "1e3", "1e400", "4294967296",
    "9007199254740993", "4611686018427387904", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "9" * 400, "9" * 5000, "NaN", "Infinity",
    "-Infinity", "true", "null", '"2"', "[]", "{}", "[[2]]", "0x2", "02", "+2", "2_0", "",
]  # fmt: skip
STRINGS = [
    *BITS, "F33", "f32", "float32", "F16 ", "F128", "", "I4", "U4", "BF8", "x", "__metadata__",
    "a.b.weight", "\\u0041", "\\ud800", "\\ud83d\\ude00", "\\u0000", "\\n", "é", "\x01", "\t",
    "\\x", "\\", "n" * 3000, "data_offsets", "dtype", "t0",
]  # fmt: skip
METADATA = [
    "null", "{}", "3", "[]", '{"a":3}', '{"a":"\\ud800"}', '{"a":"b","a":"c"}', '{"":""}',
    '{"format":"pt"}',
]  # fmt: skip
VALUES = [
    *METADATA, '["F32",[0],[0,0]]', '["F32",[0]]', "[" * 130 + "]" * 130,
    '{"dtype":{"F32":null},"shape":[0],"data_offsets":[0,0]}',
]  # fmt: skip
SIZES = [0, 1, 2, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64]
LENGTHS = [0, 1, 2**24, 2**24 + 1, 10**8, 2**31, 2**63, 2**64 - 1]
AROUND = [" ", "\n", "\ufeff", "\0", "}", "x", "   "]
MORE = ['"more":1,', '"dtype":"U8",', '"":NaN,', *(f'"l":{value},' for value in VALUES)]
_PARTS = {
    re.compile(r"\d+"): NUMBERS,
    re.compile(r'"[^"]*"'): [f'"{text}"' for text in STRINGS],
    re.compile(r"\[[^][]*\]|\{[^{}]*\}"): VALUES,
    re.compile(r'(?<=[{,])(?=")'): MORE,  # put in before a key
    re.compile(r'"[^"]*":[^{},]*,'): ["", *MORE],
    re.compile(r'"t\d":\{[^}]*\},?'): ["", *MORE],
}


@st.composite
def entries(draw: st.DrawFn, dtype: str, shape: list[int], begin: int, end: int) -> str:
    """A tensor's value, its keys in any order."""
    parts = [
        f'"dtype":"{dtype}"',
        f'"shape":{json.dumps(shape)}',
        f'"data_offsets":[{begin},{end}]',
    ]
    return "{" + ",".join(draw(st.permutations(parts))) + "}"


@st.composite
def sound(draw: st.DrawFn) -> tuple[list[str], int]:
    """The members of a header, and the bytes of its data."""
    members, end = [], 0
    for i in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(list(BITS)))
        shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 8)), max_size=3))
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8:
            dtype, bits = "U8", math.prod(shape) * 8
        begin, end = end, end + bits // 8
        members.append(f'"t{i}":{draw(entries(dtype, shape, begin, end))}')
    if draw(st.booleans()):
        members.append('"__metadata__":' + draw(st.sampled_from(METADATA)))
    return draw(st.permutations(members)), end


@st.composite
def files(draw: st.DrawFn) -> Content:
    """A file with some things changed."""
    members, end = draw(sound())
    kind = draw(st.sampled_from(("", "", "", "sizes", "dimensions", "twice")))
    if kind == "sizes":
        shape = draw(st.lists(st.sampled_from(SIZES), max_size=3))
        members.append('"z":' + draw(entries(draw(st.sampled_from(list(BITS))), shape, 0, 0)))
    elif kind == "dimensions":
        count = draw(st.sampled_from((31, 32, 33, 64, 65, 400)))
        members.append('"d":' + draw(entries("U8", [0] + [1] * count, 0, 0)))
    elif kind == "twice" and members:
        members.insert(0, draw(st.sampled_from(members)))
    text = "{" + ",".join(members) + "}"
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2)))):
        pattern = draw(st.sampled_from(list(_PARTS)))
        if found := list(pattern.finditer(text)):
            begin, after = draw(st.sampled_from(found)).span()
            text = text[:begin] + draw(st.sampled_from(_PARTS[pattern])) + text[after:]
    if draw(st.integers(0, 9)) == 9:
        text = draw(st.sampled_from(["", *AROUND])) + text + draw(st.sampled_from(["", *AROUND]))
    raw = text.encode("utf-8", "surrogatepass")
    around = [len(raw)] * 30 + [max(len(raw) - 1, 0), len(raw) + 1] + LENGTHS
    length = draw(st.sampled_from(around)).to_bytes(8, "little")
    size = max(end + draw(st.sampled_from([0] * 20 + [-1, 1, 8])), 0)
    content = length + raw + bytes(i % 251 for i in range(size))
    if draw(st.integers(0, 4)) == 4:
        return draw(damaged(content))
    return Content(content)


def theirs(path: Path, content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """The tensors as the library reads them, or None where it refuses."""
    try:
        with safetensors.safe_open(path, "numpy"):
            pass
        read = safetensors.deserialize(content)
    except (safetensors.SafetensorError, OSError, ValueError):
        return None
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in read}


def ours(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes | None]]:
    """The same by our reader; bytes are None where NumPy cannot hold the tensor."""
    with SafetensorsFile(path) as file:
        return {
            name: (file.dtype(name), file.shape(name), _bytes_of(file, name))
            for name in file.names()
        }


def _bytes_of(file: SafetensorsFile, name: str) -> bytes | None:
    try:
        return file.raw(name).tobytes()
    except CheckpointError:
        return None


@given(files())
def test_both_readers_agree(place: Path, content: bytes) -> None:
    path = place / "x.safetensors"
    path.write_bytes(content)
    expected, read = theirs(path, content), attempt(lambda: ours(path))
    if isinstance(read, CheckpointError):
        if expected is not None:  # our own limits, which the library has not
            event("beyond our limits")
            assert str(read).endswith("allowed") or "not read" in str(read)
        return
    assert expected is not None, "the library refuses it"
    assert read.keys() == expected.keys()
    for name, (dtype, shape, data) in read.items():
        assert (dtype, shape) == expected[name][:2]
        assert data in (None, expected[name][2])


ODD: list[Any] = [
    "../a.safetensors", "/etc/passwd", "a.safetensors/", "", ".", "..", "c.safetensors", 3, None,
    [], {}, True, "a\0.safetensors", "a" * 5000 + ".safetensors", "\\a.safetensors",
    "d.safetensors", "a.safetensors", "b.safetensors", [["t0", "a.safetensors"]], ["a"] * 1000,
]  # fmt: skip
NAMES = ["t0", "u", "", "n" * 9000, "\ud800", "\x1b[2J", "weight_map"]
SOUND_MAP = {f"t{i}": f"{'ab'[i // 2]}.safetensors" for i in range(4)}


@st.composite
def indices(draw: st.DrawFn) -> Content:
    """A model.safetensors.index.json with something changed."""
    odd = st.sampled_from(ODD)
    value = {"metadata": {"total_size": 3}, "weight_map": draw(changed(SOUND_MAP, odd, NAMES))}
    kind = draw(st.sampled_from(("", "", "", "", "value", "bytes", "deep")))
    if kind == "deep":
        return Content(b"[" * draw(st.sampled_from((100, 100_000))))
    if kind == "value":
        value = draw(st.one_of(changed(value, odd, NAMES), odd))
    raw = Content(json.dumps(value).encode())
    return draw(damaged(raw)) if kind == "bytes" else raw


@pytest.fixture(scope="module")
def sharded(place: Path) -> Path:
    """A model of two shards, a folder that is no shard, and a sound file outside."""
    folder = place / "sharded"
    folder.mkdir()
    for name, first in (("a", 0), ("b", 2)):
        arrays = {f"t{i}": np.zeros(2, np.float32) for i in range(first, first + 2)}
        save_file(arrays, folder / f"{name}.safetensors")
    (folder / "d.safetensors").mkdir()
    (place / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    return folder


@given(indices())
def test_an_index_leads_nowhere_else(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    files = attempt(lambda: open_weights(sharded), 1000 + len(str(sharded)))
    if not isinstance(files, CheckpointError):
        assert all(file.path.parent == sharded for file in files.values())
