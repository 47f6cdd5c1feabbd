"""Ollama's templates, as Go rendered them, and Modelfiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data.built_in_templates import built_in_template
from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.ollama.modelfile import modelfile
from qlora_wgpu.data.ollama.templates import (
    PROBES,
    go_template,
    names_of_templates,
    ollama_template,
)
from qlora_wgpu.data.prompt_format import PromptFormat

# tests/references/ollama_templates.py has Go write these.
RECORDED = json.loads((Path(__file__).parent / "ollama_templates.json").read_text())


def prompt_of(source: str, bos: bool = True) -> PromptFormat:
    tokenizer = tiny_tokenizer(bos)
    return PromptFormat("chat", tokenizer, ChatTemplate(source, tokenizer.special_tokens))


def test_every_built_in_template_has_one() -> None:
    assert set(names_of_templates()) == set(BUILT_IN_CHAT_TEMPLATES) == set(RECORDED)


@pytest.mark.parametrize("name", BUILT_IN_CHAT_TEMPLATES)
def test_go_writes_what_jinja_writes(name) -> None:
    tokenizer = tiny_tokenizer()
    assert go_template(name, tokenizer) == RECORDED[name]["template"]
    template = ChatTemplate(built_in_template(name, tokenizer), tokenizer.special_tokens)
    for messages, text in zip(PROBES, RECORDED[name]["texts"], strict=True):
        expected = template.render(messages, add_generation_prompt=True).text
        assert text == expected.removeprefix("<s>")


def test_a_model_s_own_template_is_known_by_what_it_writes() -> None:
    own = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert ollama_template(prompt_of(own)) == RECORDED["chatml"]["template"]
    assert ollama_template(prompt_of(own.replace("im_end", "end_of_it"))) is None
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + own
    assert ollama_template(prompt_of(refusing)) is None


def test_a_modelfile() -> None:
    source = built_in_template("chatml", tiny_tokenizer())
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1,
                  "eos_token_id": 2}  # fmt: skip
    text = modelfile("model.gguf", prompt_of(source), generation)
    template = RECORDED["chatml"]["template"]
    assert text == (
        f'FROM ./model.gguf\nTEMPLATE """{template}"""\n'
        'PARAMETER stop """</s>"""\nPARAMETER stop """<|im_end|>"""\n'
        "PARAMETER temperature 0.6\nPARAMETER top_p 0.95\nPARAMETER repeat_penalty 1.1\n"
    )
    greedy = modelfile("model.gguf", prompt_of(source), {"do_sample": False, "temperature": 0.6})
    assert greedy.endswith("PARAMETER temperature 0\n")


def test_of_an_adapter_and_of_text() -> None:
    tokenizer = tiny_tokenizer()
    text = modelfile("a.gguf", PromptFormat.text(tokenizer), {}, adapter_of="./base.gguf")
    assert text.startswith("FROM ./base.gguf\nADAPTER ./a.gguf\nTEMPLATE ")
    assert '"""{{ .Prompt }}"""' in text
    none = modelfile("m.gguf", PromptFormat("chat", tokenizer, None), {})
    assert 'TEMPLATE """' not in none and none.splitlines()[1].startswith("# Ollama knows")
