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

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.graph.program import Program, SlotPool, allocate
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora import AdapterConfig, load_adapter, save_adapter
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.network import Network
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.adamw import STATS_LENGTH, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.cross_entropy import PLAIN
from qlora_wgpu.ops.modules import ExpertMatrix, Matrix

FloatArray = npt.NDArray[np.float32]
ComputeDtype = Literal["bfloat16", "float32"]
_QUEUED_BATCHES = 16


class QLoRAModel:
    """A frozen base with an adapter.

    Attributes:
        device: Where it lives.
        adapter: The layout of the adapter's parameters.
        architecture: What config.json says.
        gradient_checkpointing: Whether layers are recomputed in the backward.
    """

    def __init__(
        self,
        folder: ModelFolder,
        lora: LoraConfig,
        quant: QuantConfig,
        compute_dtype: ComputeDtype,
        device: Device,
        *,
        name_or_path: str,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Uploads a folder's weights; ``from_pretrained`` is the way in."""
        if compute_dtype not in ("bfloat16", "float32"):
            raise ConfigError(
                f"compute_dtype must be 'bfloat16' or 'float32', got {compute_dtype!r}"
            )
        self.device = device
        self.folder = folder
        self.quant = quant
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.objective = PLAIN
        self.neftune_noise_alpha = 0.0
        self.name_or_path = name_or_path
        family = find_family(folder.config)
        self.architecture = family.read(folder.config)
        self.adapter = Adapter(lora, self.architecture.linears, self.architecture.experts)
        layout = WeightLayout(
            quant,
            compute_dtype,
            device.max_binding,
            folder,
            device,
            textures=device.profile.textures,
        )
        modules = layout.modules(self.architecture, self.adapter, progress)
        self.network = Network(family, self.architecture, modules)
        self.stats = vector(
            "stats", STATS_LENGTH, "float32", Storage("stats", "inputs", 4 * STATS_LENGTH)
        )
        self._pool = SlotPool(device)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._neutral = self._base_magnitudes()
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
        progress: Callable[[str], None] = lambda name: None,
    ) -> QLoRAModel:
        """Loads a Hugging Face folder onto a device, with a fresh adapter.

        Args:
            path: The folder, or a name on the Hugging Face hub.
            lora: The adapter; PEFT's start, so that it changes nothing at first.
            quant: How the frozen linear layers are stored.
            compute_dtype: Of matmul operands; sums are float32 either way.
            device: An open device, an adapter's name or index, or None for the best one.
            seed: Of the adapter's start.
            gradient_checkpointing: Whether layers are recomputed in the backward.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If the folder or one of its files is missing or damaged.
            UnsupportedModelError: If the model asks for something that is not computed here.
            DeviceError: If there is no usable adapter.
            OutOfMemoryError: If the device has no room.
        """
        folder = ModelFolder.open(str(path))
        find_family(folder.config).read(folder.config)  # before a device is asked for
        if not isinstance(device, Device):
            device = Device(device or "auto")
        return cls(
            folder,
            lora or LoraConfig(),
            quant or QuantConfig(),
            compute_dtype,
            device,
            name_or_path=str(path),
            seed=seed,
            gradient_checkpointing=gradient_checkpointing,
            progress=progress,
        )

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
            batch, program = self._program("loss", *ids.shape)
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
        batch, hidden, head, logits = self._logits_programs(*ids.shape)
        out = np.empty((len(rows), self.architecture.vocab_size), np.float32)
        for first in range(0, len(rows), logits.rows):
            chosen = rows[first : first + logits.rows]
            self._write_batch(batch, batch_encoding.encode_batch(batch, ids, mask, rows=chosen))
            if first == 0:
                hidden.run()
            head.run()
            data = np.frombuffer(head.read(logits), np.float32).reshape(logits.rows, -1)
            out[first : first + len(chosen)] = data[: len(chosen), : out.shape[1]]
        return out

    # -- a step's parts, for the trainer ---------------------------------------------------

    def checked(
        self, input_ids: Any, labels: Any, attention_mask: Any = None
    ) -> tuple[batch_encoding.IntArray, batch_encoding.IntArray, batch_encoding.IntArray]:
        """Token ids, shifted targets and mask of a micro-batch, checked."""
        vocab = self.architecture.vocab_size
        ids = batch_encoding.checked_ids(input_ids, vocab)
        mask = batch_encoding.checked_mask(attention_mask, ids.shape)
        targets = batch_encoding.shifted_targets(
            batch_encoding.checked_labels(labels, ids.shape, vocab), mask
        )
        return ids, targets, mask

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
        batch, program = self._program("train", *ids.shape)
        self._write_batch(
            batch, batch_encoding.encode_batch(batch, ids, mask, targets, dropout_key=dropout_key)
        )
        program.run()
        return int((targets != batch_encoding.IGNORED).sum())

    def prepare(self, batch: int, seq: int) -> None:
        """Compiles and allocates what training on this shape needs."""
        self._program("train", batch, seq)

    def program(self, kind: str, batch: int, seq: int) -> Program:
        """What a ``"train"`` or ``"loss"`` micro-batch of this shape replays."""
        return self._program(kind, batch, seq)[1]

    def _write_batch(self, batch: BatchBuffers, data: npt.NDArray[np.uint8]) -> None:
        self.device.write(batch.storage.buffer, data)

    def new_graph(self) -> Graph:
        """An empty graph for this model's element type and adapter."""
        return Graph(self.compute_dtype, self.device.profile, self.device.max_binding)

    def new_program(self, graph: Graph, outputs: tuple[Tensor, ...] = ()) -> Program:
        """Plans a graph and makes it ready; its slots are shared with the model's others."""
        return Program(self.device, make_plan(graph, outputs), self._pool)

    def _program(self, kind: str, batch_size: int, seq: int) -> tuple[BatchBuffers, Program]:
        objective = self.objective if kind == "train" else PLAIN
        noise = self.neftune_noise_alpha if kind == "train" else 0.0
        key = (kind, batch_size, seq, self.gradient_checkpointing, objective, noise)
        if key not in self._programs:
            graph, batch = self.new_graph(), make_batch_buffers(batch_size, seq, noise=noise)
            self.network.trace_loss(
                graph,
                batch,
                self.stats,
                gradient=kind == "train",
                checkpointing=self.gradient_checkpointing,
                objective=objective,
            )
            self._programs[key] = batch, self.new_program(graph)
        found: tuple[BatchBuffers, Program] = self._programs[key]
        return found

    def _logits_programs(
        self, batch_size: int, seq: int
    ) -> tuple[BatchBuffers, Program, Program, Tensor]:
        key = ("logits", batch_size, seq)
        if key not in self._programs:
            batch = make_batch_buffers(batch_size, seq)
            graph = self.new_graph()
            hidden = self.network.trace_hidden(graph, batch)
            first = self.new_program(graph)
            graph = self.new_graph()
            logits = self.network.trace_logits(graph, hidden, batch)
            self._programs[key] = batch, first, self.new_program(graph, (logits,)), logits
        found: tuple[BatchBuffers, Program, Program, Tensor] = self._programs[key]
        return found

    # -- bytes to and from the device ------------------------------------------------------

    def read_flat(self, tensor: Tensor) -> FloatArray:
        """A flat adapter vector (parameters, gradient or a moment), copied from the device."""
        assert tensor.storage is not None
        allocate(self.device, tensor.storage)
        return np.frombuffer(self.device.read(tensor.storage.buffer, tensor.nbytes), np.float32)

    def write_flat(self, tensor: Tensor, values: FloatArray) -> None:
        """Overwrites a flat adapter vector on the device."""
        assert tensor.storage is not None
        allocate(self.device, tensor.storage)
        self.device.write(tensor.storage.buffer, values)

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

    def _base_magnitudes(self) -> FloatArray:
        """A flat adapter that does nothing: zeros, and with DoRA the norms of the base's rows."""
        zeros = np.zeros(self.adapter.length, np.float32)
        if not self.adapter.config.use_dora:
            return zeros
        self.write_parameters(zeros)
        for name, lora in self.adapter.loras.items():
            assert lora.magnitude is not None
            weight, graph = self.network.modules.linears[name].weight, self.new_graph()
            norms = graph.float_vector("norms", weight.rows)
            for row0, w in weight.shards(graph):
                dora.norm(graph, w, lora, norms, row0, 0.0, plain=True)
            program = self.new_program(graph, (norms,))
            program.run()
            first = lora.magnitude.offset // 4
            zeros[first : first + weight.rows] = np.frombuffer(program.read(norms), np.float32)
        return zeros

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
            _check_scaling(config, self.adapter, adapter)
        self.write_parameters(self.adapter.join(tensors))

    def save_adapter(self, path: str | PathLike[str]) -> None:
        """Writes adapter_model.safetensors and adapter_config.json as PEFT loads them."""
        config = replace(self.adapter.peft, base_model_name_or_path=self.name_or_path)
        save_adapter(Path(path), self.adapter_state_dict(), config)

    def base_state_dict(self) -> dict[str, FloatArray]:
        """The frozen weights as the device uses them (dequantized there), Hugging Face's names."""
        state: dict[str, FloatArray] = {}
        modules, names = self.network.modules, self.architecture
        state[names.embed_name] = self._read_matrix(modules.embedding)
        if not names.tied:
            state[names.head_name] = self._read_matrix(modules.head)
        for name, layer in modules.linears.items():
            state[f"{name}.weight"] = self._read_matrix(layer.weight)
            if layer.bias is not None:
                state[f"{name}.bias"] = self.read_flat(layer.bias)
        for stack in names.experts:
            whole = self._read_experts(modules.experts[stack.name].weight)
            for spec, array in zip(stack.linears, whole, strict=True):
                state[f"{spec.name}.weight"] = array
        for name, router in modules.routers.items():
            state[name] = self._read_matrix(router)
        for name, norm in modules.norms.items():
            state[name] = self.read_flat(norm) - np.float32(self.architecture.norm_offset)
        return state

    def _read_matrix(self, weight: Matrix) -> FloatArray:
        graph = self.new_graph()
        return self._read_shards(graph, [shard for _, shard in weight.shards(graph)])

    def _read_experts(self, weight: ExpertMatrix) -> FloatArray:
        graph = self.new_graph()
        shards = [shard for _, _, shard in weight.expert_shards(graph)]
        whole = self._read_shards(graph, shards)
        return whole.reshape(weight.experts, weight.rows, weight.columns)

    def _read_shards(self, graph: Graph, shards: list[Tensor]) -> FloatArray:
        pieces = []
        program = self.new_program(graph, tuple(shards))
        program.run()
        for shard in shards:
            raw = program.read(shard)
            if shard.dtype == "bfloat16":
                array = from_bfloat16(np.frombuffer(raw, np.uint16))
            else:
                array = np.frombuffer(raw, np.float32)
            pieces.append(array.reshape(shard.rows, shard.stride)[:, : shard.columns])
        return np.concatenate(pieces)


def _check_scaling(found: AdapterConfig, adapter: Adapter, path: Any) -> None:
    """Refuses an adapter that would be scaled otherwise than it was trained."""
    wanted = adapter.peft
    for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
        if getattr(found, key) != getattr(wanted, key):
            raise CheckpointError(
                f"{path}: the adapter was made with {key} = {getattr(found, key)}, but this model "
                f"was opened with {getattr(wanted, key)}: open it with the adapter's LoraConfig"
            )
    for spec in adapter.targets:
        if found.scaling_of(spec.name) != wanted.scaling_of(spec.name):
            raise CheckpointError(
                f"{path}: the adapter scales {spec.name} by {found.scaling_of(spec.name):g}, but "
                f"this model was opened to scale it by {wanted.scaling_of(spec.name):g}: open it "
                "with the adapter's LoraConfig"
            )
