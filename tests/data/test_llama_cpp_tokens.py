"""Ids as llama.cpp makes them; tests/references/gguf_tokens.py compares them with its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.test_gguf_tokenizer import as_read, odd_texts
from support.gguf_files import byte_vocabulary
from support.recorded import RECORDED, needs_recordings

from qlora_wgpu.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, with_ascii_capitals
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.gguf_vocabulary import LlamaCppTokenizer, TrainedText, vocabulary_keys
from qlora_wgpu.errors import TokenizerError

FILE = Path("m.gguf")
PIECES = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
SPECIAL = PIECES[:4]


def llama_cpp(keys: dict[str, Any]) -> LlamaCppTokenizer:
    lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in keys.items()}
    return LlamaCppTokenizer(as_read(lists), FILE)


def byte_level(**changed: Any) -> LlamaCppTokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    return llama_cpp(byte_vocabulary() | named)


def pieces(folder: Path, scheme: str, without: str = "") -> Path:
    """A tokenizer of SentencePiece's way, whose scheme says where spaces come before texts."""
    tokens = [token for token in PIECES if token != without]
    added = [
        {"id": i, "content": token, "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, token in enumerate(SPECIAL)
    ]  # fmt: skip
    stored = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
                          "split": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [["▁", "a"]],
        },
    }  # fmt: skip
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def keys_of(folder: Path, prompt: str | None = None) -> dict[str, Any]:
    tokenizer = Tokenizer.from_folder(folder)
    return vocabulary_keys(tokenizer, folder, tokenizer.vocab_size, prompt=prompt)


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize("name", ["smollm", "tinyllama"])
def test_real_tokenizers_make_the_same_ids(name) -> None:
    folder = RECORDED / "tokenizers" / name
    tokenizer, ours = Tokenizer.from_folder(folder), llama_cpp(keys_of(folder))
    ends = tokenizer.eos_token
    for text in odd_texts(100)[:150]:
        text = f"{ends} {text}{ends}{ends}"
        if name == "smollm":  # which has no token for some bytes
            text = "".join(c for c in text if c.isprintable())
        assert ours.encode(text) == tokenizer.encode(text), text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("prompt", ["<s>[INST]a a[INST]a</s>", "[INST]a[INST] b"])
def test_spaces_behind_special_tokens(tmp_path, scheme, prompt) -> None:
    folder = pieces(tmp_path / scheme, scheme)
    tokenizer, ours = Tokenizer.from_folder(folder), llama_cpp(keys_of(folder, prompt))
    trained = tokenizer.encode(prompt, add_special_tokens=False)
    if scheme == "always" and " b" in prompt:  # a space that is there is enough, except for it
        assert trained[:4] == ours.encode(prompt)[:4]
        assert ours.encode(prompt) == [*trained[:4], PIECES.index("▁"), *trained[4:]]
    else:
        assert ours.encode(prompt) == trained
    # Plain texts have the space of the scheme "first".
    plain = llama_cpp(keys_of(folder))
    assert plain.encode("a") == tokenizer.encode("a")


@pytest.mark.parametrize(("prompt", "begins"), [("<s>[INST]a", True), ("[INST]a", False)])
def test_a_prompt_begins_as_the_template_writes_it(tmp_path, prompt, begins) -> None:
    keys = keys_of(pieces(tmp_path / "t", "never"), prompt)
    assert keys["tokenizer.ggml.add_bos_token"] is begins
    assert keys["tokenizer.ggml.add_eos_token"] is False


@pytest.mark.parametrize("gone", ["<0x61>", "<0xE6>"])
def test_bytes_that_are_promised_and_missing(tmp_path, gone) -> None:
    """llama.cpp ends the process at the first character that needs one of them."""
    with pytest.raises(
        TokenizerError, match=f"has byte_fallback but no token for 1 of the bytes, such as {gone}"
    ):
        keys_of(pieces(tmp_path / "t", "never", without=gone))


def test_a_byte_without_a_token_is_left_out_and_joins_nothing() -> None:
    tokens = byte_vocabulary()["tokenizer.ggml.tokens"]
    at = tokens.index("-")
    ours = byte_level(tokens=[*tokens[:at], "unusual", *tokens[at + 1 :]], add_bos_token=False)
    assert ours.encode("t-h") == [tokens.index("t"), tokens.index("h")]
    assert ours.encode("th") == [tokens.index("th")]


def test_special_tokens_are_found_before_anything_else() -> None:
    """The longest first; and what ends an answer, whatever its type."""
    tokens = byte_vocabulary()["tokenizer.ggml.tokens"]
    tokens = [*tokens, "<|im_start|>x", "[EOT]"]
    ours = byte_level(tokens=tokens, token_type=[*[3] * 5, *[1] * 257, 4, 1], add_bos_token=True)
    x = tokens.index("x")
    assert ours.encode("<|im_start|>xx") == [1, 262, x]
    assert ours.encode("<s>x[EOT]<|im_end|> ") == [1, x, 263, tokens.index("<|im_end|>"),
                                                  tokens.index("Ġ")]  # fmt: skip


def test_white_space_behind_the_tokens_of_phi_3() -> None:
    tokens = byte_vocabulary()["tokenizer.ggml.tokens"]
    x = tokens.index("x")
    for name, between in (("Phi-3 mine", []), ("mine", [tokens.index("Ċ")])):
        ours = llama_cpp(byte_vocabulary() | {"general.name": name})
        assert ours.encode("<|im_start|>\nx") == [1, tokens.index("<|im_start|>"), *between, x]
        assert ours.encode("<s><s>\nx") == [1, 1, tokens.index("Ċ"), x]


def test_capitals_of_other_scripts_are_none() -> None:
    known = PRE_TOKENIZERS["tekken"].pre_tokenizer
    assert "(?=\\\\p{L})[^a-z]" in json.dumps(with_ascii_capitals("tekken", known))
    assert with_ascii_capitals("qwen2", known) is known
    tokens = byte_vocabulary()["tokenizer.ggml.tokens"]
    joined = "ÃīÃĢ"  # É and À
    merges = ["t h", "Ã ī", "Ã Ģ", "Ãī ÃĢ"]
    tokens = [*tokens, "Ãī", "ÃĢ", joined]
    for pre in ("tekken", "qwen2"):
        ours = byte_level(tokens=tokens, token_type=[*[3] * 5, *[1] * (len(tokens) - 5)],
                          merges=merges, pre=pre, add_bos_token=False)  # fmt: skip
        assert ours.encode("ÉÀ") == [tokens.index(joined)]


def test_the_first_difference_is_named() -> None:
    ours = byte_level()
    tokens = byte_vocabulary()["tokenizer.ggml.tokens"]
    a, b = tokens.index("a"), tokens.index("b")
    same = TrainedText("<s>a", [1, a])
    ended = TrainedText("a", [1, a, 2])  # a row that goes on to the end token
    assert ours.first_difference([same, ended], 2) is None
    told = ours.first_difference([same, TrainedText("ab", [1, a, a]), TrainedText("a", [a])], 2)
    assert told == (
        "llama.cpp tokenizes 2 of 3 examples of the run differently from training. The first is "
        f"'ab': token 3 is 'a' ({a}) in training and 'b' ({b}) in llama.cpp"
    )
    assert "token 2 is the end in training" in str(
        ours.first_difference([TrainedText("a", [1])], 2)
    )
