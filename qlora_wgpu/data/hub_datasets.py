"""Data sets on the Hugging Face Hub: ``owner/name`` or ``owner/name:split``."""

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
    in_words,
)
from qlora_wgpu.errors import DataError
from qlora_wgpu.files import file_text, is_file
from qlora_wgpu.limits import KIB

# ---- the Hub's conversion to Parquet -------------------------------------------------------------

CONVERTED = "refs/convert/parquet"
_DEFAULT = "default"  # the configuration of a data set that names none
_SHOWN = 8

Splits = Mapping[str, Sequence[str]]


def choose_converted(
    name: str, files: Sequence[str], requested: str | None, *, held_out: bool
) -> tuple[str, dict[str, list[str]]]:
    """Chooses a split from files named ``CONFIGURATION/SPLIT/0000.parquet``.

    ``requested`` is ``CONFIGURATION/SPLIT``, ``SPLIT``, or None for the defaults.
    """
    *folders, split = (requested or "").split("/")
    configurations = _configurations(files)
    config = "/".join(folders) or _default_configuration(name, configurations, split or TRAIN)
    if config not in configurations:
        raise DataError(
            f"the data set {name} has no configuration {config!r}: it has "
            f"{in_words(configurations, _SHOWN)}; name one as in "
            f"{name}:{next(iter(configurations))}/{TRAIN}"
        )
    splits = configurations[config]
    if not split:
        where = f"the data set {name}"
        split = chosen_split(splits, None, where, held_out=held_out) if held_out else TRAIN
    chosen = [each for each in splits if each == split] or [
        each for each in splits if canonical(each) == canonical(split)
    ]
    if not chosen:
        raise DataError(
            f"the configuration {config} of the data set {name} has no split {split!r}: it has "
            f"{in_words(splits, _SHOWN)}"
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


def _default_configuration(name: str, configurations: Mapping[str, Splits], split: str) -> str:
    if len(configurations) == 1:
        return next(iter(configurations))
    if _DEFAULT in configurations:
        return _DEFAULT
    if not configurations:
        raise DataError(f"the data set {name} has no supported data files")
    raise DataError(
        f"the data set {name} has the configurations {in_words(configurations, _SHOWN)}: name one, "
        f"such as {name}:{next(iter(configurations))}/{split}"
    )


# ---- a data set and its splits -------------------------------------------------------------------

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<split>[\w./-]+))?", re.ASCII
)
_MAIN = "main"
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def is_dataset_name(text: str) -> bool:
    """Whether a text has the form ``owner/name[:split][slice]`` and not a data file's suffix."""
    match = _NAME.fullmatch(text.removesuffix(DataPlace.parse(text).rows))
    return match is not None and not match["name"].lower().endswith((*_SUFFIXES, ".txt"))


def download(text: str, *, held_out: bool = False) -> SplitFiles:
    """The files of a split, downloaded to the local cache if they are missing.

    The text is ``owner/name`` (split ``train``, or the held-out one), ``owner/name:validation``, or
    ``owner/name:main/test`` with a folder or a configuration. The README.md lists the files of a
    split, or else their names tell it. If neither does, or the files have no supported format, they
    are taken from the branch with the Hub's conversion to Parquet.
    """
    # By name, since attributes of the package that are loaded lazily may be missing.
    from huggingface_hub import errors

    match = _NAME.fullmatch(text)
    assert match is not None
    name = match["name"]
    try:
        return _of_branch(text, name, match["split"], held_out=held_out)
    except DataError:
        raise
    except errors.GatedRepoError as err:
        advice = "accept its terms on its page and log in with `hf auth login`"
        raise DataError(f"the data set {name} is gated: {advice}") from err
    except errors.RepositoryNotFoundError as err:
        raise DataError(
            f"{text} is neither a local file nor a folder nor a data set on the Hugging Face Hub "
            "(for a private one, run `hf auth login`)"
        ) from err
    except Exception as err:  # every other failure of the client or of the network
        reason = next(iter(str(err).splitlines()), "") or type(err).__name__
        raise DataError(
            f"{text} is neither a local file nor a folder, and loading it from the Hugging Face "
            f"Hub failed: {reason}"
        ) from err


def _of_branch(text: str, name: str, requested: str | None, *, held_out: bool) -> SplitFiles:
    """A split by the names of the data set's own files, or else from its conversion."""
    names: list[str] = []
    try:
        names = _names(name, _MAIN)
        if (listed := _listed(text, name, names, requested, held_out=held_out)) is not None:
            return listed
        chosen = choose(name, names, requested or _default_split(names, held_out=held_out))
        return _selection(text, _folder_with(name, chosen, _MAIN), names, chosen)
    except DataError as err:
        converted = _converted_names(name)
        if not converted:
            raise
        try:
            split, splits = choose_converted(name, converted, requested, held_out=held_out)
        except DataError:
            if _rows(names):  # the first error is more helpful
                raise err from None
            raise
    folder = _folder_with(name, splits[split], CONVERTED)
    left_out = {canonical(other): files for other, files in splits.items() if other != split}
    return SplitFiles(text, [folder / file for file in splits[split]], canonical(split), left_out)


def _listed(
    text: str, name: str, names: list[str], requested: str | None, *, held_out: bool
) -> SplitFiles | None:
    """A split that the data set's README.md lists; None if it lists no supported files."""
    files = [PurePosixPath(file) for file in sorted(_rows(names))]
    if CARD not in names or not files:
        return None
    card = Configurations.read(_folder_with(name, [CARD], _MAIN), name)
    found = None if card is None else card.splits_of(files, requested)
    if found is None:
        return None
    split, own, left_out = chosen_files(*found, f"the data set {name}", held_out=held_out)
    folder = _folder_with(name, list(map(str, own)), _MAIN)
    return SplitFiles(text, [folder / file for file in own], split, left_out)


def _converted_names(name: str) -> list[str]:
    """The files of the data set's conversion; none if there is no such branch."""
    from huggingface_hub import errors

    try:
        return _names(name, CONVERTED)
    except (DataError, errors.RevisionNotFoundError):
        return []


def _names(name: str, branch: str) -> list[str]:
    """The files of a branch; offline, those in the local cache."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        return list(HfApi().list_repo_files(name, repo_type="dataset", revision=branch))
    cached = _cached(name, branch)
    return [p.relative_to(cached).as_posix() for p in cached.rglob("*") if is_file(p)]


def _folder_with(name: str, files: Sequence[str], branch: str) -> Path:
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
    """The newest snapshot in the local cache, which may be incomplete."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    try:
        commit = file_text(place / "refs" / branch, KIB).strip()
    except OSError:
        raise DataError(
            f"the data set {name} is not in the local cache, and HF_HUB_OFFLINE is set"
        ) from None
    return place / "snapshots" / commit


def _default_split(names: list[str], *, held_out: bool) -> str:
    if not held_out:
        return TRAIN
    splits = by_split(map(PurePosixPath, _rows(names))).keys() - {""}
    return chosen_split(splits or {TRAIN}, None, "the data set", held_out=True)


def _selection(text: str, folder: Path, names: list[str], chosen: list[str]) -> SplitFiles:
    left_out = {}
    for split, files in by_split(map(PurePosixPath, _rows(names))).items():
        others = [str(file) for file in files if str(file) not in chosen]
        if split and len(others) == len(files):
            left_out[split] = others
    return SplitFiles(text, [folder / file for file in chosen], split, left_out)


def _rows(names: list[str]) -> list[str]:
    return [
        f
        for f in names
        if f.lower().endswith(_SUFFIXES)
        and PurePosixPath(f).name not in ABOUT
        and not any(part.startswith(".") for part in PurePosixPath(f).parts)
    ]


def choose(name: str, files: list[str], split: str) -> list[str]:
    """The files of a split, by their names."""
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
        begin = f"its files begin with {', '.join(prefixes[:8])}"
        hint = begin if prefixes else "it has no data files"
        raise DataError(f"the data set {name} has no split {split!r}: {hint}")
    best = min(_SUFFIXES.index(PurePosixPath(f).suffix.lower()) for f in members)
    return sorted(f for f in members if f.lower().endswith(_SUFFIXES[best]))


def _folder(file: str) -> str:
    return PurePosixPath(file).parent.as_posix()


def _is_named(file: PurePosixPath, stem: str) -> bool:
    begins = re.match(rf"{re.escape(stem)}(?![A-Za-z0-9])", file.name) is not None
    return begins or file.parent.name == stem
