"""Ollama's templates, as Go rendered them, and Modelfiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data.chat_template import ChatTemplate, built_in_template
from qlora_wgpu.data.ollama import PROBES, TurnTexts, modelfile, ollama_template
from qlora_wgpu.data.prompts import PromptFormat

# tests/references/ollama_templates.py has Go write these.
RECORDED = json.loads((Path(__file__).parent / "ollama_templates.json").read_text())


def prompt_of(source: str, bos: bool = True) -> PromptFormat:
    tokenizer = tiny_tokenizer(bos)
    return PromptFormat("chat", tokenizer, ChatTemplate(source, tokenizer.special_tokens))


@pytest.mark.parametrize("name", BUILT_IN_CHAT_TEMPLATES)
def test_go_writes_what_jinja_writes(name) -> None:
    tokenizer = tiny_tokenizer()
    source = built_in_template(name, tokenizer)
    assert ollama_template(prompt_of(source)) == RECORDED[name]["template"]
    template = ChatTemplate(source, tokenizer.special_tokens)
    texts = TurnTexts.of(template, "<s>")
    for messages, text in zip(PROBES, RECORDED[name]["texts"], strict=True):
        expected = template.render(messages, add_generation_prompt=True).text
        assert text == expected.removeprefix("<s>") == texts.written(messages)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANOTHER = {
    "end": CHATML.replace("im_end", "end_of_it"),
    "system of its own": "{% if messages[0].role != 'system' %}You help.\n{% endif %}" + CHATML,
    "thought before an answer": CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
}


@pytest.mark.parametrize("name", ANOTHER)
def test_a_template_of_a_model_s_own_has_one(name) -> None:
    go = ollama_template(prompt_of(ANOTHER[name]))
    assert go not in (None, ollama_template(prompt_of(CHATML)))
    for sign in ("end_of_it", "You help.", "<think>"):
        assert (sign in go) == (sign in ANOTHER[name])


NONE = {
    "refuses a system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    ),
    "drops the system": CHATML.replace("in messages", "in messages if m.role != 'system'"),
    "counts turns": CHATML.replace("<|im_start|>{{ m", "{{ loop.index }}<|im_start|>{{ m"),
    "writes a user twice": CHATML + "{{ messages[-1].content }}",
    "changes what is said": CHATML.replace("| trim", "| replace('\n', ' ')"),
    "ends what it stands in": CHATML.replace("<|im_end|>", "{{ '{{' }}"),
}


@pytest.mark.parametrize("name", NONE)
def test_what_turns_texts_do_not_write_has_none(name) -> None:
    assert ollama_template(prompt_of(NONE[name])) is None


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
    assert 'TEMPLATE """' not in none and none.splitlines()[1].startswith("# Ollama supports")
