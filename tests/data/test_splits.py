"""Splits by the names of files and folders: what is read, and what is left out."""

from pathlib import PurePosixPath

import pytest

from qlora_wgpu.data.hub_datasets import _default_split, _selection, choose
from qlora_wgpu.data.sources import select_files
from qlora_wgpu.data.splits import by_split
from qlora_wgpu.errors import DataError


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.jsonl", "train"),
        ("data-train.jsonl", "train"),
        ("gsm8k_train1000.jsonl", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("train/0.parquet", "train"),
        ("data/test/part-1.parquet", "test"),
        ("valid.jsonl", "validation"),
        ("dev.json", "validation"),
        ("chats.eval.jsonl", "validation"),
        ("my_val_set.csv", "validation"),
        ("Validation/TRAIN.JSONL", "train"),
        ("chats.jsonl", ""),
        ("trainers.jsonl", ""),
        ("train_test.jsonl", ""),  # which of both?
    ],
)
def test_names(file, split):
    """What a name can mean, for who asks for a split."""
    assert list(by_split([PurePosixPath(file)], loosely=True)) == [split]


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        # A split's own name, with what says nothing of the data.
        (["train-00000-of-00002.parquet", "test.jsonl", "other.jsonl"], ["train", "test", ""]),
        (["data/train/0.parquet", "data/valid_set/1.parquet"], ["train", "validation"]),
        (["data_test.jsonl", "chats.jsonl"], ["test", ""]),
        # A word among others: another name shows what it is.
        (["gsm8k_train1000.jsonl", "gsm8k_test300.jsonl"], ["train", "test"]),
        (["my_val_set.csv", "my_train_set.csv", "more.csv"], ["validation", "train", ""]),
        (["chats.jsonl", "chats_test.jsonl", "dev-team.jsonl"], ["", "test", ""]),
        (["train.jsonl", "of_the_dev_team.jsonl"], ["train", "validation"]),
        (["gsm8k-train.jsonl", "math-test.jsonl"], ["train", "test"]),
        # Nothing shows it: these are names of other things.
        (["dev-team.jsonl", "sales-team.jsonl"], ["", ""]),
        (["driving_test.jsonl", "cooking.jsonl"], ["", ""]),
        (["train-travel/0.jsonl", "bus-travel/0.jsonl"], ["", ""]),
        (["train-travel.jsonl", "driving-test.jsonl"], ["", ""]),
        (["dev-team.jsonl", "sales-team.jsonl", "test.jsonl"], ["", "", "test"]),
        (["train/dev-team.jsonl", "test/sales-team.jsonl"], ["train", "test"]),
    ],
)
def test_what_names_mean_side_by_side(files, splits):
    paths = [PurePosixPath(file) for file in files]
    told = {path: split for split, members in by_split(paths).items() for path in members}
    assert [told[path] for path in paths] == splits


def folder_of(tmp_path, *names):
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n')
    return tmp_path


def read(tmp_path, **options):
    selection = select_files(tmp_path, **options)
    folder = tmp_path if tmp_path.is_dir() else tmp_path.with_name(tmp_path.name.split(":")[0])
    return [p.relative_to(folder).as_posix() for p in selection.files], selection.left_out


MLX = ("test.jsonl", "train.jsonl", "valid.jsonl")


def test_training_data_alone_is_trained_on(tmp_path):
    files, left_out = read(folder_of(tmp_path, *MLX, "dataset_info.json"))
    assert files == ["train.jsonl"]
    assert left_out == {"test": ["test.jsonl"], "validation": ["valid.jsonl"]}


def test_held_out_data_is_validation_then_test(tmp_path):
    assert read(folder_of(tmp_path, *MLX), held_out=True)[0] == ["valid.jsonl"]
    (tmp_path / "valid.jsonl").unlink()
    assert read(tmp_path, held_out=True)[0] == ["test.jsonl"]


@pytest.mark.parametrize("name", ["validation", "dev", "valid"])
def test_a_split_by_name(tmp_path, name):
    chats = folder_of(tmp_path / "chats", *MLX)
    assert read(chats.with_name(f"chats:{name}"))[0] == ["valid.jsonl"]


def test_a_split_that_is_asked_for_may_be_a_word_of_a_name(tmp_path):
    chats = folder_of(tmp_path / "chats", "driving_test.jsonl", "cooking.jsonl")
    assert read(chats) == (["cooking.jsonl", "driving_test.jsonl"], {})
    assert read(chats.with_name("chats:test"))[0] == ["driving_test.jsonl"]


def test_files_without_a_split_are_trained_on(tmp_path):
    assert read(folder_of(tmp_path, "a.jsonl", "b/c.jsonl")) == (["a.jsonl", "b/c.jsonl"], {})
    files, left_out = read(folder_of(tmp_path, "test.jsonl"))
    assert files == ["a.jsonl", "b/c.jsonl"] and left_out == {"test": ["test.jsonl"]}


def test_a_folder_of_one_split_is_read_whole(tmp_path):
    assert read(folder_of(tmp_path, "test-0.jsonl", "test-1.jsonl"))[0][1] == "test-1.jsonl"


def test_text_may_lie_beside_rows_of_another_split(tmp_path):
    assert read(folder_of(tmp_path, "train.txt", "test.jsonl"))[0] == ["train.txt"]


def test_what_is_not_there(tmp_path):
    chats = folder_of(tmp_path / "chats", "test.jsonl", "valid.jsonl")
    with pytest.raises(DataError, match=r"no training split \(its splits: test, valid"):
        read(chats)
    with pytest.raises(DataError, match=r"no split 'train' \(its splits: test, valid"):
        read(chats.with_name("chats:train"))


HUB = ["README.md", "data-train.jsonl", "data-dev.jsonl", "test-00000-of-00001.parquet"]


def test_splits_of_the_hub(tmp_path):
    assert choose("o/n", HUB, "train") == ["data-train.jsonl"]
    assert choose("o/n", HUB, "validation") == ["data-dev.jsonl"]
    assert _default_split(HUB, held_out=False) == "train"
    assert _default_split(HUB, held_out=True) == "validation"
    assert _default_split(["chats.jsonl"], held_out=True) == "train"
    assert _selection("o/n", tmp_path, HUB, ["data-train.jsonl"]).left_out == {
        "validation": ["data-dev.jsonl"],
        "test": ["test-00000-of-00001.parquet"],
    }


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["config.json", "model-00001-of-00002.safetensors"], "a model's"),
        (["config.json", "tokenizer.json", "tokenizer_config.json"], "a model's"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter's"),
        (["config.yaml", "metrics.jsonl", "report.html"], "a run's"),
    ],
)
def test_a_folder_of_something_else(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=f"the folder .* is {kind}, not data: name a"):
        select_files(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "a"}')
    assert len(select_files(tmp_path / "rows").files) == 1


def test_a_file_about_the_data_makes_no_model(tmp_path):
    for name in ("config.json", "train.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')
    assert [path.name for path in select_files(tmp_path).files] == ["train.jsonl"]
