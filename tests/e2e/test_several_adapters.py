"""Several adapters on one base: each computes as if it were opened alone, and swapping is free."""

import gc
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter
from support.grown_texts import written
from support.harness import PROFILES, Bench, assert_close

from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, generate
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.errors import CheckpointError, ConfigError, OutOfMemoryError
from qlora_wgpu.generation import Engine
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.lora import load_adapter, save_adapter
from qlora_wgpu.training.optimizer import Optimizer

IDS = np.arange(4, 28).reshape(2, -1)
SHAPES = {
    "first": LoraConfig(r=8, lora_alpha=16),
    "second": LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"]),
    "third": LoraConfig(r=4, use_dora=True, target_modules=["v_proj", "up_proj"]),
    "fourth": LoraConfig(r=8, lora_alpha=16),  # of the first one's shape
}
WAYS = [("cpu", "bfloat16"), ("texture", "float32"), ("texture", "bfloat16"), ("gpu", "float32")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("base") / "m", attention_bias=True, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def folders(base, device, tmp_path_factory):
    """An adapter for each shape; the second brings a bias, too."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}
    for number, (name, lora) in enumerate(SHAPES.items()):
        model = QLoRAModel.from_pretrained(base, lora, device=device)
        shapes = {n: array.shape for n, array in model.adapter_state_dict().items()}
        values = {n: (1 + number) * array for n, array in adapter(shapes).items()}
        values |= {n: np.abs(a) + 1 for n, a in values.items() if "magnitude" in n}
        model.load_adapter(values)
        made[name] = folder / name
        model.save_adapter(made[name])
    tensors, config = load_adapter(made["second"])
    trained = {"base_model.model.model.layers.0.self_attn.q_proj.bias": np.ones(60, np.float32)}
    save_adapter(made["second"], {**tensors, **trained}, replace(config, bias="lora_only"))
    return made


def outcomes(model):
    """What an adapter computes: logits, a text, loss and gradients."""
    text = list(generate(model, [5, 6, 7], max_new_tokens=3, temperature=1.0))
    return [model.logits(IDS), np.array(text)]


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.fixture
def profile(request, device, monkeypatch):
    monkeypatch.setattr(
        device, "profile", Bench(device, "float32", PROFILES[request.param]).profile
    )


@pytest.mark.cover(profile=["texture"], dtype=["bfloat16"])
@pytest.mark.parametrize(("profile", "dtype"), WAYS, indirect=["profile"])
def test_each_computes_what_it_does_alone(base, folders, device, profile, dtype):
    def opened(**given):
        return QLoRAModel.from_pretrained(base, compute_dtype=dtype, device=device, **given)

    model = opened(adapter=folders["first"])
    alone = {}
    for name, folder in folders.items():
        alone[name] = outcomes(opened(adapter=folder))
        if name != "first":
            model.load_adapter(folder, name)
    plain = opened().logits(IDS)
    assert not same(alone["first"], alone["fourth"])
    for name in ("second", "fourth", "third", "second", "default", "third"):
        model.set_adapter(name)
        assert model.active_adapter == name
        assert same(outcomes(model), alone["first" if name == "default" else name]), name
        with model.disable_adapter():
            off = model.logits(IDS)
        if name == "third":  # whose m / ‖W‖ is 1 but for its last digit
            assert_close(off, plain, 1e-5 if dtype == "float32" else 2e-2, "a layer's rounding")
        else:
            assert np.array_equal(off, plain), name
    assert same(outcomes(model), alone["third"])


# Pools of the driver and of Python may move by some pages; what each swap left would always grow.
GROWTH = 2 << 20


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_swapping_takes_no_memory(base, folders):
    device = Device()
    model = QLoRAModel.from_pretrained(base, adapter=folders["first"], device=device)
    before = device.memory.total
    for name in ("second", "third", "fourth"):
        model.load_adapter(folders[name], name)
    told = {name: one.device_bytes for name, one in model.adapters.items()}
    # The fourth has the first one's shape; what DoRA's norms need beside is uniforms and slots.
    vectors = device.memory.by_kind["adapter"]
    assert vectors == told["default"] + told["second"] + told["third"]
    assert device.memory.total >= before + told["second"] + told["third"]
    names = ["second", "third", "fourth", "default"]

    def swap(times):
        for index in range(times):
            model.set_adapter(names[index % len(names)])
            model.logits(IDS[:, :4])

    swap(24)
    taken, grown = device.memory.by_kind.copy(), []
    while len(grown) < 5 and min(grown, default=GROWTH) >= GROWTH:
        host = rss()
        swap(100)
        grown.append(rss() - host)
    assert device.memory.by_kind == taken and device.memory.peak == sum(taken.values())
    assert min(grown) < GROWTH, grown
    gc.disable()
    try:
        for name in ("third", "fourth", "second"):
            model.delete_adapter(name)
        assert device.memory.by_kind["adapter"] == told["default"]
        assert device.memory.by_kind["uniforms"] < taken["uniforms"]
    finally:
        gc.enable()


def test_a_text_goes_on_with_another(base, folders, device):
    """An engine has programs for each shape, over one cache."""
    model = QLoRAModel.from_pretrained(base, adapter=folders["first"], device=device)
    model.load_adapter(folders["second"], "second")
    engine, rows = Engine(model, 1, 8), []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        rows.append(written(engine, model, [5, 6, 7], 2)[1])
    one, other, again = rows
    assert np.array_equal(again, one) and not np.array_equal(one, other)


def test_one_in_training_keeps_its_values(base, folders, device, tmp_path):
    """Another answers in between; its steps go on where they were."""
    model = QLoRAModel.from_pretrained(base, adapter=folders["first"], device=device)
    model.load_adapter(folders["fourth"], "fourth")
    for name in ("fourth", "default"):  # so that the host has a copy, which a step makes old
        model.set_adapter(name)
    optim = OptimConfig(lr_scheduler_type="constant")
    before, optimizer = model.adapter_state_dict(), Optimizer(model, optim, 2)
    model.accumulate(*model.checked(IDS, IDS))
    optimizer.step(1)
    trained = model.adapter_state_dict()
    model.set_adapter("fourth")
    fourth = model.adapter_state_dict()
    model.set_adapter("default")
    read, _ = load_adapter(folders["fourth"])
    assert all(np.array_equal(fourth[name], read[name]) for name in read)
    now = model.adapter_state_dict()
    assert all(np.array_equal(now[name], trained[name]) for name in now)
    assert not all(np.array_equal(now[name], before[name]) for name in now)
    model.set_adapter("fourth")
    model.save_adapter(tmp_path / "saved")
    again, _ = load_adapter(tmp_path / "saved")
    assert all(np.array_equal(again[name], read[name]) for name in read)
    with pytest.raises(ConfigError, match="'fourth' is active, but 'default' is being trained"):
        optimizer.step(2)


def test_names_that_the_base_lacks_are_passed_over(base, folders, device, tmp_path):
    """As PEFT does: one list of names may be for models of several families."""
    tensors, config = load_adapter(folders["third"])
    names = [*config.target_modules, "c_attn"]
    save_adapter(tmp_path / "named", tensors, replace(config, target_modules=names))
    with QLoRAModel.from_pretrained(base, adapter=folders["third"], device=device) as model:
        expected = outcomes(model)
        model.load_adapter(tmp_path / "named", "named")
        model.set_adapter("named")
        assert same(outcomes(model), expected)
    with QLoRAModel.from_pretrained(base, adapter=tmp_path / "named", device=device) as model:
        assert same(outcomes(model), expected)


def test_what_is_refused(base, folders, device, tmp_path):
    model = QLoRAModel.from_pretrained(base, adapter=folders["first"], device=device)
    before = outcomes(model)
    model.load_adapter(folders["second"], "second")
    other = write_model(tmp_path / "other", hidden_size=40)
    foreign = QLoRAModel.from_pretrained(other, LoraConfig(r=2), device=device)
    foreign.save_adapter(tmp_path / "foreign")
    tensors, config = load_adapter(folders["first"])
    no_bias = {"base_model.model.model.layers.0.mlp.up_proj.bias": np.ones(52, np.float32)}
    save_adapter(tmp_path / "bias", {**tensors, **no_bias}, replace(config, bias="all"))
    for call, error, text in (
        (
            lambda: model.set_adapter("x"),
            ConfigError,
            r"unknown adapter 'x' \(loaded: default, second",
        ),
        (lambda: model.delete_adapter("x"), ConfigError, "unknown adapter 'x'"),
        (lambda: model.delete_adapter("default"), ConfigError, "'default' is active"),
        (
            lambda: model.load_adapter(folders["third"], "second"),
            ConfigError,
            "already exists: call delete",
        ),
        (lambda: model.load_adapter({}, "y"), ConfigError, "only a folder"),
        (lambda: model.load_adapter(folders["third"], ""), ConfigError, "name must be a non-empty"),
        (lambda: model.load_adapter(tmp_path / "foreign", "z"), CheckpointError, "does not fit"),
        (lambda: model.load_adapter(tmp_path / "bias", "z"), CheckpointError, "trained bias"),
        (lambda: model.load_adapter(tmp_path / "none", "z"), CheckpointError, "does not exist"),
    ):
        with pytest.raises(error, match=text):
            call()
    with model.disable_adapter(), pytest.raises(ConfigError, match="within disable_adapter"):
        model.set_adapter("second")
    assert list(model.adapters) == ["default", "second"] and same(outcomes(model), before)


def test_what_has_no_room(base, folders):
    device = Device()
    model = QLoRAModel.from_pretrained(base, adapter=folders["first"], device=device)
    before = model.logits(IDS)
    device.budget = device.memory.total + 256
    with pytest.raises(OutOfMemoryError, match=r"device\.memory allows"):
        model.load_adapter(folders["second"], "second")
    model.load_adapter(folders["fourth"], "fourth")  # which has a place already
    assert list(model.adapters) == ["default", "fourth"]
    assert np.array_equal(model.logits(IDS), before)
