"""The tokenizer: its files, its special tokens, and the library's failures as plain errors."""

from __future__ import annotations

import json

import pytest
from support.tiny_tokenizer import SPECIAL, tiny_backend, tiny_tokenizer, write_folder
from tokenizers import AddedToken, normalizers

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.sandbox.tokenizers import library_errors

TEXTS = ["Hello", " Hi \n", "", "你好 🙂", "é\u0301", "\x00\t", "a" * 1000]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == [1, *tokenizer.encode(text, add_special_tokens=False)]


def test_special_tokens_are_kept_or_left_out() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<|im_start|>a</s>")
    assert ids == [1, 3, tokenizer.token_id("a"), 2]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|im_start|>a</s>"


def test_normalized_special_tokens_are_left_out_too() -> None:
    backend = tiny_backend()
    backend.normalizer = normalizers.Prepend("_")
    backend.add_special_tokens([AddedToken("<end>", normalized=True, special=True)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([tokenizer.token_id("<end>"), tokenizer.token_id("a")]) == "a"


def test_offsets_are_characters() -> None:
    ids, offsets = tiny_tokenizer().encode_with_offsets("é🙂a")
    assert offsets == [(0, 0), (0, 1), (0, 1), *[(1, 2)] * 4, (2, 3)]
    assert len(ids) == len(offsets)


def test_ids_and_size() -> None:
    tokenizer = tiny_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.vocab_size == len(SPECIAL) + 256
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.token_id("nope") is None


def test_saved_truncation_and_padding_are_switched_off(tmp_path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tmp_path.joinpath("t").mkdir()
    backend.save(str(tmp_path / "t" / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path / "t").encode("a" * 20)) == 21
    assert len(Tokenizer.from_folder(tmp_path / "t").encode("a")) == 2


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_as_text_or_object(tmp_path, file, as_object) -> None:
    write_folder(tmp_path)
    values = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    if as_object:
        values = {k: {"content": v, "lstrip": False} for k, v in values.items()}
    (tmp_path / file).write_text(json.dumps(values))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (1, 2, 0)


def test_the_config_wins_over_the_map(tmp_path) -> None:
    write_folder(tmp_path, {"eos_token": "<|im_end|>", "bos_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<s>")


@pytest.mark.parametrize("value", [2, [2, 4]])
def test_ids_of_the_model_stand_in_for_missing_names(tmp_path, value) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 4, "bos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_ids == ({2, 4} if isinstance(value, list) else {2})


def test_every_end_of_a_generation_counts(tmp_path) -> None:
    write_folder(tmp_path, {"eos_token": "</s>"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 99999, true, -1]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {2, 4}


def test_a_token_outside_the_vocabulary_is_none(tmp_path) -> None:
    write_folder(tmp_path, {"pad_token": "[PAD]", "eos_token": "</s>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.pad_token_id is None
    assert "pad_token" not in tokenizer.special_tokens


def test_chat_template_sources(tmp_path) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path)).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    others = (({"default": "E"}, "E"), ([], None), ([{"name": "rag", "template": "R"}], None))
    for value, expected in (("A", "A"), (named, "D"), *others):
        write_folder(tmp_path, {"chat_template": value})
        assert Tokenizer.from_folder(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"


def test_a_chat_template_that_is_no_text(tmp_path) -> None:
    write_folder(tmp_path, {"chat_template": 3})
    with pytest.raises(TokenizerError, match=r"chat.template"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_files(tmp_path, content) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_damaged_config(tmp_path, content) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_missing_files(tmp_path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_folder(tmp_path / "gone")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["tokenizer.model"], "has only tokenizer[.]model; load and save it once"),
        (["vocab.json", "merges.txt"], "has only vocab[.]json and merges[.]txt; load and save"),
        (["tokenizer.tiktoken"], "has only tokenizer[.]tiktoken; load and save"),
        (["tekken.json"], "has only tekken[.]json; copy the file of a model with the same"),
        (["vocab.json"], "copy the tokenizer of the base model there"),
    ],
)
def test_tokenizers_in_another_form(tmp_path, names, told) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(TokenizerError, match=rf"has no tokenizer\.json: (it )?{told}"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_of_a_processor_counts_where_the_tokenizer_has_none(tmp_path) -> None:
    write_folder(tmp_path, {"bos_token": "<s>"})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "of the processor"
    write_folder(tmp_path, {"bos_token": "<s>", "chat_template": "of the tokenizer"})
    assert Tokenizer.from_folder(tmp_path).chat_template == "of the tokenizer"


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", 3, None, b"x"])
def test_what_cannot_be_encoded(text) -> None:
    match = "lone surrogate" if isinstance(text, str) else "must be a string"
    with pytest.raises(TokenizerError, match=match):
        tiny_tokenizer().encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["x"]])
def test_what_cannot_be_decoded(ids) -> None:
    with pytest.raises(TokenizerError):
        tiny_tokenizer().decode(ids)


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode([100_000, *tokenizer.encode("a"), 100_000]) == "a"


def test_panics_become_errors_and_interrupts_stay() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(TokenizerError, match="it broke: index"), library_errors("it broke"):
        raise panic("index out of bounds")
    with pytest.raises(KeyboardInterrupt), library_errors("it broke"):
        raise KeyboardInterrupt


def test_unknown_special_tokens_are_not_kept() -> None:
    tokenizer = Tokenizer(tiny_backend(), {"bos_token": "<s>", "pad_token": "[PAD]"})
    assert tokenizer.special_tokens == {"bos_token": "<s>"}
