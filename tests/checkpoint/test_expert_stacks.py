"""Experts that files hold together, as transformers keeps them in memory."""

import json

import ml_dtypes
import numpy as np
import pytest

from qlora_wgpu.checkpoint import ModelFolder, write_safetensors

AT = "model.layers.0.mlp.experts"


def opened(folder, **tensors):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe"}))
    named = {f"{AT}.{name}": array for name, array in tensors.items()}
    write_safetensors(folder / "model.safetensors", named)
    return ModelFolder.open(folder)


def bits(array):
    return np.asarray(array, ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_each_part_is_a_weight(tmp_path, is_bfloat16):
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((3, 10, 4)).astype(np.float32)
    down = rng.standard_normal((3, 4, 5)).astype(np.float32)
    if is_bfloat16:
        gate_up, down = (a.astype(ml_dtypes.bfloat16) for a in (gate_up, down))
    folder = opened(tmp_path, gate_up_proj=gate_up, down_proj=down)
    names = folder.stack(f"{AT}.gate_up_proj").parts
    assert names[:3] == [
        f"{AT}.{part}.weight" for part in ("0.gate_proj", "0.up_proj", "1.gate_proj")
    ]
    parts = [folder[name].read() for name in names]
    whole = np.concatenate(parts).reshape(3, 10, 4)
    np.testing.assert_array_equal(whole, gate_up.astype(np.float32))
    for i in range(3):
        expected = {"gate_proj": gate_up[i, :5], "up_proj": gate_up[i, 5:], "down_proj": down[i]}
        for leaf, array in expected.items():
            name = f"{AT}.{i}.{leaf}.weight"
            assert name in folder and folder[name].shape == array.shape
            assert folder[name].stored_dtype == folder[name].dtype
            assert folder[name].quantized() is None
            np.testing.assert_array_equal(folder[name].read(), array.astype(np.float32))
            raw = bits(array) if is_bfloat16 else array
            np.testing.assert_array_equal(folder[name].raw(), raw)
    assert folder.stack(f"{AT}.down_proj").parts[-1] == f"{AT}.2.down_proj.weight"


@pytest.mark.parametrize("transposed", [False, True])
def test_qwen_3_vl_s_stacks_lie_either_way(tmp_path, transposed):
    """Published ones are transposed, those that transformers 5 saves are not."""
    rng = np.random.default_rng(2)
    gate_up, down = (rng.standard_normal(s).astype(np.float32) for s in ((3, 10, 4), (3, 4, 5)))
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {"gate_up_proj": gate_up, "down_proj": down}
    if transposed:
        stored = {n: np.ascontiguousarray(a.transpose(0, 2, 1)) for n, a in stored.items()}
    named = {f"{AT}.{name}": array for name, array in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", named)
    folder = ModelFolder.open(tmp_path)
    parts = {"gate_proj": gate_up[1, :5], "up_proj": gate_up[1, 5:], "down_proj": down[1]}
    for leaf, array in parts.items():
        np.testing.assert_array_equal(folder[f"{AT}.1.{leaf}.weight"].read(), array)
    for name, array in stored.items():
        stack = folder.stack(f"{AT}.{name}")
        joined = stack.joined([folder[part].read() for part in stack.parts])
        np.testing.assert_array_equal(joined, array)


def test_what_is_no_part(tmp_path):
    folder = opened(
        tmp_path,
        gate_up_proj=np.zeros((3, 9, 4), np.float32),  # no halves
        down_proj=np.zeros((3, 4, 5), np.float32),
    )
    assert f"{AT}.0.gate_proj.weight" not in folder
    assert folder.stack(f"{AT}.gate_up_proj") is None
    assert f"{AT}.2.down_proj.weight" in folder
    for name in (f"{AT}.3.down_proj.weight", f"{AT}.02.down_proj.weight", f"{AT}.down_proj.weight"):
        assert name not in folder
    assert folder.stack(f"{AT}.0.down_proj.weight") is None


def test_integers_are_no_stack(tmp_path):
    folder = opened(tmp_path, down_proj=np.zeros((3, 4, 5), np.uint8))
    assert f"{AT}.0.down_proj.weight" not in folder


def test_granite_s_names(tmp_path):
    """Stacks go by the names of linear layers; a linear layer of that name is none."""
    rng, at = np.random.default_rng(1), "model.layers.0.block_sparse_moe"
    arrays = {
        f"{at}.input_linear.weight": rng.standard_normal((3, 10, 4)).astype(np.float32),
        f"{at}.output_linear.weight": rng.standard_normal((3, 4, 5)).astype(np.float32),
        "model.layers.0.shared_mlp.input_linear.weight": np.zeros((10, 4), np.float32),
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoe"}))
    write_safetensors(tmp_path / "model.safetensors", arrays)
    folder = ModelFolder.open(tmp_path)
    for stack, array in list(arrays.items())[:2]:
        names = folder.stack(stack).parts
        assert [folder[name].shape for name in names] == [(5, 4)] * 6 or len(names) == 3
        whole = np.concatenate([folder[name].read() for name in names])
        np.testing.assert_array_equal(whole.reshape(array.shape), array)
    assert folder.stack(f"{at}.input_linear.weight").parts[1] == f"{at}.experts.0.up_proj.weight"
    assert folder.stack("model.layers.0.shared_mlp.input_linear.weight") is None
    assert "model.layers.0.shared_mlp.experts.0.up_proj.weight" not in folder
