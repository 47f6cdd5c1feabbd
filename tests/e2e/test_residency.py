"""What waits in host memory changes what the device holds, and no bit of what it computes."""

import gc
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from references.seeded import weights
from references.sized import traced_configs, with_head_dim
from safetensors.numpy import save_file

from e2e.test_family_types import normalize, shapes
from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.passes import assign_layouts
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.training.optimizer import Optimizer

LAYERS = 5
MEASURES = {
    "embedding": OffloadPlan(host_embedding=True),
    "parked": OffloadPlan(offload_layer_inputs=True),
    "together": OffloadPlan(layers_per_segment=2),
    "some kept": OffloadPlan(kept_layers=2),
    # And one by itself.
    "some kept, two together": OffloadPlan(layers_per_segment=2, kept_layers=2),
    "moments": OffloadPlan(host_moments=True),
    "streamed": OffloadPlan(streamed_layers=4),
    "head": OffloadPlan(streamed_head=True),
    "remakes": OffloadPlan(remakes=True),
    "dequantized": OffloadPlan(dequantized=True),
    "dequantized in part": OffloadPlan(dequantized=True, streamed_layers=3),
    "all": OffloadPlan(
        host_embedding=True,
        offload_layer_inputs=True,
        layers_per_segment=2,
        host_moments=True,
        streamed_layers=LAYERS,
        streamed_head=True,
        remakes=True,
    ),
}
LORA = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return write_model(
        path, num_hidden_layers=LAYERS, tie_word_embeddings=False, hidden_size=64, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr("qlora_wgpu.ops.moments._PART", 1 << 10)


@pytest.fixture(scope="module")
def training(device):
    """``trained`` on the session's device; what keeps all of its memory there runs once."""
    gc.collect()  # what earlier tests left would go while what is taken is counted
    own, kept = device.profile, {}

    def train(folder, offload, *, profile=None, **options):
        key = offload, folder, repr(profile), repr(sorted(options.items()))
        if key in kept and offload is RESIDENT:
            return kept[key]
        # Heads as small as these have several blocks.
        device.profile = replace(profile or own, head_block=32)
        try:
            kept[key] = trained(device, folder, offload, **options)
        finally:
            device.profile = own
        return kept[key]

    return train


def trained(
    device, folder, offload, *, dtype="bfloat16", scheme="nf4", steps=3, lora=LORA,
    optimizer="adamw", checkpointing=True,
):  # fmt: skip
    """A model's adapter after some steps of two micro-batches, and what it took."""
    before = Counter(device.memory.by_kind)
    pretrained = Pretrained.open(folder)
    quant = QuantConfig(scheme=scheme, blocksize=32)
    forms = AdapterDtypes(optimizer)
    layout = device_layout(pretrained, lora, quant, dtype, device, offload, forms)
    options = TrainingOptions(checkpointing=checkpointing)
    planned = layout.memory(options.step("train", 2, 24))
    model = QLoRAModel(layout, device, options=options)
    model.prepare(2, 24)
    optimizer = Optimizer(model, OptimConfig(name=optimizer, learning_rate=1e-2), steps)
    rng = np.random.default_rng(3)
    for step in range(1, steps + 1):
        for block in range(2):
            ids = rng.integers(4, 80, (2, 24))
            mask = np.ones_like(ids)
            mask[1, 15:] = 0
            checked = model.checked(ids, ids, mask)
            model.accumulate(*checked, dropout_key=step * 7 + block)
        optimizer.step(step)
    adapter = model.adapter
    vectors = (adapter.parameters, *adapter.moments.vectors)
    flat = np.concatenate([model.read_flat(each).view(np.float32) for each in vectors])
    taken = Counter(device.memory.by_kind)
    taken.subtract(before)
    # A shorter batch has a plan of its own and meets what the longer one left.
    short = model.summed_loss([(ids[:, :9], ids[:, :9], None)])
    return flat, short, taken, planned


@pytest.mark.cover("values", measure=["parked", "some kept, two together", "all"], profile=[None])
@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE, None], ids=["cpu", "gpu", "own"])
@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_gives_the_same_bits(training, folder, measure, profile):
    expected, loss, _, before = training(folder, RESIDENT, profile=profile)
    got, other_loss, kinds, planned = training(folder, MEASURES[measure], profile=profile)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(got, expected)
    assert other_loss == loss
    for kind in ("base", "staging", "activations", "dequantized weights"):
        assert kinds[kind] == planned[kind]
    assert (planned["dequantized weights"] > 0) == MEASURES[measure].dequantized
    saves = measure in ("embedding", "streamed", "head", "all")
    assert not saves or planned["base"] < before["base"]


# Sums, and inputs that are parked, are among what lies in textures then.
@pytest.mark.full
@pytest.mark.cover(measure=["all"], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("measure", ["buffers", "all"])
def test_what_no_binding_shows_lies_in_a_texture(
    training, folder, device, monkeypatch, measure, dtype
):
    given = {"profile": replace(device.profile, in_textures=False), "dtype": dtype}
    expected, loss, _, buffers = training(folder, MEASURES.get(measure, RESIDENT), **given)
    monkeypatch.setattr(
        "qlora_wgpu.graph.plan.assign_layouts",
        lambda *given: assign_layouts(*given[:2], max_binding=6000),
    )
    measure = MEASURES.get(
        measure, OffloadPlan(in_buffers=True)
    )  # which changes nothing but a name
    got, other_loss, kinds, planned = training(folder, measure, **given)
    np.testing.assert_array_equal(got, expected)
    assert other_loss == loss and kinds["activations"] == planned["activations"]
    # Sums take two textures.
    assert (planned["activations"] > buffers["activations"]) == device.profile.textures


# Some tensors in float32 and some in 8 bits; DoRA's magnitudes among the first.
def test_moments_of_8_bits(training, folder):
    lora = LoraConfig(r=72, use_dora=True, target_modules=["k_proj", "down_proj"])
    given = {"lora": lora, "steps": 3, "scheme": "none"}
    plain, _, plain_kinds, _ = training(folder, RESIDENT, **given)
    given["optimizer"] = "adamw_8bit"
    expected, loss, kinds, planned = training(folder, RESIDENT, **given)
    got, other_loss, _, _ = training(folder, MEASURES["moments"], **given)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert other_loss == loss and kinds["optimizer"] == planned["optimizer"]
    assert kinds["optimizer"] < 0.5 * plain_kinds["optimizer"]
    length = lora_length(folder, lora)
    apart = np.abs(expected[:length] - plain[:length])
    # After a step at a rate of 0 two of 1e-2, each the size of a gradient's sign.
    assert 0 < apart.max() < 3e-2


def test_the_one_moment_of_lion(training, folder):
    plain, _, plain_kinds, _ = training(folder, RESIDENT)
    given = {"optimizer": "lion", "steps": 4}
    expected, loss, kinds, planned = training(folder, RESIDENT, **given)
    got, other_loss, host_kinds, host_planned = training(folder, MEASURES["moments"], **given)
    np.testing.assert_array_equal(got, expected)
    assert other_loss == loss and 3 * expected.size == 2 * plain.size
    assert 2 * kinds["optimizer"] == plain_kinds["optimizer"] > 0
    assert kinds["optimizer"] == planned["optimizer"]
    assert host_kinds["staging"] == host_planned["staging"] > 0 and not host_kinds["optimizer"]
    moment = expected[expected.size // 2 :]
    assert np.abs(moment).max() > 0


def lora_length(folder, lora):
    architecture = Pretrained.open(folder).architecture
    return AdapterLayout(lora, architecture.linears).length


@pytest.mark.cover(scheme=["none"], dtype=["bfloat16"])
@pytest.mark.parametrize("scheme", ["nf4", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_measures_together(training, folder, scheme, dtype):
    expected, loss, *_ = training(folder, RESIDENT, dtype=dtype, scheme=scheme)
    got, other_loss, *_ = training(folder, MEASURES["all"], dtype=dtype, scheme=scheme)
    np.testing.assert_array_equal(got, expected)
    assert other_loss == loss


def write_family(path, family):
    """A model of four layers, or as many as it was recorded with."""
    config = with_head_dim(traced_configs()[family], 24)
    count = config["num_hidden_layers"] = max(4, config["num_hidden_layers"])
    if "layer_types" in config:
        kinds = config["layer_types"] = (config["layer_types"] * 4)[:count]
    if "per_layer_config" in config:  # of layers that see everything, as the last one does
        kinds[-1], own = "full_attention", next(iter(config["per_layer_config"].values()))
        full = (i for i, kind in enumerate(kinds) if kind == "full_attention")
        config["per_layer_config"] = {str(i): own for i in full}
    (path / "config.json").write_text(json.dumps(config))
    save_file(normalize(weights(*shapes(config))), path / "model.safetensors")


# Experts; norms behind halves, a window and a tied head; weights in 16 bits; delta nets.
@pytest.mark.cover(family=["gemma3_text"], profile=[None])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gemma3_text", "gemma4-experts", "phi3", "qwen3_next"]
)
@pytest.mark.parametrize("profile", [GPU_PROFILE, None], ids=["gpu", "own"])
def test_other_families(training, tmp_path, family, profile):
    write_family(tmp_path, family)
    expected, loss, *_ = training(tmp_path, RESIDENT, profile=profile)
    for measure in (
        replace(MEASURES["all"], layers_per_segment=1, streamed_layers=4),
        OffloadPlan(dequantized=True),
    ):
        got, other_loss, kinds, planned = training(tmp_path, measure, profile=profile)
        np.testing.assert_array_equal(got, expected)
        assert other_loss == loss
        for kind in ("base", "activations", "dequantized weights"):
            assert kinds[kind] == planned[kind]


EXPERTS = ["q_proj", "gate_proj", "up_proj", "down_proj"]


# Later layers read keys and values of earlier ones, and all of them a table on the host; layers of
# Gemma 3n also pass several streams on.
@pytest.mark.cover(family=["gemma4_text"], together=[3])
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
@pytest.mark.parametrize(("together", "profile"), [(2, GPU_PROFILE), (3, None)])
def test_shared_keys_and_values(training, tmp_path, together, profile, family):
    write_family(tmp_path, family)
    kept, loss, *_ = training(tmp_path, RESIDENT, profile=profile, checkpointing=False)
    assert np.abs(kept).max() > 0
    for measure in (
        OffloadPlan(layers_per_segment=together),
        OffloadPlan(kept_layers=together),
        replace(MEASURES["all"], layers_per_segment=together, streamed_layers=4),
    ):
        got, other_loss, kinds, planned = training(tmp_path, measure, profile=profile)
        np.testing.assert_array_equal(got, kept)
        assert other_loss == loss
        assert kinds["activations"] == planned["activations"]


# Layers that are one product, experts, LayerNorm and a plain MLP, norms behind halves, heads that
# are normed and then rotated; and what is left of the activations.
KEPT = [
    ("llama", GPU_PROFILE, LoraConfig(r=8), 0.85),
    ("qwen3_moe", GPU_PROFILE, LoraConfig(r=3, lora_dropout=0.1, target_modules=EXPERTS), 0.75),
    ("starcoder2", None, LORA, 0.8),
    ("gemma3_text", None, LORA, 0.85),
    ("gemma4_text", None, LORA, 0.85),
    ("qwen3", GPU_PROFILE, LoraConfig(r=8), 0.8),
    ("cohere-qknorm", GPU_PROFILE, LORA, 0.81),
]


@pytest.mark.cover(family=["gemma3_text"], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "profile", "lora", "left"), KEPT)
def test_layers_that_are_kept_without_what_is_cheap(
    training, device, tmp_path, family, profile, lora, left, dtype
):
    write_family(tmp_path, family)
    given = {"lora": lora, "steps": 3, "dtype": dtype}  # the first at a rate of 0, from B = 0
    profile = profile or device.profile
    whole = {**given, "checkpointing": False, "profile": replace(profile, remakes=False)}
    expected, _, _, before = training(tmp_path, RESIDENT, **whole)
    assert np.abs(expected).max() > 0
    # As GPUs do of themselves, and as a budget asks for it; and of layers that are recomputed.
    always, asked = replace(profile, remakes=True), OffloadPlan(remakes=True)
    for offload, own in ((RESIDENT, {"profile": always}), (asked, {})):
        got, _, kinds, planned = training(tmp_path, offload, **{**whole, **own})
        np.testing.assert_array_equal(got, expected)
        # A budget has buffers instead of textures, too, which are rounded up less.
        most = left if offload is asked or not profile.in_textures else 1.0
        assert kinds["activations"] == planned["activations"] < most * before["activations"]
    for recomputed in (RESIDENT, OffloadPlan(kept_layers=1)):
        got, _, kinds, planned = training(tmp_path, recomputed, **given, profile=always)
        np.testing.assert_array_equal(got, expected)
        assert kinds["activations"] == planned["activations"]


def test_weights_are_read_back_from_the_host(device, folder):
    states = []
    for offload in (RESIDENT, MEASURES["all"]):
        layout = device_layout(
            Pretrained.open(folder), LORA, QuantConfig(), "bfloat16", device, offload
        )
        states.append(QLoRAModel(layout, device).base_state_dict())
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array)


SAVING = [("embedding", 8), ("parked", 512), ("streamed", 8), ("head", 8), ("head", 512)]


@pytest.mark.parametrize(("measure", "seq"), SAVING)
def test_each_measure_saves_memory(folder, device, monkeypatch, measure, seq):
    profile = replace(device.profile, head_block=32, logits_bytes=1 << 16)
    monkeypatch.setattr(device, "profile", profile)

    def planned(offload):
        layout = device_layout(
            Pretrained.open(folder), LORA, QuantConfig(), "bfloat16", device, offload
        )
        return sum(layout.memory(TrainingOptions(True).step("train", 2, seq)).values())

    assert planned(MEASURES[measure]) < planned(RESIDENT)
