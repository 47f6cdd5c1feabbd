"""An adapter on a device: its flat vectors, the step's sums, and the programs over them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, DeviceError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.lora import save_adapter
from qlora_wgpu.lora.init import InitialAdapter, converted
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import WHOLE, split_biases, tensor_name
from qlora_wgpu.lora.scoring_files import to_metadata
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_state import (
    AdapterBiases,
    read_fitting,
    read_flat,
    warn_if_quantized_differently,
    write_flat,
)
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.programs import Programs
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.optimizers import SATURATED_OFFSET, STATS_LENGTH

FloatArray = npt.NDArray[np.float32]
ComputeDtype = Literal["bfloat16", "float32"]
Progress = Callable[[str], None]
DEFAULT = "default"
"""PEFT's name for the adapter that a model is opened with."""


class AdapterModel:
    """An adapter's vectors on a device, and what is computed from them: no base weights.

    An optimizer step needs nothing else once the gradient is known, wherever it was computed.
    """

    parameters_version = 0  # incremented whenever the adapter may have changed
    kept_saturated = 0  # clamped values among the weights that are kept dequantized

    def __init__(
        self, layout: ModelPlan, device: Device, *, options: TrainingOptions | None = None
    ) -> None:
        """Allocates nothing yet; raises a ``CheckpointError`` if the base has no files."""
        if layout.pretrained.folder is None:
            raise CheckpointError(
                f"{layout.pretrained.name_or_path} has a config.json, but no weights: use a "
                "complete model"
            )
        self.device = device
        self.folder: ModelFolder = layout.pretrained.folder
        self.prompt_folder = self.folder.text_folder
        self.quant = layout.quant
        self.compute_dtype = layout.compute_dtype
        self.name_or_path = layout.pretrained.name_or_path
        self.architecture = layout.pretrained.architecture
        self.stats = layout.stats
        self.options = options or TrainingOptions()  # of training steps; replaced as a whole
        self.programs = Programs(layout, device)
        self.biases = AdapterBiases(self.programs)
        self.parameters_changed = False

    def close(self) -> None:
        """Frees the model's memory at once, even if something still refers to the model.

        A notebook keeps what a cell returned or where it failed. A device that was opened for this
        model only is closed, too.
        """
        self.__dict__.clear()

    def __enter__(self) -> Self:
        """Closes the model at the end: ``with QLoRAModel.from_pretrained(...) as model``.

        Raises:
            DeviceError: If it is closed already.
        """
        _ = self.device
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model is on a GPU and cannot be pickled or copied: pass the path of its run or "
            "adapter, and open that with open_adapter"
        )

    def __exit__(self, *exception: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # else a checker would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Explains that a closed model has no attributes."""
            if vars(self) or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise DeviceError(
                "the model is closed: open it again with from_pretrained or open_adapter"
            )

    def __repr__(self) -> str:
        if not vars(self):
            return f"{type(self).__name__}(closed)"
        lora = self.adapter
        return (
            f"{type(self).__name__}({self.name_or_path}: {self.quant.scheme}, "
            f"{self.compute_dtype}; r {lora.config.r} on {len(lora.adapted)} layers, "
            f"{lora.num_parameters:,} parameters; {self.device.memory.total / 2**20:,.1f} MiB on "
            f"{self.device.name})"
        )

    @property
    def active_adapter(self) -> str:
        """The adapter's name."""
        return DEFAULT

    @property
    def layout(self) -> ModelPlan:
        """The layout of base and adapter."""
        return self.programs.plan

    @property
    def adapter(self) -> AdapterLayout:
        """The layout of the adapter's parameters."""
        return self.layout.adapter

    @property
    def is_random(self) -> bool:
        """Whether training steps draw random numbers: dropout or noise."""
        return self.adapter.config.lora_dropout > 0 or self.options.noise > 0

    def checked_ids(self, input_ids: Any) -> batch_encoding.IntArray:
        """Token ids that the model embeds, checked."""
        of = self.architecture
        return batch_encoding.checked_ids(input_ids, of.vocab_size, of.media_ids)

    def checked(
        self, input_ids: Any, labels: Any, attention_mask: Any = None
    ) -> tuple[batch_encoding.IntArray, batch_encoding.IntArray, batch_encoding.IntArray]:
        """Token ids, shifted targets and mask of a micro-batch, checked."""
        ids = self.checked_ids(input_ids)
        mask = batch_encoding.checked_mask(attention_mask, ids.shape)
        own = batch_encoding.checked_labels(labels, ids.shape, self.architecture.vocab_size)
        return ids, batch_encoding.shifted_targets(own, mask), mask

    # -- bytes to and from the device ------------------------------------------------------

    def read_flat(self, flat: Tensor | ShardedVector) -> npt.NDArray[Any]:
        """A flat adapter vector (parameters, gradient or a moment), copied from the device."""
        return read_flat(self.device, flat)

    def write_flat(self, flat: Tensor | ShardedVector, values: npt.NDArray[Any]) -> None:
        """Overwrites a flat adapter vector on the device."""
        write_flat(self.device, flat, values)

    @property
    def parameters_changed(self) -> bool:
        """Whether the adapter on the device may have changed; whoever changes it sets this."""
        return self._parameters_changed

    @parameters_changed.setter
    def parameters_changed(self, changed: bool) -> None:
        self._parameters_changed = changed
        self.parameters_version += 1

    def write_parameters(self, flat: FloatArray) -> None:
        """Overwrites the adapter on the device."""
        self.write_flat(self.adapter.parameters, flat)
        self.parameters_changed = True

    def read_stats(self) -> FloatArray:
        """Loss sum, label tokens, gradient norm, update factor, correct predictions; waits."""
        return self.read_flat(self.stats)

    @property
    def stats_window(self) -> tuple[Any, int]:
        """The buffer of the sums and its bytes, for reading them back later."""
        assert self.stats.storage is not None
        return self.stats.storage.buffer, self.stats.storage.nbytes

    def zero_stats(self) -> None:
        """Clears the sums of loss and tokens, and the kernels' counter."""
        self.write_stats(np.zeros(STATS_LENGTH, np.float32))

    def write_stats(self, sums: FloatArray, saturated: int = 0) -> None:
        """Overwrites the sums, and the count of clamped values if kernels keep one."""
        assert self.stats.storage is not None
        whole = np.zeros(self.stats.storage.nbytes // 4, np.float32)
        whole[:STATS_LENGTH] = sums
        if len(whole) > SATURATED_OFFSET // 4:
            whole.view(np.uint32)[SATURATED_OFFSET // 4] = saturated
        self.write_flat(self.stats, whole)

    def count_saturated(self) -> int:
        """How many values kernels clamped to their type since the sums were cleared; waits."""
        counter = self.layout.saturated
        if counter is None:
            return 0
        return int(self.read_flat(counter)[0])

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

        Warns if the folder's run quantized the base differently; ``open_adapter`` opens both as
        they were trained.

        Raises:
            CheckpointError: If it is damaged or does not fit this model and its LoraConfig.
        """
        pairs: Mapping[str, FloatArray]
        biases: Mapping[str, FloatArray]
        if isinstance(adapter, Mapping):
            pairs, biases = split_biases(adapter)
        else:
            pairs, biases = read_fitting(
                adapter, self.adapter, self.architecture, self.name_or_path
            )
            warn_if_quantized_differently(adapter, self.quant)
        self.write_parameters(self.adapter.join(pairs))
        self.biases.take(biases)

    def _tied_copy(self, tensors: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        of = self.architecture
        name = tensor_name(of.embed_name.removesuffix(".weight"), WHOLE)
        if not of.tied or name not in tensors:
            return {}
        return {tensor_name(of.head.name, WHOLE): tensors[name]}

    def save_adapter(self, path: str | PathLike[str]) -> None:
        """Writes adapter_model.safetensors and adapter_config.json as PEFT loads them.

        Warns of what PEFT computes differently. An adapter that was initialized as a part of the
        base is written as plain LoRA of twice the rank, for the original base.
        """
        for text in self.adapter.peft_differences:
            warnings.warn(text, stacklevel=2)
        config = replace(
            self.adapter.peft, base_model_name_or_path=self.name_or_path, bias=self.biases.kind
        )
        flat = self.read_flat(self.adapter.parameters)
        tensors, metadata = self.adapter.views(flat), dict[str, str]()
        if self.adapter.start is not None:
            start = self.adapter.views(self.adapter.start)
            kind = self.adapter.config.init_lora_weights
            tensors, config, metadata = converted(InitialAdapter(kind, tensors, start, config))
        if (scoring := self.options.objective.scoring) is not None:
            metadata |= to_metadata(scoring)
        tensors |= self._tied_copy(tensors)
        tensors |= self.biases.tensors()
        stacking = self.architecture.stacking if self.adapter.is_written_together else None
        bare = self.adapter.bare
        save_adapter(Path(path), tensors, config, stacking=stacking, bare=bare, metadata=metadata)

    save_pretrained = save_adapter
