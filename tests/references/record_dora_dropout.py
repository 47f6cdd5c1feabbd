"""Records what PEFT computes of a DoRA layer in training, with dropout.

usage: python tests/references/record_dora_dropout.py

Needs torch and peft. Writes tests/fixtures/dora_dropout.npz: inputs, the mask, which
takes the place of torch's random one, the output and the gradients.
"""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from qlora_wgpu.reference.linear import dropout_mask

ROWS, INNER, OUTER, R, P, KEYS = 11, 24, 19, 3, 0.25, (77, 88)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(INNER, OUTER)

    def forward(self, x):
        return self.layer(x)


def main():
    rng = np.random.default_rng(1)
    config = LoraConfig(
        r=R, lora_alpha=2 * R, lora_dropout=P, use_dora=True, target_modules=["layer"]
    )
    model = get_peft_model(Model(), config).double().train()
    given = {}
    for name, parameter in model.named_parameters():
        values = rng.standard_normal(parameter.shape).astype(np.float32).astype(np.float64)
        given[name.split("layer.", 1)[1]] = values
        parameter.data = torch.from_numpy(values)
    mask = dropout_mask(ROWS, 24, INNER, P, *KEYS)
    dropout = next(m for m in model.modules() if isinstance(m, torch.nn.Dropout))
    dropout.forward = lambda x: x * torch.from_numpy(mask)
    x, dy = (rng.standard_normal((ROWS, n)).astype(np.float32) for n in (INNER, OUTER))
    tx = torch.from_numpy(x).double().requires_grad_()
    y = model(tx)
    y.backward(torch.from_numpy(dy).double())
    leaves = ("lora_A", "lora_B", "lora_magnitude_vector")
    names = [f"{leaf}.default.weight" for leaf in leaves]
    own = {n.split("layer.", 1)[1]: p for n, p in model.named_parameters()}
    np.savez_compressed(
        Path(__file__).parents[1] / "fixtures/dora_dropout.npz",
        x=x, dy=dy, mask=mask, y=y.detach().numpy(), dx=tx.grad.numpy(),
        w=given["base_layer.weight"], bias=given["base_layer.bias"],
        **{f"given{i}": given[n] for i, n in enumerate(names)},
        **{f"grad{i}": own[n].grad.numpy() for i, n in enumerate(names)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
