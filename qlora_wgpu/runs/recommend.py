"""The settings of a first run, chosen for its model, its data and the device, each with its why."""

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
from qlora_wgpu.data.dataset import first_row, infer_objective
from qlora_wgpu.data.mixture import ConcatDataset
from qlora_wgpu.data.prepared import learns
from qlora_wgpu.data.sources import data_files, holds_documents
from qlora_wgpu.errors import ConfigError, QLoRAError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.files import exists, is_dir
from qlora_wgpu.gpu import memory as memory
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.workload import DeviceSpec, TrainingWorkload, totals
from qlora_wgpu.training import refuse_existing_run, training_options

# ---- the data ------------------------------------------------------------------------------------

_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_POSITIONS = 4096  # of a model that does not say how many it was made for
_WINDOW, _LONG = 1024, 4096  # of documents, where they are longer than that


@dataclass(frozen=True)
class FirstData:
    """The data of a first run."""

    dataset: Dataset  # its examples, uncut
    objective: str  # what its rows are for
    lengths: list[int]  # tokens of each row, rising; of a pair, those of the longer answer
    are_documents: bool  # whether they are texts that are cut into windows
    are_texts: bool  # whether each row is a text, which may be cut into several
    length: int  # tokens of a row that nearly all fit in
    limit: int  # the most that the model was made for

    @classmethod
    def read(
        cls,
        paths: Sequence[str],
        folder: ModelFolder,
        tokenizer: Tokenizer,
        template: str | None,
        columns: Sequence[Mapping[str, str]],
    ) -> FirstData:
        """Reads and encodes it."""
        objective = objective_of(paths, columns)
        each = PreprocessConfig(max_seq_length=1 << 20, chat_template=template, objective=objective)
        hows = [replace(each, columns=names) for names in columns]
        parts = [
            load_dataset(path, tokenizer, 2, how=how) for path, how in zip(paths, hows, strict=True)
        ]
        dataset = parts[0] if len(parts) == 1 else ConcatDataset(parts, paths)
        lengths = dataset.lengths
        if objective == "dpo":
            lengths = lengths.reshape(-1, 2).max(axis=1)
        rows = np.sort(lengths[lengths > 0]).tolist()
        limit = longest_text(folder.config) or _POSITIONS
        documents = any(
            exists(Path(path)) and holds_documents(data_files(Path(path))) for path in paths
        )
        texts = objective == "sft" and all(
            row_format(path, tokenizer, how) == "text"
            for path, how in zip(paths, hows, strict=True)
        )
        common = rows[min(int(0.98 * len(rows)), len(rows) - 1)]
        length = next((b for b in _BUCKETS if b >= common), _BUCKETS[-1])
        if (texts or documents) and common > _LONG:
            length = _WINDOW
        length = min(length, limit)  # nearly all rows fit in, if the model and most GPUs take it
        return cls(dataset, objective, rows, documents, texts and not documents, length, limit)

    def windows(self, length: int) -> list[int]:
        """Tokens of the rows that are learnt from: documents and texts are cut into several."""
        if not (self.are_texts or self.are_documents):
            return self.lengths
        starts = [(n, begin) for n in self.lengths for begin in (0, *range(length, n - 1, length))]
        return [min(length, n - begin) for n, begin in starts]

    @property
    def is_packable(self) -> bool:
        """Whether rows may share one as they are: documents fill theirs, and pairs stay apart."""
        return not self.are_documents and self.objective == "sft"

    @property
    def is_learnt_at_the_end(self) -> bool:
        """Whether more rows have something to learn in their last tokens than in their first."""
        length = self.length
        first = sum(learns(example.labels[:length].tolist()) for example in self.dataset)
        last = sum(learns(example.labels[-length:].tolist()) for example in self.dataset)
        return not (self.are_documents or self.are_texts) and last > first


def files_apart(path: str) -> list[str]:
    """A folder's files one by one, where their rows have not all the same keys; else the path."""
    place = Path(path)
    if not is_dir(place):
        return [path]
    files = data_files(place)
    if holds_documents(files):
        return [path]
    keys = [(first_row(file) or {}).keys() for file in files]
    return [path] if all(each == keys[0] for each in keys) else [str(file) for file in files]


def columns_by_path(paths: Sequence[str], columns: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Which of the named columns each data set has.

    A column that none has is taken for all of them, so that reading says what is wrong.
    """
    rows = [first_row(path) or {} for path in paths]
    nowhere = {name for name in columns.values() if not any(name in row for row in rows)}
    return [
        {key: name for key, name in columns.items() if name in row or name in nowhere}
        for row in rows
    ]


def objective_of(paths: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """What the data's rows are for, whose columns may have names of their own."""
    objectives = [infer_objective(path, names) for path, names in zip(paths, columns, strict=True)]
    for path, objective in zip(paths, objectives, strict=True):
        if objective != objectives[0]:
            raise ConfigError(
                f"{path} has rows for train.objective: {objective}, and {paths[0]} for "
                f"{objectives[0]}: a run has one objective, so name those of one kind"
            )
    return objectives[0]


# ---- batches -------------------------------------------------------------------------------------

EXAMPLES_OF_A_STEP = 16  # neither noisy nor slow to begin with
_LEAST_STEPS = 100  # of a run; fewer teach little, however large they are
_EPOCHS = ((5000, 1), (2000, 2), (300, 3), (100, 5), (0, 10))  # by the least number of examples
_PACKED_LENGTH = 512  # that short examples share; attention costs more in longer rows
_BUSY = {True: 1024, False: 16_384}  # tokens of a micro-batch, past which none is faster: is_cpu
_ENOUGH = 1024  # tokens of a micro-batch that are worth more than a longer one, checkpointed

Fits = Callable[[int, int, bool], bool]
"""Whether so many rows of so many tokens fit, checkpointed or not."""


@dataclass(frozen=True)
class FirstBatches:
    """How a first run cuts its data."""

    epochs: int  # passes over the data
    packing: bool  # whether examples share rows
    length: int  # tokens of a row
    examples_per_row: float  # about how many examples share one
    rows: int  # rows of a micro-batch
    micro_batches: int  # micro-batches of a step
    checkpointing: bool  # whether layers are recomputed in the backward pass
    steps: int  # steps of the run
    has_room: bool  # whether even the smallest micro-batch fits


def first_batches(
    lengths: Sequence[int], length: int, limit: int, fits: Fits, *, is_cpu: bool, packable: bool,
    is_bounded: bool = False,
) -> FirstBatches:  # fmt: skip
    """Chooses them."""
    epochs = next(epochs for least, epochs in _EPOCHS if len(lengths) >= least)
    examples = examples_of_a_step(len(lengths) * epochs)
    packed = packed_length(lengths, length, limit, examples) if packable else None
    cut = np.minimum(np.array(lengths, np.int64), packed or length)
    num_rows = len(pack(cut, packed)) if packed else len(lengths)
    per_row = len(lengths) / num_rows
    rows_of_a_step = max(1, round(examples / per_row))
    longest = packed or bucket_length(int(cut.max()), length)
    rows, checkpointing, has_room = _micro_batch(
        rows_of_a_step, longest, fits, _BUSY[is_cpu], is_bounded=is_bounded
    )
    return FirstBatches(
        epochs=epochs,
        packing=packed is not None,
        length=packed or length,
        examples_per_row=per_row,
        rows=rows,
        micro_batches=rows_of_a_step // rows,
        checkpointing=checkpointing,
        steps=epochs * -(-num_rows // rows_of_a_step),
        has_room=has_room,
    )


def examples_of_a_step(seen: int) -> int:
    """Sixteen, or fewer where a run would have too few steps: a power of two."""
    examples = EXAMPLES_OF_A_STEP
    while examples > 1 and seen < _LEAST_STEPS * examples:
        examples //= 2
    return examples


def packed_length(lengths: Sequence[int], length: int, limit: int, examples: int) -> int | None:
    """Tokens of rows that short examples share; None where too few would."""
    mean = sum(lengths) / len(lengths)
    room = min(limit, max(length, _PACKED_LENGTH), int(mean * examples))
    while length < room and 2 * length <= room:
        length *= 2
    return length if length <= room and length >= 2 * mean else None


def _micro_batch(
    rows: int, length: int, fits: Fits, busy: int, *, is_bounded: bool
) -> tuple[int, bool, bool]:
    """Rows of a micro-batch, whether it is checkpointed, and whether it fits at all."""
    divisors = [n for n in range(rows, 0, -1) if rows % n == 0]
    sizes = [n for n in divisors if n * length <= busy] or [1]
    enough = min(sizes[0] * length, _ENOUGH)
    plain = next((n for n in sizes if fits(n, length, False)), 0)
    if plain * length >= enough:
        return plain, False, True
    if is_bounded:  # what more rows would take, layers have that are not computed twice
        least = min(n for n in sizes if n * length >= enough)
        sizes = [n for n in sizes if n <= least]
    checkpointed = next((n for n in sizes if fits(n, length, True)), 0)
    if plain >= checkpointed and plain:
        return plain, False, True
    return max(checkpointed, 1), True, checkpointed > 0


# ---- the settings --------------------------------------------------------------------------------

_UNKNOWN = 8 << 30  # bytes of a card that is not there to be asked
_SPARE = 0.8  # of a card's memory, that is planned with: drivers and screens take some
_RUNS = 1000  # of one name in a folder, at most
_SHARE = 0.5  # of the machine's memory, which others need, too


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that a run is planned for."""

    target: DeviceSpec  # the device
    nbytes: int  # bytes of its memory that are planned with
    words: str  # what that is, in a comment
    is_bounded: bool = False  # whether training will know it, too

    @classmethod
    def here(cls) -> MemoryBudget:
        """The memory of the GPU that a run would take; of a common one where there is none."""
        try:
            device = Device()
        except QLoRAError:
            return cls(DeviceSpec(), int(_SPARE * _UNKNOWN), "8 GiB, since no GPU is here")
        target, size = DeviceSpec.of(device), memory.memory_size(device)
        if size is None:
            words = f"8 GiB, since {device.name} does not tell its memory"
            return cls(target, int(_SPARE * _UNKNOWN), words)
        of = "free memory" if device.is_cpu else device.name
        share = _SHARE if device.is_cpu else _SPARE
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
    """Chooses the settings of a first run; returns a title and them.

    Several data sets make a mixture. The memory to plan for is by default that of the GPU here;
    ``columns`` are the rows' own names by their format's, as ``data.columns`` has them.
    """
    named = [train] if isinstance(train, str) else list(train)
    paths = [file for path in named for file in files_apart(path)]
    room = room or MemoryBudget.here()
    folder = ModelFolder.without_weights(model)
    pretrained = Pretrained.from_config(folder.config)
    tokenizer = Tokenizer.from_folder(folder.text_folder)
    by_path = columns_by_path(paths, columns or {})
    objective = objective_of(paths, by_path)
    names = (
        infer_chat_template(path, tokenizer, objective, own)
        for path, own in zip(paths, by_path, strict=True)
    )
    template = next((name for name in names if name is not None), None)
    data = FirstData.read(paths, folder, tokenizer, template, by_path)
    options = training_options(TrainConfig.model_validate({"objective": objective}))
    sides = 2 if objective == "dpo" else 1

    step = options.step("train", 1, 1)
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
        Setting("quant.scheme", "nf4", "4 bits a weight; none keeps frozen layers as they are"),
        Setting("lora.r", 16, "rank: more can learn more, and takes more memory"),
        Setting("lora.lora_alpha", 32, "the adapter counts lora_alpha / r times"),
        Setting("lora.lora_dropout", 0.0),
        Setting("lora.target_modules", "all-linear", "or a list: [q_proj, v_proj]"),
        *_data(data, batches, paths, held_out, template, by_path),
        *_train(batches, room, objective),
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
    all_rows = "each gives all rows; add weight: or rows: to take a share"
    settings = [
        Setting("data.train", paths[0])
        if len(paths) == 1
        else Setting("data.sources", sources, all_rows),
        Setting("data.eval", held_out, "loss on it is measured")
        if held_out is not None
        else Setting("data.eval_split", 0.05, "a part to measure the loss on", is_active=False),
    ]
    if alike and columns[0]:
        settings.append(Setting("data.columns", dict(columns[0]), "what the rows' columns are"))
    if template is not None:
        settings.append(
            Setting("data.chat_template", template, "fits the tokenizer, which has none")
        )
    longest = f"tokens; the longest row has {data.lengths[-1]:,}"
    settings.append(Setting("data.max_seq_length", batches.length, longest))
    if data.are_texts and data.lengths[-1] > batches.length:
        whole = "longer texts are learnt whole, in several rows"
        settings.append(Setting("data.truncation", "windows", whole))
    if data.is_learnt_at_the_end:
        settings.append(Setting("data.truncation", "keep_end", "longer rows keep what is learnt"))
    mean = sum(data.lengths) / len(data.lengths)
    why = "each row of the data has one of its own"
    if data.objective == "dpo":
        why = "each answer of a pair has a row of its own"
    if batches.packing:
        why = f"rows have {mean:,.0f} tokens: {batches.examples_per_row:.1f} of them share one"
    return [*settings, Setting("data.packing", batches.packing, why)]


def _train(batches: FirstBatches, room: MemoryBudget, objective: str) -> list[Setting]:
    rows = batches.rows * batches.micro_batches
    step = f"a step has {rows} row{'s' if rows > 1 else ''}"
    if batches.packing:
        step += f" with about {rows * batches.examples_per_row:.0f} of the data's"
    fitting = f"fits into {room.words}"
    if not batches.has_room:
        fitting = f"more than {room.words}: see `qlora-wgpu estimate`"
    recomputes, why = batches.checkpointing, "activations fit: nothing is computed twice"
    if recomputes and room.is_bounded:
        recomputes, why = False, "layers are kept as far as they fit; the others are computed twice"
    elif recomputes:
        why = "recomputes layers: slower, much less memory"
    epochs = f"about {batches.steps:,} steps"
    return [
        *_objective(objective),
        Setting("train.num_train_epochs", batches.epochs, epochs),
        Setting("train.per_device_train_batch_size", batches.rows, fitting),
        Setting("train.gradient_accumulation_steps", batches.micro_batches, step),
        Setting("train.gradient_checkpointing", recomputes, why),
    ]


def _objective(objective: str) -> list[Setting]:
    """What is learnt, where it is not the rows as they are."""
    if objective == "sft":
        return []
    why = "pairs of answers; orpo does without the reference"
    if objective == "kto":
        why = "answers that are good or bad"
    beta = Setting("train.beta", 0.1, "how close to the reference the model stays")
    return [Setting("train.objective", objective, why), beta]


def _optim(hidden_size: int, objective: str) -> list[Setting]:
    rate, why = first_learning_rate(hidden_size), "smaller ones take more"
    if objective != "sft":
        rate, why = rate / 10, "a tenth of what rows by themselves take"
    return [
        Setting("optim.learning_rate", rate, f"for a model of width {hidden_size:,}: {why}"),
        Setting("optim.lr_scheduler_type", "cosine"),
        Setting("optim.warmup_ratio", 0.03),
    ]


def _output(batches: FirstBatches, name: str) -> list[Setting]:
    often = max(5, min(50, batches.steps // 4))
    return [
        Setting("eval.eval_steps", often, "with held-out data"),
        Setting("output.dir", _free_run(f"runs/{_plain(name)}")),
        Setting("output.save_steps", often),
    ]


def _free_run(name: str) -> str:
    """The folder of a run that is not there yet: this, or this with a number."""
    for folder in (name, *(f"{name}-{number}" for number in range(2, _RUNS))):
        try:
            refuse_existing_run(Path(folder))
        except ConfigError:
            continue
        return folder
    return name


def first_learning_rate(hidden_size: int) -> float:
    """A peak learning rate for LoRA on all linear layers.

    The rule of "LoRA Without Regret" (Schulman et al., 2025), ten times full fine-tuning's rate
    and falling with the model's width as its fit to Llamas has it, rounded to 1, 2, 3 or 5.
    """
    rate = 5e-4 * (2000 / hidden_size) ** 0.78
    power = 10.0 ** math.floor(math.log10(rate))
    nearest = min((1, 2, 3, 5, 10), key=lambda digit: abs(math.log(digit * power / rate)))
    return float(f"{min(max(nearest * power, 1e-4), 5e-3):.1e}")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip(".") or "run"
