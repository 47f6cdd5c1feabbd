"""Recommended settings of a first run for its model, data and device, each with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import TrainConfig
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.config.yaml import Setting
from qlora_wgpu.data import (
    Dataset,
    PreprocessConfig,
    Tokenizer,
    bucket_length,
    infer_chat_template,
    load_dataset,
    row_format,
)
from qlora_wgpu.data.batches import pack
from qlora_wgpu.data.columns import with_columns
from qlora_wgpu.data.dataset import first_row, infer_objective, read_label_names
from qlora_wgpu.data.mixture import ConcatDataset
from qlora_wgpu.data.prepared import has_labels
from qlora_wgpu.data.scored_rows import problem_type_of
from qlora_wgpu.data.sources import holds_documents, select_files
from qlora_wgpu.errors import ConfigError, DataError, QLoRAError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists, is_dir
from qlora_wgpu.gpu import memory as memory
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.images.placeholders import image_files
from qlora_wgpu.model.pretrained import SCORED, Pretrained
from qlora_wgpu.runs.workload import DeviceSpec, TrainingWorkload, totals
from qlora_wgpu.training import refuse_existing_run, training_options

# ---- the data ------------------------------------------------------------------------------------

_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_POSITIONS = 4096  # of a model without max_position_embeddings
_WINDOW, _LONG = 1024, 4096  # tokens of a window, and of the documents that are split


@dataclass(frozen=True)
class FirstData:
    """The data of a first run."""

    dataset: Dataset  # the examples, not truncated
    objective: str  # train.objective for rows of this format
    lengths: list[int]  # tokens of each row, ascending; of a pair, those of the longer answer
    are_documents: bool  # whether it consists of documents, which are split into windows
    are_texts: bool  # whether each row is plain text, which may be split into windows
    length: int  # a row length that nearly all rows fit into
    limit: int  # the model's maximum number of positions

    @classmethod
    def read(
        cls,
        paths: Sequence[str],
        folder: ModelFolder,
        tokenizer: Tokenizer,
        template: str | None,
        columns: Sequence[Mapping[str, str]],
        train: TrainConfig,
    ) -> FirstData:
        """Reads and encodes the data."""
        objective = train.objective
        images = image_files(folder.path, folder.config, tokenizer.token)
        each = PreprocessConfig(
            1 << 20, template, objective=objective, images=images,
            labels=tuple(train.labels or ()), problem_type=train.problem_type,
        )  # fmt: skip
        configs = [replace(each, columns=names) for names in columns]
        parts = [
            load_dataset(path, tokenizer, 2, how=config)
            for path, config in zip(paths, configs, strict=True)
        ]
        dataset = parts[0] if len(parts) == 1 else ConcatDataset(parts, paths)
        lengths = dataset.lengths
        if objective == "dpo":
            lengths = lengths.reshape(-1, 2).max(axis=1)
        rows = np.sort(lengths[lengths > 0]).tolist()
        limit = longest_text(folder.config) or _POSITIONS
        documents = any(
            exists(Path(path)) and holds_documents(select_files(Path(path)).files) for path in paths
        )
        texts = objective == "sft" and all(
            row_format(path, tokenizer, config) == "text"
            for path, config in zip(paths, configs, strict=True)
        )
        common = rows[min(int(0.98 * len(rows)), len(rows) - 1)]
        length = next((b for b in _BUCKETS if b >= common), _BUCKETS[-1])
        if (texts or documents) and common > _LONG:
            length = _WINDOW
        length = min(length, limit)  # within what the model supports
        return cls(dataset, objective, rows, documents, texts and not documents, length, limit)

    def windows(self, length: int) -> list[int]:
        """Tokens of the rows after documents and plain text are split into windows."""
        if not (self.are_texts or self.are_documents):
            return self.lengths
        starts = [(n, begin) for n in self.lengths for begin in (0, *range(length, n - 1, length))]
        return [min(length, n - begin) for n, begin in starts]

    @property
    def is_packable(self) -> bool:
        """Whether packing makes sense: windows of documents fill their rows, pairs stay apart."""
        return not self.are_documents and self.objective == "sft"

    @property
    def has_late_labels(self) -> bool:
        """Whether more rows have labels in their last ``length`` tokens than in their first."""
        length = self.length
        first = sum(has_labels(example.labels[:length].tolist()) for example in self.dataset)
        last = sum(has_labels(example.labels[-length:].tolist()) for example in self.dataset)
        return not (self.are_documents or self.are_texts) and last > first


def split_folder(path: str) -> list[str]:
    """The files of a folder whose rows have different keys; otherwise the path itself."""
    place = Path(path)
    if not is_dir(place):
        return [path]
    files = list(select_files(place).files)
    if holds_documents(files):
        return [path]
    keys = [(first_row(file) or {}).keys() for file in files]
    return [path] if all(each == keys[0] for each in keys) else [str(file) for file in files]


def columns_by_path(paths: Sequence[str], columns: Mapping[str, str]) -> list[Mapping[str, str]]:
    """The named columns that each data set has.

    A column that no data set has is kept for all, so that reading reports it.
    """
    rows = [first_row(path) or {} for path in paths]
    missing = {name for name in columns.values() if not any(name in row for row in rows)}
    return [
        {key: name for key, name in columns.items() if name in row or name in missing}
        for row in rows
    ]


def objective_of(paths: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """The train.objective that all data sets' rows fit; ``columns`` rename their keys."""
    objectives = [infer_objective(path, names) for path, names in zip(paths, columns, strict=True)]
    for path, objective in zip(paths, objectives, strict=True):
        if objective != objectives[0]:
            raise ConfigError(
                f"{path} has rows for train.objective: {objective}, but {paths[0]} for "
                f"{objectives[0]}: a run has one objective, so use data sets of one kind"
            )
    return objectives[0]


def first_train(
    paths: Sequence[str], columns: Sequence[Mapping[str, str]], config: Mapping[str, Any]
) -> TrainConfig:
    """The objective that all data sets' rows fit, with the labels of a classifier.

    Labels are ignored if they are no classes or transformers has no classifier of this model type.
    """
    objective, supervised = objective_of(paths, columns), TrainConfig()
    if objective != "classification":
        return TrainConfig.model_validate({"objective": objective})
    row = with_columns(first_row(paths[0]) or {}, columns[0])
    problem, labels = problem_type_of(row["label"]), dict[str, None]()
    try:
        if problem != "regression":
            for path, own in zip(paths, columns, strict=True):
                labels |= dict.fromkeys(read_label_names(path, own, problem))
    except DataError:
        return supervised
    is_alike = len(labels) < 2 and problem == "single_label_classification"
    if is_alike or config.get("model_type") not in SCORED:
        return supervised
    names = list(labels) or None
    return TrainConfig.model_validate(
        {"objective": objective, "problem_type": problem, "labels": names}
    )


# ---- batches -------------------------------------------------------------------------------------

EXAMPLES_PER_STEP = 16  # a step that is neither noisy nor slow
_MIN_STEPS = 100  # of a run; fewer train little, however large they are
_EPOCHS = ((5000, 1), (2000, 2), (300, 3), (100, 5), (0, 10))  # by the minimum number of examples
_PACKED_LENGTH = 512  # of rows that short examples share; attention costs more in longer ones
_BUSY = {True: 1024, False: 16_384}  # tokens of a micro-batch that fill the device, by is_cpu
_ENOUGH = 1024  # tokens of a micro-batch, above which checkpointing costs more than it gains

Fits = Callable[[int, int, bool], bool]
"""Whether a number of rows of a number of tokens fit, with checkpointing or without."""


@dataclass(frozen=True)
class FirstBatches:
    """The batches of a first run."""

    epochs: int  # passes over the data
    packing: bool  # whether examples are packed
    length: int  # tokens of a row
    examples_per_row: float  # mean number of examples in a row
    rows: int  # rows of a micro-batch
    micro_batches: int  # micro-batches of a step
    checkpointing: bool  # whether layers are recomputed in the backward pass
    steps: int  # steps of the run
    has_room: bool  # whether even the smallest micro-batch fits


def first_batches(
    lengths: Sequence[int], length: int, limit: int, fits: Fits, *, is_cpu: bool, packable: bool,
    is_bounded: bool = False,
) -> FirstBatches:  # fmt: skip
    """Chooses the batches of a first run for rows of these ``lengths``."""
    epochs = next(epochs for minimum, epochs in _EPOCHS if len(lengths) >= minimum)
    examples = examples_per_step(len(lengths) * epochs)
    packed = packed_length(lengths, length, limit, examples) if packable else None
    truncated = np.minimum(np.array(lengths, np.int64), packed or length)
    num_rows = len(pack(truncated, packed)) if packed else len(lengths)
    per_row = len(lengths) / num_rows
    rows_per_step = max(1, round(examples / per_row))
    longest = packed or bucket_length(int(truncated.max()), length)
    rows, checkpointing, has_room = _micro_batch(
        rows_per_step, longest, fits, _BUSY[is_cpu], is_bounded=is_bounded
    )
    return FirstBatches(
        epochs=epochs,
        packing=packed is not None,
        length=packed or length,
        examples_per_row=per_row,
        rows=rows,
        micro_batches=rows_per_step // rows,
        checkpointing=checkpointing,
        steps=epochs * -(-num_rows // rows_per_step),
        has_room=has_room,
    )


def examples_per_step(total: int) -> int:
    """Sixteen, or a smaller power of two if a run over ``total`` examples has too few steps."""
    examples = EXAMPLES_PER_STEP
    while examples > 1 and total < _MIN_STEPS * examples:
        examples //= 2
    return examples


def packed_length(lengths: Sequence[int], length: int, limit: int, examples: int) -> int | None:
    """Tokens of packed rows; None if examples are too long to be packed."""
    mean = sum(lengths) / len(lengths)
    room = min(limit, max(length, _PACKED_LENGTH), int(mean * examples))
    while length < room and 2 * length <= room:
        length *= 2
    return length if length <= room and length >= 2 * mean else None


def _micro_batch(
    rows: int, length: int, fits: Fits, busy: int, *, is_bounded: bool
) -> tuple[int, bool, bool]:
    """Rows of a micro-batch, whether to checkpoint, and whether it fits at all."""
    divisors = [n for n in range(rows, 0, -1) if rows % n == 0]
    sizes = [n for n in divisors if n * length <= busy] or [1]
    enough = min(sizes[0] * length, _ENOUGH)
    plain = next((n for n in sizes if fits(n, length, False)), 0)
    if plain * length >= enough:
        return plain, False, True
    if is_bounded:  # memory is better spent on layers that are not recomputed than on more rows
        smallest = min(n for n in sizes if n * length >= enough)
        sizes = [n for n in sizes if n <= smallest]
    checkpointed = next((n for n in sizes if fits(n, length, True)), 0)
    if plain >= checkpointed and plain:
        return plain, False, True
    return max(checkpointed, 1), True, checkpointed > 0


# ---- the settings --------------------------------------------------------------------------------

_UNKNOWN = 8 << 30  # bytes of memory that are assumed if they are unknown
_CARD_SHARE = 0.8  # of a card's memory: drivers and screens use some
_HOST_SHARE = 0.5  # of the machine's memory, which other programs need as well
_MAX_RUNS = 1000  # of one name in a folder


@dataclass(frozen=True)
class MemoryBudget:
    """The memory for which a run is planned."""

    target: DeviceSpec  # the device
    nbytes: int  # bytes of its memory that may be used
    words: str  # the same in words, for a comment
    is_bounded: bool = False  # whether training will know the limit, too

    @classmethod
    def here(cls) -> MemoryBudget:
        """The memory of the GPU that a run would use; of a typical one if there is none."""
        try:
            device = Device()
        except QLoRAError:
            return cls(DeviceSpec(), int(_CARD_SHARE * _UNKNOWN), "8 GiB, since no GPU was found")
        target, size = DeviceSpec.of(device), memory.memory_size(device)
        if size is None:
            words = f"8 GiB, since the memory of {device.name} is unknown"
            return cls(target, int(_CARD_SHARE * _UNKNOWN), words)
        of = "free memory" if device.is_cpu else device.name
        share = _HOST_SHARE if device.is_cpu else _CARD_SHARE
        words = f"{share:.0%} of the {size / 2**30:,.0f} GiB of {of}"
        is_bounded = memory.room(device) is not None
        return cls(target, int(share * size), words, is_bounded)


def recommend_config(
    model: str,
    train: str | Sequence[str],
    held_out: str | None,
    room: MemoryBudget | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[str, list[Setting]]:
    """The title and the settings of a first run.

    Several data sets make a mixture. ``room`` is by default the memory of the GPU here; ``columns``
    are those of ``data.columns``.
    """
    named = [train] if isinstance(train, str) else list(train)
    paths = [file for path in named for file in split_folder(path)]
    room = room or MemoryBudget.here()
    folder = ModelFolder.without_weights(model)
    pretrained = Pretrained.from_config(folder.config)
    tokenizer = Tokenizer.from_folder(folder.text_folder)
    by_path = columns_by_path(paths, columns or {})
    first = first_train(paths, by_path, folder.config)
    objective = first.objective
    names = (
        infer_chat_template(path, tokenizer, objective, own)
        for path, own in zip(paths, by_path, strict=True)
    )
    template = next((name for name in names if name is not None), None)
    data = FirstData.read(paths, folder, tokenizer, template, by_path, first)
    options = training_options(first)
    sides = 2 if objective == "dpo" else 1

    step = options.step("train", 1, 1)
    if (scoring := step.objective.scoring) is not None:
        pretrained = pretrained.scored(scoring.classes)
    total = totals(TrainingWorkload(pretrained, step).layout(room.target), step)

    def fits(rows: int, length: int, checkpointing: bool) -> bool:
        taken = total(batch=sides * rows, seq=length, checkpointing=checkpointing)
        return taken is not None and taken <= room.nbytes

    batches = first_batches(
        data.windows(data.length),
        data.length,
        data.limit,
        fits,
        is_cpu=room.target.is_cpu,
        packable=data.is_packable,
        is_bounded=room.is_bounded,
    )
    layers = pretrained.architecture.num_layers
    of = " and ".join(DataPlace.parse(path).name for path in paths)
    rows = len(data.windows(batches.length))
    title = f"{Path(model).name}, {layers} layers, on {rows:,} rows of {of}."
    settings = [
        Setting("model.path", model),
        Setting("quant.scheme", "nf4", "4 bits per weight; none keeps frozen layers as they are"),
        Setting("lora.r", 16, "rank: a higher one can learn more, but needs more memory"),
        Setting("lora.lora_alpha", 32, "the adapter is scaled by lora_alpha / r"),
        Setting("lora.lora_dropout", 0.0),
        Setting("lora.target_modules", "all-linear", "or a list: [q_proj, v_proj]"),
        *_data(data, batches, paths, held_out, template, by_path),
        *_train(batches, room, first),
        *_optim(pretrained.architecture.hidden_size, objective),
        *_output(batches, Path(model).name),
    ]
    return title, settings


def _data(
    data: FirstData, batches: FirstBatches, paths: Sequence[str], held_out: str | None,
    template: str | None, columns: Sequence[Mapping[str, str]],
) -> list[Setting]:  # fmt: skip
    alike = all(each == columns[0] for each in columns)
    sources: list[dict[str, Any]] = [{"path": path} for path in paths]
    for source, own in zip(sources, columns, strict=True):
        if own and not alike:
            source["columns"] = dict(own)
    all_rows = "all rows of each; add weight: or rows: to use a share"
    settings = [
        Setting("data.train", paths[0])
        if len(paths) == 1
        else Setting("data.sources", sources, all_rows),
        Setting("data.eval", held_out, "the held-out loss is measured on it")
        if held_out is not None
        else Setting("data.eval_split", 0.05, "a share to measure the loss on", is_active=False),
    ]
    if alike and columns[0]:
        settings.append(Setting("data.columns", dict(columns[0]), "the rows' own column names"))
    if template is not None:
        settings.append(
            Setting("data.chat_template", template, "fits the tokenizer, which has no template")
        )
    longest = f"tokens; the longest row has {data.lengths[-1]:,}"
    settings.append(Setting("data.max_seq_length", batches.length, longest))
    if data.are_texts and data.lengths[-1] > batches.length:
        split = "longer text is split into several rows"
        settings.append(Setting("data.truncation", "windows", split))
    if data.has_late_labels:
        settings.append(Setting("data.truncation", "keep_end", "longer rows keep their labels"))
    mean = sum(data.lengths) / len(data.lengths)
    why = "each example has a row of its own"
    if data.objective == "dpo":
        why = "each answer of a pair has a row of its own"
    if batches.packing:
        why = (
            f"examples have {mean:,.0f} tokens: {batches.examples_per_row:.1f} of them share a row"
        )
    return [*settings, Setting("data.packing", batches.packing, why)]


def _train(batches: FirstBatches, room: MemoryBudget, first: TrainConfig) -> list[Setting]:
    rows = batches.rows * batches.micro_batches
    step = f"a step has {rows} row{'s' if rows > 1 else ''}"
    if batches.packing:
        step += f" with about {rows * batches.examples_per_row:.0f} examples"
    fitting = f"fits into {room.words}"
    if not batches.has_room:
        fitting = f"needs more than {room.words}: see `qlora-wgpu estimate`"
    recomputes, why = batches.checkpointing, "activations fit: nothing is recomputed"
    if recomputes and room.is_bounded:
        recomputes, why = False, "layers that fit are kept; the others are recomputed"
    elif recomputes:
        why = "layers are recomputed: slower, but much less memory"
    epochs = f"about {batches.steps:,} steps"
    return [
        *_objective(first),
        Setting("train.num_train_epochs", batches.epochs, epochs),
        Setting("train.per_device_train_batch_size", batches.rows, fitting),
        Setting("train.gradient_accumulation_steps", batches.micro_batches, step),
        Setting("train.gradient_checkpointing", recomputes, why),
    ]


def _objective(first: TrainConfig) -> list[Setting]:
    """The settings of the objective; none for supervised rows."""
    objective = first.objective
    if objective == "sft":
        return []
    if objective == "classification":
        why = f"{len(first.labels):,} labels" if first.labels else "a number for each row"
        chosen = [Setting("train.objective", objective, why)]
        if first.problem_type != "single_label_classification":
            chosen.append(Setting("train.problem_type", first.problem_type))
        return chosen
    why = "pairs of answers; orpo needs no reference model"
    if objective == "kto":
        why = "desirable and undesirable answers"
    beta = Setting("train.beta", 0.1, "how close the model stays to the reference model")
    return [Setting("train.objective", objective, why), beta]


def _optim(hidden_size: int, objective: str) -> list[Setting]:
    rate, why = first_learning_rate(hidden_size), "smaller models need a higher one"
    if objective not in ("sft", "classification"):
        rate, why = rate / 10, "a tenth of that of supervised training"
    return [
        Setting("optim.learning_rate", rate, f"for a model of width {hidden_size:,}: {why}"),
        Setting("optim.lr_scheduler_type", "cosine"),
        Setting("optim.warmup_ratio", 0.03),
    ]


def _output(batches: FirstBatches, name: str) -> list[Setting]:
    often = max(5, min(50, batches.steps // 4))
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip(".") or "run"
    return [
        Setting("eval.eval_steps", often, "with held-out data"),
        Setting("output.dir", _free_run(f"runs/{plain}")),
        Setting("output.save_steps", often),
    ]


def _free_run(name: str) -> str:
    """A folder without a run: ``name``, or ``name`` with a number."""
    for folder in (name, *(f"{name}-{number}" for number in range(2, _MAX_RUNS))):
        try:
            refuse_existing_run(Path(folder))
        except ConfigError:
            continue
        return folder
    return name


def first_learning_rate(hidden_size: int) -> float:
    """A peak learning rate for LoRA on all linear layers.

    The rule of "LoRA Without Regret" (Schulman et al., 2025): ten times the rate of full
    fine-tuning, falling with the model's width as fitted to Llamas, rounded to 1, 2, 3 or 5.
    """
    rate = 5e-4 * (2000 / hidden_size) ** 0.78
    power = 10.0 ** math.floor(math.log10(rate))
    nearest = min((1, 2, 3, 5, 10), key=lambda digit: abs(math.log(digit * power / rate)))
    return float(f"{min(max(nearest * power, 1e-4), 5e-3):.1e}")
