"""Records DPO's and ORPO's losses and gradients of answers about images, by PyTorch.

usage: python tests/references/record_image_answers.py

Needs torch, transformers and peft; tests/references/README has the versions. Models, adapters and
features are those of ``record_image_language.py``, the answers ``pairs`` of ``image_cases.py``, and
the formulas TRL's. ORPO's loss on prompts leaves out placeholders. Writes image_answers.npz.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import logsigmoid

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from references.image_cases import ANSWERED, BETA, CASES, IMAGE, pairs  # noqa: E402
from references.projections import projections  # noqa: E402
from references.record_image_language import adapted, base_model, inputs  # noqa: E402


def token_logps(model, model_type, rows, ids, mask):
    """The log probability of each token but the first, (rows, SEQ - 1)."""
    out = model(input_ids=ids, attention_mask=mask, **inputs(model_type, 0, ids, rows))
    return out.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def record(case):
    model_type, changes, targets = CASES[case]
    model, trained = adapted(base_model(model_type, changes)[0], model_type, targets)
    rows, *arrays = pairs()
    ids, mask, labels = map(torch.from_numpy, arrays)
    answer = labels[:, 1:] != -100
    with torch.no_grad(), model.disable_adapter():
        reference = (token_logps(model, model_type, rows, ids, mask) * answer).sum(1)

    def dpo(logps):
        margins = (logps * answer).sum(1) - reference
        return -logsigmoid(BETA * (margins[::2] - margins[1::2])).mean()

    def orpo(logps):
        means = (logps * answer).sum(1) / answer.sum(1)
        odds = means - torch.log1p(-means.exp())
        of_all = ((ids != IMAGE) & (mask == 1))[::2, 1:]
        likelihood = (logps[::2] * of_all).sum() / of_all.sum()
        return -likelihood - BETA * logsigmoid(odds[::2] - odds[1::2]).mean()

    kept = {"reference": reference.numpy()}
    for name, loss_of in (("dpo", dpo), ("orpo", orpo)):
        model.zero_grad()
        loss = loss_of(token_logps(model, model_type, rows, ids, mask))
        loss.backward()
        gradients = {n: trained[n].grad.numpy() for n in sorted(trained)}
        kept[f"{name}/loss"] = loss.item()
        kept[f"{name}/names"] = np.array(list(gradients))
        kept[f"{name}/norms"] = np.array([np.linalg.norm(g) for g in gradients.values()])
        kept[f"{name}/gradients"] = np.stack([projections(n, g) for n, g in gradients.items()])
        print(case, name, loss.item(), flush=True)
    return kept


def main():
    torch.set_num_threads(1)
    made = {f"{case}/{key}": v for case in ANSWERED for key, v in record(case).items()}
    np.savez_compressed(HERE / "image_answers.npz", **made)


if __name__ == "__main__":
    main()
