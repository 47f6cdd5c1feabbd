"""Others' text: what a terminal would obey is escaped, and secrets are masked."""

import json

import pytest

from qlora_wgpu.limits import MAX_QUOTED
from qlora_wgpu.visible import (
    one_line,
    quoted,
    visible,
    visible_json,
    without_empty_lines,
    without_secrets,
)


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[1m", r"\x1b[1m"), ("\r", r"\r"), ("\x00", r"\x00"), ("\x0b", r"\x0b"),
    ("\x1f\x20", r"\x1f "), ("~\x7f", r"~\x7f"), ("\x9f\xa0", "\\x9f\xa0"), ("\xff", "\xff"),
    ("\u0100", "\u0100"), ("\u061c", r"\u061c"), ("\u200e", r"\u200e"), ("\u202e", r"\u202e"),
    ("\ufeff", r"\ufeff"), ("\ud800", r"\ud800"), ("\U000e0001", r"\U000e0001"),
    ("a\tb\nc", "a\tb\nc"), ("é☃😀", "é☃😀"),
])  # fmt: skip
def test_what_a_terminal_obeys_is_escaped(text, shown):
    assert visible(text) == shown
    assert one_line(text) == shown.replace("\t", r"\t").replace("\n", r"\n")


@pytest.mark.parametrize(("text", "shown"), [
    ("\n\na\n\n\n\nb\n", "a\n\nb"), ("a\n \n\t\nb", "a\n\nb"), ("a\n\nb", "a\n\nb"),
    ("a\nb", "a\nb"), ("\n", ""), (" a ", " a "),
])  # fmt: skip
def test_empty_lines(text, shown):
    assert without_empty_lines(text) == shown


def test_values_of_users_are_quoted_and_cut():
    assert quoted("a\n") == r"'a\n'" and quoted(3) == "'3'" and quoted(["a"]) == "'['a']'"
    long = "x" * MAX_QUOTED
    assert quoted(long) == f"'{long}'" and quoted(long + "yz") == f"'{long}…'"


@pytest.mark.parametrize(("text", "shown"), [
    ("my 12345678 is", "my *** is"), ("my 1234567 is", "my 1234567 is"),
    ("hf_" + "a" * 16, "***"), ("hf_" + "a" * 15, "hf_" + "a" * 15),
    ("https://me:secret@host/a@b", "https://***@host/a@b"), ("https://host/a@b",) * 2,
])  # fmt: skip
def test_secrets_are_masked(text, shown):
    environ = {"HF_TOKEN": " 12345678 ", "WANDB_API_KEY": "1234567", "OTHER": "is"}
    assert without_secrets(text, environ) == shown


@pytest.mark.parametrize("text", ["\x7fa\x1b", "\u202e", "\U000e0001", "é😀", "\ud800"])
def test_json_has_no_character_to_obey_and_reads_as_the_same(text):
    line = visible_json({"a": text})
    assert visible(line) == line and json.loads(line) == {"a": text}
    assert ("\\u" in line) == (text != "é😀")
