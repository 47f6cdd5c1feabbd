"""GPUs of other limits: loss, gradients and texts are those of a GPU that allows more.

A drawn model is computed on devices that were asked for with drawn limits and features, so that
WebGPU holds every shader, buffer and dispatch to them, and on one with all that there is. Where
both launch the same, all bits are the same. What is beyond a limit is refused in a sentence that
has it.

``python -m campaigns.gpu_limits --count N --seed S``, with WAYS=gpu,... for some kinds
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.test_family_types import normalize, shapes
from references.seeded import adapter as seeded_adapter
from references.seeded import weights
from support.limited import Offered, limited_device
from support.matrix_units import FLOATS, HALVES

from campaigns import drawn_models
from campaigns.drawn_configs import FAMILIES
from campaigns.drawn_models import write_model
from campaigns.support import Tally, campaign
from qlora_wgpu import QLoRAModel
from qlora_wgpu.errors import OutOfMemoryError, QLoRAError
from qlora_wgpu.generation import generate
from qlora_wgpu.gpu import limits, wgsl
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
        limits.append("has more elements than kernels support")  # that many, squared
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
            patch.setattr(wgsl, "MAX_WORKGROUPS", allowed.workgroups)
            patch.setitem(limits._LEAST, WORKGROUPS, (allowed.workgroups, "workgroups"))
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


BINDING = "max-storage-buffer-binding-size"
BUFFER = "max-buffer-size"
TEXTURE = "max-texture-dimension-2d"
WORKGROUPS = "max-compute-workgroups-per-dimension"
INVOCATIONS = "max-compute-invocations-per-workgroup"
_SUBGROUPS = frozenset({"subgroup", "subgroup-barrier"})
_UNUSED = frozenset({"float32-filterable", "shader-f16", "timestamp-query", "pipeline-cache"})

# As much as WebGPU promises, and what some GPUs offer beyond.
PROMISED = {
    "max-storage-buffers-per-shader-stage": (8, 8, 10, 16),
    "max-compute-workgroup-storage-size": (16_384, 16_384, 24_576, 32_768),
    INVOCATIONS: (256, 256, 384, 512, 768, 1024),
    "max-compute-workgroup-size-x": (256, 256, 512, 1024),
    "max-compute-workgroup-size-y": (256, 256, 512),
    "max-compute-workgroup-size-z": (64, 64, 128),
    "max-bind-groups": (4,),
    "max-bindings-per-bind-group": (1000,),
    "max-uniform-buffers-per-shader-stage": (12,),
    "max-uniform-buffer-binding-size": (16_384, 32_768),
    "max-storage-textures-per-shader-stage": (4, 8),
    "max-sampled-textures-per-shader-stage": (16,),
    "max-dynamic-storage-buffers-per-pipeline-layout": (4,),
    "max-dynamic-uniform-buffers-per-pipeline-layout": (8,),
    "max-immediate-size": (0, 64),
    "min-storage-buffer-offset-alignment": (64, 128, 256, 256),
    "min-uniform-buffer-offset-alignment": (64, 128, 256, 256),
}
_WAYS = {
    "textures": Offered(),
    "buffers": Offered(without=_SUBGROUPS),
    "gpu": Offered(kind="DiscreteGPU"),
    "registers": Offered(kind="IntegratedGPU", without=_SUBGROUPS),
    "units": Offered(kind="DiscreteGPU", units=HALVES),
    "float units": Offered(kind="IntegratedGPU", units=FLOATS),
}


@dataclass(frozen=True)
class Drawn:
    """A GPU, and how kernels are cut for it.

    Attributes:
        way: A name of ``whole``.
        offered: What it offers.
        workgroups: Those along a dimension of a dispatch.
    """

    way: str
    offered: Offered
    workgroups: int

    def __str__(self) -> str:
        without = f" without {sorted(self.offered.without)}" if self.offered.without else ""
        return f"{self.way} {dict(self.offered.limits)}{without}"


def whole(way: str) -> Offered:
    """The same kind of GPU with all that there is."""
    return _WAYS[way]


def drawn_limits(rng: random.Random, way: str) -> Drawn:
    """Each limit is drawn in one of two GPUs; half of these have all of WebGPU's least."""
    offered = _WAYS[way]
    least = rng.random() < 0.3
    limits = {
        name: values[0] if least else rng.choice(values)
        for name, values in PROMISED.items()
        if least or rng.random() < 0.6
    }
    if rng.random() < 0.6:
        limits[BINDING] = 4 * int(2 ** rng.uniform(11, 20))
    if rng.random() < 0.3:
        limits[BUFFER] = 4 * int(2 ** rng.uniform(13, 20))
    if rng.random() < 0.4:
        limits[TEXTURE] = rng.choice((8192, 4096, 2048, 1024))  # which it is never wider than
    workgroups = 65_535
    if rng.random() < 0.5:
        workgroups = limits[WORKGROUPS] = rng.choice((64, 255, 1024))
    names = rng.sample(sorted(_UNUSED), rng.randint(0, len(_UNUSED)))
    without = offered.without | frozenset(names)
    return Drawn(way, replace(offered, limits=limits, without=without), workgroups)


def ways() -> list[str]:
    """All kinds of GPUs."""
    return list(_WAYS)


if __name__ == "__main__":
    campaign("GPUs of other limits", run, 20)
