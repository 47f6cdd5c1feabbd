"""GPUs of other limits: loss, gradients and texts are those of a GPU that allows more.

A drawn model is computed on devices that were asked for with drawn limits and features, so that
WebGPU holds every shader, buffer and dispatch to them, and on one with all that there is. Where
both launch the same, all bits are the same. What is beyond a limit is refused in a sentence that
has it.

``python -m campaigns.adapter_limits --count N --seed S``, with WAYS=gpu,... for some kinds
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.test_family_types import normalize, shapes
from references.seeded import adapter as seeded_adapter
from references.seeded import weights
from support.limited import limited_device

from campaigns import drawn_models
from campaigns.drawn_configs import FAMILIES
from campaigns.drawn_limits import WORKGROUPS, Drawn, drawn_limits, ways, whole
from campaigns.drawn_models import write_model
from campaigns.support import Tally, campaign
from qlora_wgpu import QLoRAModel
from qlora_wgpu.errors import OutOfMemoryError, QLoRAError
from qlora_wgpu.generation import generate
from qlora_wgpu.gpu import grid, required
from qlora_wgpu.gpu.device import Device

DRAWS = 8  # of limits for a model
LONG_ROW = 17_000  # of a vocabulary, whose rows get as many threads as the GPU allows
TOKENS = 4
# Sums in another order, and what those make of the operands' rounding, which may send a token to
# another expert: a mixture's gradient tells nothing then.
EXACT, ROUNDED = 1e-4, 0.05
Arrays = dict[str, np.ndarray]


@cache
def whole_device(way: str) -> Device:
    """A device of the kind with all that there is, whose pipelines are kept."""
    return limited_device(whole(way))


def computed(
    case: drawn_models.Drawn, place: Path, dtype: Any, device: Device
) -> tuple[float, Arrays, list[int]]:
    """A batch's loss and gradients, and a text."""
    model = QLoRAModel.from_pretrained(place, case.lora, case.quant, dtype, device)
    adapter = seeded_adapter({n: a.shape for n, a in model.adapter_state_dict().items()})
    normalize(adapter)
    model.load_adapter(adapter)
    loss, gradients = model.loss_and_grads(case.ids, case.labels, case.mask)
    prompt = [int(t) for t in max(case.samples, key=lambda s: len(s.ids)).ids[:24]]
    text = list(generate(model, prompt, max_new_tokens=TOKENS))
    model.close()
    return loss, gradients, text


def sentence(error: QLoRAError, allowed: Drawn) -> str:
    """What is wrong with a refusal; nothing where it names a limit in one sentence."""
    text = str(error)
    limits = [f"{value:,}" for value in allowed.offered.limits.values()]
    if allowed.workgroups < 65_535:
        limits.append("has more elements than kernels can count")  # that many, squared
    if "\n" in text or "Error" in text or not any(limit in text for limit in limits):
        return f"refused so: {type(error).__name__}: {text[:300]}"
    return ""


def apart(got: Arrays, like: Arrays) -> float:
    """How far a gradient is from another, relative."""
    squares = [(np.square(got[n] - a).sum(), np.square(a).sum()) for n, a in like.items()]
    off, size = (float(sum(part)) for part in zip(*squares, strict=True))
    return (off / max(size, 1e-30)) ** 0.5


class Trial:
    """A drawn model on a kind of GPU."""

    def __init__(self, rng: random.Random, place: Path, way: str) -> None:
        self.place, self.way = place, way
        self.dtype = rng.choice(("float32", "bfloat16"))
        if "units" in way:
            self.dtype = "bfloat16" if way == "units" else "float32"
        self.case = small_model(rng)
        write_model(place, self.case.config, normalize(weights(*shapes(self.case.config))))
        self.like = computed(self.case, place, self.dtype, whole_device(way))

    def __str__(self) -> str:
        config = {k: v for k, v in self.case.config.items() if v is not None}
        return f"{self.dtype}, {self.case.lora}, {self.case.quant}, {json.dumps(config)}"

    def outcome(self, allowed: Drawn) -> tuple[str, str]:
        """What came of limits, and what is wrong."""
        with pytest.MonkeyPatch.context() as patch:
            # WebGPU promises as many; fewer are what dispatches are folded by.
            patch.setattr(grid, "MAX_WORKGROUPS", allowed.workgroups)
            patch.setitem(required._LEAST, WORKGROUPS, (allowed.workgroups, "workgroups"))
            device = limited_device(allowed.offered)
            way, kind, full = self.way, device.profile, whole_device(self.way).profile
            if (kind.gemm_kind, kind.attention_kind) != (full.gemm_kind, full.attention_kind):
                way += f" as {kind.gemm_kind}, {kind.attention_kind}"
            try:
                loss, gradients, text = computed(self.case, self.place, self.dtype, device)
            except OutOfMemoryError as err:
                return f"{way}: refused, {str(err).split()[0]}", sentence(err, allowed)
        off = apart(gradients, self.like[1])
        same = loss == self.like[0] and off == 0.0
        if same and text != self.like[2]:
            return "", f"another text: {text} for {self.like[2]}"
        if same:
            return f"{way}: the same bits", ""
        told = (
            f"loss {loss} for {self.like[0]}, gradient {off:.1e} off, text {text == self.like[2]}"
        )
        lost = abs(loss - self.like[0]) / max(abs(self.like[0]), 1e-30)
        if self.dtype == "float32":
            wrong = off > EXACT or lost > EXACT or text != self.like[2]
        else:
            wrong = not (off <= ROUNDED or self.rerouted) or not lost <= ROUNDED
        return f"{way}: within rounding, {self.dtype}", told if wrong else ""

    @property
    def rerouted(self) -> bool:
        """Whether rounding may send a token to another expert."""
        return "experts" in json.dumps(self.case.config)


def small_model(rng: random.Random) -> drawn_models.Drawn:
    """A model whose shaders do not take long to compile."""
    while True:
        case = drawn_models.drawn(rng, rng.choice(sorted(FAMILIES)))
        config = case.config
        if rng.random() < 0.15:
            config["vocab_size"] = LONG_ROW
        small = config["num_hidden_layers"] <= 2 and config.get("head_dim", 64) <= 80
        if small and case.lora.r <= 64 and len(config.get("layer_types") or ()) <= 2:
            return case


def run(count: int, seed: int, tally: Tally, *, draws: int = DRAWS) -> None:
    """Draws models, and GPUs for each."""
    kinds = [way for way in os.environ.get("WAYS", "").split(",") if way] or ways()
    for number in range(tally.first, tally.first + count):
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what PEFT leaves out
            try:
                trial = Trial(rng, Path(folder), kinds[number % len(kinds)])
            except QLoRAError as err:
                tally.add(f"a model that is refused: {str(err)[:60]}")
                continue
            for draw in range(draws):
                if tally.over:
                    return
                allowed = drawn_limits(random.Random(f"{seed} {number} {draw}"), trial.way)
                try:
                    outcome, wrong = trial.outcome(allowed)
                except Exception as err:
                    if os.environ.get("RAISE"):
                        raise
                    outcome, wrong = "", f"{type(err).__name__}: {str(err)[:500]}"
                if wrong:
                    how = f"--seed {seed} --first {number} --count 1, draw {draw}"
                    tally.fail("differs", f"{how}: {wrong}; {allowed}; {trial}")
                else:
                    tally.add(outcome)
                    print(number, draw, outcome, flush=True)


if __name__ == "__main__":
    campaign("GPUs of other limits", run, 20)
