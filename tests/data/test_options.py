"""Settings of data: sources, columns, which tokens are trained on, truncation."""

import json

import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.checkpoint import FileLock
from qlora_wgpu.data import PreprocessConfig, load_dataset, prepared
from qlora_wgpu.errors import DataError

CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, tokenizer=None, **how):
    how = PreprocessConfig(**{"max_seq_length": 64, "chat_template": "chatml", **how})
    return load_dataset(path, tokenizer or tiny_tokenizer(), 64, how=how)


def texts(dataset, tokenizer=None):
    return [trained_text(tokenizer or tiny_tokenizer(), e.input_ids, e.labels) for e in dataset]


ANSWERS = "b<|im_end|>\nd<|im_end|>\n"


@pytest.mark.parametrize(
    ("train_on", "chat", "answer"),
    [
        ("auto", ANSWERS, "y</s>"),
        ("assistant", ANSWERS, "y</s>"),
        ("last_turn", "d<|im_end|>\n", "y</s>"),
        ("completion", "d<|im_end|>\n", "y</s>"),
        ("all", None, "<s>xy</s>"),
    ],
)
def test_what_is_trained_on(tmp_path, train_on, chat, answer):
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    [trained] = texts(load(rows, train_on=train_on))
    assert trained == (chat or tiny_tokenizer().decode(load(rows)[0].input_ids, False))
    rows = write(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y"}])
    assert texts(load(rows, train_on=train_on)) == [answer]


def test_a_text_is_trained_on_whole(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"text": "x"}])
    assert texts(load(rows, train_on="all")) == ["<s>x</s>"]
    with pytest.raises(DataError, match=r"a.jsonl line 1: data.train_on: assistant requires turns"):
        load(rows, train_on="assistant")


def test_a_chat_without_a_last_answer(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT[:3]}, {"messages": CHAT}])
    assert texts(load(rows)) == ["b<|im_end|>\n", ANSWERS]
    last = load(rows, train_on="last_turn")
    assert texts(last) == ["d<|im_end|>\n"] and "1 of 2 rows has nothing" in last.warnings[0]


def test_a_chat_without_any_answer_is_left_out(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT[:1]}, {"messages": CHAT}])
    dataset = load(rows)
    assert texts(dataset) == [ANSWERS] and (
        "1 of 2 rows has no assistant turn to train on (roles: 'user')" in dataset.warnings[0]
    )
    assert len(texts(load(rows, train_on="all"))) == 2
    with pytest.raises(DataError, match="its only row has no assistant turn"):
        load(write(tmp_path / "b.jsonl", [{"messages": CHAT[:1]}]))


LONG = [{"prompt": "ab", "completion": "cdef"}, {"prompt": "", "completion": "x"}]


@pytest.mark.parametrize(
    ("truncation", "expected", "dropped"),
    [("keep_start", ["cd", "x</s>"], 0), ("keep_end", ["cdef</s>", "x</s>"], 0),
     ("drop", ["x</s>"], 1)],
)  # fmt: skip
def test_rows_that_are_too_long(tmp_path, truncation, expected, dropped):
    dataset = load(write(tmp_path / "a.jsonl", LONG), max_seq_length=5, truncation=truncation)
    assert texts(dataset) == expected
    assert dataset.counts.dropped == dropped and len(dataset.warnings) == 1


def test_a_row_that_may_not_be_too_long(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl line 1: it has 8 tokens, more than .*=5"):
        load(write(tmp_path / "a.jsonl", LONG), max_seq_length=5, truncation="error")


def test_columns_of_other_names(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"question": "x", "answer": "y", "text": "no"}])
    columns = {"prompt": "question", "completion": "answer"}
    assert texts(load(rows, columns=columns)) == ["y</s>"]
    assert texts(load(rows, columns={"text": "answer"})) == ["<s>y</s>"]
    with pytest.raises(DataError, match=r"data.columns maps 'completion' to the column 'reply'"):
        load(rows, columns={"prompt": "question", "completion": "reply"})


def test_a_format_that_is_named(tmp_path):
    both = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y", "text": "z"}])
    assert texts(load(both)) == ["y</s>"]
    assert texts(load(both, row_format="text")) == ["<s>z</s>"]
    with pytest.raises(DataError, match="line 1: a row must have 'messages'; its keys"):
        load(both, row_format="messages")


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffprompt,completion\n"x, ""1""\nz",y\n\n,w\n'.encode())
    dataset = load(path)
    assert texts(dataset) == ["y</s>", "w</s>"]
    assert tiny_tokenizer().decode(dataset[0].input_ids) == 'x, "1"\nzy'
    path.write_text(",prompt,completion\n0,x,y\n1,z,w\n")  # with an index, as pandas writes it
    assert texts(load(path)) == ["y</s>", "w</s>"]
    path.write_text('messages\n"' + json.dumps(CHAT).replace('"', '""') + '"\n')
    assert texts(load(path)) == [ANSWERS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,prompt\nx,y\n", "name every column exactly once"),
        ("prompt,,completion\nx,y,z\n", "name every column exactly once"),
        (",,completion\nx,y,z\n", "name every column exactly once"),
        (",prompt,completion\nx,y\n", r"a.csv line 2: expected 3 cells .*, got 2$"),
        ("prompt,completion\nx\n", r"a.csv line 2: expected 2 cells .*, got 1$"),
        ('prompt,completion\nx,"y\n', r"a.csv line 2: not valid CSV"),
        ("text\n\xff\n", "is not UTF-8"),
        ("prompt,completion\n", "has no rows"),
    ],
)
def test_csv_that_is_wrong(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.csv")


@pytest.mark.slow
def test_data_sets_that_were_saved_to_disk(tmp_path):
    """Streams of Arrow, as ``datasets`` has them, beside what it kept of earlier computations."""
    pyarrow = pytest.importorskip("pyarrow")  # an extra
    for split, answer in (("train", "y"), ("test", "z")):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
        table = pyarrow.table({"prompt": ["x"] * 2, "completion": [answer, answer]})
        for name, rows in (("data-0.arrow", table), ("cache-1.arrow", table.slice(1))):
            with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
                stream.write_table(rows, 1)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(load(tmp_path / "saved")) == ["y</s>", "y</s>"]
    assert texts(load(f"{tmp_path}/saved:test")) == ["z</s>", "z</s>"]
    assert texts(load(tmp_path / "saved" / "train")) == ["y</s>", "y</s>"]
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table, 1)
    assert texts(load(tmp_path / "a.arrow")) == ["z</s>", "z</s>"]
    state = tmp_path / "saved" / "train" / "state.json"
    state.write_text('{"_indices_files": [{"filename": "indices.arrow"}]}')
    with pytest.raises(
        DataError, match=r"state.json selects rows with an indices file.*save_to_disk$"
    ):
        load(tmp_path / "saved" / "train")
    (tmp_path / "a.arrow").write_bytes(b"not Arrow")
    with pytest.raises(DataError, match=r"cannot read a\.arrow as an Arrow file"):
        load(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("[:2]", "ab"), ("[2:]", "cdefg"), ("[1:3]", "bc"), ("[-2:]", "fg"), ("[:-5]", "ab"),
        ("[:10%]", "a"), ("[:20%]", "a"), ("[:50%]", "abcd"), ("[50%:]", "efg"), ("[-20%:]", "g"),
        ("[5:100]", "fg"), ("[-100:1]", "a"), ("[:]", "abcdefg"), ("[2:50%]", "cd"),
    ],
)  # fmt: skip
def test_slices_of_rows_are_those_of_datasets(tmp_path, rows, expected):
    folder = tmp_path / "chats"
    folder.mkdir()
    write(folder / "train-0.jsonl", [{"text": letter} for letter in "abc"])
    write(folder / "train-1.jsonl", [{"text": letter} for letter in "defg"])
    for place in (folder, f"{folder}:train"):
        assert texts(load(f"{place}{rows}")) == [f"<s>{letter}</s>" for letter in expected]
    write(tmp_path / "a.jsonl", [{"text": letter} for letter in "abcdefg"])
    assert len(load(f"{tmp_path}/a.jsonl{rows}")) == len(expected)


def test_slices_that_hold_nothing(tmp_path):
    write(tmp_path / "a.jsonl", [{"text": "x"}] * 3)
    (tmp_path / "a.txt").write_text("some text")
    for rows in ("[3:]", "[2:1]", "[:0]", "[:10%]", "[-1%:]"):
        with pytest.raises(DataError, match=r"^a.jsonl has no rows in the slice \["):
            load(f"{tmp_path}/a.jsonl{rows}")
    with pytest.raises(DataError, match=r"slice \[:101%\] exceeds 100%"):
        load(f"{tmp_path}/a.jsonl[:101%]")
    for rows in ("[10%:150%]", "[-101%:50%]", "[101%:]"):
        with pytest.raises(DataError, match=r"exceeds 100%"):
            load(f"{tmp_path}/a.jsonl{rows}")
    assert len(load(f"{tmp_path}/a.jsonl[-100%:100%]")) == 3
    with pytest.raises(DataError, match=r"is text, which has no rows to slice: remove"):
        load(f"{tmp_path}/a.txt[:2]")
    with pytest.raises(DataError, match=r"a.jsonl has no splits: remove :test"):
        load(f"{tmp_path}/a.jsonl:test")
    with pytest.raises(DataError, match=r"a.jsonl\[x:\] must end in|does not exist"):
        load(f"{tmp_path}/a.jsonl[x:]")


@pytest.mark.slow
def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")  # an extra
    from pyarrow import parquet

    calls = [{**CHAT[0]}, {**CHAT[1], "tool_calls": None}]
    table = pyarrow.Table.from_pylist([{"messages": CHAT}, {"messages": calls}] * 200)
    parquet.write_table(table, tmp_path / "a.parquet")
    answers = texts(load(tmp_path / "a.parquet"))
    assert answers == [ANSWERS, "b<|im_end|>\n"] * 200
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="as a Parquet file"):
        load(tmp_path / "a.parquet")


def test_parquet_without_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match='pip install "pyarrow>=15"'):
        load(tmp_path / "a.parquet")


def test_a_folder_of_files(tmp_path):
    for number in (2, 1):
        write(tmp_path / f"part-{number}.jsonl", [{"text": f"{number}"}])
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden" / "x.jsonl", [{"text": "no"}])
    assert texts(load(tmp_path)) == ["<s>1</s>", "<s>2</s>"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="both text files and files of rows"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data files"):
        load(tmp_path / "empty")


def cached(path, tokenizer=None, **how):
    how = PreprocessConfig(**{"max_seq_length": 64, "chat_template": "chatml", **how})
    return load_dataset(path, tokenizer or tiny_tokenizer(), 64, how=how, cache=True)


def test_prepared_data_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    first = cached(rows, max_seq_length=30)
    folders = list(prepared.cache_folder().iterdir())
    assert len(folders) == 1 and first.warnings
    monkeypatch.setattr("qlora_wgpu.data.row_source.read_rows", None)  # not read again
    again = cached(rows, max_seq_length=30)
    assert texts(again) == texts(first) and again.warnings == first.warnings
    assert again.counts == first.counts and again.fingerprint == first.fingerprint
    assert not again._ids.flags.owndata and not again._ids.flags.writeable  # the file, mapped
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Whatever decides how rows become tokens makes another one.
    cached(rows)
    cached(rows, train_on="all")
    cached(rows, tokenizer=tiny_tokenizer(merges=(("a", "b"),)))
    cached(rows, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    write(rows, [{"messages": CHAT}])
    assert len(cached(rows)) == 1
    assert len(list(prepared.cache_folder().iterdir())) == 6


def test_only_the_newest_prepared_data_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "_KEPT", 3)
    for number in range(6):
        rows = write(tmp_path / f"{number}.jsonl", [{"text": str(number)}])
        cached(rows)
        for age, folder in enumerate(prepared.cache_folder().iterdir()):
            assert age < 3 and (folder / "about.json").exists()
    assert texts(cached(rows)) == ["<s>5</s>"]


def test_prepared_data_that_is_damaged_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    before = texts(cached(rows))
    [folder] = prepared.cache_folder().iterdir()
    (folder / "ids.bin").write_bytes(b"")
    assert texts(cached(rows)) == before
    with pytest.raises(DataError):
        cached(write(tmp_path / "b.jsonl", [{"messages": CHAT}, {"text": "x"}]))
    assert [p.name for p in prepared.cache_folder().iterdir()] == [folder.name]  # nothing half done


def test_prepared_data_under_another_name_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [write(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in ("train", "eval")]
    before = [texts(cached(file)) for file in files]
    first, second = prepared.cache_folder().iterdir()
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert [texts(cached(file)) for file in files] == before


def test_an_end_that_is_never_trained_on_is_told(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    dataset = load(rows, chat_template=template)
    assert "no end-of-turn token is trained on" in dataset.warnings[0]


def test_what_killed_runs_left_half_prepared_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = prepared.cache_folder()
    for name in ("killed", "live", "without-lock"):
        (cache / f".unfinished-{name}").mkdir(parents=True)
        (cache / f".unfinished-{name}" / "ids.bin").write_bytes(b"x")
    for name in ("killed", "gone"):  # the folder of the second was finished
        (cache / f".unfinished-{name}.lock").touch()
    live = FileLock(cache / ".unfinished-live.lock")
    assert live.acquire()
    rows = write(tmp_path / "a.jsonl", [{"text": "abc"}])
    expected = [".unfinished-live", ".unfinished-live.lock"]
    for _ in range(2):  # prepared anew, and from the cache
        cached(rows)
        assert sorted(p.name for p in cache.glob(".unfinished-*")) == expected
        (cache / ".unfinished-late.lock").touch()
        (cache / ".unfinished-late").mkdir()
    cached(rows)
    assert sorted(p.name for p in cache.glob(".unfinished-*")) == expected
    live.release()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    rows = write(tmp_path / "a.jsonl", [{"text": "abc"}])
    assert texts(cached(rows)) == texts(load(rows))


def test_a_cache_that_is_full_half_way_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    add, calls = prepared.DatasetWriter.add, []

    def full(self, *example, **more):
        calls.append(self._folder)
        if self._folder is not None and len(calls) == 3:
            with prepared._writing(self._folder):
                raise OSError(28, "No space left on device")
        add(self, *example, **more)

    monkeypatch.setattr(prepared.DatasetWriter, "add", full)
    dataset = cached(write(tmp_path / "a.jsonl", [{"text": letter * 3} for letter in "abcd"]))
    assert len(dataset) == 4 and "No space left on device" in dataset.warnings[-1]
    assert "tokenized data is not cached" in dataset.warnings[-1]
    assert list(prepared.cache_folder().iterdir()) == []


def test_prepared_data_that_was_changed_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    before = cached(rows).fingerprint
    [folder] = prepared.cache_folder().iterdir()
    for name in ("ids.bin", "labels.bin", "ends.bin"):
        raw = bytearray((folder / name).read_bytes())
        raw[0] ^= 1  # as long as it was
        (folder / name).write_bytes(raw)
        assert cached(rows).fingerprint == before, name
    about = json.loads((folder / "about.json").read_text())
    for wrong in ([], {**about, "warnings": 3}, {**about, "counts": {"rows": "x"}}, {"a": 1}):
        (folder / "about.json").write_text(json.dumps(wrong))
        assert cached(rows).fingerprint == before
        assert json.loads((folder / "about.json").read_text()) == about
    (folder / "about.json").write_text("[" * 100_000)
    assert cached(rows).fingerprint == before


def test_long_texts_are_trained_on_whole_in_windows(tmp_path):
    rows = [{"text": "abcdefghij"}, {"text": "xy"}, {"text": "abcdefgh"}]  # <s> and </s> beside
    dataset = load(write(tmp_path / "a.jsonl", rows), max_seq_length=5, truncation="windows")
    assert [len(e) for e in dataset] == [5, 5, 2, 4, 5, 5]
    assert texts(dataset) == ["<s>abcd", "efghi", "j</s>", "<s>xy</s>", "<s>abcd", "efgh</s>"]
    assert dataset.counts.rows == 3 and dataset.counts.truncated == 0
    assert dataset.warnings == (
        "a.jsonl: 2 of 3 rows are longer than max_seq_length=5 and were split into 5 windows",
    )
    lone = [{"text": "abcdefghi"}]  # its </s> would stand alone, where nothing comes before it
    one = load(write(tmp_path / "b.jsonl", lone), max_seq_length=5, truncation="windows")
    assert texts(one) == ["<s>abcd", "efghi"]


def test_a_window_weighs_what_its_row_does(tmp_path):
    rows = [{"text": "abcdefghij", "w": 3}, {"text": "abcdefghij", "w": 0}, {"text": "xy", "w": 1}]
    dataset = load(
        write(tmp_path / "a.jsonl", rows), max_seq_length=5, truncation="windows",
        columns={"weight": "w"},
    )  # fmt: skip
    assert [e.weight for e in dataset] == [3, 3, 3, 1]


def test_rows_with_an_answer_are_no_windows(tmp_path):
    dataset = load(write(tmp_path / "a.jsonl", LONG), max_seq_length=5, truncation="windows")
    assert texts(dataset) == ["cd", "x</s>"]
    assert "a.jsonl: 1 of 2 rows is longer than max_seq_length=5 and was truncated at the end" in (
        dataset.warnings
    )
