"""A digest of all launches of every family's plans: equal digests compute equal bits.

usage: PYTHONPATH=tests python -m tools.launch_digests [FAMILY ...]    compares
       PYTHONPATH=tests python -m tools.launch_digests --record [FAMILY ...]

A launch is its shader's code without comments, parameters, grid, and what is bound where. No device
is needed. A change that means to launch something else records anew, and its message says what is
other now. With them are recorded digests of the forward passes alone, and of what is read of each
family's config.json, which are compared by the cheap tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from references.config_trials import changed
from references.sized import traced_configs, with_head_dim

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.preprocessor import without_comments
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import make_seen

_TESTS = Path(__file__).parents[1] / "tests"
RECORDED = _TESTS / "model/launch_digests.json"
READ = _TESTS / "families/read_digests.json"
CONFIGS = traced_configs()
PROFILES = {
    "buffers": CPU_PROFILE,
    "textures": cpu_profile(8),
    "workgroup memory": GPU_PROFILE,
    "matrix units": gpu_profile(MatrixShape(8, 8, 8, 32)),
}
_ENDS = ["embed_tokens", "lm_head"]
_TRAININGS = (("nf4", True, False, 0.1), ("nf4", False, False, 0.0), ("none", False, True, 0.0))


@dataclass(frozen=True)
class Variant:
    """How a small model of a family is trained.

    Attributes:
        head_dim: Size of its heads; None for that of its recorded config.json.
        dtype: The type of operands.
        scheme: The quantization of its weights.
        checkpointing: Whether layers are recomputed.
        dora: Whether adapters have magnitudes.
        dropout: Of the adapters' inputs.
        trained: What else is: layers of experts and both ends, tokens, or both ends as a whole.
    """

    head_dim: int | None
    dtype: str
    scheme: str
    checkpointing: bool
    dora: bool
    dropout: float
    trained: str = ""

    def __str__(self) -> str:
        flags = "checkpointed" * self.checkpointing, "dora" * self.dora
        head = f"heads of {self.head_dim}" * bool(self.head_dim)
        return ", ".join(filter(None, (head, self.dtype, self.scheme, *flags, self.trained)))

    def lora(self, pretrained: Pretrained) -> LoraConfig:
        """The adapter on a model."""
        more: dict[str, Any] = {}
        if self.trained == "experts and ends":
            architecture = pretrained.architecture
            layers = {spec.name.rpartition(".")[2] for spec in architecture.linears}
            more["target_modules"] = sorted(
                {*layers, *(spec.leaf for spec in architecture.experts), *_ENDS}
            )
        elif self.trained == "tokens":
            more["trainable_token_indices"] = [1, 3]
        elif self.trained:
            more["modules_to_save"] = _ENDS
        return LoraConfig(r=8, lora_dropout=self.dropout, use_dora=self.dora, **more)


def variants() -> Iterator[Variant]:
    """All that a family is planned in; whole units of new tokens need heads of 16 or 64."""
    for dtype in ("float32", "bfloat16"):
        yield from (Variant(None, dtype, *training) for training in _TRAININGS)
    for head_dim in (16, 64):
        yield from (Variant(head_dim, "bfloat16", *training) for training in _TRAININGS[:2])
    for trained in ("experts and ends", "tokens", "ends as a whole"):
        yield Variant(None, "bfloat16", "nf4", False, False, 0.1, trained)


SHORT = Variant(None, "bfloat16", *_TRAININGS[0])
"""The one that is compared most often."""


def digests_of(family: str, profile: str, chosen: Iterable[Variant]) -> dict[str, str]:
    """The digests of a family's plans on a kind of GPU, by variant and by what is planned."""
    return {
        f"{variant}: {name}": digest
        for variant in chosen
        for name, digest in _of_variant(CONFIGS[family], profile, variant)
    }


def combined(digests: dict[str, str]) -> str:
    """One digest of several, which is what is recorded."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def recorded_of(family: str, profile: str) -> dict[str, str]:
    """What is recorded of a family on a kind of GPU: of one variant, and of all."""
    every = digests_of(family, profile, variants())
    short = {name: digest for name, digest in every.items() if name.startswith(f"{SHORT}: ")}
    return {"short": combined(short), "all": combined(every)}


def forward_of(family: str) -> str:
    """A digest of what a family's forward pass launches, which costs next to nothing.

    It has names, parameters, grids and shapes, and no shader's code.
    """
    own = find_family(CONFIGS[family])
    architecture = own.read(CONFIGS[family])
    adapter = AdapterLayout(LoraConfig(r=2), architecture.linears, architecture.experts)
    weights = WeightLayout(QuantConfig(scheme="none"), "float32", 1 << 27, textures=False)
    modules = weights.lay_out(architecture, adapter)
    graph = Graph("float32", CPU_PROFILE)
    own.forward(graph, architecture.config, modules, make_batch_buffers(2, 8), checkpointing=False)
    numbers: dict[Any, int] = {}
    digest = hashlib.sha256()
    for launch in graph.launches:
        bound = [
            (name, t.dtype, t.rows, t.columns, t.stride, t.offset, t.texture,
             t.storage.label if t.storage else numbers.setdefault(t, len(numbers)))
            for name, t in sorted(launch.tensors.items())
        ]  # fmt: skip
        digest.update(repr((launch.path, launch.params, launch.workgroups, bound)).encode())
    return f"{len(graph.launches)}:{digest.hexdigest()[:16]}"


def _of_variant(
    config: dict[str, Any], profile: str, variant: Variant
) -> Iterator[tuple[str, str]]:
    if variant.head_dim is not None:
        config = with_head_dim(config, variant.head_dim)
    try:
        pretrained = Pretrained.from_config(config)
        layout = ModelPlan(
            pretrained, variant.lora(pretrained), QuantConfig(scheme=variant.scheme), variant.dtype,
            profile=PROFILES[profile], max_binding=128 << 20,
        )  # fmt: skip
    except QLoRAError as err:
        yield "refused", str(err)
        return
    step = StepOptions("train", 2, 24, variant.checkpointing)
    yield "train", _digest(layout.step(step).plan)
    yield "loss", _digest(layout.step(StepOptions("loss", 2, 24)).plan)
    if variant.head_dim is None and variant.checkpointing:  # all that can wait in host memory
        streams_head = True in layout.head_options
        least = (
            OffloadPlan.least(layout.num_layers)
            if streams_head
            else OffloadPlan(offload_layer_inputs=True)
        )
        yield "offloaded", _digest(layout.changed(offload=least).step(step).plan)
    cache = KVCache(32, 2, packs_weights=profile == "textures")
    seen = make_seen(2, layout.pretrained.architecture.vocab_size)
    for name, sequences, length in (("prefill", 1, 16), ("decode", 2, 1)):
        graphs = layout.token_graphs(sequences, length, cache, seen)
        yield name, f"{_digest(compile_plan(graphs.hidden))} {_digest(compile_plan(graphs.head))}"


def trials() -> dict[str, list[dict[str, Any]]]:
    """By type of model, changes of one key of its config.json that have recorded logits."""
    with np.load(_TESTS / "families/config_keys.npz") as recorded:
        found = json.loads(str(recorded["trials"]))
    by_type: dict[str, dict[str, dict[str, Any]]] = {}
    for model_type, changes in found:
        if len(changes) <= 1:
            by_type.setdefault(model_type, {})[str(sorted(changes))] = changes
    return {model_type: list(each.values()) for model_type, each in by_type.items()}


def reading_of(model_type: str, changes: Iterable[dict[str, Any]]) -> str:
    """A digest of what is read of a family's config.json with each of some changes."""
    digest = hashlib.sha256()
    for each in changes:
        config = changed(model_type, each)
        architecture = find_family(config).read(config)
        read = repr(replace(architecture, as_stored=frozenset()))
        read = re.sub(r" at 0x\w+", "", read)  # of functions
        read = re.sub(r"\d+\.\d+(e-?\d+)?", lambda n: f"{float(n[0]):.6g}", read)
        digest.update(f"{read} {sorted(architecture.as_stored)}".encode())
    return digest.hexdigest()[:16]


@cache
def _compiled(code: str) -> str:
    lines = without_comments(code).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _digest(plan: Plan) -> str:
    """How many launches a plan has, and a hash of all that decides what they do."""
    digest = hashlib.sha256()
    for launch in plan.launches:
        bound = [
            (name, t.dtype, t.rows, t.columns, t.stride, t.offset, t.texture,
             plan.slot_of.get(t, -1), t.storage.label if t.storage else "")
            for name, t in sorted(launch.tensors.items())
        ]  # fmt: skip
        code = _compiled(launch.shader.code)
        what = (launch.path, code, launch.params, launch.workgroups, launch.flops)
        digest.update(repr((*what, bound)).encode())
    digest.update(repr((plan.slots, plan.textures)).encode())
    return f"{len(plan.launches)}:{digest.hexdigest()[:16]}"


def main() -> None:
    """Compares, or records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="all if none is named")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    others = []
    for family in given.families or CONFIGS:
        own: dict[str, Any] = {name: recorded_of(family, name) for name in PROFILES}
        own["forward"] = forward_of(family)
        was = recorded.get(family, {})
        others += [f"{family}, {name}" for name in own if was.get(name) != own[name]]
        recorded[family] = own
        print(family, "" if not others else f"({len(others)} differ so far)", flush=True)
    print("\n".join(others) or "all launches are as recorded")
    if given.record:
        read = {name: reading_of(name, some) for name, some in trials().items()}
        READ.write_text(json.dumps(read, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    elif others:
        sys.exit(1)


if __name__ == "__main__":
    main()
