"""The kernels of training and of generating, traced from a config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.bench.shapes import config_of
from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.gpu.profile import Profile, gpu_profile
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.training.optimizer import trace_update
from qlora_wgpu.training.schedule import STEP_NUMBERS
from radv.capture import MATRIX
from radv.spirv import MATRIX_SUBGROUP

MODELS = ("llama-3.2-1b", "llama-3.1-8b")
MOST_BINDING = (1 << 31) - 1  # what most cards allow
NEW_TOKENS = (1,)  # texts of which the next token is computed together
LIMITS = Limits(invocations=1024, workgroup_bytes=49_152)  # of a workgroup; AMD's have 64 KiB


@dataclass(frozen=True)
class KernelPlan:
    """What a training step launches.

    Attributes:
        name: The model and the profile.
        launches: How often each shader is launched, by its label.
        shaders: The shaders by their label.
    """

    name: str
    launches: Counter[str]
    shaders: dict[str, Shader]


def profiles(own: Profile, products: Sequence[str], *, matrix: bool) -> dict[str, Profile]:
    """The profiles to look at, by name.

    Args:
        own: The GPU's default.
        products: Kinds of products to look at, ``"default"`` for its own; none for all.
        matrix: Whether those on matrix units are among all.
    """
    default = own.gemm_kind
    kinds = [default if kind == "default" else kind for kind in products]
    every = [default, "register", "tiled", *(["matrix"] if matrix else [])]
    units = MatrixShape(MATRIX, MATRIX, MATRIX, MATRIX_SUBGROUP)
    return {
        f"{kind}{' (the default)' * (kind == default)}": (
            gpu_profile(units, LIMITS) if kind == "matrix" else replace(own, gemm_kind=kind)
        )
        for kind in dict.fromkeys(kinds or every)
    }


def trace(model: str, kind: str, profile: Profile, seq: int, layers: int | None) -> KernelPlan:
    """Traces a step and its update; no weight is made.

    Args:
        model: A preset's name.
        kind: What the profile is called.
        profile: How kernels are cut.
        seq: Tokens of the one row.
        layers: Layers in place of the model's own number.
    """
    config = config_of(model)
    if layers is not None:
        config["num_hidden_layers"] = layers
    layout = ModelLayout(
        Pretrained.from_config(config, model),
        LoraConfig(r=8, lora_alpha=16),
        QuantConfig(),
        "bfloat16",
        profile=profile,
        max_binding=MOST_BINDING,
    )
    launches: Counter[str] = Counter()
    shaders: dict[str, Shader] = {}
    for launch in _launches(layout, StepOptions("train", 1, seq)):
        launches[launch.shader.label] += 1
        shaders[launch.shader.label] = launch.shader
    return KernelPlan(f"{model}, {kind}", launches, shaders)


def _launches(layout: ModelLayout, options: StepOptions) -> Iterator[Launch]:
    yield from layout.step(options).plan.launches
    graph = layout.new_graph()
    info = vector(
        "step_info", STEP_NUMBERS, "float32", Storage("step info", "inputs", 4 * STEP_NUMBERS)
    )
    trace_update(graph, layout.adapter, layout.stats, info, OptimConfig())
    yield from make_plan(graph).launches
    for texts in NEW_TOKENS:
        cache = CacheView(KVCache(options.seq))
        hidden, head, logits = layout.logits_graphs(make_batch_buffers(texts, 1, cache))
        yield from make_plan(hidden).launches
        yield from make_plan(head, (logits,)).launches
