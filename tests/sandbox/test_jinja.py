"""What a stranger's template may compute."""

import pytest

from qlora_wgpu.sandbox.templates import ChatEnvironment


def rendered(template, **values):
    return ChatEnvironment().from_string("{{ " + template + " }}").render(values)


@pytest.mark.parametrize(("template", "text"), [
    ("'ab' + 'cd'", "abcd"), ("[1] + [2]", "[1, 2]"), ("'ab' * 3", "ababab"),
    ("3 * 'ab'", "ababab"),
    ("2 ** 10", "1024"), ("100 ** 2", "10000"), ("'%5d' % 7", "    7"), ("7 % 4", "3"),
    ("'a-b-a'.replace('a', 'xyz')", "xyz-b-xyz"), ("'aaa'.replace('a', 'b', 1)", "baa"),
    ("'a-b'|replace('a', 'xyz')", "xyz-b"), ("'a'.center(5)", "  a  "),
    ("'-'.join(['a', 'b'])", "a-b"), ("['a', 'b']|join('-')", "a-b"),
    ("'{:>5}'.format(7)", "    7"), ("'a\nb'|indent(2)", "a\n  b"),
    ("{'a': '<é>'}|tojson", '{"a": "<é>"}'), ("[1]|tojson(indent=2)", "[\n  1\n]"),
    ("'x'.replace('x', 7|string)", "7"),
])  # fmt: skip
def test_ordinary_expressions_are_what_they_are_elsewhere(template, text):
    assert rendered(template) == text
