"""Chat templates: rendering, the sandbox's bounds, and masks of the assistant's text."""

from __future__ import annotations

from contextlib import suppress

import pytest
from support.spans import assistant_spans, render_chat
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import ChatTemplate, chat_template, find_chat_template
from qlora_wgpu.data.row_formats import tokens_in_spans
from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.sandbox import process

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Phi-3: closes the whole text once more.
CLOSING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% else %}{{ eos_token }}{% endif %}"
)
# As Qwen3: an empty thought before the last answer only, and thoughts of earlier ones left out.
THINKING = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' in m.content %}{{ m.content }}{% else %}<think></think>{{ c }}{% endif %}"
    "{% else %}{{ c }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def spans_text(source, messages, tools=None, eos="</s>", **special) -> list[str]:
    text, spans = assistant_spans(
        ChatTemplate(source, {"eos_token": eos, **special}), messages, tools, eos
    )
    assert all(0 <= a < b <= len(text) for a, b in spans)
    return [text[a:b] for a, b in spans]


# --- rendering


def test_blocks_are_trimmed() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert render_chat(source, [USER, ANSWER]).text == "Q\nA\n"


def test_generation_prompt_tools_and_special_tokens() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{{ documents }}{{ add_generation_prompt }}{{ x }}"
    rendered = render_chat(source, [USER], True, {"bos_token": "<s>"}, [{"n": "ü<"}])
    assert rendered.text == '<s>[{"n": "ü<"}]NoneTrue'
    assert rendered.spans is None


def test_tojson_takes_the_options_of_transformers() -> None:
    source = "{{ messages[0] | tojson(indent=1, sort_keys=true, separators=(',', ':')) }}"
    assert render_chat(source, [USER]).text == '{\n "content":"Q",\n "role":"user"\n}'


def test_loop_controls_namespaces_and_dates() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% continue %}{% endfor %}"
        "{{ ns.n }}{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}"
    )
    assert render_chat(source, [USER] * 5).text == "241"


def test_reasoning_under_other_names() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for key in ("reasoning_content", "thinking", "reasoning"):
        text = render_chat(source, [{**ANSWER, key: "R"}]).text
        assert text == "RR", key


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    with pytest.raises(TokenizerError):
        render_chat("{{ messages[0].update({'content': 1}) }}", [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}]}


def test_generation_blocks_give_spans() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "[a]{% generation %}{{ m.content }}<end>{% endgeneration %}\n{% else %}[u]{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    rendered = render_chat(source, [USER, ANSWER, USER, ANSWER])
    assert rendered.text == "[u]Q[a]A<end>\n[u]Q[a]A<end>\n".replace("\n[u]", "[u]").rstrip("\n")
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["A<end>", "A<end>"]


def test_generation_blocks_in_captured_text() -> None:
    source = (
        "{% set x %}{% generation %}one{% endgeneration %}{% endset %}"
        "{% macro m() %}{% generation %}two{% endgeneration %}{% endmacro %}ab{{ m() }}{{ x }}"
    )
    rendered = render_chat(source, [USER])
    assert rendered.text == "abtwoone"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["two", "one"]


def test_a_template_with_blocks_but_no_answer_has_no_spans() -> None:
    assert render_chat("{% generation %}{% endgeneration %}x", [USER]).spans == []
    assert render_chat("x", [USER]).spans is None


def test_nested_generation_blocks_count_once() -> None:
    source = (
        "x{% generation %}a{% generation %}b{% endgeneration %}{% generation %}c"
        "{% endgeneration %}d{% endgeneration %}"
    )
    rendered = render_chat(source, [USER])
    assert (rendered.text, rendered.spans) == ("xabcd", [(1, 5)])


def test_messages_cannot_forge_marks() -> None:
    source = "{{ messages[0].content }}{% generation %}A{% endgeneration %}"
    rendered = render_chat(source, [{"role": "user", "content": "\ufdd0x\ufdd1"}])
    assert rendered.spans == [(3, 4)]
    with pytest.raises(TokenizerError, match="U\\+FDD0"):
        render_chat("\ufdd0", [USER])


# --- failures


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{% for m in messages %}", "chat template is invalid"),
        ("a\n\n{{ ) }}", r"\(line 3\)"),
        ("{{ messages | nofilter }}", "chat template is invalid"),
        ("{% generation %}x", "chat template is invalid"),
    ],
)
def test_broken_templates(source, match) -> None:
    with pytest.raises(TokenizerError, match=match):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('No systems here') }}", "refuses this conversation: No systems here"),
        ("{{ messages[7].content }}", "cannot render this conversation"),
        ("{{ nothing.at.all }}", "cannot render this conversation"),
        ("{{ messages[0].content + 3 }}", "cannot render this conversation"),
        ("{{ 1 / 0 }}", "cannot render this conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
    ],
)
def test_conversations_that_do_not_fit(source, match) -> None:
    with pytest.raises(DataError, match=match):
        render_chat(source, [USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ messages.clear() }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_no_way_out_of_the_sandbox(source) -> None:
    try:
        text = render_chat(source, [USER]).text
    except (TokenizerError, DataError):
        return
    assert text == ""  # undefined


BOMBS = {
    "output": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "reused list": "{% set r = range(99999)|list %}{% for a in r %}{% for b in r %}{% endfor %}"
    "{% endfor %}",
    "filtered loop": "{% set r = range(99999)|list %}{% for a in r %}{% for b in r if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10**9) %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "times": "{{ 'x' * 1000000000 }}",
    "list times": "{{ [1] * 1000000000 }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{{ n.x | length }}",
    "tilde": "{% set n = namespace(x='xx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x | length }}",
    "power": "{{ 9 ** 999999999 }}",
    "tower": "{{ 99 ** 99 ** 99 }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "replace": "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
    "replace filter": "{% set a = 'x' * 100000 %}{{ a | replace('x', a) }}",
    "join": "{% set a = 'x' * 100000 %}{{ a.join(a) }}",
    "join filter": "{% set a = 'x' * 100000 %}{{ range(99999) | join(a) }}",
    "indent": "{{ ('a\n' * 1000000) | indent(90000) }}",
    "tojson": "{{ [1] | tojson(indent=999999999) }}",
}


@pytest.fixture
def own_process(monkeypatch):
    """What such a template computes is no part of what those of other tests may."""
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.3)
    chat_template.templates_process().close()
    yield
    chat_template.templates_process().close()


@pytest.mark.cover(
    name=[
        "output",
        "loops",
        "macros",
        "list times",
        "doubling",
        "power",
        "percent",
        "ljust",
        "replace",
        "join filter",
    ]
)
@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped(name, own_process) -> None:
    with pytest.raises((TokenizerError, DataError)) as caught:
        ChatTemplate(BOMBS[name]).render([USER])
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_date_is_never_padded_without_bound() -> None:
    with suppress(DataError):  # as systems differ
        assert len(render_chat("{{ strftime_now('%999999999d') }}", [USER]).text) < 10**6


def test_bounds_leave_room_for_long_conversations() -> None:
    messages = [{"role": "user", "content": "x" * 10_000}] * 200
    assert len(render_chat(PLAIN, messages).text) > 2_000_000


def test_ordinary_text_functions_work() -> None:
    source = (
        "{{ 'a-b' | replace('-', '+') }}{{ ['x', 'y'] | join(', ') }}{{ 'l\nm' | indent(2) }}"
        "{{ '%s!' | format('f') }}{{ 'q'.replace('q', 'r') }}{{ '-'.join(['1', '2']) }}"
        "{{ '%d' % 3 }}{{ '{}'.format(4) }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 'c' | center(3) }}"
        "{{ [1] + [2] }}{{ 1 ~ 'z' }}{{ messages | map(attribute='role') | join('/') }}"
    )
    expected = "a+bx, yl\n  mf!r1-234" + "68 c [1, 2]1zuser"
    assert render_chat(source, [USER]).text == expected


# --- masks


def test_prefix_masks() -> None:
    assert spans_text(PLAIN, [USER, ANSWER, USER, ANSWER]) == ["A<end>\n", "A<end>\n"]
    assert spans_text(PLAIN, [USER, ANSWER, USER]) == ["A<end>\n"]


def test_equal_contents_are_told_apart() -> None:
    messages = [{"role": r, "content": "same"} for r in ("user", "assistant") * 2]
    text, spans = assistant_spans(ChatTemplate(PLAIN), messages)
    turn = "[user]same<end>\n[assistant]same<end>\n"
    assert text == turn * 2
    header = len("[user]same<end>\n[assistant]")
    assert spans == [(header, len(turn)), (len(turn) + header, 2 * len(turn))]


def test_a_closing_token_is_trained_on_at_the_end_only() -> None:
    assert spans_text(CLOSING, [USER, ANSWER, USER, ANSWER]) == ["A<end>\n", "A<end>\n</s>"]
    assert spans_text(CLOSING, [USER, ANSWER, USER]) == ["A<end>\n"]


def test_thoughts_of_earlier_turns() -> None:
    messages = [USER, {"role": "assistant", "content": "<think>t</think>\nA"}, USER, ANSWER]
    assert spans_text(THINKING, messages) == ["A<end>\n", "<think></think>A<end>\n"]
    messages[-1] = {"role": "assistant", "content": "<think>u</think>B"}
    assert spans_text(THINKING, messages) == ["A<end>\n", "<think>u</think>B<end>\n"]


def test_what_the_template_writes_before_an_answer_is_trained_on() -> None:
    answer = "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    source = CLOSING.replace("{{ m.content }}", answer)
    expected = ["<think></think>A<end>\n", "<think></think>A<end>\n</s>"]
    assert spans_text(source, [USER, ANSWER, USER, ANSWER]) == expected


def test_trimmed_contents() -> None:
    source = CLOSING.replace("m.content", "m.content | trim")
    messages = [USER, {"role": "assistant", "content": "  A b \n"}, USER, ANSWER]
    assert spans_text(source, messages) == ["A b<end>\n", "A<end>\n</s>"]


def test_a_conversation_that_begins_with_the_assistant() -> None:
    source = "{{ messages[0].role }}:" + PLAIN
    assert spans_text(source, [ANSWER, USER]) == ["A<end>\n"]


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "A"}]
    source = CLOSING.replace(
        "m.content",
        "(m.content if m.content is string else m.content | map(attribute='text') | join)",
    )
    messages = [USER, {"role": "assistant", "content": parts}, USER, ANSWER]
    assert spans_text(source, messages) == ["A<end>\n", "A<end>\n</s>"]


@pytest.mark.parametrize(
    "source",
    [
        # the order is not that of the messages
        "{% for m in messages | reverse %}[{{ m.role }}]{{ m.content }}{{ messages|length }}\n"
        "{% endfor %}",
        # an earlier answer is printed twice, or in other words
        CLOSING.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
        CLOSING.replace("{{ m.content }}", "{{ m.content | upper }}{{ m.content | length }}"),
        CLOSING.replace("{{ m.content }}", "{{ m.content | replace('words', 'swords') }}"),
        # an earlier answer is left out
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
        "{% endfor %}{{ eos_token }}",
    ],
)
def test_what_cannot_be_told_apart_is_refused(source) -> None:
    messages = [USER, {"role": "assistant", "content": "some words"}, USER, ANSWER]
    with pytest.raises(DataError, match="turn in message 2 in the rendered chat"):
        spans_text(source, messages)


def test_the_marks_of_a_template_decide() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert spans_text(source, [USER, ANSWER]) == ["Q", "A"]


@pytest.mark.parametrize(
    ("offsets", "spans", "expected"),
    [
        ([(0, 1), (1, 2), (2, 3)], [(1, 2)], [0, 1, 0]),
        ([(0, 2), (2, 4)], [(1, 3)], [1, 1]),  # a token across the border is trained on
        ([(0, 0), (0, 2), (0, 0)], [(0, 2)], [0, 1, 0]),  # added tokens are not
        ([(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)], [0, 1, 1, 0]),  # bytes of one character
        ([(0, 1), (2, 3)], [(1, 2)], [0, 1]),  # a space that the tokenizer leaves out
        ([(0, 1), (2, 2), (2, 3)], [(1, 2)], [0, 1, 0]),  # a token of such spaces alone
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (3, 4)], [1, 0, 0, 1]),
        ([(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2)], [1, 1, 0]),  # one span after the other
        ([(0, 1), (2, 3), (0, 1)], [(0, 1), (2, 3)], [1, 1, 0]),  # as the page: never back
        ([(0, 1)], [], [0]),
        ([], [(0, 1)], []),
    ],
)
def test_tokens_in_spans(offsets, spans, expected) -> None:
    assert tokens_in_spans(offsets, spans).tolist() == [bool(e) for e in expected]


# --- where the template comes from


def test_find_chat_template(tmp_path) -> None:
    tokenizer = tiny_tokenizer(chat_template="own{{ eos_token }}")
    (tmp_path / "t.jinja").write_text("file")
    cases = {
        None: "own</s>",
        "inline {{ bos_token }}": "inline <s>",
        str(tmp_path / "t.jinja"): "file",
    }
    for setting, expected in cases.items():
        assert find_chat_template(setting, tokenizer).render([USER]).text == expected
    assert find_chat_template(None, tiny_tokenizer()) is None


def test_chatml() -> None:
    template = find_chat_template("chatml", tiny_tokenizer())
    rendered = template.render([USER, ANSWER], add_generation_prompt=True)
    assert rendered.text == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["A<|im_end|>\n"]


@pytest.mark.parametrize("make", ["missing", "folder", "binary"])
def test_template_files_that_cannot_be_read(tmp_path, make) -> None:
    path = tmp_path / "t.jinja"
    if make == "folder":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"t\.jinja"):
        find_chat_template(str(path), tiny_tokenizer())
