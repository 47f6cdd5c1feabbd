"""Names of data sets on the hub: which files a split has, and a download over HTTP."""

import os
import subprocess
import sys

import pytest
from support.processes import PATIENCE

from qlora_wgpu.data.hub_datasets import choose, is_dataset_name
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
        (["README.md"], "train", "it has no data file"),
    ],
)
def test_splits_that_are_not_there(files, split, message):
    with pytest.raises(DataError, match=message):
        choose("o/n", files, split)


def test_names():
    assert all(map(is_dataset_name, ["openai/gsm8k", "a/b:test", "a/b:main/train"]))
    assert not any(map(is_dataset_name, ["a/b.jsonl", "x", "./a/b", "/a/b", "a/b/c", "a/b.txt:x"]))


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
