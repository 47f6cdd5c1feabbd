"""The training steps to be measured, and whether the machine has room for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.bench.shapes import Shape
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory_size import available_bytes as _available_bytes
from qlora_wgpu.limits import RANK
from qlora_wgpu.model.memory import plan_training_memory


@dataclass(frozen=True)
class Workload:
    """Training steps of one shape: NF4 base, LoRA on every linear layer, AdamW.

    Attributes:
        shape: The model.
        batch: Rows of a micro-batch, which is a whole step.
        seq: Tokens of a row.
        rank: Rank of the adapter.
        compute_dtype: Type of matmul operands.
        gradient_checkpointing: Whether layers are recomputed in the backward.
        steps: How many steps count.
    """

    shape: Shape
    batch: int = 1
    seq: int = 256
    rank: int = 8
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    gradient_checkpointing: bool = False
    steps: int = 5

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ConfigError: If one is too small or too large, or the sequence longer than the model's.
        """
        for name, least in (("batch", 1), ("seq", 2), ("rank", 1), ("steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"--{name} must be at least {least}, got {value}")
        if self.rank > RANK:
            raise ConfigError(f"--rank must be at most {RANK:,}, got {self.rank}")
        longest = self.shape.config.get("max_position_embeddings")
        if isinstance(longest, int) and self.seq > longest:
            raise ConfigError(
                f"--seq {self.seq} is longer than the model's {longest} positions "
                f"(max_position_embeddings of {self.shape.name}): give at most {longest}"
            )

    @property
    def lora(self) -> LoraConfig:
        """The adapter, scaled by two."""
        return LoraConfig(r=self.rank, lora_alpha=2 * self.rank)

    def planned_memory(self, device: Device) -> Counter[str]:
        """Bytes on the device by kind, from config.json alone.

        Raises:
            OutOfMemoryError: If a software GPU, which takes the host's memory, would need more
                than there is (its driver gives it away without asking), or if there is more than
                kernels can count.
        """
        architecture = find_family(self.shape.config).read(self.shape.config)
        # Two bytes of each: tracing an absurd shape only to refuse it would take minutes.
        rows = architecture.vocab_size + self.batch * self.seq
        self._refuse_too_much(device, 2 * rows * architecture.hidden_size)
        try:
            planned = plan_training_memory(
                self.shape.config,
                self.lora,
                QuantConfig(),
                self.compute_dtype,
                batch_size=self.batch,
                seq=self.seq,
                gradient_checkpointing=self.gradient_checkpointing,
                max_binding=device.max_binding,
                profile=device.profile,
                keep_dequantized="auto",
                is_cpu=device.is_cpu,
            )
        except OutOfMemoryError as err:  # a size of more than 32 bits
            raise OutOfMemoryError(
                f"{self._shape} has tensors of more elements than kernels can count: {self._advice}"
            ) from err
        self._refuse_too_much(device, sum(planned.values()))
        return planned

    def _refuse_too_much(self, device: Device, needed: int) -> None:
        left = _available_bytes()
        if device.is_cpu and left is not None and needed > left:
            raise OutOfMemoryError(
                f"{self._shape} needs at least {needed / 2**20:,.0f} MiB and this machine has "
                f"{left / 2**20:,.0f} MiB left: {self._advice}"
            )

    @property
    def _shape(self) -> str:
        return f"{self.shape.name} with --batch {self.batch} --seq {self.seq} --rank {self.rank}"

    @property
    def _advice(self) -> str:
        checkpointing = "" if self.gradient_checkpointing else ", or turn on --checkpointing"
        return f"lower --batch, --seq or --rank{checkpointing}"
