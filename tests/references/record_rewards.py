"""Records steps of TRL's RewardTrainer, by its own loop.

usage: python tests/references/record_rewards.py

Needs torch, transformers, peft and trl. Writes tests/references/scores/loops.npz: of the recorded
reward model with its seeded adapter (record_scores.py) in float64, three steps of AdamW over pairs
in their order. By case and step: the loss, the logged metrics, the gradient's norm and its
projections (``projections.py``); and those of the last adapter.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers.trainer_callback import PrinterCallback
from trl import RewardConfig, RewardTrainer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record_heads import file_name  # noqa: E402
from record_policy import Record, tokenizer  # noqa: E402
from record_scores import adapted  # noqa: E402

from references.projections import whole_projections  # noqa: E402
from references.reward_cases import ADAM_EPSILON, CASES, RATE, STEPS, pairs  # noqa: E402
from references.score_cases import PADDING  # noqa: E402
from references.seeded import VOCAB  # noqa: E402

METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")


class InOrder(RewardTrainer):
    """A trainer that does not shuffle, and keeps its losses."""

    losses = ()

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given, **named):
        loss = super().training_step(*given, **named)
        self.losses = [*self.losses, loss.item()]
        return loss


def record(case):
    given = CASES[case]
    model, _, *_ = adapted("reward")
    trained = {file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    rows, margins = pairs()
    data = {"chosen_ids": [row[0] for row in rows], "rejected_ids": [row[1] for row in rows]}
    data |= {"margin": margins} if given["margins"] else {}
    record = Record(trained)
    with tempfile.TemporaryDirectory() as folder:
        arguments = RewardConfig(
            folder, per_device_train_batch_size=given["batch"],
            gradient_accumulation_steps=given["accumulation"], learning_rate=RATE,
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0,
            adam_epsilon=ADAM_EPSILON, max_steps=STEPS, logging_steps=1, report_to=[],
            use_cpu=True, bf16=False, save_strategy="no", gradient_checkpointing=False,
            disable_tqdm=True, center_rewards_coefficient=given["center"] or None,
        )  # fmt: skip
        run = InOrder(
            model, arguments, train_dataset=Dataset.from_dict(data),
            processing_class=tokenizer(VOCAB - 1, PADDING), callbacks=[record],
        )  # fmt: skip
        run.remove_callback(PrinterCallback)
        run.train()
    size = given["accumulation"]
    losses = [sum(run.losses[i : i + size]) for i in range(0, len(run.losses), size)]
    last = {n: p.detach().numpy() for n, p in trained.items()}
    norms = [np.linalg.norm([np.linalg.norm(g) for g in own.values()]) for own in record.gradients]
    print(case, losses, norms, flush=True)
    told = [whole_projections(own) for own in [*record.gradients, last]]
    return losses, norms, told, [[own[name] for name in METRICS] for own in record.metrics]


def main():
    torch.set_num_threads(1)
    losses, norms, told, metrics = zip(*map(record, CASES), strict=True)
    np.savez_compressed(
        HERE / "scores" / "loops.npz", losses=losses, norms=norms, projections=np.float32(told),
        names=METRICS, metrics=np.float32(metrics),
    )  # fmt: skip


if __name__ == "__main__":
    main()
