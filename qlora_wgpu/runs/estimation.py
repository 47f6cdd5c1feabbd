"""The memory that training takes of a device, and what fits, from config.json alone."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu.bench.measure import training_speed
from qlora_wgpu.bench.workload import config_of, find_shape
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.config import Config, DeviceConfig, ModelConfig
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data.new_tokens import extended_tokenizer
from qlora_wgpu.errors import ConfigError, OutOfMemoryError, QLoRAError, TokenizerError, option
from qlora_wgpu.extras import install_command
from qlora_wgpu.files import exists, is_file
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import memory_size, room_of
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import GIB
from qlora_wgpu.model.budget import Fit, Search
from qlora_wgpu.model.memory_plan import copied_bytes, with_kept
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs.data import RunData, prepare
from qlora_wgpu.runs.opening import device_of
from qlora_wgpu.runs.placement import kept_dequantized
from qlora_wgpu.runs.resolve import base_in
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.workload import DeviceSpec, Total, TrainingWorkload, owner_memory, totals

# ---- an estimate ---------------------------------------------------------------------------------

_MOST_PLANNED = 1 << 24  # tokens of a micro-batch


@dataclass(frozen=True)
class Fits:
    """The largest batch and sequence that a budget has room for."""

    batch: int  # most rows at the planned length; 0 for none
    seq: int  # most tokens of one row; 0 for none


@dataclass(frozen=True)
class GpuPlan:
    """A training on a card of some size."""

    gib: int  # the card's memory in GiB
    room: int  # bytes of it that training may take
    # The longest of ``LENGTHS`` that a row may have with all weights on the card, layers
    # recomputed; 0 for none
    resident_seq: int
    # The same with all in host memory that can be. The next longer one has no room in any way
    longest_seq: int
    fitted: Fit | None  # how the planned training keeps to the card; None where it cannot
    # How many times as long its step takes as with everything on a card and nothing recomputed, if
    # no traffic is hidden; None where it does not fit
    slow_down: float | None


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes that a run takes of a cluster's devices."""

    worker: int  # of each worker's, while it computes the longest step
    owner: int  # of the owner's


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

    workload: TrainingWorkload
    device: str
    memory: Counter[str]
    budget: int | None = None
    fits: Fits | None = None
    device_memory: int | None = None
    remedy: str | None = None
    fitted: Fit | None = None
    cards: tuple[GpuPlan, ...] = ()
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
        if value is not None and (not isinstance(value, int) or value < 1):
            what = "a number of bytes" if name == "budget" else "a whole number"
            raise ConfigError(f"{option(name, ...)} must be {what} above zero, got {value!r}")
    is_run = not isinstance(target, str | PathLike) or Path(target).suffix in (".yaml", ".yml")
    settings = as_config(target, overrides) if is_run else Config(model=ModelConfig(path="."))
    here = _target(settings.device)
    length = settings.data.max_seq_length
    if is_run:
        length = _longest_batch(settings) if by_data and seq is None else length
        base = _with_new_tokens(_base(base_in(settings)), settings.model)
    else:
        base = _shape(str(target), overrides)
    workload = TrainingWorkload.of(settings, base, length)
    sizes: dict[str, Any] = {"batch": batch, "seq": seq, "checkpointing": checkpointing}
    step = replace(workload.step, **{n: size for n, size in sizes.items() if size is not None})
    lora, quant = workload.lora, workload.quant
    workload = replace(
        workload,
        step=step,
        lora=lora if rank is None else lora.model_copy(update={"r": rank}),
        quant=quant if scheme is None else quant.model_copy(update={"scheme": scheme}),
        compute_dtype=compute_dtype or workload.compute_dtype,
    )
    if step.batch * step.seq > _MOST_PLANNED:
        raise ConfigError(
            f"{step.batch} rows of {step.seq} tokens are more than {_MOST_PLANNED:,} "
            f"tokens at once, which is not planned: lower {option('batch', ...)} or "
            f"{option('seq', ...)}"
        )
    allowed, asked = settings.device.memory_bytes, settings.device.keep_dequantized
    budget = allowed if budget is None else budget
    layout = workload.layout(here)
    if asked is True:
        layout = with_kept(layout)
    kept = layout
    if asked == "auto" and (budget is not None or here.is_cpu):
        kept = kept_dequantized(
            layout, asked, lambda other: other.total(step), limit=budget, is_cpu=here.is_cpu
        )
    memory = kept.memory(step, kept.sized(step).plan)
    total = totals(layout, step)
    fits = None if budget is None else _what_fits(total, step.seq, budget)
    remedy, fitted = None, None
    room = here.nbytes if budget is None else budget
    if room is not None and memory.total() > room:
        remedy = _remedy(total, workload, room)
        if budget is not None or not here.is_cpu:
            search = Search(layout, step, workload.accumulation)
            fitted = _fitted(search, room)
            if fitted is not None and asked is True and not fitted.offload.dequantized:
                fitted = None
    plans = tuple(plans_for_cards(workload)) if cards else ()
    on_cluster = None
    if settings.cluster.scheduler is not None:
        worker = kept.changed(forms=workload.on_worker.forms)
        of_worker = worker.memory(step, worker.sized(step).plan)
        of_owner = owner_memory(kept, workload.optim)
        on_cluster = ClusterMemory(of_worker.total(), of_owner.total())
    return Estimate(
        workload, here.name, memory, budget, fits, here.nbytes, remedy, fitted, plans, on_cluster,
        copied_bytes(layout, allowed),
    )  # fmt: skip


def _target(settings: DeviceConfig) -> DeviceSpec:
    """The GPU that a run would take here; a common one where there is none."""
    try:
        return DeviceSpec.of(device_of(settings))
    except QLoRAError:
        return DeviceSpec()


def _fitted(search: Search, room: int) -> Fit | None:
    """How training keeps to so many bytes; None where it cannot."""
    try:
        return search.within(room)
    except OutOfMemoryError:
        return None


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


def _shape(text: str, overrides: Sequence[str]) -> Pretrained:
    if overrides:
        raise ConfigError(
            f"overrides such as {overrides[0]} belong to a YAML; for {text} there are options, "
            "see qlora-wgpu estimate --help"
        )
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


# ---- what fits into a budget ---------------------------------------------------------------------

MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
# In which rows are tried: so far apart that a longer one takes more. Between neighbours that need
# not be so, since products of more rows are cut along their reduction less.
LENGTHS = (
    *range(64, 1024, 64),
    *(
        length
        for first in (1024 << n for n in range(6))
        for length in range(first, 2 * first, first // 16)
    ),
    MOST_TOKENS,
)


def _what_fits(total: Total, seq: int, budget: int) -> Fits:
    """The most rows at the planned length, and the most tokens of one row."""
    rows = range(1, max(MOST_TOKENS // seq, 1) + 1)
    return Fits(
        largest_fitting(lambda n: total(batch=n), budget, rows),
        largest_fitting(lambda n: total(batch=1, seq=n), budget, LENGTHS),
    )


def _remedy(total: Total, workload: TrainingWorkload, budget: int) -> str:
    """The settings that cost least with which a workload fits; empty where none do.

    A smaller micro-batch changes nothing that is learnt and little of the speed, checkpointing
    costs about a third of it, and shorter rows lose what they cut.
    """
    step = workload.step
    for recomputes in dict.fromkeys((step.checkpointing, True)):
        fewer = partial(total, checkpointing=recomputes)
        rows = range(1, step.batch + 1)
        if batch := largest_fitting(lambda n: fewer(batch=n), budget, rows):  # noqa: B023
            return _in_keys(workload, replace(step, batch=batch, checkpointing=recomputes))
    shorter = [length for length in LENGTHS if length < step.seq]
    seq = largest_fitting(lambda n: total(batch=1, seq=n, checkpointing=True), budget, shorter)
    least = replace(step, batch=1, seq=seq, checkpointing=True)
    return _in_keys(workload, least) if seq else ""


def _in_keys(workload: TrainingWorkload, step: StepOptions) -> str:
    """How a step differs from a workload's, as it is written behind ``train run.yaml``."""
    keys, asked, sides = [], workload.step, workload.sides
    batch = max(step.batch // sides, 1)
    if batch * sides != asked.batch:
        accumulation = -(-asked.batch * workload.accumulation // (batch * sides))
        keys.append(f"train.per_device_train_batch_size={batch}")
        keys.append(f"train.gradient_accumulation_steps={accumulation}")
    if step.checkpointing != asked.checkpointing:
        keys.append("train.gradient_checkpointing=true")
    if step.seq != asked.seq:
        keys.append(f"data.max_seq_length={step.seq}")
    return " ".join(keys)


def largest_fitting(total: Callable[[int], int | None], budget: int, sizes: Sequence[int]) -> int:
    """The largest of rising sizes whose total fits, where totals rise with the sizes; 0 for none.

    Totals, None for too many bytes to count, grow about linearly, so few are made: that of the size
    that is told, and of the next larger one, which does not fit, are among them.
    """
    low, high, made = -1, len(sizes), dict[int, int]()
    guess = 0
    while high - low > 1:
        taken = total(sizes[guess])
        made[sizes[guess]] = 2 * budget if taken is None else taken
        if taken is not None and taken <= budget:
            low = guess
        else:
            high = guess
        near = [sizes[i] for i in (low, high) if 0 <= i < len(sizes)]
        if len(near) == 1:  # nothing is there on the other side
            near = sorted(made, key=lambda size: abs(made[size] - budget))[:2]
        where = _where({size: made[size] for size in near}, budget)
        guess = min(max(bisect_right(sizes, where) - 1, low + 1), high - 1)
    return sizes[low] if low >= 0 else 0


def _where(made: dict[int, int], budget: int) -> float:
    """About the size that takes a budget, by the line through one or two of known totals."""
    (a, taken), *others = made.items()
    if not others:
        return max(min(8.0 * a, 2048.0), 1.1 * a * budget / taken)
    ((b, other),) = others
    slope = (other - taken) / (b - a)
    return a + (budget - taken) / slope if slope > 0 else 2 * max(a, b)


# ---- cards ---------------------------------------------------------------------------------------

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)  # GB, as cards are sold: 2**30 bytes each
FLOPS, BYTES = 1e13, 5e11  # a second, of products and of the card's memory
_FEW_LAYERS = 8
_NEARLY = 1.1  # ways that are alike differ by a smaller factor


def plans_for_cards(workload: TrainingWorkload) -> Iterator[GpuPlan]:
    """Plans a training for cards from 4 to 80 GB, until a card has room for everything.

    All cards are planned as a common GPU. Times are reckoned, never measured: operations over
    ``FLOPS``, bytes of the card's memory over ``BYTES``, traffic over ``LINK``, one after the
    other. So a slow-down is an upper bound for such a card.
    """
    layout, accumulation = workload.layout(DeviceSpec()), workload.accumulation
    row = replace(workload.step, batch=1, checkpointing=True)
    total, waiting = totals(layout, row), WaitingRows(layout, row)
    step = replace(workload.step, checkpointing=False)
    search = Search(layout, step, accumulation, (FLOPS, BYTES))
    seconds = accumulation * _computing(layout.sized(step).plan)
    for gib in SIZES:
        room = room_of(gib * GIB)
        fitted = _fitted(search, room)
        resident = largest_fitting(lambda n: total(seq=n), room, LENGTHS)
        slow_down = None
        if fitted is not None:
            plan = fitted.layout.sized(fitted.options).plan
            slow_down = (accumulation * _computing(plan) + fitted.seconds) / seconds
        longest = waiting.longest(room, resident)
        yield GpuPlan(gib, room, resident, longest, fitted, slow_down)
        if fitted is not None and not fitted.options.checkpointing and not fitted.moved:
            return


def _computing(plan: Plan) -> float:
    return plan.flops / FLOPS + plan.memory_traffic / BYTES


class WaitingRows:
    """What rows of several lengths take with all in host memory that can wait."""

    def __init__(self, layout: ModelPlan, row: StepOptions) -> None:
        self._layout, self._row = layout, row
        # A way that takes about the least, and one that may take a little less, with the head on
        # the device and without: its blocks, and gradients of all rows, may take more than it.
        self._ways: list[tuple[Total, Total]] = []
        for head in layout.head_options:
            way = replace(OffloadPlan.least(layout.num_layers), streamed_head=head)
            first, other = (
                totals(layout.changed(offload=each), row)
                for each in (way, replace(way, remakes=False))
            )
            self._ways.append((first, other))

    def longest(self, room: int, found: int) -> int:
        """The longest row that has room, of those that are tried."""
        for first, _ in self._ways:
            longer = [length for length in LENGTHS if length > found]
            found = largest_fitting(lambda n: first(seq=n), room, longer) or found  # noqa: B023
        for seq in LENGTHS:
            if seq > found:
                if not self._fits_otherwise(seq, room):
                    break
                found = seq
        return found

    def _fits_otherwise(self, seq: int, room: int) -> bool:
        if self._layout.num_layers <= _FEW_LAYERS:  # any may be the least of small models
            return Search(self._layout, replace(self._row, seq=seq)).least().total <= room
        for first, other in self._ways:
            taken = first(seq=seq)
            if taken is not None and taken <= _NEARLY * room:
                less = other(seq=seq)
                if less is not None and less <= room:
                    return True
        return False


# ---- what a device means -------------------------------------------------------------------------

_SMALL = "smollm2-135m"
_SEQ = 2048
_SPARE = 0.9  # of a card's memory: drivers and screens take some
_EXAMPLE = 1000 * 200  # tokens: a thousand rows of two hundred
_LLAMA: dict[str, Any] = {**config_of("llama-3.1-8b"), "num_key_value_heads": 8}
# Dimensions alone, of the sizes that people speak of.
_SIZES: Mapping[str, dict[str, Any]] = {
    "70B": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64},
    "32B": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 27648,
            "num_hidden_layers": 64, "num_attention_heads": 40},
    "14B": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 48, "num_attention_heads": 40},
    "8B": _LLAMA,
    "1B": config_of("llama-3.2-1b"),
    "0.5B": config_of("qwen2.5-0.5b"),
    "135M": config_of(_SMALL),
}  # fmt: skip


def what_it_means(device: Device) -> str:
    """One or two sentences: of a GPU what fits, of the processor how long training takes."""
    return _of_processor(device) if device.is_cpu else _of_gpu(device)


def of_several(count: int) -> str:
    """A sentence about several GPUs of one machine; empty for one."""
    if count < 2:
        return ""
    return (
        f"This machine has {count} GPUs: `qlora-wgpu train run.yaml cluster.scheduler=local` "
        "trains on all of them, each with the whole base and a share of every step's micro-batches "
        f"({install_command('cluster')})."
    )


def _of_processor(device: Device) -> str:
    speed = training_speed(config_of(_SMALL), device)
    return (
        f"You have no GPU: training runs on the processor, at about {_rounded(speed):,} tokens/s "
        "for a model of 135M parameters (QLoRA, estimated from a few of its layers). A thousand "
        f"rows of 200 tokens take it about {_duration(_EXAMPLE / speed)}."
    )


def _of_gpu(device: Device) -> str:
    size = memory_size(device)
    if size is None:
        return (
            f"You have a GPU, {device.name}, which does not tell its memory: `qlora-wgpu estimate` "
            "says what a model takes."
        )
    largest = largest_model(DeviceSpec.of(device), int(_SPARE * size))
    fits = f"models of up to {largest}" if largest else "only models of less than 135M"
    return (
        f"You have a GPU, {device.name} with {size / 2**30:,.0f} GiB: QLoRA (rank 16, rows of "
        f"{_SEQ:,} tokens) of {fits} parameters fits. `qlora-wgpu estimate` says what yours takes."
    )


def largest_model(target: DeviceSpec, room: int) -> str | None:
    """The largest usual size of a Llama that can be trained, checkpointed, in so many bytes."""
    for name, config in _SIZES.items():
        step = StepOptions("train", 1, _SEQ, checkpointing=True)
        total = TrainingWorkload(Pretrained.from_config(config), step).layout(target).total(step)
        if total is not None and total <= room:
            return name
    return None


def _rounded(number: float) -> int:
    """Two digits, which is as much as is known."""
    return int(float(f"{max(number, 1.0):.1e}"))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
