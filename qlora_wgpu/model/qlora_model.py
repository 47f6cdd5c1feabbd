"""A frozen base model with a trainable adapter on one device: the package's central class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.program import Program
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.lora import load_adapter, save_adapter
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_state import (
    check_scaling,
    neutral_parameters,
    read_vector,
    write_vector,
)
from qlora_wgpu.model.base_state import base_state_dict
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.ops.adamw import STATS_LENGTH, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.cross_entropy import Objective

FloatArray = npt.NDArray[np.float32]
ComputeDtype = Literal["bfloat16", "float32"]
Progress = Callable[[str], None]
_QUEUED_BATCHES = 16


class QLoRAModel:
    """A frozen base with an adapter.

    Attributes:
        device: Where it lives.
        layout: What is there: modules, adapter, and the plans of its steps.
        adapter: The layout of the adapter's parameters.
        architecture: What config.json says.
        options: How training steps are computed; replaced as a whole.
    """

    def __init__(
        self,
        layout: ModelLayout,
        device: Device,
        *,
        seed: int = 0,
        options: TrainingOptions | None = None,
        progress: Progress = lambda name: None,
    ) -> None:
        """Loads a layout's weights onto a device; ``from_pretrained`` is the usual way in.

        Args:
            layout: The model, laid out for the device's profile; it is used up.
            device: Where the model will live.
            seed: Seed of the adapter's start.
            options: How training steps are computed.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        if layout.pretrained.folder is None:
            raise CheckpointError(
                f"{layout.pretrained.name_or_path} has a config.json but no files"
            )
        self.device = device
        self.layout = layout
        self.folder: ModelFolder = layout.pretrained.folder
        self.quant = layout.quant
        self.compute_dtype = layout.compute_dtype
        self.name_or_path = layout.pretrained.name_or_path
        self.architecture = layout.pretrained.architecture
        self.adapter = layout.adapter
        self.network = layout.network
        self.stats = layout.stats
        self.options = options or TrainingOptions()
        self.programs = Programs(layout, device)
        self._logits_programs: dict[tuple[int, int], LogitsPrograms] = {}
        layout.load(device, progress)
        self._neutral = neutral_parameters(layout, self.programs, device)
        self.write_parameters(self.adapter.initial(seed) + self._neutral)

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        lora: LoraConfig | None = None,
        quant: QuantConfig | None = None,
        compute_dtype: ComputeDtype = "bfloat16",
        device: Device | str | None = None,
        *,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        progress: Progress = lambda name: None,
    ) -> QLoRAModel:
        """Loads a Hugging Face folder onto a device, with a fresh adapter.

        Args:
            path: The folder, or a name on the Hugging Face hub.
            lora: The adapter; PEFT's start, so that it changes nothing at first.
            quant: How the frozen linear layers are stored.
            compute_dtype: Element type of matmul operands; sums are float32 either way.
            device: An open device, a GPU's name or index, or None for the best one.
            seed: Seed of the adapter's start.
            gradient_checkpointing: Whether layers are recomputed in the backward.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If the folder or one of its files is missing or damaged.
            UnsupportedModelError: If the model asks for something that is not computed here.
            DeviceError: If there is no usable GPU.
            OutOfMemoryError: If the device has no room.
        """
        pretrained = Pretrained.open(path)  # before a device is asked for
        if not isinstance(device, Device):
            device = Device(device or "auto")
        layout = device_layout(
            pretrained, lora or LoraConfig(), quant or QuantConfig(), compute_dtype, device
        )
        options = TrainingOptions(checkpointing=gradient_checkpointing)
        return cls(layout, device, seed=seed, options=options, progress=progress)

    @classmethod
    def from_folder(
        cls,
        folder: ModelFolder,
        lora: LoraConfig,
        quant: QuantConfig,
        compute_dtype: ComputeDtype,
        device: Device,
        *,
        name_or_path: str,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        progress: Progress = lambda name: None,
    ) -> QLoRAModel:
        """Loads a folder that is open already; arguments as for ``from_pretrained``."""
        pretrained = Pretrained.from_folder(folder, name_or_path)
        layout = device_layout(pretrained, lora, quant, compute_dtype, device)
        options = TrainingOptions(checkpointing=gradient_checkpointing)
        return cls(layout, device, seed=seed, options=options, progress=progress)

    # -- how training steps are computed -----------------------------------------------------

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward."""
        return self.options.checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.options = replace(self.options, checkpointing=value)

    @property
    def objective(self) -> Objective:
        """What training minimizes besides the plain loss."""
        return self.options.objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        self.options = replace(self.options, objective=value)

    @property
    def neftune_noise_alpha(self) -> float:
        """How much noise the embeddings of training batches get (NEFTune)."""
        return self.options.noise

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float) -> None:
        self.options = replace(self.options, noise=value)

    @property
    def is_random(self) -> bool:
        """Whether training steps draw random numbers: dropout or noise."""
        return self.adapter.config.lora_dropout > 0 or self.options.noise > 0

    # -- computing -------------------------------------------------------------------------

    def loss_and_grads(
        self, input_ids: Any, labels: Any, attention_mask: Any = None
    ) -> tuple[float, dict[str, FloatArray]]:
        """The mean loss over the labels and its exact gradient, without dropout.

        Args:
            input_ids: Integers (batch, seq).
            labels: Integers (batch, seq), -100 to ignore; shifted by one here, as in Hugging Face.
            attention_mask: 1 for tokens and 0 for padding, (batch, seq); all ones by default. Rows
                may pack several samples, numbered 1, 2, … here: they do not see each other.

        Returns:
            The loss (0 where nothing has a label), and by PEFT's names the gradient of every A
            (r, in_features) and B (out_features, r).

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        self.zero_gradient()
        tokens = self.accumulate(*self.checked(input_ids, labels, attention_mask))
        stats = self.read_stats()
        flat = self.read_flat(self.adapter.gradient)
        self.zero_gradient()
        count = max(tokens, 1)
        return float(stats[STATS_LOSS]) / count, self.adapter.split(flat / np.float32(count))

    def summed_loss(self, batches: Iterable[tuple[Any, Any, Any]]) -> tuple[float, int]:
        """The loss summed over all labels of some batches, and their number; no gradient.

        Args:
            batches: ``(input_ids, labels, attention_mask)``, each as for ``loss_and_grads``.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        self.zero_stats()
        for index, (input_ids, labels, attention_mask) in enumerate(batches):
            if index % _QUEUED_BATCHES == _QUEUED_BATCHES - 1:
                self.read_stats()  # waits, so that the queue stays short
            ids, targets, mask = self.checked(input_ids, labels, attention_mask)
            batch, program = self._step("loss", *ids.shape)
            self._write_batch(batch, batch_encoding.encode_batch(batch, ids, mask, targets))
            program.run()
        stats = self.read_stats()
        loss, tokens = float(stats[STATS_LOSS]), int(stats[STATS_TOKENS])
        self.zero_stats()
        return loss, tokens

    def logits(self, input_ids: Any, attention_mask: Any = None) -> FloatArray:
        """float32 logits (batch, seq, vocab_size), without dropout.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        ids = batch_encoding.checked_ids(input_ids, self.architecture.vocab_size)
        rows = np.arange(ids.size)
        return self.logits_at(ids, rows, attention_mask).reshape(*ids.shape, -1)

    def logits_at(
        self, input_ids: Any, rows: npt.NDArray[np.integer[Any]], attention_mask: Any = None
    ) -> FloatArray:
        """float32 logits (len(rows), vocab_size) of some of the batch's flattened positions."""
        ids = batch_encoding.checked_ids(input_ids, self.architecture.vocab_size)
        mask = batch_encoding.checked_mask(attention_mask, ids.shape)
        return self._logits_of(*ids.shape).run(ids, mask, rows)

    # -- a step's parts, for the trainer ---------------------------------------------------

    def checked(
        self, input_ids: Any, labels: Any, attention_mask: Any = None
    ) -> tuple[batch_encoding.IntArray, batch_encoding.IntArray, batch_encoding.IntArray]:
        """Token ids, shifted targets and mask of a micro-batch, checked."""
        return batch_encoding.checked_batch(
            input_ids, labels, attention_mask, self.architecture.vocab_size
        )

    def accumulate(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        dropout_key: int | None = None,
    ) -> int:
        """Adds a micro-batch's summed loss and gradient on the device; does not wait.

        Returns:
            Its number of label tokens.
        """
        batch, program = self._step("train", *ids.shape)
        self._write_batch(
            batch, batch_encoding.encode_batch(batch, ids, mask, targets, dropout_key=dropout_key)
        )
        program.run()
        return int((targets != IGNORE_INDEX).sum())

    def prepare(self, batch: int, seq: int) -> None:
        """Compiles and allocates what training on this shape needs."""
        self._step("train", batch, seq)

    def program(self, kind: str, batch: int, seq: int) -> Program:
        """What a ``"train"`` or ``"loss"`` micro-batch of this shape replays."""
        return self._step(kind, batch, seq)[1]

    def new_graph(self) -> Graph:
        """An empty graph for this model's element type and device."""
        return self.layout.new_graph()

    def new_program(self, graph: Graph, outputs: tuple[Tensor, ...] = ()) -> Program:
        """Plans a graph and makes it ready; its slots are shared with the model's others."""
        return self.programs.from_graph(graph, outputs)

    def _write_batch(self, batch: BatchBuffers, data: npt.NDArray[np.uint8]) -> None:
        self.device.write(batch.storage.buffer, data)

    def _step(self, kind: str, batch: int, seq: int) -> tuple[BatchBuffers, Program]:
        return self.programs.step(self.options.step(kind, batch, seq))

    def _logits_of(self, batch: int, seq: int) -> LogitsPrograms:
        if (batch, seq) not in self._logits_programs:
            buffers = make_batch_buffers(batch, seq)
            self._logits_programs[batch, seq] = self.programs.logits(buffers)
        return self._logits_programs[batch, seq]

    # -- bytes to and from the device ------------------------------------------------------

    def read_flat(self, tensor: Tensor) -> FloatArray:
        """A flat adapter vector (parameters, gradient or a moment), copied from the device."""
        return read_vector(self.device, tensor)

    def write_flat(self, tensor: Tensor, values: FloatArray) -> None:
        """Overwrites a flat adapter vector on the device."""
        write_vector(self.device, tensor, values)

    def write_parameters(self, flat: FloatArray) -> None:
        """Overwrites the adapter on the device."""
        self.write_flat(self.adapter.parameters, flat)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """While it is entered, the model is the base alone."""
        kept = self.read_flat(self.adapter.parameters).copy()
        self.write_parameters(self._neutral)
        try:
            yield
        finally:
            self.write_parameters(kept)

    def read_stats(self) -> FloatArray:
        """Loss sum, label tokens, gradient norm, update factor; waits."""
        return self.read_flat(self.stats)

    @property
    def stats_window(self) -> tuple[Any, int]:
        """The buffer of the sums and its bytes, for reading them back later."""
        assert self.stats.storage is not None
        return self.stats.storage.buffer, self.stats.nbytes

    def zero_stats(self) -> None:
        """Clears the sums of loss and tokens."""
        self.write_flat(self.stats, np.zeros(STATS_LENGTH, np.float32))

    def zero_gradient(self) -> None:
        """Clears the summed gradient, loss and tokens."""
        self.write_flat(self.adapter.gradient, np.zeros(self.adapter.length, np.float32))
        self.zero_stats()

    # -- files -----------------------------------------------------------------------------

    def adapter_state_dict(self) -> dict[str, FloatArray]:
        """The adapter by PEFT's names, float32."""
        return self.adapter.split(self.read_flat(self.adapter.parameters))

    def load_adapter(self, adapter: str | PathLike[str] | Mapping[str, FloatArray]) -> None:
        """Replaces the adapter by a folder's or by named arrays.

        Raises:
            CheckpointError: If it is damaged or does not fit this model and its LoraConfig.
        """
        if isinstance(adapter, Mapping):
            tensors: Mapping[str, FloatArray] = adapter
        else:
            tensors, config = load_adapter(Path(adapter))
            check_scaling(config, self.adapter, adapter)
        self.write_parameters(self.adapter.join(tensors))

    def save_adapter(self, path: str | PathLike[str]) -> None:
        """Writes adapter_model.safetensors and adapter_config.json as PEFT loads them."""
        config = replace(self.adapter.peft, base_model_name_or_path=self.name_or_path)
        save_adapter(Path(path), self.adapter_state_dict(), config)

    def base_state_dict(self) -> dict[str, FloatArray]:
        """The frozen weights as the device uses them (dequantized there), Hugging Face's names."""
        return base_state_dict(self.layout, self.programs, self.device)


def device_layout(
    pretrained: Pretrained,
    lora: LoraConfig,
    quant: QuantConfig,
    compute_dtype: str,
    device: Device,
) -> ModelLayout:
    """A model laid out for an open device.

    Raises:
        ConfigError: If ``compute_dtype`` is none, or the adapter does not fit the model.
        CheckpointError: If the files lack a tensor or hold one that config.json denies.
    """
    if compute_dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"compute_dtype must be 'bfloat16' or 'float32', got {compute_dtype!r}")
    return ModelLayout(
        pretrained,
        lora,
        quant,
        compute_dtype,
        profile=device.profile,
        max_binding=device.max_binding,
    )
