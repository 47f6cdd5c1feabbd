"""Tokenizers of GGUF files, made of real ones as llama.cpp's converter makes them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import byte_vocabulary, keys_of, random_weights, tensors_of, write_gguf
from support.recorded import RECORDED, needs_recordings

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import TokenizerError

CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
RANGES = [
    *[(0x20, 0x7F)] * 4, (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0x980),
    (0xE00, 0xE80), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF),
    (0x1F900, 0x1F9FF), (0x2000, 0x2070), (0x300, 0x36F), (0x10000, 0x10100), (1, 0x20),
]  # fmt: skip
JOINTS = [
    "", " ", "  ", "\n", "\t", "\r\n", "    ", "\n\n\n", "1234567890 3.14159 0x1F",
    "<|im_start|>", "<s>", "</s>", "<unk>", "<|endoftext|>", "<think>", " </s> ",
    "it's we'LL I'M", "don’t", "\u200d", "👩‍👩‍👧‍👦", "\u00a0", "\u3000", "é", "e\u0301", "▁",
]  # fmt: skip


def odd_texts(count: int = 700) -> list[str]:
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(rng.randrange(1, 12)):
            first, end = rng.choice(RANGES)
            word = (chr(rng.randrange(first, end)) for _ in range(rng.randrange(1, 8)))
            pieces += ["".join(word), rng.choice(JOINTS)]
        texts.append("".join(pieces))
    for path in sorted((Path(__file__).parents[2] / "qlora_wgpu").rglob("*.py"))[:300]:
        code = path.read_text()
        first = rng.randrange(max(len(code) - 300, 1))
        texts.append(code[first : first + 300])
    return [*texts, "", " ", "  ", "\n", " a", "a ", "▁▁a b", "\t\t x", "0" * 50, " " * 40]


def folder_of(path: Path, keys: dict[str, Any]) -> ModelFolder:
    tensors = tensors_of(CONFIG, random_weights(CONFIG))
    return ModelFolder.without_weights(write_gguf(path, "llama", keys_of(CONFIG) | keys, tensors))


def keys_of_tokenizer(folder: Path, pre: str, scores: str = "") -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer.json."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(stored["model"]["vocab"])
    added = {token["content"]: token for token in stored["added_tokens"]}
    vocab |= {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.get)

    def kind(text: str) -> int:
        if text in added:
            return 3 if added[text]["special"] else 4
        return 6 if scores and len(text) == 6 and text.startswith("<0x") else 1

    keys = {
        "tokenizer.ggml.model": "llama" if scores else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "[PAD]" if scores else f"[PAD{len(tokens)}]"],
        "tokenizer.ggml.token_type": [*map(kind, tokens), 5],
        "tokenizer.chat_template": config.get("chat_template"),
    }
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for name, role in roles.items():
        if config.get(f"{name}_token"):
            keys[f"tokenizer.ggml.{role}_token_id"] = vocab[config[f"{name}_token"]]
    if scores == "alike":  # converted without SentencePiece's file
        return keys | {"tokenizer.ggml.scores": [-1000.0] * (len(tokens) + 1)}
    if scores:  # runs of spaces have the lowest
        own = [float(-1e9 if not t.strip("▁") else -i) for i, t in enumerate(tokens)]
        return keys | {"tokenizer.ggml.scores": [*own, -1000.0]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"]["merges"]]
    return keys | {"tokenizer.ggml.merges": merges}


def as_read(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys as a file's header gives them, without the file."""

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [v.encode() for v in value] if isinstance(value[0], str) else np.array(value)

    return {key: read(value) for key, value in keys.items()}


def made_of(keys: dict[str, Any], folder: Path) -> Tokenizer:
    files = tokenizer_files(as_read(keys), Path("m.gguf"))
    (folder / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(files.config))
    (folder / "generation_config.json").write_text(json.dumps(files.generation))
    return Tokenizer.from_folder(folder)


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(
    ("name", "pre", "scores"),
    [("smollm", "smollm", ""), ("qwen3", "qwen2", ""), ("tinyllama", "default", "own")],
)  # fmt: skip
def test_ids_of_real_tokenizers(tmp_path, name, pre, scores) -> None:
    folder = RECORDED / "tokenizers" / name
    keys = keys_of_tokenizer(folder, pre, scores)
    tokenizer = made_of(keys, tmp_path)
    original = Tokenizer.from_folder(folder)
    texts = odd_texts()
    assert len(texts) >= 1000
    for text in texts:
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids, text
    for text in texts[::10]:
        assert tokenizer.decode(ids := original.encode(text)) == original.decode(ids), text
    assert tokenizer.special_tokens == original.special_tokens
    assert tokenizer.chat_template == keys.get("tokenizer.chat_template")
    assert tokenizer.eos_token_ids >= original.eos_token_ids


@pytest.mark.slow
@needs_recordings
def test_scores_that_tell_nothing() -> None:
    """A file that was converted without SentencePiece's own still has the order of its pieces."""
    folder = RECORDED / "tokenizers/tinyllama"
    keys = as_read(keys_of_tokenizer(folder, "default", "alike"))
    merges = tokenizer_files(keys, Path("m.gguf")).tokenizer["model"]["merges"]
    stored = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert [" ".join(pair) for pair in merges] == stored


def byte_keys(**changed: Any) -> dict[str, Any]:
    return byte_vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


def test_what_is_put_around_a_text(tmp_path) -> None:
    for bos, eos in ((True, True), (False, True), (True, False), (False, False)):
        keys = byte_keys(add_bos_token=bos, add_eos_token=eos)
        folder = folder_of(tmp_path / f"{bos}{eos}.gguf", keys)
        tokenizer = Tokenizer.from_folder(folder.text_folder)
        ids = tokenizer.encode("the")
        assert ids == [*[1] * bos, tokenizer.token_id("th"), tokenizer.token_id("e"), *[2] * eos]
        # <|im_end|> ends a turn, whether or not the file names it.
        assert tokenizer.eos_token_ids == {2, tokenizer.token_id("<|im_end|>")}
        assert tokenizer.decode(ids) == "the"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "bert"}, "a vocabulary of the kind 'bert'"),
        ({"pre": "default"}, "the pre-tokenizer 'default', which is not supported"),
        ({"pre": None}, "the pre-tokenizer None"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"token_type": [1, 2]}, "has no tokenizer.ggml.token_type for each of 262 tokens"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["th"]}, "that is not a pair"),
        ({"model": "llama"}, "has no tokenizer.ggml.scores for each"),
        ({"model": "llama", "scores": [float("nan")] * 262}, "a score"),
    ],
)
def test_vocabularies_that_are_not_read(tmp_path, changed, message) -> None:
    """Weights are, all the same."""
    folder = folder_of(tmp_path / "m.gguf", byte_keys(**changed))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(folder.text_folder)
    assert message in str(caught.value) and str(tmp_path / "m.gguf") in str(caught.value)
    assert "model.norm.weight" in folder.names()


def test_a_copy_is_told_by_its_own_name(tmp_path) -> None:
    """The header is the same, and what is made of one is kept."""
    for name in ("first.gguf", "second.gguf"):
        folder = folder_of(tmp_path / name, byte_keys(tokens=None))
        with pytest.raises(TokenizerError, match=name):
            Tokenizer.from_folder(folder.text_folder)


def test_every_pre_tokenizer_is_known_to_be_bounded(tmp_path) -> None:
    """What cuts texts in this process is known to search in a line."""
    for number, pre in enumerate({repr(p): n for n, p in PRE_TOKENIZERS.items()}.values()):
        folder = folder_of(tmp_path / f"{number}.gguf", byte_keys(pre=pre))
        tokenizer = Tokenizer.from_folder(folder.text_folder)
        assert type(tokenizer._backend).__module__ == "tokenizers", pre
        assert tokenizer.decode(tokenizer.encode("It's 12345, the\n\n  ÀÉ漢 x")) == (
            "It's 12345, the\n\n  ÀÉ漢 x"
        )


def test_tokens_of_turns_of_phi_3(tmp_path) -> None:
    """They take the spaces behind them, which no key tells."""
    tokens = ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "▁", "a", "▁a"]
    keys = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(7)],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    added = tokenizer_files(as_read(keys), Path("m.gguf")).tokenizer["added_tokens"]
    assert {token["content"] for token in added if token["rstrip"]} == {"<|user|>"}
    assert added[0]["content"] == "<unk>" and added[0]["special"]


def test_a_cache_that_keeps_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    folder = folder_of(tmp_path / "m.gguf", byte_keys())
    assert Tokenizer.from_folder(folder.text_folder).encode("a")[0] == 1
    assert folder.text_folder == folder.text_folder
