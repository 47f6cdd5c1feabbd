"""The data that a trainer is given: rows, token ids, paths, or what its configuration names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath

from qlora_wgpu.config import Config, DataConfig
from qlora_wgpu.data import Dataset, PromptFormat, Tokenizer, row_format, split_off
from qlora_wgpu.data.given_rows import lasting
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.data_warnings import (
    tell_left_out,
    warn_of_learnt_rows,
    warn_of_learnt_windows,
    warn_of_long_rows,
)
from qlora_wgpu.training.mixing import read_mixture
from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.rows import (
    Rows,
    as_dataset,
    encoded,
    is_text,
    preparation,
    prompt_of_data,
)


@dataclass(frozen=True)
class OwnRows:
    """The data of a trainer's run.

    Attributes:
        train: The training data.
        held_out: The held-out data, if there is any.
        prompt: How prompts are written for what is learnt; None of token ids, which do not say it.
    """

    train: Dataset
    held_out: Dataset | None
    prompt: PromptFormat | None


class RowReader:
    """Reads data as the commands do, with the tokenizer that a model's prompts are written with."""

    def __init__(self, model: AdapterModel, config: Config, observer: Observer) -> None:
        """Reads nothing yet.

        Args:
            model: Whose tokenizer encodes: the one kept beside its adapter, else the base's.
            config: The settings.
            observer: Who is told of what is cut or left out.
        """
        self._model = model
        self._config = config
        self._observer = observer

    def read(self, train: Rows | None, held_out: Rows | None) -> OwnRows:
        """Reads both.

        Args:
            train: The training data; None for ``data.train``, and then for ``data.eval``, too.
            held_out: The held-out data; without any, ``data.eval_split`` holds rows out.

        Raises:
            ConfigError: If there is no training data.
            DataError: If a data set cannot be read, or a row is wrong.
            TokenizerError: If rows are to be encoded, and there is no tokenizer.
        """
        settings = self._config.data
        train, held_out = lasting(train), lasting(held_out)
        if train is None:
            learnt = self._mixture()
            held_out = settings.eval if held_out is None else held_out
        else:
            learnt = self._dataset(train, "train_dataset", settings)
        if held_out is not None:
            measured = self._dataset(held_out, "eval_dataset", settings, held_out=True)
            warn_of_learnt_rows(learnt, measured, self._observer)
        elif settings.eval_split is not None:
            learnt, measured = split_off(learnt, settings.eval_split, self._config.train.seed)
            warn_of_learnt_windows(learnt, measured, self._observer)
        else:
            return OwnRows(learnt, None, self._prompt(train))
        return OwnRows(learnt, measured, self._prompt(train))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._model.prompt_folder)

    def _mixture(self) -> Dataset:
        """What the configuration names."""

        def read(part: DataConfig) -> Dataset:
            return self._dataset(str(part.train), "train_dataset", part)

        settings = self._config.require_train()
        return read_mixture(settings, self._config.train.seed, read, self._observer)

    def _dataset(
        self, rows: Rows, name: str, settings: DataConfig, *, held_out: bool = False
    ) -> Dataset:
        tokens = encoded(
            rows, name, lambda: self._tokenizer, settings,
            held_out=held_out, objective=self._config.train.objective,
        )  # fmt: skip
        dataset = as_dataset(tokens, name, self._model.architecture.vocab_size)
        if tokens is rows:  # who has made token ids of it has been told
            return dataset
        for text in dataset.warnings:
            self._observer.warning(text)
        path = fspath(rows) if isinstance(rows, str | PathLike) else name
        warn_of_long_rows(path, dataset, longest_text(self._model.folder.config), self._observer)
        tell_left_out(settings, path, dataset, self._observer, held_out=held_out)
        return dataset

    def _prompt(self, rows: Rows | None) -> PromptFormat | None:
        if rows is None:
            objective = self._config.train.objective
            return prompt_of_data(self._config.data, self._tokenizer, objective)
        if not isinstance(rows, str | PathLike) and not is_text(rows):
            return None
        settings = self._config.data
        kind = row_format(
            rows, self._tokenizer, preparation(self._config.data, self._config.train.objective)
        )
        return PromptFormat.of_rows(kind, self._tokenizer, settings.chat_template)
