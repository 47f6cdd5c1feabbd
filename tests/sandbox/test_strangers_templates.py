"""What a stranger's template may not do, beyond what ``tests/data/test_chat.py`` has."""

from __future__ import annotations

import re

import pytest
from support.spans import render_chat

from qlora_wgpu.data import ChatTemplate, chat_template
from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.sandbox import process

USER = {"role": "user", "content": "Q"}
NEST = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
NEST += "{% set n.y = [n.y, n.y] %}{% endfor %}"

# None of these can be counted step by step: each goes on within one filter or comparison.
BOMBS = {
    "comparison": NEST + "{{ n.x == n.y }}",
    "text of a value": NEST + "{{ n.x | string | length }}",
    "JSON": NEST + "{{ n.x | tojson | length }}",
    "batch": "{{ range(9) | batch(999999999, 'x') | list | length }}",
    "slice": "{{ range(9) | slice(999999999) | list | length }}",
    "map": "{{ range(99999) | map('center', 90000) | list | length }}",
    "format within a format": "{{ '{:{}}'.format(1, 1999999999) | length }}",
    "bytes": "{{ (1).to_bytes(1999999999, 'big') | length }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(99999) | length }}",
    "many values": "{% set n = namespace(l=[]) %}{% for i in range(400) %}"
    "{% set n.l = n.l + ['x' * 9000000 ~ i] %}{% endfor %}",
    "sum of lists": "{{ [range(99999) | list] * 9999 | sum(start=[]) | length }}",
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.3)
    chat_template.templates_process().close()
    yield
    chat_template.templates_process().close()


@pytest.mark.cover(name=["comparison", "batch", "map", "format within a format", "many values"])
@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_what_cannot_be_counted_is_stopped(name, impatient) -> None:
    with pytest.raises((TokenizerError, DataError)) as caught:
        render_chat(BOMBS[name], [USER])
    assert len(str(caught.value)) < 500


@pytest.mark.slow
def test_once_stopped_is_enough(impatient, monkeypatch) -> None:
    template = ChatTemplate(BOMBS["comparison"])
    with pytest.raises(TokenizerError, match="seconds of CPU time"):
        template.render([USER])
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "templates_process", lambda: pytest.fail("it is tried again"))
        with pytest.raises(TokenizerError, match="seconds of CPU time"):
            template.render([USER])


@pytest.mark.parametrize(
    "shown",
    ["{{ X }}", "{{ [X] }}", "{{ X ~ '' }}", "{{ '%r' % X }}", "{{ '{0}'.format(X) }}",
     "{{ (X | string)[-18:] }}", "{{ {1: X} | pprint }}", "{{ raise_exception(X) }}"],
)  # fmt: skip
@pytest.mark.parametrize(
    "value",
    ["messages[0].get", "messages[0]['get']", "range", "raise_exception", "strftime_now",
     "''.format", "[1] | map('string')", "[1] | reverse", "messages[0] | items", "dict.fromkeys",
     "messages | map(attribute='get') | list", "messages[0] | attr('get')", "[1] | batch(1)"],
)  # fmt: skip
def test_no_address_is_shown(value, shown) -> None:
    try:
        text = render_chat(shown.replace("X", f"({value})"), [USER]).text
    except (DataError, TokenizerError) as err:
        text = str(err)
    assert not re.search("0x[0-9a-f]{6}|[0-9a-f]{8}", text), text


def test_functions_and_iterators_still_work() -> None:
    source = (
        "{% set get = messages[0].get %}{{ get('role') }}{{ get is callable }}"
        "{{ ['b', 'a', 'b'] | map('upper') | unique | join }}{{ [1, 2] | reverse | list }}"
        "{{ range(3) | batch(2) | list }}{{ messages[0].items() | list | length }}"
        "{% if [] | select %}always{% endif %}{{ 'ab' | reverse }}{{ range(2) | list }}"
        "{% for a, b in messages[0] | items %}{{ a[0] }}{% endfor %}{{ 'x\\u00e9' | e }}"
        "{{ '<b>&eacute;</b>' | striptags }}{{ [2, 1] | map('string') | sort | first }}"
    )
    expected = "userTrueBA[2, 1][[0, 1], [2]]2alwaysba[0, 1]rcxéé1"
    assert render_chat(source, [USER]).text == expected


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% import '/etc/passwd' as x %}", "{% extends '/a' %}"],
)
def test_no_file_is_opened(source) -> None:
    with pytest.raises((DataError, TokenizerError)):
        render_chat(source, [USER])


def test_templates_of_this_package_need_no_process(monkeypatch) -> None:
    monkeypatch.setattr(
        chat_template, "templates_process", lambda: pytest.fail("a process is started")
    )
    assert render_chat(chat_template.BUILT_IN_TEMPLATES["chatml"], [USER]).text.startswith(
        "<|im_start|>"
    )


def test_values_that_cannot_be_handed_over_are_a_users_mistake() -> None:
    with pytest.raises(DataError, match="cannot render"):
        render_chat("{{ messages }}", [{"role": "user", "content": lambda: 0}])
