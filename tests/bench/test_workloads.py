"""Shapes and workloads of ``bench``; no GPU is opened."""

import json

import numpy as np
import pytest
from bench.fakes import CONFIG, fake_device
from safetensors.numpy import save_file

from qlora_wgpu.bench import workload
from qlora_wgpu.bench.workload import SHAPES, RandomFolder, Workload, config_of, find_shape
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError, OutOfMemoryError, UnsupportedModelError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.limits import RANK
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.quant.nf4 import nf4_format


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.mark.parametrize("name", SHAPES)
def test_every_preset_is_a_model_that_can_be_trained(name):
    for text in (name, name.upper(), name.lower()):
        shape = find_shape(text)
        assert (shape.name, shape.weights) == (name, "random")
        assert shape.config == config_of(name)
    architecture = find_family(shape.config).read(shape.config)
    assert architecture.num_layers == SHAPES[name]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2-135m", 134.5), ("llama-3.2-1b", 1235.8), ("llama-3.1-8b", 8030.3)],
)
def test_presets_have_as_many_parameters_as_their_models(name, millions):
    assert RandomFolder(config_of(name)).num_parameters == pytest.approx(1e6 * millions, rel=1e-3)


def test_a_config_or_a_folder_without_weights_gets_random_ones(config_file):
    for path in (config_file, config_file.parent):
        shape = find_shape(str(path))
        assert shape.config == CONFIG and shape.weights == "random"
        assert isinstance(shape.folder, RandomFolder)


def test_a_folder_with_weights_keeps_them(config_file):
    save_file({"x": np.ones(3, np.float32)}, config_file.parent / "model.safetensors")
    shape = find_shape(str(config_file.parent))
    assert type(shape.folder) is ModelFolder
    assert shape.weights == str(config_file.parent)
    np.testing.assert_array_equal(shape.folder["x"].read(), 1)
    # Its config.json alone still means the shape.
    assert find_shape(str(config_file)).weights == "random"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-3.2-1", "did you mean 'llama-3.2-1b'"),
        ("XXL", "unknown shape 'XXL'"),
        ("", "unknown shape ''"),
        ("meta-llama/Llama-3.2-1B", "unknown shape"),
        ("gone/config.json", "path of a model folder"),
    ],
)
def test_an_unknown_shape_names_those_there_are(text, expected):
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b") as caught:
        find_shape(text)
    assert expected in str(caught.value)


def test_paths_that_are_no_model(tmp_path, config_file):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_shape(str(empty))
    config_file.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        find_shape(str(config_file))
    config_file.write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    for path in (config_file, config_file.parent):
        with pytest.raises(UnsupportedModelError, match="mamba"):
            find_shape(str(path))
    (config_file.parent / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError):
        find_shape(str(config_file.parent))


def test_random_weights_fit_the_config_and_stay_the_same():
    folder, again = RandomFolder(CONFIG), RandomFolder(CONFIG)
    architecture = find_family(CONFIG).read(CONFIG)
    shapes = {architecture.embed_name: (83, 36), architecture.head_name: (83, 36)}
    for spec in architecture.linears:
        shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
        if spec.bias:
            shapes[f"{spec.name}.bias"] = (spec.out_features,)
    shapes |= architecture.norm_shapes
    assert set(folder.names()) == set(shapes)
    for name, shape in shapes.items():
        array = folder[name].read()
        assert name in folder and folder[name].shape == array.shape == shape
        assert array.dtype == np.float32 and np.isfinite(array).all()
        np.testing.assert_array_equal(array, again[name].read())
        assert folder[name].quantized() is None
        if name in architecture.norms:
            np.testing.assert_array_equal(array, 1)
    assert "model.layers.2.mlp.up_proj.weight" not in folder
    weight = folder["model.layers.0.mlp.up_proj.weight"].read()
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    assert np.abs(weight - folder["model.layers.1.mlp.up_proj.weight"].read()).max() > 0.01


def test_no_two_rows_of_large_random_weights_are_alike():
    config = {**CONFIG, "vocab_size": 40_000, "hidden_size": 40, "tie_word_embeddings": True}
    weight = RandomFolder(config)["model.embed_tokens.weight"].read()
    assert len(np.unique(weight[:, :2], axis=0)) == 40_000


@pytest.mark.parametrize("double", [False, True])
def test_random_codes_are_those_of_normal_weights(double):
    """Codes and scales made without quantizing: as long, and as spread, as if they were."""
    quant = QuantConfig(blocksize=64, double_quant=double)
    config = {**CONFIG, "hidden_size": 900, "intermediate_size": 1501}
    folder = RandomFolder(config, quant=quant)
    name, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    made, again = folder[name].quantized(), RandomFolder(config, quant=quant)[name].quantized()
    exact = quantize_nf4(folder[name].read(), 64, double)
    for field in ("codes", "absmax", "nested_absmax"):
        got, expected = getattr(made, field), getattr(exact, field)
        assert (got is None) == (expected is None)
        if got is not None:
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), field
            np.testing.assert_array_equal(got, getattr(again, field))
    weights = made.dequantize()
    assert weights.shape == (1501, 900) and weights.std() == pytest.approx(0.02, rel=0.02)
    assert abs(weights.mean()) < 1e-4
    assert (weights != folder[other].quantized().dequantize()).mean() > 0.5
    assert len(np.unique(weights[:, :8], axis=0)) == 1501
    form = made.format
    assert (form.blocksize, form.nested_blocksize) == (64, 256 if double else None)
    assert form.nested_blocksize == nf4_format(64, double).nested_blocksize
    for dense in ("model.embed_tokens.weight", "model.norm.weight"):
        assert folder[dense].quantized() is None
    assert RandomFolder(config, quant=QuantConfig(scheme="none"))[name].quantized() is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"seq": 1}, "--seq must be at least 2, got 1"),
        ({"rank": -3}, "--rank must be at least 1, got -3"),
        ({"rank": RANK + 1}, f"--rank must be at most {RANK:,}, got {RANK + 1}"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"seq": 65}, "--seq 65 is longer than the model's 64 positions"),
    ],
)
def test_numbers_that_cannot_be(config_file, changes, expected):
    with pytest.raises(ConfigError) as caught:
        Workload(find_shape(str(config_file)), **{"seq": 64, **changes})
    assert expected in str(caught.value)


def test_the_longest_sequence_may_be_measured(config_file):
    assert Workload(find_shape(str(config_file)), seq=64, rank=4).lora.lora_alpha == 8
    config_file.write_text(json.dumps({**CONFIG, "max_position_embeddings": None}))
    assert Workload(find_shape(str(config_file)), seq=9999).seq == 9999


def test_the_smallest_and_the_largest_numbers_may_be_measured(config_file):
    shape = find_shape(str(config_file))
    assert Workload(shape, batch=1, seq=2, rank=1, steps=1).rank == 1
    assert Workload(shape, seq=64, rank=RANK).rank == RANK


def test_a_software_adapter_may_not_take_more_than_the_machine_has(monkeypatch):
    work = Workload(find_shape("S"), batch=2)
    total = sum(work.planned_memory(fake_device()).values())
    monkeypatch.setattr(workload, "_available_bytes", lambda: total)
    work.planned_memory(fake_device())
    monkeypatch.setattr(workload, "_available_bytes", lambda: total - 1)
    with pytest.raises(OutOfMemoryError, match=r"S with --batch 2 --seq 256 .*--checkpointing$"):
        work.planned_memory(fake_device())
    work.planned_memory(fake_device(is_cpu=False))
    monkeypatch.setattr(workload, "_available_bytes", lambda: None)
    work.planned_memory(fake_device())


def test_checkpointing_is_not_advised_to_who_has_it(monkeypatch):
    monkeypatch.setattr(workload, "_available_bytes", lambda: 1)
    with pytest.raises(OutOfMemoryError) as caught:
        Workload(find_shape("S"), gradient_checkpointing=True).planned_memory(fake_device())
    assert "checkpointing" not in str(caught.value)


def test_what_is_absurd_is_refused_before_it_is_traced(monkeypatch, config_file):
    monkeypatch.setattr(workload, "_available_bytes", lambda: 1 << 30)
    config_file.write_text(json.dumps({**CONFIG, "vocab_size": 3_000_000_000}))
    with pytest.raises(OutOfMemoryError, match="at least 205,994 MiB"):
        Workload(find_shape(str(config_file)), seq=64).planned_memory(fake_device())


def test_what_32_bits_do_not_count_is_a_sentence():
    work = Workload(find_shape("S"), batch=10**8)
    with pytest.raises(OutOfMemoryError, match="too many elements for a kernel"):
        work.planned_memory(fake_device(is_cpu=False))
