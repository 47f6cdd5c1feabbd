"""Chat templates of strangers: escapes, loops and bombs of memory, and harmless ones among them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.strangers import attempt, costly
from qlora_wgpu.data import ChatTemplate, assistant_spans
from qlora_wgpu.errors import QLoRAError

SECRET = "canary-that-no-template-may-read"
MESSAGES = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]
ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}|\b14\d{13}\b")  # as Python writes one, and its digits

NEST = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
NEST += "{% set n.y = [n.y, n.y] %}{% endfor %}"
LONG = "{% set t = 'ab <' * 2000000 %}"
GROW = "{% set n = namespace(l=[]) %}{% for i in range(400) %}{% set n.l = n.l + [VALUE] %}"
GROW += "{% endfor %}{{ n.l | length }}"

BOMBS = {
    **{f"nested {i}": NEST + "{{ " + text + " }}" for i, text in enumerate((
        "n.x | tojson | length", "n.x | string | length", "n.x == n.y", "n.x in [n.y]", "n.x",
        "n.x | pprint | length", "[n.x, n.y] | sort | length", "[n.x, n.y] | unique | list",
        "'%s' % [n.x]", "'{}'.format(n.x)", "n.x ~ 'x'", "n.x | join", "n.x | max", "n.x < n.y",
        "n.x | tojson(indent=60) | length", "[n.x] | groupby(0)", "n.x | urlize",
    ))},
    **{f"long {i}": LONG + "{{ " + text + " }}" for i, text in enumerate((
        "t | list | join('-') | length", "t | wordwrap(1) | length", "t | urlize | length",
        "t | list | sort | length", "t | batch(1) | list | length", "t | striptags | length",
        "t | list | unique | list", "t | list | groupby(0) | length", "t | title | length",
        "t | list | map('center', 90000) | list | length", "t.split('b') | list | tojson | length",
        "t | pprint | length", "t | list | pprint | length", "t.encode('utf-32') | length",
        "t | slice(9000000) | list | length", "t | list | map('upper') | map('lower') | list",
        "('\\t' * 1000000).expandtabs(99999) | length", "(t | list) * 2 == (t | list) * 2",
        "t | list | tojson(indent=60) | length", "t | escape | length", "t | forceescape | length",
    ))},
    **{f"kept {i}": GROW.replace("VALUE", text) for i, text in enumerate((
        "'x' * 9000000 ~ i", "range(99999) | list", "('x' * 9000000) | upper",
        "(1).to_bytes(9000000 + i, 'big')", "['x'] * 9000000", "('x ' * 4000000).split()",
        "dict.fromkeys(range(99999), i)", "'x'.ljust(90000 + i) * 100", "(i ~ 'y') * 4000000",
        "range(99999) | map('string') | list", "('x' * 4000000) | list",
    ))},
    **{f"filter {i}": "{{ " + text + " }}" for i, text in enumerate((
        "range(9) | batch(999999999, 'x') | list | length",
        "range(99999) | map('center', 90000) | list | length",
        "range(99999) | map('batch', 99999, 1) | map('list') | list | length",
        "range(9) | slice(999999999) | list | length",
        "'{:{}}'.format(1, 1999999999) | length", "'{0:{1}}'.format('x', 1999999999) | length",
        "(1).to_bytes(1999999999, 'big') | length", "'%s' | format(range(99999) | list) * 1000",
        "range(99999) | map('string') | map('indent', 90000, true) | list | length",
        "[range(99999) | list] * 999 | sum(start=[]) | length", "1.5 | round(999999999)",
        "'x' | indent(99999999)", "'%.99999d' | format(1)", "1e308 | int | string | length",
        "range(99999) | map('tojson', indent=64) | join | length",
        "('9' * 4299) | int ** 99", "{'a': 1} | dictsort", "'<' * 9999999 | striptags",
        "('<!--' * 999999) | striptags | length", "('a.' * 999999) | urlize | length",
        "(range(99999) | list * 90) | sort | length", "'a' * 9999999 in 'a' * 9999998 ~ 'b'",
    ))},
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for a in [[[[]]]] recursive %}{{ loop([[a]] * 9) }}{% endfor %}",
    "lazy chain": "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}"
    "{% set n.x = n.x | map('string') %}{% endfor %}{{ n.x | list }}",
    "deep list": "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "deep list compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x] %}{% set n.y = [n.y] %}{% endfor %}{{ n.x == n.y }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "sum of many": "{{ " + "+".join(["1"] * 50000) + " }}",
    "constant": "{{ range(9) | batch(999999999, 'x') | list | length }}{{ 'x' | center(99999) }}",
    "long source": "x" * 900_000,
    "marks": "{% for i in range(90000) %}{% generation %}x{% endgeneration %}{% endfor %}",
    "long error": "{{ raise_exception('x' * 9000000) }}",
    "surrogate": "{{ '\\ud800' }}",
}  # fmt: skip

OBJECTS = (
    "''", "[]", "{}", "1", "1.5", "messages", "messages[0]", "messages[0].get", "range", "dict",
    "namespace", "namespace()", "raise_exception", "strftime_now", "loop", "self", "caller",
    "none", "true", "undefined_name", "range(3)", "''.join", "''.format", "messages.append",
    "({}).items", "({}).items()", "[1]|map('string')", "[1]|reverse", "[1]|select", "'x'|list",
    "cycler", "joiner", "lipsum", "varargs", "kwargs", "self.b", "messages|map(attribute='get')",
    "[1]|batch(1)", "messages[0]|items", "dict.fromkeys", "super", "dict(a=1).get", "x.y|attr('z')",
)  # fmt: skip
ATTRIBUTES = (
    "__class__", "__mro__", "__subclasses__", "__globals__", "__init__", "__builtins__", "__self__",
    "func_globals", "gi_frame", "f_globals", "__code__", "__dict__", "__import__", "__reduce_ex__",
    "__getattribute__", "_TemplateReference__context", "environment", "__base__", "__func__",
    "__wrapped__", "__name__", "function", "eval_ctx", "mro", "format", "format_map", "get",
    "copy", "update", "clear", "append", "pop", "__call__", "__module__", "__doc__", "_pieces",
)  # fmt: skip
SHOWN = (
    "{{ X }}", "{{ X | string }}", "{{ [X] }}", "{{ [X] | join }}", "{{ X ~ '' }}",
    "{{ '%s' % X }}", "{{ '%r' | format(X) }}", "{{ '{0}'.format(X) }}",
    "{{ '{0.__class__}'.format(X) }}",
    "{{ X | pprint }}", "{{ X | list }}", "{{ (X | string)[-16:] }}", "{{ X() }}", "{{ {1: X} }}",
    "{{ X | tojson }}", "{{ X | attr('__class__') }}", "{{ X | map('string') | join }}",
    "{{ [X] | map('upper') | list }}", "{{ raise_exception(X) }}", "{{ X | e }}", "{{ X + 1 }}",
    "{{ X['__globals__']['os'].environ }}", "{{ X().__class__.__base__.__subclasses__() }}",
    "{{ X | replace('a', 'b') }}", "{{ [X, X] | sort }}", "{{ X is mapping }}", "{{ X | hash }}",
    "{{ '%d' % X }}", "{{ '%x' % X }}", "{% set n = namespace(f=X) %}{{ n.f }}", "{{ X | urlize }}",
    "{% set q = X %}{{ q }}{{ [q]|first }}", "{% block b %}{{ X }}{% endblock %}",
    "{% include 'FILE' %}", "{% import 'FILE' as m %}{{ m }}", "{% extends 'FILE' %}",
    "{% from 'FILE' import a %}", "{{ X('FILE').read() }}", "{{ X.__init__.__globals__ }}",
    "{% macro f() %}{{ caller }}{{ X }}{% endmacro %}{{ f }}{% call f() %}{% endcall %}",
)  # fmt: skip
BOUNDED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}", "{{ messages | map(attribute='role') | join(', ') }}",
    "{% set n = namespace(a='') %}{% for m in messages %}{% set n.a = n.a + m.role %}{% endfor %}"
    "{{ n.a.upper() }}",
)  # fmt: skip


GROWTH: list[Callable[[str, int], str]] = [
    lambda v, n: f"({v}) ~ ({v})", lambda v, n: f"({v}) * {n}", lambda v, n: f"[{v}, {v}]",
    lambda v, n: f"({v}) | list", lambda v, n: f"({v}) | batch({n}, 'x') | list",
    lambda v, n: f"({v}) | join({v})", lambda v, n: f"({v}) | string | indent({n})",
    lambda v, n: f"({v}) | string | center({n})", lambda v, n: f"({v}) + ({v})",
    lambda v, n: f"({v}) | string | wordwrap(3)", lambda v, n: f"({v}) | tojson",
    lambda v, n: f"range({n}) | list", lambda v, n: f"({v}) | map('string') | list",
    lambda v, n: f"dict(a={v}, b={v})", lambda v, n: f"({v}) | slice({n}) | list",
    lambda v, n: f"(({v}) | string).replace('a', {v} | string)", lambda v, n: f"({v}) | sort",
    lambda v, n: f"'%{n}s' % ({v})", lambda v, n: f"'{{:>{{}}}}'.format({v}, {n})",
]  # fmt: skip
STARTS = ("n.x", "'a'", "[1, 2]", "messages", "range(99)", "n.x | string")
NUMBERS = (2, 7, 99, 99_999, 9_999_999, 10**10)


@st.composite
def escapes(draw: st.DrawFn) -> str:
    """An object's parts, shown in one of many ways."""
    value = draw(st.sampled_from(OBJECTS))
    for name in draw(st.lists(st.sampled_from(ATTRIBUTES), max_size=2)):
        forms = f"({value}).{name}", f"({value})['{name}']", f"({value})|attr('{name}')"
        value = draw(st.sampled_from(forms))
    return draw(st.sampled_from(SHOWN)).replace("X", f"({value})")


@st.composite
def loops(draw: st.DrawFn) -> str:
    """Growth of some value under some operations, in loops within one another."""
    value = draw(st.sampled_from(STARTS))
    for step in draw(st.lists(st.sampled_from(GROWTH), min_size=1, max_size=3)):
        value = step(value, draw(st.sampled_from(NUMBERS)))
    shown = draw(st.sampled_from(("", "{{ n.x | length }}", "{{ n.x }}")))
    body = f"{{% set n.x = {value} %}}{shown}"
    times = draw(st.sampled_from((3, 30, 300, 90_000)))
    for _ in range(draw(st.integers(1, 3))):
        body = f"{{% for i in range({times}) %}}{body}{{% endfor %}}"
    first = draw(st.sampled_from(("'a'", "[1]", "2")))
    return f"{{% set n = namespace(x={first}) %}}{body}"


harmless = st.lists(st.sampled_from(BOUNDED), min_size=1, max_size=3).map("".join)
bombs = st.sampled_from(list(BOMBS)).map(BOMBS.__getitem__)


@pytest.fixture(scope="module")
def canary(place: Path) -> Path:
    """A file that no template may read; the environment has the same text."""
    path = place / "canary"
    path.write_text(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        yield path


@costly
@given(source=st.one_of(escapes(), escapes(), loops(), bombs, harmless))
def test_a_template_renders_or_is_refused(canary: Path, source: str) -> None:
    template = source.replace("FILE", str(canary))
    result = attempt(lambda: assistant_spans(ChatTemplate(template), MESSAGES))
    if not isinstance(result, QLoRAError):
        assert SECRET not in result[0], "a file or the environment is shown"
        assert not ADDRESS.search(result[0]), "an address is shown"
