"""gpt-oss's folders: each expert's matrices and biases are parts of a tensor."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError

AT, EXPERTS, HIDDEN, INNER = "model.layers.0.mlp.experts", 3, 5, 4


def stacks(dtype=np.float32):
    random = np.random.default_rng(2)
    shapes = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "gate_up_proj_bias": (EXPERTS, 2 * INNER),
        "down_proj": (EXPERTS, INNER, HIDDEN), "down_proj_bias": (EXPERTS, HIDDEN),
    }  # fmt: skip
    return {f"{AT}.{n}": random.standard_normal(s).astype(dtype) for n, s in shapes.items()}


def opened(folder, arrays, model_type="gpt_oss"):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file(arrays, folder / "model.safetensors")
    return ModelFolder.open(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_parts(tmp_path, dtype):
    arrays = stacks(dtype)
    model = opened(tmp_path, arrays)
    for i in range(EXPERTS):
        gate_up = arrays[f"{AT}.gate_up_proj"][i].astype(np.float32)
        bias = arrays[f"{AT}.gate_up_proj_bias"][i].astype(np.float32)
        down = arrays[f"{AT}.down_proj"][i].astype(np.float32)
        expected = {
            "gate_proj.weight": gate_up[:, ::2].T, "up_proj.weight": gate_up[:, 1::2].T,
            "gate_proj.bias": bias[::2], "up_proj.bias": bias[1::2], "down_proj.weight": down.T,
            "down_proj.bias": arrays[f"{AT}.down_proj_bias"][i].astype(np.float32),
        }  # fmt: skip
        for leaf, array in expected.items():
            name = f"{AT}.{i}.{leaf}"
            assert name in model and model[name].shape == array.shape
            assert model[name].stored_dtype in ("F32", "F16", "BF16")
            assert np.array_equal(model[name].read(), array)
    assert f"{AT}.{EXPERTS}.down_proj.weight" not in model
    assert set(model.names()) == set(arrays)


def test_parts_in_order_make_the_whole(tmp_path):
    arrays = stacks()
    model = opened(tmp_path, arrays)
    for stack in ("gate_up_proj", "down_proj"):
        tensor = f"{AT}.{stack}"
        whole = model.stack(tensor)
        parts = [model[name].read() for name in whole.parts]
        assert (whole.name, whole.shape(*parts[0].shape)) == (tensor, arrays[tensor].shape)
        assert np.array_equal(whole.joined(parts), arrays[tensor])


def test_other_families_have_no_such_biases(tmp_path):
    model = opened(tmp_path, stacks(), "llama")
    assert f"{AT}.0.down_proj.bias" not in model
    assert model[f"{AT}.0.down_proj.weight"].shape == (INNER, HIDDEN)  # not transposed


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 5, 7), np.float32),  # no halves
        np.zeros((3, 8), np.float32),
        np.zeros((3, 5, 8), np.uint8),
    ],
)
def test_what_no_experts_are(tmp_path, array):
    model = opened(tmp_path, {f"{AT}.gate_up_proj": array})
    assert f"{AT}.1.up_proj.weight" not in model
    assert model.stack(f"{AT}.gate_up_proj") is None


def test_damage_is_told(tmp_path):
    model = opened(tmp_path, {f"{AT}.gate_up_proj": np.full((3, 5, 8), np.nan, np.float32)})
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        model[f"{AT}.1.up_proj.weight"].read()
