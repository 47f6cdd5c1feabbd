"""Conversations that a stranger's template renders, and masks, together."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import row_source
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import DataError
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess

PLAIN = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}"
    "{% if m.content == 'no' %}{{ raise_exception('it is rude') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def rows(count: int) -> list[dict]:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    shown = [{"messages": [*turns * (i % 3), {**turns[0], "content": f"{i}?"}, turns[1]]}
             for i in range(count)]  # fmt: skip
    shown[1] = {"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "B"}]}
    shown[2]["tools"] = [{"name": "f"}]
    return shown


def encoded(template: str, given: list[dict], **options) -> list[tuple[str, str]]:
    tokenizer = tiny_tokenizer(chat_template=template)
    data = encode_rows(given, tokenizer, PreprocessConfig(512, **options))
    return [
        (tokenizer.decode(e.input_ids, False), trained_text(tokenizer, e.input_ids, e.labels))
        for e in data
    ]


@pytest.fixture
def calls(monkeypatch):
    names = []
    call = SandboxProcess.call

    def noted(self, function, *args, **how):
        names.append(function.__name__)
        return call(self, function, *args, **how)

    monkeypatch.setattr(SandboxProcess, "call", noted)
    return names


def of_one_kind(given: list[dict]) -> list[list[dict]]:
    return [[row for row in given if ("messages" in row) is kind] for kind in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("train_on", ["auto", "last_turn"])
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_they_are_what_they_are_alone(template, train_on, calls, monkeypatch) -> None:
    for given in of_one_kind(rows(130)):
        together = encoded(template, given, train_on=train_on)
        with monkeypatch.context() as patch:
            patch.setattr(row_source, "_AT_ONCE", 1)
            assert encoded(template, given, train_on=train_on) == together


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_call_renders_many(template, calls) -> None:
    given = of_one_kind(rows(130))[0]
    encoded(template, given)
    # Besides, once whether the template marks anything, and how it ends a turn.
    assert calls == ["marks_assistant", "mask_many", "render_chat", "mask_many", "mask_many"]


def test_the_rows_before_a_wrong_one_come_first(calls) -> None:
    given = of_one_kind(rows(30))[0]
    given[9] = {"messages": [{"role": "user", "content": "no"}]}
    given[11] = {"messages": "text"}
    with pytest.raises(DataError, match=r"rows\[9\]: the chat template refuses.*it is rude"):
        encoded(PLAIN, given)


def test_each_has_its_own_time(calls, monkeypatch) -> None:
    noted = SandboxProcess.call

    def impatient(self, function, *args, **how):
        if function.__name__ == "mask_many" and len(args[1]) > 1:
            raise SandboxError("takes too long")
        return noted(self, function, *args, **how)

    monkeypatch.setattr(SandboxProcess, "call", impatient)
    assert len(encoded(PLAIN, of_one_kind(rows(130))[0])) == 129


def test_long_conversations_are_not_held_together(calls, monkeypatch) -> None:
    monkeypatch.setattr("qlora_wgpu.data.row_formats._RENDERED", 4)
    assert len(encoded(PLAIN, of_one_kind(rows(30))[0])) == 29
    assert calls.count("mask_many") > 15
