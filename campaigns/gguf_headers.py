"""Mutated headers of GGUF files: each is read, or refused in one sentence and at once.

``python -m campaigns.gguf_headers --count N --seed S``
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import time
from pathlib import Path

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.tokenizer import tokenizer_files
from qlora_wgpu.errors import CheckpointError, TokenizerError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.model.stored_shapes import check_stored_shapes

CASES = ("qwen3_5_text", "qwen3_next", "gemma4_text", "deepseek_v3")
SLOW, MUCH = 10.0, 2**30  # seconds, bytes
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
HUGE = [*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9


def _string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _array(kind: int, values: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def _metadata() -> dict[str, tuple[int, bytes]]:
    """The keys of a sound Llama with two layers, as bytes of their types."""

    def number(value: int) -> tuple[int, bytes]:
        return _UINT32, struct.pack("<I", value)

    tokens = ["<s>", "</s>", *(chr(i) for i in range(33, 63))]
    return {
        "general.architecture": (_STRING, _string("llama")),
        "general.alignment": number(32),
        "llama.block_count": number(2),
        "llama.context_length": number(64),
        "llama.embedding_length": number(32),
        "llama.feed_forward_length": number(32),
        "llama.attention.head_count": number(4),
        "llama.attention.head_count_kv": number(2),
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, struct.pack("<f", 1e-5)),
        "llama.rope.freq_base": (_FLOAT32, struct.pack("<f", 1e4)),
        "tokenizer.ggml.model": (_STRING, _string("llama")),
        "tokenizer.ggml.tokens": (_ARRAY, _array(_STRING, [_string(t) for t in tokens])),
        "tokenizer.ggml.scores": (
            _ARRAY,
            _array(_FLOAT32, [struct.pack("<f", -i) for i in range(len(tokens))]),
        ),
        "tokenizer.ggml.token_type": (
            _ARRAY,
            _array(5, [struct.pack("<i", 3 if i < 2 else 1) for i in range(len(tokens))]),
        ),
        "tokenizer.ggml.bos_token_id": number(0),
        "tokenizer.ggml.add_bos_token": (_BOOL, b"\1"),
    }


def _shapes() -> dict[str, tuple[tuple[int, ...], int]]:
    """Dimensions, the fastest first, and types: 0 is F32, 8 is Q8_0."""
    shapes = {"token_embd.weight": ((32, 32), 8), "output_norm.weight": ((32,), 0)}
    for i in range(2):
        rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 32,
                "ffn_up": 32, "ffn_down": 32}  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": ((32, n), 8) for name, n in rows.items()}
        shapes |= {f"blk.{i}.{name}.weight": ((32,), 0) for name in ("attn_norm", "ffn_norm")}
    return shapes


def sound() -> tuple[bytes, int]:
    """A small model, and how many of its bytes are its header."""
    metadata, shapes = _metadata(), _shapes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    for key, (kind, value) in metadata.items():
        head += _string(key) + struct.pack("<I", kind) + value
    offset = 0
    for name, (sizes, kind) in shapes.items():
        head += _string(name) + struct.pack("<I", len(sizes))
        head += struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)
        rows = sizes[1] if len(sizes) > 1 else 1
        offset += -(-rows * (34 if kind == 8 else 128) // 32) * 32
    return head + bytes(-len(head) % 32 + offset), len(head)


def exported(case: str, place: Path) -> tuple[bytes, int, list[int]]:
    """A small model of another architecture, its header's bytes, and where it has lengths.

    Its layers differ, are made of several tensors or have another order of rows.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.gguf_models import changed, folder_of, written

    *_, made = written(folder_of(place / case, changed(case)))
    whole = (place / case / "f32.gguf").read_bytes()
    header = len(whole) - made.nbytes - 32 * len(made.tensors)
    names = [*(key for key in made.keys), *(tensor.name for tensor in made.tensors)]
    at = [whole.find(_string(name)) for name in names]
    lengths = [a + 8 + len(name) + more for a, name in zip(at, names, strict=True)
               for more in (-8 - len(name), 0, 4, 8, 12)]  # fmt: skip
    return whole, max(max(at), header), [8, 16, *lengths]


def mutated(rng: random.Random, whole: bytes, header: int) -> bytes:
    """A file with some things changed in its header, or cut."""
    content = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind, at = rng.randrange(7), rng.randrange(min(header, len(content) - 8))
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
        elif kind == 2:
            content[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS))
        elif kind == 3:
            del content[at : at + rng.choice([1, 4, 8, 100])]
        elif kind == 4:
            content[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 4, 8, 100])))
        elif kind == 5:
            end = at + rng.randrange(64)
            content[at:at] = content[at:end]
        else:
            del content[rng.randrange(9, len(content) + 1) :]
    return bytes(content)


def places_of_lengths(whole: bytes, header: int) -> list[int]:
    """Where the header has a length, a count or an offset."""
    known = [8, 16]
    for key in (*_metadata(), *_shapes()):
        found = whole.find(_string(key), 0, header)
        known += [found, found + 8 + len(key), found + 12 + len(key), found + 16 + len(key)]
    return known


def outcome(path: Path, content: bytes) -> str:
    """What became of a file; begins with WRONG where that must not be."""
    path.write_bytes(content)
    try:
        folder = ModelFolder.open(path)
        architecture = find_family(folder.config).read(folder.config)
        check_stored_shapes(folder, architecture)
        for name in folder.names():
            if folder.quantized(name) is None:
                folder.float32(name)
        result = "read"
        tokenizer_files(GGUFFile(path).metadata, path)
    except TokenizerError as err:
        return _short("read, but its vocabulary is refused", err)
    except CheckpointError as err:
        return _short("refused", err)
    except Exception as err:
        return f"WRONG: {type(err).__name__}: {err}"[:300]
    return result


def _short(what: str, err: Exception) -> str:
    return what if "\n" not in str(err) and len(str(err)) < 1000 else "WRONG: no short sentence"


def run(count: int, seed: int, tally: Tally) -> None:
    rng, before = random.Random(seed), peak_bytes()
    plain = sound()
    models = [(*plain, places_of_lengths(*plain))]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "x.gguf"
        models += [exported(case, Path(place)) for case in CASES]
        for whole, *_ in models:
            what = outcome(path, whole)
            if not what.startswith("read"):
                tally.fail("a sound file is not read", what)
        for number in range(count):
            if tally.over:
                break
            whole, header, lengths = rng.choice([*models, *models[1:]])
            content = mutated(rng, whole, header)
            if rng.random() < 0.3:
                changed, at = bytearray(whole), rng.choice(lengths)
                changed[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
                content = bytes(changed)
            begin = time.monotonic()
            what = outcome(path, content)
            if time.monotonic() - begin > SLOW:
                what = f"WRONG: {time.monotonic() - begin:.0f} s"
            if what.startswith("WRONG: "):
                tally.fail(what.removeprefix("WRONG: "), f"number {number}")
            else:
                tally.add(what)
    grown = peak_bytes() - before
    if grown > MUCH:
        tally.fail("too much memory", f"{grown / 2**20:.0f} MB")
    print(f"{grown / 2**20:.0f} MB more at most")


if __name__ == "__main__":
    campaign("mutated headers of GGUF files", run, 20_000)
