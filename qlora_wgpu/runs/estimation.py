"""The memory that training takes of a device, and what fits, from config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu.bench.workload import find_shape
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.checkpoint.manifest import read_json_object
from qlora_wgpu.config import Config, DataConfig, LoraConfig, ModelConfig, QuantConfig, TrainConfig
from qlora_wgpu.data.new_tokens import extended_tokenizer
from qlora_wgpu.errors import ConfigError, QLoRAError, TokenizerError, option
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.budget import Fit
from qlora_wgpu.model.memory_plan import copied_bytes
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.presence import exists, is_file
from qlora_wgpu.runs.data import RunData, prepare
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.run_memory import ClusterMemory
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.workload import (
    CardPlan,
    Fits,
    Target,
    Workload,
    fitted_within,
    plans_for_cards,
    remedy_for,
    what_fits,
)
from qlora_wgpu.training import training_options

_MOST_PLANNED = 1 << 24  # tokens of a micro-batch


@dataclass(frozen=True)
class Estimate:
    """The memory that training takes.

    Attributes:
        workload: The training that was planned.
        device: For which GPU.
        memory: Bytes on it by kind.
        budget: Bytes that there are, if they or the run's ``device.memory`` were told.
        fits: The sizes that have room in them.
        device_memory: Bytes of the GPU's memory, where they are known.
        remedy: Settings with which it would fit into the budget, or without one into the GPU's
            memory, as ``train`` takes them: ``"train.gradient_checkpointing=true"``. None where it
            fits, empty where nothing helps.
        fitted: Where it does not fit, how ``train`` keeps within the budget all the same, with some
            of it in host memory; None where it cannot, or need not.
        cards: The same training on cards of the usual sizes, where they were asked for.
        on_cluster: What a run with ``cluster.scheduler`` takes of its devices.
        text_copies: Bytes that copies of the weights take beside the model when its texts are
            generated here later; only software GPUs have them.
    """

    workload: Workload
    device: str
    memory: Counter[str]
    budget: int | None = None
    fits: Fits | None = None
    device_memory: int | None = None
    remedy: str | None = None
    fitted: Fit | None = None
    cards: tuple[CardPlan, ...] = ()
    on_cluster: ClusterMemory | None = None
    text_copies: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.memory.values())

    def __repr__(self) -> str:
        """What is planned and what it takes, in a line."""
        work = self.workload
        return (
            f"{type(self).__name__}({self.total / 2**20:,.1f} MiB on {self.device}; r "
            f"{work.lora.r}, {work.batch} x {work.seq:,} tokens)"
        )


def estimate(
    target: Config | Mapping[str, Any] | str | PathLike[str],
    *,
    overrides: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    rank: int | None = None,
    checkpointing: bool | None = None,
    scheme: Literal["nf4", "none"] | None = None,
    compute_dtype: Literal["bfloat16", "float32"] | None = None,
    budget: int | None = None,
    by_data: bool = False,
    cards: bool = False,
) -> Estimate:
    """Plans the memory of training; needs no GPU, and reads only the form of weights.

    Args:
        target: A run's configuration (a ``Config``, a YAML file's path, a mapping), or the path of
            a config.json or model folder, a model's name on the hub, of which no weights are
            downloaded, or a shape's name such as ``"llama-3.1-8b"``.
        overrides: Texts such as ``"lora.r=8"``, for a YAML file.
        batch: Rows of a micro-batch, instead of the target's (1 without a run).
        seq: Tokens of a row, instead of the target's (1,024 without a run).
        rank: The adapter's rank, instead of the target's.
        checkpointing: Whether layers are recomputed in the backward, instead of the target's.
        scheme: How frozen layers are stored, instead of the target's.
        compute_dtype: Type of matmul operands, instead of the target's.
        budget: Bytes of memory available, instead of the run's ``device.memory``, for which the
            largest batch and sequence are found.
        by_data: Whether to plan a run's longest batch by its data, if that is here, as training
            does; else by ``data.max_seq_length``.
        cards: Whether to plan it for cards from 4 to 80 GB, too, which takes seconds.

    Raises:
        ConfigError: If the target is wrong or absurdly large.
        CheckpointError: If weights are there, but damaged.
        UnsupportedModelError: If the model asks for something that is not computed here.
        OutOfMemoryError: If a tensor has more elements than kernels can count.
    """
    for name, value in (("batch", batch), ("seq", seq), ("rank", rank), ("budget", budget)):
        _check_positive(name, value)
    is_run = not isinstance(target, str | PathLike) or Path(target).suffix in (".yaml", ".yml")
    settings = as_config(target, overrides) if is_run else None
    if settings is not None:
        here = Target.here(settings.device)
        length = settings.data.max_seq_length
        if by_data and seq is None:
            length = _longest_batch(settings)
        workload = _workload_of_run(settings, length)
    else:
        here, workload = Target.here(), _workload_of_shape(str(target), overrides)
    workload = _changed(workload, batch, seq, rank, scheme)
    if checkpointing is not None:
        workload = replace(workload, checkpointing=checkpointing)
    if compute_dtype is not None:
        workload = replace(workload, compute_dtype=compute_dtype)
    if workload.batch * workload.seq > _MOST_PLANNED:
        raise ConfigError(
            f"{workload.batch} rows of {workload.seq} tokens are more than {_MOST_PLANNED:,} "
            f"tokens at once, which is not planned: lower {option('batch', ...)} or "
            f"{option('seq', ...)}"
        )
    allowed = None if settings is None else settings.device.memory_bytes
    asked = "auto" if settings is None else settings.device.keep_dequantized
    totals = here.totals(workload, kept=asked is True)
    budget = allowed if budget is None else budget
    layout = here.as_kept(totals.layout, workload.options, asked, budget)
    memory = layout.memory(workload.options, layout.sized(workload.options).plan)
    fits = None if budget is None else what_fits(totals, workload, budget)
    remedy, fitted = None, None
    room = here.nbytes if budget is None else budget
    if room is not None and sum(memory.values()) > room:
        remedy = remedy_for(totals, workload, room)
        if budget is not None or not here.is_host:
            fitted = fitted_within(totals.layout, workload, room)
            if fitted is not None and asked is True and not fitted.offload.dequantized:
                fitted = None
    plans = plans_for_cards(workload) if cards else ()
    on_cluster = None
    if settings is not None and settings.cluster.scheduler is not None:
        on_cluster = ClusterMemory.of(settings, layout, workload.options)
    return Estimate(
        workload, here.name, memory, budget, fits, here.nbytes, remedy, fitted, plans, on_cluster,
        copied_bytes(totals.layout, allowed),
    )  # fmt: skip


def _check_positive(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        what = "a number of bytes" if name == "budget" else "a whole number"
        raise ConfigError(f"{option(name, ...)} must be {what} above zero, got {value!r}")


def _changed(
    workload: Workload, batch: int | None, seq: int | None, rank: int | None, scheme: str | None
) -> Workload:
    lora, quant = workload.lora, workload.quant
    return replace(
        workload,
        batch=workload.batch if batch is None else batch,
        seq=workload.seq if seq is None else seq,
        lora=lora if rank is None else lora.model_copy(update={"r": rank}),
        quant=quant if scheme is None else quant.model_copy(update={"scheme": scheme}),
    )


def _workload_of_shape(target: str, overrides: Sequence[str]) -> Workload:
    if overrides:
        raise ConfigError(
            f"overrides such as {overrides[0]} belong to a YAML; for {target} there are options, "
            "see qlora-wgpu estimate --help"
        )
    train = TrainConfig()  # what a run without other settings has
    return Workload(
        _shape(target),
        LoraConfig(),
        QuantConfig(),
        train.compute_dtype,
        train.per_device_train_batch_size,
        DataConfig().max_seq_length,
        train.gradient_checkpointing,
        train.gradient_accumulation_steps,
    )


def _workload_of_run(settings: Config, length: int) -> Workload:
    train = settings.train
    return Workload(
        _with_new_tokens(_base(base_in(settings)), settings.model),
        settings.lora,
        settings.quant,
        train.compute_dtype,
        settings.rows_at_once,
        length,
        train.gradient_checkpointing,
        train.gradient_accumulation_steps,
        AdapterDtypes.of(settings),
        training_options(train).objective,
        settings.rows_at_once // train.per_device_train_batch_size,
    )


def _with_new_tokens(base: Pretrained, model: ModelConfig) -> Pretrained:
    """The base with the tokens that a run adds; where no tokenizer is there, all are new rows."""
    if not model.adds_tokens:
        return base
    try:
        assert base.folder is not None
        texts = base.folder.text_folder
        tokenizer = extended_tokenizer(texts, model.add_tokens, model.add_special_tokens)
    except (AssertionError, TokenizerError):
        rows = base.architecture.vocab_size
        count = rows + len(model.add_tokens) + len(model.add_special_tokens)
        return base.resized(count, tuple(range(rows, count)))
    return base.resized(tokenizer.count, tokenizer.new_tokens)


def _longest_batch(settings: Config) -> int:
    """Tokens of a run's longest batch, by its data if that is here, as training plans it."""
    paths = [part.train for part in settings.data.parts()]
    if not all(path is not None and exists(Path(path).expanduser()) for path in paths):
        return settings.data.max_seq_length
    try:
        train = prepare(settings)
        measures = settings.data.eval is not None or settings.data.eval_split is not None
        held_out = prepare(settings, held_out=True).dataset if measures else None
        return RunData(train.dataset, held_out, train.plan, settings.data.max_seq_length).length
    except QLoRAError:  # which training will tell of
        return settings.data.max_seq_length


def _shape(text: str) -> Pretrained:
    if name_on_hub(text) is not None and not exists(Path(text)):
        return _base(text)
    shape = find_shape(text)
    if shape.weights == "random":
        return Pretrained.from_config(shape.config)
    return Pretrained.from_folder(shape.folder, shape.name)


def _base(path: str) -> Pretrained:
    """A run's base; its weights need not be there, but tell which layers they hold in 4 bits."""
    if is_file(Path(path).expanduser()):  # in GGUF, of which headers alone are read
        return Pretrained.open(path)
    inside = Path(path).expanduser() / "config.json"
    if not is_file(inside):
        return Pretrained.from_config(ModelFolder.without_weights(path).config)
    if any(inside.parent.glob("*.safetensors")):
        return Pretrained.open(path)
    return Pretrained.from_config(read_json_object(inside))
