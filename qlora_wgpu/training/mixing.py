"""Training data of one source, or of several that are mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import DataConfig
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data import Dataset, is_dataset_name
from qlora_wgpu.data.mixture import Portion, mix
from qlora_wgpu.presence import exists
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.observer import Observer, SourceFigures


def read_mixture(
    settings: DataConfig, seed: int, read: Callable[[DataConfig], Dataset], observer: Observer
) -> Dataset:
    """The training data that a ``data`` section names.

    Args:
        settings: The section.
        seed: ``train.seed``, by which examples are chosen.
        read: Reads what the section of one source names.
        observer: Told of sources that give an example more than once.

    Raises:
        DataError: If a source cannot be read or has nothing to learn.
    """
    parts = [read(part) for part in settings.parts()]
    if settings.sources is None:
        return parts[0]
    portions = [Portion(source.weight, source.rows) for source in settings.sources]
    names = [_name(source.path) for source in settings.sources]
    mixture = mix(parts, names, portions, settings.stopping_strategy, seed)
    for each in source_figures(mixture):
        if each.rows > each.of:
            observer.note(
                f"{each.name} has {each.of:,} rows and gives {each.rows:,} an epoch: they are "
                f"learnt {each.rows / each.of:.3g} times"
            )
    return mixture


class SourceCounter:
    """Counts the rows that each source of a mixture has given to a run.

    What is learnt follows from the plan and the step alone, so nothing of it is kept.
    """

    def __init__(self, dataset: Dataset, plan: BatchPlan) -> None:
        """Counts in no data set that is no mixture."""
        self._names, self._sources, self._plan = dataset.source_names, dataset.source_of, plan
        self._shares = _shares_of_rows(dataset) if self._sources is not None else np.zeros(0)

    def until(self, step: int) -> dict[str, int]:
        """The rows of each source, by its name, that so many steps have learnt."""
        if self._sources is None:
            return {}
        epochs, begun = self._plan.examples_until(step)
        size = len(self._names)
        rows = epochs * np.bincount(self._sources, self._shares, size)
        rows += np.bincount(self._sources[begun], self._shares[begun], size)
        return dict(zip(self._names, map(round, rows.tolist()), strict=True))


def source_figures(dataset: Dataset) -> tuple[SourceFigures, ...]:
    """What each source gives; none of a data set that is no mixture."""
    names, sources = dataset.source_names, dataset.source_of
    if sources is None:
        return ()
    rows = np.bincount(sources, _shares_of_rows(dataset), len(names))
    tokens = np.bincount(sources, dataset.label_counts, minlength=len(names))
    return tuple(
        SourceFigures(name, round(rows[i]), dataset.source_sizes[i], int(tokens[i]))
        for i, name in enumerate(names)
    )


def _shares_of_rows(dataset: Dataset) -> npt.NDArray[np.float64]:
    """Which part of its row each example is: half of a pair, all of an answer that stands alone."""
    if dataset.unit == 1:
        return np.ones(len(dataset))
    present = dataset.lengths.reshape(-1, dataset.unit) > 0
    shares: npt.NDArray[np.float64] = present / present.sum(axis=1, keepdims=True)
    return shares.ravel()


def _name(path: str) -> str:
    is_on_hub = not exists(Path(path)) and is_dataset_name(path)
    return path if is_on_hub else DataPlace.parse(path).name
