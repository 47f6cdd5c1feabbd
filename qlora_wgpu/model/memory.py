"""The memory plan of a training run, from config.json alone: before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import ALIGNMENT
from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.network import Network
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.adamw import STATS_LENGTH
from qlora_wgpu.ops.batch import make_batch_buffers


def plan_training_memory(
    config: Mapping[str, Any],
    lora: LoraConfig,
    quant: QuantConfig,
    compute_dtype: str,
    *,
    batch_size: int,
    seq: int,
    gradient_checkpointing: bool,
    max_binding: int = 128 << 20,
    profile: Profile = CPU_PROFILE,
) -> Counter[str]:
    """Bytes on the device by kind while training on batches of (batch_size, seq).

    It is the sum of the very plan that training runs, so the two cannot disagree but for what
    shorter batches and sample texts add (a few per cent).

    Args:
        config: A config.json.
        lora: The adapter.
        quant: How the frozen linear layers are stored.
        compute_dtype: ``"bfloat16"`` or ``"float32"``.
        batch_size: Sequences of a micro-batch.
        seq: Tokens of each, padded.
        gradient_checkpointing: Whether layers are recomputed in the backward.
        max_binding: The adapter's limit.
        profile: How kernels are cut for the adapter.

    Raises:
        UnsupportedModelError: If the model asks for something that is not computed here.
    """
    family = find_family(config)
    architecture = family.read(config)
    adapter = Adapter(lora, architecture.linears, architecture.experts)
    modules = WeightLayout(quant, compute_dtype, max_binding, textures=profile.textures).modules(
        architecture, adapter
    )
    stats = Storage("stats", "inputs", 4 * STATS_LENGTH)
    graph = Graph(compute_dtype, profile, max_binding)
    Network(family, architecture, modules).trace_loss(
        graph,
        make_batch_buffers(batch_size, seq),
        vector("stats", STATS_LENGTH, "float32", stats),
        gradient=True,
        checkpointing=gradient_checkpointing,
    )
    plan = make_plan(graph)
    memory = plan.bytes_by_kind()
    memory["uniforms"] = _uniform_bytes(plan)
    memory["optimizer"] = adapter.first_moment.nbytes + adapter.second_moment.nbytes
    return memory


def _uniform_bytes(plan: Plan) -> int:
    return ALIGNMENT * sum(1 for launch in plan.launches if launch.params)
