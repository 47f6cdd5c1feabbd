"""How Parquet and Arrow files are read, in this process: limits, and what has no JSON."""

import io
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from qlora_wgpu.data import parquet_child as child

ROWS = [{"a": number, "b": "x" * number} for number in range(150)]


def written(folder, form, rows=ROWS):
    table = pyarrow.Table.from_pylist(rows)
    path = folder / f"rows.{form.split()[0]}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        new = pyarrow.ipc.new_file if form == "arrow file" else pyarrow.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream"])
def test_rows_of_all_forms(tmp_path, monkeypatch, form, large):
    if large:
        monkeypatch.setattr(child, "_LARGE", 1)
    assert list(child._rows(written(tmp_path, form), 2, 1)) == ROWS


def test_what_is_refused_before_a_row_is_used(tmp_path, monkeypatch):
    path = written(tmp_path, "parquet")
    with pytest.raises(ValueError, match="it has 2 columns, more than 1"):
        next(child._rows(path, 1, 1))
    twice = [pyarrow.array([1]), pyarrow.array([2])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(twice, ["a", "a"]), path)
    with pytest.raises(ValueError, match="two columns have the same name"):
        next(child._rows(path, 2, 1))
    monkeypatch.setattr(child, "_ALWAYS_ALLOWED", 0)
    path = written(tmp_path, "parquet", [{"a": "x"}] * 100_000)
    with pytest.raises(ValueError, match="expand to more than"):
        next(child._rows(path, 2, 1))
    assert next(child._rows(path, 2, 100_000)) == {"a": "x"}
    monkeypatch.setattr(child, "_LARGE", 1)  # it is not read twice
    assert next(child._rows(path, 2, 1)) == {"a": "x"}


@pytest.mark.parametrize(("limit", "fails"), [(7, False), (6, True)])
def test_how_far_rows_may_expand(limit, fails):
    batches = [SimpleNamespace(nbytes=3), SimpleNamespace(nbytes=4)]
    with pytest.raises(ValueError, match=f"more than {limit}") if fails else nullcontext():
        child._check_expansion(batches, limit)


def said(monkeypatch, path, *, longest=100, columns=2, with_bytes=0):
    out = SimpleNamespace(buffer=io.BytesIO())
    monkeypatch.setattr(child, "_limit_memory", lambda nbytes: None)
    monkeypatch.setattr(child.sys, "stdout", out)
    child.main(path, 1, longest, columns, 1, with_bytes)
    monkeypatch.undo()
    return out.buffer.getvalue().splitlines()


@pytest.mark.parametrize("with_bytes", [0, 1])
def test_rows_are_written_as_lines(tmp_path, monkeypatch, with_bytes):
    path = written(tmp_path, "parquet", [{"a": b"\x00", "b": pyarrow.scalar(0, "date32").as_py()}])
    row, end = said(monkeypatch, path, with_bytes=with_bytes)
    assert row[:1] == child.ROW and end == child.END
    expected = {"base64": "AA=="} if with_bytes else {"type": "bytes"}
    assert json.loads(row[1:]) == {"a": expected, "b": {"type": "date"}}


def test_the_longest_line(tmp_path, monkeypatch):
    path = written(tmp_path, "parquet", [{"a": "x" * 10}])
    length = len('{"a": "xxxxxxxxxx"}')
    assert said(monkeypatch, path, longest=length)[-1] == child.END
    (line,) = said(monkeypatch, path, longest=length - 1)
    assert line == child.ERROR + f"a row of {length} bytes is longer than {length - 1}".encode()


def test_the_end_of_memory_is_no_error(monkeypatch):
    def rows(*given):
        yield {"a": 1}
        raise MemoryError

    monkeypatch.setattr(child, "_rows", rows)
    (row,) = said(monkeypatch, "rows.parquet")
    assert row[:1] == child.ROW
