"""What a stranger's template may compute, by itself: what would take too much is refused before."""

import pytest

from qlora_wgpu.sandbox import templates
from qlora_wgpu.sandbox.templates import ChatEnvironment, LimitExceeded, start_counting


def rendered(template, **values):
    start_counting()
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
])  # fmt: skip
def test_ordinary_expressions_are_what_they_are_elsewhere(template, text):
    assert rendered(template) == text


@pytest.mark.parametrize("template", [
    "long + long", "'x' * 10 ** 9", "10 ** 9 * 'x'", "[0] * 10 ** 9", "2 ** 1000", "1000 ** 2",
    "10 ** 12 * 10 ** 12 * 10 ** 12", "'%999999d' % 7", "'%*d' % (9, 7)", "'{:999999}'.format(7)",
    "long.replace('x', long)", "long|replace('x', long)", "'x'.center(100001)",
    "'x'.ljust(100001)", "long.join(long)", "long.join(['a', 'b', 'c'] * 9)",
    "(['a'] * 1000)|join(long)", "'x'|center(100001)", "('a\n' * 1000)|indent(100001)",
    "'%999999d'|format(7)", "[1]|tojson(indent=65)",
])  # fmt: skip
def test_what_would_take_too_much_is_refused_before_it_is_computed(template):
    with pytest.raises(LimitExceeded):
        rendered(template, long="x" * (templates.MAX_CHARACTERS // 2 + 1))


def test_limits_are_where_they_are_said_to_be():
    assert len(rendered(f"'x'.center({templates._MAX_WIDTH})")) == templates._MAX_WIDTH
    assert rendered("'x'.replace('x', 7|string)") == "7"
    assert rendered("[1]|tojson(indent=64)").count(" ") == 64
