"""Turns in chats whose template writes the last one, thoughts or calls in ways of their own."""

from __future__ import annotations

import pytest
from support.spans import assistant_spans, render_chat

from qlora_wgpu.data.chat_template import ChatTemplate

# The last turn is closed otherwise than one before another (as gpt-oss's).
RETURNS = """{%- for m in messages -%}
<s>{{ m.role }}<m>{{ m.content }}
{%- if m.role == 'assistant' and loop.last and not add_generation_prompt %}<return>{% else %}<end>
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt %}<s>assistant{% endif -%}"""
# The prompt goes on with an empty thought, which turns have not (as Gemma 4's).
THINKS = """{%- for m in messages -%}
<t>{{ m.role }}<n>
{%- if m.tool_calls %}{% for c in m.tool_calls %}<tool:{{ c.function.arguments.city }}>{% endfor %}
{%- endif -%}{{ m.content }}<e><n>
{%- endfor -%}{%- if add_generation_prompt %}<t>assistant<n><thought>{% endif -%}"""
# Thoughts of turns before the last question are left out (as Qwen's).
FORGETS = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}{%- for m in messages -%}
<t>{{ m.role }}<n>{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{% endif -%}
{%- if m.content and m.tool_calls %}{{ m.content }}<n><n>{% else %}{{ m.content }}{% endif -%}
{%- for c in m.tool_calls or [] %}<tool:{{ c.function.arguments.city }}>{% endfor %}<e><n>
{%- endfor -%}{%- if add_generation_prompt %}<t>assistant<n><think>{% endif -%}"""
# What is thought stands before the turn's own header.
ELSEWHERE = """{%- for m in messages -%}
{{ m.reasoning_content or '' }}<t>{{ m.role }}<n>{{ m.content }}<e>
{%- endfor -%}{%- if add_generation_prompt %}<t>assistant<n>{% endif -%}"""


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(city: str) -> dict:
    arguments = {"city": city}
    return answer("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


CHAT = [user("one"), call("Paris"), {"role": "tool", "content": "20"}, answer("warm"),
        user("two"), call("Rome"), {"role": "tool", "content": "30"}, answer("hot")]  # fmt: skip


def trained_turns(source: str, messages: list[dict]) -> list[str]:
    text, spans = assistant_spans(ChatTemplate(source), messages)
    return [text[first:end] for first, end in spans]


def test_a_last_turn_that_is_closed_otherwise() -> None:
    messages = [user("one"), answer("first"), user("two"), answer("second")]
    assert trained_turns(RETURNS, messages) == ["<m>first<end>", "<m>second<return>"]


def test_a_prompt_that_goes_on_otherwise_than_turns() -> None:
    expected = ["<tool:Paris><e><n>", "warm<e><n>", "<tool:Rome><e><n>", "hot<e><n>"]
    assert trained_turns(THINKS, CHAT) == expected


def test_calls_of_turns_whose_thoughts_are_left_out() -> None:
    expected = ["<tool:Paris><e><n>", "warm<e><n>", "<tool:Rome><e><n>", "hot<e><n>"]
    assert trained_turns(FORGETS, CHAT) == expected


def test_a_call_that_a_template_leaves_out() -> None:
    plain = THINKS.replace("<tool:{{ c.function.arguments.city }}>", "")
    assert trained_turns(plain, CHAT) == ["<e><n>", "warm<e><n>", "<e><n>", "hot<e><n>"]


def test_thoughts_outside_of_their_turn_are_no_silent_loss() -> None:
    messages = [user("one"), answer("first", reasoning_content="because")]
    assert trained_turns(ELSEWHERE, [user("one"), answer("first")]) == ["first<e>"]
    assert trained_turns(ELSEWHERE, messages) == ["because<t>assistant<n>first<e>"]


@pytest.mark.parametrize("argument", ["first=true", "2, first=true", "width=2, blank=true"])
def test_filters_have_arguments_of_any_name(argument) -> None:
    text = render_chat(f"{{{{ messages[0].content | indent({argument}) }}}}", [user("a\nb")]).text
    assert text.splitlines()[1].strip() == "b"
