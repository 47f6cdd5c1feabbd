"""The memory that training takes of a device, and what fits, from config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu.bench.shapes import find_shape
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.config import Config, LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError, OutOfMemoryError, QLoRAError, option
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import GPU_PROFILE, Profile
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.settings import as_config

_LARGEST_BINDING = (1 << 31) - 1  # what most cards allow
_MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
_MOST_PLANNED = 1 << 24  # tokens of a micro-batch
_SEQ_STEP = 64  # in which sequences are tried


@dataclass(frozen=True)
class Workload:
    """The training that is to be planned.

    Attributes:
        pretrained: The base model, of which config.json is known.
        lora: The adapter.
        quant: How the base's linear layers are stored.
        compute_dtype: Type of matmul operands.
        batch: Rows of a micro-batch.
        seq: Tokens of a row.
        checkpointing: Whether layers are recomputed in the backward.
    """

    pretrained: Pretrained
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: str
    batch: int
    seq: int
    checkpointing: bool


@dataclass(frozen=True)
class Target:
    """For what it is planned: an open GPU, or a common one where none is there."""

    name: str = "a GPU"
    max_binding: int = _LARGEST_BINDING
    profile: Profile = GPU_PROFILE

    @classmethod
    def here(cls) -> Target:
        """The best GPU of this machine; a common one where there is none."""
        try:
            device = Device()
        except QLoRAError:
            return cls()
        return cls(device.name, device.max_binding, device.profile)

    def memory(self, workload: Workload) -> Counter[str]:
        """Bytes on the device by kind."""
        layout = ModelLayout(
            workload.pretrained,
            workload.lora,
            workload.quant,
            workload.compute_dtype,
            profile=self.profile,
            max_binding=self.max_binding,
        )
        options = TrainingOptions(workload.checkpointing).train(workload.batch, workload.seq)
        return layout.memory(options)

    def total(self, workload: Workload) -> int | None:
        """All bytes; None where there is more than kernels can count."""
        try:
            return sum(self.memory(workload).values())
        except OutOfMemoryError:
            return None


@dataclass(frozen=True)
class Fits:
    """The largest batch and sequence that a budget has room for.

    Attributes:
        batch: Most rows at the planned length; 0 for none.
        seq: Most tokens of one row; 0 for none.
    """

    batch: int
    seq: int


@dataclass(frozen=True)
class Estimate:
    """The memory that training takes.

    Attributes:
        workload: The training that was planned.
        device: For which GPU.
        memory: Bytes on it by kind.
        budget: Bytes that there are, if they were told.
        fits: The sizes that have room in them.
    """

    workload: Workload
    device: str
    memory: Counter[str]
    budget: int | None = None
    fits: Fits | None = None

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.memory.values())


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
) -> Estimate:
    """Plans the memory of training; no GPU is needed, and of weights only their form is read.

    Args:
        target: A run's configuration (a ``Config``, a YAML file's path, a mapping), or the path of
            a config.json or model folder, or a shape's name such as ``"llama-3.1-8b"``.
        overrides: Texts such as ``"lora.r=8"``, for a YAML file.
        batch: Rows of a micro-batch, instead of the target's (1 without a run).
        seq: Tokens of a row, instead of the target's (1,024 without a run).
        rank: The adapter's rank, instead of the target's.
        checkpointing: Whether layers are recomputed in the backward, instead of the target's.
        scheme: How frozen layers are stored, instead of the target's.
        compute_dtype: Type of matmul operands, instead of the target's.
        budget: Bytes of memory that there are; the largest batch and sequence are looked for.

    Raises:
        ConfigError: If the target is wrong or absurdly large.
        CheckpointError: If weights are there, but damaged.
        UnsupportedModelError: If the model asks for something that is not computed here.
        OutOfMemoryError: If a tensor has more elements than kernels can count.
    """
    here = Target.here()
    workload = _changed(_workload(target, overrides), batch, seq, rank, scheme)
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
    memory = here.memory(workload)
    fits = None if budget is None else _what_fits(here, workload, budget)
    return Estimate(workload, here.name, memory, budget, fits)


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


def _workload(target: Any, overrides: Sequence[str]) -> Workload:
    is_path = isinstance(target, str | PathLike)
    if not is_path or Path(target).suffix in (".yaml", ".yml"):
        return _workload_of_run(as_config(target, overrides))
    if overrides:
        raise ConfigError(
            f"overrides such as {overrides[0]} belong to a YAML; for {target} there are options, "
            "see qlora-wgpu estimate --help"
        )
    return Workload(_shape(str(target)), LoraConfig(), QuantConfig(), "bfloat16", 1, 1024, False)


def _workload_of_run(settings: Config) -> Workload:
    train = settings.train
    return Workload(
        _base(settings.model.path),
        settings.lora,
        settings.quant,
        train.compute_dtype,
        train.per_device_train_batch_size,
        settings.data.max_seq_length,
        train.gradient_checkpointing,
    )


def _shape(text: str) -> Pretrained:
    shape = find_shape(text)
    if shape.weights == "random":
        return Pretrained.from_config(shape.config)
    return Pretrained.from_folder(shape.folder, shape.name)


def _base(path: str) -> Pretrained:
    """A run's base; its weights need not be there, but tell which layers they hold in 4 bits."""
    inside = Path(path).expanduser() / "config.json"
    if not inside.is_file():
        return Pretrained.from_config(ModelFolder.without_weights(path).config)
    if any(inside.parent.glob("*.safetensors")):
        return Pretrained.open(path)
    return Pretrained.from_config(read_json_object(inside))


def _what_fits(here: Target, workload: Workload, budget: int) -> Fits:
    """The most rows at the planned length, and the most tokens of one row."""
    rows = largest_fitting(
        lambda n: here.total(replace(workload, batch=n)),
        budget,
        max(_MOST_TOKENS // workload.seq, 1),
    )
    steps = largest_fitting(
        lambda n: here.total(replace(workload, batch=1, seq=n * _SEQ_STEP)),
        budget,
        _MOST_TOKENS // _SEQ_STEP,
    )
    return Fits(rows, steps * _SEQ_STEP)


def largest_fitting(total: Callable[[int], int | None], budget: int, most: int) -> int:
    """The largest n up to ``most`` whose total fits; it grows about linearly, so few are made."""
    low, low_total = 0, 0
    high, high_total = most + 1, None
    guess = 1
    while high - low > 1:
        size = total(guess)
        if size is not None and size <= budget:
            # From the second on, the last two tell the slope.
            slope = max((size - low_total) / (guess - low), 1.0) if low else float(size)
            low, low_total = guess, size
        else:
            high, high_total = guess, size
            slope = max(((size or 2 * budget) - low_total) / (guess - low), 1.0)
        step = int((budget - low_total) / slope) if low > 1 or high_total else 1
        guess = min(max(low + step, low + 1), high - 1)
    return low
