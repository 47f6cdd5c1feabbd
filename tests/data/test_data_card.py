"""Splits that a folder's README.md lists, as data sets of the hub have it, instead of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_wgpu.data.sources import select_files
from qlora_wgpu.errors import DataError

LISTED = """configs:
- config_name: default
  data_files:
  - split: train
    path: data/a-*.jsonl
  - split: test
    path: [data/b-0.jsonl, "data/c-?.jsonl"]
"""
FILES = ("data/a-0.jsonl", "data/a-1.jsonl", "data/b-0.jsonl", "data/c-0.jsonl")


def folder_of(folder: Path, card: str, *names: str) -> Path:
    for name in names or FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n')
    (folder / "README.md").write_text(f"---\nlicense: mit\n{card}size: 1\n---\n# Chats\n")
    return folder


def chosen(place: Path | str, *, held_out: bool = False) -> list[str]:
    selection = select_files(Path(place), held_out=held_out)
    assert selection.root is not None
    return [file.relative_to(selection.root).as_posix() for file in selection.files]


def test_files_are_of_the_split_that_the_card_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LISTED)
    assert chosen(folder) == ["data/a-0.jsonl", "data/a-1.jsonl"]
    assert chosen(folder, held_out=True) == ["data/b-0.jsonl", "data/c-0.jsonl"]
    assert chosen(f"{folder}:test") == chosen(f"{folder}:default/test") == chosen(
        folder, held_out=True
    )  # fmt: skip
    with pytest.raises(DataError, match=r"no split 'valid' \(its splits: test, train"):
        chosen(f"{folder}:valid")


def test_the_card_goes_before_names(tmp_path: Path) -> None:
    card = "configs:\n- config_name: default\n  data_files: test.jsonl\n"
    assert chosen(folder_of(tmp_path, card, "test.jsonl", "train.jsonl")) == ["test.jsonl"]


CONFIGURATIONS = """configs:
- config_name: main
  data_dir: one
- config_name: socratic{}
  data_files: {{train: "two/**", dev: three/x.jsonl}}
"""
MANY = ("one/train.jsonl", "one/valid.jsonl", "two/a.jsonl", "two/b/c.jsonl", "three/x.jsonl")


def test_configurations_are_named_like_splits(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "chats", CONFIGURATIONS.format(""), *MANY)
    with pytest.raises(DataError, match=r"configurations main, socratic: .* FOLDER:main/train$"):
        chosen(folder)
    assert chosen(f"{folder}:main") == ["one/train.jsonl"]
    assert chosen(f"{folder}:socratic/train") == ["two/a.jsonl", "two/b/c.jsonl"]
    assert chosen(f"{folder}:socratic/validation") == ["three/x.jsonl"]
    assert chosen(f"{folder}:socratic/dev") == ["three/x.jsonl"]
    folder_of(folder, CONFIGURATIONS.format("\n  default: true"), *MANY)
    assert chosen(folder) == ["two/a.jsonl", "two/b/c.jsonl"]


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("configs:\n- {config_name: a, data_files: ../x.jsonl}\n", "lists ../x.jsonl for the spl"),
        ("configs:\n- {config_name: a, data_files: gone-*.jsonl}\n", "but no data file matches"),
        ("configs:\n- {config_name: a, data_files: [\n", "cannot read the data set's conf"),
        ("configs:\n- {config_name: a, data_files: *.jsonl}\n", "begins with * or & needs quotes"),
    ],
)
def test_lists_that_lead_nowhere(tmp_path: Path, card: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        chosen(folder_of(tmp_path, card))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("card", ["", "configs: none\n", "configs:\n- {config_name: a}\n"])
def test_a_card_without_a_list_leaves_it_to_names(tmp_path: Path, card: str) -> None:
    assert chosen(folder_of(tmp_path, card, "test.jsonl", "train.jsonl")) == ["train.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("**", [0, 1, 2]),
        ("**/*.jsonl", [0, 1, 2]),
        ("*.jsonl", [0]),
        ("*/*.jsonl", [1]),
        ("a/**/c?.jsonl", [2]),
        ("a/**/*.jsonl", [1, 2]),
        ("a/[bx]*", [1]),
        ("./a/b.jsonl", [1]),
        ("a", []),
    ],
)
def test_patterns_are_those_of_folders(tmp_path: Path, pattern: str, fits: list[int]) -> None:
    names = ["a.jsonl", "a/b.jsonl", "a/b/cd.jsonl"]
    folder = folder_of(tmp_path, f"configs:\n- data_files: '{pattern}'\n", *names)
    if fits:
        assert sorted(chosen(folder)) == sorted(names[number] for number in fits)
    else:
        with pytest.raises(DataError, match="but no data file matches"):
            chosen(folder)


def test_a_pattern_of_many_stars_takes_no_time(tmp_path: Path) -> None:
    pattern = "*a" * 40 + "*b"
    folder = folder_of(tmp_path, f"configs:\n- {{data_files: '{pattern}'}}\n", "a" * 100 + ".jsonl")
    with pytest.raises(DataError, match="but no data file matches"):
        chosen(folder)
