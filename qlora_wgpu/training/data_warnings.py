"""What a user is told of a run's data: what is left out, in the loss and measured, or too long."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qlora_wgpu.checkpoint import read_manifest
from qlora_wgpu.config import Config, DataConfig, TrainConfig
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data import Dataset, rows_in_both
from qlora_wgpu.data.splits import TEST, TRAIN, VALIDATION, in_words
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.training.observers import Observer
from qlora_wgpu.training.run_folder import checkpoint_folders

_SHARES = (1.0, 1.33)  # of good to bad, weights times numbers: equation 8 of arXiv 2402.01306


def check_unpaired_balance(rows: Dataset, settings: TrainConfig, observer: Observer) -> None:
    """Says what ``kto`` does not learn from, and which weights would balance what is unbalanced."""
    if settings.objective != "kto":
        return
    good, bad = _good_and_bad(rows)
    sides = (
        (good, settings.desirable_weight, "desirable_weight", "good"),
        (bad, settings.undesirable_weight, "undesirable_weight", "bad"),
    )
    if all(not number or not weight for number, weight, _, _ in sides):
        names = " and ".join(f"train.{key}" for number, _, key, _ in sides if number)
        raise ConfigError(f"{names} is 0 for all answers there are: nothing would be learnt")
    for number, weight, key, kind in sides:
        if number and not weight:
            observer.warning(
                f"train.{key} is 0: nothing is learnt from the {number:,} {kind} answers, which "
                "count in the loss's mean and, with loss_type kto, in its KL term"
            )
    if not all(number and weight for number, weight, _, _ in sides) or good == bad:
        return
    found = good * settings.desirable_weight / (bad * settings.undesirable_weight)
    least, most = _SHARES
    if not least - 0.005 <= found <= most + 0.005:
        one = bad * settings.undesirable_weight / good
        other = good * settings.desirable_weight / bad
        observer.warning(
            f"{good:,} good and {bad:,} bad answers: KTO's authors advise train.desirable_weight "
            f"from {least * one:.3g} to {most * one:.3g}, or train.undesirable_weight from "
            f"{other / most:.3g} to {other / least:.3g}"
        )


def require_both_kinds(held_out: Dataset | None, config: Config) -> None:
    """Refuses to look for the best by a figure that comes of answers which are not there."""
    if held_out is None or config.train.objective != "kto":
        return
    name = config.eval.metric_for_best_model
    good, bad = _good_and_bad(held_out)
    for number, kind, side in ((good, "good", "chosen"), (bad, "bad", "rejected")):
        if not number and name.endswith((f"/{side}", "/margins")):
            raise ConfigError(
                f"eval.metric_for_best_model is {name}, but there is no {kind} answer among the "
                "held-out rows to measure it on: hold out some, or name another figure"
            )


def _good_and_bad(rows: Dataset) -> tuple[int, int]:
    good, bad = (rows.lengths.reshape(-1, 2) > 0).sum(axis=0)
    return int(good), int(bad)


def warn_of_learnt_rows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Tells where the held-out loss would say nothing, since its rows are learnt from."""
    shared, of = rows_in_both(train, held_out), held_out.num_rows
    if shared == of:
        observer.warning(
            "all rows of data.eval stand in data.train, too, so the held-out loss does not show "
            "what the model learns for others: data.eval_split holds rows of data.train out"
        )
    elif shared:
        observer.warning(
            f"{shared:,} of {of:,} {_units(held_out)} of data.eval stand in data.train, too, so "
            "the held-out loss is lower than it should be: take them out of one of the two"
        )


def warn_of_learnt_windows(train: Dataset, held_out: Dataset, observer: Observer) -> None:
    """Tells what a split has on both sides: texts that differ may have equal windows.

    Equal rows, and the windows of one text, are on one side.
    """
    if not (train.has_windows or held_out.has_windows):
        return
    if shared := rows_in_both(train, held_out):
        observer.warning(
            f"{shared:,} of the {held_out.num_rows:,} {_units(held_out)} that data.eval_split "
            "holds out stand in other texts of data.train, too, so the held-out loss is lower than "
            "it should be: take out what these texts repeat"
        )


def warn_of_other_split(adapter: str, held_out: Dataset, observer: Observer) -> None:
    """Tells where rows that are held out now were learnt by the run of an adapter.

    Its checkpoints know which rows it was measured on; the data, or what chooses rows of it, has
    changed since where these are others.
    """
    run = find_run(adapter)
    folders = [] if run is None else checkpoint_folders(run)
    if not folders:
        return
    try:
        measured = read_manifest(folders[-1])["held_out_data"]
    except (CheckpointError, KeyError):  # nothing is known of it
        return
    if measured != held_out.fingerprint:
        observer.warning(
            "data.eval_split holds other rows out than when the adapter was trained, so it may "
            "have learnt some of them: data.train or the settings of its rows have changed since"
        )


def warn_of_long_rows(
    path: str, dataset: Dataset, positions: int | None, observer: Observer
) -> None:
    """Tells of rows beyond what a model was made for."""
    if positions is None or dataset.longest <= positions:
        return
    count = int((dataset.lengths > positions).sum())
    observer.warning(
        f"{Path(path).name}: {count:,} of {len(dataset):,} rows are longer than the {positions:,} "
        "tokens that the model was made for (max_position_embeddings in config.json); set "
        f"data.max_seq_length: {positions}"
    )


def tell_left_out(
    settings: DataConfig, path: str, dataset: Dataset, observer: Observer, *, held_out: bool
) -> None:
    """Tells which files of a folder are not read, unless a split is asked for by its name."""
    splits = {} if DataPlace.parse(path).split else {**dataset.left_out}
    if held_out:
        splits.pop(TRAIN, None)
    elif settings.eval is not None:  # what it leaves out in turn is told there
        splits = {name: files for name, files in splits.items() if not name}
    if not splits:
        return
    names = in_words([file for files in splits.values() for file in files])
    use, advice = ("measured on", "") if held_out else ("trained on", _how_to_measure(path, splits))
    observer.warning(
        f"{DataPlace.parse(path).name}: of other splits, and so not {use}: {names}{advice}"
    )


def _how_to_measure(path: str, splits: Iterable[str]) -> str:
    split = next((name for name in (VALIDATION, TEST) if name in splits), None)
    if split is None:
        return ""
    place = Path(DataPlace.parse(path).path)
    short = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return f"; data.eval: {short.as_posix()}:{split} measures on what is held out"


def _units(dataset: Dataset) -> str:
    return "windows" if dataset.has_windows else "rows"
