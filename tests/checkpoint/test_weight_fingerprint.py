"""The identity of a base: every byte of every tensor and config.json; not where they lie."""

import json
import os

import numpy as np
import pytest
from e2e.tiny import CONFIG, weights, write_model, write_weights
from safetensors.numpy import save_file

from qlora_wgpu.checkpoint import ModelFolder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "base")


def fingerprint(path):
    return ModelFolder.open(path).fingerprint


def test_it_is_the_same_however_the_weights_are_read(base):
    folder = ModelFolder.open(base)
    folder.start_fingerprint()
    for name in folder.names()[::2]:
        folder[name].read()
        folder[name].read()
    assert folder.fingerprint == fingerprint(base)


def test_the_files_do_not_count(base, tmp_path):
    assert fingerprint(write_model(tmp_path / "shards", shards=3)) == fingerprint(base)


def test_one_bit_counts(base, tmp_path):
    tensors = weights(CONFIG)
    name = sorted(tensors)[5]
    tensors[name].reshape(-1).view(np.uint32)[7] ^= 1
    changed = write_model(tmp_path / "changed")
    write_weights(changed, tensors)
    assert fingerprint(changed)["config"] == fingerprint(base)["config"]
    assert fingerprint(changed)["weights"] != fingerprint(base)["weights"]


def test_names_types_and_config_count(base, tmp_path):
    tensors = weights(CONFIG)
    renamed = write_model(tmp_path / "renamed")
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    write_weights(renamed, tensors)
    half = write_model(tmp_path / "half", store="bfloat16")
    config = write_model(tmp_path / "config")
    (config / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    assert fingerprint(config)["weights"] == fingerprint(base)["weights"]
    different = {json.dumps(fingerprint(p)) for p in (base, renamed, half, config)}
    assert len(different) == 4


def test_files_are_known_without_being_read(tmp_path):
    """By their size, time and header, by samples of each tensor, and by the config.json."""

    # Windows counts in 100 ns.
    def identity(value=0.0, time=10**18, **config):
        save_file({"w": np.full((64, 64), value, np.float32)}, tmp_path / "model.safetensors")
        os.utime(tmp_path / "model.safetensors", ns=(time, time))
        (tmp_path / "config.json").write_text(json.dumps({"a": 1, **config}))
        return ModelFolder.open(tmp_path).identity

    plain = identity()
    assert identity() == plain
    others = {identity(value=1.0), identity(time=10**18 + 100), identity(b=2)}
    assert len(others | {plain}) == 4
