"""A frozen base model with a trainable adapter on one device: the package's central class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterForms
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_model import ComputeDtype, FloatArray, Progress
from qlora_wgpu.model.adapter_state import as_begun, base_state_dict
from qlora_wgpu.model.memory_plan import KeepDequantized, copied_bytes, laid_out_for
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.offload_plan import RESIDENT, Residency
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.several_adapters import SeveralAdapters
from qlora_wgpu.model.steps import LossSums, TrainingOptions
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_CORRECT, STATS_LOSS, STATS_TOKENS

__all__ = ["ComputeDtype", "QLoRAModel", "device_layout"]

_QUEUED_BATCHES = 16


class QLoRAModel(SeveralAdapters):
    """A frozen base with an adapter.

    Attributes:
        device: The device that holds it.
        layout: The modules, the adapter, and the plans of the steps.
        adapter: The layout of the adapter's parameters.
        architecture: The architecture by config.json.
        options: How training steps are computed; replaced as a whole.
    """

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        lora: LoraConfig | None = None,
        quant: QuantConfig | None = None,
        compute_dtype: ComputeDtype = "bfloat16",
        device: Device | str | int | None = None,
        *,
        adapter: str | PathLike[str] | None = None,
        seed: int = 0,
        gradient_checkpointing: bool = False,
        gradient_dtype: Literal["float32", "bfloat16"] = "float32",
        keep_dequantized: KeepDequantized = "auto",
        progress: Progress = lambda name: None,
    ) -> Self:
        """Loads a Hugging Face folder onto a device, with a fresh adapter or one of a file.

        Args:
            path: The folder, or a name on the Hugging Face hub.
            lora: The adapter; PEFT's start, so that it changes nothing at first.
            quant: How the frozen linear layers are stored.
            compute_dtype: Element type of matmul operands; sums are float32 either way.
            device: An open device, a GPU's name or index, or None for the best one.
            adapter: Folder of a PEFT adapter, which says what ``lora`` says otherwise;
                ``open_adapter`` also takes from its run how the base was quantized.
            seed: Seed of the adapter's start.
            gradient_checkpointing: Whether layers are recomputed in the backward.
            gradient_dtype: What the adapter's gradient is summed in.
            keep_dequantized: Whether quantized weights are kept dequantized on the device beside
                their codes, which takes memory and makes steps faster, with the same bits;
                ``"auto"`` does so on a software GPU where they, with the copies that texts read
                there, take a third of the machine's memory at most and the device has no bound.
            progress: Called with each tensor's name before it is read.

        Raises:
            ConfigError: If both ``lora`` and ``adapter`` are given, or a setting does not fit.
            CheckpointError: If the folder or one of its files is missing or damaged.
            UnsupportedModelError: If the model asks for something that is not computed here.
            DeviceError: If there is no usable GPU.
            OutOfMemoryError: If the device has no room.
        """
        _check_settings(lora, quant)
        pretrained = Pretrained.open(path)  # before a device is asked for
        start = None
        if adapter is not None:
            lora, pretrained, start = _config_of_folder(adapter, lora, pretrained)
        if not isinstance(device, Device):
            device = Device("auto" if device is None else str(device))
        layout = device_layout(
            pretrained, lora or LoraConfig(), quant or QuantConfig(), compute_dtype, device,
            forms=AdapterForms(gradient=gradient_dtype),
        )  # fmt: skip
        layout = _kept(layout, keep_dequantized, device)
        if start is not None:
            layout.adapter.start = layout.adapter.join(start)
        options = TrainingOptions(checkpointing=gradient_checkpointing)
        model = cls(layout, device, seed=seed, options=options, progress=progress)
        if adapter is not None:
            model.load_adapter(adapter)
        return model

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
        keep_dequantized: KeepDequantized = "auto",
        progress: Progress = lambda name: None,
    ) -> Self:
        """Loads a folder that is open already; arguments as for ``from_pretrained``."""
        pretrained = Pretrained.from_folder(folder, name_or_path)
        layout = device_layout(pretrained, lora, quant, compute_dtype, device)
        layout = _kept(layout, keep_dequantized, device)
        options = TrainingOptions(checkpointing=gradient_checkpointing)
        return cls(layout, device, seed=seed, options=options, progress=progress)

    # -- computing -------------------------------------------------------------------------

    def loss_and_grads(
        self, input_ids: Any, labels: Any, attention_mask: Any = None
    ) -> tuple[float, dict[str, FloatArray]]:
        """The mean loss over the labels and its exact gradient, without dropout.

        The loss that balances a mixture's experts is a part of it where training has it.

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
        checked = self.checked(input_ids, labels, attention_mask)
        with self.device.in_turn:
            self.zero_gradient()
            tokens = self.accumulate(*checked)
            stats = self.read_stats()
            flat: FloatArray = self.read_flat(self.adapter.gradient)
            self.zero_gradient()
        count = max(tokens, 1)
        loss = float(stats[STATS_LOSS]) + self.router_aux_loss_coef * float(stats[STATS_BALANCE])
        return loss / count, self.adapter.split(flat / np.float32(count))

    def summed_loss(self, batches: Iterable[tuple[Any, Any, Any]]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits; no gradient.

        Args:
            batches: ``(input_ids, labels, attention_mask)``, each as for ``loss_and_grads``.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        with self.device.in_turn:
            return self._summed_loss(batches)

    def _summed_loss(self, batches: Iterable[tuple[Any, Any, Any]]) -> LossSums:
        self.zero_stats()
        for index, (input_ids, labels, attention_mask) in enumerate(batches):
            if index % _QUEUED_BATCHES == _QUEUED_BATCHES - 1:
                self.read_stats()  # waits, so that the queue stays short
            ids, targets, mask = self.checked(input_ids, labels, attention_mask)
            batch, program = self._step("loss", *ids.shape)
            batch_encoding.write_batch(self.device, batch, ids, mask, targets)
            program.run()
        stats = self.read_stats()
        loss, tokens, correct = (stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
        sums = LossSums(float(loss), int(tokens), int(correct))
        self.zero_stats()
        return sums

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

    # -- files -----------------------------------------------------------------------------

    def base_state_dict(self) -> dict[str, FloatArray]:
        """The frozen weights as the device uses them (dequantized there), Hugging Face's names."""
        return base_state_dict(self.layout, self.programs, self.device)


def _config_of_folder(
    adapter: str | PathLike[str], lora: LoraConfig | None, base: Pretrained
) -> tuple[LoraConfig, Pretrained, Mapping[str, FloatArray] | None]:
    """The settings of an adapter's folder, where none are given beside it.

    With it come the base for it, and its start, if that is a part of the base.
    """
    if lora is not None:
        raise ConfigError(
            "lora and adapter exclude each other: the adapter's folder says its rank and modules"
        )
    stacking = base.architecture.stacking
    tensors, stored = load_adapter(Path(adapter), biases=True, stacking=stacking)
    own, _, _, start = as_begun(adapter, stored, tensors, base.architecture)
    return own, base.for_adapter(stored, tensors), start


def _kept(layout: ModelLayout, asked: KeepDequantized, device: Device) -> ModelLayout:
    """A layout with dequantized weights where they are asked for: texts may come as well."""
    copies = copied_bytes(layout, device.budget)
    return laid_out_for(layout, asked, is_cpu=device.is_cpu, budget=device.budget, beside=copies)


def device_layout(
    pretrained: Pretrained,
    lora: LoraConfig,
    quant: QuantConfig,
    compute_dtype: str,
    device: Device,
    residency: Residency = RESIDENT,
    forms: AdapterForms = FLOAT32,
    *,
    keep: bool = False,
) -> ModelLayout:
    """A model laid out for an open device; ``keep`` as for ``ModelLayout``.

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
        residency=residency,
        forms=forms,
        keep=keep,
    )


def _check_settings(lora: object, quant: object) -> None:
    """Refuses settings of another kind, such as PEFT's.

    Raises:
        ConfigError: If they are.
    """
    for name, value, kind in (("lora", lora, LoraConfig), ("quant", quant, QuantConfig)):
        if value is not None and not isinstance(value, kind):
            theirs = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix(
                "builtins."
            )
            raise ConfigError(f"{name} must be a qlora_wgpu.{kind.__name__}, got {theirs}")
