"""Data files of a path: which files a file or folder stands for, and strict checks of them."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from qlora_wgpu.config.paths import DATA_SUFFIXES, DataPlace, path_hint
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data.json_rows import json_lines, json_list
from qlora_wgpu.data.splits import (
    TRAIN,
    VALIDATION,
    Configurations,
    RowSlice,
    SplitFiles,
    by_split,
    canonical,
    chosen_files,
)
from qlora_wgpu.data.tables import csv_rows, table_rows
from qlora_wgpu.errors import DataError, reason
from qlora_wgpu.files import LFS_PREFIX, UTF_16, exists, is_dir, is_file, open_file
from qlora_wgpu.limits import MAX_ENTRIES, OWN_JSON_BYTES

_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_CONTENTS = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"PAR1": "Parquet",
}
_SIGNATURE = max(map(len, (*_CONTENTS, LFS_PREFIX)))  # bytes
_SAVED = "state.json"  # of a data set that ``datasets`` has saved
# Metadata of data sets and models, which are no rows.
ABOUT = (
    *("dataset_infos.json", "dataset_info.json", "dataset_dict.json", _SAVED),
    *("config.json", "generation_config.json"),
)
# Files that together identify other kinds of folders.
_OTHER_FOLDERS = (
    ("an adapter's", ("adapter_config.json",)),
    ("a run's", ("config.yaml", "metrics.jsonl")),
    ("a model's", ("config.json", "*.safetensors")),
    ("a model's", ("config.json", "tokenizer_config.json")),
)
KINDS = "a .jsonl, .json, .csv, .parquet, .arrow or .txt file"


def check_file(path: Path) -> str:
    """The lower-case suffix of a data file, which must exist and be readable."""
    try:
        if is_dir(path):
            raise DataError(f"{path} is a folder, not a data file")
        if not exists(path):
            raise DataError(f"the data file {path} does not exist{_near_name(path)}")
        status = path.stat()
    except (OSError, ValueError) as err:
        raise DataError(f"cannot read the data file {str(path)[:200]!r}: {reason(err)}") from err
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        raise DataError(f"the data file {path} is compressed: unpack it first")
    if suffix not in DATA_SUFFIXES:
        raise DataError(f"the data file {path} must end in {', '.join(DATA_SUFFIXES[:-1])} or .txt")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is a pipe, a device or the like: copy it to a regular file")
    if status.st_size == 0:
        raise DataError(f"the data file {path} is empty")
    _refuse_other_contents(path, suffix)
    return suffix


def _refuse_other_contents(path: Path, suffix: str) -> None:
    """Refuses compressed files and other formats that the file's name does not tell."""
    try:
        with open_file(path) as file:
            begin = file.read(_SIGNATURE)
    except OSError as err:
        raise DataError(f"cannot read the data file {path}: {err.strerror or err}") from err
    if begin.startswith(UTF_16):
        raise DataError(f"the data file {path} is UTF-16 text: save it as UTF-8")
    if begin.startswith(LFS_PREFIX):
        raise DataError(
            f"the data file {path} is a Git LFS pointer, not the data: run git lfs pull"
        )
    kind = next((kind for sign, kind in _CONTENTS.items() if begin.startswith(sign)), "")
    if kind == "Parquet" and suffix != ".parquet":
        raise DataError(f"the data file {path} is a Parquet file: rename it to end in .parquet")
    if kind not in ("", "Parquet"):
        raise DataError(f"the data file {path} is compressed ({kind}): unpack it first")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row of a data file after its location, such as ``"train.jsonl line 17"``."""
    readers = {
        ".jsonl": json_lines, ".csv": csv_rows, ".parquet": table_rows, ".arrow": table_rows
    }  # fmt: skip
    return readers.get(path.suffix.lower(), json_list)(path)


def select_files(path: Path, *, held_out: bool = False) -> SplitFiles:
    """The data files of a path: itself, or those of a folder.

    A folder stands for its training split, or for its held-out split; ``FOLDER:SPLIT`` names
    another one. Splits are those that the folder's README.md lists, as on the Hugging Face Hub, or
    else those in the files' names. A trailing ``[FROM:TO]`` takes a slice of the rows.
    """
    place = place_of(str(path))
    folder, rows = Path(place.path), RowSlice.parse(place.rows)
    if not is_dir(folder):
        check_file(folder)
        if place.split is not None and canonical(place.split) != TRAIN:
            raise DataError(f"the data file {folder} has no splits: remove :{place.split}")
        return SplitFiles(folder.name, [folder], "", {}, rows=rows)
    _refuse_other_folder(folder)
    files = [p for p in _entries(folder) if _is_data(p)]
    if not files:
        raise DataError(f"the folder {folder} has no data files: put {KINDS} there")
    names = sorted(PurePosixPath(p.relative_to(folder).as_posix()) for p in files)
    splits, split = _splits_of(folder, names, place.split)
    split, own, left_out = chosen_files(splits, split, f"the folder {folder}", held_out=held_out)
    selected = [folder / file for file in own]
    _refuse_mixture(folder, selected)
    for file in selected:
        check_file(file)
    return SplitFiles(folder.resolve().name, selected, split, left_out, folder, rows)


def _splits_of(
    folder: Path, names: list[PurePosixPath], requested: str | None
) -> tuple[dict[str, list[PurePosixPath]], str | None]:
    """The files of a folder by split, and the requested split."""
    card = Configurations.read(folder)
    if card is not None and (listed := card.splits_of(names, requested)) is not None:
        return listed
    names = _without_caches(folder, names)
    splits = by_split(names)
    if requested is not None and canonical(requested) not in splits:
        splits = by_split(names, loosely=True)
    return splits, requested


def _without_caches(folder: Path, names: list[PurePosixPath]) -> list[PurePosixPath]:
    """Drops the cache files that ``datasets`` stores next to a saved data set."""
    kept = []
    for name in names:
        state = folder / name.parent / _SAVED
        if name.suffix.lower() == ".arrow" and is_file(state):
            try:
                values = read_json_object(state, OWN_JSON_BYTES, DataError)
            except DataError as err:
                raise DataError(f"cannot read {state}: {err}") from err
            if values.get("_indices_files"):
                raise DataError(
                    f"{state} selects rows with an indices file (datasets before 2.0): save the "
                    "data set again with save_to_disk"
                )
            files = values.get("_data_files")
            listed = [f.get("filename") for f in files or [] if isinstance(f, dict)]
            if listed and name.name not in listed:
                continue
        kept.append(name)
    return kept


def has_validation(path: Path) -> bool:
    """Whether a folder of training data also has a validation split."""
    try:
        return is_dir(path) and VALIDATION in select_files(path).left_out
    except DataError:  # reported when it is read
        return False


def place_of(text: str) -> DataPlace:
    """Parses ``chats:validation`` or ``chats.jsonl[:100]``; a missing file's path is unchanged."""
    if exists(Path(text)):
        return DataPlace(text)
    place = DataPlace.parse(text)
    return place if place.path and exists(Path(place.path)) else DataPlace(text)


def _is_data(path: Path) -> bool:
    return path.suffix.lower() in DATA_SUFFIXES and path.name not in ABOUT and is_file(path)


def _refuse_other_folder(folder: Path) -> None:
    for kind, patterns in _OTHER_FOLDERS:
        if all(any(folder.glob(pattern)) for pattern in patterns):
            raise DataError(
                f"the folder {folder} is {kind}, not data: name a data file, or a folder that "
                "has only data files"
            )


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    texts = [p for p in files if p.suffix.lower() == ".txt"]
    if texts and len(texts) < len(files):
        raise DataError(
            f"the folder {folder} has both text files and files of rows ({texts[0].name}, "
            f"{next(p for p in files if p not in texts).name}): put them into separate folders"
        )


def holds_documents(files: Sequence[Path]) -> bool:
    """Whether data files are text documents instead of rows."""
    return files[0].suffix.lower() == ".txt"


def _entries(folder: Path) -> Iterator[Path]:
    """The files of a folder and its subfolders, without hidden ones."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += len(folders) + len(names)
        if count > MAX_ENTRIES:
            raise DataError(
                f"the folder {folder} has more than {MAX_ENTRIES:,} files: name the folder or "
                "the file with the data"
            )
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _near_name(path: Path) -> str:
    if (hint := path_hint(path)) is not None:
        return f": {hint}"
    try:
        names = [entry.name for entry in path.parent.iterdir() if is_file(entry)]
    except OSError:
        return f": the folder {path.parent} does not exist"
    near = difflib.get_close_matches(path.name, names, n=1) or [
        name
        for name in names
        if Path(name).stem == path.stem and Path(name).suffix in DATA_SUFFIXES
    ]
    return f": did you mean {near[0]}?" if near else ""
