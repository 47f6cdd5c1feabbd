"""AdamW, Lion and Muon on the demo's LoRA matrices, each at several learning rates, in PyTorch.

    python benchmarks/optimizers.py

With torch 2.13 or later and transformers, on a CPU: some seven minutes of one core. The base is
rounded to NF4; a rate is chosen by one seed, and two more tell what seeds differ by.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

DEMO = Path(__file__).parents[1] / "demo"
RATES = {
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "lion": (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3),
    "muon": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
RANK, BATCH, EPOCHS = 16, 16, 5
NF4 = torch.tensor(
    [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803,
     0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
)  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer in NF4 with A and B."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        blocks = layer.weight.detach().reshape(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True)
        codes = ((blocks / scale)[..., None] - NF4).abs().argmin(-1)
        self.weight = (NF4[codes] * scale).reshape(layer.weight.shape)
        bound = 1 / math.sqrt(layer.in_features)
        start = torch.rand(RANK, layer.in_features, generator=generator)
        self.a = nn.Parameter((2 * start - 1) * bound)
        self.b = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + 2 * (x @ self.a.T @ self.b.T)


class Lion(torch.optim.Optimizer):
    """One moment, and updates of the rate's full size."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * torch.sign(0.9 * m + 0.1 * p.grad)
                m.mul_(0.99).add_(p.grad, alpha=0.01)


def optimizer_of(name: str, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=0.0)
    if name == "lion":
        return Lion(parameters, lr)
    return torch.optim.Muon(
        parameters, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )  # fmt: skip


def rows_of(name: str) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of a file, whose answers alone are learnt."""
    tokenizer, rows = AutoTokenizer.from_pretrained(DEMO / "base"), []
    for line in (DEMO / "data" / name).read_text(encoding="utf-8").splitlines():
        chat = json.loads(line)["messages"]
        prompt, ids = (
            list(tokenizer.apply_chat_template(part, add_generation_prompt=ends)["input_ids"])
            for part, ends in ((chat[:-1], True), (chat, False))
        )
        rows.append((ids[:64], ([-100] * len(prompt) + ids[len(prompt) :])[:64]))
    return rows


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [-100] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


def trained(name: str, lr: float, seed: int) -> float:
    """The held-out loss after five epochs."""
    train, held_out = rows_of("train.jsonl"), rows_of("eval.jsonl")
    generator, order = torch.Generator().manual_seed(seed), random.Random(seed)
    model = LlamaForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    model.requires_grad_(False)
    parameters: list[nn.Parameter] = []
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for key, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, key, Adapted(module, generator))
                    parameters += getattr(block, key).parameters()
    optimizer, step = optimizer_of(name, parameters, lr), 0
    steps = EPOCHS * math.ceil(len(train) / BATCH)
    warm = round(0.03 * steps)
    for _ in range(EPOCHS):
        numbers = order.sample(range(len(train)), len(train))
        for begin in range(0, len(numbers), BATCH):
            step += 1
            ids, labels = padded([train[i] for i in numbers[begin : begin + BATCH]])
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
            optimizer.param_groups[0]["lr"] = lr * (step / warm if step <= warm else cosine)
            optimizer.step()
    ids, labels = padded(held_out)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


def main() -> None:
    torch.set_num_threads(1)
    for name, rates in RATES.items():
        losses = {rate: trained(name, rate, 1) for rate in rates}
        print(name, {rate: round(loss, 4) for rate, loss in losses.items()})
        best = min(losses, key=lambda rate: losses[rate])
        seeds = [losses[best], *(trained(name, best, seed) for seed in (2, 3))]
        print(f"{name} at {best:g}: {[round(loss, 4) for loss in seeds]}")


if __name__ == "__main__":
    main()
