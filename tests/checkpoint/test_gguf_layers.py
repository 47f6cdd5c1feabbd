"""GGUF files whose layers differ: what their keys say of each layer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.gguf_models import changed, folder_of, written

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gguf import mixers
from qlora_wgpu.gguf.config import read_config


def rewritten(place, case, tensors=(), **keys):
    """A case's file with other keys (None leaves one out), and with more tensors."""
    *_, made = written(folder_of(place, changed(case)))
    file = GGUFFile(place / "f32.gguf")
    known = dict(file.metadata) | {k.replace("__", "."): v for k, v in keys.items()}
    architecture = known.pop("general.architecture")
    known = {key: value for key, value in known.items() if value is not None}
    known = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in known.items()}
    own = {t.name: file.floats(t.name) for t in made.tensors}
    return write_gguf(place / "changed.gguf", architecture, known, own | dict(tensors))


def test_a_window_for_each_layer_of_olmo_3(tmp_path) -> None:
    """As llama.cpp's converter writes it, and the rotation's factor as config.json has it."""
    slides = [True, True, False, True, False]
    path = rewritten(
        tmp_path, "olmo3", olmo2__attention__sliding_window_pattern=slides,
        olmo2__rope__scaling__attn_factor=1.25,
    )  # fmt: skip
    config = ModelFolder.without_weights(path).config
    assert [kind == "sliding_attention" for kind in config["layer_types"]] == slides
    assert config["rope_parameters"]["full_attention"]["attention_factor"] == 1.25
    assert config["model_type"] == "olmo3" and config["sliding_window"] == 7


def test_layers_that_guess_further_tokens(tmp_path) -> None:
    more = {"blk.2.nextn.eh_proj.weight": np.ones((2, 3)), "blk.2.attn_norm.weight": np.ones(3)}
    keys = {"glm4moe__block_count": 3, "glm4moe__nextn_predict_layers": 1}
    folder = ModelFolder.open(rewritten(tmp_path, "glm4_moe", more, **keys))
    assert folder.config["num_hidden_layers"] == 2
    assert not any("layers.2." in name for name in folder.names())
    path = rewritten(tmp_path, "glm4_moe", {"blk.2.attn_norm.weight": np.ones(3)})
    assert "model.layers.2.input_layernorm.weight" in ModelFolder.open(path).names()


def test_halves_that_are_stored_in_two_ways(tmp_path) -> None:
    file = GGUFFile(rewritten(tmp_path, "granitemoeshared"))
    half = file.floats("blk.1.ffn_up_shexp.weight")[:-1].copy()
    path = rewritten(tmp_path, "granitemoeshared", {"blk.1.ffn_up_shexp.weight": half})
    whole = ModelFolder.open(path)  # the rows of one follow those of the other
    assert whole.shape("model.layers.1.shared_mlp.input_linear.weight") == (71, 72)
    narrow = {"blk.1.ffn_up_shexp.weight": half[:, :-1]}
    with pytest.raises(UnsupportedModelError, match="has no other half of the same type and width"):
        ModelFolder.open(rewritten(tmp_path, "granitemoeshared", narrow))


def test_scalars_of_each_layer(tmp_path) -> None:
    folder = ModelFolder.open(
        rewritten(tmp_path, "apertus", xielu__beta=0.25, xielu__alpha_p=[0.5, -1.5])
    )
    read = [folder[f"model.layers.{i}.mlp.act_fn.{n}"].read() for i in (0, 1)
            for n in ("alpha_p", "beta")]  # fmt: skip
    assert [a.tolist() for a in read] == [[0.5], 0.25, [-1.5], 0.25]
    assert not any("xielu" in name for name in folder.file.names())


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("apertus", {"xielu__eps": [0.1]}, "xielu.eps must be a number for each of the 2 layers"),
        ("apertus", {"xielu__eps": None}, "the key xielu.eps is missing"),
        ("lfm2", {"lfm2__attention__head_count_kv": [0, 0]}, "one number other than 0"),
        ("cohere2", {"cohere2__rope__freq_base_swa": 77.0}, "swa = 77.0 is not supported"),
        ("cohere2", {"cohere2__attention__sliding_window_pattern": -1}, "0 or more, got -1"),
        ("cohere2", {"cohere2__attention__sliding_window_pattern": [True]}, "has 1 values for 5"),
        ("stablelm", {"stablelm__use_parallel_residual": True}, "= True is not supported"),
    ],
)
def test_what_is_wrong(tmp_path, case, keys, message) -> None:
    path = rewritten(tmp_path, case, **keys)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        ModelFolder.open(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_queries_that_grow(tmp_path) -> None:
    place = folder_of(tmp_path, changed("ministral3"))
    _, file, _ = written(place)
    rotation = json.loads((place / "config.json").read_text())["rope_parameters"]
    read = file.config["rope_parameters"]
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings", "mscale_all_dim"):
        assert read[key] == pytest.approx(rotation[key], rel=1e-6)


def test_queries_that_grow_with_the_usual_factor_of_yarn(tmp_path) -> None:
    config = changed("ministral3")
    rotation = config["rope_parameters"]
    plain = {key: value for key, value in rotation.items() if "mscale" not in key}
    place = folder_of(tmp_path, config | {"rope_parameters": plain})
    _, file, _ = written(place)
    ropes = [
        find_family(c).read(c).config.layers[0].attention.rope
        for c in (file.config, config | {"rope_parameters": plain})
    ]  # fmt: skip
    assert ropes[0].factor == pytest.approx(ropes[1].factor, rel=1e-6) and ropes[0].factor > 1


GEMMA_4 = {
    "the combination of sizes in": {"gemma4__feed_forward_length": [100, 100, 100, 200, 200]},
    "differs between layers of full_attention": {
        "gemma4__attention__head_count_kv": [2, 2, 2, 1, 2]},
    "key_length_swa must be an integer": {"gemma4__attention__key_length_swa": 1.5},
    "value_length_swa = 8 is not supported": {"gemma4__attention__value_length_swa": 8},
    "must be a number for each of the 5 layers": {
        "gemma4__attention__head_count_kv": [2, 2]},
}  # fmt: skip


@pytest.mark.parametrize("message", GEMMA_4)
def test_layers_of_gemma_4_that_are_not_computed(tmp_path, message) -> None:
    path = rewritten(tmp_path, "gemma4_text", **GEMMA_4[message])
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        ModelFolder.open(path)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.7, 1.0])
def test_pairs_of_gemma_4_that_turn(tmp_path, share) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share,
            "factor": 1.5}  # fmt: skip
    config = changed("gemma4_text")
    config["rope_parameters"] = config["rope_parameters"] | {"full_attention": rope}
    config["per_layer_config"] = {i: {"head_dim": 44} for i in config["per_layer_config"]}
    _, file, _ = written(folder_of(tmp_path, config))
    ropes = [find_family(c).read(c).config.layers[-1].attention.rope for c in (config, file.config)]
    assert np.allclose(*(own.frequencies(9) for own in ropes), rtol=1e-6, atol=0)
    assert (ropes[0].frequencies(9) > 0).sum() == int(share * 44 // 2)


def test_divisors_that_gemma_4_has_not(tmp_path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 2, 14, dtype=np.float32)}
    with pytest.raises(CheckpointError, match="are not valid for Gemma 4"):
        ModelFolder.open(rewritten(tmp_path, "gemma4_text", factors))


def test_latent_attention_of_old_files(tmp_path) -> None:
    """Without the two halves of kv_b_proj, and with heads as long as they are once made."""
    place = folder_of(tmp_path, changed("deepseek_v3"))
    merged, file, made = written(place)
    stored = GGUFFile(place / "f32.gguf")
    known = {k: v for k, v in stored.metadata.items() if not k.endswith("_mla")}
    known |= {"deepseek2.attention.key_length": 22, "deepseek2.attention.value_length": 22}
    tensors = {t.name: stored.floats(t.name) for t in made.tensors}
    for i in range(2):
        name = f"model.layers.{i}.self_attn.kv_b_proj.weight"
        del tensors[f"blk.{i}.attn_k_b.weight"], tensors[f"blk.{i}.attn_v_b.weight"]
        tensors[f"blk.{i}.attn_kv_b.weight"] = merged.float32(name)
    architecture = known.pop("general.architecture")
    old = ModelFolder.open(write_gguf(place / "old.gguf", architecture, known, tensors))
    assert old.config == file.config and set(old.names()) == set(file.names())
    assert all(np.array_equal(old[name].read(), file[name].read()) for name in old.names())


LATENT = {
    "expert_group_count = 4 is not supported for experts that are scored by a softmax": (
        "deepseek_v2", {"deepseek2__expert_group_count": 4}),
    "expert_weights_norm = ": (
        "deepseek_v2", {"deepseek2__expert_weights_norm": True}),
    "'yarn' is not supported without a yarn_log_multiplier": (
        "glm4_moe_lite", {"deepseek2__rope__scaling__yarn_log_multiplier": None}),
    "attn_k_b.weight has shape .4, 28, 14. and attn_v_b .4, 18, 28., but": (
        "deepseek_v2", {"deepseek2__attention__value_length_mla": 14}),
    "the key deepseek2.attention.kv_lora_rank is missing": (
        "deepseek_v2", {"deepseek2__attention__kv_lora_rank": None}),
}  # fmt: skip


@pytest.mark.parametrize("message", LATENT)
def test_latent_attention_that_is_not_computed(tmp_path, message) -> None:
    case, keys = LATENT[message]
    path = rewritten(tmp_path, case, **keys)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        ModelFolder.open(path)


def test_files_of_glm_that_leave_the_scoring_out(tmp_path, monkeypatch) -> None:
    """By their layers and vocabulary, as llama.cpp knows them; others are DeepSeek V2's."""
    gone = ("gating_func", "weights_norm", "group_count", "group_used_count")
    keys = {f"deepseek2__expert_{name}": None for name in gone}
    path = rewritten(tmp_path, "glm4_moe_lite", **keys)
    assert read_config(GGUFFile(path))["model_type"] == "deepseek_v2"
    with pytest.raises(UnsupportedModelError, match=r"exp_probs_b.* for .* deepseek_v2"):
        ModelFolder.without_weights(path)  # which has no correction
    monkeypatch.setattr(mixers, "_GLM", ((2,), 331))
    assert ModelFolder.without_weights(path).config["model_type"] == "deepseek_v3"
