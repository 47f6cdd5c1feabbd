"""A step keeps a budget in the cheapest way that a plan can tell beforehand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile
from qlora_wgpu.graph.host_callbacks import transfer_bytes
from qlora_wgpu.model.budget import fit_inference_to_budget, fit_to_budget, reading_memory
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import TrainingOptions

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
STEP = TrainingOptions(checkpointing=True).step("train", 1, 512)


@pytest.fixture(scope="module")
def layout():
    return ModelPlan(
        Pretrained.from_config(CONFIG), LoraConfig(r=8), QuantConfig(), "bfloat16",
        profile=GPU_PROFILE, max_binding=1 << 27,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def wide(request):
    """A model of which the vocabulary is most, its head five blocks."""
    config = CONFIG | {
        "vocab_size": 40_000, "num_hidden_layers": 2, "tie_word_embeddings": request.param,
    }  # fmt: skip
    return ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=8), QuantConfig(), "bfloat16",
        profile=GPU_PROFILE, max_binding=1 << 27,
    )  # fmt: skip


def total(layout, offload=RESIDENT, options=STEP):
    return sum(layout.changed(offload=offload).memory(options).values())


@pytest.mark.slow
def test_what_fits_stays_on_the_device(layout):
    for budget in (None, total(layout)):
        fitted = fit_to_budget(layout, STEP, budget)
        assert fitted.offload == RESIDENT and fitted.moved == 0 and fitted.options == STEP
        assert not fitted.host_memory


@pytest.fixture(scope="module")
def in_textures(layout):
    """The same model where all lies in textures that may."""
    return layout.changed(profile=cpu_profile(8, 10, in_textures=True, short_loops=True))


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, -1])
def test_textures_are_given_up_before_anything_waits(in_textures, spare):
    buffers = OffloadPlan(in_buffers=True)
    least = total(in_textures, buffers)
    assert least < total(in_textures) - 1
    for budget in (least, total(in_textures) - 1):
        fitted = fit_to_budget(in_textures, STEP, budget + spare)
        if budget + spare >= least:
            assert fitted.offload == buffers and fitted.options == STEP
            assert not fitted.moved and not fitted.host_memory
            assert fitted.in_words().endswith(
                "lie in buffers instead of textures, which is slower here"
            )
        else:
            assert fitted.offload != buffers and fitted.total <= budget + spare
            assert "kept in" in fitted.in_words() or "norms and gated units" in fitted.in_words()


@pytest.mark.slow
def test_readings_give_up_textures_before_anything_waits(in_textures):
    def plans(layout):
        return [layout.step(TrainingOptions().step("train", 1, 512)).plan]

    def taken(layout):
        return sum(reading_memory(plans(layout)).values())

    least = taken(in_textures.changed(offload=OffloadPlan(in_buffers=True)))
    assert fit_inference_to_budget(in_textures, plans, taken(in_textures)).offload == RESIDENT
    assert fit_inference_to_budget(in_textures, plans, least).offload == OffloadPlan(
        in_buffers=True
    )
    assert fit_inference_to_budget(in_textures, plans, least - 1).offload.host_embedding


@pytest.mark.full
def test_less_room_costs_more_traffic(layout):
    everything = OffloadPlan(True, True, 1, True, CONFIG["num_hidden_layers"])
    most, least = total(layout), total(layout, everything)
    seconds = []
    for share in (0.99, 0.7, 0.3, 0.1):
        budget = int(least + share * (most - least))
        fitted = fit_to_budget(layout, STEP, budget, accumulation=4)
        assert fitted.total <= budget
        assert fitted.total == total(layout, fitted.offload)
        seconds.append(fitted.seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.slow
def test_an_embedding_is_the_first_to_wait(layout):
    fitted = fit_to_budget(layout, STEP, total(layout) - 1, accumulation=4)
    assert fitted.seconds < 0.01 and fitted.moved <= 4 * 512 * 512
    assert "kept in" in fitted.in_words() or "recomputed" in fitted.in_words()


def test_traffic_is_that_of_a_run(layout):
    """Each layer is brought twice, but those that stay where a pass turns round."""
    waiting = layout.changed(offload=OffloadPlan(streamed_layers=8))
    (layer,) = set(waiting.placement.group_bytes)
    assert waiting.step(STEP).plan.host_transfer_bytes == 2 * (8 - 2) * layer
    parked = layout.changed(offload=OffloadPlan(offload_layer_inputs=True)).step(STEP).plan
    assert parked.host_transfer_bytes == 2 * parked.offloaded_bytes == 2 * 7 * 512 * 256 * 4
    # On its way, a layer or an input is in host memory twice, in either direction.
    assert waiting.host_memory(STEP)["transfers"] == 2 * layer
    assert transfer_bytes(parked) == 2 * 2 * 512 * 256 * 4


@pytest.mark.slow
def test_layers_are_recomputed_where_they_must_be(layout):
    kept = replace(STEP, checkpointing=False)
    budget = (total(layout) + total(layout, options=kept)) // 2
    fitted = fit_to_budget(layout, kept, budget)
    assert fitted.options.checkpointing and fitted.total <= budget
    assert not fit_to_budget(layout, kept, None).options.checkpointing
    # Where recomputing is slow, something else waits.
    less = total(layout, options=kept) - 1
    slow = fit_to_budget(layout, kept, less, flops_per_second=1e6)
    assert not slow.options.checkpointing and slow.moved


@pytest.mark.full
@pytest.mark.parametrize("profile", [GPU_PROFILE, CPU_PROFILE], ids=["gpu", "cpu"])
def test_as_many_layers_are_kept_as_have_room(layout, profile):
    layout = layout.changed(profile=profile)
    asked = replace(STEP, checkpointing=False)
    # What norms and gated units make is made again first, on GPUs anyway.
    most = total(layout, OffloadPlan(remakes=True), asked)
    least = total(layout)
    counts = []
    for share in (0.95, 0.7, 0.4, 0.1, 0.0):
        budget = int(least + share * (most - least))
        # So slow a link that nothing waits, and so fast a device that much may be recomputed.
        fitted = fit_to_budget(layout, asked, budget, flops_per_second=1e16, bytes_per_second=1e16)
        offload = fitted.offload
        assert fitted.options == STEP and not fitted.moved and fitted.total <= budget
        assert fitted.total == total(layout, offload)
        one_more = replace(offload, kept_layers=offload.kept_layers + 1)
        assert offload.kept_layers == 7 or total(layout, one_more) > budget
        counts.append(offload.kept_layers)
        if 0 < offload.kept_layers < 7:
            again = f"{8 - offload.kept_layers} of 8 layers are recomputed in the backward"
            assert again in fitted.in_words()
    assert counts == sorted(counts, reverse=True) and len(set(counts)) >= 4
    # Who asks for all of them to be recomputed has them recomputed.
    for budget in (most, least):
        fitted = fit_to_budget(layout, STEP, budget)
        assert not fitted.offload.kept_layers and fitted.total <= budget


@pytest.mark.slow
def test_layers_kept_take_memory_one_by_one(layout):
    totals = [total(layout, OffloadPlan(kept_layers=n)) for n in range(9)]
    assert totals[0] == total(layout) and totals == sorted(totals)
    assert totals[8] == total(layout, options=replace(STEP, checkpointing=False))
    (each,) = {b - a for a, b in pairwise(totals[2:8])}
    # A first one stays where one that is recomputed passes by.
    assert each > 0 and totals[1] - totals[0] < each / 4


@pytest.mark.slow
def test_what_is_cheap_is_made_again_before_layers_are(layout):
    kept = replace(STEP, checkpointing=False)
    least = total(layout, options=kept)  # on GPUs that is a matter of course
    assert least == total(layout, OffloadPlan(remakes=True), kept)
    layout = layout.changed(profile=replace(GPU_PROFILE, remakes=False))
    assert least == total(layout, OffloadPlan(remakes=True), kept)
    assert least < 0.9 * total(layout, options=kept)
    fitted = fit_to_budget(layout, kept, least)
    assert fitted.offload == OffloadPlan(remakes=True) and not fitted.options.checkpointing
    assert fitted.moved == 0 and not fitted.host_memory
    assert fitted.in_words() == (
        "outputs of norms and gated units are recomputed in the backward pass"
    )
    less = fit_to_budget(layout, kept, least - 1)
    assert less.options.checkpointing or less.moved


@pytest.mark.slow
def test_too_little_is_said_by_how_much(layout):
    with pytest.raises(OutOfMemoryError, match=r"at least \d+ MiB.*\d+ MiB more than the 1 MiB"):
        fit_to_budget(layout, STEP, 1 << 20)


@pytest.mark.slow
def test_a_head_is_streamed_where_nothing_else_is_enough(wide):
    head = OffloadPlan(host_embedding=True, streamed_head=True)
    blocks = wide.changed(offload=head).placement.head_block_bytes
    assert blocks == [8192 * 512] * 4 + [7232 * 512]
    plan = wide.changed(offload=head).step(STEP).plan
    # Each twice, but for the two that stay where a pass turns round, at either end.
    assert plan.host_transfer_bytes == sum(blocks[2:]) + sum(blocks[:-2])
    budget = total(wide, head) + total(wide) // 50
    fitted = fit_to_budget(wide, STEP, budget)
    assert fitted.offload.streamed_head and fitted.offload.host_embedding
    assert fitted.total <= budget and "lm_head are kept" in fitted.in_words()
    # Logits of all tokens are saved, too.
    assert total(wide) - total(wide, head) > sum(blocks) - 2 * blocks[0]
    waiting = fitted.host_memory
    embedding = 0 if wide.tied else sum(blocks)
    assert waiting["embedding"] == embedding and waiting["lm_head"] == sum(blocks)
    if not wide.tied:  # then the embedding waits first
        assert not fit_to_budget(wide, STEP, total(wide) - 1).offload.streamed_head


@pytest.mark.slow
def test_layers_take_turns_in_the_places_of_a_heads_blocks(wide):
    head = OffloadPlan(host_embedding=True, streamed_head=True)
    both = replace(head, streamed_layers=2)
    saved = total(wide, head) - total(wide, both)
    # Windows begin at whole 256 bytes.
    assert saved > 0.98 * sum(wide.changed(offload=both).placement.group_bytes)
    assert (
        wide.changed(offload=both).memory(STEP)["staging"]
        == wide.changed(offload=head).memory(STEP)["staging"]
    )


@pytest.mark.full
def test_what_a_run_takes_beside_its_step_is_counted_of_the_way_chosen(layout):
    more, budget = 1 << 20, fit_to_budget(layout, STEP, total(layout) - 1).total

    def beside(chosen, options):
        return 0 if chosen.offload == RESIDENT else more

    assert fit_to_budget(layout, STEP, budget, besides=beside).total + more <= budget
    with pytest.raises(OutOfMemoryError) as failure:
        fit_to_budget(layout, STEP, 1 << 20, besides=beside)
    with pytest.raises(OutOfMemoryError) as plain:
        fit_to_budget(layout, STEP, 1 << 20)
    least, less = (int(str(e.value).split(" MiB")[0].split()[-1]) for e in (failure, plain))
    assert least == less + 1


@pytest.mark.slow
def test_a_65b_of_rank_64_keeps_to_48_gb_in_buffers_of_2_gib():
    """The setting of QLoRA's paper: 3.2 GB of adapter, and as much of gradient and each moment."""
    config = CONFIG | {
        "vocab_size": 32_000, "hidden_size": 8192, "intermediate_size": 22_016,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64,
    }  # fmt: skip
    most = (1 << 31) - 1
    layout = ModelPlan(
        Pretrained.from_config(config), LoraConfig(r=64), QuantConfig(), "bfloat16",
        profile=GPU_PROFILE, max_binding=most,
    )  # fmt: skip
    fitted = fit_to_budget(layout, STEP, 47.5 * 2**30)
    assert fitted.total <= 47.5 * 2**30 and not fitted.moved
    assert [len(each.shards) for each in (layout.adapter.parameters, layout.adapter.gradient)] == [
        2, 2
    ]  # fmt: skip
    storages = fitted.layout.step(fitted.options).plan.storages
    assert max(storage.nbytes for storage in storages) <= most
