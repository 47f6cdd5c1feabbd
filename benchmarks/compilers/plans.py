"""The kernels of training and of generating, traced from a config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compilers.published import STEPS, Step
from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import Profile, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepKind, StepOptions
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import make_seen
from qlora_wgpu.training.optimizer import STEP_NUMBERS, trace_update

MODELS = ("llama-3.2-1b", "llama-3.1-8b")  # where others are not asked for
MOST_BINDING = (1 << 31) - 1  # what most cards allow
NEW_TOKENS = (1, 8)  # texts of which the next token is computed together
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


def profiles(
    own: Profile, products: Sequence[str], units: MatrixShape | None
) -> dict[str, Profile]:
    """The profiles to look at, by name.

    Args:
        own: The GPU's default.
        products: Kinds of products to look at, ``"default"`` for its own, ``"deep"`` for matrix
            units in deep tiles, NVIDIA's default; none for all but those.
        units: What matrix units multiply, if products on them are among all.
    """
    default = own.gemm_kind
    kinds = [default if kind == "default" else kind for kind in products]
    every = [default, "register", "tiled", *(["matrix"] if units else [])]
    few = own.gemm_few_registers
    on_units = {
        kind: replace(
            gpu_profile(units, LIMITS, few_registers=few, deep_tiles=kind == "deep"),
            unit_by_unit=own.unit_by_unit,
        )
        for kind in ("matrix", "deep")
    }
    return {
        f"{kind}{' (the default)' * (kind == default)}": (
            on_units[kind] if kind in on_units else replace(own, gemm_kind=kind)
        )
        for kind in dict.fromkeys(kinds or every)
    }


def trace(
    model: str, step: Step, kind: str, profile: Profile, seq: int, layers: int | None
) -> KernelPlan:
    """Traces a step and its update; no weight is made.

    Args:
        model: What it is called.
        step: The model and how it is trained.
        kind: What the profile is called.
        profile: How kernels are cut.
        seq: Tokens of a row.
        layers: Layers in place of the model's own number.
    """
    launches: Counter[str] = Counter()
    shaders: dict[str, Shader] = {}
    for launch in _launches(_layout(model, step, profile, layers), step, seq):
        launches[launch.shader.label] += 1
        shaders[launch.shader.label] = launch.shader
    return KernelPlan(f"{model}, {kind}", launches, shaders)


def step_launches(model: str, profile: Profile, seq: int) -> list[Launch]:
    """What a training step launches, and its update."""
    step = STEPS[model]
    layout = _layout(model, step, profile)
    return [*layout.step(_options("train", step, seq)).plan.launches, *_update(layout, step)]


def _layout(model: str, step: Step, profile: Profile, layers: int | None = None) -> ModelPlan:
    config = dict(step.config)
    if layers is not None:
        for key, value in config.items():
            if isinstance(value, list) and len(value) == config["num_hidden_layers"]:
                config[key] = value[:layers]  # one of each layer
        config["num_hidden_layers"] = layers
    return ModelPlan(
        Pretrained.from_config(config, model),
        LoraConfig(**{"r": 8, "lora_alpha": 16, **step.lora}),
        QuantConfig(),
        step.compute_dtype,
        profile=profile,
        max_binding=MOST_BINDING,
    )


def _launches(layout: ModelPlan, step: Step, seq: int) -> Iterator[Launch]:
    yield from layout.step(_options("train", step, seq)).plan.launches
    if step.objective.preference is not None and step.objective.preference.has_divergence:
        yield from layout.step(_options("divergence", step, seq)).plan.launches
    yield from _update(layout, step)
    vocab = layout.pretrained.architecture.vocab_size
    for texts in NEW_TOKENS:
        graphs = layout.token_graphs(texts, 1, KVCache(seq, texts), make_seen(texts, vocab))
        yield from compile_plan(graphs.hidden).launches
        yield from compile_plan(graphs.head).launches


def _update(layout: ModelPlan, step: Step) -> Iterator[Launch]:
    graph, optim = layout.new_graph(), OptimConfig(name=step.optimizer)
    layout.adapter.keep_moments(optim.name)
    info = vector(
        "step_info", STEP_NUMBERS, "float32", Storage("step info", "inputs", 4 * STEP_NUMBERS)
    )
    trace_update(graph, layout.adapter, layout.stats, info, optim)
    yield from compile_plan(graph).launches


def _options(kind: StepKind, step: Step, seq: int) -> StepOptions:
    batch = 1 if step.objective.preference is None else 2
    return StepOptions(
        kind,
        batch,
        seq,
        step.checkpointing,
        objective=step.objective,
        noise=step.noise,
        router_aux_loss_coef=step.balance,
    )
