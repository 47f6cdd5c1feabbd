"""Records what TRL's trainers make of tiny pairs and answers: losses, metrics, gradients.

usage: python tests/references/record_preferences.py FOLDER

Needs torch, transformers, peft, trl and datasets. FOLDER holds the model of tests/e2e/tiny.py,
which the same command with ``--write`` before FOLDER writes, with this project's own packages.
Writes preferences.npz beside this file.
"""

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
RANK, ALPHA, MODULES = 4, 8, ["q_proj", "down_proj"]
BETA = 0.1
DPO = {
    "sigmoid": {}, "hinge": {}, "ipo": {}, "robust": {"label_smoothing": 0.1},
    "exo_pair": {"label_smoothing": 0.2}, "nca_pair": {}, "bco_pair": {}, "sppo_hard": {},
    "apo_zero": {}, "apo_down": {}, "sigmoid_norm": {}, "sigmoid-beta": {"beta": 0.5},
    "hinge-beta": {"beta": 3.0},
}  # fmt: skip
KTO = {
    "kto": {}, "kto-weights": {"desirable_weight": 1.5, "undesirable_weight": 0.7},
    "apo_zero_unpaired": {},
}  # fmt: skip


def answers(seed, prompts, longest, vocab=83):
    """Rows of prompt and answer, their mask, and which tokens are the answer's."""
    random = np.random.default_rng(seed)
    rows = len(prompts)
    ids = random.integers(4, vocab, (rows, longest))
    mask = np.zeros_like(ids)
    completion = np.zeros_like(ids)
    for row, (prompt, length) in enumerate(prompts):
        mask[row, : prompt + length] = 1
        completion[row, prompt : prompt + length] = 1
    return ids * mask, mask, completion


def pairs():
    """Three pairs as TRL lays them out: all chosen before all rejected."""
    shapes = [(5, 7), (3, 2), (6, 10), (5, 9), (3, 6), (6, 1)]
    ids, mask, completion = answers(1, shapes, 16)
    for pair in range(3):  # of one prompt
        ids[3 + pair, : shapes[pair][0]] = ids[pair, : shapes[pair][0]]
    return ids, mask, completion


def singles():
    """Four answers, the mismatched ones that the divergence is measured over, and labels."""
    shapes = [(5, 7), (3, 2), (6, 10), (4, 4)]
    ids, mask, completion = answers(2, shapes, 16)
    other = answers(3, [(5, 4), (3, 7), (6, 2), (4, 10)], 16)
    return (ids, mask, completion), other, np.array([True, False, True, False])


def adapter(shapes):
    """A and B of every module by PEFT's names, neither of them zero."""
    random = np.random.default_rng(7)
    return {
        name: (0.3 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def main(folder):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", bos_token="<s>", eos_token="</s>",
        pad_token="</s>",
    )  # fmt: skip
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")
    common = {
        "output_dir": "/tmp/recorded-preferences", "report_to": [], "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "per_device_train_batch_size": 4,
    }  # fmt: skip
    kept = {}

    def made(trainer_type, settings, rows):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        trainer = trainer_type(
            model=model, args=settings, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, peft_config=lora,
        )  # fmt: skip
        own = {
            name.replace(".default", ""): parameter
            for name, parameter in trainer.model.named_parameters()
            if parameter.requires_grad
        }
        values = adapter({name: tuple(p.shape) for name, p in own.items()})
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(values[name]))
        return trainer, own

    def record(case, trainer, own, loss, metrics):
        trainer.model.zero_grad()
        loss.backward()
        gradient = np.concatenate([own[n].grad.float().numpy().ravel() for n in sorted(own)])
        kept[f"{case}/loss"] = np.float64(loss.item())
        kept[f"{case}/gradient"] = gradient.astype(np.float32)
        kept[f"{case}/metrics"] = np.array(json.dumps(metrics))

    def latest(trainer):
        return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}

    tensors = [torch.from_numpy(array) for array in pairs()]
    names = ("input_ids", "attention_mask", "completion_mask")
    for case, changes in DPO.items():
        given = {"beta": BETA, "loss_type": [case.split("-")[0]], **changes}
        settings = DPOConfig(**common, **given)
        trainer, own = made(
            DPOTrainer, settings, [{"prompt": "ab", "chosen": "c", "rejected": "d"}] * 4
        )
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, dict(zip(names, tensors, strict=True)), False)
        record(f"dpo/{case}", trainer, own, loss, latest(trainer))
    for beta in (0.1, 0.6):
        trainer, own = made(
            ORPOTrainer, ORPOConfig(**common, beta=beta, max_length=32),
            [{"prompt": "ab", "chosen": "c", "rejected": "d"}] * 4,
        )  # fmt: skip
        batch = {}
        for at, name in ((0, "chosen"), (3, "rejected")):
            ids, mask, completion = (t[at : at + 3] for t in tensors)
            batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = ids, mask
            batch[f"{name}_labels"] = ids.masked_fill(completion == 0, -100)
        trainer.model.train()
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        record(f"orpo/{beta}", trainer, own, loss, metrics)
    own_part, other, labels = singles()
    batch = {n: torch.from_numpy(a) for n, a in zip(names, own_part, strict=True)}
    batch |= {f"KL_{n}": torch.from_numpy(a) for n, a in zip(names, other, strict=True)}
    batch["label"] = torch.from_numpy(labels)
    for case, changes in KTO.items():
        given = {"loss_type": case.split("-")[0], "beta": BETA, **changes}
        trainer, own = made(
            KTOTrainer, KTOConfig(**common, **given),
            [{"prompt": "ab", "completion": "c", "label": i % 2 > 0} for i in range(4)],
        )  # fmt: skip
        trainer.model.train()
        loss = trainer._compute_loss(trainer.model, batch, False)
        record(f"kto/{case}", trainer, own, loss, latest(trainer))
    settings = SFTConfig(**common, loss_type="dft")
    trainer, own = made(SFTTrainer, settings, [{"prompt": "ab", "completion": "c"}] * 4)
    trainer.model.train()
    ids, mask, completion = tensors
    labels = ids.masked_fill(completion == 0, -100)
    loss = trainer.compute_loss(
        trainer.model, {"input_ids": ids, "attention_mask": mask, "labels": labels}
    )
    record("sft/dft", trainer, own, loss, {})
    kept["names"] = np.array(sorted(own))
    np.savez_compressed(HERE / "preferences.npz", **kept)


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        from e2e.tiny import write_model

        write_model(Path(sys.argv[2]))
    else:
        main(sys.argv[1])
