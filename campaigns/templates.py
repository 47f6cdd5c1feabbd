"""Chat templates of strangers: escapes, loops and bombs of memory, and harmless ones among them."""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns.support import Tally, campaign
from campaigns.watched import Case, watched
from qlora_wgpu.data import ChatTemplate
from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.masking import Masking
from qlora_wgpu.errors import QLoRAError

SECRET = "canary-that-no-template-may-read"
MESSAGES = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}|\b14\d{13}\b")  # as Python writes one, and its digits

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

_OBJECTS = (
    "''", "[]", "{}", "1", "1.5", "messages", "messages[0]", "messages[0].get", "range", "dict",
    "namespace", "namespace()", "raise_exception", "strftime_now", "loop", "self", "caller",
    "none", "true", "undefined_name", "range(3)", "''.join", "''.format", "messages.append",
    "({}).items", "({}).items()", "[1]|map('string')", "[1]|reverse", "[1]|select", "'x'|list",
    "cycler", "joiner", "lipsum", "varargs", "kwargs", "self.b", "messages|map(attribute='get')",
    "[1]|batch(1)", "messages[0]|items", "dict.fromkeys", "super", "dict(a=1).get", "x.y|attr('z')",
)  # fmt: skip
_ATTRIBUTES = (
    "__class__", "__mro__", "__subclasses__", "__globals__", "__init__", "__builtins__", "__self__",
    "func_globals", "gi_frame", "f_globals", "__code__", "__dict__", "__import__", "__reduce_ex__",
    "__getattribute__", "_TemplateReference__context", "environment", "__base__", "__func__",
    "__wrapped__", "__name__", "function", "eval_ctx", "mro", "format", "format_map", "get",
    "copy", "update", "clear", "append", "pop", "__call__", "__module__", "__doc__", "_pieces",
)  # fmt: skip
_SHOWN = (
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
_BOUNDED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}", "{{ messages | map(attribute='role') | join(', ') }}",
    "{% set n = namespace(a='') %}{% for m in messages %}{% set n.a = n.a + m.role %}{% endfor %}"
    "{{ n.a.upper() }}",
)  # fmt: skip


def cases(count: int, seed: int) -> Iterator[Case]:
    """What a seed makes."""
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        kind = draw.choice((_escape, _escape, _loop, _loop, _harmless))
        yield f"seed {seed}, number {number}", kind(draw)


def _escape(draw: random.Random) -> str:
    value = draw.choice(_OBJECTS)
    for _ in range(draw.randrange(3)):
        name = draw.choice(_ATTRIBUTES)
        value = draw.choice(
            (f"({value}).{name}", f"({value})['{name}']", f"({value})|attr('{name}')")
        )
    return draw.choice(_SHOWN).replace("X", f"({value})")


def _loop(draw: random.Random) -> str:
    """Growth of a random value under random operations, in loops within one another."""
    steps: list[Callable[[str, int], str]] = [
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
    value = draw.choice(("n.x", "'a'", "[1, 2]", "messages", "range(99)", "n.x | string"))
    for _ in range(draw.randrange(1, 4)):
        value = draw.choice(steps)(value, draw.choice((2, 7, 99, 99_999, 9_999_999, 10**10)))
    times = draw.choice((3, 30, 300, 90_000))
    body = f"{{% set n.x = {value} %}}" + draw.choice(("", "{{ n.x | length }}", "{{ n.x }}"))
    for _ in range(draw.randrange(1, 4)):
        body = f"{{% for i in range({times}) %}}{body}{{% endfor %}}"
    return "{% set n = namespace(x=" + draw.choice(("'a'", "[1]", "2")) + ") %}" + body


def _harmless(draw: random.Random) -> str:
    return "".join(draw.choice(_BOUNDED) for _ in range(draw.randrange(1, 4)))


def attempt(source: str) -> str:
    """Renders a template as a row of data does, and looks at what it shows."""
    template = ChatTemplate(source.replace("FILE", os.environ["CANARY"]))
    [masked] = template.mask_many([Conversation(MESSAGES)], Masking())
    if isinstance(masked, QLoRAError):
        raise masked
    text = masked.text
    if SECRET in text:
        return "WRONG: a file or the environment is shown"
    if _ADDRESS.search(text):
        return "WRONG: an address is shown"
    return "rendered"


def body(count: int, seed: int, tally: Tally) -> None:
    """Runs the campaign: the bombs, and what the seed makes, shuffled."""
    bombs = [*BOMBS.items()][: count // 2]
    chosen = [*bombs, *cases(count - len(bombs), seed)]
    random.Random(seed).shuffle(chosen)
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        canary.write_text(SECRET)
        os.environ.update(CANARY=str(canary), HF_TOKEN=SECRET)
        watched(iter(chosen), attempt, tally)


if __name__ == "__main__":
    campaign("templates", body, 500)
