"""Slots of live tensors never overlap, dead launches go, checkpointing frees what it should."""

import itertools

import numpy as np
import pytest

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import Storage, matrix, vector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.memory_plan import plan_training_memory
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions, trace_step
from qlora_wgpu.model.weights import WeightLayout

CONFIG = {
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "attention_bias": True,
}


def traced(checkpointing, profile=CPU_PROFILE, dtype="bfloat16", dropout=0.1):
    base = Pretrained.from_config(CONFIG)
    architecture = base.architecture
    adapter = AdapterLayout(
        LoraConfig(r=5, lora_alpha=8, lora_dropout=dropout), architecture.linears
    )
    modules = WeightLayout(QuantConfig(), dtype, 1 << 27).lay_out(architecture, adapter)
    graph = Graph(dtype, profile)
    stats = vector("stats", 4, "float32", Storage("stats", "inputs", 16))
    return trace_step(graph, base, modules, StepOptions("train", 2, 40, checkpointing), stats).plan


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE])
def test_live_tensors_never_share_a_slot(checkpointing, profile):
    plan = traced(checkpointing, profile)
    lives = {}
    for index, launch in enumerate(plan.launches):
        for tensor in launch.tensors.values():
            if tensor.storage is None:
                first, _ = lives.get(tensor, (index, index))
                lives[tensor] = (first, index)
    assert lives
    by_slot = {}
    for tensor, life in lives.items():
        assert tensor.nbytes <= plan.slots[plan.slot_of[tensor]]
        by_slot.setdefault(plan.slot_of[tensor], []).append(life)
    for intervals in by_slot.values():
        intervals.sort()
        for (_, end), (start, _) in itertools.pairwise(intervals):
            assert end < start


@pytest.mark.slow
@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_launch_fits_webgpus_defaults(profile, dtype):
    for launch in traced(True, profile, dtype).launches:
        # What is not bound is not declared either.
        assert len(launch.tensors) <= 8, launch.shader.label
        x, y, z = launch.shader.workgroup_size
        assert x * y * z <= 256 and max(launch.workgroups) <= 65_535
        written = {(t.storage, t.offset) if t.storage else t for t in launch.written()}
        read = [
            (t.storage, t.offset) if t.storage else t
            for n, t in launch.tensors.items()
            if not launch.shader.bindings[n].writable
        ]
        assert not written & set(read)
        written_storages = {t.storage for t in launch.written() if t.storage is not None}
        read_storages = {
            t.storage for n, t in launch.tensors.items() if not launch.shader.bindings[n].writable
        }
        assert not written_storages & read_storages, launch.shader.label


def test_checkpointing_lowers_the_peak():
    kept, freed = (traced(c).activation_bytes for c in (False, True))
    assert freed < 0.6 * kept, (freed, kept)


def test_of_one_size_what_lives_long_chooses_first():
    """A short one comes first, and would take the only slot in which the long one has room."""
    graph = Graph("float32", CPU_PROFILE)
    given = matrix("given", 1, 8, "float32", Storage("given", "test", 32))
    short, long, large, middle = (
        graph.float32(name, rows, 8)
        for name, rows in (("short", 1), ("long", 1), ("large", 4), ("middle", 2))
    )
    sums = [(short, given), (long, short), (large, given), (large, long), (middle, given)]
    for y, b in [*sums, (middle, large)]:
        graph.launch("tensor/add.wgsl", 1, {"y": y, "b": b}, {"units": 1})
    plan = compile_plan(graph, (middle,))
    assert plan.slots == (large.nbytes, middle.nbytes)
    assert plan.slot_of == {large: 0, middle: 1, long: 1, short: 0}


def test_dead_launches_go():
    graph = Graph("float32", CPU_PROFILE)
    result = matrix("r", 2, 8, "float32", Storage("r", "test", 64))
    useful, dead = graph.float32("useful", 2, 8), graph.float32("dead", 2, 8)
    for target in (result, dead):
        graph.launch("tensor/add.wgsl", 2, {"y": target, "b": useful}, {"units": 2})
    assert [launch.tensors["y"] for launch in compile_plan(graph).launches] == [result]
    assert len(compile_plan(graph, (dead,)).launches) == 2


def test_wrong_bindings_are_errors():
    graph = Graph("float32", CPU_PROFILE)
    with pytest.raises(GraphError, match="missing or unknown"):
        graph.launch("tensor/fill.wgsl", 1, {"x": graph.float32("x", 1, 8)}, {"units": 1})


def test_memory_plan_counts_every_kind():
    memory = plan_training_memory(
        CONFIG, LoraConfig(r=4, lora_alpha=8), QuantConfig(), "bfloat16",
        batch_size=2, seq=40, gradient_checkpointing=True,
    )  # fmt: skip
    expected = {"activations", "base", "adapter", "gradients", "optimizer", "inputs", "uniforms",
                "tables", "norms"}  # fmt: skip
    assert set(memory) == expected
    assert memory["optimizer"] == 2 * memory["adapter"] == 2 * memory["gradients"]
    assert np.isfinite(sum(memory.values()))


def test_a_missing_binding_is_an_error():
    graph = Graph("float32", CPU_PROFILE)
    with pytest.raises(GraphError, match=r"bindings \['y'\] are missing or unknown"):
        x = graph.float32("x", 1, 8)
        graph.launch("tensor/convert.wgsl", 1, {"x": x}, {"units": 1})
