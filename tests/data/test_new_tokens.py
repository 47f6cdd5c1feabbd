"""A tokenizer with more tokens: the old ones stay what they are, the new ones follow them."""

import json

import pytest
from support.tiny_tokenizer import tiny_backend

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.tokenizer import extended_tokenizer
from qlora_wgpu.errors import ConfigError, TokenizerError


@pytest.fixture
def folder(tmp_path):
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": {"0": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_new_tokens_follow_those_that_there_are(folder):
    own = Tokenizer.from_folder(folder)
    before = tiny_backend().get_vocab_size()
    made = extended_tokenizer(folder, ["<think>", "a", "word"], ["<|tool|>"])
    assert made.new_tokens == (before, before + 1, before + 2) and made.count == before + 3
    tokenizer = Tokenizer.from_folder(made.folder)
    assert [tokenizer.token_id(text) for text in ("<think>", "word", "<|tool|>")] == list(
        made.new_tokens
    )
    assert tokenizer.token_id("a") == own.token_id("a")
    text = "a <think>b<|tool|>c"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert {before, before + 2} <= set(ids)
    assert tokenizer.decode(ids) == "a <think>bc"  # special ones are not shown
    decoder = json.loads((made.folder / "tokenizer_config.json").read_text())
    told = decoder["added_tokens_decoder"]
    assert list(told) == ["0", *map(str, made.new_tokens)]
    assert [told[str(n)]["special"] for n in made.new_tokens] == [False, False, True]
    assert [told[str(n)]["normalized"] for n in made.new_tokens] == [True, True, False]
    assert (made.folder / "config.json").exists()


def test_tokens_that_it_has_are_not_added_again(folder):
    made = extended_tokenizer(folder, ["<s>"], ["</s>"])
    assert not made.new_tokens and made.count == tiny_backend().get_vocab_size()


def test_what_cannot_be_added_to_is_told(folder):
    with pytest.raises(ConfigError, match="add_special_tokens have 'b' twice"):
        extended_tokenizer(folder, ["a", "b"], ["b"])
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        extended_tokenizer(folder, ["a"], [])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        extended_tokenizer(folder, ["a"], [])


def test_pairs_with_scores_are_a_vocabulary_too(folder):
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["model"] = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_id": 0}
    stored["added_tokens"] = stored["added_tokens"][:1]
    stored["post_processor"] = stored["decoder"] = stored["pre_tokenizer"] = None
    path.write_text(json.dumps(stored))
    made = extended_tokenizer(folder, ["a", "b"], [])
    assert (made.new_tokens, made.count) == ((2,), 3)
