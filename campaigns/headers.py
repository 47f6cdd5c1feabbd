"""Mutated safetensors headers and indices: our reader and the safetensors library must agree.

``python -m campaigns.headers --count N --seed S``
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.checkpoint import SafetensorsFile
from qlora_wgpu.checkpoint.safetensors_format import BITS, INDEX
from qlora_wgpu.checkpoint.weight_files import open_weights
from qlora_wgpu.errors import CheckpointError

SLOW, MUCH = 10.0, 2**30  # seconds, bytes
BEYOND = ("allowed", "is not read")  # our own limits, which the library has not
NUMBERS = [
    "-1", "-0", "0", "1", "2", "3", "7", "8", "2.0", "1e3", "1e400", "4294967296",
    "9007199254740993", "4611686018427387904", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "9" * 400, "9" * 5000, "NaN", "Infinity",
    "-Infinity", "true", "null", '"2"', "[]", "{}", "[[2]]", "0x2", "02", "+2", "2_0", "",
]  # fmt: skip
NAMES = [
    "x", "", "__metadata__", "a.b.weight", "\\u0041", "\\ud800", "\\ud83d\\ude00", "\\u0000",
    "\\n", "é", "\x01", "\t", "\\x", "\\", "n" * 3000, "data_offsets", "dtype",
]  # fmt: skip
DTYPES = [*BITS, "F33", "f32", "float32", "F16 ", "F128", "", "I4", "U4", "BF8"]


def entry(rng: random.Random, dtype: str, shape: list[Any], begin: Any, end: Any) -> str:
    """One tensor's value, its keys in any order."""
    parts = [
        f'"dtype":"{dtype}"',
        f'"shape":[{",".join(map(str, shape))}]',
        f'"data_offsets":[{begin},{end}]',
    ]
    rng.shuffle(parts)
    return "{" + ",".join(parts) + "}"


def header(rng: random.Random) -> tuple[list[str], int]:
    """The members of a sound header, and the bytes of its data."""
    members, end = [], 0
    for i in range(rng.randint(0, 4)):
        dtype = rng.choice(list(BITS))
        shape = [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.randint(0, 3))]
        bits = int(np.prod(shape, dtype=object)) * BITS[dtype]
        if bits % 8:
            dtype, bits = "U8", bits // BITS[dtype] * 8
        begin, end = end, end + bits // 8
        members.append(f'"t{i}":{entry(rng, dtype, shape, begin, end)}')
    if rng.random() < 0.4:
        members.append('"__metadata__":{"format":"pt"}')
    if rng.random() < 0.3:
        rng.shuffle(members)
    return members, end


def change_number(rng: random.Random, text: str) -> str:
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    if not digits:
        return text
    first = last = rng.choice(digits)
    while last < len(text) and text[last].isdigit():
        last += 1
    return text[:first] + rng.choice(NUMBERS) + text[last:]


def change_members(rng: random.Random, members: list[str]) -> list[str]:
    kind = rng.randrange(9)
    at = rng.randrange(len(members)) if members else 0
    if kind == 0 and members:  # twice, the first or the last changed
        members.insert(rng.randrange(len(members) + 1), change_number(rng, members[at]))
    elif kind == 1 and members:
        members[at] = f'"{rng.choice(NAMES)}"' + members[at][members[at].index(":") :]
    elif kind == 2:
        shape = rng.choices([0, 1, 2, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64], k=3)
        members.append('"z":' + entry(rng, rng.choice(list(BITS)), shape, 0, 0))
    elif kind == 3 and members:
        more = rng.choice(['"more":1', '"dtype":"U8"', '"more":' + "[" * 130 + "]" * 130, '"":NaN'])
        members[at] = members[at].replace("{", "{" + more + ",", 1)
    elif kind == 4 and members:
        members[at] = members[at].replace('"dtype":"', f'"dtype":"{rng.choice(DTYPES)}","n":"', 1)
    elif kind == 5:
        values = [
            "null",
            "{}",
            "3",
            "[]",
            '{"a":3}',
            '{"a":"\\ud800"}',
            '{"a":"b","a":"c"}',
            '{"":""}',
        ]
        members.append(f'"__metadata__":{rng.choice(values)}')
    elif kind == 6:
        values = [
            '["F32",[0],[0,0]]',
            '["F32",[0]]',
            '{"dtype":{"F32":null},"shape":[0],"data_offsets":[0,0]}',
        ]
        members.append(f'"l":{rng.choice(values)}')
    elif kind == 7:
        dimensions = [rng.choice([0, 1])] * rng.choice([31, 32, 33, 64, 65, 400])
        members.append('"d":' + entry(rng, "U8", [0, *dimensions], 0, 0))
    elif members:
        del members[at]
    return members


def mutated(rng: random.Random) -> bytes:
    """A file with some things changed."""
    members, end = header(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        members = change_members(rng, members)
    text = "{" + ",".join(members) + "}"
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        text = change_number(rng, text)
    if rng.random() < 0.15:
        text = (
            rng.choice([" ", "\n", "\ufeff", "\0", ""])
            + text
            + rng.choice([" ", "\0", "}", "x", "   "])
        )
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.15 and raw:
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    length = len(raw)
    if rng.random() < 0.05:
        length = rng.choice(
            [0, 1, length - 1, length + 1, 2**24, 2**24 + 1, 10**8, 2**31, 2**63, 2**64 - 1]
        )
    data = bytes(rng.randrange(256) for _ in range(end + rng.choice([0] * 20 + [-1, 1, 8])))
    content = bytearray(struct.pack("<Q", max(length, 0)) + raw + data)
    if rng.random() < 0.05 and content:
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.02:
        del content[rng.randrange(len(content) + 1) :]
    return bytes(content)


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
            name: (file.dtype(name), file.shape(name), bytes_of(file, name))
            for name in file.names()
        }


def bytes_of(file: SafetensorsFile, name: str) -> bytes | None:
    try:
        return file.raw(name).tobytes()
    except CheckpointError:
        return None


def compare(path: Path, content: bytes) -> str:
    """What became of a file; begins with WRONG where the two differ."""
    path.write_bytes(content)
    expected = theirs(path, content)
    try:
        read = ours(path)
    except CheckpointError as err:
        if "\n" in str(err) or len(str(err)) > 1000:
            return "WRONG: the message is not one short line"
        if expected is None:
            return "refused by both"
        beyond = str(err).endswith(BEYOND) or "not read" in str(err)
        return "beyond our limits" if beyond else "WRONG: refused, but the library takes it"
    except Exception as err:
        return f"WRONG: {type(err).__name__}: {err}"[:200]
    if expected is None:
        return "WRONG: taken, but the library refuses it"
    if read.keys() != expected.keys():
        return "WRONG: other names"
    for name, (dtype, shape, data) in read.items():
        if (dtype, shape) != expected[name][:2] or data not in (None, expected[name][2]):
            return "WRONG: another type, shape or content"
    return "read alike"


def mutated_index(rng: random.Random) -> bytes:
    """A model.safetensors.index.json with something changed."""
    shards = ["a.safetensors", "b.safetensors"]
    odd = [
        "../a.safetensors", "/etc/passwd", "a.safetensors/", "", ".", "..", "c.safetensors", 3,
        None, [], {}, True, "a\0.safetensors", "a" * 5000 + ".safetensors", "\\a.safetensors",
        "d.safetensors",
    ]  # fmt: skip
    weight_map: Any = {f"t{i}": shards[i // 2] for i in range(4)}
    if rng.random() < 0.5:
        weight_map[rng.choice(["t0", "u", "", "n" * 9000, "\ud800", "\x1b[2J"])] = rng.choice(
            odd + shards
        )
    if rng.random() < 0.1:
        weight_map = rng.choice([[], {}, None, 3, "x", [["t0", "a.safetensors"]]])
    value: Any = {"metadata": {"total_size": 3}, "weight_map": weight_map}
    if rng.random() < 0.05:
        value = rng.choice([[], 3, None, {"weight_map": {"t0": ["a"] * 1000}}])
    raw = bytearray(json.dumps(value).encode())
    if rng.random() < 0.05:
        raw = bytearray(b"[" * rng.choice([100, 100_000]))
    for _ in range(rng.choice([0, 0, 1, 2])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def sharded(folder: Path) -> Path:
    """A model of two shards, and things that are no shards."""
    folder.mkdir()
    for name, first in (("a", 0), ("b", 2)):
        arrays = {f"t{i}": np.zeros(2, np.float32) for i in range(first, first + 2)}
        safetensors.numpy.save_file(arrays, folder / f"{name}.safetensors")
    (folder / "d.safetensors").mkdir()
    return folder


def open_index(folder: Path, content: bytes) -> str:
    (folder / INDEX).write_bytes(content)
    try:
        files = open_weights(folder)
    except CheckpointError as err:
        short = "\n" not in str(err) and len(str(err)) < 1000 + len(str(folder))
        return "index refused" if short else "WRONG: the message is not one short line"
    except Exception as err:
        return f"WRONG: {type(err).__name__}: {err}"[:200]
    inside = all(file.path.parent == folder for file in files.values())
    return "index read" if inside else "WRONG: a file outside the folder"


def run(count: int, seed: int, tally: Tally) -> None:
    rng, before = random.Random(seed), peak_bytes()
    with tempfile.TemporaryDirectory() as place:
        path, folder = Path(place) / "x.safetensors", sharded(Path(place) / "sharded")
        for number in range(count):
            if tally.over:
                break
            index = number % 20 == 19
            content = mutated_index(rng) if index else mutated(rng)
            begin = time.monotonic()
            outcome = open_index(folder, content) if index else compare(path, content)
            if time.monotonic() - begin > SLOW:
                outcome = f"WRONG: {time.monotonic() - begin:.0f} s"
            if outcome.startswith("WRONG: "):
                tally.fail(outcome.removeprefix("WRONG: "), f"number {number}: {content[:300]!r}")
            else:
                tally.add(outcome)
    grown = peak_bytes() - before
    if grown > MUCH:
        tally.fail("too much memory", f"{grown / 2**20:.0f} MB")
    print(f"{grown / 2**20:.0f} MB more at most")


if __name__ == "__main__":
    campaign("mutated safetensors headers and indices", run, 300_000)
