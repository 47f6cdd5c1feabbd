"""A model on its device: its weights, the programs it replays, its vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.program import Program
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.adapter_model import AdapterModel, AdapterShape, FloatArray, Progress
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.programs import LogitsPrograms
from qlora_wgpu.model.steps import Samples, StepKind, TrainingOptions
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.loss import Objective


class LoadedModel(AdapterModel):
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
        super().__init__(layout, device, options=options)
        layout.load(device, progress, seed=seed)
        self.programs.fill_kept()
        if layout.filling is not None:  # which no step repeats, so that its count is kept here
            self.kept_saturated = self.count_saturated()
            self.zero_stats()
        self._shape = AdapterShape(layout, self.programs, device)
        self.write_parameters(self.adapter.initial(seed) + self.neutral)

    @property
    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing."""
        return self._shape.neutral

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
    def router_aux_loss_coef(self) -> float:
        """Factor of the loss that balances experts, which training adds; 0 without."""
        return self.architecture.balance_coefficient(self.options.router_aux_loss_coef)

    @router_aux_loss_coef.setter
    def router_aux_loss_coef(self, value: float | None) -> None:
        self.options = replace(self.options, router_aux_loss_coef=value)

    # -- a step's parts, for the trainer ---------------------------------------------------

    def accumulate(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        dropout_key: int | None = None,
        weights: FloatArray | None = None,
        samples: Samples | None = None,
    ) -> int:
        """Adds a micro-batch's summed loss and gradient on the device; does not wait.

        Args:
            ids: (batch, seq), checked.
            targets: (batch, seq), what each position predicts.
            mask: (batch, seq), checked.
            dropout_key: Turns dropout on, with this micro-batch's key.
            weights: (batch, seq) float32, of each target in the loss, which is divided by their sum
                in the end. Options that say ``weighted`` are computed with ones without any.
            samples: What an objective over answers knows of them (``options.objective.preference``,
                whose loss is divided by the number of pairs, or of answers).

        Returns:
            Its number of label tokens.

        Raises:
            ShapeError: If the weights have another shape, or one is negative or not finite; if
                samples are missing, or others than those that have a label.
        """
        options = self.options.step("train", *ids.shape)
        if weights is not None:
            weights = batch_encoding.checked_weights(weights, ids.shape)
            options = replace(options, objective=replace(options.objective, weighted=True))
        batch, program = self.programs.step(options)
        with self.device.in_turn:
            batch_encoding.write_batch(
                self.device, batch, ids, mask, targets, dropout_key=dropout_key, weights=weights,
                samples=samples,
            )  # fmt: skip
            program.run()
        return int((targets != IGNORE_INDEX).sum())

    def measure(
        self,
        kind: Literal["loss", "divergence"],
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        samples: Samples | None = None,
    ) -> None:
        """Adds a micro-batch's loss, or divergence from the reference, to ``stats``: no gradient.

        Args:
            kind: What is measured; arguments beside it as for ``accumulate``.
            ids: (batch, seq).
            targets: (batch, seq).
            mask: (batch, seq).
            samples: What is known of the samples.

        Raises:
            ShapeError: If samples are missing, or others than those that have a label.
        """
        batch, program = self._step(kind, *ids.shape)
        with self.device.in_turn:
            batch_encoding.write_batch(self.device, batch, ids, mask, targets, samples=samples)
            program.run()

    def answer_logps(
        self,
        ids: batch_encoding.IntArray,
        targets: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        count: int,
    ) -> FloatArray:
        """The summed log probability of each sample's labels, float32 (count); waits.

        Args:
            ids: (batch, seq), checked.
            targets: (batch, seq), what each position predicts.
            mask: (batch, seq), checked.
            count: Samples that have a label.
        """
        options = self.options.step("sums", *ids.shape)
        batch, program = self.programs.step(options)
        sums = self.layout.step(options).sums
        assert sums is not None
        samples = Samples.plain(count)
        with self.device.in_turn:
            batch_encoding.write_batch(self.device, batch, ids, mask, targets, samples=samples)
            program.run()
            values = np.frombuffer(program.read(sums), np.float32)
        return values.reshape(-1, 4)[:count, 0].copy()

    def prepare(self, batch: int, seq: int) -> None:
        """Compiles and allocates what training on this shape needs."""
        self._step("train", batch, seq)

    def program(self, kind: StepKind, batch: int, seq: int) -> Program:
        """The program of a ``"train"`` or ``"loss"`` micro-batch of this shape."""
        return self._step(kind, batch, seq)[1]

    def _step(self, kind: StepKind, batch: int, seq: int) -> tuple[BatchBuffers, Program]:
        return self.programs.step(self.options.step(kind, batch, seq))

    def _logits_of(self, batch: int, seq: int) -> LogitsPrograms:
        return self._shape.logits(batch, seq)
