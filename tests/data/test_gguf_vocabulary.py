"""A tokenizer as a GGUF file's keys: read back, it makes the same ids."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint.test_gguf_tokenizer import as_read, odd_texts
from support.recorded import RECORDED, needs_recordings
from support.tiny_tokenizer import write_folder

from qlora_wgpu.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.gguf_vocabulary import pre_tokenizer_name, pre_tokenizer_note, vocabulary_keys
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.sandbox.tokenizers import is_bounded

EXTRA = 3  # rows of the embedding that no token has


WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}


def keys_of(folder, size: int = 0) -> dict:
    tokenizer = Tokenizer.from_folder(folder)
    return vocabulary_keys(tokenizer, folder, size or tokenizer.vocab_size + EXTRA)


def read_back(keys, folder, path) -> Tokenizer:
    folder.mkdir()
    lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in keys.items()}
    files = tokenizer_files(as_read(lists), path)
    (folder / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(files.config))
    (folder / "generation_config.json").write_text(json.dumps(files.generation))
    return Tokenizer.from_folder(folder)


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(("name", "pre"), [("smollm", "smollm"), ("tinyllama", "default")])
def test_real_tokenizers(tmp_path, name, pre) -> None:
    folder = RECORDED / "tokenizers" / name
    original = Tokenizer.from_folder(folder)
    size = original.vocab_size + EXTRA
    keys = vocabulary_keys(original, folder, size)
    assert keys["tokenizer.ggml.pre"] == pre
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == size
    assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{size - 1}]"
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    assert keys["tokenizer.ggml.eos_token_id"] == original.eos_token_id
    assert keys["tokenizer.ggml.add_bos_token"] == (name == "tinyllama")
    tokenizer = read_back(keys, tmp_path / "back", tmp_path / "m.gguf")
    for text in odd_texts(100)[:200]:
        assert tokenizer.encode(text) == original.encode(text), text
    assert tokenizer.special_tokens == original.special_tokens
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.eos_token_ids >= original.eos_token_ids


def changed(folder, config=None, **parts):
    write_folder(folder, config or {"eos_token": "</s>"})
    stored = (
        json.loads((folder / "tokenizer.json").read_text("utf-8"))
        | {"pre_tokenizer": WORDS}
        | parts
    )
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


def test_several_ends(tmp_path) -> None:
    folder = changed(tmp_path / "t", {"eos_token": "</s>", "bos_token": "<s>"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    keys = keys_of(folder)
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (2, 4)
    assert keys["tokenizer.ggml.add_bos_token"] and not keys["tokenizer.ggml.add_eos_token"]


def test_tokens_that_no_row_has(tmp_path) -> None:
    """A tokenizer may know more than the model, whose file has as many tokens as rows."""
    keys = keys_of(changed(tmp_path / "t", {"pad_token": "ÿ"}), 100)
    assert len(keys["tokenizer.ggml.tokens"]) == 100
    assert "tokenizer.ggml.padding_token_id" not in keys


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_way_of_cutting_has_a_name(name) -> None:
    known = PRE_TOKENIZERS[name]
    stored = {"pre_tokenizer": known.pre_tokenizer, "model": {"ignore_merges": known.ignore_merges}}
    found = PRE_TOKENIZERS[pre_tokenizer_name(stored, "tokenizer.json")]
    assert (found.pre_tokenizer, found.ignore_merges) == (known.pre_tokenizer, known.ignore_merges)


def test_line_ends_in_an_expression_themselves() -> None:
    """DeepSeek's tokenizer.json has the characters, where others have escapes."""
    cut = json.dumps(PRE_TOKENIZERS["deepseek-v3"].pre_tokenizer)
    cut = json.loads(cut.replace(r"\\r", r"\r").replace(r"\\n", r"\n"))
    assert "\n" in cut["pretokenizers"][2]["pattern"]["Regex"]
    stored = {"pre_tokenizer": cut, "model": {}}
    assert pre_tokenizer_name(stored, "tokenizer.json") == "deepseek-v3"
    assert is_bounded({"pre_tokenizer": cut}, 9, 9)


def test_what_llama_cpp_cuts_otherwise_is_told() -> None:
    assert "recognizes only ASCII capitals" in pre_tokenizer_note("tekken")
    assert pre_tokenizer_note("qwen2") is None


def test_what_llama_cpp_has_not(tmp_path) -> None:
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                   "trim_offsets": True}  # fmt: skip
    odd = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False},
            bytes_alone,
        ],
    }
    for parts, message in (
        ({"pre_tokenizer": odd}, "has a pre-tokenizer that llama.cpp is not known to support"),
        ({"normalizer": {"type": "Lowercase"}}, r"normalizes text \(Lowercase\)"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "neither byte-level BPE nor SentencePiece's"),
    ):
        with pytest.raises(TokenizerError, match=message):
            keys_of(changed(tmp_path / message[:5], **parts))


@pytest.mark.slow
@needs_recordings
def test_pieces_that_are_joined_by_their_merges(tmp_path) -> None:
    """Gemma 4's: as SentencePiece's with bytes, nothing before a text, and merges in the file."""
    folder = RECORDED / "tokenizers/tinyllama"
    stored = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    [replace] = [p for p in stored["normalizer"]["normalizers"] if p["type"] == "Replace"]
    stored["normalizer"] = replace
    stored["model"]["merges"] = stored["model"]["merges"][::-1]  # no scores would tell of these
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.json").write_text(json.dumps(stored))
    config = (folder / "tokenizer_config.json").read_text()
    (tmp_path / "base/tokenizer_config.json").write_text(config)
    original = Tokenizer.from_folder(tmp_path / "base")
    size = original.vocab_size
    keys = vocabulary_keys(original, tmp_path / "base", size, joins_pairs=True)
    assert keys["tokenizer.ggml.model"] == keys["tokenizer.ggml.pre"] == "gemma4"
    assert len(keys["tokenizer.ggml.merges"]) == len(stored["model"]["merges"])
    tokenizer = read_back(keys, tmp_path / "back", tmp_path / "m.gguf")
    for text in odd_texts(60):
        assert tokenizer.encode(text) == original.encode(text), text
    plain = vocabulary_keys(Tokenizer.from_folder(folder), folder, size, joins_pairs=True)
    assert plain["tokenizer.ggml.model"] == "llama"  # which has a space before each text
    keys["tokenizer.ggml.merges"][3] = "alone"
    with pytest.raises(TokenizerError, match="merges that is not a pair"):
        read_back(keys, tmp_path / "wrong", tmp_path / "m.gguf")
