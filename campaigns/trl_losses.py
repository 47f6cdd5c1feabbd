"""TRL's own losses, called with a model that is computed a text at a time.

``DPOTrainer._compute_loss``, ``KTOTrainer._compute_loss``, ``ORPOTrainer.get_batch_loss_metrics``
and ``SFTTrainer.compute_loss`` run as they are, on what stands for their trainer and its model.
Needs torch and trl.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother
from trl import DPOTrainer, KTOTrainer, SFTTrainer
from trl.experimental.orpo import ORPOTrainer

from campaigns.drawn_answers import Answer, mismatched
from campaigns.torch_models import TorchModel
from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import Example
from qlora_wgpu.ops.preference import Preference

Tensors = dict[str, torch.Tensor]


class Texts:
    """What TRL calls a model: log probabilities of labels, or logits; each row by itself."""

    def __init__(self, model: TorchModel, *, autocast: bool) -> None:
        self.training = True
        self._model, self._autocast = model, autocast

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any = None, **_: Any
    ) -> Any:
        rows, seq = input_ids.shape
        logits = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            for row in range(rows):
                length = int(attention_mask[row].sum())
                own = self._model.logits_of(input_ids[row, :length].numpy()).logits[0]
                own = own if own.dtype == torch.float64 else own.float()
                logits.append(torch.nn.functional.pad(own, (0, 0, 0, seq - length)))
        whole = torch.stack(logits)
        if labels is None:
            return CausalLMOutput(logits=whole)
        whole, targets = whole[:, :-1], labels[:, 1:]
        known = targets != -100
        at = targets.clamp(min=0)[..., None]
        logps = torch.log_softmax(whole, -1).gather(-1, at)[..., 0].masked_fill(~known, 0)
        nothing = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps, entropy=nothing, mean_logits=nothing,
            is_top1=(whole.argmax(-1) == targets) & known, label_mask=known,
        )  # fmt: skip


_SAME = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x,
    parallelism_config=None, num_processes=1,
)  # fmt: skip


class Trainer:
    """What TRL's losses over answers read of the trainer that they belong to."""

    concatenated_inputs = staticmethod(ORPOTrainer.concatenated_inputs)
    get_batch_logps = staticmethod(ORPOTrainer.get_batch_logps)
    concatenated_forward = ORPOTrainer.concatenated_forward
    odds_ratio_loss = ORPOTrainer.odds_ratio_loss
    _compute_kl_logps = KTOTrainer._compute_kl_logps

    def __init__(self, given: Preference) -> None:
        self.accelerator, self.model = _SAME, SimpleNamespace(training=True)
        self.aux_loss_enabled = self.use_weighting = self.is_encoder_decoder = False
        self.ld_alpha, self.f_divergence_type, self.padding_value = None, "reverse_kl", 0
        self.precompute_ref_logps, self._total_train_tokens, self._tp_size = True, 0, 1
        self.loss_types, self.loss_weights = [given.loss_type], [1.0]
        self.loss_type, self.calculate_KL = given.loss_type, given.loss_type == "kto"
        self.beta, self.label_smoothing = given.beta, given.label_smoothing
        self.desirable_weight = given.desirable_weight
        self.undesirable_weight = given.undesirable_weight
        self._metrics: Any = defaultdict(lambda: defaultdict(list))


class Supervised:
    """What TRL's supervised loss reads of its trainer."""

    def __init__(self, given: TrainConfig) -> None:
        self.accelerator, self.model = _SAME, SimpleNamespace(training=True)
        self.args = SimpleNamespace(loss_type=given.loss, average_tokens_across_devices=True)
        epsilon = given.label_smoothing_factor
        self.label_smoother = LabelSmoother(epsilon) if epsilon else None
        self.aux_loss_enabled, self.compute_loss_func = False, None
        self._total_train_tokens, self._tp_size = 0, 1
        self._metrics: Any = defaultdict(lambda: defaultdict(list))


def supervised_loss(
    given: TrainConfig, model: Texts, rows: list[Example]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a step's rows as one batch, with its graph; and TRL's metrics."""
    shape = len(rows), max(map(len, rows))
    ids, mask = torch.zeros((2, *shape), dtype=torch.int64)
    labels = torch.full(shape, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.from_numpy(row.input_ids)
        labels[number, : len(row)] = torch.from_numpy(row.labels)
        mask[number, : len(row)] = 1
    trainer: Any = Supervised(given)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return SFTTrainer.compute_loss(trainer, model, batch), _latest(trainer)


def padded(answers: list[Answer]) -> Tensors:
    """Rows as TRL's collators make them: input_ids, attention_mask, completion_mask."""
    longest = max(len(each.prompt) + len(each.answer) for each in answers)
    arrays = np.zeros((3, len(answers), longest), np.int64)
    for row, each in enumerate(answers):
        first, end = len(each.prompt), len(each.prompt) + len(each.answer)
        arrays[0, row, :end] = each.prompt + each.answer
        arrays[1, row, :end] = 1
        arrays[2, row, first:end] = 1
    names = ("input_ids", "attention_mask", "completion_mask")
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


def _labels(rows: Tensors) -> torch.Tensor:
    return rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)


def said(model: Texts, answers: list[Answer]) -> torch.Tensor:
    """What a model says of answers, without gradient."""
    rows = padded(answers)
    with torch.no_grad():
        given = rows["input_ids"], rows["attention_mask"]
        return model(*given, labels=_labels(rows)).log_probs.sum(1)


def trl_loss(
    given: Preference, model: Texts, reference: Texts, answers: list[Answer], longest: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a step's answers as one batch, with its graph; and TRL's metrics."""
    trainer: Any = Trainer(given)
    if given.objective == "kto":
        own, batch = padded(answers), {"label": torch.tensor([a.is_good for a in answers])}
        batch |= {**own, "ref_logps": said(reference, answers)}
        if trainer.calculate_KL:
            other = mismatched(answers, longest)
            batch |= {f"KL_{name}": rows for name, rows in padded(other).items()}
            batch["ref_KL_logps"] = said(reference, other)
        loss = KTOTrainer._compute_loss(trainer, model, batch, False)
        return loss, _latest(trainer)
    sides = answers[::2], answers[1::2]
    if given.objective == "dpo":
        batch = padded([*sides[0], *sides[1]])
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            batch[f"ref_{name}_logps"] = said(reference, side)
        loss = DPOTrainer._compute_loss(trainer, model, batch, False)
        return loss, _latest(trainer)
    batch = {}
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        rows = padded(side)
        batch |= {f"{name}_input_ids": rows["input_ids"], f"{name}_labels": _labels(rows)}
        batch[f"{name}_attention_mask"] = rows["attention_mask"]
    loss, metrics = ORPOTrainer.get_batch_loss_metrics(trainer, model, batch)
    return loss, metrics


def _latest(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
