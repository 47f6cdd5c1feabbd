"""Reading data files: what is accepted, and which line an error names."""

from __future__ import annotations

import json
import os

import pytest

from qlora_wgpu.data import json_rows
from qlora_wgpu.data.json_rows import file_parts
from qlora_wgpu.data.sources import check_file, read_rows
from qlora_wgpu.errors import DataError


def rows(tmp_path, content, name="train.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check_file(path)
    return list(read_rows(path))


def test_lines(tmp_path) -> None:
    content = '\ufeff{"text": "a"}\r\n\n   \n{"text": "\\ud83d\\ude42\u2028"}\n{"a": [1, {"b": 2}]}'
    assert rows(tmp_path, content) == [
        ("train.jsonl line 1", {"text": "a"}),
        ("train.jsonl line 4", {"text": "🙂\u2028"}),
        ("train.jsonl line 5", {"a": [1, {"b": 2}]}),
    ]


def test_list(tmp_path) -> None:
    expected = [("train.json row 1", {"a": 1}), ("train.json row 2", {"a": 2})]
    assert rows(tmp_path, '[{"a": 1},\n {"a": 2}]', "train.json") == expected
    assert rows(tmp_path, '[{"a": 1},\n {"a": 2}]', "train.JSON")[0][1] == {"a": 1}


def test_lines_in_a_file_called_json(tmp_path) -> None:
    expected = [("train.json row 1", {"a": 1}), ("train.json row 2", {"a": [2]})]
    assert rows(tmp_path, '{"a": 1}\n{"a":\n [2]}\n\n', "train.json") == expected


def test_one_row_in_a_file_called_json(tmp_path) -> None:
    for row in ({"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        assert rows(tmp_path, json.dumps(row), "train.json") == [("train.json row 1", row)]


GOOD = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not valid JSON"),
        ('{"text": "a",}', "not valid JSON"),
        ("{'text': 'a'}", "not valid JSON"),
        ('{"text": "a"} {"text": "b"}', "not valid JSON (Extra data at column 15)"),
        ('{"text": NaN}', "NaN is not valid JSON"),
        ('{"text": -Infinity}', "-Infinity is not valid JSON"),
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
        ('{"text": {"x": 1, "x": 1}}', "the key 'x' occurs twice"),
        ('{"text": "\\ud83d"}', "lone surrogate"),
        ('{"text": [{"x": "\\udc00a"}]}', "lone surrogate"),
        ('{"\\ud83d": "a"}', "lone surrogate"),
        ('"text"', "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": ' + "1" * 5000 + "}", "too many digits"),
        (b'{"text": "\xff"}', "is not UTF-8"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_wrong_lines_are_named(tmp_path, line, expected) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(DataError) as caught:
        rows(tmp_path, GOOD.encode() + b"\n" + raw + b"\n")
    assert str(caught.value).startswith("train.jsonl line 3")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"data": []}', "must contain a list of rows"),
        ('{"data": [{"text": "a"}]}', "got an object whose 'data' is a list: keep only the list"),
        ('{"a": 1}\n{"a": 2} 3', "train.json row 3: a row must be a JSON object"),
        ('{"a": 1}\n{"a": 2', "not valid JSON"),
        ('{"a": 1}\n2', "not valid JSON (Extra data at line 2 column 1)"),
        ("2", "must contain a list of rows, or one object per line"),
        ('[{"a": 1}, 2]', "train.json row 2: a row must be a JSON object"),
        ('[{"a": 1,\n "a": 2}]', "the key 'a' occurs twice"),
        (b'[{"a":\n"\xff"}]', "train.json line 2 is not UTF-8"),
    ],
)
def test_wrong_lists(tmp_path, content, expected) -> None:
    with pytest.raises(DataError) as caught:
        rows(tmp_path, content, "train.json")
    assert expected in str(caught.value)


def test_a_list_that_is_too_large_is_told_what_to_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(json_rows, "JSON_LIST_BYTES", 5)
    with pytest.raises(DataError, match=r"^train.json is larger .* .json files: .* JSON Lines"):
        rows(tmp_path, '[{"text": "a"}]', "train.json")


def test_text(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert "".join(file_parts(path)) == "a\nb\n"
    parts = b"a" * ((1 << 20) - 1) + b"\r\nb\r", b"a" * (1 << 20) + b"\r\n"  # cut within an end
    for raw in (*parts, b"\r", b"\n\r\r\n"):
        path.write_bytes(raw)
        assert "".join(file_parts(path)) == path.read_text("utf-8")
    path.write_bytes(b"a\n\nb\xff")
    with pytest.raises(DataError, match=r"a\.txt line 3 is not UTF-8"):
        list(file_parts(path))


def test_missing_files_and_near_names(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    (tmp_path / "notes").write_text(GOOD)
    for wrong, near in (("trian.jsonl", "train.jsonl"), ("train.json", "train.jsonl")):
        with pytest.raises(DataError, match=rf"does not exist: did you mean {near}\?"):
            check_file(tmp_path / wrong)
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    with pytest.raises(DataError, match=r"not exist: it is a broken link to round.jsonl"):
        check_file(tmp_path / "round.jsonl")
    with pytest.raises(DataError, match=r"does not exist: write / between folders$"):
        check_file(tmp_path / r"data\train.jsonl")
    with pytest.raises(DataError, match=r"zzz\.txt does not exist$"):
        check_file(tmp_path / "zzz.txt")
    with pytest.raises(DataError, match=r"the folder .* does not exist"):
        check_file(tmp_path / "gone" / "a.txt")


def test_unusable_files(tmp_path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.xlsx").write_text("a")
    (tmp_path / "plain").write_text("a")
    cases = {"empty.jsonl": "is empty", "a.xlsx": "must end in", "plain": "must end in"}
    for name, expected in cases.items():
        with pytest.raises(DataError, match=expected):
            check_file(tmp_path / name)
    with pytest.raises(DataError, match="is a folder"):
        check_file(tmp_path)
    with pytest.raises(DataError, match="cannot read the data file"):
        check_file(tmp_path / ("x" * 5000))


def test_rows_are_read_one_at_a_time(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + "broken\n")
    assert next(read_rows(path))[1] == {"text": "a"}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs file permissions")
def test_files_without_permission(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    path.chmod(0)
    with pytest.raises(DataError, match="cannot read the data file"):
        list(read_rows(path))
