"""What is made of stored tensors alone runs right before it is wanted, and nothing else moves."""

import pytest

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.passes import schedule_late
from qlora_wgpu.graph.tensor import Storage, matrix, vector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions, trace_step
from qlora_wgpu.model.weights import WeightLayout

CONFIG = {
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ON_UNITS = gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152))


def stored(name):
    return matrix(name, 1, 8, "float32", Storage(name, "test", 32))


class Sums:
    """y += b, again and again."""

    def __init__(self):
        self.graph = Graph("float32", CPU_PROFILE)

    def made(self, name):
        return self.graph.float32(name, 1, 8)

    def add(self, y, b):
        self.graph.launch("tensor/add.wgsl", 1, {"y": y, "b": b}, {"units": 1})

    @property
    def pairs(self):
        return [
            (each.tensors["y"], each.tensors["b"]) for each in schedule_late(self.graph.launches)
        ]


def test_it_waits_for_whoever_reads_it():
    sums = Sums()
    weights, inputs, result = stored("weights"), stored("inputs"), stored("result")
    w, x, z = sums.made("w"), sums.made("x"), sums.made("z")
    for pair in [(w, weights), (x, inputs), (z, x), (z, w), (result, z)]:
        sums.add(*pair)
    # x, too, reads what is stored alone, and is wanted at once.
    assert sums.pairs == [(x, inputs), (z, x), (w, weights), (z, w), (result, z)]


def test_several_that_make_one_tensor_keep_their_order():
    sums = Sums()
    first, second, inputs, result = map(stored, ("first", "second", "inputs", "result"))
    w, x, z = sums.made("w"), sums.made("x"), sums.made("z")
    for pair in [(w, first), (w, second), (x, inputs), (z, x), (z, w), (result, z)]:
        sums.add(*pair)
    assert sums.pairs == [
        (x, inputs), (z, x), (w, first), (w, second), (z, w), (result, z)
    ]  # fmt: skip


def test_what_is_read_is_not_written_in_between():
    sums = Sums()
    weights, inputs, result = stored("weights"), stored("inputs"), stored("result")
    w, x = sums.made("w"), sums.made("x")
    order = [(x, inputs), (w, weights), (result, x), (weights, x), (result, w)]
    for pair in order:
        sums.add(*pair)
    first, second, third, *rest = order
    assert sums.pairs == [first, third, second, *rest]


def test_neither_what_is_stored_nor_what_is_made_of_others_waits():
    sums = Sums()
    weights, inputs, result, other = map(stored, ("weights", "inputs", "result", "other"))
    x, z = sums.made("x"), sums.made("z")
    order = [(x, inputs), (z, x), (other, weights), (result, x), (result, other), (result, z)]
    for pair in order:
        sums.add(*pair)
    assert sums.pairs == order


def test_what_reads_nothing_stays():
    sums = Sums()
    inputs, result = stored("inputs"), stored("result")
    x, zeros = sums.made("x"), sums.made("zeros")
    sums.graph.launch("tensor/fill.wgsl", 1, {"y": zeros}, {"units": 1})
    for pair in [(x, inputs), (result, x), (result, zeros)]:
        sums.add(*pair)
    assert schedule_late(sums.graph.launches) == sums.graph.launches


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_dequantized_right_before_their_product(checkpointing):
    base = Pretrained.from_config(CONFIG)
    architecture = base.architecture
    adapter = AdapterLayout(LoraConfig(r=8, lora_alpha=8), architecture.linears)
    modules = WeightLayout(
        QuantConfig(), "bfloat16", 1 << 27, weight_dtype=ON_UNITS.weight_dtype("bfloat16")
    ).lay_out(architecture, adapter)
    counted = vector("saturated", 1, "uint32", Storage("saturated", "test", 4))
    graph = Graph("bfloat16", ON_UNITS, saturated=counted)
    stats = vector("stats", 4, "float32", Storage("stats", "inputs", 16))
    step = StepOptions("train", 2, 40, checkpointing)
    launches = trace_step(graph, base, modules, step, stats).plan.launches
    dequantized = [n for n, launch in enumerate(launches) if launch.kernel == "dequantize"]
    # Four products a layer, there and back; before the first there is nothing that is trained.
    assert len(dequantized) >= 4 * 2 * CONFIG["num_hidden_layers"] - 1
    for n in dequantized:
        (w,) = [t for t in launches[n].written() if t is not counted]
        assert w in launches[n + 1].tensors.values()
