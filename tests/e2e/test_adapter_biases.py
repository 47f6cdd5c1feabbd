"""Biases that PEFT trained beside an adapter take the place of the base's, and go with it."""

import json
import shutil

import numpy as np
import pytest
from references.seeded import adapter, weights
from references.sized import traced_configs
from safetensors.numpy import load_file, save_file

from e2e.test_family_types import normalize, shapes
from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting import merge
from qlora_wgpu.lora import load_adapter

LAYER = "model.layers.0"
BIASES = {f"{LAYER}.self_attn.q_proj": 1.5, f"{LAYER}.mlp.up_proj": -0.5}
IDS = np.arange(12).reshape(1, -1)
FLOATS = QuantConfig(scheme="none")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base") / "m", attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def model(base, device):
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    return QLoRAModel.from_pretrained(base, lora, FLOATS, "float32", device)


@pytest.fixture(scope="module")
def peft(base, model, tmp_path_factory):
    """An adapter as PEFT 0.21 writes one under ``bias: all``, of one layer with a pair."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    shapes = {name: array.shape for name, array in model.adapter_state_dict().items()}
    model.load_adapter(adapter(shapes))
    model.save_adapter(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for module, value in trained(base).items():
        own = ".base_layer" if module.endswith("q_proj") else ""
        tensors[f"base_model.model.{module}{own}.bias"] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    change(folder, bias="all")
    return folder


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def trained(base):
    opened = ModelFolder.open(base)
    return {m: opened[f"{m}.bias"].read() + np.float32(v) for m, v in BIASES.items()}


@pytest.fixture(scope="module")
def expected(base, peft, device, tmp_path_factory):
    """Logits of the base with those biases of its own, and the pairs alone."""
    folder = tmp_path_factory.mktemp("replaced") / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    tensors = {name: ModelFolder.open(base)[name].read() for name in ModelFolder.open(base).names()}
    tensors |= {f"{module}.bias": array for module, array in trained(base).items()}
    save_file(tensors, folder / "model.safetensors")
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    model = QLoRAModel.from_pretrained(folder, lora, FLOATS, "float32", device)
    pairs, _ = load_adapter(peft, biases=True)
    model.load_adapter({name: array for name, array in pairs.items() if "lora" in name})
    return model.logits(IDS)


def test_they_are_read_and_leave_again(base, peft, device, model, expected):
    before = model.logits(IDS)
    read = QLoRAModel.from_pretrained(
        base, quant=FLOATS, compute_dtype="float32", device=device, adapter=peft
    )
    assert np.array_equal(read.logits(IDS), expected)
    assert np.abs(expected - before).max() > 0.01
    with read.adapter_off():
        alone = read.logits(IDS)
    assert np.array_equal(read.logits(IDS), expected)
    read.load_adapter(model.adapter_state_dict())  # which has none
    assert np.array_equal(read.logits(IDS), before)
    with model.adapter_off():
        assert np.array_equal(model.logits(IDS), alone)


def test_they_are_kept(base, peft, device, model, expected, tmp_path):
    model.load_adapter(peft)
    model.save_adapter(tmp_path / "again")
    model.load_adapter({n: a for n, a in load_adapter(peft, biases=True)[0].items() if "lora" in n})
    stored = load_file(tmp_path / "again/adapter_model.safetensors")
    original = load_file(peft / "adapter_model.safetensors")
    assert stored.keys() == original.keys()
    assert all(np.array_equal(stored[name], original[name]) for name in stored)
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["bias"] == "all"


@pytest.mark.quick
def test_they_are_merged(base, peft, tmp_path):
    merge(base, peft, tmp_path / "merged")
    opened = ModelFolder.open(tmp_path / "merged")
    for module, array in trained(base).items():
        assert np.array_equal(opened[f"{module}.bias"].read(), array)


def test_those_of_norms(device, tmp_path):
    config = traced_configs()["nemotron"]
    tensors = normalize(weights(*shapes(config)))
    write(tmp_path / "base", config, tensors)
    changed = {name: array + 0.5 for name, array in tensors.items() if name.endswith("norm.bias")}
    assert any(".layers." in name for name in changed) and "model.norm.bias" in changed
    write(tmp_path / "changed", config, tensors | changed)
    options = {"lora": LoraConfig(r=3), "quant": FLOATS, "compute_dtype": "float32"}
    expected = QLoRAModel.from_pretrained(tmp_path / "changed", device=device, **options)
    expected.load_adapter(adapter({n: a.shape for n, a in expected.adapter_state_dict().items()}))
    expected.save_adapter(tmp_path / "peft")
    path = tmp_path / "peft/adapter_model.safetensors"
    more = {f"base_model.model.{name}": array for name, array in changed.items()}
    save_file(load_file(path) | more, path)
    change(tmp_path / "peft", bias="all")
    del options["lora"]
    read = QLoRAModel.from_pretrained(
        tmp_path / "base", device=device, adapter=tmp_path / "peft", **options
    )
    assert np.array_equal(read.logits(IDS), expected.logits(IDS))
    with read.adapter_off(), expected.adapter_off():
        assert not np.array_equal(read.logits(IDS), expected.logits(IDS))


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.quick
def test_a_base_that_lacks_a_layer_is_not_merged_into(base, peft, tmp_path):
    """It was written without the layer and its pair, which nothing told before it was opened."""
    other = shutil.copytree(base, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["renamed"] = tensors.pop(f"{LAYER}.self_attn.q_proj.weight")
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor .*q_proj\.weight"):
        merge(other, peft, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.quick
def test_what_cannot_take_them_says_so(peft, model, tmp_path):
    with pytest.raises(UnsupportedModelError, match="only inference and merging support: merge"):
        load_adapter(peft)
    other = write_model(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"has a trained .*bias of .* does not exist"):
        merge(other, peft, tmp_path / "merged")
    with pytest.raises(CheckpointError, match="has a trained bias of x with 3"):
        model.biases.take({"x": np.ones(3, np.float32)})
    change(peft, bias="none")
    with pytest.raises(CheckpointError, match="bias is 'none', but there is one of"):
        load_adapter(peft, biases=True)
    change(peft, bias="some")
    with pytest.raises(
        UnsupportedModelError, match="bias is 'some', but only none, lora_only, all"
    ):
        load_adapter(peft, biases=True)
