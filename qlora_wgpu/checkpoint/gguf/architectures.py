"""llama.cpp's architectures: what each is called in config.json, and the keys that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.checkpoint.gguf import gemma4, hybrids, mixtures
from qlora_wgpu.checkpoint.gguf import plain_architectures as plain
from qlora_wgpu.checkpoint.gguf.architecture import (
    MEAN,
    RMS,
    Arrange,
    GGUFArchitecture,
    More,
    read_rope,
)
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

_POST_NORMS = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_GLM_NAMES = (
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
    ("ffn_up", "mlp.gate_up_proj"),
)
_HUNYUAN_NAMES = (
    ("attn_q_norm", "self_attn.query_layernorm"),
    ("attn_k_norm", "self_attn.key_layernorm"),
)


def _shared(at: str) -> tuple[tuple[str, str], ...]:
    """What a shared expert is called."""
    return tuple((f"ffn_{leaf}_shexp", f"{at}.{leaf}_proj") for leaf in ("gate", "up", "down"))


_SHARED_EXPERTS = _shared("mlp.shared_experts")
_CORRECTION = "mlp.gate.e_score_correction_bias"
ERNIE_CORRECTION = "mlp.moe_statics.e_score_correction_bias"
XIELU = tuple((f"xielu.{n}", f"mlp.act_fn.{n}") for n in ("alpha_p", "alpha_n", "beta", "eps"))
_LFM2_NAMES = (
    ("attn_norm", "operator_norm"),
    ("ffn_norm", "ffn_norm"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("attn_output", "self_attn.out_proj"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_up", "feed_forward.w3"),
    ("ffn_down", "feed_forward.w2"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.out_proj", "conv.out_proj"),
)
_LFM2_OUTSIDE = (("token_embd_norm", "model.embedding_norm"),)


def _hybrid(model_type: str, causal_class: str, more: More, arrange: Arrange) -> GGUFArchitecture:
    """An architecture whose layers are delta nets for the most part."""
    return GGUFArchitecture(
        model_type,
        causal_class,
        more,
        norm_offset=1.0,
        names=(*_POST_NORMS[:1], *mixtures.SHARED_NAMES, *hybrids.NAMES),
        as_stored=("linear_attn.norm.weight",),
        arrange=arrange,
    )


_GEMMA_NAMES = (("ffn_norm", "pre_feedforward_layernorm"), *_POST_NORMS)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", "LlamaForCausalLM", plain.llama, pairs=True),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM", plain.qwen),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", plain.qwen3),
    "qwen3moe": GGUFArchitecture("qwen3_moe", "Qwen3MoeForCausalLM", plain.qwen3_moe),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", mixtures.qwen2_moe, names=mixtures.SHARED_NAMES
    ),
    "olmoe": GGUFArchitecture("olmoe", "OlmoeForCausalLM", mixtures.olmoe),
    "granitemoe": GGUFArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        mixtures.granite_moe,
        pairs=True,
        names=(
            ("ffn_gate_shexp", "shared_mlp.gate"),
            ("ffn_up_shexp", "shared_mlp.up"),
            ("ffn_down_shexp", "shared_mlp.output_linear"),
        ),
        joined=(("shared_mlp.input_linear", "shared_mlp.gate", "shared_mlp.up"),),
    ),
    "hunyuan-moe": GGUFArchitecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        mixtures.hunyuan_moe,
        names=(*_HUNYUAN_NAMES, *_shared("mlp.shared_mlp")),
    ),
    "ernie4_5-moe": GGUFArchitecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        mixtures.ernie4_5_moe,
        names=(*_SHARED_EXPERTS, ("exp_probs_b", ERNIE_CORRECTION)),
    ),
    "lfm2moe": GGUFArchitecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        mixtures.lfm2_moe,
        names=(*_LFM2_NAMES, ("exp_probs_b", "feed_forward.expert_bias")),
        outside=_LFM2_OUTSIDE,
        epsilon=(RMS[0], "norm_eps"),
        some_attend=True,
    ),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        mixtures.glm4_moe,
        names=(
            *_POST_NORMS[:1],
            *_SHARED_EXPERTS,
            ("exp_probs_b", _CORRECTION),
        ),
    ),
    "deepseek2": GGUFArchitecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        mixtures.latent,
        names=(*mixtures.NAMES, *_SHARED_EXPERTS, ("exp_probs_b", _CORRECTION)),
        own_sizes=True,
        arrange=mixtures.joined,
    ),
    "exaone-moe": GGUFArchitecture(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        mixtures.exaone_moe,
        names=(*_SHARED_EXPERTS, ("exp_probs_b", "mlp.e_score_correction_bias")),
    ),
    "qwen3next": _hybrid("qwen3_next", "Qwen3NextForCausalLM", hybrids.qwen3_next, hybrids.grouped),
    "qwen35": _hybrid("qwen3_5_text", "Qwen3_5ForCausalLM", hybrids.qwen3_5, hybrids.tiled),
    "qwen35moe": _hybrid(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", hybrids.qwen3_5_moe, hybrids.tiled
    ),
    "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", plain.gemma, norm_offset=1.0),
    "gemma2": GGUFArchitecture(
        "gemma2",
        "Gemma2ForCausalLM",
        plain.gemma2,
        norm_offset=1.0,
        names=_GEMMA_NAMES,
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        plain.gemma3,
        norm_offset=1.0,
        names=_GEMMA_NAMES,
    ),
    "gemma4": GGUFArchitecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        gemma4.gemma4,
        names=(*_POST_NORMS, *gemma4.NAMES),
        outside=gemma4.OUTSIDE,
        own_sizes=True,
    ),
    "phi3": GGUFArchitecture(
        "phi3", "Phi3ForCausalLM", plain.phi3, names=(("ffn_up", "mlp.gate_up_proj"),)
    ),
    "granite": GGUFArchitecture("granite", "GraniteForCausalLM", plain.granite, pairs=True),
    "olmo": GGUFArchitecture(
        "olmo",
        "OlmoForCausalLM",
        plain.olmo,
        pairs=True,
        epsilon=(MEAN, "layer_norm_eps"),
    ),
    "olmo2": GGUFArchitecture("olmo2", "Olmo2ForCausalLM", plain.olmo2, names=_POST_NORMS),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        plain.gpt_oss,
        names=(
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_sinks", "self_attn.sinks"),
            ("ffn_gate_inp", "mlp.router"),
        ),
    ),
    "stablelm": GGUFArchitecture(
        "stablelm",
        "StableLmForCausalLM",
        plain.stablelm,
        names=(
            ("attn_q_norm", "self_attn.q_layernorm.norms.*"),
            ("attn_k_norm", "self_attn.k_layernorm.norms.*"),
        ),
        epsilon=(MEAN, "layer_norm_eps"),
    ),
    "starcoder2": GGUFArchitecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        plain.starcoder2,
        names=(("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")),
        epsilon=(MEAN, "norm_epsilon"),
    ),
    "nemotron": GGUFArchitecture(
        "nemotron",
        "NemotronForCausalLM",
        plain.nemotron,
        norm_offset=1.0,
        epsilon=(MEAN, "norm_eps"),
    ),
    "command-r": GGUFArchitecture(
        "cohere", "CohereForCausalLM", plain.cohere, epsilon=(MEAN, "layer_norm_eps")
    ),
    "cohere2": GGUFArchitecture(
        "cohere2",
        "Cohere2ForCausalLM",
        plain.cohere2,
        epsilon=(MEAN, "layer_norm_eps"),
    ),
    "phi2": GGUFArchitecture(
        "phi",
        "PhiForCausalLM",
        plain.phi2,
        names=(
            ("attn_output", "self_attn.dense"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
        ),
        outside=(("output_norm", "model.final_layernorm"),),
        epsilon=(MEAN, "layer_norm_eps"),
    ),
    "gptneox": GGUFArchitecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        plain.gpt_neox,
        names=plain.NAMES,
        outside=plain.OUTSIDE,
        epsilon=(MEAN, "layer_norm_eps"),
        layers="gpt_neox.layers",
        arrange=plain.by_head,
    ),
    "mistral3": GGUFArchitecture("ministral3", "Ministral3ForCausalLM", plain.mistral3, pairs=True),
    "apertus": GGUFArchitecture(
        "apertus",
        "ApertusForCausalLM",
        plain.apertus,
        names=(("attn_norm", "attention_layernorm"), ("ffn_norm", "feedforward_layernorm")),
        scalars=XIELU,
    ),
    "lfm2": GGUFArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        plain.lfm2,
        names=_LFM2_NAMES,
        outside=_LFM2_OUTSIDE,
        epsilon=(RMS[0], "norm_eps"),
        some_attend=True,
    ),
    "smollm3": GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", plain.smollm3, pairs=True),
    "arcee": GGUFArchitecture("arcee", "ArceeForCausalLM", plain.arcee, pairs=True),
    "ernie4_5": GGUFArchitecture("ernie4_5", "Ernie4_5ForCausalLM", plain.ernie4_5),
    "exaone4": GGUFArchitecture("exaone4", "Exaone4ForCausalLM", plain.exaone4, names=_POST_NORMS),
    "glm4": GGUFArchitecture("glm4", "Glm4ForCausalLM", plain.glm4, names=_GLM_NAMES),
    "hunyuan-dense": GGUFArchitecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        plain.hunyuan,
        names=_HUNYUAN_NAMES,
    ),
    "seed_oss": GGUFArchitecture(
        "seed_oss", "SeedOssForCausalLM", plain.seed_oss, names=_POST_NORMS[:1]
    ),
}
"""By the names that files have for them."""


Config = dict[str, Any]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def read_config(file: GGUFFile) -> Config:
    """What the model's config.json says."""
    keys = Keys(file.metadata, file.path)
    architecture = find_architecture(keys)
    config = _common(keys, file, architecture)
    config |= architecture.more(keys, file, config)
    config = {"model_type": architecture.model_type, **config}
    config.setdefault("architectures", [architecture.causal_class])
    keys.refuse_the_rest()
    return config


def find_architecture(keys: Keys) -> GGUFArchitecture:
    """The architecture that a file names."""
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{keys.where} has the architecture {keys.architecture[:80]!r}, of which GGUF files "
            f"are not read (read: {', '.join(sorted(ARCHITECTURES))}): take the model's "
            "safetensors version"
        )
    return ARCHITECTURES[keys.architecture]


def _common(keys: Keys, file: GGUFFile, architecture: GGUFArchitecture) -> Config:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not 0 < heads <= hidden:
        raise CheckpointError(
            f"{file.path}: {keys.architecture}.attention.head_count is {heads}, but "
            f"embedding_length is {hidden}"
        )
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if not architecture.own_sizes:
        keys.refuse("attention.value_length", head_dim)
    keys.refuse("attention.causal", True)
    keys.ignore("vocab_size")  # the embedding tells
    config = {
        "vocab_size": file.tensor(EMBEDDING).place.shape[0],
        "hidden_size": hidden,
        "intermediate_size": 0 if architecture.own_sizes else keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(keys, heads, architecture),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        architecture.epsilon[1]: keys.number(architecture.epsilon[0]),
        "tie_word_embeddings": HEAD not in file,
        **_token_ids(file),
    }
    return config | read_rope(keys, file, head_dim)


def _key_heads(keys: Keys, heads: int, architecture: GGUFArchitecture) -> int:
    """Heads of keys, of the layers that attend."""
    if architecture.own_sizes:
        return 0
    if not architecture.some_attend:
        count: int = keys.integer("attention.head_count_kv", heads)
        return count
    counts = set(keys.each("attention.head_count_kv", keys.integer("block_count"))) - {0}
    if len(counts) != 1:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv must have one number "
            f"beside 0, got {sorted(counts)}"
        )
    return int(counts.pop())


def _token_ids(file: GGUFFile) -> Config:
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ids.items() if type(value) is int}
