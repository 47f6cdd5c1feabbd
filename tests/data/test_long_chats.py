"""Turns of long conversations without marks: as many renderings for any length, the same masks."""

from __future__ import annotations

import random
import re

import pytest
from support.recorded import RECORDED, needs_recordings
from support.spans import assistant_spans, last_turn_spans

from qlora_wgpu.data import ChatTemplate, masking
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES
from qlora_wgpu.data.conversations import Template
from qlora_wgpu.errors import DataError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = ["a", "4", "hi\n", " x", "</s>", "User:", "é", "\n\n", "a b", "<|im_end|>", "[INST]"]
# Turns begin alike, but with a prompt of their own in every other one; and end by their number.
UNLIKE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '!' if loop.index0 % 6 == 3 else '.' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ 'assistant: ' if messages | length % 4 == 1 else 'assistant:' }}{% endif %}"
)


def unmarked(name: str) -> str:
    return re.sub(r"{%- (end)?generation -%}", "", BUILT_IN_TEMPLATES[name])


def chat(seed: int, length: int, *, system: bool = False) -> list[dict[str, str]]:
    random.seed(seed)
    words = WORDS if seed % 2 else ["a", "b ", "\n c"]
    roles = [("user", "assistant")[i % 2] for i in range(length)]
    said = ["".join(random.choices(words, k=random.randint(1, 5))) for _ in roles]
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return [{"role": "system", "content": "S y"}, *turns] if system else turns


def spans(source, messages, find=assistant_spans):
    try:
        return find(ChatTemplate(source, SPECIAL), messages, None, "</s>")
    except DataError as err:
        return str(err)


@pytest.fixture
def one_by_one(monkeypatch):
    """What is found when each turn is looked for by itself."""

    def each(*args):
        with monkeypatch.context() as patch:
            patch.setattr(masking, "_FEW_TURNS", 1 << 20)
            return spans(*args)

    return each


@pytest.mark.slow
@pytest.mark.parametrize("source", [UNLIKE, *map(unmarked, ("chatml", "mistral", "phi", "gemma"))])
@pytest.mark.parametrize("find", [assistant_spans, last_turn_spans])
def test_the_same_as_one_by_one(source, find, one_by_one):
    for seed in range(2):
        messages = chat(seed, 36 + seed, system=seed == 1)
        assert spans(source, messages, find) == one_by_one(source, messages, find)


@pytest.mark.slow
@needs_recordings
def test_the_same_as_one_by_one_where_earlier_turns_are_written_otherwise(one_by_one):
    source = (RECORDED / "chat_templates" / "qwen3.jinja").read_text()
    messages = chat(2, 38, system=True)
    assert spans(source, messages) == one_by_one(source, messages)


def test_contents_that_a_template_looks_at(one_by_one):
    """An exchanged content is written otherwise: then each turn is looked for by itself."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ '(four) ' if '4' in m.content }}{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = chat(1, 36)
    assert spans(source, messages) == one_by_one(source, messages)


# The last turn is written otherwise (phi), contents are trimmed (gemma).
@pytest.mark.parametrize("name", ["chatml", "phi", "gemma"])
def test_a_conversation_of_any_length_takes_as_many_renderings(monkeypatch, name):
    calls = []
    render = Template.render
    monkeypatch.setattr(Template, "render", lambda *a, **k: calls.append(1) or render(*a, **k))
    counts = []
    for length in (40, 160):
        calls.clear()
        _, turns = spans(unmarked(name), chat(0, length))
        counts.append(len(calls))
        assert len(turns) == length // 2
    assert counts[0] == counts[1] < 20
