"""A frozen base model with a trainable adapter on one device: the package's central class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.tokenizer_files import tokenizer_folder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.program import Program
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.flat_vector import FLOAT32, AdapterDtypes
from qlora_wgpu.lora.scoring_files import default_scoring, read_scoring
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_model import AdapterModel, ComputeDtype, FloatArray, Progress
from qlora_wgpu.model.adapter_set import AdapterSet, AdapterSignature, HeldAdapter, LoadedAdapter
from qlora_wgpu.model.adapter_state import as_begun, base_state_dict
from qlora_wgpu.model.image_inputs import ImageInputs, Images, image_inputs, image_rows
from qlora_wgpu.model.memory_plan import KeepDequantized, copied_bytes, laid_out_for
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained, tensor_shapes
from qlora_wgpu.model.steps import (
    LossSums,
    PreferenceInputs,
    SampleInputs,
    ScoreInputs,
    StepKind,
    StepOptions,
    TrainingOptions,
)
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.score import Scoring

__all__ = ["ComputeDtype", "QLoRAModel", "device_layout"]

_QUEUED_BATCHES = 16


class QLoRAModel(AdapterModel):
    """A frozen base model on a device, with its adapters.

    It may have several adapters by name: one is active, the others are in host memory.
    """

    def __init__(
        self,
        layout: ModelPlan,
        device: Device,
        *,
        seed: int = 0,
        options: TrainingOptions | None = None,
        progress: Progress = lambda name: None,
    ) -> None:
        """Loads a layout's weights onto a device; ``from_pretrained`` is usually simpler.

        Args:
            layout: The model, laid out for the device's profile; it can be loaded only once.
            device: The device that will hold the model.
            seed: Seed of the adapter's initialization.
            options: How training steps are computed.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the model does not fit into the device's memory.
        """
        super().__init__(layout, device, options=options)
        layout.load(device, progress, seed=seed)
        self.programs.fill_kept()
        if layout.dequantize_plan is not None:  # it runs once, so its count is kept here
            self.kept_saturated = self.count_saturated()
            self.zero_stats()
        if self.architecture.classes and self.options.objective.scoring is None:
            self._score_as(default_scoring(self.architecture.classes))
        signature = AdapterSignature(self.programs)
        self.write_parameters(self.adapter.initial(seed) + signature.neutral)
        held = HeldAdapter(signature, None, self.prompt_folder)
        self._adapters = AdapterSet(held, device, self.biases)
        self._is_off = False

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
        num_labels: int | None = None,
        progress: Progress = lambda name: None,
    ) -> Self:
        """Loads a model folder onto a device, with a new adapter or one from a folder.

        Args:
            path: The folder or GGUF file, or a name on the Hugging Face Hub.
            lora: Settings of a new adapter, which is initialized as in PEFT.
            quant: Quantization of the frozen linear layers.
            compute_dtype: Type of matmul operands; accumulation is in float32.
            device: An open device, a GPU's index or a part of its name, or None for the best one.
            adapter: Folder of a PEFT adapter to open instead of a new one, with its own settings;
                ``open_adapter`` also quantizes the base as in the adapter's run.
            seed: Random seed of a new adapter's weights.
            gradient_checkpointing: Whether layers are recomputed in the backward pass.
            gradient_dtype: Type in which the adapter's gradient is accumulated.
            keep_dequantized: Whether quantized weights are also kept dequantized on the device,
                which takes memory and makes steps faster, with bit-identical results;
                ``"auto"`` does so on a software GPU without a memory limit, if they and the copies
                for generation take at most a third of the machine's memory.
            num_labels: Number of classes of a new classifier, 1 for a reward model; by default the
                model is what folder and adapter say.
            progress: Called with each tensor's name before it is read.

        Raises:
            ConfigError: If both ``lora`` and ``adapter`` are given, or a setting is invalid.
            CheckpointError: If the folder or one of its files is missing or damaged.
            UnsupportedModelError: If the model, or something in its config.json, is not supported.
            DeviceError: If there is no usable GPU.
            OutOfMemoryError: If the device has too little memory.
        """
        _check_settings(lora, quant)
        _check_choices(seed, gradient_dtype, keep_dequantized)
        pretrained = Pretrained.open(path)  # before a device is asked for
        if num_labels is not None:
            pretrained = pretrained.scored(num_labels)
        start = None
        if adapter is not None:
            lora, pretrained, start = _config_of_folder(adapter, lora, pretrained)
        if not isinstance(device, Device):
            device = Device("auto" if device is None else str(device))
        layout = device_layout(
            pretrained, lora or LoraConfig(), quant or QuantConfig(), compute_dtype, device,
            forms=AdapterDtypes(gradient=gradient_dtype),
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
        self,
        input_ids: Any,
        labels: Any,
        attention_mask: Any = None,
        *,
        images: Images | None = None,
    ) -> tuple[float, dict[str, FloatArray]]:
        """The mean loss over the labels and its exact gradient, without dropout.

        It includes the experts' balancing loss if training does.

        Args:
            input_ids: Integers (batch, seq).
            labels: Integers (batch, seq), -100 to ignore; shifted by one here, as in Hugging Face.
            attention_mask: 1 for tokens and 0 for padding, (batch, seq); all ones by default. A row
                may have several packed samples, numbered 1, 2, …, without attention between them.
            images: The ``ImageFeatures`` of each row's images, in order, for vision-language
                models; ``input_ids`` has one image token for each row of features.

        Returns:
            The loss (0 without labels), and the gradients of each A (r, in_features) and B
            (out_features, r), by PEFT's names.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        ids, targets, mask = self.checked(input_ids, labels, attention_mask)
        inputs = self.image_inputs(ids, mask, images)
        with self.device.in_turn:
            self.zero_gradient()
            tokens = self.accumulate(ids, targets, mask, images=inputs)
            stats = self.read_stats()
            flat: FloatArray = self.read_flat(self.adapter.gradient)
            self.zero_gradient()
        count = max(tokens, 1)
        balance = self.architecture.balance_coefficient(self.options.router_aux_loss_coef)
        loss = float(stats[STATS_LOSS]) + balance * float(stats[STATS_BALANCE])
        return loss / count, self.adapter.split(flat / np.float32(count))

    def summed_loss(self, batches: Iterable[tuple[Any, ...]]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits; no gradient.

        Args:
            batches: ``(input_ids, labels, attention_mask)``, each as for ``loss_and_grads``, or
                these and the batch's images, by ``image_inputs``.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        with self.device.in_turn:
            self.zero_stats()
            for index, (input_ids, labels, attention_mask, *images) in enumerate(batches):
                if index % _QUEUED_BATCHES == _QUEUED_BATCHES - 1:
                    self.read_stats()  # waits, so that the queue stays short
                given = self.checked(input_ids, labels, attention_mask)
                self.measure("loss", *given, images=images[0] if images else None)
            stats = self.read_stats()
            loss, tokens, correct = (stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
            sums = LossSums(float(loss), int(tokens), int(correct))
            self.zero_stats()
            return sums

    # -- a step's parts, for the trainer ---------------------------------------------------

    def accumulate(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        dropout_key: int | None = None,
        weights: FloatArray | None = None,
        samples: SampleInputs | None = None,
        images: ImageInputs | None = None,
    ) -> int:
        """Adds a micro-batch's summed loss and gradient on the device; does not wait.

        Args:
            ids: (batch, seq), checked.
            targets: (batch, seq), the target of each position.
            mask: (batch, seq), checked.
            dropout_key: Key of the micro-batch's dropout; None disables it.
            weights: (batch, seq) float32, the weight of each target in the loss, which is divided
                by their sum in the end; by default all ones if the options are ``weighted``.
            samples: Inputs of an objective over answers, completions or sequences; the loss over
                answers is divided by the number of pairs or answers.
            images: The batch's images, by ``image_inputs``.

        Returns:
            Its number of label tokens.

        Raises:
            ShapeError: If the weights have another shape, or one is negative or not finite; if
                samples are missing, or differ from those that have a label.
        """
        options = self._options("train", ids, images)
        if weights is not None:
            weights = batch_encoding.checked_weights(weights, ids.shape)
            options = replace(options, objective=replace(options.objective, weighted=True))
        self._run(
            options, ids, targets, mask, samples, images, dropout_key=dropout_key, weights=weights,
        )  # fmt: skip
        return int((targets != IGNORE_INDEX).sum())

    def measure(
        self,
        kind: Literal["loss", "divergence"],
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        samples: SampleInputs | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """Adds a micro-batch's loss, or divergence from the reference, to ``stats``: no gradient.

        Arguments and errors are those of ``accumulate``.
        """
        options = self._options(kind, ids, images)
        self._run(options, ids, targets, mask, samples, images)

    def _options(
        self, kind: StepKind, ids: batch_encoding.IntArray, images: ImageInputs | None
    ) -> StepOptions:
        batch, seq = ids.shape
        return self.options.step(kind, batch, seq, image_rows(ids, images))

    def _run(
        self,
        options: StepOptions,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        samples: SampleInputs | None,
        images: ImageInputs | None = None,
        **inputs: Any,
    ) -> Program:
        """Writes a micro-batch and runs its step; does not wait."""
        batch, program = self.programs.step(options)
        with self.device.in_turn:
            batch_encoding.write_batch(
                self.device, batch, ids, mask, targets, samples=samples, images=images, **inputs
            )
            program.run()
        return program

    def answer_logps(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        count: int,
        images: ImageInputs | None = None,
    ) -> FloatArray:
        """The summed log probability of the labels of ``count`` samples, float32; waits.

        The other arguments are those of ``accumulate``.
        """
        options = self._options("sums", ids, images)
        sums = self.layout.step(options).sums
        assert sums is not None
        with self.device.in_turn:
            plain = PreferenceInputs.plain(count)
            program = self._run(options, ids, targets, mask, plain, images)
            values = np.frombuffer(program.read(sums), np.float32)
        return values.reshape(-1, 4)[:count, 0].copy()

    def image_inputs(
        self, ids: batch_encoding.IntArray, mask: batch_encoding.IntArray, images: Images | None
    ) -> ImageInputs | None:
        """The images of a batch with checked ids and mask; None if it has none."""
        if images is None or not any(map(len, images)):
            return None
        return image_inputs(ids, mask, images, self.architecture)

    def scores(
        self, ids: batch_encoding.IntArray, mask: batch_encoding.IntArray, samples: ScoreInputs
    ) -> FloatArray:
        """The scores (sequences, classes) of a reward model or classifier, float32; waits.

        Also adds the loss of the samples' targets to ``stats``, as ``measure`` does.

        Args:
            ids: (batch, seq), checked, one sequence per row.
            mask: (batch, seq), checked.
            samples: The sequences' positions and targets.
        """
        options = self.options.step("loss", *ids.shape)
        made = self.layout.step(options).sums
        assert made is not None, "the model's objective is not over sequences"
        targets = np.full(ids.shape, IGNORE_INDEX, np.int64)
        with self.device.in_turn:
            program = self._run(options, ids, targets, mask, samples)
            values = np.frombuffer(program.read(made), np.float32)
        return values.reshape(ids.shape[0], -1)[: len(samples.rows)].copy()

    def token_logps(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
    ) -> FloatArray:
        """The log probability of each target, float32 (batch, seq), 0 where there is none; waits.

        The kernels are those of a training step, whose log probabilities are bit-identical as long
        as the model is unchanged.
        """
        options = self.options.step("logps", *ids.shape)
        losses = self.layout.step(options).sums
        assert losses is not None
        with self.device.in_turn:
            program = self._run(options, ids, targets, mask, None)
            values = np.frombuffer(program.read(losses), np.float32).reshape(-1, 2)
        rows = np.flatnonzero(targets.reshape(-1) != IGNORE_INDEX)
        logps = np.zeros(ids.size, np.float32)
        logps[rows] = -values[: len(rows), 0]
        return logps.reshape(ids.shape)

    def prepare(self, batch: int, seq: int, *, images: bool = False) -> None:
        """Compiles and allocates what training on this shape needs, with images or without."""
        self.program("train", batch, seq, images=images)

    def program(self, kind: StepKind, batch: int, seq: int, *, images: bool = False) -> Program:
        """The program of a ``"train"`` or ``"loss"`` micro-batch of this shape."""
        return self.programs.step(self.options.step(kind, batch, seq, batch * seq * images))[1]

    def logits(
        self, input_ids: Any, attention_mask: Any = None, *, images: Images | None = None
    ) -> FloatArray:
        """float32 logits (batch, seq, vocab_size), without dropout.

        ``images`` are as for ``loss_and_grads``.

        Raises:
            ShapeError: If shapes or values do not fit.
        """
        ids = self.checked_ids(input_ids)
        rows = np.arange(ids.size)
        return self.logits_at(ids, rows, attention_mask, images=images).reshape(*ids.shape, -1)

    def logits_at(
        self,
        input_ids: Any,
        rows: npt.NDArray[np.integer[Any]],
        attention_mask: Any = None,
        *,
        images: Images | None = None,
    ) -> FloatArray:
        """float32 logits (len(rows), vocab_size) of some of the batch's flattened positions."""
        ids = self.checked_ids(input_ids)
        mask = batch_encoding.checked_mask(attention_mask, ids.shape)
        inputs = self.image_inputs(ids, mask, images)
        programs = self._adapters.active.signature.logits(
            *ids.shape, image_rows=image_rows(ids, inputs)
        )
        return programs.run(ids, mask, rows, images=inputs)

    # -- adapters -------------------------------------------------------------------------

    @property
    def neutral(self) -> FloatArray:
        """A flat adapter that changes nothing."""
        return self._adapters.active.signature.neutral

    @property
    def active_adapter(self) -> str:
        """The name of the active adapter."""
        return self._adapters.active_name

    @property
    def active_adapters(self) -> list[str]:
        """The active adapter's name in a list, as in PEFT."""
        return [self.active_adapter]

    @property
    def peft_config(self) -> dict[str, LoraConfig]:
        """The ``LoraConfig`` of each adapter, by name."""
        return {name: adapter.config for name, adapter in self.adapters.items()}

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """The number of trained parameters, and of all parameters including the base's."""
        trained = self.adapter.num_parameters
        base = sum(map(math.prod, tensor_shapes(self.architecture).values()))
        return trained, trained + base

    def print_trainable_parameters(self) -> None:
        """Prints the number and share of trained parameters, as PEFT does."""
        trained, total = self.get_nb_trainable_parameters()
        share = 100 * trained / total
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {share:.4f}")

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """All adapters by name, in the order in which they were loaded."""
        return self._adapters.loaded()

    def load_adapter(
        self,
        adapter: str | PathLike[str] | Mapping[str, FloatArray],
        name: str | None = None,
    ) -> None:
        """Replaces the active adapter or, with a name, adds another one.

        A named one may have another rank, other targets and biases; the base is not read again,
        and ``set_adapter`` activates it. Warns if the folder's run quantized the base differently
        from this model.

        Args:
            adapter: Folder of a PEFT adapter, or without a name, its tensors by PEFT's names.
            name: The new adapter's name.

        Raises:
            CheckpointError: If it is damaged or does not fit this model; without a name, also if
                it does not fit the active adapter's LoraConfig.
            ConfigError: If the name is taken, or tensors are given a name.
            OutOfMemoryError: If the device has too little memory for its shape.
        """
        if name is None:
            super().load_adapter(adapter)
            if not isinstance(adapter, Mapping):
                self.name_folder(adapter)
            return
        if isinstance(adapter, Mapping):
            raise ConfigError(
                f"adapter {name!r}: only a folder, which says rank and targets, can be loaded "
                "under a name"
            )
        self._adapters.require_new(name)
        with self.device.in_turn:
            self._require_on("load_adapter")
            self._adapters.read(adapter, name)

    def name_folder(self, path: str | PathLike[str]) -> None:
        """Records the folder of the active adapter if its tensors were passed."""
        self._adapters.active.path = str(path)
        if self.architecture.classes:
            self._score_as(read_scoring(path, self.architecture.classes))
        self.prompt_folder = tokenizer_folder(path) or self.folder.text_folder

    def _score_as(self, scoring: Scoring) -> None:
        objective = replace(self.options.objective, scoring=scoring)
        self.options = replace(self.options, objective=objective)

    def set_adapter(self, name: str) -> None:
        """Activates another adapter; waits for the device if the active one was trained.

        Raises:
            ConfigError: If no adapter has this name, or within ``disable_adapter``.
        """
        with self.device.in_turn:
            self._require_on("set_adapter")
            if self._adapters.named(name) is (active := self._adapters.active):
                return
            active.prompt_folder = self.prompt_folder
            self._adapters.activate(name, changed=self.parameters_changed)
            chosen = self._adapters.active
            self.parameters_changed, self.prompt_folder = False, chosen.prompt_folder
            self.programs = chosen.signature.programs

    def delete_adapter(self, name: str) -> None:
        """Frees an adapter, and the programs of its shape if no other adapter has it.

        Raises:
            ConfigError: If no adapter has this name, or it is active.
        """
        with self.device.in_turn:
            self._adapters.delete(name)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within the context, the model is the base alone, with its own biases."""
        with self.device.in_turn, self.biases.off():
            before = self._is_off, self.parameters_changed
            kept = self.read_flat(self.adapter.parameters).copy()
            self.write_parameters(self.neutral)
            self._is_off = True
            try:
                yield
            finally:
                self.write_parameters(kept)
                self._is_off, self.parameters_changed = before

    adapter_off = disable_adapter

    def _require_on(self, what: str) -> None:
        if self._is_off:
            raise ConfigError(f"{what} within disable_adapter: leave that first")

    # -- files -----------------------------------------------------------------------------

    def base_state_dict(self) -> dict[str, FloatArray]:
        """The frozen weights as the device uses them, dequantized, by Hugging Face's names."""
        return base_state_dict(self.programs)


def _config_of_folder(
    adapter: str | PathLike[str], lora: LoraConfig | None, base: Pretrained
) -> tuple[LoraConfig, Pretrained, Mapping[str, FloatArray] | None]:
    """The settings of an adapter's folder, if no others are given.

    Returns:
        The settings, the base for them, and the initial values if these are a part of the base.
    """
    if lora is not None:
        raise ConfigError(
            "lora and adapter are mutually exclusive: the adapter's folder has its own settings"
        )
    stacking = base.architecture.stacking
    tensors, stored = load_adapter(Path(adapter), biases=True, stacking=stacking)
    own, _, _, start = as_begun(adapter, stored, tensors, base.architecture)
    return own, base.for_adapter(stored, tensors), start


def _kept(layout: ModelPlan, keep: KeepDequantized, device: Device) -> ModelPlan:
    """The model with weights kept dequantized if requested; generation may need copies, too."""
    copies = copied_bytes(layout, device.budget)
    return laid_out_for(layout, keep, is_cpu=device.is_cpu, budget=device.budget, more=copies)


def device_layout(
    pretrained: Pretrained,
    lora: LoraConfig,
    quant: QuantConfig,
    compute_dtype: str,
    device: Device,
    offload: OffloadPlan = RESIDENT,
    forms: AdapterDtypes = FLOAT32,
    *,
    keep: bool = False,
) -> ModelPlan:
    """A model laid out for an open device; ``keep`` as for ``ModelPlan``."""
    if compute_dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"compute_dtype must be 'bfloat16' or 'float32', got {compute_dtype!r}")
    return ModelPlan(
        pretrained, lora, quant, compute_dtype, profile=device.profile,
        max_binding=device.max_binding, offload=offload, forms=forms, keep=keep,
    )  # fmt: skip


def _check_choices(seed: object, gradient_dtype: object, keep_dequantized: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigError(f"seed must be an integer, got {seed!r}")
    if gradient_dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"gradient_dtype must be 'float32' or 'bfloat16', got {gradient_dtype!r}")
    if keep_dequantized not in (True, False, "auto"):
        raise ConfigError(
            f"keep_dequantized must be True, False or 'auto', got {keep_dequantized!r}"
        )


def _check_settings(lora: object, quant: object) -> None:
    """Refuses settings of another kind, such as PEFT's."""
    for name, value, kind in (("lora", lora, LoraConfig), ("quant", quant, QuantConfig)):
        if value is not None and not isinstance(value, kind):
            theirs = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix(
                "builtins."
            )
            raise ConfigError(f"{name} must be a qlora_wgpu.{kind.__name__}, got {theirs}")
