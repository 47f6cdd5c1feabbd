import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from references.sized import family_configs

from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import DeviceError, DeviceLostError, OutOfMemoryError
from qlora_wgpu.families import family
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.kernel_config import (
    CPU_PROFILE,
    GPU_PROFILE,
    Profile,
    cpu_profile,
    gpu_profile,
    plainest,
)
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels import tunables
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.tuning import cache, tuner
from qlora_wgpu.tuning.proxy_model import OneLayer
from qlora_wgpu.tuning.tuner import Choice, Task, Times, Trial, candidates, tunables_of

MATRIX_PROFILE = gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152))
PROFILES = (CPU_PROFILE, GPU_PROFILE, MATRIX_PROFILE, cpu_profile(8), cpu_profile(16))


class FakeDevice:
    def __init__(self, profile=GPU_PROFILE, driver="driver 1"):
        self.profile = profile
        self.name = "card"
        self.is_cpu = False
        info = {"device": "card", "description": driver, "backend_type": "Vulkan"}
        self.gpu = SimpleNamespace(info=info)
        self.backend = SimpleNamespace(name="wgpu")


def task(**changes):
    given = Task(config_of("S"), LoraConfig(), QuantConfig(), "bfloat16", 1, 256)
    return dataclasses.replace(given, **changes)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("profile", PROFILES)
def test_candidates_change_what_their_kernels_say(profile):
    fields = {field.name for field in dataclasses.fields(Profile)}
    names = [
        name
        for tunable in tunables_of(profile)
        for name in {field for change in tunable.changes(profile) for field in change}
    ]
    assert set(names) <= fields
    assert len(names) == len(set(names)), "two families change one field"
    assert all(candidate != profile for candidate in candidates(profile))


EXACT = {"a": np.arange(8, dtype=np.float32)}


def trial_of(profile, products=None, gradients=EXACT, **families):
    seconds = {tunable.name: 0.0 for tunable in tunables()} | families
    if products is not None:
        seconds["products"] = products
    sizes = {"nt 1x1x1": seconds["products"]}
    return Trial(profile, Times(sum(seconds.values()), seconds, sizes), gradients)


@pytest.fixture
def made_up(monkeypatch):
    """Makes the tuner take what a function of a profile says for what came of it."""

    def use(outcome):
        def timed(device, task, part, folder, profile):
            result = outcome(profile)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(tuner, "has_timestamps", lambda device: True)
        monkeypatch.setattr(tuner, "_Folder", lambda *args: None)
        monkeypatch.setattr(tuner, "_time", timed)

    return use


def test_each_family_gets_its_own_fastest(made_up):
    tried = candidates(GPU_PROFILE)

    def outcome(profile):
        if profile not in tried:
            return trial_of(profile, products=10, adapter=10, attention=10, rows=10)
        i = tried.index(profile)
        return trial_of(profile, products=9 - i, adapter=9 + i, attention=9.9, rows=20)

    made_up(outcome)
    chosen = tuner.tune(FakeDevice(), task()).profile
    assert (chosen.gemm_tile, chosen.gemm_group) == (tried[6].gemm_tile, tried[6].gemm_group)
    assert (chosen.lora_threads, chosen.lora_grad_group) == (
        tried[0].lora_threads,
        tried[0].lora_grad_group,
    )
    # One per cent is scatter, and what is slower is not chosen.
    assert chosen.attention_threads == GPU_PROFILE.attention_threads
    assert chosen.threads_per_row == GPU_PROFILE.threads_per_row


def test_products_are_cut_by_their_sizes(made_up):
    small, large = "nt 256x128x64", "nn 2048x4096x4096"

    def outcome(profile):
        wide = (profile.gemm_kind, profile.tile_group) == ("tiled", (16, 16))
        narrow = (profile.gemm_kind, profile.tile_group) == ("tiled", (8, 8))
        seconds = {small: 1.0 if narrow else 2.0, large: 4.0 if wide else 8.0}
        families = {tunable.name: 1.0 for tunable in tunables()}
        families["products"] = sum(seconds.values())
        return Trial(profile, Times(sum(families.values()), families, seconds), EXACT)

    made_up(outcome)
    choice = tuner.tune(FakeDevice(), task())
    chosen = choice.profile
    assert (chosen.gemm_kind, chosen.tile_group) == ("tiled", (16, 16))
    assert chosen.for_products(large) == chosen == chosen.for_products("nt 1x1x1")
    assert chosen.for_products(small).tile_group == (8, 8)
    assert any(small in note for note in choice.notes)
    # A product is cut so, and so is what a file brought back.
    stored = json.loads(json.dumps(dataclasses.asdict(chosen)))
    device_profile = dataclasses.replace(GPU_PROFILE, limits=Limits(512, 1 << 15))
    again = cache._profile(stored, device_profile)
    assert again == dataclasses.replace(chosen, limits=device_profile.limits)
    # Any number of workgroups is enough, so that none is made smaller for more of them.
    g = Graph("bfloat16", dataclasses.replace(again, least_workgroups=0))
    GEMM.launch(g, Gemm(g.operand("x", 200, 64), g.operand("w", 100, 64),
                        g.operand("y", 200, 100), True))  # fmt: skip
    GEMM.launch(g, Gemm(g.operand("x", 300, 64), g.operand("w", 100, 64),
                        g.operand("y", 300, 100), True))  # fmt: skip
    assert [launch.constants["WG_M"] for launch in g.launches] == [8, 16]


def test_a_size_that_a_variant_has_no_product_of_is_cut_as_another_has_it(made_up):
    def outcome(profile):
        group = profile.tile_group if profile.gemm_kind == "tiled" else None
        families = {tunable.name: 1.0 for tunable in tunables()}
        families["products"] = 4.0 if group == (16, 16) else 8.0
        sizes = {"nt 1x1x1": families["products"], "nn 2x2x2": 1.0 if group == (8, 8) else 2.0}
        if group is None:
            del sizes["nn 2x2x2"]
        return Trial(profile, Times(sum(families.values()), families, sizes), EXACT)

    made_up(outcome)
    chosen = tuner.tune(FakeDevice(), task()).profile
    assert chosen.tile_group == (16, 16) and chosen.for_products("nn 2x2x2").tile_group == (8, 8)


@pytest.mark.parametrize(
    "spoilt",
    [
        DeviceError("no such type"),
        OutOfMemoryError("no room"),
        {"a": np.full(8, np.nan, np.float32)},
        {"a": EXACT["a"] * 1.2},
    ],
)
def test_what_fails_or_is_wrong_is_left_out(made_up, spoilt):
    """Also where it is the default, and however fast it is."""

    def outcome(profile):
        if profile.gemm_kind == "matrix" and isinstance(spoilt, Exception):
            return spoilt
        seconds = {"matrix": 1.0, "tiled": 5.0, "register": 10.0}[profile.gemm_kind]
        gradients = spoilt if profile.gemm_kind == "matrix" else EXACT
        return trial_of(profile, products=seconds, gradients=gradients)

    made_up(outcome)
    choice = tuner.tune(FakeDevice(MATRIX_PROFILE), task())
    assert choice.profile.gemm_kind == "tiled"
    others = candidates(plainest(MATRIX_PROFILE))  # which is the fastest of those that are right
    tried = 1 + sum(each.gemm_kind == "matrix" for each in others)
    assert sum("skipped" in note and "matrix" in note for note in choice.notes) == tried > 5


def test_a_lost_device_ends_the_tuning(made_up):
    made_up(lambda profile: DeviceLostError("gone"))
    with pytest.raises(DeviceLostError):
        tuner.tune(FakeDevice(), task())


def test_no_timestamps_no_change(monkeypatch):
    monkeypatch.setattr(tuner, "has_timestamps", lambda device: False)
    assert tuner.tune(FakeDevice(), task()).profile == GPU_PROFILE


def test_a_choice_is_made_once_and_kept(monkeypatch):
    calls = []
    chosen = dataclasses.replace(GPU_PROFILE, gemm_tile=4, gemm_group=(16, 8))

    def tune(device, task, progress):
        calls.append(task)
        return Choice(chosen, ("products: faster",))

    monkeypatch.setattr(cache, "tune", tune)
    for _ in range(2):
        device = FakeDevice()
        assert cache.tuned(device, task(), FakeDevice).notes == ("products: faster",)
        assert device.profile == chosen
    assert len(calls) == 1
    assert [entry["notes"] for entry in cache.choices_for(device)] == [["products: faster"]]
    assert not cache.choices_for(FakeDevice(driver="driver 2"))
    cache.tuned(FakeDevice(driver="driver 2"), task(), FakeDevice)
    cache.tuned(FakeDevice(), task(seq=512), FakeDevice)
    assert len(calls) == 3


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "{"])
def test_a_spoilt_cache_is_made_anew(monkeypatch, text):
    cache.cache_file().parent.mkdir(parents=True)
    cache.cache_file().write_text(text)
    monkeypatch.setattr(cache, "tune", lambda *args: Choice(GPU_PROFILE, ()))
    assert cache.tuned(FakeDevice(), task(), FakeDevice).profile == GPU_PROFILE
    assert len(json.loads(cache.cache_file().read_text())) == 1


def test_one_layer_keeps_all_but_depth():
    config = config_of("M")
    part = OneLayer.of(config, LoraConfig(r=3, use_rslora=True))
    whole = find_family(config).read(config)
    assert part.architecture.num_layers == 1 and part.architecture.vocab_size == 16_384
    assert part.architecture.hidden_size == whole.hidden_size
    assert part.architecture.linears == whole.linears[:7]
    assert part.lora.r == 3 and part.lora.use_rslora


@pytest.mark.parametrize(
    ("lora", "adapted"),
    [
        ({"layers_to_transform": [3, 5]}, 7),
        ({"target_modules": "model.layers.2.self_attn.(q|v)_proj"}, 2),
        ({"target_modules": ["model.layers.4.mlp.down_proj"], "rank_pattern": {"down_proj": 9}}, 1),
    ],
)
def test_an_adapted_layer_is_timed(lora, adapted):
    """Adapters may leave out the first layer."""
    part = OneLayer.of(config_of("M"), LoraConfig(**lora))
    adapter = AdapterLayout(part.lora, part.architecture.linears)
    assert len(adapter.targets) == adapted
    assert {adapter.peft.rank_of(spec.name) for spec in adapter.targets} == {
        9 if "rank_pattern" in lora else 16
    }


def test_the_usual_kind_of_layer_is_timed():
    """The first layer is dense, most others are mixtures."""
    config = family_configs()["qwen3_moe"] | {"num_hidden_layers": 4, "mlp_only_layers": [0]}
    part = OneLayer.of(config, LoraConfig())
    assert part.architecture.experts and len(part.architecture.linears) == 4


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_models_with_images():
    """Their sizes are nested, and some of them are defaults."""
    config = {"model_type": "gemma3", "text_config": TEXT}
    part = OneLayer.of(config, LoraConfig())
    assert part.architecture.num_layers == 1 and part.architecture.vocab_size == 16_384
    assert part.architecture.embed_name == "model.language_model.embed_tokens.weight"
    larger = {**config, "text_config": {**TEXT, "hidden_size": 128}}
    keys = {cache.key_of(FakeDevice(), task(config=each)) for each in (config, larger)}
    assert len(keys) == 2


def test_a_family_of_ones_own(monkeypatch):
    monkeypatch.setitem(family._REGISTERED, "own", OwnFamily())
    config = {**config_of("M"), "model_type": "own", "layer_types": ["full_attention"] * 8}
    part = OneLayer.of(config, LoraConfig(layers_to_transform=[3]))
    assert part.architecture.num_layers == 1 and part.architecture.vocab_size == 16_384
    assert part.lora.layers_to_transform is None


class OwnFamily:
    def read(self, config):
        assert len(config["layer_types"]) == config["num_hidden_layers"]
        decoder = family.find_family({"model_type": "llama"}).read(config)
        return dataclasses.replace(decoder, config=object())


@pytest.mark.slow
def test_it_is_timed_on_a_device(settled_device, monkeypatch):
    device = settled_device
    other = dataclasses.replace(CPU_PROFILE, gemm_tile=8)
    monkeypatch.setattr(tuner, "bases", lambda profile: [profile])
    monkeypatch.setattr(tuner, "candidates", lambda profile: [other])
    monkeypatch.setattr(tuner, "has_timestamps", lambda device: True)
    monkeypatch.setattr(tuner, "_MAX_ROUNDS", 1)
    own, taken, timed = device.profile, [], tuner._time

    def noted(*given):
        taken.append(device.memory.total)
        return timed(*given)

    monkeypatch.setattr(tuner, "_time", noted)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 83}
    config = {"model_type": "gemma3", "text_config": {**TEXT, **heads}}
    lora = LoraConfig(r=2, layers_to_transform=[1])
    try:
        choice = tuner.tune(device, task(config=config, lora=lora, seq=8))
    finally:
        device.profile = own
    assert choice.notes and not any("skipped" in note for note in choice.notes), choice.notes
    # Each is gone before the next, and after the last.
    assert set(taken) == {device.memory.total} and len(taken) == 3


def test_what_is_measured_ahead_of_a_product_is_part_of_it():
    """Of launches in their order: what others take in between is none of a product's."""

    def launch(path, **sizes):
        return SimpleNamespace(kernel=path.split("/")[0], path=path, values=sizes)

    small, large = {"rows": 8, "columns": 8, "k": 8}, {"rows": 4096, "columns": 4096, "k": 4096}
    timed = [
        (launch("rope/rotate.wgsl"), 100.0), (launch("gemm/measure.wgsl"), 1.0),
        (launch("rope/rotate.wgsl"), 100.0), (launch("gemm/nt_tiled.wgsl", **small), 2.0),
        (launch("gemm/nt_tiled.wgsl", **large), 4.0), (launch("gemm/nn_tiled.wgsl", **small), 8.0),
        (launch("gemm/nt_tiled.wgsl", **small), 16.0),
    ]  # fmt: skip
    times = tuner._of_products(timed)
    assert sorted(times.values()) == [4.0, 8.0, 19.0] and len(times) == 3


@pytest.mark.parametrize(("scheme", "quantized"), [("nf4", {"proj"}), ("none", set())])
def test_only_linear_layers_are_quantized_and_once(scheme, quantized):
    part = OneLayer.of(config_of("S"), LoraConfig())
    folder = tuner._Folder(part, QuantConfig(scheme=scheme))
    layer = "model.layers.0."
    names = {"norm": f"{layer}input_layernorm.weight", "proj": f"{layer}self_attn.q_proj.weight"}
    found = {what: folder.find(name) for what, name in names.items()}
    assert {what for what, weight in found.items() if weight._blocks} == quantized
    assert folder.find("nothing") is None
    for what in quantized:
        assert found[what]._blocks() is folder.find(names[what])._blocks()
