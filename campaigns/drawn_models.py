"""Models, adapters and batches of random shapes, and how far results of them are apart."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from campaigns.drawn_configs import drawn_config
from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, Profile

LENGTHS = (1, 2, 17, 17, 63, 65, 65, 130, 257)
EXACT = 1e-4
FLOOR = 1e-6  # of the whole gradient, below which a tensor's own is rounding
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sample:
    """A text of a batch.

    Attributes:
        row: The row that it is in.
        first: Where in the row it begins.
        ids: Its tokens.
        labels: The same, -100 where nothing is to be learnt.
    """

    row: int
    first: int
    ids: np.ndarray
    labels: np.ndarray


@dataclass
class Result:
    """What a batch gives.

    Attributes:
        loss: The mean over all labels, and the balance of experts if it is a part of the loss.
        logits: Of each sample, (tokens, vocab_size).
        gradients: By PEFT's names.
    """

    loss: float
    logits: list[np.ndarray]
    gradients: Arrays


@dataclass(frozen=True)
class Drawn:
    """A model, its adapter and a batch."""

    config: dict[str, Any]
    lora: LoraConfig
    quant: QuantConfig
    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray

    @property
    def samples(self) -> list[Sample]:
        found = []
        for row, marks in enumerate(self.mask):
            for number in range(1, int(marks.max()) + 1):
                at = np.flatnonzero(marks == number)
                if not len(at):
                    continue
                own = self.ids[row, at], self.labels[row, at]
                found.append(Sample(row, int(at[0]), *own))
        return found


def drawn(rng: random.Random, model_type: str) -> Drawn:
    """A trial; its config.json may be refused."""
    config = drawn_config(rng, model_type)
    architecture = find_family(config).read(config)
    lora, quant = drawn_lora(rng, architecture), drawn_quant(rng)
    return Drawn(config, lora, quant, *_batch(rng, config["vocab_size"]))


def drawn_quant(rng: random.Random) -> QuantConfig:
    """How the base is held."""
    return QuantConfig(
        scheme=rng.choice(("none", "nf4")), blocksize=rng.choice((32, 64, 64, 128, 512)),
        double_quant=rng.random() < 0.5,
    )  # fmt: skip


def drawn_lora(rng: random.Random, architecture: Architecture) -> LoraConfig:
    """An adapter of some linear layers of a model."""
    names = [spec.name for spec in architecture.every_linear]
    of_experts = {name.rsplit(".", 1)[-1] for name in names if ".experts." in name}
    leaves = {name.rsplit(".", 1)[-1] for name in names} - {"lm_head"}
    dora = rng.random() < 0.25 and bool(leaves - of_experts)
    rank = rng.choice((1, 3, 8, 16, 64, 130, 256))
    if of_experts and len(names) > 40:
        rank = min(rank, 8)
    chosen = sorted(leaves - of_experts if dora else leaves)
    if of_experts and not dora and rng.random() < 0.2:
        chosen = sorted(of_experts)
    elif rng.random() < 0.3:
        chosen = sorted(rng.sample(chosen, rng.randint(1, len(chosen))))
    patterns: dict[str, Any] = {}
    if rng.random() < 0.3:
        patterns["rank_pattern"] = {rng.choice(chosen): rng.choice((1, 2, 8, 33))}
        patterns["alpha_pattern"] = {rng.choice(chosen): 7}
    stabilized = rng.random() < 0.2
    layers = sorted({int(at[1]) for n in names if (at := re.search(r"\.layers\.(\d+)\.", n))})
    if rng.random() < 0.25:
        patterns["layers_to_transform"] = sorted(rng.sample(layers, rng.randint(1, len(layers))))
    return LoraConfig(
        r=rank, lora_alpha=rng.choice((0.5, 1, 1.37, 2)) * (rank**0.5 if stabilized else rank),
        target_modules=chosen, use_dora=dora, use_rslora=stabilized, **patterns,
    )  # fmt: skip


def _batch(rng: random.Random, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, length = rng.choice((1, 2, 3)), rng.choice(LENGTHS)
    random_ids = np.random.default_rng(rng.randrange(2**32))
    ids = random_ids.integers(0, vocab, (rows, length))
    mask = np.ones_like(ids)
    for row in range(rows):
        kind = rng.choice(("whole", "padded", "packed", "packed and padded"))
        if "packed" in kind and length > 2:
            for number, at in enumerate(sorted(rng.sample(range(1, length), min(2, length - 1)))):
                mask[row, at:] = number + 2
        if "padded" in kind and length > 1:
            mask[row, -rng.randint(1, max(length // 2, 1)) :] = 0
    labels = np.where(mask > 0, ids, -100)
    labels[random_ids.random(labels.shape) < 0.2] = -100
    return ids, mask, labels


def met(config: dict[str, Any]) -> bool:
    """Whether rounding may send a token to another expert."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    tops = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
    count = next((config[key] for key in counts if config.get(key)), 0)
    top = next((config[key] for key in tops if config.get(key)), 0)
    return bool(count) and top < count


def write_model(folder: Path, config: dict[str, Any], tensors: Arrays) -> None:
    """A folder as Hugging Face has it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def profiles(device: Device) -> dict[str, Profile]:
    """Ways to cut kernels, by names: all, or those that PROFILES names."""
    blocks = {"head_block": 256}
    every = {
        "textures": replace(device.profile, **blocks),
        "buffers": replace(CPU_PROFILE, **blocks),
        "gpu": replace(GPU_PROFILE, **blocks),
        "registers": replace(GPU_PROFILE, gemm_kind="register", attention_kind="register"),
    }
    names = os.environ.get("PROFILES", "")
    return {name: every[name] for name in names.split(",")} if names else every


@dataclass
class Errors:
    """How far a result is off: relative, of logits by their largest.

    Attributes:
        loss: Of the loss.
        logits: Of the logits.
        whole: Of the whole gradient.
        worst: Of the tensor of it that is furthest off.
        name: That tensor's.
    """

    loss: float
    logits: float
    whole: float
    worst: float
    name: str

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, logits {self.logits:.1e}, gradient {self.whole:.1e}, "
            f"worst {self.worst:.1e} ({self.name})"
        )


def errors(got: Result, exact: Result) -> Errors:
    """How far a result is off."""
    assert got.gradients.keys() == exact.gradients.keys(), (
        got.gradients.keys() ^ exact.gradients.keys()
    )
    norm = lambda array: float(np.linalg.norm(array))  # noqa: E731
    size = sum(norm(a) ** 2 for a in exact.gradients.values()) ** 0.5
    off = {n: norm(got.gradients[n] - a) for n, a in exact.gradients.items()}
    each = {
        n: off[n] / max(norm(a), FLOOR / EXACT * size, 1e-30) for n, a in exact.gradients.items()
    }
    name = max(each, key=lambda n: each[n] if np.isfinite(each[n]) else np.inf)
    largest = max(np.abs(rows).max() for rows in exact.logits)
    apart = [np.abs(a - b).max() for a, b in zip(got.logits, exact.logits, strict=True)]
    return Errors(
        abs(got.loss - exact.loss) / max(abs(exact.loss), 1e-30) if exact.loss or got.loss else 0.0,
        max(apart) / largest if np.isfinite(apart).all() else np.inf,
        sum(a**2 for a in off.values()) ** 0.5 / max(size, 1e-30),
        each[name],
        name,
    )
