"""Weights stored by bitsandbytes in 4 bits: read exactly, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_wgpu.checkpoint import ModelFolder, write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.mapped_files import is_mapped
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4

NAME = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
SHAPE = (20, 77)  # blocks cross rows, and the last one is short

Arrays = dict[str, np.ndarray]


def quantized(double_quant: bool = True, shape: tuple[int, int] = SHAPE) -> QuantizedWeight:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return quantize_nf4(weight, 32, double_quant, dtype="bfloat16")


def stored(tensor: QuantizedWeight, **changes: Any) -> Arrays:
    """As bitsandbytes' ``QuantState.as_dict(packed=True)`` lays it out."""
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": tensor.format.blocksize,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
    }
    arrays: Arrays = {
        NAME: tensor.codes[:, None],
        f"{NAME}.absmax": tensor.absmax,
        f"{NAME}.quant_map": tensor.format.quant_map,
    }
    if tensor.nested_absmax is not None and tensor.nested_quant_map is not None:
        state["nested_blocksize"] = tensor.format.nested_blocksize
        state["nested_dtype"] = "float32"
        state["nested_offset"] = tensor.nested_offset
        arrays[f"{NAME}.nested_absmax"] = tensor.nested_absmax
        arrays[f"{NAME}.nested_quant_map"] = tensor.nested_quant_map
    state = {key: value for key, value in (state | changes).items() if value is not ...}
    return arrays | {STATE: as_bytes(json.dumps(state))}


def as_bytes(text: str | bytes) -> np.ndarray:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)


def open_with(folder: Path, arrays: Arrays) -> ModelFolder:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(folder / "model.safetensors", arrays)
    return ModelFolder.open(folder)


def assert_same(tensor: QuantizedWeight | None, expected: QuantizedWeight) -> None:
    assert tensor is not None
    for field in ("codes", "absmax", "nested_absmax", "nested_quant_map"):
        one, other = getattr(tensor, field), getattr(expected, field)
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()
    assert tensor.format.key == expected.format.key
    for field in ("shape", "nested_offset", "dtype"):
        assert getattr(tensor, field) == getattr(expected, field)


@pytest.mark.parametrize("shape", [SHAPE, (1, 1), (7, 9), (64, 64)])
@pytest.mark.parametrize("double_quant", [False, True])
def test_reads_what_bitsandbytes_writes(
    tmp_path: Path, double_quant: bool, shape: tuple[int, int]
) -> None:
    tensor = quantized(double_quant, shape)
    model = open_with(tmp_path, stored(tensor))
    assert_same(model[NAME].quantized(), tensor)
    read = model[NAME].quantized()
    assert read is not None
    assert read.dequantize().tobytes() == tensor.dequantize().tobytes()


@pytest.mark.parametrize("storage", ["<f2", "<f4", "<f8", "<i2"])
def test_any_quant_storage(tmp_path: Path, storage: str) -> None:
    """FSDP asks for bytes that look like floats; some of them look like NaN."""
    tensor = quantized(shape=(16, 128))
    codes = tensor.codes.copy()
    codes[:16] = 0xFF
    arrays = stored(tensor)
    arrays[NAME] = codes.view(storage)[:, None]
    read = open_with(tmp_path, arrays)[NAME].quantized()
    assert read is not None
    assert read.codes.tobytes() == codes.tobytes()


def test_the_maps_of_the_file_are_used(tmp_path: Path) -> None:
    tensor = quantized()
    arrays = stored(tensor)
    arrays[f"{NAME}.quant_map"] = np.linspace(-1, 1, 16, dtype=np.float32)
    arrays[f"{NAME}.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    read = open_with(tmp_path, arrays)[NAME].quantized()
    assert read is not None
    assert read.format.quant_map.tobytes() == arrays[f"{NAME}.quant_map"].tobytes()
    assert read.nested_quant_map is not None
    assert read.nested_quant_map.tobytes() == arrays[f"{NAME}.nested_quant_map"].tobytes()


def test_nested_blocks_of_another_size(tmp_path: Path) -> None:
    tensor = quantized()  # 49 blocks
    arrays = stored(tensor, nested_blocksize=16)
    arrays[f"{NAME}.nested_absmax"] = np.arange(1, 5, dtype=np.float32)
    read = open_with(tmp_path, arrays)[NAME].quantized()
    assert read is not None
    assert read.format.nested_blocksize == 16
    codes = np.asarray(tensor.absmax)
    assert tensor.nested_quant_map is not None
    expected = tensor.nested_quant_map[codes[48]] * 4 + np.float32(tensor.nested_offset)
    assert read.block_scales()[48] == expected


def test_the_arrays_are_the_files_own(tmp_path: Path) -> None:
    weight = open_with(tmp_path, stored(quantized()))[NAME]
    first = weight.quantized()
    assert first is not None and weight.is_mapped
    assert is_mapped(first.codes) and not first.codes.flags.writeable


def test_a_weight_in_4_bits_is_read_as_floats_too(tmp_path: Path) -> None:
    model = open_with(tmp_path, stored(quantized()))
    assert model[NAME].read().tobytes() == quantized().dequantize().tobytes()
    assert model[NAME].dtype == "BF16" and model[NAME].stored_dtype == "U8"
    assert NAME in model
    assert set(model.names()) == set(stored(quantized()))


def test_companions_in_another_shard(tmp_path: Path) -> None:
    arrays = stored(quantized())
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "a.safetensors", {NAME: arrays.pop(NAME)})
    write_safetensors(tmp_path / "b.safetensors", arrays)
    weight_map = dict.fromkeys(arrays, "b.safetensors") | {NAME: "a.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(ModelFolder.open(tmp_path)[NAME].quantized(), quantized())


def refused(folder: Path, arrays: Arrays, kind: type[CheckpointError] = CheckpointError) -> str:
    model = open_with(folder, arrays)
    with pytest.raises(kind) as caught:
        model[NAME].quantized()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(f"{folder / 'model.safetensors'}: ")
    assert f"'{NAME}" in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("leaf", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_a_missing_companion(tmp_path: Path, leaf: str) -> None:
    arrays = stored(quantized())
    del arrays[f"{NAME}.{leaf}"]
    assert f"is quantized, but '{NAME}.{leaf}' is missing" in refused(tmp_path, arrays)


def test_a_missing_state(tmp_path: Path) -> None:
    arrays = stored(quantized())
    del arrays[STATE]
    assert f"is quantized, but {STATE} is missing" in refused(tmp_path, arrays)
    assert "is missing" in refused(tmp_path, {NAME: np.zeros((8, 1), np.uint8)})
    with pytest.raises(CheckpointError, match="is missing"):
        open_with(tmp_path, arrays)[NAME].read()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"quant_type": "fp4"}, "must have quant_type 'nf4', got 'fp4'"),
        ({"quant_type": ...}, "quant_type 'nf4', got None"),
        ({"blocksize": 48}, "has blocksize 48"),
        ({"blocksize": 32.0}, "as blocksize, got 32.0"),
        ({"blocksize": True}, "as blocksize, got True"),
        ({"blocksize": ...}, "as blocksize, got None"),
        ({"dtype": "int8"}, "bfloat16, got 'int8'"),
        ({"dtype": ...}, "bfloat16, got None"),
        ({"shape": [20]}, "has shape [20]"),
        ({"shape": [20, -77]}, "has shape [20, -77]"),
        ({"shape": [20, 0]}, "has shape [20, 0]"),
        ({"shape": [20.0, 77.0]}, "has shape [20.0, 77.0]"),
        ({"shape": None}, "has shape None"),
        ({"shape": [20, 78]}, "requires 780"),
        ({"shape": [2**30, 2**30]}, "has 770 bytes, but"),
        ({"blocksize": 64}, "absmax' has 49 bytes, but"),
        ({"nested_blocksize": 16}, "nested_absmax' has 1 numbers, but"),
        ({"nested_blocksize": 0}, "as nested_blocksize, got 0"),
        ({"nested_blocksize": ...}, "as nested_blocksize, got None"),
        ({"nested_dtype": "float16"}, "nested_dtype 'float32', got 'float16'"),
        ({"nested_offset": None}, "nested_offset, got None"),
        ({"nested_offset": "1"}, "nested_offset, got '1'"),
        ({"nested_offset": ...}, "nested_offset, got None"),
        ({"nested_offset": float("nan")}, "nested_offset, got nan"),
        ({"nested_offset": float("inf")}, "nested_offset, got inf"),
        ({"nested_offset": 1e39}, "nested_offset, got 1e+39"),
        ({"nested_offset": 10**400}, "nested_offset, got 1000"),
    ],
)
def test_a_state_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in refused(tmp_path, stored(quantized(), **changes))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_state_that_cannot_be_read(tmp_path: Path, state: bytes, expected: str) -> None:
    arrays = stored(quantized()) | {STATE: as_bytes(state)}
    assert expected in refused(tmp_path, arrays)


@pytest.mark.parametrize(
    ("leaf", "array", "expected"),
    [
        ("quant_map", np.zeros(15, np.float32), "quant_map' has 15 numbers, but its quant_state"),
        ("quant_map", np.full(16, np.nan, np.float32), "quant_map' contains NaN or infinity"),
        ("quant_map", np.zeros(16, np.uint8), "quant_map' has dtype U8"),
        ("nested_quant_map", np.zeros(16, np.float32), "has 16 numbers, but its quant_state"),
        ("nested_absmax", np.full(1, np.inf, np.float32), "nested_absmax' contains NaN"),
        ("absmax", np.zeros(49, np.float32), "absmax' must have dtype U8 with double"),
        ("absmax", np.zeros(48, np.uint8), "absmax' has 48 bytes, but its quant_state"),
    ],
)
def test_companions_that_do_not_fit(
    tmp_path: Path, leaf: str, array: np.ndarray, expected: str
) -> None:
    assert expected in refused(tmp_path, stored(quantized()) | {f"{NAME}.{leaf}": array})


def test_single_scales_that_do_not_fit(tmp_path: Path) -> None:
    arrays = stored(quantized(double_quant=False))
    assert "has 48 numbers, but its quant_state" in refused(
        tmp_path, arrays | {f"{NAME}.absmax": np.ones(48, np.float32)}
    )
    assert "has dtype U8" in refused(tmp_path, arrays | {f"{NAME}.absmax": np.ones(49, np.uint8)})


def test_fp4_is_read_with_its_own_map(tmp_path: Path) -> None:
    tensor, values = quantized(), np.linspace(1, -1, 16, dtype=np.float32)
    tensor = replace(tensor, format=replace(tensor.format, name="FP4", quant_map=values))
    arrays = stored(tensor, quant_type="fp4")
    arrays[f"{NAME}.quant_state.bitsandbytes__fp4"] = arrays.pop(STATE)
    model = open_with(tmp_path, arrays)
    assert_same(model[NAME].quantized(), tensor)
    form = model[NAME].format
    assert form is not None and form.key == tensor.format.key


def test_other_quantizations_are_refused(tmp_path: Path) -> None:
    int8 = {NAME: np.ones((4, 4), np.int8)}
    assert "is stored as 8-bit integers, but neither" in refused(
        tmp_path, int8, UnsupportedModelError
    )
    with pytest.raises(UnsupportedModelError, match="8-bit integers"):
        open_with(tmp_path, int8)[NAME].read()


def test_a_weight_may_have_any_name(tmp_path: Path) -> None:
    """Experts' stacks, for one, are no modules' weights."""
    name = "model.layers.0.mlp.experts.down_proj"
    arrays = {key.replace(NAME, name): array for key, array in stored(quantized()).items()}
    model = open_with(tmp_path, arrays)
    assert model.is_quantized and model[name].is_quantized
    assert model.weight_in(name).name == name
