"""Empty rows are left out and counted; rows beyond a limit are refused in a sentence."""

import json
import time

import pytest
from support.pipes import make_pipe
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu import limits
from qlora_wgpu.data import PreprocessConfig, load_dataset
from qlora_wgpu.data.examples import document_ids, pieces_of
from qlora_wgpu.data.sources import read_rows, select_files
from qlora_wgpu.errors import DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
EMPTY = {
    "messages": [
        {},
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": " \n"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
    ],
    "conversations": [{"conversations": []}, {"conversations": [{"from": "gpt", "value": ""}]}],
    "text": [{}, {"text": ""}, {"text": " \t\n"}, {"text": None, "id": 3}],
    "prompt": [{"prompt": "", "completion": " "}, {"prompt": None, "completion": None}],
    "instruction": [{"instruction": "", "input": "", "output": ""}],
}
FULL = {
    "messages": {"messages": CHAT},
    "conversations": {"conversations": [{"from": "gpt", "value": "b"}]},
    "text": {"text": "b"},
    "prompt": {"prompt": "a", "completion": "b"},
    "instruction": {"instruction": "a", "output": "b"},
}


def load(path, **how):
    how = PreprocessConfig(**{"max_seq_length": 512, "chat_template": "chatml", **how})
    return load_dataset(path, tiny_tokenizer(), 512, how=how)


def write(tmp_path, rows, name="a.jsonl"):
    path = tmp_path / name
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize("kind", EMPTY)
def test_empty_rows_are_left_out_and_counted(tmp_path, kind):
    rows = [*EMPTY[kind], FULL[kind], *EMPTY[kind], FULL[kind]]
    dataset = load(write(tmp_path, rows))
    count = 2 * len(EMPTY[kind])
    assert len(dataset) == 2 and dataset.counts.empty == count
    [warning] = [text for text in dataset.warnings if "are empty" in text]
    assert warning.startswith(f"a.jsonl: {count} of {len(rows)} rows are empty and were skipped")
    assert "(a.jsonl line 1" in warning and ("…" in warning) == (count > 5)
    with pytest.raises(DataError, match=rf"a.jsonl has no content: all of its {count} rows are"):
        load(write(tmp_path, EMPTY[kind] * 2))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": 3}, "'text' must be text"),
        ({"id": 3}, "a row must have"),
        ({"text": "a", "text ": None}, None),
        ("null", "must be a JSON object"),
        ({"messages": "x"}, "must be a non-empty list of messages"),
        ({"messages": [{"role": "user"}]}, "'content' is missing"),
        ({"prompt": "x", "completion": None}, "'completion' must be text, got nothing"),
    ],
)
def test_rows_that_are_wrong_are_no_empty_rows(tmp_path, row, expected):
    path = write(tmp_path, [row])
    if expected is None:
        assert len(load(path)) == 1
    else:
        with pytest.raises(DataError, match=rf"a.jsonl line 1: .*{expected}"):
            load(path)


@pytest.mark.slow
def test_empty_rows_of_tables(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,completion\n"",\na,b\n" ",""\n')
    assert load(tmp_path / "a.csv").counts.empty == 2
    pyarrow = pytest.importorskip("pyarrow")  # an extra
    from pyarrow import parquet

    texts = [None, "b", "", None]
    parquet.write_table(pyarrow.table({"text": texts, "id": range(4)}), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet").counts.empty == 3
    other = [{"messages": None, "text": "b"}, {"messages": None, "text": "c"}]
    parquet.write_table(pyarrow.Table.from_pylist(other), tmp_path / "b.parquet")
    assert len(load(tmp_path / "b.parquet")) == 2


DEEP = "[" * 200 + "]" * 200
REFUSED = {
    "deep": ('{"text": "a", "x": ' + DEEP + "}", "nested too deeply"),
    "deep with an escape": (
        '{"text": "\\u0041", "x": ' + "[" * 900 + "]" * 900 + "}",
        "too deeply",
    ),
    "deep as text": (json.dumps({"messages": DEEP}), "nested too deeply"),
    "very deep as text": (json.dumps({"messages": "[" * 100_000}), "nested too deeply"),
    "a text": (json.dumps({"text": "a " * (limits.MAX_TEXT // 2 + 1)}), "its text has 4,194,306"),
    "an answer": (
        json.dumps({"prompt": "a", "completion": "a " * (limits.MAX_AT_ONCE // 2)}),
        "its text has 1,572,865 bytes",
    ),
    "a line": ('{"text": "' + "a" * (2 * limits.MAX_LINE), "line 1 is longer than 16 MiB"),
    "a line that ends": (
        json.dumps({"text": "a", "x": "a" * limits.MAX_LINE}),
        "line 1 is longer than 16 MiB",
    ),
    "columns": (json.dumps(dict.fromkeys(map(str, range(5000)), 1)), "5,000 keys"),
    "messages": (json.dumps({"messages": CHAT * 3000}), "6,000 messages"),
    "a key": (
        json.dumps({"k" * 10**6: 1, **dict.fromkeys(map(str, range(4000)))}),
        "a row must have",
    ),
    "a role": (
        json.dumps({"conversations": [{"from": "x" * 10**6, "value": ""}]}),
        "turn 1: unknown",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_beyond_a_limit(tmp_path, name, suffix):
    line, expected = REFUSED[name]
    if suffix == "json":
        line = f"[{line}]"
        expected = expected.replace("line 1 is", "the row at line 1 column 2 is")
    path = write(tmp_path, [line], f"a.{suffix}")
    begin = time.process_time()
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"a.{suffix}") and expected in message
    assert "\n" not in message and len(message) < 1000
    assert time.process_time() - begin < 5


@pytest.mark.slow
def test_rows_at_a_limit(tmp_path):
    rows = [
        '{"text": "a", "x": ' + "[" * 62 + "]" * 62 + "}",
        json.dumps({"text": "b"} | dict.fromkeys(map(str, range(4000)))),
        '{"text": "c", "x": "' + " " * (limits.MAX_LINE - 30) + '"}',
    ]
    assert len(load(write(tmp_path, rows))) == 3
    assert len(load(write(tmp_path, [f"[{','.join(rows)}]"], "a.json"))) == 3


@pytest.mark.slow
def test_csv_records_are_bounded(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text\n"' + ("a" * 1023 + "\n") * (limits.MAX_LINE // 1024 + 1))
    with pytest.raises(DataError, match=r"the row that begins in line 2 is longer than 16 MiB"):
        load(path)
    path.write_text(",".join(map(str, range(5000))) + "\n")
    with pytest.raises(DataError, match="5,000 columns, more than 4,096"):
        load(path)


def test_a_list_of_rows_is_read_row_by_row(tmp_path):
    path = tmp_path / "a.json"
    text = '\ufeff [\n {"text": "a"} ,\n{"text": "' + "b" * 3_000_000 + '"},{"x"'
    path.write_text(text, "utf-8")
    rows = read_rows(path)
    assert next(rows) == ("a.json row 1", {"text": "a"})
    assert len(next(rows)[1]["text"]) == 3_000_000
    with pytest.raises(DataError, match=r"a.json: not valid JSON \(Expecting ':' delimiter at "
                       r"line 3 column 3000018\)"):  # fmt: skip
        next(rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[", "Expecting value at line 1 column 2"),
        ('[{"a": 1}', "Expecting ',' delimiter at line 1 column 10"),
        ('[{"a": 1},]', "Expecting value at line 1 column 11"),
        ('[{"a": 1}]\n]', "Extra data at line 2 column 1"),
        ('[\n{"a": "', "Unterminated string starting at at line 2 column 7"),
        ("\n ", "must contain a list"),
        ('[{"a": 12', "Expecting ',' delimiter"),
    ],
)
def test_lists_that_are_no_json(tmp_path, text, expected):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError) as caught:
        list(read_rows(tmp_path / "a.json"))
    assert expected in str(caught.value)


def test_long_texts_are_tokenized_in_pieces(monkeypatch):
    monkeypatch.setattr("qlora_wgpu.data.examples.MAX_AT_ONCE", 40)
    tokenizer = tiny_tokenizer()
    text = "".join(f"line {i} é☃\n" for i in range(50)) + "x" * 100 + " y" * 60
    parts = [text[i : i + 7] for i in range(0, len(text), 7)]
    pieces = list(pieces_of(parts))
    assert "".join(pieces) == text and all(len(p.encode()) <= 40 for p in pieces)
    assert all(piece.endswith("\n") for piece in pieces[:10])
    ids = [i for piece in document_ids(tokenizer, parts) for i in piece]
    assert ids == tokenizer.encode(text)
    assert [i for p in document_ids(tokenizer, parts, False) for i in p] == ids[1:]


def test_a_document_larger_than_a_piece_makes_the_same_windows(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200)))
    whole = [e.input_ids.tolist() for e in load(path, max_seq_length=64)]
    monkeypatch.setattr("qlora_wgpu.data.examples.MAX_AT_ONCE", 100)
    assert [e.input_ids.tolist() for e in load(path, max_seq_length=64)] == whole


def test_only_regular_files_are_data(tmp_path, monkeypatch):
    make_pipe(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    for name in ("a.jsonl", "b.jsonl"):
        with pytest.raises(DataError, match=f"{name} is a pipe, a device"):
            select_files(tmp_path / name)
    with pytest.raises(DataError, match="has no data files"):
        select_files(tmp_path)
    monkeypatch.setattr("qlora_wgpu.data.sources.MAX_ENTRIES", 1)
    with pytest.raises(DataError, match="has more than 1 files"):
        select_files(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one long text", "many texts", "columns", "damaged"])
def test_parquet_that_is_more_than_it_seems(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")  # an extra
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = {
        "one long text": lambda: {"text": ["a" * (40 << 20)]},
        "many texts": lambda: {"text": ["a" * 10**6] * 200},
        "columns": lambda: {str(i): [1] for i in range(5000)},
        "damaged": lambda: {"text": [f"{i}" for i in range(1000)]},
    }[kind]()
    parquet.write_table(pyarrow.table(table), path, compression="zstd")
    assert path.stat().st_size < 3 << 20
    if kind == "damaged":
        raw = bytearray(path.read_bytes())
        raw[100:2000] = bytes(1900)
        path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load(path)
    assert "a.parquet" in str(caught.value) and "\n" not in str(caught.value)
