"""A model on its device: its weights, the programs it replays, its vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, DeviceError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.program import Program
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.lora.targets import check_trainable
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_state import neutral_parameters, read_vector, write_vector
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import TrainingOptions
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.cross_entropy import Objective

FloatArray = npt.NDArray[np.float32]
ComputeDtype = Literal["bfloat16", "float32"]
Progress = Callable[[str], None]


class LoadedModel:
    """A frozen base with an adapter on one device, and the programs that they replay.

    Attributes:
        device: The device that holds it.
        layout: The modules, the adapter, and the plans of the steps.
        adapter: The layout of the adapter's parameters.
        architecture: The architecture by config.json.
        options: How training steps are computed; replaced as a whole.
        prompt_folder: The folder that says how prompts are written: the base's, or the adapter's.
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
            device: The device that will hold the model.
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
        self.prompt_folder = self.folder.path
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

    def close(self) -> None:
        """Frees the model's memory at once, whoever still holds the model; it is of no use then.

        A notebook keeps what a cell returned or where it failed. A device that was opened for this
        model alone goes with it.
        """
        self.__dict__.clear()

    def __enter__(self) -> Self:
        """Closes the model in the end: ``with QLoRAModel.from_pretrained(...) as model``.

        Raises:
            DeviceError: If it is closed already.
        """
        _ = self.device
        return self

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied."""
        raise TypeError(
            "a model stands on a GPU and cannot be pickled or copied: pass the path of its run or "
            "adapter, and open it there with open_adapter"
        )

    def __exit__(self, *exception: object) -> None:
        """Closes it."""
        self.close()

    if not TYPE_CHECKING:  # else a checker would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """What is not there: of a closed model, anything."""
            if vars(self) or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise DeviceError(
                "the model is closed: open it again with from_pretrained or open_adapter"
            )

    def __repr__(self) -> str:
        """Base, adapter and device in a line."""
        if not vars(self):
            return f"{type(self).__name__}(closed)"
        lora = self.adapter
        return (
            f"{type(self).__name__}({self.name_or_path}: {self.quant.scheme}, "
            f"{self.compute_dtype}; r {lora.config.r} on {len(lora.targets)} layers, "
            f"{lora.num_parameters:,} parameters; {self.device.memory.total / 2**20:,.1f} MiB on "
            f"{self.device.name})"
        )

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
        """The loss that training minimizes: label smoothing and z-loss."""
        return self.options.objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        self.options = replace(self.options, objective=value)

    @property
    def neftune_noise_alpha(self) -> float:
        """Strength of the noise on the embeddings of training batches (NEFTune)."""
        return self.options.noise

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float) -> None:
        self.options = replace(self.options, noise=value)

    @property
    def is_random(self) -> bool:
        """Whether training steps draw random numbers: dropout or noise."""
        return self.adapter.config.lora_dropout > 0 or self.options.noise > 0

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

        Raises:
            ConfigError: If a dropout is asked for that is not computed.
        """
        if dropout_key is not None:
            check_trainable(self.adapter.config)
        batch, program = self._step("train", *ids.shape)
        with self.device.in_turn:
            batch_encoding.write_batch(
                self.device, batch, ids, mask, targets, dropout_key=dropout_key
            )
            program.run()
        return int((targets != IGNORE_INDEX).sum())

    def prepare(self, batch: int, seq: int) -> None:
        """Compiles and allocates what training on this shape needs."""
        self._step("train", batch, seq)

    def program(self, kind: str, batch: int, seq: int) -> Program:
        """The program of a ``"train"`` or ``"loss"`` micro-batch of this shape."""
        return self._step(kind, batch, seq)[1]

    def new_graph(self) -> Graph:
        """An empty graph for this model's element type and device."""
        return self.layout.new_graph()

    def new_program(self, graph: Graph, outputs: tuple[Tensor, ...] = ()) -> Program:
        """Plans a graph and makes it ready; its slots are shared with the model's others."""
        return self.programs.from_graph(graph, outputs)

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
        with self.device.in_turn:
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
        return self.stats.storage.buffer, self.stats.storage.nbytes

    def zero_stats(self) -> None:
        """Clears the sums of loss and tokens, and what kernels have counted."""
        assert self.stats.storage is not None
        self.write_flat(self.stats, np.zeros(self.stats.storage.nbytes // 4, np.float32))

    def zero_gradient(self) -> None:
        """Clears the summed gradient, loss and tokens."""
        self.write_flat(self.adapter.gradient, np.zeros(self.adapter.length, np.float32))
        self.zero_stats()
