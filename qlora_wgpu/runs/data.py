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
from qlora_wgpu.images.placeholders import ImageFiles, image_files
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.runs.prompts import SamplePrompt
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.settings import AnyConfig, as_config
from qlora_wgpu.training import Observer
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.data import DataReader, warn_of_long_rows
from qlora_wgpu.training.images import images_of
from qlora_wgpu.training.observers import Unwatched
from qlora_wgpu.training.policies import RolloutPlan, plan_of, refuse_long_completions
from qlora_wgpu.training.scoring import with_labels


@dataclass(frozen=True)
class PreparedData:
    """The data that a run is trained or evaluated on."""

    path: str  # the path it was read from
    dataset: Dataset  # the examples
    tokenizer: Tokenizer  # the tokenizer that encoded them
    plan: BatchSampler | RolloutPlan  # how they are divided into steps
    images: ImageFiles | None = None  # how prompts contain images, if the model reads them


@dataclass(frozen=True)
class RunData:
    """The training data of a run, and its held-out data if there is any."""

    train: Dataset  # the training data
    held_out: Dataset | None  # the evaluation data
    plan: BatchSampler | RolloutPlan  # how the training data is divided into steps
    max_seq_length: int  # maximum number of tokens of a row
    prompts: tuple[SamplePrompt, ...] = ()  # prompts of the samples

    @property
    def length(self) -> int:
        """Tokens of the longest batch, padding included; a packed pair may exceed the maximum."""
        longest = max(self.train.longest, self.plan.longest)
        if self.held_out is not None:
            longest = max(longest, self.held_out.longest)
        return bucket_length(longest, max(self.max_seq_length, longest))

    @property
    def images(self) -> dict[str, ImageSource]:
        """All images by their keys."""
        return images_of(self.train, self.held_out)

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
    """Reads and encodes the data of a run as ``train`` does, without weights and without a GPU."""
    settings = with_labels(as_config(config, overrides))
    observer = observer or Unwatched()
    warn_of_cache(observer)
    path = data_path(settings, held_out=held_out)
    folder = ModelFolder.without_weights(base_in(settings))
    tokenizer = tokenizer_of(settings, folder)
    images = image_files(folder.path, folder.config, tokenizer.token)
    dataset = read_data(settings, tokenizer, observer, held_out=held_out, images=images)
    warn_of_long_rows(path, dataset, longest_text(folder.config), observer)
    plan = plan_of(dataset.lengths, settings)
    return PreparedData(path, dataset, tokenizer, plan, images)


def tokenizer_of(settings: Config, folder: ModelFolder) -> Tokenizer:
    """A base's tokenizer, with the tokens that a run adds."""
    model, texts = settings.model, folder.text_folder
    if model.adds_tokens:
        texts = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens).folder
    return Tokenizer.from_folder(texts)


def data_path(settings: Config, *, held_out: bool) -> str:
    """The path of a run's data, or the paths of all its sources."""
    if not held_out or settings.data.eval_split is not None:
        parts = settings.require_train().parts()
        return ", ".join(part.train for part in parts if part.train is not None)
    if settings.data.eval is None:
        raise ConfigError(
            "data.eval is not set: set it to held-out data, or hold out rows of data.train with "
            "data.eval_split, such as 0.05"
        )
    return settings.data.eval


def read_data(
    settings: Config, tokenizer: Tokenizer, observer: Observer, *, held_out: bool,
    images: ImageFiles | None = None,
) -> Dataset:  # fmt: skip
    """A run's training data, or its held-out data, read from a path or split off."""
    data_path(settings, held_out=held_out)  # an error where it is not set
    reader = DataReader(settings, lambda: tokenizer, observer, images=images)
    return reader.read_one(held_out=held_out)


def read_run_data(settings: Config, source: OpenedModel, observer: Observer) -> RunData:
    """Reads the training and held-out data of a run and checks them against the model."""
    warn_of_cache(observer)
    reader = DataReader(
        settings, lambda: source.tokenizer, observer,
        architecture=source.architecture,
        positions=longest_text(source.pretrained.config), images=source.images,
    )  # fmt: skip
    train, held_out = reader.read()
    refuse_long_completions(settings, train, held_out, source.pretrained.config)
    plan = plan_of(train.lengths, settings)
    return RunData(train, held_out, plan, settings.data.max_seq_length)


def warn_of_cache(observer: Observer) -> None:
    """Warns, once a run, of a cache folder that cannot be used."""
    problem = cache_problem()
    if problem is not None:
        observer.warning(problem)
