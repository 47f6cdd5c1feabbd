"""What the search says is exact: the least memory, and that a way takes what it is estimated to.

But for layers that are kept beside others that are recomputed: they are estimated to take alike.
"""

import random
import re
from dataclasses import replace

import pytest
from references.sized import traced_configs, with_head_dim
from support.harness import PROFILES

from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import Overhead, Search, fit_to_budget
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import TrainingOptions

ON_UNITS = gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152), deep_tiles=True)
FAMILIES = ("llama", "gemma3_text", "gemma4_text", "qwen3_moe", "qwen3_next", "deepseek_v3")


def a_layout(family, seed):
    chance = random.Random(f"{family} {seed}")
    config = with_head_dim(traced_configs()[family], chance.choice((24, 64)))
    config = {
        **config, "vocab_size": chance.choice((500, 20_000, 50_000)),
        "intermediate_size": 8 * chance.randint(4, 300), "max_position_embeddings": 4096,
    }  # fmt: skip
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    if "layer_types" not in config:
        config["num_hidden_layers"] = chance.choice((2, 9))
    layout = ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=chance.choice((4, 64))), QuantConfig(),
        "bfloat16", profile=chance.choice((GPU_PROFILE, CPU_PROFILE)), max_binding=1 << 30,
    )  # fmt: skip
    return layout, chance


@pytest.mark.cover(family=["gemma3_text", "deepseek_v3"])
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_way_takes_what_it_is_estimated_to_and_the_least_is_the_least(family):
    layout, chance = a_layout(family, 1)
    step = TrainingOptions(checkpointing=family != "llama").step(
        "train", 1, chance.choice((64, 320))
    )
    search = Search(layout, step)
    whole, least = search.within(None), search.least().total
    nothing = Overhead(None, whole)
    for budget in (least, *(chance.randint(least, whole.total - 1) for _ in range(3))):
        way = search._cheapest(budget, nothing)
        found = search.within(budget)
        assert found.total <= budget
        kept = way.offload.kept_layers
        assert kept or (found.total == way.total and found.offload == way.offload)
        # Of two layers the first may take something after all.
        assert found.offload.kept_layers in (kept, max(kept - 1, 0))
        assert replace(found.offload, kept_layers=kept) == way.offload
    with pytest.raises(OutOfMemoryError):
        search.within(least - 1)


@pytest.mark.slow
def test_the_least_that_is_told_suffices_and_less_does_not():
    layout, _ = a_layout("llama", 2)
    step = TrainingOptions(checkpointing=True).step("train", 1, 320)

    def beside(chosen, options):  # as texts do that a run writes, in programs of other layouts
        return 3 * MIB if chosen.offload.streamed_head else 5 * MIB

    def told(budget):
        with pytest.raises(OutOfMemoryError) as failure:
            fit_to_budget(layout, step, budget, besides=beside)
        return int(re.findall(r"at least ([\d,]+) MiB", str(failure.value))[0].replace(",", ""))

    least = told(MIB)
    found = fit_to_budget(layout, step, least * MIB, besides=beside)
    assert found.total + beside(found.layout, found.options) <= least * MIB
    assert told((least - 1) * MIB) == least


@pytest.mark.slow
def test_a_total_does_not_depend_on_what_was_planned_before():
    """Inputs that wait in host memory pass through what the longest step has, of those that run."""
    layout, _ = a_layout("llama", 3)
    waiting = layout.changed(offload=OffloadPlan(offload_layer_inputs=True))
    short, long = (TrainingOptions(checkpointing=True).step("train", 1, n) for n in (64, 1024))
    alone = waiting.total(short)
    assert waiting.total(long) > waiting.total(short) == alone
    # Steps that run share it, and nothing is forgotten of them.
    assert sum(waiting.memory(long).values()) == waiting.total(long)
    assert sum(waiting.memory(short).values()) > waiting.total(short) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "seq"), [(CPU_PROFILE, 256), (ON_UNITS, 1024)])
def test_sizes_of_a_model_of_many_layers_are_those_of_the_one_that_runs(profile, seq):
    config = config_of("llama-3.2-1b")
    layout = ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=8), QuantConfig(), "bfloat16",
        profile=profile, max_binding=(1 << 31) - 1,
    )  # fmt: skip
    step = TrainingOptions().step("train", 1, seq)
    sized, whole = layout.sized(step).plan, layout.step(step).plan
    assert sized.slots == whole.slots and len(sized.launches) < len(whole.launches)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_a_step_traced_for_its_sizes_has_those_of_the_one_that_runs(family, profile):
    """With several chunks of the loss, the last one shorter, of which a few stand for all."""
    config = with_head_dim(traced_configs()[family], 24) | {
        "vocab_size": 3000, "max_position_embeddings": 4096,
    }  # fmt: skip
    profile = replace(PROFILES[profile], logits_bytes=64 * 3000 * 4, head_block=1024)
    layout = ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=8), QuantConfig(), "bfloat16",
        profile=profile, max_binding=1 << 30,
    )  # fmt: skip
    step = TrainingOptions(checkpointing=True).step("train", 1, 1000)
    for offload in (
        OffloadPlan(offload_layer_inputs=True),
        OffloadPlan(layout.tied, streamed_head=True),
    ):
        waiting = layout.changed(offload=offload)
        sized, whole = waiting.sized(step).plan, waiting.step(step).plan
        assert waiting.memory(step, sized) == waiting.memory(step, whole)
        assert waiting.host_memory(step, sized) == waiting.host_memory(step, whole)
        assert sized.slots == whole.slots and sized.host_transfer_bytes == whole.host_transfer_bytes
        assert (sized.flops, sized.memory_traffic) == (whole.flops, whole.memory_traffic)
        assert len(sized.launches) < len(whole.launches) and waiting.step(step).plan is whole
