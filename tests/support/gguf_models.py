"""Small random models with adapters, written as GGUF: what llama.cpp has of each family."""

from __future__ import annotations

import json

import numpy as np
from e2e.tiny import write_weights
from references.sized import family_configs, traced_configs

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora import AdapterConfig, save_adapter
from support.gguf_files import random_weights

MORE = traced_configs()
LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
}  # fmt: skip
MAMBA = {
    "num_hidden_layers": 3, "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_n_groups": 3,
    "mamba_d_state": 40, "mamba_d_conv": 3, "mamba_expand": 2,
}  # fmt: skip
NEMOTRON = {
    "use_bias": False, "mlp_bias": False, "use_conv_bias": True, "time_step_min": 0.001,
}  # fmt: skip
# What llama.cpp has of a family, where the recorded case has something else.
CHANGES = {
    "mistral": {}, "llama": {"attention_bias": True, "mlp_bias": True}, "mixtral": {},
    "granite": {}, "qwen3": {}, "gemma": {}, "olmo2": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None, "layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3_text": {"query_pre_attn_scalar": 20, "final_logit_softcapping": 7.0},
    "gpt_oss": {"swiglu_limit": 7.0, "tie_word_embeddings": True},
    "granitemoe": {},
    "granite_swa": {"layer_rope_theta": [10000.0, 10000.0, 0]},
    "olmoe": {"norm_topk_prob": False, "attention_bias": False, "num_key_value_heads": 6,
              "tie_word_embeddings": True},
    "qwen2_moe": {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1,
                  "use_sliding_window": False, "layer_types": None},
    "phi3": {}, "glm4": {},
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "ernie4_5": {"use_bias": False},
    "exaone4": {
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "head_dim": 12,
    },
    "hunyuan_v1_dense": {},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "stablelm": {"use_qkv_bias": True},
    "stablelm heads": {"qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": None}, "nemotron": {"head_dim": 12},
    "olmo": {"attention_bias": False, "head_dim": 12, "hidden_size": 72},
    "olmo plain": {"attention_bias": False, "head_dim": 12, "hidden_size": 72,
                   "clip_qkv": None, "tie_word_embeddings": True},
    "phi": {}, "gpt_neox": {"hidden_act": "gelu_new"},
    "gpt_neox serial": {"use_parallel_residual": False, "hidden_act": "gelu_new",
                        "tie_word_embeddings": True},
    "apertus": {"attention_bias": False, "tie_word_embeddings": True},
    "cohere": {"use_qk_norm": False, "attention_bias": False},
    "cohere2": {"num_hidden_layers": 5, "layer_types": None, "attention_bias": False},
    "olmo3": {"num_hidden_layers": 5, "layer_types": None, "attention_bias": False,
              "rope_parameters": {
                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                  "full_attention": {
                      "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                      "original_max_position_embeddings": 16}}},
    "granitemoeshared": {},
    "granitemoehybrid experts": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        "shared_intermediate_size": 36, "attention_bias": False},
    "hunyuan_v1_moe": {}, "ernie4_5_moe": {}, "lfm2_moe": {
        "conv_bias": False, "routed_scaling_factor": 1.0},
    "glm4_moe": {"routed_scaling_factor": 1.7},
    "solar_open": {},
    "exaone_moe": {"num_hidden_layers": 5, "layer_types": None, "n_group": 1, "topk_group": 1,
                   "mlp_layer_types": None, "tie_word_embeddings": True},
    "exaone4 windows": {"num_hidden_layers": 64, "layer_types": None, "head_dim": 12},
    "ministral3": {"sliding_window": None}, "lfm2": {"conv_bias": False},
    "qwen3_5_text": {"attention_bias": False, "rms_norm_eps": 1e-6, "linear_key_head_dim": 24},
    "qwen3_5_moe_text": {"linear_key_head_dim": 24},
    "qwen3_next": {"mlp_only_layers": [], "linear_key_head_dim": 24},
    "gemma4_text": {}, "gemma4_text dense": MORE["gemma4-dense"],
    "gemma4_text experts": MORE["gemma4-experts"],
    "gemma4_unified_text": {},
    "bamba": {"mamba_proj_bias": False, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "falcon_h1": {"mamba_norm_before_gate": False},
    "falcon_h1 gate": {"mamba_rms_norm": False, "mamba_d_ssm": 72, "mamba_n_heads": 3},
    "granitemoehybrid mamba": {
        **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope",
    },
    "granitemoehybrid mamba experts": {
        **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5,
        "num_experts_per_tok": 2, "intermediate_size": 44, "shared_intermediate_size": 36,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        **NEMOTRON, "mlp_bias": True,
    },
    "nemotron_h experts": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"], **NEMOTRON,
        "intermediate_size": 1},  # of no layer
    "nemotron_h latent": {
        "layers_block_type": ["full_attention", "moe", "linear_attention"], **NEMOTRON,
        "moe_latent_size": 32, "n_group": 1, "topk_group": 1, "intermediate_size": 1},
    "afmoe": {"num_hidden_layers": 5, "layer_types": None, "mup_enabled": True},
    "deepseek_v2": {"mlp_bias": False, "topk_method": "greedy"},
    "deepseek_v3": {"rope_interleave": True}, "glm4_moe_lite": {"attention_bias": False,
        "rope_parameters": LATENT_YARN},
}  # fmt: skip
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
CONFIGS = family_configs()
VOCABULARY = {"general.name": "tiny", "tokenizer.ggml.model": "none"}


def changed(case: str) -> dict:
    """The config.json of a case: the recorded one of its type, with what llama.cpp has."""
    return CONFIGS[case.split()[0]] | CHANGES[case]


def folder_of(place, config, *, adapter: bool = True):
    """A model's folder with an adapter for all its layers beside it."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    write_weights(place, random_weights(config))
    if adapter:
        adapter_of(place, config)
    return place


def adapter_of(
    place, config, leaves: tuple[str, ...] = (), scale: float = 1.0, whole: bool = False
):
    """An adapter beside a model; ``whole`` numbers are merged alike on all processors."""
    rng, tensors = np.random.default_rng(5), {}
    linears = find_family(config).read(config).every_linear
    linears = [spec for spec in linears if spec.adaptable]
    chosen = [s for s in linears if not leaves or s.name.rpartition(".")[2] in leaves]
    for spec in chosen:
        at = f"base_model.model.{spec.name}.lora_"
        tensors[f"{at}A.weight"] = scale * rng.standard_normal((3, spec.in_features), np.float32)
        tensors[f"{at}B.weight"] = scale * rng.standard_normal((spec.out_features, 3), np.float32)
    if whole:
        tensors = {name: np.round(array) for name, array in tensors.items()}
    targets = sorted({spec.name.rpartition(".")[2] for spec in chosen})
    save_adapter(place / "adapter", tensors, AdapterConfig(3, 6, 0.0, targets, False, "a/base"))


def written(place, name: str = "f32", **more):
    """A folder's model with its adapter, written and opened again, and the weights it is of."""
    merged = MergedWeights(more.pop("base", place), place / "adapter")
    made = gguf_model(merged, find_file_type(name), lambda size: VOCABULARY)
    path = place / f"{name}.gguf"
    made.write(path, lambda tensor: None)
    return merged, ModelFolder.open(path), made


def kept(model_type: str, name: str, array: np.ndarray) -> np.ndarray:
    """What float32 keeps of a tensor that the file has with something added, or its exponential."""
    with_one = model_type.startswith(("gemma", "nemotron", "qwen3_5", "qwen3_next"))
    with_one = with_one and not model_type.startswith(("gemma4", "nemotron_h"))
    if name.endswith("A_log"):
        return np.log(np.exp(array))
    if with_one and name.endswith("norm.weight") and "linear_attn" not in name:
        return (array + np.float32(1)) - np.float32(1)
    return array
