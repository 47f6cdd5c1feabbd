"""The GPU memory that training needs, and what fits, from config.json alone."""

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
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data.tokenizer import extended_tokenizer
from qlora_wgpu.errors import (
    ConfigError,
    OutOfMemoryError,
    QLoRAError,
    TokenizerError,
    command,
    install_command,
    option,
)
from qlora_wgpu.files import exists, is_file
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import memory_size, room_of
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.grpo.completer import MOST_AT_ONCE
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
from qlora_wgpu.runs.rewards import reward_model_bytes
from qlora_wgpu.runs.settings import as_config
from qlora_wgpu.runs.tower_estimate import DataImages, TowerEstimate, estimate_tower
from qlora_wgpu.runs.workload import (
    DeviceSpec,
    RolloutShape,
    Total,
    TrainingWorkload,
    owner_memory,
    sized,
    totals,
)

# ---- an estimate ---------------------------------------------------------------------------------

_MAX_TOKENS = 1 << 24  # of a micro-batch that is planned


@dataclass(frozen=True)
class Fits:
    """The largest batch and the longest sequence that fit into a budget."""

    batch: int  # maximum number of rows at the planned length; 0 for none
    seq: int  # maximum number of tokens of one row; 0 for none


@dataclass(frozen=True)
class GpuPlan:
    """Training on a card with a given amount of memory."""

    gib: int  # the card's memory in GiB
    room: int  # bytes of it that training may use
    # The longest of ``LENGTHS`` that fits with all weights on the card and layers recomputed; 0 for
    # none
    resident_seq: int
    # The longest that fits with everything offloaded that can be
    longest_seq: int
    fitted: Fit | None  # how the planned training fits on the card; None if it does not
    # Its step time relative to having everything on the card and nothing recomputed, if no transfer
    # overlaps with computing; None if it does not fit
    slow_down: float | None


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes that a run needs on the devices of a cluster."""

    worker: int  # on each worker, during the longest step
    owner: int  # on the owner


@dataclass(frozen=True)
class Estimate:
    """The memory that training needs.

    Attributes:
        workload: The training that was planned.
        device: The GPU that it was planned for.
        memory: Bytes on the GPU by kind.
        budget: Bytes available: the argument, or the run's ``device.memory`` if it is a size.
        fits: The largest sizes that fit into the budget.
        device_memory: Bytes of the GPU's memory, if known.
        remedy: Settings with which it would fit into the budget, or without one into the GPU's
            memory, as ``train`` takes them: ``"train.gradient_checkpointing=true"``. None if it
            fits, empty if no settings help.
        fitted: If it does not fit, how ``train`` keeps to the budget by offloading; None if it
            cannot, or need not.
        cards: The same training on cards of the usual sizes, if they were requested.
        on_cluster: The memory that a run with ``cluster.scheduler`` needs on its devices.
        text_copies: Bytes of the copies of the weights that generation needs later, in addition to
            the model; only software GPUs make them.
        tower: The memory of the vision tower, if rows have images.
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
    tower: TowerEstimate | None = None

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.memory.values())

    def __repr__(self) -> str:
        work = self.workload
        return (
            f"{type(self).__name__}({self.total / 2**20:,.1f} MiB on {self.device}; r "
            f"{work.lora.r}, {work.step.batch} x {work.step.seq:,} tokens)"
        )


def is_run_config(target: str | PathLike[str]) -> bool:
    """Whether this is the path of a YAML file or of a run's folder."""
    path = Path(target).expanduser()
    return path.suffix in (".yaml", ".yml") or RunPaths(path).is_run


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
    image: tuple[int, int] | None = None,
    budget: int | None = None,
    by_data: bool = False,
    cards: bool = False,
) -> Estimate:
    """Plans the memory of training, without a GPU and without reading weights.

    Args:
        target: A run's configuration (a ``Config``, the path of a YAML file or of a run's folder, a
            mapping), or the path of a config.json or model folder, a model's name on the Hub (no
            weights are downloaded), or a shape's name such as ``"llama-3.1-8b"``.
        overrides: Strings such as ``"lora.r=8"``, for a YAML file.
        batch: Rows of a micro-batch, instead of the target's (1 without a run).
        seq: Tokens of a row, instead of the target's (1,024 without a run).
        rank: The adapter's rank, instead of the target's.
        checkpointing: Whether layers are recomputed in the backward pass, instead of the target's.
        scheme: Quantization of frozen layers, instead of the target's.
        compute_dtype: Type of matmul operands, instead of the target's.
        image: Width and height in pixels of an image that rows have, instead of those of the data.
        budget: Bytes of memory available, instead of the run's ``device.memory``; the largest batch
            and the longest sequence that fit are determined.
        by_data: Whether to plan a run's longest batch from its data, if it exists here, as training
            does; otherwise from ``data.max_seq_length``.
        cards: Whether to plan for cards from 4 to 80 GB as well, which takes seconds.

    Raises:
        ConfigError: If the target is invalid or absurdly large.
        CheckpointError: If the weights are damaged.
        UnsupportedModelError: If the model needs something that is not supported.
        OutOfMemoryError: If a tensor has more elements than kernels can address.
    """
    for name, value in (("batch", batch), ("seq", seq), ("rank", rank), ("budget", budget)):
        if value is not None and (not isinstance(value, int) or value < 1):
            what = "number of bytes" if name == "budget" else "integer"
            shown = option(name) if command() else name
            raise ConfigError(f"{shown} must be a positive {what}, got {value!r}")
    if compute_dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(f"compute_dtype must be 'bfloat16' or 'float32', got {compute_dtype!r}")
    is_run = not isinstance(target, str | PathLike) or is_run_config(target)
    settings = as_config(target, overrides) if is_run else Config(model=ModelConfig(path="."))
    here = _target(settings.device)
    samples = settings.train.objective in POLICY_OBJECTIVES
    prompt = settings.data.max_seq_length
    length = prompt + settings.grpo.max_completion_length if samples else prompt
    data = None
    if is_run:
        if by_data:
            length, data = _longest_batch(settings, length)
        base = _with_new_tokens(_base(base_in(settings)), settings.model)
    else:
        base = _shape(str(target), overrides)
    images = image or data
    workload = TrainingWorkload.of(settings, base, length, images=images is not None)
    if samples:
        more = settings.grpo.max_completion_length
        workload = replace(workload, rollouts=RolloutShape(
            (max(length - more, 1),), length, min(MOST_AT_ONCE, settings.grpo.generation_batch_size(
                settings.train.per_device_train_batch_size,
                settings.train.gradient_accumulation_steps,
            )), settings.grpo.group_size(settings.train.objective),
        ))  # fmt: skip
    sizes: dict[str, Any] = {"batch": batch, "seq": seq, "checkpointing": checkpointing}
    step = sized(workload.step, **{n: size for n, size in sizes.items() if size is not None})
    lora, quant = workload.lora, workload.quant
    workload = replace(
        workload,
        step=step,
        lora=lora if rank is None else lora.model_copy(update={"r": rank}),
        quant=quant if scheme is None else quant.model_copy(update={"scheme": scheme}),
        compute_dtype=compute_dtype or workload.compute_dtype,
    )
    if step.batch * step.seq > _MAX_TOKENS:
        raise ConfigError(
            f"{step.batch} rows of {step.seq} tokens are too many to plan, at most {_MAX_TOKENS:,} "
            f"tokens are supported: lower {option('batch', ...)} or {option('seq', ...)}"
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
    memory = kept.memory(step, kept.sized(step).plan) + _of_rollouts(workload, kept)
    of_rewards = reward_model_bytes(settings, here) if samples else 0
    if of_rewards:
        memory["reward models"] = of_rewards
    total = totals(layout, step)
    fits = None
    if budget is not None:
        fits = _largest_sizes(total, step.seq, max(budget - of_rewards, 1))
    remedy, fitted = None, None
    room = here.nbytes if budget is None else budget
    if room is not None and memory.total() > room:
        room = max(room - of_rewards, 1)
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
        of_worker += _of_rollouts(workload.on_worker, worker)
        of_owner = owner_memory(kept, workload.optim)
        on_cluster = ClusterMemory(of_worker.total(), of_owner.total() + of_rewards)
    path = base_in(settings) if is_run else str(target)
    limit = None if budget is None and here.is_cpu else room
    tower = None if images is None else estimate_tower(workload, path, here, limit, images)
    return Estimate(
        workload, here.name, memory, budget, fits, here.nbytes, remedy, fitted, plans, on_cluster,
        copied_bytes(layout, allowed), tower,
    )  # fmt: skip


def _target(settings: DeviceConfig) -> DeviceSpec:
    """The GPU that a run would use here; a typical one if there is none."""
    try:
        return DeviceSpec.of(device_of(settings))
    except QLoRAError:
        return DeviceSpec()


def _fitted(search: Search, room: int) -> Fit | None:
    """How training fits into ``room`` bytes; None if it does not."""
    try:
        return search.within(room)
    except OutOfMemoryError:
        return None


def _with_new_tokens(base: Pretrained, model: ModelConfig) -> Pretrained:
    """The base with the tokens that a run adds; without a tokenizer, each one is a new row."""
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


def _of_rollouts(workload: TrainingWorkload, layout: ModelPlan) -> Counter[str]:
    """Bytes by kind that GRPO's generation needs in addition to the longest step."""
    if workload.rollouts is None:
        return Counter()
    own = [layout.step(workload.step).plan]
    both = workload.memory(layout, [*own, *workload.rollout_plans(layout)])
    return both - workload.memory(layout, own)


def _longest_batch(settings: Config, longest: int) -> tuple[int, DataImages | None]:
    """Tokens of a run's longest batch as training plans it, and the images of its rows, if any.

    Without its data they are ``longest`` and None.
    """
    paths = [part.train for part in settings.data.parts()]
    if not all(path is not None and exists(Path(path).expanduser()) for path in paths):
        return longest, None
    try:
        train = prepare(settings)
        measures = settings.data.eval is not None or settings.data.eval_split is not None
        held_out = prepare(settings, held_out=True).dataset if measures else None
        data = RunData(train.dataset, held_out, train.plan, settings.data.max_seq_length)
        if train.images is None or not data.images:
            return data.length, None
        return data.length, DataImages(train.images.tokens, data.images)
    except QLoRAError:  # training will report it
        return longest, None


def _shape(text: str, overrides: Sequence[str]) -> Pretrained:
    if overrides:
        raise ConfigError(
            f"overrides such as {overrides[0]} need a YAML file; for {text} use the options of "
            "qlora-wgpu estimate --help"
        )
    if name_on_hub(text) is not None and not exists(Path(text)):
        return _base(text)
    shape = find_shape(text)
    if shape.weights == "random":
        return Pretrained.from_config(shape.config)
    return Pretrained.from_folder(shape.folder, shape.name)


def _base(path: str) -> Pretrained:
    """A run's base; weights, if they exist, show which layers are stored in 4 bits."""
    if is_file(Path(path).expanduser()):  # GGUF: only the header is read
        return Pretrained.open(path)
    inside = Path(path).expanduser() / "config.json"
    if not is_file(inside):
        return Pretrained.from_config(ModelFolder.without_weights(path).config)
    if any(inside.parent.glob("*.safetensors")):
        return Pretrained.open(path)
    return Pretrained.from_config(read_json_object(inside))


# ---- what fits into a budget ---------------------------------------------------------------------

MOST_TOKENS = 65_536  # the longest micro-batch that is tried
# The row lengths that are tried, far enough apart that a longer one needs more memory. Of closer
# ones it may need less, since products of more rows are split less along their reduction.
LENGTHS = (
    *range(64, 1024, 64),
    *(
        length
        for first in (1024 << n for n in range(6))
        for length in range(first, 2 * first, first // 16)
    ),
    MOST_TOKENS,
)


def _largest_sizes(total: Total, seq: int, budget: int) -> Fits:
    rows = range(1, max(MOST_TOKENS // seq, 1) + 1)
    return Fits(
        largest_fitting(lambda n: total(batch=n), budget, rows),
        largest_fitting(lambda n: total(batch=1, seq=n), budget, LENGTHS),
    )


def _remedy(total: Total, workload: TrainingWorkload, budget: int) -> str:
    """The cheapest settings with which a workload fits; empty if there are none.

    A smaller micro-batch gives the same updates at almost the same speed, checkpointing makes steps
    about a third slower, and shorter rows truncate the data.
    """
    step = workload.step
    for recomputes in dict.fromkeys((step.checkpointing, True)):
        fewer = partial(total, checkpointing=recomputes)
        rows = range(1, step.batch + 1)
        if batch := largest_fitting(lambda n: fewer(batch=n), budget, rows):  # noqa: B023
            return _overrides(workload, sized(step, batch=batch, checkpointing=recomputes))
    shorter = [length for length in LENGTHS if length < step.seq]
    seq = largest_fitting(lambda n: total(batch=1, seq=n, checkpointing=True), budget, shorter)
    smallest = sized(step, batch=1, seq=seq, checkpointing=True)
    return _overrides(workload, smallest) if seq else ""


def _overrides(workload: TrainingWorkload, step: StepOptions) -> str:
    """The overrides of ``train run.yaml`` that change a workload's step to another one."""
    keys, planned, sides = [], workload.step, workload.sides
    batch = max(step.batch // sides, 1)
    if batch * sides != planned.batch:
        accumulation = -(-planned.batch * workload.accumulation // (batch * sides))
        keys.append(f"train.per_device_train_batch_size={batch}")
        keys.append(f"train.gradient_accumulation_steps={accumulation}")
    if step.checkpointing != planned.checkpointing:
        keys.append("train.gradient_checkpointing=true")
    if step.seq != planned.seq:
        keys.append(f"data.max_seq_length={step.seq}")
    return " ".join(keys)


def largest_fitting(total: Callable[[int], int | None], budget: int, sizes: Sequence[int]) -> int:
    """The largest of rising sizes whose total fits, where totals rise with the sizes; 0 for none.

    A total of None is too large to count. Totals grow about linearly, so the search interpolates,
    and computes few: among them that of the result and of the next size, which does not fit.
    """
    low, high, known = -1, len(sizes), dict[int, int]()
    guess = 0
    while high - low > 1:
        taken = total(sizes[guess])
        known[sizes[guess]] = 2 * budget if taken is None else taken
        if taken is not None and taken <= budget:
            low = guess
        else:
            high = guess
        near = [sizes[i] for i in (low, high) if 0 <= i < len(sizes)]
        if len(near) == 1:  # all known totals are on one side of the budget
            near = sorted(known, key=lambda size: abs(known[size] - budget))[:2]
        size = _interpolated({size: known[size] for size in near}, budget)
        guess = min(max(bisect_right(sizes, size) - 1, low + 1), high - 1)
    return sizes[low] if low >= 0 else 0


def _interpolated(known: dict[int, int], budget: int) -> float:
    """About the size that needs a budget, by the line through one or two known totals."""
    (a, taken), *others = known.items()
    if not others:
        return max(min(8.0 * a, 2048.0), 1.1 * a * budget / taken)
    ((b, other),) = others
    slope = (other - taken) / (b - a)
    return a + (budget - taken) / slope if slope > 0 else 2 * max(a, b)


# ---- cards ---------------------------------------------------------------------------------------

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)  # GB, as cards are sold: 2**30 bytes each
FLOPS, BYTES = 1e13, 5e11  # per second, of products and of the card's memory
_FEW_LAYERS = 8
_NEARLY = 1.1  # similar offload plans differ by a smaller factor


def plans_for_cards(workload: TrainingWorkload) -> Iterator[GpuPlan]:
    """Plans training for cards from 4 to 80 GB, up to the first on which everything fits.

    All cards are planned as a typical GPU. Times are estimated, never measured: operations over
    ``FLOPS``, bytes of the card's memory over ``BYTES`` and transfers over ``LINK``, without any
    overlap, so a slow-down is an upper bound.
    """
    layout, accumulation = workload.layout(DeviceSpec()), workload.accumulation
    row = sized(workload.step, batch=1, checkpointing=True)
    total, offloaded = totals(layout, row), OffloadedRows(layout, row)
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
        longest = offloaded.longest(room, resident)
        yield GpuPlan(gib, room, resident, longest, fitted, slow_down)
        if fitted is not None and not fitted.options.checkpointing and not fitted.moved:
            return


def _computing(plan: Plan) -> float:
    return plan.flops / FLOPS + plan.memory_traffic / BYTES


class OffloadedRows:
    """The memory that rows of several lengths need with everything offloaded that can be."""

    def __init__(self, layout: ModelPlan, row: StepOptions) -> None:
        self._layout, self._row = layout, row
        # For each way to place the head: the plan that needs about the minimum of memory, and a
        # variant that may need a little less. Blocks of a streamed head, with the gradients of all
        # rows, may need more than the head itself.
        self._plans: list[tuple[Total, Total]] = []
        for head in layout.head_options:
            plan = replace(OffloadPlan.least(layout.num_layers), streamed_head=head)
            first, other = (
                totals(layout.changed(offload=each), row)
                for each in (plan, replace(plan, remakes=False))
            )
            self._plans.append((first, other))

    def longest(self, room: int, found: int) -> int:
        """The longest of ``LENGTHS`` that fits, at least ``found``."""
        for first, _ in self._plans:
            longer = [length for length in LENGTHS if length > found]
            found = largest_fitting(lambda n: first(seq=n), room, longer) or found  # noqa: B023
        for seq in LENGTHS:
            if seq > found:
                if not self._may_fit(seq, room):
                    break
                found = seq
        return found

    def _may_fit(self, seq: int, room: int) -> bool:
        if self._layout.num_layers <= _FEW_LAYERS:  # in small models any plan may be the smallest
            return Search(self._layout, sized(self._row, seq=seq)).least().total <= room
        for first, other in self._plans:
            taken = first(seq=seq)
            if taken is not None and taken <= _NEARLY * room:
                less = other(seq=seq)
                if less is not None and less <= room:
                    return True
        return False


# ---- what a device can train --------------------------------------------------------------------

_SMALL = "smollm2-135m"
_SEQ = 2048
_USABLE = 0.9  # of a card's memory: drivers and screens use some
_EXAMPLE = 1000 * 200  # tokens: a thousand rows of two hundred
_LLAMA: dict[str, Any] = {**config_of("llama-3.1-8b"), "num_key_value_heads": 8}
# Only the dimensions, of the usual model sizes.
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


def training_summary(device: Device) -> str:
    """One or two sentences: what fits on a GPU, or how long training takes on the processor."""
    if device.is_cpu:
        speed = training_speed(config_of(_SMALL), device)
        rounded = int(float(f"{max(speed, 1.0):.1e}"))  # it is no more precise
        return (
            f"You have no GPU: training runs on the processor, at about {rounded:,} tokens/s for a "
            "model with 135M parameters (QLoRA, estimated from a few of its layers). A thousand "
            f"rows of 200 tokens take about {_duration(_EXAMPLE / speed)}."
        )
    size = memory_size(device)
    if size is None:
        return (
            f"You have a GPU, {device.name}, whose driver does not report its memory: `qlora-wgpu "
            "estimate` says how much a model needs."
        )
    largest = largest_model(DeviceSpec.of(device), int(_USABLE * size))
    fits = f"models of up to {largest}" if largest else "only models of less than 135M"
    return (
        f"You have a GPU, {device.name} with {size / 2**30:,.0f} GiB: QLoRA (rank 16, rows of "
        f"{_SEQ:,} tokens) fits for {fits} parameters. `qlora-wgpu estimate` says how much yours "
        "needs."
    )


def several_gpus_hint(count: int) -> str:
    """A sentence on how to train on several GPUs of one machine; empty for one."""
    if count < 2:
        return ""
    return (
        f"This machine has {count} GPUs: `qlora-wgpu train run.yaml cluster.scheduler=local` "
        "trains on all of them; each holds the whole base and computes some of the micro-batches "
        f"({install_command('cluster')})."
    )


def largest_model(target: DeviceSpec, room: int) -> str | None:
    """The largest usual size of a Llama that fits into ``room`` bytes with checkpointing."""
    for name, config in _SIZES.items():
        step = StepOptions("train", 1, _SEQ, checkpointing=True)
        total = TrainingWorkload(Pretrained.from_config(config), step).layout(target).total(step)
        if total is not None and total <= room:
            return name
    return None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
