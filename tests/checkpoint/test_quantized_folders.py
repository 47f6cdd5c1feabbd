"""Folders of every quantization that is read: what their own programs dequantize, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized import PlannedFormats
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

RECORDED = Path(__file__).parents[1] / "fixtures" / "formats.npz"
STEM = "model.layers.0.mlp.up_proj"
NAME = f"{STEM}.weight"

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def recorded() -> Arrays:
    with np.load(RECORDED) as file:
        return {name: file[name] for name in file}


def opened(folder: Path, arrays: Arrays, quantization: dict[str, Any] | None) -> ModelFolder:
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(arrays, folder / "model.safetensors")
    return ModelFolder.open(folder)


def assert_bits(model: ModelFolder, expected: np.ndarray, name: str = NAME) -> None:
    weight, form = model[name].quantized(), model[name].format
    assert weight is not None and form is not None
    assert weight.format.key == form.key
    assert model.is_quantized and name in model and model[name].is_quantized
    assert model[name].shape == weight.shape == expected.shape
    assert weight.dequantize().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("case", ["fp4", "fp4-nested"])
def test_bitsandbytes_fp4(tmp_path: Path, recorded: Arrays, case: str) -> None:
    parts = {n.partition("/")[2]: a for n, a in recorded.items() if n.startswith(f"{case}/")}
    weight, codes = parts.pop("weight"), parts.pop("codes")
    arrays = {NAME: codes, **{f"{NAME}.{leaf}": array for leaf, array in parts.items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    model = opened(tmp_path, arrays, config)
    assert_bits(model, weight)
    assert all((model.weight_in(name) is None) == (name != NAME) for name in arrays)


def int8(recorded: Arrays) -> Arrays:
    return {
        NAME: recorded["int8/codes"],
        f"{STEM}.SCB": recorded["int8/SCB"],
        f"{STEM}.weight_format": np.zeros((), np.uint8),
    }


@pytest.mark.parametrize("config", [{"load_in_8bit": True}, None])
def test_bitsandbytes_int8(tmp_path: Path, recorded: Arrays, config: Any) -> None:
    model = opened(tmp_path, int8(recorded), config)
    assert_bits(model, recorded["int8/weight"])
    assert [n for n in model.names() if model.weight_in(n) is not None] == [NAME]


def test_bitsandbytes_int8_in_another_order(tmp_path: Path, recorded: Arrays) -> None:
    arrays = int8(recorded) | {f"{STEM}.weight_format": np.ones((), np.uint8)}
    model = opened(tmp_path, arrays, {"load_in_8bit": True})
    with pytest.raises(CheckpointError, match="is not row-major"):
        model[NAME].quantized()


def fp8(recorded: Arrays) -> Arrays:
    codes = recorded["fp8/codes"].view(ml_dtypes.float8_e4m3fn)
    return {NAME: codes, f"{STEM}.weight_scale_inv": recorded["fp8/scales"]}


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def test_fp8_in_tiles(tmp_path: Path, recorded: Arrays) -> None:
    assert_bits(opened(tmp_path, fp8(recorded), FP8), recorded["fp8/weight"])


def in_groups(*tiles: Any) -> dict[str, Any]:
    """compressed-tensors' FP8, its groups of layers in tiles of these sizes."""
    names = (["Linear"], ["re:.*attn"], ["lm_head"])
    groups = {
        f"group_{i}": {"targets": names[i], "weights": {"type": "float", "block_structure": tile}}
        for i, tile in enumerate(tiles)
    }
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return config | {"config_groups": groups}


def test_fp8_in_tiles_of_compressed_tensors(tmp_path: Path, recorded: Arrays) -> None:
    arrays = fp8(recorded)
    arrays[f"{STEM}.weight_scale"] = arrays.pop(f"{STEM}.weight_scale_inv")
    config = in_groups([32, 32], None, [32, 32])
    model = opened(tmp_path, arrays, config)
    assert_bits(model, recorded["fp8/weight"])
    planned, stored = PlannedFormats(config).format(NAME, 100), model[NAME].format
    assert planned is not None and stored is not None and planned.key == stored.key


@pytest.mark.parametrize("shape", [(), (1,), (70,), (70, 1)])
def test_fp8_with_fewer_scales(tmp_path: Path, recorded: Arrays, shape: tuple[int, ...]) -> None:
    codes = recorded["fp8/codes"].view(ml_dtypes.float8_e4m3fn)
    scales = np.linspace(0.5, 2, int(np.prod(shape))).astype(ml_dtypes.bfloat16).reshape(shape)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    model = opened(tmp_path, {NAME: codes, f"{STEM}.weight_scale": scales}, config)
    factors = scales.astype(np.float32).reshape(-1, 1)
    assert_bits(model, codes.astype(np.float32) * factors)


def test_fp8_scales_that_are_powers_of_two(tmp_path: Path, recorded: Arrays) -> None:
    exponents = np.arange(120, 132, dtype=np.uint8).reshape(3, 4)
    model = opened(tmp_path, fp8(recorded) | {f"{STEM}.weight_scale_inv": exponents}, FP8)
    scales = np.repeat(np.repeat(2.0 ** (exponents - 127.0), 32, 0)[:70], 32, 1)[:, :100]
    codes = recorded["fp8/codes"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_bits(model, codes * scales)


def packed(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Words of eight 4-bit integers along the last axis: nibble i holds number order[i]."""
    eights = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint64)
    words = sum(eights[..., number] << np.uint64(4 * i) for i, number in enumerate(order))
    return words.astype(np.uint32).view(np.int32)


def integers(rows: int, columns: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random, groups = np.random.default_rng(0), -(-columns // group)
    codes = random.integers(0, 16, (columns, rows), dtype=np.uint8)
    zeros = random.integers(0, 16, (groups, rows), dtype=np.uint8)
    return codes, zeros, random.normal(0, 0.1, (groups, rows)).astype(np.float16)


def exact(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: Any) -> np.ndarray:
    return ((codes.astype(np.float32) - zeros[group]) * scales.astype(np.float32)[group]).T


def test_awq(tmp_path: Path) -> None:
    codes, zeros, scales = integers(24, 96, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(codes, order), "qzeros": packed(zeros, order), "scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    model = opened(tmp_path, {f"{STEM}.{leaf}": array for leaf, array in parts.items()}, config)
    expected = exact(codes, zeros, scales, np.arange(96) // 32)
    assert_bits(model, expected + np.float32(0))  # no zero has a sign
    # What AWQ's kernels round to float16 is the same.
    assert (expected.astype(np.float16) == (codes.T - zeros.T.astype(np.float16).repeat(32, 1))
            * scales.T.repeat(32, 1)).all()  # fmt: skip
    assert model.weight_in(f"{STEM}.qweight").name == NAME
    assert model.weight_in(f"{STEM}.qzeros") is None


def gptq(columns: int, less_one: int, **more: np.ndarray) -> tuple[Arrays, tuple[Any, ...]]:
    codes, zeros, scales = integers(24, columns, 32)
    parts = {
        "qweight": packed(codes.T).T,
        "qzeros": packed((zeros - np.uint8(less_one)) & 15),
        "scales": scales,
        **more,
    }
    return {f"{STEM}.{leaf}": array for leaf, array in parts.items()}, (codes, zeros, scales)


@pytest.mark.parametrize(("version", "less_one"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("columns", [96, 72])
def test_gptq(tmp_path: Path, version: str, less_one: int, columns: int) -> None:
    groups = np.arange(columns, dtype=np.int32) // 32
    arrays, parts = gptq(columns, less_one, g_idx=groups)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": version}
    model = opened(tmp_path, arrays, config)
    assert_bits(model, exact(*parts, groups) + np.float32(0))
    assert not model[NAME].must_requantize


def test_gptq_with_a_scale_for_each_row(tmp_path: Path) -> None:
    codes, zeros, scales = integers(24, 96, 96)
    parts = {"qweight": packed(codes.T).T, "qzeros": packed((zeros - 1) & 15), "scales": scales}
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    model = opened(tmp_path, {f"{STEM}.{leaf}": array for leaf, array in parts.items()}, config)
    assert_bits(model, exact(codes, zeros, scales, np.zeros(96, np.int32)) + np.float32(0))


def test_gptq_in_another_order_is_requantized(tmp_path: Path) -> None:
    groups = np.random.default_rng(1).permutation(96).astype(np.int32) % 3
    arrays, parts = gptq(96, 1, g_idx=groups)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    model = opened(tmp_path, arrays, config)
    assert model[NAME].must_requantize and model[NAME].quantized() is None
    np.testing.assert_array_equal(model[NAME].read(), exact(*parts, groups))


def in_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Words of 32 bits of integers along the last axis, the lowest bits first, without a gap."""
    ones = values[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    flat = ones.reshape(*values.shape[:-1], -1)
    return np.packbits(flat, axis=-1, bitorder="little").view(np.int32)


def gptq_of_bits(stem: str, bits: int, group: int) -> tuple[Arrays, np.ndarray]:
    """A layer of 32 x 96 in the first layout, and what it stands for."""
    codes, zeros, scales = integers(32, 96, group)
    mask = np.uint8(2**bits - 1)
    codes, zeros = codes & mask, zeros & mask
    less_one = (zeros - np.uint8(1)) & mask
    parts = {"qweight": in_bits(codes.T, bits).T, "qzeros": in_bits(less_one, bits)}
    expected = exact(codes, zeros, scales, np.arange(96) // group) + np.float32(0)
    return {f"{stem}.{leaf}": a for leaf, a in {**parts, "scales": scales}.items()}, expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_of_all_bits(tmp_path: Path, bits: int) -> None:
    arrays, expected = gptq_of_bits(STEM, bits, 32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    assert_bits(opened(tmp_path, arrays, config), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "dynamic": {"+:.*attn": {"bits": 8, "group_size": 48}}},
        {"quant_method": "auto-round", "extra_config": {"a.attn": {"bits": 8, "group_size": 48}}},
    ],
)
def test_layers_with_bits_and_groups_of_their_own(tmp_path: Path, config: Any) -> None:
    usual, expected = gptq_of_bits(STEM, 4, 32)
    other, of_other = gptq_of_bits("a.attn", 8, 48)
    model = opened(tmp_path, usual | other, {**config, "bits": 4, "group_size": 32})
    assert_bits(model, expected)
    assert_bits(model, of_other, "a.attn.weight")


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:auto_awq"])
def test_auto_round_packs_as_others_do(tmp_path: Path, packing: str) -> None:
    if packing.endswith("awq"):
        codes, zeros, scales = integers(24, 96, 32)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {"qweight": packed(codes, order), "qzeros": packed(zeros, order), "scales": scales}
        arrays = {f"{STEM}.{leaf}": array for leaf, array in parts.items()}
    else:
        arrays, (codes, zeros, scales) = gptq(96, int(packing.endswith("gptq")))
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": packing}
    model = opened(tmp_path, arrays, config)
    assert_bits(model, exact(codes, zeros, scales, np.arange(96) // 32) + np.float32(0))
    planned, stored = PlannedFormats(config).format(NAME, 96), model[NAME].format
    assert planned is not None and stored is not None and planned.key == stored.key


@pytest.mark.parametrize("divides", [True, False])
def test_nvfp4(tmp_path: Path, divides: bool) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (6, 24), dtype=np.uint8)
    blocks = random.uniform(0.1, 400, (6, 3)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(3.7)
    if divides:
        names = ("weight_packed", "weight_global_scale")
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        scales = blocks.astype(np.float32) / whole
    else:
        names = ("weight", "weight_scale_2")
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        scales = blocks.astype(np.float32) * whole
    arrays = {f"{STEM}.{names[0]}": codes, f"{STEM}.{names[1]}": whole.reshape(1)}
    model = opened(tmp_path, arrays | {f"{STEM}.weight_scale": blocks}, config)
    pairs = np.stack([codes & 15, codes >> 4], 2).reshape(6, 48)
    values = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_bits(model, values * scales.repeat(16, 1))
    assert [w.name for n in model.names() if (w := model.weight_in(n)) is not None] == [NAME]


def test_mxfp4_experts(tmp_path: Path, recorded: Arrays) -> None:
    stem = "model.layers.0.mlp.experts"
    blocks, scales = recorded["mxfp4/blocks"], recorded["mxfp4/scales"]
    arrays = {
        f"{stem}.{kind}_proj_{leaf}": array
        for kind in ("gate_up", "down")
        for leaf, array in (("blocks", blocks), ("scales", scales))
    }
    model = opened(tmp_path, arrays, {"quant_method": "mxfp4"})
    for expert, weight in enumerate(recorded["mxfp4/weight"]):
        assert_bits(model, weight[0::2], f"{stem}.{expert}.gate_proj.weight")
        assert_bits(model, weight[1::2], f"{stem}.{expert}.up_proj.weight")
        assert_bits(model, weight, f"{stem}.{expert}.down_proj.weight")
    assert f"{stem}.2.down_proj.weight" not in model


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *(
            ({"quant_method": method}, f"is quantized with {method}, which is not supported")
            for method in ("aqlm", "eetq", "higgs", "hqq", "quanto", "quark", "spqr", "torchao")
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packed as",
        ),
        ({"quant_method": "auto-round", "data_type": "mx_fp4"}, "AutoRound and packed as"),
        ({"quant_method": "auto-round", "rotation_config": {"a": 1}}, "weights of AutoRound"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, "layout 'gptq_p' is not"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "layout 'marlin' is not"),
        ({"quant_method": "compressed-tensors", "format": "x"}, "format x, which is not supported"),
        ({"quant_method": 7}, "is quantized with 7, which is not supported"),
        (AWQ | {"bits": 3}, "AWQ with 3 bits is not supported"),
        (AWQ | {"group_size": 0}, "or -1, got 0"),
        (AWQ | {"group_size": "x"}, "or -1, got 'x'"),
        (AWQ | {"version": "gemv"}, "AWQ's layout 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ with 5 bits is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "must be a list of two sizes"),
        (in_groups("32x0"), "block_structure of quantization_config must be a list of two"),
        (in_groups([32, 32], [64, 32]), "different block_structure"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=expected):
        opened(tmp_path, {"x": np.zeros(1, np.float32)}, config)


def damaged(recorded: Arrays) -> list[tuple[Arrays, Any, str]]:
    good, grouped = fp8(recorded), gptq(96, 1)[0]
    infinite = np.where(np.arange(12).reshape(3, 4) == 5, np.inf, recorded["fp8/scales"])
    nan = recorded["fp8/codes"].copy()
    nan[3, 4] = 0xFF
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    scale, g_idx = f"{STEM}.weight_scale_inv", f"{STEM}.g_idx"
    few = {f"{STEM}.scales": np.ones((2, 24), np.float16)}
    return [
        (good | {scale: np.ones((2, 4), np.float32)}, FP8, "must have a scale for each 32 x 32"),
        (good | {scale: infinite.astype(np.float32)}, FP8, "contains NaN or infinity"),
        (good | {NAME: nan.view(ml_dtypes.float8_e4m3fn)}, FP8, "contains NaN or infinity"),
        (good | {NAME: good[NAME].reshape(-1)}, FP8, "must be a matrix"),
        ({n: a for n, a in grouped.items() if "qzeros" not in n}, config, "qzeros' is missing"),
        (grouped | few, config, "must have shape \\(3, 24\\)"),
        (grouped | {g_idx: np.full(96, 3, np.int32)}, config, "groups that do not exist"),
        (grouped | {f"{STEM}.qzeros": np.ones((3, 3), np.float32)}, config, "got F32"),
        (int8(recorded) | {f"{STEM}.SCB": np.ones(5, np.float32)}, None, "have shape \\(6,\\)"),
    ]


@pytest.mark.parametrize("number", range(9))
def test_damage_is_one_sentence(tmp_path: Path, recorded: Arrays, number: int) -> None:
    arrays, config, expected = damaged(recorded)[number]
    model = opened(tmp_path, arrays, config)
    with pytest.raises(CheckpointError, match=expected) as caught:
        model[NAME].quantized()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 6, 1, 15), (2, 6, 16), (2, 5, 1, 16)])
def test_experts_of_another_shape_than_mxfp4s(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stem = "model.layers.0.mlp.experts"
    arrays = {f"{stem}.gate_up_proj_blocks": np.zeros(shape, np.uint8),
              f"{stem}.gate_up_proj_scales": np.zeros(shape[:-1], np.uint8)}  # fmt: skip
    model = opened(tmp_path, arrays, {"quant_method": "mxfp4"})
    name = f"{stem}.1.gate_proj.weight"
    assert (name in model) == (len(shape) == 4)
    assert f"{stem}.2.gate_proj.weight" not in model
    told = "must have shape .experts, 2 · rows, blocks, 16" if name in model else "has no tensor"
    with pytest.raises(CheckpointError, match=told):
        assert model[name].shape
