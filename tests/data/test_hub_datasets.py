"""Names of data sets on the hub: which files a split has, and a download over HTTP."""

import os
import subprocess
import sys

import pytest
from support.processes import PATIENCE

from qlora_wgpu.data import hub_datasets
from qlora_wgpu.data.hub_datasets import choose, choose_converted, is_dataset_name
from qlora_wgpu.errors import DataError

PARQUET = ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
           "data/test-00000-of-00001.parquet", "data/training_notes.json"]  # fmt: skip
FOLDERS = ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet",
           "socratic/train-00000-of-00001.parquet"]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (PARQUET, "train", PARQUET[1:3]),
        (PARQUET, "test", PARQUET[3:4]),
        (FOLDERS, "main/train", FOLDERS[:1]),
        (FOLDERS, "test", FOLDERS[1:2]),
        (["train.jsonl", "train.csv", "valid.jsonl"], "train", ["train.jsonl"]),
        (["alpaca_data.json", "README.md", ".gitattributes"], "train", ["alpaca_data.json"]),
        (["train/0.parquet", "train/1.parquet"], "train", ["train/0.parquet", "train/1.parquet"]),
    ],
)
def test_the_files_of_a_split(files, split, expected):
    assert choose("o/n", files, split) == expected


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (FOLDERS, "train", r"several folders \(main, socratic\).*o/n:main/train"),
        (PARQUET, "validation", "no split 'validation': its files begin with test, train"),
        (["README.md"], "train", "it has no data files"),
    ],
)
def test_splits_that_are_not_there(files, split, message):
    with pytest.raises(DataError, match=message):
        choose("o/n", files, split)


def test_names():
    assert all(map(is_dataset_name, ["openai/gsm8k", "a/b:test", "a/b:main/train"]))
    assert not any(map(is_dataset_name, ["a/b.jsonl", "x", "./a/b", "/a/b", "a/b/c", "a/b.txt:x"]))


CARD = """\
---
configs:
- config_name: main
  DEFAULT
  data_files: [{split: train, path: rows/first-*.jsonl}, {split: dev, path: rows/rest.jsonl}]
- config_name: other
  data_files: {train: [rows/more.jsonl], packed: rows/more.json.gz}
---
"""


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """A data set whose README.md says otherwise than its files' names."""
    names = ["README.md", "train.jsonl", "rows/first-0.jsonl", "rows/first-1.jsonl",
             "rows/rest.jsonl", "rows/more.jsonl", "rows/more.json.gz"]  # fmt: skip
    (tmp_path / "README.md").write_text(CARD.replace("DEFAULT", "default: true"))

    def of_branch(name, branch):
        if branch != "main":
            raise DataError("there is no conversion")
        return names

    monkeypatch.setattr(hub_datasets, "_names", of_branch)
    monkeypatch.setattr(hub_datasets, "_folder_with", lambda *given: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "held_out", "files"),
    [
        ("o/n", False, ["rows/first-0.jsonl", "rows/first-1.jsonl"]),
        ("o/n", True, ["rows/rest.jsonl"]),
        ("o/n:dev", True, ["rows/rest.jsonl"]),
        ("o/n:main/train", False, ["rows/first-0.jsonl", "rows/first-1.jsonl"]),
    ],
)
def test_a_card_says_which_files_a_split_has(listed, text, held_out, files):
    chosen = hub_datasets.download(text, held_out=held_out)
    assert [file.relative_to(listed).as_posix() for file in chosen.files] == files
    (left_out,) = chosen.left_out.values()
    assert left_out != files and all(file.startswith("rows/") for file in left_out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("o/n:test", "the data set o/n has no split 'test'"),
        ("o/n:other", "the data set o/n: README.md lists rows/more.json.gz for the split 'packed'"),
    ],
)
def test_what_a_card_does_not_list_is_a_sentence(listed, text, message):
    with pytest.raises(DataError, match=message):
        hub_datasets.download(text)


def test_one_of_several_configurations_is_named(listed):
    (listed / "README.md").write_text(CARD.replace("  DEFAULT\n", ""))
    with pytest.raises(
        DataError, match=r"configurations main, other: name one, .* o/n:main/train$"
    ):
        hub_datasets.download("o/n")


@pytest.mark.slow
def test_a_data_set_alone_in_a_process_of_its_own(tmp_path):
    """A model of the hub would have loaded parts of the library that the data set needs."""
    place = tmp_path / "hub" / "datasets--owner--chats"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    (place / "snapshots" / "abc" / "train.jsonl").touch()
    code = "from qlora_wgpu.data.hub_datasets import download as d; print(*d('owner/chats').files)"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE
    )
    assert done.stdout.strip().endswith("train.jsonl"), done.stderr


CONVERTED = [
    "default/train/0001.parquet",
    "default/train/0000.parquet",
    "README.md",
    "default/validation/0000.parquet",
    "train/0000.parquet",
    "default/train/notes.txt",
]
SEVERAL = ["a/b/train/0.parquet", "c/test/0.parquet"]


@pytest.mark.parametrize(("files", "requested", "held_out", "split", "expected"), [
    (CONVERTED, None, False, "train", ["default/train/0000.parquet", "default/train/0001.parquet"]),
    (CONVERTED, None, True, "validation", ["default/validation/0000.parquet"]),
    (CONVERTED, "validation", False, "validation", ["default/validation/0000.parquet"]),
    (CONVERTED, "val", False, "validation", ["default/validation/0000.parquet"]),
    (CONVERTED, "default/", False, "train",
     ["default/train/0000.parquet", "default/train/0001.parquet"]),
    ([*CONVERTED, *SEVERAL], "train", False, "train",
     ["default/train/0000.parquet", "default/train/0001.parquet"]),
    (SEVERAL, "a/b/train", False, "train", ["a/b/train/0.parquet"]),
    (SEVERAL[1:], "test", False, "test", ["c/test/0.parquet"]),
])  # fmt: skip
def test_splits_of_the_hub_s_conversion(files, requested, held_out, split, expected):
    chosen, splits = choose_converted("n", files, requested, held_out=held_out)
    assert chosen == split and splits[chosen] == expected


@pytest.mark.parametrize(("files", "requested", "message"), [
    (SEVERAL, None, "has the configurations a/b, c: name one"),
    (SEVERAL, "d/train", "no configuration 'd': it has a/b, c; name one as in n:a/b/train"),
    (SEVERAL, "c/dev", "the configuration c of the data set n has no split 'dev': it has test"),
    (["README.md", "0.parquet"], None, "has no supported data files"),
])  # fmt: skip
def test_what_the_hub_s_conversion_does_not_have(files, requested, message):
    with pytest.raises(DataError, match=message):
        choose_converted("n", files, requested, held_out=False)


def test_what_was_downloaded_is_found_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="o/n is not in the local cache"):
        hub_datasets._names("o/n", "main")
    place = tmp_path / "datasets--o--n"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("abc\n")
    (place / "snapshots/abc/data").mkdir(parents=True)
    (place / "snapshots/abc/data/rows.jsonl").write_text("")
    assert hub_datasets._names("o/n", "main") == ["data/rows.jsonl"]
    assert hub_datasets._folder_with("o/n", [], "main") == place / "snapshots/abc"


def test_hidden_files_are_no_data():
    files = [".cache/train.jsonl", "a/.b/train.jsonl", "a/train.jsonl", ".train.jsonl", "README.md"]
    assert choose("n", files, "train") == ["a/train.jsonl"]
