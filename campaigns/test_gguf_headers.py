"""Changed headers of GGUF files: each is read, or refused in one sentence and at once."""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gguf
from e2e.tiny import CONFIG
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import random_weights, write_model
from support.gguf_models import changed, folder_of, written

from campaigns.strangers import Content, attempt, damaged
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.checkpoint.gguf_tokenizer import tokenizer_files
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.model.pretrained import check_stored_shapes

# Their layers differ, are made of several tensors or have another order of rows.
CASES = ("qwen3_5_text", "qwen3_next", "gemma4_text", "deepseek_v3")
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
HUGE = [*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
PIECES = [*(struct.pack("<I", n) for n in NUMBERS), *(struct.pack("<Q", n) for n in HUGE)]
TOKENS = ["<s>", "</s>", *map(chr, range(33, 63))]
VOCABULARY = {
    "general.alignment": 32,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
    "tokenizer.ggml.token_type": [3 if token.endswith("s>") else 1 for token in TOKENS],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
}


class Sound(NamedTuple):
    """A file, where its header ends, and where that has a length, a count, a type or an offset."""

    content: bytes
    header: int
    lengths: list[int]

    @classmethod
    def of(cls, path: Path) -> Sound:
        reader = gguf.GGUFReader(path)
        named = {n: f.offset for n, f in reader.fields.items() if not n.startswith("GGUF.")}
        named |= {tensor.name: tensor.field.offset for tensor in reader.tensors}
        lengths = [at + more + (len(name) if more else 0)
                   for name, at in named.items() for more in (0, 8, 12, 16, 20)]  # fmt: skip
        return cls(path.read_bytes(), reader.data_offset, [8, 16, *lengths])


@cache
def models() -> list[Sound]:
    """A Llama with a vocabulary and quantized weights, and a model of each of CASES."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    config = {**CONFIG, **sizes, "vocab_size": len(TOKENS)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        llama = place / "llama.gguf"
        stored = random_weights(config)
        write_model(llama, config, stored, keys=VOCABULARY, default=gguf.GGMLQuantizationType.Q8_0)
        for case in CASES:
            written(folder_of(place / case, changed(case)))
        return [Sound.of(path) for path in (llama, *(place / c / "f32.gguf" for c in CASES))]


@st.composite
def files(draw: st.DrawFn) -> Content:
    """A file with some things changed in its header, or cut."""
    model = models()[draw(st.integers(0, len(CASES)))]
    if draw(st.booleans()):
        return draw(damaged(model.content, PIECES, model.header))
    content, at = bytearray(model.content), draw(st.sampled_from(model.lengths))
    content[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(HUGE)))
    return Content(content)


def opened(place: Path, content: bytes) -> object:
    """Reads a file as a run does, up to the tokenizer."""
    path = place / "x.gguf"
    path.write_bytes(content)

    def read() -> str:
        folder = ModelFolder.open(path)
        architecture = find_family(folder.config).read(folder.config)
        check_stored_shapes(folder, architecture)
        for name in folder.names():
            if folder[name].quantized() is None:
                folder[name].read()
        tokenizer_files(GGUFFile(path).metadata, path)
        return "read"

    return attempt(read)


def test_sound_files_are_read(place: Path) -> None:
    llama, *others = (opened(place, model.content) for model in models())
    assert llama == "read"
    for result in others:  # which have no vocabulary
        assert isinstance(result, TokenizerError)


@given(files())
def test_a_changed_header_is_read_or_refused(place: Path, content: bytes) -> None:
    opened(place, content)
