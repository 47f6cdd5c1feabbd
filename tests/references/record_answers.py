"""Records what TRL's losses are for some steps of the campaign of preferences at random shapes.

usage: PYTHONPATH=. python tests/references/record_answers.py [CASE ...]

Needs torch, transformers, peft and trl. Writes tests/references/answers/CASE.npz: the drawn
config.json, adapter, quantization, answers and batches; loss and metrics; of every gradient its
norm and projections (``projections.py``). Weights and adapter follow from their names.
"""

import json
import random
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from campaigns.drawn_answers import drawn_step, scaled  # noqa: E402
from campaigns.model_shapes import Trial  # noqa: E402
from campaigns.preference_shapes import theirs  # noqa: E402
from qlora_wgpu.gpu.device import Device  # noqa: E402
from references.projections import projections  # noqa: E402


def sides(step):
    """Whether answers are good, in their order."""
    return [each.is_good for each in step.answers]


def loss(step, *names):
    """Whether the objective's loss is one of some."""
    return step.given.loss_type in names


CASES = {
    "no-prompt": ("llama", lambda c, s: loss(s, "ipo", "sigmoid_norm")
                  and any(not a.prompt for a in s.answers) and any(a.prompt for a in s.answers)),
    "all-good": ("qwen3", lambda c, s: loss(s, "kto") and all(sides(s)) and len(s.answers) > 2
                 and s.config.data.packing and s.given.desirable_weight),
    "all-bad": ("qwen2", lambda c, s: loss(s, "kto") and not any(sides(s)) and len(s.answers) > 2
                and s.from_adapter and s.given.undesirable_weight),
    "weight-of-zero": ("olmo2", lambda c, s: loss(s, "kto") and 0 < sum(sides(s)) < len(s.answers)
                       and s.given.desirable_weight == 0 < s.given.undesirable_weight),
    "odds-of-rows": ("gemma2", lambda c, s: loss(s, "orpo") and c.lora.trainable_token_indices
                     and len(s.answers) > 4),
    "whole-head": ("granite", lambda c, s: loss(s, "exo_pair") and c.lora.modules_to_save
                   and s.config.data.packing and len(s.answers) > 2),
    "pair-on-the-head": ("cohere", lambda c, s: loss(s, "robust", "nca_pair", "sppo_hard")
                         and "lm_head" in c.lora.target_modules and len(s.answers) > 2),
    "dora": ("mistral", lambda c, s: loss(s, "apo_down", "apo_zero", "bco_pair")
             and c.lora.use_dora and s.from_adapter),
    "mixture": ("mixtral", lambda c, s: loss(s, "apo_zero_unpaired") and len(s.answers) > 2
                and s.given.desirable_weight and s.given.undesirable_weight
                and c.config.get("output_router_logits")),
    "strong-beta": ("phi3", lambda c, s: loss(s, "sigmoid", "hinge") and s.given.beta == 5
                    and not s.has_ties and len(s.answers) > 4),
}  # fmt: skip


def usual(case, step):
    """Whether a step is small enough for a test, and has something to learn."""
    config = case.config
    small = config["hidden_size"] <= 136 and config["num_hidden_layers"] <= 2
    small = small and config.get("head_dim", 0) <= 64 and case.lora.r <= 16
    return small and step.answers and not step.has_ties


def chosen(name):
    """The first draw that is as the case says."""
    model_type, fits = CASES[name]
    for number in range(20_000):
        try:
            case, step, factor = drawn_step(random.Random(f"{name} {number}"), model_type)
        except Exception:  # what a family refuses
            continue
        if usual(case, step) and fits(case, step):
            return case, step, factor
    raise SystemExit(f"{name}: nothing drawn is such")


def record(name, device):
    """Writes a case."""
    case, step, factor = chosen(name)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(case, Path(folder), device)
        trial.adapter = scaled(trial.adapter, factor)
        exact = theirs(trial, step)
    told = {
        "config": case.config, "lora": case.lora.model_dump(), "quant": case.quant.model_dump(),
        "given": asdict(step.given), "answers": [asdict(each) for each in step.answers],
        "run": step.config.model_dump(mode="json", include={"model", "data", "train"}),
        "from_adapter": step.from_adapter, "factor": factor,
    }  # fmt: skip
    file = HERE / "answers" / f"{name}.npz"
    names = sorted(exact.gradients)
    np.savez_compressed(
        file,
        case=json.dumps(told), loss=exact.loss, metrics=json.dumps(exact.metrics),
        names=np.array(names),
        norms=np.array([np.linalg.norm(exact.gradients[n]) for n in names]),
        gradients=np.stack([projections(n, exact.gradients[n]) for n in names]),
    )  # fmt: skip
    print(name, step.given, len(step.answers), exact.loss, file.stat().st_size, flush=True)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (HERE / "answers").mkdir(exist_ok=True)
    device = Device()
    for name in sys.argv[1:] or CASES:
        record(name, device)


if __name__ == "__main__":
    main()
