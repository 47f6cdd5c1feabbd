"""Whole models in GGUF: what llama.cpp has not is refused, or told."""

from __future__ import annotations

import pytest
from e2e.tiny import write_weights
from support.gguf_files import random_weights
from support.gguf_models import (
    CONFIGS,
    LATENT_YARN,
    NEMOTRON,
    ROPES,
    changed,
    folder_of,
    written,
)  # fmt: skip

from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.gguf.architectures import architecture_of

BAMBA = {"mamba_proj_bias": False, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
REFUSED = {
    "expert weights that": ("qwen3_moe", {}),
    "a swiglu_limit or": ("gpt_oss", {}),
    "attention without biases": ("gpt_oss", {"swiglu_limit": 7.0, "attention_bias": False}),
    "YaRN with a non-default mscale": ("gpt_oss", {
        "swiglu_limit": 7.0, "rope_parameters": ROPES["yarn"]}),
    "a score scale of": ("gemma2", {}),
    "layer 1 without RoPE": ("smollm3", {}),
    "layer 0 without RoPE": ("exaone4", {
        "head_dim": 12, "layer_types": ["full_attention", "sliding_attention"]}),
    "an untied head": ("gemma", {"tie_word_embeddings": False}),
    "the activation gelu": ("llama", {"hidden_act": "gelu"}),
    "the activation relu": ("llama", {"hidden_act": "relu"}),
    "heads of a total width of 120": ("qwen2", {"head_dim": 20}),
    "RoPE of type dynamic": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "YaRN with beta_fast": ("llama", {"rope_parameters": ROPES["yarn"] | {"beta_fast": 8.0}}),
    "RoPE of type llama3": ("qwen2", {
        "rope_parameters": ROPES["llama3"], "use_sliding_window": False}),
    "this order of layers": ("gemma2", {
        "query_pre_attn_scalar": 20, "layer_types": ["full_attention", "sliding_attention"]}),
    "a bias of model.layers.0.self_attn.o_proj": ("qwen3", {"attention_bias": True}),
    "a bias of model.layers.0.conv.in_proj": ("lfm2", {}),
    "groups of experts that are ranked by their best expert": ("deepseek_v2", {"mlp_bias": False}),
    "RoPE on halves of heads": ("deepseek_v3", {}),
    "27 layers with a q_lora_rank": ("glm4_moe_lite", {
        "attention_bias": False, "num_hidden_layers": 27, "mlp_layer_types": None}),
    "YaRN whose mscale and": ("glm4_moe_lite", {"attention_bias": False}),
    "YaRN with a non-default beta_fast, beta_slow": ("glm4_moe_lite", {
        "attention_bias": False, "rope_parameters": LATENT_YARN | {"beta_slow": 2.0}}),
    "RoPE of type linear": ("deepseek_v3", {
        "rope_interleave": True, "rope_parameters": ROPES["linear"]}),
    "a model without experts": ("glm4_moe", {"first_k_dense_replace": 9}),
    "this order of layers with and": ("exaone_moe", {
        "num_hidden_layers": 4, "layer_types": None, "n_group": 1, "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    "this order of layers with and without experts": ("ernie4_5_moe", {
        "num_hidden_layers": 3, "moe_layer_start_index": 0, "moe_layer_interval": 2}),
    "a routed_scaling_factor of 1.7": ("lfm2_moe", {"conv_bias": False}),
    "weights that do not sum to one": ("lfm2_moe", {"conv_bias": False, "norm_topk_prob": False}),
    "chosen without a correction bias": ("lfm2_moe", {
        "conv_bias": False, "routed_scaling_factor": 1.0, "use_expert_bias": False}),
    "numbers of experts per token that differ": ("hunyuan_v1_moe", {"moe_topk": [2, 3]}),
    "bounds of the time steps": ("bamba", {"mamba_proj_bias": False}),
    "a bias of model.layers.0.mamba.in_proj": ("bamba", {}),
    "a model without attention": ("bamba", {"mamba_proj_bias": False, "attn_layer_indices": []}),
    "a mamba_expand other than 2": ("bamba", {
        **BAMBA, "mamba_expand": 3, "mamba_n_heads": 9}),
    "a convolution without bias": ("bamba", {**BAMBA, "mamba_conv_bias": False}),
    "layers with experts next to layers with an MLP": ("nemotron_h", NEMOTRON),
    "these bounds of the time steps": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "full_attention"],
        "time_step_min": 0.5}),
    "a bias of model.layers.1.mixer.shared_experts.up_proj": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mlp_bias": True}),
    "a model without Mamba": ("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["full_attention", "moe"]}),
    "layers whose RoPE has different bases": ("granite_swa", {}),
    "full attention in every layer": ("granite_swa", {
        "layer_rope_theta": [10000.0] * 3, "layer_types": ["full_attention"] * 3}),
    "full attention in other layers than every fourth": ("afmoe", {}),
    "heads of a total width of 60": ("lfm2", {"conv_bias": False, "head_dim": 10}),
    "heads of a total width of 48": ("qwen2_moe", {
        "head_dim": 8, "norm_topk_prob": False, "use_sliding_window": False, "layer_types": None}),
    "attention in every layer": ("lfm2", {
        "conv_bias": False, "layer_types": ["full_attention"] * 2}),
    "a convolution of one token": ("lfm2", {"conv_bias": False, "conv_L_cache": 1}),
    "QK norms (qk_layernorm)": ("phi", {"qk_layernorm": True}),
    "layers without biases for gpt_neox": ("gpt_neox", {"attention_bias": False}),
    "layers without biases": ("starcoder2", {"use_bias": False}),
    "2 layers with QK norms": ("cohere", {"use_qk_norm": True, "attention_bias": False}),
    "the activation silu": ("apertus", {"attention_bias": False, "hidden_act": "silu"}),
    "scaled queries without YaRN": ("ministral3", {
        "sliding_window": None, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16}}),
    "a rms_norm_eps of 0.001 with delta nets": ("qwen3_5_text", {"attention_bias": False}),
    "a linear_key_head_dim of 16 that differs from": ("qwen3_next", {"mlp_only_layers": []}),
    "layers with experts next to layers without": ("qwen3_next", {"linear_key_head_dim": 24}),
    "a model without any delta net": ("qwen3_5_moe_text", {
        "linear_key_head_dim": 24, "layer_types": ["full_attention"] * 2}),
    "keys and values that are shared by layers": ("gemma4_text", {
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "per_layer_config": {"0": {"head_dim": 28}, "4": {"head_dim": 28}}}),
    "a model without a sliding window": ("gemma4_text", {
        "layer_types": ["full_attention"] * 5,
        "per_layer_config": {str(i): {"head_dim": 28} for i in range(5)}}),
    "a scaled rotation of layers with": ("gemma4_text", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {
            "rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}}}),
    "layers with a window whose rotation": ("olmo3", {
        "num_hidden_layers": 4, "layer_types": None, "attention_bias": False}),
}  # fmt: skip


@pytest.mark.quick(what=[each for each in REFUSED if not each.startswith("27 layers")])
@pytest.mark.parametrize("what", REFUSED)
def test_what_llama_cpp_does_not_compute(tmp_path, what) -> None:
    model_type, changes = REFUSED[what]
    place = folder_of(tmp_path, CONFIGS[model_type] | changes)
    with pytest.raises(UnsupportedModelError) as told:
        written(place)
    assert what in str(told.value) and "qlora-wgpu merge" in str(told.value)
    assert not (place / "f32.gguf").exists()


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "swish"), ("starcoder2", "gelu_new"), ("gemma2", "gelu_new")]
)
def test_another_name_of_the_same_activation_is_taken(tmp_path, model_type, name) -> None:
    key = "hidden_activation" if model_type == "gemma2" else "hidden_act"
    config = changed(model_type)
    written(folder_of(tmp_path, config | {key: name}))
    assert (tmp_path / "f32.gguf").exists()


def test_a_family_that_llama_cpp_has_not() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GGUF export .* 'phimoe' is not supported"):
        architecture_of("phimoe", "models", has_experts=True)


def test_roots_that_llama_cpp_adds_something_else_under(tmp_path) -> None:
    *_, made = written(folder_of(tmp_path, changed("glm4_moe_lite")))
    assert "uses rms_norm_eps, 1e-05, in the norms of the latent" in made.notes[0]
    *_, made = written(folder_of(tmp_path / "v3", changed("deepseek_v3")))
    assert made.notes == ()


def test_windows_that_llama_cpp_has_not(tmp_path) -> None:
    *_, made = written(folder_of(tmp_path, CONFIGS["mistral"]))
    assert "sequences of more than 7 tokens" in made.notes[0]


def test_numbers_that_are_too_large_for_a_type(tmp_path) -> None:
    config = CONFIGS["llama"]
    place = folder_of(tmp_path, config)
    arrays = random_weights(config)
    arrays["model.embed_tokens.weight"][3, 5] = 1e6
    write_weights(place, arrays)
    with pytest.raises(UnsupportedModelError, match="1e\\+06, which is out of range for f16"):
        written(place, "f16")
    assert written(place, "bf16")[1]["model.embed_tokens.weight"].read()[3, 5] > 9e5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q4_k_m", "llama-quantize model.gguf smaller.gguf Q4_K_M"),
        ("int8", "is not a type of GGUF"),
    ],
)
def test_types_that_are_not_written(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        find_file_type(name)


def test_a_disk_without_room(tmp_path, monkeypatch) -> None:
    place = folder_of(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    told = r"has 0[.]0 MB of free space, but the file needs [1-9][\d,]*[.]\d MB"
    with pytest.raises(CheckpointError, match=told):
        written(place)
    assert not (place / "f32.gguf").exists()


def test_an_activation_that_llama_cpp_nearly_computes(tmp_path) -> None:
    """Pythia's, which llama.cpp's own converter takes, too."""
    *_, made = written(folder_of(tmp_path, CONFIGS["gpt_neox"]))
    assert made.notes == ("llama.cpp approximates the activation gelu by gelu_pytorch_tanh",)
    *_, made = written(
        folder_of(tmp_path / "fast", CONFIGS["gpt_neox"] | {"hidden_act": "gelu_fast"})
    )
    assert made.notes == ()
