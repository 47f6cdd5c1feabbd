"""Texts that grow a token at a time, held to whole forwards of PyTorch in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from campaigns.torch_models import TorchModel
from qlora_wgpu import QLoRAModel
from qlora_wgpu.generation import Decoder, Engine

PROMPTS = (1, 2, 5, 17, 33, 63, 65, 90)
ADDED = 12


@dataclass
class Grown:
    """How far texts are off, of the largest logit.

    Attributes:
        logits: Those of the token after a text, and log probabilities of the tokens that came.
        whole: The last of these logits where the text was computed as a whole here.
        behind: By how much a token that came is less likely than the likeliest.
    """

    logits: float = 0.0
    whole: float = 0.0
    behind: float = 0.0

    def __str__(self) -> str:
        return f"{self.logits:.1e} (whole {self.whole:.1e}), tokens {self.behind:.1e} behind"


def grown(rng: random.Random, model: QLoRAModel, theirs: TorchModel, vocab: int) -> Grown:
    """Three texts of unlike lengths beside one another, then one of them by itself."""
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in rng.sample(PROMPTS, 3)]
    found = Grown()
    capacity = max(map(len, prompts)) + ADDED
    engine = Engine(model, len(prompts), capacity)
    texts = [engine.add(ids, max_new_tokens=ADDED, logprobs=0) for ids in prompts]
    for text in texts:
        for _ in text:
            pass
    exact = [
        _after(theirs, [text.all_ids[:end] for end in range(len(text.prompt_ids), text.length)])
        for text in texts
    ]
    for text, rows in zip(texts, exact, strict=True):
        for token, told, logits in zip(text.ids, text.told, rows, strict=True):
            largest = np.abs(logits).max()
            likely = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            found.logits = _worst(found.logits, abs(told.logprob - likely[token]) / largest)
            found.behind = _worst(found.behind, (logits.max() - logits[token]) / largest)
    decoder = Decoder(model, capacity)
    text = rng.choice(texts)
    rows = exact[texts.index(text)]
    steps = [decoder.start(text.prompt_ids), *(decoder.step(token) for token in text.ids[:-1])]
    for ours, logits in zip(steps, rows, strict=True):
        found.logits = _worst(found.logits, np.abs(ours - logits).max() / np.abs(logits).max())
    whole = model.logits(np.array([text.all_ids[:-1]]))[0, -1]
    found.whole = _worst(0.0, np.abs(whole - rows[-1]).max() / np.abs(rows[-1]).max())
    return found


def _worst(before: float, value: float) -> float:
    """The larger one, of which NaN is the largest."""
    return max(before, float(value)) if np.isfinite(value) else np.inf


def _after(theirs: TorchModel, texts: list[list[int]]) -> list[np.ndarray]:
    with torch.no_grad():
        return [theirs.logits_of(np.array(ids)).logits[0, -1].numpy() for ids in texts]
