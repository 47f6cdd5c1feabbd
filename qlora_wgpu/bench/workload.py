"""The models and training steps of a benchmark, and whether they fit into memory."""

from __future__ import annotations

import difflib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.checkpoint.stored_weight import StoredWeight
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.files import exists, is_dir, is_file
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import available_bytes as _available_bytes
from qlora_wgpu.limits import RANK
from qlora_wgpu.model.memory_plan import plan_training_memory
from qlora_wgpu.model.pretrained import tensor_shapes
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4

_SCALE = np.float32(0.02)  # Hugging Face's initializer_range
_PERIOD = 1_000_003  # of repeated values; a prime, so that no two rows are equal
_BLOCKS = 31_249  # of repeated quantized blocks


class RandomFolder(ModelFolder):
    """Random weights, generated when they are read, and always the same for a config.json.

    Norms are ones; all other weights are normal with a standard deviation of 0.02.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        architecture: Architecture | None = None,
        quant: QuantConfig | None = None,
    ) -> None:
        """Takes a config.json, and optionally a part of its architecture.

        With ``quant``, linear layers are stored quantized; without, in floats.
        """
        super().__init__(Path("random weights"), dict(config), {})
        if architecture is None:
            architecture = find_family(config).read(config)
        self._norms = set(architecture.stored_norms)
        self._form = quant if quant is not None and quant.scheme == "nf4" else None
        self._linears = {f"{spec.stored}.weight" for spec in architecture.every_linear}
        self._shapes = tensor_shapes(architecture)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(int(np.prod(shape)) for shape in self._shapes.values())

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._shapes)

    def find(self, name: str) -> RandomWeight | None:
        """A weight by name."""
        if name not in self._shapes:
            return None
        blocks = None
        if self._form is not None and name in self._linears:
            blocks = partial(self._blocks, name)
        return RandomWeight(name, self._shapes[name], blocks, is_norm=name in self._norms)

    def _blocks(self, name: str) -> QuantizedWeight:
        """Generates a linear layer's codes and scales."""
        rows, columns = self._shapes[name]
        sample, first = self._sample, zlib.crc32(name.encode()) % _BLOCKS
        form = sample.format
        codes: npt.NDArray[np.uint8] = np.roll(sample.codes, -first * form.blocksize // 2)
        absmax: npt.NDArray[Any] = np.roll(sample.absmax, -first)
        nested = sample.nested_absmax
        if nested is not None:
            nested = _repeated(nested, form.nested_entries(rows, columns))
        return replace(
            sample,
            shape=(rows, columns),
            codes=_repeated(codes, form.code_bytes(rows, columns)),
            absmax=_repeated(absmax, form.block_count(rows, columns)),
            nested_absmax=nested,
        )

    @cached_property
    def _sample(self) -> QuantizedWeight:
        """Quantized weights that all layers repeat: billions of them would take minutes."""
        assert self._form is not None
        size = (1, _BLOCKS * self._form.blocksize)
        weights = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * _SCALE
        return quantize_nf4(weights, self._form.blocksize, self._form.double_quant)


class RandomWeight(StoredWeight):
    """A weight that is generated each time it is read."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        blocks: Callable[[], QuantizedWeight] | None = None,
        *,
        is_norm: bool = False,
    ) -> None:
        """With ``blocks``, which generates them, the weight is quantized."""
        self.name, self._shape = name, shape
        self._blocks, self._is_norm = blocks, is_norm

    @property
    def path(self) -> Path:
        """No file."""
        return Path("random weights")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape by config.json."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The stored type, float32."""
        return "F32"

    stored_dtype = dtype

    def raw(self) -> npt.NDArray[np.float32]:
        """The same as ``read``."""
        return self.read()

    def read(self) -> npt.NDArray[np.float32]:
        """Generates the values."""
        if self._is_norm:
            return np.ones(self._shape, np.float32)
        # Billions of random numbers would take minutes; the speed does not depend on them.
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        count = min(math.prod(self._shape), _PERIOD)
        block = random.standard_normal(count, dtype=np.float32) * _SCALE
        return _repeated(block, math.prod(self._shape)).reshape(self._shape)

    def quantized(self) -> QuantizedWeight | None:
        """Generates the blocks; None if the weight is not quantized."""
        return None if self._blocks is None else self._blocks()


def _repeated(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """``numpy.resize`` with half its memory."""
    whole = np.empty(count, values.dtype)
    for start in range(0, count, values.size):
        piece = whole[start : start + values.size]
        piece[:] = values[: piece.size]
    return whole


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# Dimensions only: other features of these models (biases, scaled RoPE) take hardly any time.
SHAPES: dict[str, dict[str, int | bool]] = {
    "S": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048},
    "M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                     "max_position_embeddings": 8192},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
                     "max_position_embeddings": 32768},
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model to benchmark."""

    name: str  # of the preset, or the path as given
    folder: ModelFolder  # configuration and weights, real or random
    weights: str  # ``"random"``, or the folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json."""
        return self.folder.config


def config_of(shape: str) -> dict[str, Any]:
    """A preset's config.json: a Llama with its dimensions."""
    return {**_LLAMA, **SHAPES[shape]}


def find_shape(text: str) -> Shape:
    """Finds a preset, a config.json, a model folder or a GGUF file.

    Weights are random unless the folder has safetensors. Nothing is downloaded.
    """
    preset = next((name for name in SHAPES if name.lower() == text.lower()), None)
    if preset is not None:
        return _random(preset, config_of(preset))
    path = Path(text).expanduser()
    if text and is_dir(path):
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            folder = ModelFolder.open(path)
            find_family(folder.config).read(folder.config)
            return Shape(text, folder, str(path))
        if exists(path / "config.json"):
            return _random(text, read_json_object(path / "config.json"))
        raise ConfigError(
            f"{path} has no config.json: pass a model folder, a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    if path.suffix == GGUF and is_file(path):
        return Shape(text, ModelFolder.open(path), str(path))
    if text and exists(path):
        return _random(text, read_json_object(path))
    close = difflib.get_close_matches(text.lower(), [name.lower() for name in SHAPES], 1)
    meant = next((f" (did you mean {n!r}?)" for n in SHAPES if n.lower() in close), "")
    raise ConfigError(
        f"unknown shape {text!r}{meant}: pass one of {', '.join(SHAPES)}, or the path of a model "
        "folder or a config.json"
    )


def _random(name: str, config: dict[str, Any]) -> Shape:
    return Shape(name, RandomFolder(config, quant=QuantConfig()), "random")


@dataclass(frozen=True)
class Workload:
    """Training steps of one shape: NF4 base, LoRA on every linear layer, AdamW."""

    shape: Shape
    batch: int = 1  # rows per micro-batch; a step has one
    seq: int = 256  # tokens per row
    rank: int = 8  # of the adapter
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of matmul operands
    gradient_checkpointing: bool = False
    steps: int = 5  # without warm-up

    def __post_init__(self) -> None:
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
                f"(max_position_embeddings of {self.shape.name}): set at most {longest}"
            )

    @property
    def lora(self) -> LoraConfig:
        """LoRA with a scaling of 2."""
        return LoraConfig(r=self.rank, lora_alpha=2 * self.rank)

    def planned_memory(self, device: Device) -> Counter[str]:
        """Bytes of GPU memory by kind, from config.json alone."""
        architecture = find_family(self.shape.config).read(self.shape.config)
        # A lower bound first: tracing an absurdly large shape would take minutes.
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
        except OutOfMemoryError as err:  # a size beyond 32 bits
            raise OutOfMemoryError(
                f"{self._shape} has tensors with too many elements for a kernel: {self._advice}"
            ) from err
        self._refuse_too_much(device, sum(planned.values()))
        return planned

    def _refuse_too_much(self, device: Device, needed: int) -> None:
        left = _available_bytes()
        if device.is_cpu and left is not None and needed > left:
            raise OutOfMemoryError(
                f"{self._shape} needs at least {needed / 2**20:,.0f} MiB, but this machine has "
                f"only {left / 2**20:,.0f} MiB left: {self._advice}"
            )

    @property
    def _shape(self) -> str:
        return f"{self.shape.name} with --batch {self.batch} --seq {self.seq} --rank {self.rank}"

    @property
    def _advice(self) -> str:
        checkpointing = "" if self.gradient_checkpointing else ", or use --checkpointing"
        return f"lower --batch, --seq or --rank{checkpointing}"
