"""What is kept beside an adapter: the same tokenizer, the same prompt, and where answers end."""

from __future__ import annotations

import json

import pytest
import tokenizers
from support.recorded import RECORDED, needs_recordings
from support.tiny_tokenizer import write_folder

from qlora_wgpu.data import (
    PromptFormat,
    Tokenizer,
    prompt_kind,
    read_prompt_files,
    save_prompt_files,
)
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.errors import CheckpointError

CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "own {{ messages[0].content }}"}
USER, ANSWER = {"role": "user", "content": "Add."}, {"role": "assistant", "content": "4"}
CHAT = [USER, ANSWER]


def kept(tmp_path, rows, setting=None, config=CONFIG, name=None, base=None):
    """The prompt's format of a run, and what is read of it from an adapter's folder."""
    base = base or write_folder(tmp_path / "base", config)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    prompt = PromptFormat.of_rows(rows, Tokenizer.from_folder(base), setting)
    save_prompt_files(adapter, base, prompt, name)
    return prompt, read_prompt_files(adapter), adapter


@pytest.mark.parametrize("setting", [None, "chatml", "plain", "in {{ messages[0].content }}"])
def test_chats(tmp_path, setting) -> None:
    prompt, again, adapter = kept(tmp_path, "messages", setting)
    assert again.kind == "chat" == prompt_kind(adapter)
    assert again.ids([USER]) == prompt.ids([USER])
    assert again.template.render(CHAT).text == prompt.template.render(CHAT).text
    assert again.stop_ids == prompt.stop_ids and again.stop_text == prompt.stop_text
    assert again.tokenizer.fingerprint == prompt.tokenizer.fingerprint
    template = (adapter / "chat_template.jinja").exists()
    assert template == (setting is not None)
    assert ("chat_template" in json.loads((adapter / "tokenizer_config.json").read_text())) != (
        template
    )


def test_a_turn_s_own_end_is_what_other_programs_stop_at(tmp_path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    _, again, adapter = kept(tmp_path, "conversations", "chatml", name="chatml")
    tok = again.tokenizer
    ends = {tok.token_id("</s>"), tok.token_id("<|im_end|>")}
    assert again.stop_ids == ends
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads((adapter / file).read_text())["eos_token"] == "<|im_end|>"
    generation = json.loads((adapter / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == ends
    assert json.loads((adapter / "prompt_format.json").read_text()) == {
        "prompt_format": "chat", "chat_template": "chatml",
    }  # fmt: skip


@pytest.mark.parametrize("bos", [True, False])
def test_alpaca_chats_with_the_prompt_of_its_rows(tmp_path, bos) -> None:
    base = write_folder(tmp_path / "base", CONFIG, bos=bos)
    prompt, again, _ = kept(tmp_path, "instruction/output", "chatml", base=base)
    row = {"instruction": "Add.", "output": ""}
    ids = RowEncoder(prompt.tokenizer, None).encode(row, "instruction/output").ids
    assert again.ids([USER]) == ids[:-1] and again.kind == "alpaca"
    assert again.stop_ids == {ids[-1]} and again.stop_text == ""
    asked_again = prompt.tokenizer.decode(again.ids([USER, ANSWER, USER]), False)
    assert asked_again.count("</s>") == 0 and asked_again.count("### Instruction:\nAdd.") == 2
    assert "### Response:\n4\n\n### Instruction:" in asked_again
    hugging_face = again.tokenizer.chat_template
    assert "### Response:" in hugging_face and ("bos_token" in hugging_face) == bos


def test_alpaca_where_a_text_begins_otherwise_than_what_follows_a_token(tmp_path) -> None:
    """Llama's tokenizers put a space before a text, but not after a special token."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "\u2581", "Below", "B"])}
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(p, -float(i)) for p, i in
                                                              vocab.items()], 0))  # fmt: skip
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tok = Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
    row = {"instruction": "Add.", "output": ""}
    ids = RowEncoder(tok, None).encode(row, "instruction/output").ids
    assert tok.encode("<s>Below", False) != tok.encode("Below")
    assert PromptFormat.alpaca(tok).ids([USER]) == ids[:-1]


@pytest.mark.parametrize("rows", ["text", "prompt/completion"])
def test_text_is_continued_as_it_is(tmp_path, rows) -> None:
    prompt, again, _ = kept(tmp_path, rows)
    assert again.kind == "text" and again.template is None
    row = {"text": "once", "prompt": "once", "completion": ""}
    ids = RowEncoder(prompt.tokenizer, None).encode(row, rows).ids
    assert again.ids([{"role": "user", "content": "once"}]) == ids[:-1]
    assert again.stop_ids == {ids[-1]}


def test_tokens_that_are_known_by_their_ids_alone(tmp_path) -> None:
    base = write_folder(tmp_path / "base")
    (base / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 4]}')
    (base / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 1}')
    prompt, again, _ = kept(tmp_path, "text", base=base)
    assert again.tokenizer.special_tokens == prompt.tokenizer.special_tokens != {}
    assert again.tokenizer.eos_token_ids == prompt.tokenizer.eos_token_ids == {2}


def test_further_templates_stay_with_the_tokenizer_s_own(tmp_path) -> None:
    for setting in (None, "chatml"):
        place = tmp_path / str(setting)
        base = write_folder(place / "base", CONFIG)
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text("t")
        _, _, adapter = kept(place, "messages", setting, base=base)
        assert (adapter / "additional_chat_templates" / "tool_use.jinja").exists() == (
            setting is None
        )


def test_a_damaged_format_is_refused(tmp_path) -> None:
    (tmp_path / "prompt_format.json").write_text('{"prompt_format": "poem"}')
    with pytest.raises(CheckpointError, match="must be chat, alpaca or text, got 'poem'"):
        prompt_kind(tmp_path)
    assert prompt_kind(tmp_path / "nowhere") == "chat"


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize("name", ["smollm", "qwen3", "tinyllama"])
def test_real_tokenizers(tmp_path, name) -> None:
    base = RECORDED / "tokenizers" / name
    setting = "chatml" if name == "smollm" else None
    prompt, again, _ = kept(tmp_path, "messages", setting, base=base)
    assert again.ids(CHAT) == prompt.ids(CHAT) and again.stop_ids == prompt.stop_ids
    special = again.tokenizer.special_tokens
    assert special == {**prompt.tokenizer.special_tokens, "eos_token": special["eos_token"]}
