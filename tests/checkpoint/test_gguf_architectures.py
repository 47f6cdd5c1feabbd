"""GGUF files against the Hugging Face folders that llama.cpp's converter makes them of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.gguf_files import (
    byte_vocabulary,
    keys_of,
    random_weights,
    tensors_of,
    write_gguf,
    write_model,
)

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import find_family

BASE = {
    "vocab_size": 33, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                  "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 40.0,
               "final_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 12,
                    "rope_local_base_freq": 5000.0, "num_hidden_layers": 7},
    "phi3": {"head_dim": 6, "sliding_window": 16, "original_max_position_embeddings": 64,
             "tie_word_embeddings": False},
    "granite": {"attention_multiplier": 0.25, "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 16,
                "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default"}},
}  # fmt: skip


def model(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    config = BASE | {"model_type": name.split()[0]} | MODELS[name]
    return config, random_weights(config)


def parts(value: object, at: str = "") -> dict[str, object]:
    """All numbers of what a family reads, a rotation's by its angles."""
    if dataclasses.is_dataclass(value):
        fields = [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        fields = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif callable(value):
        return {at: value(100).tolist()}
    else:
        return {at: value}
    return {k: v for end, item in fields for k, v in parts(item, at + end).items()}


def differing(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    assert one.keys() == other.keys()

    def same(a: object, b: object) -> bool:
        if isinstance(a, float | list) and isinstance(b, float | list):
            return np.allclose(a, b, rtol=1e-6, atol=0)  # files have float32
        return a == b

    return {key: (one[key], other[key]) for key in one if not same(one[key], other[key])}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_folder_it_was_made_of(tmp_path, name) -> None:
    config, tensors = model(name)
    folder = ModelFolder.open(write_model(tmp_path / "m.gguf", config, tensors))
    expected = find_family(config).read(config)
    read = find_family(folder.config).read(folder.config)
    assert differing(parts(read.config), parts(expected.config)) == {}
    for part in ("linears", "norms", "experts", "routers", "tied", "vocab_size"):
        assert getattr(read, part) == getattr(expected, part), part
    assert set(folder.names()) == set(tensors)
    for tensor, array in tensors.items():
        if name.startswith("gemma") and "norm" in tensor:  # the converter adds one, in float32
            array = (array + np.float32(1)) - np.float32(1)
        assert np.array_equal(folder[tensor].read(), array), tensor


def rope_of(tmp_path, config: dict, **more) -> dict:
    path = write_model(tmp_path / "m.gguf", config, random_weights(config), **more)
    return ModelFolder.without_weights(path).config


def frequencies(config: dict, length: int = 100) -> np.ndarray:
    return find_family(config).read(config).config.layers[0].attention.rope.frequencies(length)


@pytest.mark.parametrize("length", [8192, 4096])
def test_factors_of_llama_3(tmp_path, length) -> None:
    """Its parameters where they are the usual ones, else the factors as they are."""
    config, _ = model("llama")
    config |= {"rope_scaling": SCALED | {"original_max_position_embeddings": length}}
    plain = {key: value for key, value in config.items() if key != "rope_scaling"}
    factors = frequencies(plain) / frequencies(config)
    assert factors.max() > 2 and factors.min() == 1
    read = rope_of(tmp_path, plain, tensors={"rope_freqs.weight": factors})
    assert read["rope_scaling"]["rope_type"] == ("llama3" if length == 8192 else "longrope")
    assert np.allclose(frequencies(read), frequencies(config), rtol=1e-6)
    assert np.allclose(frequencies(read, 10_000), frequencies(config), rtol=1e-6)


def test_factors_of_phi_3(tmp_path) -> None:
    short, long = [1.0, 1.25, 2.5], [1.5, 3.0, 7.5]
    config = model("phi3")[0] | {
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long}
    }
    plain = {key: value for key, value in config.items() if key != "rope_scaling"}
    read = rope_of(
        tmp_path,
        plain,
        tensors={"rope_factors_short.weight": np.array(short),
                 "rope_factors_long.weight": np.array(long)},
        keys={"phi3.rope.scaling.attn_factor": float(np.sqrt(1 + np.log(2) / np.log(64)))},
    )  # fmt: skip
    rope, expected = (
        find_family(c).read(c).config.layers[0].attention.rope for c in (read, config)
    )
    for length in (10, 100):
        assert np.array_equal(rope.frequencies(length), expected.frequencies(length))
    assert rope.factor == pytest.approx(expected.factor, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ({"type": "none", "factor": 4.0}, None),
    ],
)  # fmt: skip
def test_scaled_rotations(tmp_path, keys, scaling) -> None:
    config, _ = model("qwen2")
    given = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
    assert rope_of(tmp_path, config, keys=given).get("rope_scaling") == scaling


def test_gpt_oss_s_rotation(tmp_path) -> None:
    """As published: what no key tells is as its config.json has it."""
    config, _ = model("gpt_oss")
    del config["rope_parameters"]
    keys = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    given = {f"gpt-oss.rope.scaling.{key}": value for key, value in keys.items()}
    read = rope_of(tmp_path, config, keys=given)
    rope, expected = (
        find_family(c).read(c).config.layers[0].attention.rope for c in (read, config)
    )
    assert np.allclose(rope.table(100), expected.table(100), rtol=1e-6)
    assert read["rope_scaling"]["truncate"] is False and rope.factor > 1.3


def test_a_window_for_each_layer(tmp_path) -> None:
    config, _ = model("gemma3_text")
    pattern = [True, False] * 3 + [False]
    keys = {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.attention.scale": 0.5}
    read = rope_of(tmp_path, config, keys=keys)
    assert [kind == "sliding_attention" for kind in read["layer_types"]] == pattern
    assert read["query_pre_attn_scalar"] == 4


REFUSED = {
    "unknown architecture": ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    "a key that is not known": ({"llama.some.key": 3}, "unknown key llama.some.key = 3"),
    "layers that differ": ({"llama.attention.head_count": [4, 4, 2]}, "differs between layers"),
    "another scale": ({"llama.attention.scale": 3.0}, "attention.scale = 3.0 is not supported"),
    "heads rotated in part": ({"llama.rope.dimension_count": 6}, "dimension_count = 6 is not"),
    "values of another size": ({"llama.attention.value_length": 6}, "value_length = 6 is not"),
    "another scaling": ({"llama.rope.scaling.type": "su"}, "'su' is not supported"),
    "text for a number": ({"llama.embedding_length": "x"}, "must be an integer, got 'x'"),
    "no head": ({"llama.attention.head_count": 0}, "head_count is 0"),
    "experts without a count": (
        {"llama.expert_count": 3}, "the key llama.expert_used_count is missing"),
    "an adapter": ({"general.type": "adapter"}, "is an adapter for llama.cpp"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed(tmp_path, what) -> None:
    changed, message = REFUSED[what]
    config, tensors = model("llama")
    keys = keys_of(config) | changed
    path = write_gguf(
        tmp_path / "m.gguf",
        keys.pop("general.architecture", "llama"),
        keys,
        tensors_of(config, tensors),
    )
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_tensors_that_are_not_computed(tmp_path) -> None:
    config, tensors = model("llama")
    for more in ("blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "cls.weight"):
        path = write_model(tmp_path / "m.gguf", config, tensors, tensors={more: np.ones(3)})
        with pytest.raises(UnsupportedModelError, match=f"{more}.*is not supported"):
            ModelFolder.open(path)
    path = write_model(tmp_path / "m.gguf", config, tensors, keys=byte_vocabulary(),
                       tensors={"blk.0.attn_rot_embd.weight": np.ones(3)})  # fmt: skip
    assert len(ModelFolder.open(path).names()) == len(tensors)
