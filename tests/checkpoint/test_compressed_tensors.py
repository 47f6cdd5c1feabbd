"""Folders of compressed-tensors: what its own program unpacks, in every form, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized import PlannedFormats
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

FIXTURES = Path(__file__).parents[1] / "fixtures"
STEM = "model.layers.0.mlp.up_proj"
NAME = f"{STEM}.weight"
with safe_open(FIXTURES / "compressed.safetensors", "np") as file:
    CONFIGS = json.loads(file.metadata()["configs"])

Arrays = dict[str, np.ndarray]
TYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def load_file(path: Path) -> Arrays:
    """A file's tensors, those of NumPy's lesser types included."""
    file = SafetensorsFile(path)
    arrays = {name: (file.raw(name), TYPES.get(file.dtype(name))) for name in file.names()}
    return {
        n: array if dtype is None else array.view(dtype) for n, (array, dtype) in arrays.items()
    }


@pytest.fixture(scope="module")
def recorded() -> Arrays:
    return load_file(FIXTURES / "compressed.safetensors")


def case(recorded: Arrays, name: str, stem: str = STEM) -> tuple[Arrays, np.ndarray]:
    """A case's tensors under a layer's name, and what they stand for."""
    own = {n.partition("/")[2]: a for n, a in recorded.items() if n.startswith(f"{name}/")}
    unpacked = own.pop("unpacked")
    return {f"{stem}.{leaf}": array for leaf, array in own.items()}, unpacked


def opened(folder: Path, arrays: Arrays, quantization: dict[str, Any]) -> ModelFolder:
    quantization = {"quant_method": "compressed-tensors", **quantization}
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, folder / "model.safetensors")
    return ModelFolder.open(folder)


def assert_unpacked(model: ModelFolder, expected: np.ndarray, name: str = NAME) -> None:
    """In float32 it is exact; compressed-tensors rounds that once, to the type of the scales."""
    weight, form = model[name].quantized(), model[name].format
    assert weight is not None and form is not None and weight.format.key == form.key
    assert model[name].shape == weight.shape == expected.shape
    assert not model[name].must_requantize
    assert weight.dequantize().astype(expected.dtype).tobytes() == expected.tobytes()
    planned = PlannedFormats(model.config["quantization_config"])
    form = planned.format(name, weight.shape[1])
    assert form is not None and form.key == weight.format.key


@pytest.mark.parametrize("name", CONFIGS)
def test_it_stands_for_what_its_program_unpacks(
    tmp_path: Path, recorded: Arrays, name: str
) -> None:
    arrays, unpacked = case(recorded, name)
    model = opened(tmp_path, arrays, CONFIGS[name])
    assert_unpacked(model, unpacked)
    [codes] = [tensor for tensor in model.names() if model.weight_in(tensor) is not None]
    assert model.weight_in(codes).name == NAME and model.is_quantized


def test_groups_name_their_layers(tmp_path: Path, recorded: Arrays) -> None:
    """A name counts before a pattern, and that before a class; each group has a form of its own."""
    stems = {"w4-zeros": STEM, "w3": "model.layers.1.mlp.up_proj", "fp8": "model.layers.0.attn.q"}
    targets = {"w4-zeros": ["re:.*mlp.*"], "w3": [stems["w3"]], "fp8": ["Linear"]}
    groups, arrays, unpacked = {}, {}, {}
    for name, stem in stems.items():
        own, unpacked[stem] = case(recorded, name, stem)
        arrays |= own
        group = CONFIGS[name]["config_groups"]["group_0"]
        form = CONFIGS[name]["format"]
        groups[name] = {**group, "targets": targets[name], "format": form}
    config = {"format": "mixed-precision", "config_groups": groups, "ignore": ["re:.*head"]}
    model = opened(tmp_path, arrays | {"lm_head.weight": np.ones((4, 8), np.float32)}, config)
    for stem, expected in unpacked.items():
        assert_unpacked(model, expected, f"{stem}.weight")
    assert not model["lm_head.weight"].is_quantized
    planned = PlannedFormats(model.config["quantization_config"])
    assert planned.format("lm_head.weight", 8) is None


@pytest.mark.parametrize("name", ["w4", "w4-zeros"])
def test_shuffled_columns_are_requantized(tmp_path: Path, name: str) -> None:
    arrays, unpacked = case(load_file(FIXTURES / "compressed_shuffled.safetensors"), name)
    model = opened(tmp_path, arrays, config("w4", symmetric=name == "w4"))
    assert model[NAME].must_requantize and model[NAME].quantized() is None
    assert model[NAME].read().tobytes() == unpacked.tobytes()


def test_columns_in_order_are_not(tmp_path: Path, recorded: Arrays) -> None:
    arrays, unpacked = case(recorded, "w4")
    for order in (np.arange(96, dtype=np.int32) // 32, np.full(96, -1, np.int32)):
        model = opened(tmp_path, arrays | {f"{STEM}.weight_g_idx": order}, CONFIGS["w4"])
        assert_unpacked(model, unpacked)


def config(name: str, key: str = "", value: Any = None, **weights: Any) -> dict[str, Any]:
    """A case's, with something else in it, or in what it says of weights."""
    copy: dict[str, Any] = json.loads(json.dumps(CONFIGS[name]))
    copy["config_groups"]["group_0"]["weights"] |= weights
    return copy | ({key: value} if key else {})


def test_what_is_quantized_for_inference_is_told(tmp_path: Path, recorded: Arrays) -> None:
    arrays, unpacked = case(recorded, "int8")
    assert opened(tmp_path, arrays, CONFIGS["int8"]).notes == ()
    arrays |= {f"{STEM}.input_scale": np.ones(1, np.float32)}
    arrays |= {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    more = config("int8", "kv_cache_scheme", {"num_bits": 8})
    more["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    model = opened(tmp_path, arrays, more)
    assert_unpacked(model, unpacked)
    [note] = model.notes
    assert note.startswith("quantization_config also quantizes activations or the KV cache")
    assert [tensor for tensor in model.names() if model.weight_in(tensor) is not None] == [NAME]


@pytest.mark.parametrize("size", ["16x16", [16, 16]])
def test_tiles_are_told_in_two_ways(tmp_path: Path, recorded: Arrays, size: Any) -> None:
    arrays, unpacked = case(recorded, "int8-block")
    assert_unpacked(opened(tmp_path, arrays, config("int8-block", block_structure=size)), unpacked)


def test_zeros_of_a_byte_each_and_no_shape(tmp_path: Path, recorded: Arrays) -> None:
    """As versions wrote them that did not pack zeros."""
    arrays, unpacked = case(recorded, "w4-zeros")
    words = arrays[f"{STEM}.weight_zero_point"].view(np.uint32)
    nibbles = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15
    zeros = nibbles.reshape(-1, words.shape[1])[:24].astype(np.int8) - np.int8(8)
    del arrays[f"{STEM}.weight_shape"]
    arrays[f"{STEM}.weight_zero_point"] = zeros
    assert_unpacked(opened(tmp_path, arrays, CONFIGS["w4-zeros"]), unpacked)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (config("w4", "format", "marlin-24"), "format marlin-24, which is not"),
        (config("w4", "format", "dense"), "format dense, which is not supported"),
        (config("w4", "sparsity_config", {"format": "sparse-24-bitmask"}), "sparse weights"),
        (config("w4", "transform_config", {"config_groups": {"R1": {}}}), "rotated"),
        (config("w4", "config_groups", []), "config_groups of quantization_config must be an obj"),
        (config("w4", "config_groups", {"W4A16": ["Linear"]}), "config_groups.W4A16 .* an object"),
        (config("w4", num_bits=9), "num_bits of quantization_config must be from 1 to 8, got 9"),
        (config("w4", group_size=0), "group_size .* must be a positive integer, got 0"),
        (config("w4", strategy="token"), "strategy of quantization_config must be group, tensor_"),
        (config("int8-block", block_structure="16"), "structure .* must be a list of two"),
        (config("fp8-naive", num_bits=4), "naive-quantized, which is not supported"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, asked: Any, expected: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=expected) as caught:
        opened(tmp_path, {"x": np.zeros(1, np.float32)}, asked)
    assert "\n" not in str(caught.value)


def two_groups(*targets: str) -> dict[str, Any]:
    group = CONFIGS["w4"]["config_groups"]["group_0"]
    return {**CONFIGS["w4"], "config_groups": {t: {**group, "targets": [t]} for t in targets}}


@pytest.mark.parametrize(
    ("leaf", "array", "asked", "expected"),
    [
        ("weight_shape", np.array([24, 97]), None, "is 24 x 97, which does not match 24"),
        ("weight_scale", np.ones((24, 2), np.float32), None, "a weight of 24 x 96"),
        ("weight_scale", np.full((24, 3), np.nan, np.float32), None, "contains NaN or infinity"),
        ("weight_zero_point", np.ones((2, 3), np.int32), None, "must have shape \\(3, 3\\)"),
        ("weight_packed", np.ones(12, np.int32), None, "must be a matrix"),
        ("weight_g_idx", np.full(96, 3, np.int32), None, "groups that do not exist"),
        ("x", np.ones(1, np.int32), two_groups("re:.*attn", "b"), "does not belong to a group of"),
        ("x", np.ones(1, np.int32), two_groups("re:(", "b"), "pattern 're:\\(' .* is not a reg"),
    ],
)
def test_damage_is_one_sentence(
    tmp_path: Path, recorded: Arrays, leaf: str, array: np.ndarray, asked: Any, expected: str
) -> None:
    arrays, _ = case(recorded, "w4-zeros")
    model = opened(tmp_path, arrays | {f"{STEM}.{leaf}": array}, asked or CONFIGS["w4-zeros"])
    with pytest.raises(CheckpointError, match=expected) as caught:
        model[NAME].quantized()
    assert "\n" not in str(caught.value)


def test_scales_of_few_digits_are_exact(tmp_path: Path, recorded: Arrays) -> None:
    """Integers times bfloat16 have no more digits than float32 keeps."""
    arrays, unpacked = case(recorded, "w8")
    weight = opened(tmp_path, arrays, CONFIGS["w8"])[NAME].quantized()
    assert weight is not None and unpacked.dtype == ml_dtypes.bfloat16
    codes = arrays[f"{STEM}.weight_packed"].view(np.uint8).reshape(24, -1)[:, :64].astype(np.int64)
    exact = (codes - 128) * arrays[f"{STEM}.weight_scale"].astype(np.float64)
    assert (weight.dequantize() == exact).all()
