"""Models of random shapes, each computed here and by transformers and PEFT: every family.

Weights are those that the device holds, dequantized, so that arithmetic alone is compared: logits,
the loss and the gradient of every A and B, in both types of operands, as kernels are cut for
software and for other GPUs; now and then texts, token by token. Needs torch, transformers and peft.

``python -m campaigns.model_shapes --count N --seed S``, with FAMILIES=MODEL_TYPE,... for some
families, PROFILES=textures,... for some ways to cut kernels and TEXTS=1 for texts of every model
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from e2e.test_family_types import normalize, shapes
from references.seeded import adapter as seeded_adapter
from references.seeded import weights
from transformers.utils import logging

from campaigns.drawn_configs import FAMILIES
from campaigns.drawn_models import (
    EXACT,
    Drawn,
    Errors,
    Result,
    drawn,
    errors,
    met,
    profiles,
    write_model,
)
from campaigns.support import Tally, campaign
from campaigns.torch_models import TorchModel, as_stacks
from qlora_wgpu import QLoRAModel
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.generation import Engine
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile

ROUNDED = {"float32": 2**-24, "bfloat16": 2**-9}
SENSITIVE = 0.2  # PyTorch's error in bfloat16, beyond which a case tells nothing of ours


class Trial:
    """A drawn model on both sides."""

    def __init__(self, case: Drawn, place: Path, device: Device) -> None:
        self.case, self.place, self.device = case, place, device
        self.own = device.profile
        write_model(place / "model", case.config, normalize(weights(*shapes(case.config))))
        model = self.opened("float32", device.profile, fresh=True)
        names = {n: a.shape for n, a in model.adapter_state_dict().items()}
        self.adapter = seeded_adapter(names)
        normalize(self.adapter)
        held = {n: np.array(a, order="C") for n, a in model.base_state_dict().items()}
        stacked = as_stacks(case.config["model_type"], held)
        write_model(place / "held", case.config, stacked)
        model.close()

    def opened(self, dtype: Any, profile: Profile, *, fresh: bool = False) -> QLoRAModel:
        """Our model."""
        case = self.case
        self.device.profile = profile
        try:
            model = QLoRAModel.from_pretrained(
                self.place / "model", case.lora, case.quant, dtype, self.device
            )
        finally:
            self.device.profile = self.own
        if not fresh:
            model.load_adapter(self.adapter)
        return model

    def computed(self, model: QLoRAModel) -> Result:
        """Ours."""
        case = self.case
        logits = model.logits(case.ids, case.mask)
        loss, gradients = model.loss_and_grads(case.ids, case.labels, case.mask)
        rows = [logits[s.row, s.first : s.first + len(s.ids)] for s in case.samples]
        return Result(loss, rows, gradients)

    def theirs(self) -> TorchModel:
        """PyTorch's."""
        return TorchModel(self.place / "held", self.case.lora, self.adapter)

    def nudged(self, dtype: str) -> TorchModel:
        """PyTorch's in float64, its weights changed by as much as a type rounds."""
        return self.theirs().cast(torch.float64).nudged(ROUNDED[dtype])


def judged(got: Errors, like: Errors, dtype: str, *, rerouted: bool) -> bool:
    """Whether an error is rounding's, by what PyTorch's own is in the same type."""
    if dtype == "float32":
        bound, worst = max(EXACT, 4 * like.whole), max(EXACT, 4 * like.worst)
    else:
        bound, worst = 0.03 + 1.5 * like.whole, 0.08 + 2 * like.worst
        if rerouted:
            bound, worst = max(bound, 0.7), max(worst, 2.0)
    pieces = got.whole <= bound, got.worst <= worst, got.logits <= bound + 2 * like.logits
    return all(pieces) and got.loss <= bound + 2 * like.loss


class Campaign:
    """Trials and what they showed."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.seed, self.tally, self.device = seed, tally, Device()
        self.ways = profiles(self.device)
        self.worst: dict[str, tuple[float, str]] = {}

    def trial(self, number: int, model_type: str) -> None:
        """One drawn model in some profiles and both types."""
        rng = random.Random(f"{self.seed} {number} {model_type}")
        how = f"--seed {self.seed} --first {number} --count 1 (FAMILIES={model_type})"
        try:
            case = self._drawn(rng, model_type)
        except QLoRAError as err:
            self.tally.add(f"refused: {str(err)[:100]}")
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                trial = Trial(case, Path(folder), self.device)
            except QLoRAError as err:
                self.tally.add(f"refused: {str(err)[:100]}")
                return
            try:
                self._compare(trial, rng, how)
            except Exception as err:
                if type(err).__name__ == "StrictDataclassClassValidationError":
                    self.tally.add("refused by transformers")
                    return
                self.tally.fail(f"{type(err).__name__}", f"{how}: {str(err)[:600]}")
                if os.environ.get("RAISE"):
                    raise

    def _drawn(self, rng: random.Random, model_type: str) -> Drawn:
        return drawn(rng, model_type)

    def _compare(self, trial: Trial, rng: random.Random, how: str) -> None:
        case = trial.case
        exact = trial.theirs().cast(torch.float64).computed(case.samples)
        plain = errors(trial.theirs().computed(case.samples), exact)
        rounded = errors(trial.theirs().computed(case.samples, autocast=True), exact)
        texts = rng.random() < 0.3 or "TEXTS" in os.environ
        ways = rng.sample(sorted(self.ways), 1)
        for dtype, like in (("float32", plain), ("bfloat16", rounded)):
            for name in ways:
                model = trial.opened(dtype, self.ways[name])
                got = errors(trial.computed(model), exact)
                right = judged(got, like, dtype, rerouted=met(case.config))
                known = f"{dtype}, {name}"
                if not right:
                    rough = errors(trial.nudged(dtype).computed(case.samples), exact)
                    right = judged(got, rough, dtype, rerouted=met(case.config))
                    known = f"{dtype}, as far off as other roundings of the weights"
                self._note(f"{dtype}, {name}", got, case, how)
                if dtype == "bfloat16" and like.whole > SENSITIVE:
                    self.tally.add(f"{dtype}, PyTorch is too far off to tell")
                elif right:
                    self.tally.add(known)
                else:
                    what = f"{how}: {dtype}, {name}: {got}; PyTorch's own {like}; {described(case)}"
                    self.tally.fail("differs", what)
                if texts:
                    self._text(trial, model, rng, f"{dtype}, {name}", how)
                model.close()

    def _text(
        self, trial: Trial, model: QLoRAModel, rng: random.Random, way: str, how: str
    ) -> None:
        """Texts that grow, of which each token is the likeliest."""
        theirs, bound = trial.theirs().cast(torch.float64), EXACT
        others = [trial.theirs(), trial.nudged("bfloat16")] if "bfloat16" in way else []
        got = grown(rng, model, theirs, trial.case.config["vocab_size"], others)
        if others:
            apart = met(trial.case.config) or got.rounded > SENSITIVE
            bound = 0.7 if apart else 0.03 + 2 * got.rounded
        place = f"texts, {way}" + (", rerouted" if met(trial.case.config) else "")
        self.worst[place] = max(self.worst.get(place, (0.0, "")), (got.logits, how))
        if got.logits <= bound and got.behind <= 2 * bound:
            self.tally.add(f"texts, {way}")
        else:
            self.tally.fail("texts", f"{how}: {way}: {got}; {described(trial.case)}")

    def _note(self, way: str, got: Errors, case: Drawn, how: str) -> None:
        if "bfloat16" in way and met(case.config):
            way += ", rerouted"
        for key, value in (("whole", got.whole), ("worst", got.worst)):
            place = f"{way}, {key}"
            self.worst[place] = max(self.worst.get(place, (0.0, "")), (value, how))


def described(case: Drawn) -> str:
    """All that was drawn."""
    config = {k: v for k, v in case.config.items() if v is not None}
    return f"{json.dumps(config)} {case.lora} {case.quant} {case.ids.shape} {case.mask.max(1)}"


def try_all(tried: Campaign, count: int, tally: Tally) -> None:
    """So many trials of every family, or of those that FAMILIES names; what was furthest off."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    only = os.environ.get("FAMILIES", "")
    types = only.split(",") if only else sorted(FAMILIES)
    for number in range(tally.first, tally.first + count):
        for model_type in types:
            if tally.over:
                break
            tried.trial(number, model_type)
    for place, (value, how) in sorted(tried.worst.items()):
        print(f"  {value:8.1e}  {place}: {how}")


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials of every family."""
    try_all(Campaign(seed, tally), count, tally)


PROMPTS = (1, 2, 5, 17, 33, 63, 65, 90)
ADDED = 12


@dataclass
class Grown:
    """How far texts are off, of the largest logit.

    Attributes:
        logits: Those of the token after a text, and log probabilities of the tokens that came.
        whole: The last of these logits where the text was computed as a whole here.
        behind: By how much a token that came is less likely than the likeliest.
        rounded: PyTorch's logits of the same tokens as rounding changes them.
    """

    logits: float = 0.0
    whole: float = 0.0
    behind: float = 0.0
    rounded: float = 0.0

    def __str__(self) -> str:
        own = f"; PyTorch's own {self.rounded:.1e}" if self.rounded else ""
        return f"{self.logits:.1e} (whole {self.whole:.1e}), tokens {self.behind:.1e} behind{own}"


def grown(
    rng: random.Random, model: QLoRAModel, theirs: TorchModel, vocab: int,
    others: Sequence[TorchModel] = (),
) -> Grown:  # fmt: skip
    """Three texts of unlike lengths beside one another, then one of them by itself.

    ``others`` are models whose logits under autocast, which leaves float64 as it is, are compared.
    """
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in rng.sample(PROMPTS, 3)]
    found = Grown()
    capacity = max(map(len, prompts)) + ADDED
    engine = Engine(model, len(prompts), capacity)
    texts = [engine.add(ids, max_new_tokens=ADDED, logprobs=0) for ids in prompts]
    for text in texts:
        for _ in text:
            pass
    begun = [
        [text.all_ids[:end] for end in range(len(text.prompt_ids), text.length)] for text in texts
    ]
    exact = [_after(theirs, each) for each in begun]
    for other in others:
        with torch.autocast("cpu", torch.bfloat16):
            near = [_after(other, each) for each in begun]
        for a, b in zip(chain(*near), chain(*exact), strict=True):
            found.rounded = _worst(found.rounded, np.abs(a - b).max() / np.abs(b).max())
    for text, rows in zip(texts, exact, strict=True):
        for token, told, logits in zip(text.ids, text.token_logprobs, rows, strict=True):
            largest = np.abs(logits).max()
            likely = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            found.logits = _worst(found.logits, abs(told.logprob - likely[token]) / largest)
            found.behind = _worst(found.behind, (logits.max() - logits[token]) / largest)
    text = rng.choice(texts)
    rows = exact[texts.index(text)]
    alone = Engine(model, 1, capacity).add(text.prompt_ids, max_new_tokens=ADDED, logprobs=vocab)
    assert list(alone) == text.ids
    for told, logits in zip(alone.token_logprobs, rows, strict=True):
        likely = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        ids, ours = (np.array(each) for each in zip(*told.top, strict=True))
        apart = np.abs(ours - likely[ids]).max()
        found.logits = _worst(found.logits, apart / np.abs(logits).max())
    whole = model.logits(np.array([text.all_ids[:-1]]))[0, -1]
    found.whole = _worst(0.0, np.abs(whole - rows[-1]).max() / np.abs(rows[-1]).max())
    return found


def _worst(before: float, value: float) -> float:
    """The larger one, of which NaN is the largest."""
    return max(before, float(value)) if np.isfinite(value) else np.inf


def _after(theirs: TorchModel, texts: list[list[int]]) -> list[np.ndarray]:
    with torch.no_grad():
        return [theirs.logits_of(np.array(ids)).logits[0, -1].double().numpy() for ids in texts]


if __name__ == "__main__":
    campaign("models of random shapes", run, 1)
