"""Records what PyTorch computes for some models of the campaign of random shapes.

usage: PYTHONPATH=. python tests/references/record_shapes.py [MODEL_TYPE:SEED ...]

Needs torch, transformers and peft. Writes tests/references/shapes/MODEL_TYPE-SEED.npz: the drawn
config.json, adapter, quantization and batch; the loss; of every gradient its norm and projections,
and of logits the same (``projections.py``). Weights and adapter follow from their names.
"""

import json
import random
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from campaigns.drawn_models import drawn  # noqa: E402
from campaigns.model_shapes import Trial  # noqa: E402
from qlora_wgpu.gpu.device import Device  # noqa: E402
from references.projections import projections  # noqa: E402

CASES = [
    "deepseek_v2:1", "deepseek_v3:1", "ernie4_5_moe:2", "exaone_moe:1", "gemma3n_text:1",
    "gemma4_text:1", "glm4_moe:1", "glm4_moe_lite:1", "gpt_oss:1", "hunyuan_v1_moe:1", "lfm2:1",
    "lfm2_moe:1", "qwen3_5_moe_text:1", "qwen3_next:1", "qwen3_next:2", "smollm3:1",
]  # fmt: skip


def usual(case):
    """Whether a drawn case learns something, and is small enough for a test."""
    tokens = int((case.mask > 0).sum())
    return 16 <= tokens <= 140 and (case.labels[:, 1:] != -100).any()


def record(name, device):
    """Writes the first usual draw of a family from a seed on."""
    model_type, _, seed = name.partition(":")
    for number in range(100):
        rng = random.Random(f"{seed} {number} {model_type}")
        case = drawn(rng, model_type)
        if usual(case):
            break
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(case, Path(folder), device)
        exact = trial.theirs().cast(torch.float64).computed(case.samples)
    told = {"config": case.config, "lora": case.lora.model_dump(), "quant": case.quant.model_dump()}
    file = HERE / "shapes" / f"{model_type}-{seed}.npz"
    np.savez_compressed(
        file,
        case=json.dumps(told),
        ids=case.ids.astype(np.int32), mask=case.mask.astype(np.int8),
        labels=case.labels.astype(np.int32), loss=exact.loss,
        logits=projections("logits", np.concatenate(exact.logits)),
        logits_norm=np.linalg.norm(np.concatenate(exact.logits)),
        names=np.array(sorted(exact.gradients)),
        norms=np.array([np.linalg.norm(exact.gradients[n]) for n in sorted(exact.gradients)]),
        gradients=np.stack([projections(n, exact.gradients[n]) for n in sorted(exact.gradients)]),
    )  # fmt: skip
    print(name, case.config["num_hidden_layers"], case.ids.shape, file.stat().st_size, flush=True)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (HERE / "shapes").mkdir(exist_ok=True)
    device = Device()
    for name in sys.argv[1:] or CASES:
        record(name, device)


if __name__ == "__main__":
    main()
