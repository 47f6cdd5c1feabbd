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
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record import ALPHA, adapted, peft_name  # noqa: E402

from references.policy_cases import (  # noqa: E402
    ADAM_EPSILON,
    CASES,
    END,
    FUNCTIONS,
    PAD,
    RATES,
    SHAPE,
    STEPS,
    Given,
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


def given_to(kind, given):
    """A trainer's class that takes completions as given, and keeps its losses."""
    prompts, made = given.prompts, given.completions

    class Given(kind):
        losses = ()

        def _tokenize_prompts(self, texts):
            return [prompts[int(text)] for text in texts], None, {}

        def _generate_single_turn(self, prompt_ids, *_):
            ids = [made[prompts.index(p)][k % len(made[0])] for k, p in enumerate(prompt_ids)]
            return (ids, None) if kind is GRPOTrainer else ids

        def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *_, **__):
            logps, entropies = logps_and_entropies(model, ids, mask, keep, self.temperature)
            return logps, entropies.float(), None  # as their quantile is

        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            self.losses = [*self.losses, loss.item()]
            return loss

    return Given


def reward_functions(given):
    """The functions that give a table's rewards."""

    def function(number):
        def reward(prompts, **_):
            group = given.rewards.shape[1]
            return [given.rewards[int(p), k % group, number] for k, p in enumerate(prompts)]

        reward.__name__ = given.names[number]
        return reward

    return [function(number) for number in range(given.rewards.shape[-1])]


def tokenizer(end, pad):
    words = {str(number): number for number in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token=str(end),
        pad_token=str(pad),
    )  # fmt: skip


def train(model, trained, settings, given, shape=SHAPE, steps=STEPS):
    """Trains as TRL does; its losses by step, gradients and metrics."""
    options = {"beta": 0.0, "reward_weights": (1.0,), **settings}
    objective = options.pop("objective")
    trainer, config = KINDS[objective]
    options["reward_weights"] = list(options["reward_weights"])
    if options.get("steps_per_generation") == shape["accumulation"]:
        del options["steps_per_generation"]
    record = Record(trained)
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            folder, per_device_train_batch_size=shape["batch"],
            gradient_accumulation_steps=shape["accumulation"], num_generations=shape["group"],
            max_completion_length=shape["max_completion_length"], learning_rate=RATES[objective],
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0,
            adam_epsilon=ADAM_EPSILON, max_steps=steps, logging_steps=1, report_to=[],
            use_cpu=True, bf16=False, shuffle_dataset=False, save_strategy="no",
            gradient_checkpointing=False, disable_tqdm=True, **options,
        )  # fmt: skip
        run = given_to(trainer, given)(
            model, reward_functions(given), arguments,
            Dataset.from_dict({"prompt": [str(n) for n in range(len(given.prompts))]}),
            processing_class=tokenizer(END, PAD), callbacks=[record],
        )  # fmt: skip
        run.remove_callback(PrinterCallback)
        # Of rewards and what is computed of them
        torch.set_default_dtype(next(iter(trained.values())).dtype)
        try:
            run.train()
        finally:
            torch.set_default_dtype(torch.float32)
    size = shape["accumulation"]
    losses = [sum(run.losses[i : i + size]) for i in range(0, len(run.losses), size)]
    return losses, record.gradients, record.metrics


def told(arrays):
    return whole_projections({peft_name(n): array for n, array in arrays.items()})


def record(case):
    """Losses and norms (STEPS), projections (STEPS + 1, COUNT), and metrics by step."""
    model, trained = adapted("llama", torch.float64)
    settings = CASES[case]
    given = Given(*completions(), rewards(settings), FUNCTIONS, END)
    losses, gradients, metrics = train(model, trained, settings, given)
    last = {n: p.detach().numpy() for n, p in trained.items()}
    norms = [np.linalg.norm([np.linalg.norm(g) for g in own.values()]) for own in gradients]
    print(case, losses, norms, {n: v for n, v in metrics[-1].items() if "clip_" in n}, flush=True)
    return losses, norms, [told(own) for own in [*gradients, last]], metrics


def main():
    torch.set_num_threads(1)
    assert ALPHA == 10
    losses, norms, projections, metrics = zip(*map(record, sys.argv[1:] or CASES), strict=True)
    names = sorted({name for steps in metrics for own in steps for name in own})
    # Those that a step does not have are infinite, those that are none of a number NaN.
    table = [
        [[np.nan if (v := own.get(n, np.inf)) is None else v for n in names] for own in steps]
        for steps in metrics
    ]
    if not sys.argv[1:]:
        np.savez_compressed(
            HERE / "policy.npz", losses=losses, norms=norms, projections=np.float32(projections),
            names=names, metrics=np.float32(table),
        )  # fmt: skip


if __name__ == "__main__":
    main()
