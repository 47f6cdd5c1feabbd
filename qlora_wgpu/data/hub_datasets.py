"""Data sets by their name on the Hugging Face hub: ``owner/name`` or ``owner/name:split``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from qlora_wgpu.checkpoint.hub import download_bars
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data.sources import ABOUT
from qlora_wgpu.data.splits import (
    CARD,
    TRAIN,
    Configurations,
    SplitFiles,
    by_split,
    canonical,
    chosen_files,
    chosen_split,
)
from qlora_wgpu.errors import DataError
from qlora_wgpu.files import file_text, is_file
from qlora_wgpu.limits import KIB

# ---- the hub's conversion to Parquet -------------------------------------------------------------

CONVERTED = "refs/convert/parquet"
_DEFAULT = "default"  # of a data set that names no configuration
_SHOWN = 8

Splits = Mapping[str, Sequence[str]]


def choose_converted(
    name: str, files: Sequence[str], asked: str | None, *, held_out: bool
) -> tuple[str, dict[str, list[str]]]:
    """A split of a configuration, of files named as ``CONFIGURATION/SPLIT/0000.parquet``.

    Asked for is ``CONFIGURATION/SPLIT`` or ``SPLIT``, or what is usual.
    """
    *folders, split = (asked or "").split("/")
    configurations = _configurations(files)
    wanted = "/".join(folders) or _usual(name, configurations, split or TRAIN)
    if wanted not in configurations:
        raise DataError(
            f"the data set {name} has no configuration {wanted!r}: it has "
            f"{_configurations_in_words(configurations)}, named as in "
            f"{name}:{next(iter(configurations))}/{TRAIN}"
        )
    splits = configurations[wanted]
    if not split:
        where = f"the data set {name}"
        split = chosen_split(splits, None, where, held_out=held_out) if held_out else TRAIN
    chosen = [each for each in splits if each == split] or [
        each for each in splits if canonical(each) == canonical(split)
    ]
    if not chosen:
        raise DataError(
            f"the configuration {wanted} of the data set {name} has no split {split!r}: it has "
            f"{_configurations_in_words(splits)}"
        )
    return chosen[0], splits


def _configurations(files: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix == ".parquet" and len(path.parts) > 2:
            splits = found.setdefault(path.parent.parent.as_posix(), {})
            splits.setdefault(path.parent.name, []).append(file)
    return found


def _usual(name: str, configurations: Mapping[str, Splits], split: str) -> str:
    """The configuration that is meant where none is named."""
    if len(configurations) == 1:
        return next(iter(configurations))
    if _DEFAULT in configurations:
        return _DEFAULT
    if not configurations:
        raise DataError(f"the data set {name} has no data file that can be read")
    raise DataError(
        f"the data set {name} has the configurations "
        f"{_configurations_in_words(configurations)}: name one, such as "
        f"{name}:{next(iter(configurations))}/{split}"
    )


def _configurations_in_words(names: Mapping[str, object]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(list(names)[:_SHOWN]) + more


# ---- a data set and its splits -------------------------------------------------------------------

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<split>[\w./-]+))?", re.ASCII
)
_MAIN = "main"
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def is_dataset_name(text: str) -> bool:
    """Whether a text has the form owner/name or owner/name:split, and is not plainly a file.

    A slice of the rows may stand behind it.
    """
    match = _NAME.fullmatch(text.removesuffix(DataPlace.parse(text).rows))
    return match is not None and not match["name"].lower().endswith((*_SUFFIXES, ".txt"))


def download(text: str, *, held_out: bool = False) -> SplitFiles:
    """The files of a split in the local cache, downloaded if they are not there yet.

    The text is ``owner/name``, whose split is ``train`` (or that to be measured on);
    ``owner/name:validation``; or with a folder or a configuration ``owner/name:main/test``. Files
    are those that the README.md lists, else their names tell them. Where neither does, or no such
    file can be read, they are those of the branch on which the hub keeps its configurations as
    Parquet.
    """
    # By name: what the package offers lazily is there only where somebody else has asked for it.
    from huggingface_hub import errors

    match = _NAME.fullmatch(text)
    assert match is not None
    name = match["name"]
    try:
        return _of_branch(text, name, match["split"], held_out=held_out)
    except DataError:
        raise
    except errors.GatedRepoError as err:
        raise DataError(
            f"the data set {name} is gated: accept its terms on its page and log in with "
            "`hf auth login`"
        ) from err
    except errors.RepositoryNotFoundError as err:
        raise DataError(
            f"{text} is neither a file or folder nor a data set on the Hugging Face hub "
            "(a private one needs `hf auth login`)"
        ) from err
    except Exception as err:  # every other failure of the client or of the network
        reason = next(iter(str(err).splitlines()), "") or type(err).__name__
        raise DataError(
            f"{text} is not a file or folder, and as a data set of the Hugging Face hub it cannot "
            f"be had: {reason}"
        ) from err


def _of_branch(text: str, name: str, asked: str | None, *, held_out: bool) -> SplitFiles:
    """A split by the names of the data set's own files, else of its conversion."""
    names: list[str] = []
    try:
        names = _names(name, _MAIN)
        if (listed := _listed(text, name, names, asked, held_out=held_out)) is not None:
            return listed
        chosen = choose(name, names, asked or _usual_split(names, held_out=held_out))
        return _selection(text, _folder_with(name, chosen, _MAIN), names, chosen)
    except DataError as err:
        converted = _converted_names(name)
        if not converted:
            raise
        try:
            split, splits = choose_converted(name, converted, asked, held_out=held_out)
        except DataError:
            if _rows(names):  # whose names say more
                raise err from None
            raise
    folder = _folder_with(name, splits[split], CONVERTED)
    left_out = {canonical(other): files for other, files in splits.items() if other != split}
    return SplitFiles(text, [folder / file for file in splits[split]], canonical(split), left_out)


def _listed(
    text: str, name: str, names: list[str], asked: str | None, *, held_out: bool
) -> SplitFiles | None:
    """A split that the data set's README.md lists; None where it lists no readable files."""
    files = [PurePosixPath(file) for file in sorted(_rows(names))]
    if CARD not in names or not files:
        return None
    card = Configurations.read(_folder_with(name, [CARD], _MAIN), name)
    found = None if card is None else card.splits_of(files, asked)
    if found is None:
        return None
    split, own, left_out = chosen_files(*found, f"the data set {name}", held_out=held_out)
    folder = _folder_with(name, list(map(str, own)), _MAIN)
    return SplitFiles(text, [folder / file for file in own], split, left_out)


def _converted_names(name: str) -> list[str]:
    """The files of the data set's conversion; none where there is no such branch."""
    from huggingface_hub import errors

    try:
        return _names(name, CONVERTED)
    except (DataError, errors.RevisionNotFoundError):
        return []


def _names(name: str, branch: str) -> list[str]:
    """The files of a branch; without a network those that are in the local cache."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        return list(HfApi().list_repo_files(name, repo_type="dataset", revision=branch))
    cached = _cached(name, branch)
    return [p.relative_to(cached).as_posix() for p in cached.rglob("*") if is_file(p)]


def _folder_with(name: str, files: Sequence[str], branch: str) -> Path:
    """A folder of the local cache that has files of a branch."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return _cached(name, branch)
    with download_bars(name) as bars:
        return Path(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=branch,
                allow_patterns=list(files),
                tqdm_class=bars,
            )
        )


def _cached(name: str, branch: str) -> Path:
    """The newest snapshot in the local cache, of which perhaps some files only are there."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    try:
        commit = file_text(place / "refs" / branch, KIB).strip()
    except OSError:
        raise DataError(
            f"the data set {name} is not in the local cache, and the hub is offline "
            "(HF_HUB_OFFLINE)"
        ) from None
    return place / "snapshots" / commit


def _usual_split(names: list[str], *, held_out: bool) -> str:
    """The split that is read where none is named."""
    if not held_out:
        return TRAIN
    splits = by_split(map(PurePosixPath, _rows(names))).keys() - {""}
    return chosen_split(splits or {TRAIN}, None, "the data set", held_out=True)


def _selection(text: str, folder: Path, names: list[str], chosen: list[str]) -> SplitFiles:
    """What was chosen, and what was not though it has the same kind of name."""
    left_out = {}
    for split, files in by_split(map(PurePosixPath, _rows(names))).items():
        others = [str(file) for file in files if str(file) not in chosen]
        if split and len(others) == len(files):
            left_out[split] = others
    return SplitFiles(text, [folder / file for file in chosen], split, left_out)


def _rows(names: list[str]) -> list[str]:
    """The data files among all files."""
    return [
        f
        for f in names
        if f.lower().endswith(_SUFFIXES)
        and PurePosixPath(f).name not in ABOUT
        and not any(part.startswith(".") for part in PurePosixPath(f).parts)
    ]


def choose(name: str, files: list[str], split: str) -> list[str]:
    """The files of a split among all of a data set, by their names."""
    rows = _rows(files)
    *folders, stem = split.split("/")
    inside = [f for f in rows if not folders or "/".join(folders) in _folder(f)]
    members = [f for f in inside if _is_named(PurePosixPath(f), stem)] or [
        str(f) for f in by_split(map(PurePosixPath, inside), loosely=True).get(canonical(stem), ())
    ]
    if not members and len(rows) == 1 and split == TRAIN:
        return rows
    places = sorted(set(map(_folder, members)))
    if len(places) > 1:
        raise DataError(
            f"the data set {name} has {split} in several folders ({', '.join(places[:6])}): name "
            f"one, such as {name}:{places[0]}/{stem}"
        )
    if not members:
        prefixes = sorted({re.split(r"[-._]", PurePosixPath(f).name)[0] for f in rows})
        hint = (
            f"its files begin with {', '.join(prefixes[:8])}" if prefixes else "it has no data file"
        )
        raise DataError(f"the data set {name} has no split {split!r}: {hint}")
    best = min(_SUFFIXES.index(PurePosixPath(f).suffix.lower()) for f in members)
    return sorted(f for f in members if f.lower().endswith(_SUFFIXES[best]))


def _folder(file: str) -> str:
    return PurePosixPath(file).parent.as_posix()


def _is_named(file: PurePosixPath, stem: str) -> bool:
    """Whether a file's name begins with a split's, or its folder has it."""
    begins = re.match(rf"{re.escape(stem)}(?![A-Za-z0-9])", file.name) is not None
    return begins or file.parent.name == stem
