"""An adapter that began as a part of its base, as plain LoRA of twice the rank, and back."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora import AdapterConfig
from qlora_wgpu.lora.init import STARTED, InitialAdapter, converted, started_in

AT = "base_model.model.layers.0.q_proj.lora_"


def started(use_rslora=False, **settings):
    rng = np.random.default_rng(1)
    shapes = {f"{AT}A.weight": (3, 8), f"{AT}B.weight": (6, 3)}
    now, start = (
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    )
    return InitialAdapter(
        "pissa", now, start, AdapterConfig(3, 5, 0.0, ["q_proj"], use_rslora, "base", **settings)
    )


def product(tensors):
    return tensors[f"{AT}B.weight"] @ tensors[f"{AT}A.weight"]


@pytest.mark.parametrize("use_rslora", [False, True])
def test_it_computes_what_was_learnt_and_is_found_again(tmp_path, use_rslora):
    own = started(use_rslora=use_rslora, rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 5})
    tensors, plain, told = converted(own)
    scaling = (
        (lambda c: c.lora_alpha / np.sqrt(c.r)) if use_rslora else (lambda c: c.lora_alpha / c.r)
    )
    learnt = scaling(own.config) * (product(own.tensors) - product(own.start))
    np.testing.assert_allclose(scaling(plain) * product(tensors), learnt, rtol=1e-4, atol=1e-5)
    assert plain.rank_pattern == {"q_proj": 6} and plain.r == 6
    assert plain.alpha_pattern["q_proj"] == pytest.approx(plain.lora_alpha)
    save_file(tensors, tmp_path / "adapter_model.safetensors", told)
    again = started_in(tmp_path, tensors, plain)
    assert (again.kind, again.config) == ("pissa", own.config)
    for name in tensors:
        np.testing.assert_array_equal(again.tensors[name], own.tensors[name])
        np.testing.assert_array_equal(again.start[name], own.start[name])


def test_an_adapter_that_began_otherwise_is_none(tmp_path):
    own = started()
    save_file(own.tensors, tmp_path / "adapter_model.safetensors")
    assert started_in(tmp_path, own.tensors, own.config) is None


@pytest.mark.parametrize("wrong", [
    {f"{AT}A.weight": np.zeros((5, 8), np.float32)},
    {f"{AT}B.weight": np.zeros((6, 5), np.float32)},
    {f"{AT[:-1]}_magnitude_vector": np.zeros((6, 2), np.float32)},
])  # fmt: skip
def test_what_is_no_pair_of_two_halves_is_refused(tmp_path, wrong):
    tensors, plain, told = converted(started())
    save_file(tensors, tmp_path / "adapter_model.safetensors", told)
    with pytest.raises(CheckpointError, match="does not consist of two halves"):
        started_in(tmp_path, wrong, plain)


@pytest.mark.parametrize("text", ["{", "{}", '"pissa"'])
def test_damaged_metadata_are_told(tmp_path, text):
    tensors, plain, _ = converted(started())
    save_file(tensors, tmp_path / "adapter_model.safetensors", {STARTED: text})
    with pytest.raises(CheckpointError, match="metadata init_lora_weights is damaged"):
        started_in(tmp_path, tensors, plain)
