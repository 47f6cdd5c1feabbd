"""What a new model's folder has besides weights: templates, and how its adapter was prompted."""

from __future__ import annotations

import json

from support.tiny_tokenizer import write_folder

from qlora_wgpu.data import PromptFormat, Tokenizer, read_prompt_files, save_prompt_files
from qlora_wgpu.exporting.folders import copy_prompt_files, copy_rest

USER = {"role": "user", "content": "Hi"}


def test_further_chat_templates_are_copied(tmp_path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "chat_template.jinja").write_text("usual")
    (source / "other").mkdir()
    target.mkdir()
    copy_rest(source, target)
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert {path.name for path in target.iterdir()} == {
        "additional_chat_templates", "chat_template.jinja",
    }  # fmt: skip


def merged(tmp_path, rows, setting, generation=None):
    """The prompt's format of an adapter, and the folder of a model that it was merged into."""
    base = write_folder(tmp_path / "base", {"bos_token": "<s>", "eos_token": "</s>"})
    (base / "config.json").write_text('{"eos_token_id": 2}')
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    adapter, target = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    target.mkdir()
    prompt = PromptFormat.of_rows(rows, Tokenizer.from_folder(base), setting)
    save_prompt_files(adapter, base, prompt, setting)
    copy_rest(base, target)
    (target / "config.json").write_text('{"eos_token_id": 2}')
    copy_prompt_files(adapter, target)
    return prompt, target


def test_a_merged_model_has_the_template_of_its_adapter(tmp_path) -> None:
    prompt, target = merged(tmp_path, "messages", "chatml", {"temperature": 0.5})
    again = read_prompt_files(target)
    assert again.ids([USER]) == prompt.ids([USER]) and again.stop_ids == prompt.stop_ids
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"temperature": 0.5, "eos_token_id": sorted(prompt.stop_ids)}
    assert not (target / "prompt_format.json").exists()


def test_a_merged_model_of_alpaca_s_rows_has_their_prompt(tmp_path) -> None:
    prompt, target = merged(tmp_path, "instruction/output", None)
    again = read_prompt_files(target)
    assert again.kind == "alpaca" and again.ids([USER]) == prompt.ids([USER])
    assert not (target / "generation_config.json").exists()  # nothing new to say


def test_an_adapter_without_a_tokenizer_changes_nothing(tmp_path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "merged").mkdir()
    copy_prompt_files(tmp_path / "adapter", tmp_path / "merged")
    assert not list((tmp_path / "merged").iterdir())
