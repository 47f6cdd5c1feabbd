"""The data of a run: read, encoded, and checked against the model."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.cache_folder import cache_problem
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Tokenizer, bucket_length
from qlora_wgpu.data.tokenizer import extended_tokenizer
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.samples import Prompt
from qlora_wgpu.runs.settings import AnyConfig, as_config
from qlora_wgpu.training import Observer
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.data import DataReader, warn_of_long_rows
from qlora_wgpu.training.observers import Unwatched


@dataclass(frozen=True)
class PreparedData:
    """The data that a run learns from, or is measured on."""

    path: str  # the path it was read from
    dataset: Dataset  # the examples
    tokenizer: Tokenizer  # the tokenizer that encoded them
    plan: BatchSampler  # how they are cut into steps


@dataclass(frozen=True)
class RunData:
    """The training data of a run, and its held-out data if there is any."""

    train: Dataset  # what is learnt
    held_out: Dataset | None  # what is measured
    plan: BatchSampler  # how it is cut into steps
    max_seq_length: int  # longest row in tokens
    prompts: tuple[Prompt, ...] = ()  # what the model continues before, in and after training

    @property
    def length(self) -> int:
        """Tokens of the longest batch, padding included.

        A packed pair's two answers may be longer together than ``max_seq_length``.
        """
        longest = max(self.train.longest, self.plan.longest)
        if self.held_out is not None:
            longest = max(longest, self.held_out.longest)
        return bucket_length(longest, max(self.max_seq_length, longest))

    @property
    def computed_tokens(self) -> int:
        """About how many tokens the run will compute, padding included."""
        return self.plan.total_steps * self.plan.batch_size * self.plan.accumulation * self.length


def prepare(
    config: AnyConfig,
    observer: Observer | None = None,
    *,
    held_out: bool = False,
    overrides: tuple[str, ...] = (),
) -> PreparedData:
    """Reads and encodes the data of a run, as ``train`` does; no weight and no GPU is needed.

    Args:
        config: A ``Config``, a YAML file's path, or a mapping.
        observer: Who is told what goes on.
        held_out: Whether it is ``data.eval`` instead of ``data.train``.
        overrides: Texts such as ``"data.packing=true"``, for a YAML file.
    """
    settings = as_config(config, overrides)
    observer = observer or Unwatched()
    warn_of_cache(observer)
    path = data_path(settings, held_out=held_out)
    folder = ModelFolder.without_weights(base_in(settings))
    tokenizer = tokenizer_of(settings, folder)
    dataset = read_data(settings, tokenizer, observer, held_out=held_out)
    warn_of_long_rows(path, dataset, longest_text(folder.config), observer)
    return PreparedData(path, dataset, tokenizer, BatchSampler.of(dataset.lengths, settings))


def tokenizer_of(settings: Config, folder: ModelFolder) -> Tokenizer:
    """A base's tokenizer, with the tokens that a run adds."""
    model, texts = settings.model, folder.text_folder
    if model.adds_tokens:
        texts = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens).folder
    return Tokenizer.from_folder(texts)


def data_path(settings: Config, *, held_out: bool) -> str:
    """The path of a run's data; of several sources, those of all."""
    if not held_out or settings.data.eval_split is not None:
        parts = settings.require_train().parts()
        return ", ".join(part.train for part in parts if part.train is not None)
    if settings.data.eval is None:
        raise ConfigError(
            "data.eval is not set: name held-out data there, or hold rows of data.train out with "
            "data.eval_split, such as 0.05"
        )
    return settings.data.eval


def read_data(
    settings: Config, tokenizer: Tokenizer, observer: Observer, *, held_out: bool
) -> Dataset:
    """A run's training data, or its held-out data, read from a path or split off."""
    data_path(settings, held_out=held_out)  # refuses what is not set
    return DataReader(settings, lambda: tokenizer, observer).read_one(held_out=held_out)


def read_run_data(settings: Config, source: OpenedModel, observer: Observer) -> RunData:
    """Training and held-out data of a run, checked against the model."""
    warn_of_cache(observer)
    reader = DataReader(
        settings, lambda: source.tokenizer, observer,
        vocabulary=source.architecture.vocab_size,
        positions=longest_text(source.pretrained.config),
    )  # fmt: skip
    train, held_out = reader.read()
    plan = BatchSampler.of(train.lengths, settings)
    return RunData(train, held_out, plan, settings.data.max_seq_length)


def warn_of_cache(observer: Observer) -> None:
    """Tells once a run that nothing can be kept for the next one, where that is so."""
    problem = cache_problem()
    if problem is not None:
        observer.warning(problem)
