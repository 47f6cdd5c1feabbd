"""Records steps of TRL's GRPOTrainer and RLOOTrainer over given completions and rewards.

usage: python tests/references/record_policy.py

Needs torch, transformers, peft and trl. Writes tests/references/policy.npz: of the recorded Llama
with its seeded adapter (record.py), in float64, three steps of AdamW by TRL's own loop, which gets
the completions instead of sampling them, does not shuffle them and computes log probabilities in
float64. By case and step: the loss, the logged metrics, the gradient's norm and its projections
(``projections.py``); and those of the last adapter.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record import ALPHA, adapted, peft_name  # noqa: E402

from references.policy_cases import (  # noqa: E402
    ACCUMULATION,
    ADAM_EPSILON,
    BATCH,
    CASES,
    END,
    FUNCTIONS,
    GROUP,
    MAX_COMPLETION_LENGTH,
    PAD,
    RATES,
    STEPS,
    completions,
    rewards,
)
from references.projections import whole_projections  # noqa: E402
from references.seeded import VOCAB  # noqa: E402

NOT_COMPARED = ("num_tokens", "step_time", "grad_norm", "learning_rate", "epoch", "loss")
KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
    module.shuffle_sequence_dict = lambda batch: batch


class Record(TrainerCallback):
    """Keeps gradients before each update, and what is logged."""

    def __init__(self, trained):
        self.trained, self.gradients, self.metrics = trained, [], []

    def on_pre_optimizer_step(self, *_, **__):
        self.gradients.append({n: p.grad.numpy().copy() for n, p in self.trained.items()})

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            left = (n for n in logs if n not in NOT_COMPARED and not n.startswith("profiling/"))
            self.metrics.append({name: logs[name] for name in left})


def logps_and_entropies(model, ids, mask, count, temperature):
    """Of each row by itself, in float64, which TRL's fused head is not."""
    pairs = []
    for row, own in zip(ids, mask == 1, strict=True):
        answer = int(own[-count:].sum())  # none of one that is masked
        logps = model(input_ids=row[own][None]).logits[0, :-1].div(temperature).log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1).detach()
        made = logps.gather(-1, row[own][1:, None])[:, 0]
        pair = torch.stack([made, entropies])[:, len(made) - answer :]
        pairs.append(torch.nn.functional.pad(pair, (0, count - answer)))
    return torch.stack(pairs, 1)


def given_to(kind, prompts, made):
    """A trainer's class that takes completions as given, and keeps its losses."""

    class Given(kind):
        losses = ()

        def _tokenize_prompts(self, texts):
            return [prompts[int(text)] for text in texts], None, {}

        def _generate_single_turn(self, prompt_ids, *_):
            numbers = [prompts.index(ids) for ids in prompt_ids]
            ids = [made[n][k % len(made[n])] for k, n in enumerate(numbers)]
            return (ids, None) if kind is GRPOTrainer else ids

        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *_, **__):
            logps, entropies = logps_and_entropies(model, ids, mask, keep, self.temperature)
            return logps, entropies.float(), None  # as their quantile is

        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            self.losses = [*self.losses, loss.item()]
            return loss

    return Given


def reward_functions(prompts, made, table):
    """The functions that give a table's rewards."""

    def function(number):
        def reward(prompts, completion_ids, **_):
            return [
                table[int(p)][k % len(made[int(p)])][number] for k, p in enumerate(prompts)
            ]

        reward.__name__ = FUNCTIONS[number]
        return reward

    return [function(number) for number in range(table.shape[-1])]


def tokenizer():
    words = {str(number): number for number in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token=str(END),
        pad_token=str(PAD),
    )  # fmt: skip


def train(model, trained, settings, prompts, made, table, steps=STEPS):
    """Trains as TRL does; its losses by step, gradients and metrics."""
    settings = dict(settings)
    objective = settings.pop("objective")
    trainer, config = KINDS[objective]
    weights = settings.pop("reward_weights", (1.0,))
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION,
            "num_generations": GROUP, "max_completion_length": MAX_COMPLETION_LENGTH,
            "beta": 0.0, **settings,
        }  # fmt: skip
        if options.get("steps_per_generation") == options["gradient_accumulation_steps"]:
            del options["steps_per_generation"]
        if options.get("reward_clip_range"):
            options["reward_clip_range"] = tuple(options["reward_clip_range"])
        arguments = config(
            folder, learning_rate=RATES[objective], lr_scheduler_type="constant", weight_decay=0.0,
            max_grad_norm=0.0, adam_epsilon=ADAM_EPSILON, max_steps=steps, logging_steps=1,
            report_to=[], use_cpu=True, bf16=False, shuffle_dataset=False, save_strategy="no",
            gradient_checkpointing=False, disable_tqdm=True, reward_weights=list(weights),
            **options,
        )  # fmt: skip
        record = Record(trained)
        run = given_to(trainer, prompts, made)(
            model, reward_functions(prompts, made, table), arguments,
            Dataset.from_dict({"prompt": [str(n) for n in range(len(prompts))]}),
            processing_class=tokenizer(), callbacks=[record],
        )  # fmt: skip
        torch.set_default_dtype(torch.float64)  # of rewards and what is computed of them
        try:
            run.train()
        finally:
            torch.set_default_dtype(torch.float32)
    size = options["gradient_accumulation_steps"]
    losses = [sum(run.losses[i : i + size]) for i in range(0, len(run.losses), size)]
    return losses, record.gradients, record.metrics


def record(case):
    """Losses and norms (STEPS), projections (STEPS + 1, COUNT), and metrics by step."""
    model, trained = adapted("llama", torch.float64)
    settings = CASES[case]
    prompts, made = completions()
    table = rewards(settings)
    losses, gradients, metrics = train(model, trained, settings, prompts, made, table)
    last = {n: p.detach().numpy() for n, p in trained.items()}
    told = [
        whole_projections({peft_name(n): array for n, array in own.items()})
        for own in [*gradients, last]
    ]
    norms = [np.linalg.norm([np.linalg.norm(g) for g in own.values()]) for own in gradients]
    print(case, losses, norms, {n: v for n, v in metrics[-1].items() if "clip_" in n}, flush=True)
    return losses, norms, told, metrics


def main():
    torch.set_num_threads(1)
    assert ALPHA == 10
    losses, norms, told, metrics = zip(*map(record, sys.argv[1:] or CASES), strict=True)
    names = sorted({name for steps in metrics for own in steps for name in own})
    # Those that a step does not have are infinite, those that are none of a number NaN.
    table = [
        [[np.nan if (v := own.get(n, np.inf)) is None else v for n in names] for own in steps]
        for steps in metrics
    ]
    if not sys.argv[1:]:
        np.savez_compressed(
            HERE / "policy.npz", losses=losses, norms=norms, projections=np.float32(told),
            names=names, metrics=np.float32(table),
        )  # fmt: skip


if __name__ == "__main__":
    main()
