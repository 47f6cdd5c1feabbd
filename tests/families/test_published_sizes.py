"""Published models by their config.json: as many parameters as their makers say."""

import pytest

from qlora_wgpu.bench.workload import RandomFolder

KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "head_dim",
)  # fmt: skip


def sizes(model_type, values, **keys):
    return {"model_type": model_type, **dict(zip(KEYS, values, strict=False)), **keys}


def gemma4(values, local, **keys):
    """As files of Gemma 4 say it: so many layers that slide before one that sees everything."""
    kinds = [*["sliding_attention"] * local, "full_attention"]
    text = sizes("gemma4_text", (*values, 262144, 256), **keys)
    text["layer_types"] = kinds * (values[2] // len(kinds))
    return {"model_type": "gemma4", "text_config": text}


def gemma3n(layers, inner, shared):
    """As files of Gemma 3n say it."""
    kinds = [*["sliding_attention"] * 4, "full_attention"] * (layers // 5)
    text = sizes(
        "gemma3n_text", (2048, [inner] * layers, layers, 8, 2, 262400, 256), layer_types=kinds,
        num_kv_shared_layers=shared, altup_lr_multiplier=1.0, query_pre_attn_scalar=256,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * (layers - 10), rope_scaling=None,
    )  # fmt: skip
    return {"model_type": "gemma3n", "text_config": text}


def granite_h(values, attention, **keys):
    """As transformers 5 writes files of Granite 4's hybrids: these layers have attention."""
    types = ["attention" if i in attention else "mamba" for i in range(values[2])]
    return sizes(
        "granitemoehybrid", (*values, 100352),
        **{
            "layer_types": types, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
            "mamba_d_conv": 4, "mamba_chunk_size": 256, "num_local_experts": 0,
            "num_experts_per_tok": 0, "position_embedding_type": "nope", "init_method": "mup",
            "time_step_limit": [0.0, {"__float__": "Infinity"}], "rope_scaling": None,
            "normalization_function": "rmsnorm", "tie_word_embeddings": True, **keys,
        },
    )  # fmt: skip


def lfm2(values, attention, **keys):
    """As files of LFM2 and LFM2.5 say it, with keys of the trainer that transformers ignores."""
    hidden_size, size, layers = values[:3]
    return sizes(
        "lfm2", (*values, 65536), block_dim=hidden_size, conv_dim=hidden_size, block_ff_dim=size,
        block_ffn_dim_multiplier=1.0, block_multiple_of=256, block_use_swiglu=True,
        conv_use_xavier_init=True, num_heads=values[3], use_pos_enc=True,
        layer_types=["full_attention" if i in attention else "conv" for i in range(layers)],
        **keys,
    )  # fmt: skip


LOCAL = ["sliding_attention"] * 3 + ["full_attention"]
NTK = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32}
QWEN_ROPE = {
    "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10], "mrope_interleaved": True,
}  # fmt: skip
MIXED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def qwen3_5(model_type, values, tied, **keys):
    """As published: the text part of a model with images."""
    text = sizes(f"{model_type}_text", values, full_attention_interval=4, attn_output_gate=True)
    more = {"rope_parameters": QWEN_ROPE, "mtp_num_hidden_layers": 1, "tie_word_embeddings": tied}
    return {
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "text_config": {**text, **more, **keys},
    }


MODELS = {
    "Granite 3.1 1B A400M": (
        sizes(
            "granitemoe", (1024, 512, 24, 16, 8, 49155), num_local_experts=32,
            num_experts_per_tok=8, tie_word_embeddings=True,
        ),
        "1.33",
    ),
    "Granite 3.1 3B A800M": (
        sizes(
            "granitemoe", (1536, 512, 32, 24, 8, 49155), num_local_experts=40,
            num_experts_per_tok=8, tie_word_embeddings=True,
        ),
        "3.3",
    ),
    "Hunyuan A13B": (
        sizes(
            "hunyuan_v1_moe", (4096, 3072, 32, 32, 8, 128167, 128), num_experts=64,
            moe_topk=[8] * 32, rope_scaling=NTK, tie_word_embeddings=True,
        ),
        "80.4",
    ),
    "EXAONE 4.0 32B": (
        sizes(
            "exaone4", (5120, 27392, 64, 40, 8, 102400, 128), sliding_window_pattern="LLLG",
            layer_types=LOCAL * 16,
        ),
        "32.0",
    ),
    "EXAONE 4.0 1.2B": (
        sizes(
            "exaone4", (2048, 4096, 30, 32, 8, 102400, 64), sliding_window=None,
            layer_types=["full_attention"] * 30, tie_word_embeddings=True,
        ),
        "1.28",
    ),
    "Command R7B": (sizes("cohere2", (4096, 14336, 32, 32, 8, 256000)), "8.03"),
    "ERNIE 4.5 0.3B": (sizes("ernie4_5", (1024, 3072, 18, 16, 2, 103424, 128)), "0.36"),
    "Seed-OSS 36B": (sizes("seed_oss", (5120, 27648, 64, 80, 8, 155136, 128)), "36.15"),
    "Hunyuan 7B": (
        sizes(
            "hunyuan_v1_dense", (4096, 14336, 32, 32, 8, 128167, 128), rope_scaling=NTK,
            tie_word_embeddings=True,
        ),
        "7.5",
    ),
    "Ministral 3 3B, text": (
        {
            "model_type": "mistral3",
            "text_config": sizes(
                "ministral3", (3072, 9216, 26, 32, 8, 131072, 128), tie_word_embeddings=True
            ),
        },
        "3.4",
    ),
    "Ministral 3 8B, text": (
        {
            "model_type": "mistral3",
            "text_config": sizes("ministral3", (4096, 14336, 34, 32, 8, 131072, 128)),
        },
        "8.5",
    ),
    "Ministral 3 14B, text": (
        {
            "model_type": "mistral3",
            "text_config": sizes("ministral3", (5120, 16384, 40, 32, 8, 131072, 128)),
        },
        "13.5",
    ),
    "Granite 4.0 Micro": (
        sizes(
            "granitemoehybrid", (2560, 8192, 40, 40, 8, 100352), shared_intermediate_size=8192,
            num_local_experts=0, layer_types=["attention"] * 40, tie_word_embeddings=True,
            position_embedding_type="rope",
        ),
        "3.4",
    ),
    "Granite 4.0 H 350M": (
        granite_h(
            (768, 2048, 32, 12, 4), (10, 13, 17, 27), mamba_n_heads=48, mamba_d_head=32,
            shared_intermediate_size=2048,
        ),
        "0.34",
    ),
    "Granite 4.0 H 1B": (
        granite_h(
            (1536, 4096, 40, 12, 4), (5, 15, 25, 35), mamba_n_heads=48,
            shared_intermediate_size=4096,
        ),
        "1.5",
    ),
    "Granite 4.0 H Micro": (
        granite_h(
            (2048, 8192, 40, 32, 8), (5, 15, 25, 35), mamba_n_heads=64,
            shared_intermediate_size=8192,
        ),
        "3",
    ),
    "Granite 4.0 H Small": (
        granite_h(
            (4096, 768, 40, 32, 8), (5, 15, 25, 35), mamba_n_heads=128, num_local_experts=72,
            num_experts_per_tok=10, shared_intermediate_size=1536,
        ),
        "32",
    ),
    "Granite 4.1 8B": (
        sizes("granite", (4096, 12800, 40, 32, 8, 100352), tie_word_embeddings=True), "8",
    ),
    "Granite 4.1 30B": (
        sizes("granite", (4096, 32768, 64, 32, 8, 100352), tie_word_embeddings=True), "29",
    ),
    "Bamba 9B": (
        sizes(
            "bamba", (4096, 14336, 32, 32, 8, 128256), attn_layer_indices=[9, 18, 27],
            mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
        ),
        "9.78",
    ),
    "Falcon-H1 0.5B": (
        sizes(
            "falcon_h1", (1024, 2048, 36, 8, 2, 32784, 64), mamba_d_ssm=1536, mamba_n_heads=24,
            mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_rms_norm=False,
        ),
        "0.52",
    ),
    "Muse Glimmer 30B, text": ({"model_type": "muse_glimmer", "text_config": {}}, "27.9"),
    "Arcee AFM 4.5B": (sizes("arcee", (2560, 18432, 36, 20, 4, 128005, 128)), "4.6"),
    "Minitron 4B": (sizes("nemotron", (3072, 9216, 32, 24, 8, 256000, 128)), "4.19"),
    # Of these the text part is counted from config.json: makers tell of images and further tokens.
    "Qwen 3.5 0.8B": (
        qwen3_5(
            "qwen3_5", (1024, 3584, 24, 8, 2, 248320, 256), True, linear_num_value_heads=16
        ),
        "0.75",
    ),
    "Qwen 3.5 4B": (qwen3_5("qwen3_5", (2560, 9216, 32, 16, 4, 248320, 256), True), "4.2"),
    "Qwen 3.5 9B": (qwen3_5("qwen3_5", (4096, 12288, 32, 16, 4, 248320, 256), False), "9"),
    "Qwen 3.5 27B": (
        qwen3_5(
            "qwen3_5", (5120, 17408, 64, 24, 4, 248320, 256), False, linear_num_value_heads=48,
            output_gate_type="swish",
        ),
        "27",
    ),
    "Qwen 3.5 35B-A3B": (
        qwen3_5(
            "qwen3_5_moe", (2048, 512, 40, 16, 2, 248320, 256), False, num_experts=256,
            num_experts_per_tok=8, **MIXED,
        ),
        "35",
    ),
    "Qwen 3.6 35B-A3B": (
        qwen3_5(
            "qwen3_5_moe", (2048, 512, 40, 16, 2, 248320, 256), False, num_experts=256,
            num_experts_per_tok=8, mlp_only_layers=[], mamba_ssm_dtype="float32",
            output_gate_type="swish", **MIXED,
        ),
        "35",
    ),
    "Qwen3-Next 80B-A3B": (
        sizes(
            "qwen3_next", (2048, 5120, 48, 16, 2, 151936, 256), full_attention_interval=4,
            num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, rope_theta=10_000_000,
            partial_rotary_factor=0.25, **MIXED,
        ),
        "79.674391296",
    ),
    "Apertus 8B": (sizes("apertus", (4096, 21504, 32, 32, 8, 131072)), "8.05"),
    "LFM2 1.2B": (
        sizes(
            "lfm2", (2048, 12288, 16, 32, 8, 65536), full_attn_idxs=[2, 5, 8, 10, 12, 14],
        ),
        "1.17",
    ),
    "LFM2 350M": (lfm2((1024, 6656, 16, 16, 8), (2, 5, 8, 10, 12, 14)), "0.354"),
    "LFM2 700M": (lfm2((1536, 10240, 16, 24, 8), (2, 5, 8, 10, 12, 14)), "0.742"),
    "LFM2.5 1.2B": (
        lfm2((2048, 12288, 16, 32, 8), (2, 5, 8, 10, 12, 14), tie_embedding=True), "1.17",
    ),
    "LFM2.5 2.6B": (
        lfm2(
            (2048, 10752, 30, 32, 8), (2, 5, 9, 13, 17, 21, 24, 27),
            block_auto_adjust_ff_dim=False, tie_embedding=True,
        ),
        "2.57",
    ),
    "StableLM 2 12B": (
        sizes(
            "stablelm", (5120, 13824, 40, 32, 8, 100352), qk_layernorm=True,
            use_parallel_residual=True,
        ),
        "12.14",
    ),
    "gpt-oss-20b": (
        sizes("gpt_oss", (2880, 2880, 24, 64, 8, 201088, 64), num_local_experts=32), "20.91",
    ),
    "gpt-oss-120b": (
        sizes("gpt_oss", (2880, 2880, 36, 64, 8, 201088, 64), num_local_experts=128), "116.83",
    ),
    "Qwen 1.5 MoE A2.7B": (
        sizes(
            "qwen2_moe", (2048, 5632, 24, 16, 16, 151936), num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        ),
        "14.3",
    ),
    # Published: 5.44 and 7.85 with encoders of images and sound, which are 0.98, and with keys and
    # values of 10 and 15 layers that use those of others, which are 0.02 and 0.03.
    "Gemma 3n E2B, text": (gemma3n(30, 8192, 10), "4.44"),
    "Gemma 3n E4B, text": (gemma3n(35, 16384, 15), "6.84"),
    # Published: 5.1 and 8.0 with encoders of images and sound, which are 0.45; 2.3 and 4.5 without
    # embeddings of each layer.
    "Gemma 4 E2B, text": (
        gemma4((1536, 6144, 35, 8, 1), 4, num_kv_shared_layers=20, use_double_wide_mlp=True),
        "4.63",
    ),
    "Gemma 4 E4B, text": (gemma4((2560, 10240, 42, 8, 2), 5, num_kv_shared_layers=18), "7.46"),
    "Gemma 4 26B-A4B, text": (
        gemma4(
            (2816, 2112, 30, 16, 8), 5, attention_k_eq_v=True, num_global_key_value_heads=2,
            hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=128,
            moe_intermediate_size=704, top_k_experts=8,
        ),
        "25.2",
    ),
    "Gemma 4 31B, text": (
        gemma4(
            (5376, 21504, 60, 32, 16), 5, attention_k_eq_v=True, num_global_key_value_heads=4,
            hidden_size_per_layer_input=0,
        ),
        "30.7",
    ),
    "Gemma 4 12B, text": (  # published: 11.95 with what reads images and sound
        {
            "model_type": "gemma4_unified",
            "text_config": sizes(
                "gemma4_unified_text", (3840, 15360, 48, 16, 8, 262144, 256),
                attention_k_eq_v=True, num_global_key_value_heads=1, global_head_dim=512,
                sliding_window=1024, use_bidirectional_attention="vision",
                layer_types=[*["sliding_attention"] * 5, "full_attention"] * 8,
            ),
        },
        "11.9",
    ),
    "Pythia 1.4B": (sizes("gpt_neox", (2048, 8192, 24, 16, 16, 50304)), "1.415"),
    "GPT-NeoX-20B": (sizes("gpt_neox", (6144, 24576, 44, 64, 64, 50432)), "20.55"),
    "OLMo 1B": (
        sizes("olmo", (2048, 8192, 16, 16, 16, 50304), tie_word_embeddings=True), "1.177",
    ),
    "OLMo 7B": (sizes("olmo", (4096, 11008, 32, 32, 32, 50304)), "6.89"),
    "OLMoE 1B-7B": (sizes("olmoe", (2048, 1024, 16, 16, 16, 50304)), "6.92"),
    "ERNIE 4.5 21B-A3B": (sizes("ernie4_5_moe", (2560, 12288, 28, 20, 4, 103424, 128)), "21.8"),
    "LFM2 8B-A1B": (
        sizes(
            "lfm2_moe", (2048, 7168, 24, 32, 8, 65536),
            layer_types=[
                "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
            ],
        ),
        "8.3",
    ),
    "GLM-4.5-Air": (
        sizes(
            "glm4_moe", (4096, 10944, 46, 96, 8, 151552, 128), attention_bias=True,
        ),
        "106.9",
    ),
    "DeepSeek-V2-Lite": (
        sizes(
            "deepseek_v2", (2048, 10944, 27, 16, 16, 102400), q_lora_rank=None,
            moe_intermediate_size=1408, num_experts_per_tok=6, first_k_dense_replace=1,
        ),
        "15.7",
    ),
    "Moonlight-16B-A3B": (
        sizes(
            "deepseek_v3", (2048, 11264, 27, 16, 16, 163840), q_lora_rank=None,
            moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_group=1,
            topk_group=1, n_shared_experts=2, first_k_dense_replace=1,
        ),
        "16.0",
    ),
    "LLaVA 1.5 7B, language model": (  # whose file leaves out what Llama has by default
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
        },
        "6.74",
    ),
    "Qwen2.5-VL 7B, language model": (  # all in one section
        sizes(
            "qwen2_5_vl", (3584, 18944, 28, 28, 4, 152064), tie_word_embeddings=False,
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vision_config={},
        ),
        "7.6",
    ),
    "Ministral 8B": (sizes("ministral", (4096, 12288, 36, 32, 8, 131072, 128)), "8.02"),
    "nanochat d32": (sizes("nanochat", (2048, 8192, 32, 16, 16, 65536)), "1.88"),
    "Youtu-LLM 2B": (sizes("youtu", (2048, 6144, 32, 16, 16, 128256)), "1.96"),
    "Solar Open 100B": (sizes("solar_open", (4096, 10240, 48, 64, 8, 196608, 128)), "103"),
    "Trinity Mini": (
        sizes(
            "afmoe", (2048, 6144, 32, 32, 4, 200192, 128), moe_intermediate_size=1024,
            num_experts=128, num_experts_per_tok=8, num_shared_experts=1, num_dense_layers=2,
            mup_enabled=True, route_scale=2.826,
        ),
        "26.1",
    ),
    "OLMo Hybrid 7B": (
        sizes("olmo_hybrid", (3840, 11008, 32, 30, 30, 100352), rope_parameters={
            "rope_theta": None, "rope_type": "default",
        }),
        "7",
    ),
    "Qwen 3.6 27B": (
        qwen3_5(
            "qwen3_5", (5120, 17408, 64, 24, 4, 248320, 256), False, linear_num_value_heads=48,
            mlp_only_layers=[], mamba_ssm_dtype="float32", output_gate_type="swish",
            mtp_use_dedicated_embeddings=False,
        ),
        "26.9",
    ),
    "Nemotron 3 Nano 30B-A3B": (
        sizes(
            "nemotron_h", (2688, 1856, 52, 32, 2, 131072, 128), mamba_num_heads=64,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            n_routed_experts=128, num_experts_per_tok=6, routed_scaling_factor=2.5,
            hybrid_override_pattern=f"{'MEMEM*E' * 5}MEMEMEM*EMEMEMEME",
        ),
        "31.6",
    ),
    "Nemotron-H 8B": (
        sizes(
            "nemotron_h", (4096, 21504, 52, 32, 8, 131072, 128), mamba_num_heads=128,
            hybrid_override_pattern=f"M-M-M-M*{'-M-M-M-M-M*' * 3}{'-M' * 5}-",
        ),
        "8.1",
    ),
    "GLM-4.7-Flash": (sizes("glm4_moe_lite", (2048, 10240, 47, 20, 20, 154880)), "29.9"),
    "Phi-1.5": (sizes("phi", (2048, 8192, 24, 32, 32, 51200)), "1.418"),
    "Phi-2": (sizes("phi", (2560, 10240, 32, 32, 32, 51200), partial_rotary_factor=0.4), "2.78"),
    "Phi-4": (sizes("phi3", (5120, 17920, 40, 40, 10, 100352)), "14.66"),
    "Phi-4-mini": (
        sizes(
            "phi3", (3072, 8192, 32, 24, 8, 200064), tie_word_embeddings=True,
            partial_rotary_factor=0.75,
        ),
        "3.84",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    config, billions = MODELS[name]
    digits = len(billions.partition(".")[2])
    assert f"{RandomFolder(config).num_parameters / 1e9:.{digits}f}" == billions
