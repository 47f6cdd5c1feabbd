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
    (note,) = [note for note in choice.notes if note.startswith(f"products {small}: ")]
    assert "tile_group (8, 8)" in note
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
    plain = plainest(GPU_PROFILE)
    for outcome in (
        lambda profile: DeviceLostError("gone"),
        lambda profile: trial_of(profile) if profile == plain else DeviceLostError("gone"),
    ):
        made_up(outcome)
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


# ---- how times are compared ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "then", "pace"),
    [(2.0, 3.0, 1.5), (4.0, 1.0, 0.25), (0.25, 0.5, 2.0), (0.0, 3.0, 1.0), (3.0, 0.0, 1.0)],
)
def test_times_are_put_at_the_clock_of_the_base(now, then, pace):
    both = [Times(each, {"rows": each, "gone": 0.0}, {"nt": 2 * each}) for each in (now, then)]
    times = Times(8.0, {"rows": 4.0, "gone": 2.0, "new": 1.0}, {"nt": 16.0})
    assert times.at_pace(*both) == Times(
        8.0 * pace, {"rows": 4.0 * pace, "gone": 2.0, "new": 1.0}, {"nt": 16.0 * pace}
    )


@pytest.mark.parametrize("is_cpu", [False, True])
def test_a_gpu_that_gets_slower_is_timed_again_after_each_variant(made_up, is_cpu):
    tried, slower, told = candidates(GPU_PROFILE), iter(range(1, 99)), []

    def outcome(profile):
        of_base = 9.0 if profile not in tried else 8.0 if profile == tried[0] else 9.9
        return trial_of(profile, products=of_base * (1.0 if is_cpu else next(slower)))

    made_up(outcome)
    device = FakeDevice()
    device.is_cpu = is_cpu
    choice = tuner.tune(device, task(), told.append)
    assert choice.profile.tile_group == tried[0].tile_group
    numbers = [int(text.removeprefix("timing kernels: variant ")) for text in told]
    first = len({plainest(GPU_PROFILE), *tuner.bases(GPU_PROFILE)})
    others = [n for n in range(first + 1, first + 1 + len(tried)) for _ in range(2 - is_cpu)]
    assert numbers == [*range(1, first + 1), *others]


def test_the_faster_kind_of_operands_is_the_base(made_up):
    def outcome(profile):
        return trial_of(profile, products=0.02 if profile.textures else 0.0123)

    made_up(outcome)
    choice = tuner.tune(FakeDevice(cpu_profile(8)), task())
    kinds = [note for note in choice.notes if note.startswith("operands in ")]
    assert "operands in textures: 20.0 ms a layer" in kinds
    assert "operands in buffers: 12.3 ms a layer, chosen" in kinds
    assert not choice.profile.textures


@pytest.mark.parametrize(
    ("seconds", "chosen"), [(48.9, True), (49.0, False), (50.0, False), (0.0, False)]
)
def test_savings_of_a_fiftieth_are_scatter(seconds, chosen):
    other = candidates(GPU_PROFILE)[0]
    base, trial = (trial_of(p, products=s) for p, s in ((GPU_PROFILE, 50.0), (other, seconds)))
    (tunable,) = [each for each in tunables_of(GPU_PROFILE) if each.name == "products"]
    cut = tuner._by_size(tunable, GPU_PROFILE, base, [base, trial])
    assert set(cut) == ({"nt 1x1x1"} if chosen else set())
    choice = tuner._chosen(base, [base, trial], ["before"])
    changed = tuner.fields_of(tunable, GPU_PROFILE, other)
    for name, value in changed.items():
        assert getattr(choice.profile, name) == (value if chosen else getattr(GPU_PROFILE, name))
    assert choice.notes[0] == "before"
    assert ("products: default" in choice.notes) == (not chosen)
    assert any("(98% of the default's time)" in note for note in choice.notes) == chosen
    assert choice.profile.products == ()  # the usual one is the fastest of this size, too


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_gradients_may_differ_by_rounding_alone(made_up, monkeypatch, dtype, limit):
    made_up(lambda profile: trial_of(profile, products=1.0))
    monkeypatch.setattr(tuner, "difference", lambda own, expected: limit)
    assert not any(
        "skipped" in n for n in tuner.tune(FakeDevice(), task(compute_dtype=dtype)).notes
    )
    monkeypatch.setattr(tuner, "difference", lambda own, expected: limit * 1.01)
    tuning = tuner._Tuning(FakeDevice(), task(compute_dtype=dtype), print)
    assert tuning.tried([GPU_PROFILE]) == [] and "gradients differ by" in tuning.notes[0]


def test_the_largest_difference_counts():
    exact = {"a": np.array([3.0, 4.0], np.float32), "b": np.zeros(2, np.float32)}
    assert tuner.difference(exact, exact) == 0.0
    apart = {"a": exact["a"] + np.array([0.5, 0.0], np.float32), "b": exact["b"]}
    assert tuner.difference(apart, exact) == pytest.approx(0.1)
    wrong = {"a": exact["a"], "b": exact["b"] + np.float32(1e-6)}
    assert tuner.difference(wrong, exact) > 1e6
    none = {"a": exact["a"] * np.float32("nan"), "b": exact["b"]}
    assert tuner.difference(none, exact) == float("inf")


def test_sizes_are_the_texts():
    config = {"hidden_size": 8, "vocab_size": 9, "text_config": {"hidden_size": 4}}
    found = task(config=config).sizes
    assert (found["hidden_size"], found["vocab_size"]) == (4, None)
    assert task(config={**config, "text_config": None}).sizes["hidden_size"] == 8
    assert task(config={"hidden_size": 8}).sizes["hidden_size"] == 8


def test_each_launch_counts_for_its_families(monkeypatch):
    of_rows = SimpleNamespace(name="rows", concerns=lambda launch: launch.kernel == "rope")
    of_all = SimpleNamespace(name="all", concerns=lambda launch: True)
    monkeypatch.setattr(tuner, "tunables", lambda: [of_rows, of_all])
    launches = [SimpleNamespace(kernel=kernel, values={}) for kernel in ("rope", "sum", "rope")]
    assert tuner._summed(launches, [1.0, 2.0, 4.0]) == Times(7.0, {"rows": 5.0, "all": 7.0}, {})


def test_layers_are_cut_to_one_by_the_usual_keys(monkeypatch):
    monkeypatch.setitem(family._REGISTERED, "own", OwnFamily())
    layers = config_of("M")["num_hidden_layers"]
    kinds = {"layer_types": ["a"] + ["b"] * (layers - 1)}
    own = {**config_of("M"), "model_type": "own", "other": [1, 2], **kinds}
    for rows in (100, 16_384, 50_000):
        part = OneLayer.of({**own, "vocab_size": rows}, LoraConfig())
        assert part.config["vocab_size"] == min(rows, 16_384)
        assert part.config["num_hidden_layers"] == 1 and part.config["other"] == [1, 2]
        assert part.config["layer_types"] == ["a"]


def test_choices_are_kept_by_what_they_were_made_for(monkeypatch):
    made = dataclasses.replace(GPU_PROFILE, gemm_tile=4)
    monkeypatch.setattr(cache, "tune", lambda *given: Choice(made, ("a note",)))
    device, first = FakeDevice(), task()
    assert cache.known_keys() == set()
    cache.tuned(device, first, FakeDevice)
    assert cache.known_keys() == {cache.key_of(FakeDevice(), first)}
    (entry,) = cache.choices_for(FakeDevice())
    assert (entry["batch"], entry["seq"], entry["driver"]) == (1, 256, "driver 1")
    others = [task(batch=2), task(seq=9), task(lora=LoraConfig(r=3)), task(compute_dtype="float32"),
              task(quant=QuantConfig(scheme="none")), task(config=config_of("M"))]  # fmt: skip
    assert len({cache.key_of(FakeDevice(), each) for each in (first, *others)}) == 7
    monkeypatch.setattr(cache, "write_cache_file", lambda path, text: "no room")
    notes = cache.tuned(FakeDevice(), others[0], FakeDevice).notes
    assert notes == ("a note", "not cached for the next run: no room")
