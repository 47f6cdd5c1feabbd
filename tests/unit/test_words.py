"""What users read has the field's words."""

from pathlib import Path

import pytest

from tools import words


@pytest.mark.slow
def test_no_old_word_is_left():
    left = [f"{w.path.relative_to(words.ROOT)}:{w.line}: {w.word!r}" for w in words.in_project()]
    assert not left, f"{left}; instead: tools/words.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = f'the run goes on beside {y}'", ["goes on", "beside"]),
        ('"""At least one, besides the least recently used."""', []),
        ("raise ValueError('must be a whole number')", ["whole number"]),
        ("'see `go on` in the code'", []),
        ("learnt = 1", []),
    ],
)
def test_it_reads_strings_and_docstrings_of_python(tmp_path: Path, text, found):
    (path := tmp_path / "a.py").write_text(text)
    assert [each.word for each in words.in_python(path)] == found


def test_it_reads_prose_and_no_code(tmp_path: Path):
    text = "It is.\n```\nlearnt\n```\nWhat waits `anew`, beside.\n"
    (path := tmp_path / "a.md").write_text(text)
    assert [(each.line, each.word) for each in words.in_document(path)] == [
        (5, "What waits"), (5, "beside"),
    ]  # fmt: skip
