"""Tokenizers of strangers: what the library would hang in, or end this process for."""

from __future__ import annotations

import json

import pytest
from support.tiny_tokenizer import tiny_backend

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.sandbox import process, tokenizers
from qlora_wgpu.sandbox.tokenizers import ConfinedTokenizer, is_bounded

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(expression):
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def doubling(times):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [step] * times}


def write(folder, **parts):
    value = json.loads(tiny_backend().to_str()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


@pytest.fixture
def new_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def impatient(new_cache, monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.5)
    tokenizers._examiner().close()
    yield
    tokenizers._examiner().close()


def confined(tokenizer) -> bool:
    return isinstance(tokenizer._backend, ConfinedTokenizer)


def test_a_known_expression_runs_here_and_another_apart(tmp_path) -> None:
    here = Tokenizer.from_folder(write(tmp_path, pre_tokenizer=split(LLAMA_3)))
    apart = Tokenizer.from_folder(write(tmp_path, pre_tokenizer=split(LLAMA_3 + "|x")))
    assert not confined(here) and confined(apart)
    text = "Hello world, 12 wörds 🙂\n"
    ids, offsets = here.encode_with_offsets(text)
    assert apart.encode_with_offsets(text) == (ids, offsets)
    assert apart.decode(ids) == here.decode(ids)
    for tokenizer in (here, apart):
        assert tokenizer.vocab_size == here.vocab_size
        assert tokenizer.first_special(ids) == here.first_special(ids)
        assert tokenizer.bos_token_id == here.bos_token_id and tokenizer.token_id("nothing") is None
    assert here.fingerprint != apart.fingerprint


@pytest.mark.slow
def test_one_that_hangs_is_stopped(tmp_path, impatient) -> None:
    tokenizer = Tokenizer.from_folder(
        write(tmp_path, pre_tokenizer=split(r".{1,999}.{1,999}(?<!.)"))
    )
    with pytest.raises(TokenizerError, match="stopped: it takes more than"):
        tokenizer.encode("words " * 2000)


@pytest.mark.slow
def test_one_that_grows_a_text_is_stopped(tmp_path, impatient) -> None:
    with pytest.raises(TokenizerError, match=r"seconds of CPU time|MB of memory"):
        Tokenizer.from_folder(write(tmp_path, normalizer=doubling(40)))


@pytest.mark.parametrize("number", [2**23 + 1, 2**31, 2**32 - 1])
def test_ids_that_are_huge_are_refused(tmp_path, new_cache, number) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": number, "?": 1}, "unk_token": "?"}
    with pytest.raises(TokenizerError, match=f"the id {number}"):
        Tokenizer.from_folder(write(tmp_path, model=model, added_tokens=[]))


def test_what_was_looked_at_is_not_looked_at_again(tmp_path, new_cache, monkeypatch) -> None:
    Tokenizer.from_folder(write(tmp_path))
    monkeypatch.setattr(process.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    assert Tokenizer.from_folder(tmp_path).encode("a")


def test_what_published_tokenizers_are_made_of_is_bounded() -> None:
    sequence = {"type": "Sequence", "pretokenizers": [split(LLAMA_3), {"type": "ByteLevel"}]}
    assert is_bounded({"pre_tokenizer": sequence, "normalizer": None}, 128, 100)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    assert is_bounded({"normalizer": spaces, "decoder": spaces}, 128, 0)


@pytest.mark.parametrize(
    "part",
    [split("(a+)+b"), doubling(7), {"type": "Precompiled"}, {"type": "Unknown"},
     {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [split("x*")]}]},
     {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
     {"type": "TemplateProcessing", "single": [{}] * 9, "special_tokens": {"a": {"ids": [1] * 8}}}],
)  # fmt: skip
def test_what_is_not_bounded(part) -> None:
    assert not is_bounded({"a": part}, 1, 1)


def test_long_tokens_and_words_are_not_bounded() -> None:
    assert not is_bounded({}, 5000, 100) and not is_bounded({}, 10, 10_000)


def test_ids_around_a_text_are_bounded_too(tmp_path) -> None:
    """What a template puts around a text need not be in the vocabulary."""
    special = {"[X]": {"id": "[X]", "ids": [2**31], "tokens": ["[X]"]}}
    single = [
        {"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    template = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special,
    }  # fmt: skip
    with pytest.raises(TokenizerError, match="a token with the id 2147483648"):
        Tokenizer.from_folder(write(tmp_path, post_processor=template))
