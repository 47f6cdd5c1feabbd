"""The settings of a first run, chosen for its model, its data and the device, each with its why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig, TrainConfig
from qlora_wgpu.config.commented_yaml import Setting
from qlora_wgpu.config.paths import DataPlace
from qlora_wgpu.data import Tokenizer, chosen_template
from qlora_wgpu.errors import ConfigError, QLoRAError
from qlora_wgpu.gpu import memory as memory
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.first_batches import FirstBatches, first_batches
from qlora_wgpu.runs.first_data import FirstData, columns_by_path, files_apart, objective_of
from qlora_wgpu.runs.workload import Target, Workload
from qlora_wgpu.training import refuse_existing_run, training_options

_UNKNOWN = 8 << 30  # bytes of a card that is not there to be asked
_SPARE = 0.8  # of a card's memory is planned with: drivers and screens take some
_RUNS = 1000  # of one name, in a folder
_SHARE = 0.5  # of the machine's, which others need, too


@dataclass(frozen=True)
class Room:
    """The memory that a run is planned for.

    Attributes:
        target: The device.
        nbytes: Bytes of its memory that are planned with.
        words: What that is, in a comment.
        is_cpu: Whether it is a software GPU.
        is_bounded: Whether training will know it, too.
    """

    target: Target
    nbytes: int
    words: str
    is_cpu: bool
    is_bounded: bool = False

    @classmethod
    def here(cls) -> Room:
        """The memory of the GPU that a run would take; of a common one where there is none."""
        try:
            device = Device()
        except QLoRAError:
            return cls(Target(), int(_SPARE * _UNKNOWN), "8 GiB, since no GPU is here", False)
        target, size = Target.of(device), memory.memory_size(device)
        if size is None:
            words = f"8 GiB, since {device.name} does not tell its memory"
            return cls(target, int(_SPARE * _UNKNOWN), words, device.is_cpu)
        of = "free memory" if device.is_cpu else device.name
        share = _SHARE if device.is_cpu else _SPARE
        words = f"{share:.0%} of the {size / 2**30:,.0f} GiB of {of}"
        is_bounded = memory.room(device) is not None
        return cls(target, int(share * size), words, device.is_cpu, is_bounded)


def first_settings(
    model: str,
    train: str | Sequence[str],
    held_out: str | None,
    room: Room | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[str, list[Setting]]:
    """Chooses the settings of a first run.

    Args:
        model: Folder or hub name of the base.
        train: Path or hub name of the data; several make a mixture.
        held_out: Path or hub name of held-out data.
        room: The memory to plan for; by default that of the GPU here.
        columns: The rows' own names by their format's, as ``data.columns`` has them.

    Returns:
        A title, and the settings in their order.

    Raises:
        CheckpointError: If the model is not there.
        UnsupportedModelError: If it asks for something that is not computed here.
        DataError: If the data cannot be read.
        ConfigError: If it cannot be mixed.
    """
    named = [train] if isinstance(train, str) else list(train)
    paths = [file for path in named for file in files_apart(path)]
    room = room or Room.here()
    folder = ModelFolder.without_weights(model)
    pretrained = Pretrained.from_config(folder.config)
    tokenizer = Tokenizer.from_folder(folder.text_folder)
    by_path = columns_by_path(paths, columns or {})
    objective = objective_of(paths, by_path)
    names = (
        chosen_template(path, tokenizer, objective, own)
        for path, own in zip(paths, by_path, strict=True)
    )
    template = next((name for name in names if name is not None), None)
    data = FirstData.read(paths, folder, tokenizer, template, by_path)
    options = training_options(TrainConfig(objective=objective))
    workload = Workload(
        pretrained, LoraConfig(), QuantConfig(), "bfloat16", 1, 1, False,
        objective=options.objective,
    )  # fmt: skip
    sides = 2 if objective == "dpo" else 1

    @cache
    def fits(rows: int, length: int, checkpointing: bool) -> bool:
        planned = replace(workload, batch=sides * rows, seq=length, checkpointing=checkpointing)
        total = room.target.total(planned)
        return total is not None and total <= room.nbytes

    batches = first_batches(
        data.windows(data.length),
        data.length,
        data.limit,
        fits,
        is_cpu=room.is_cpu,
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
        *_lora(),
        *_data(data, batches, paths, held_out, template, by_path),
        *_train(batches, room, objective),
        *_optim(pretrained.architecture.hidden_size, objective),
        *_output(batches, Path(model).name),
    ]
    return title, settings


def _lora() -> list[Setting]:
    return [
        Setting("lora.r", 16, "rank: more can learn more, and takes more memory"),
        Setting("lora.lora_alpha", 32, "the adapter counts lora_alpha / r times"),
        Setting("lora.lora_dropout", 0.0),
        Setting("lora.target_modules", "all-linear", "or a list: [q_proj, v_proj]"),
    ]


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


def _train(batches: FirstBatches, room: Room, objective: str) -> list[Setting]:
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
