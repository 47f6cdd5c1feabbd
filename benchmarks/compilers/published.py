"""Models beside Llama, by their published sizes, and steps beside a plain one: other kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_wgpu.bench.workload import SHAPES, config_of, find_shape
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import exists
from qlora_wgpu.model.qlora_model import ComputeDtype
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.ops.policy import Policy
from qlora_wgpu.ops.preference import Preference


@dataclass(frozen=True)
class Step:
    """A model and how it is trained.

    Attributes:
        config: Its config.json.
        lora: Keys of the section ``lora``; of rank 8 if it is not among them.
        objective: What is minimized.
        noise: NEFTune's α.
        balance: Factor of the loss that balances experts.
        checkpointing: Whether layers are computed again in the backward.
        optimizer: The setting ``optim.name``.
        compute_dtype: Type of matmul operands.
    """

    config: dict[str, Any]
    lora: dict[str, Any] = field(default_factory=dict)
    objective: Objective = PLAIN
    noise: float = 0.0
    balance: float = 0.0
    checkpointing: bool = False
    optimizer: str = "adamw"
    compute_dtype: ComputeDtype = "bfloat16"


def _sizes(
    model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _preference(objective: Any, loss_type: str) -> Objective:
    return Objective(preference=Preference(objective, loss_type))


_TRAINED = {"trainable_token_indices": list(range(128_000, 128_016))}

STEPS: dict[str, Step] = {
    "llama-3.2-1b": Step(config_of("llama-3.2-1b")),
    "llama-3.1-8b": Step(config_of("llama-3.1-8b")),
    "llama-3.2-1b-dpo": Step(
        config_of("llama-3.2-1b"), _TRAINED, _preference("dpo", "sigmoid"), noise=5.0
    ),
    "llama-3.2-1b-orpo": Step(
        config_of("llama-3.2-1b"), {"use_dora": True, "lora_dropout": 0.1},
        _preference("orpo", "orpo"), checkpointing=True, optimizer="adamw_8bit",
    ),
    "llama-3.2-1b-kto": Step(
        config_of("llama-3.2-1b"), {"lora_dropout": 0.1}, _preference("kto", "kto")
    ),
    "llama-3.2-1b-grpo": Step(
        config_of("llama-3.2-1b"), objective=Objective(policy=Policy(sequence_level=True))
    ),
    "llama-3.2-1b-bent": Step(
        config_of("llama-3.2-1b"), objective=Objective(0.1, 1e-4, weighted=True, confidence=True)
    ),
    "llama-3.1-8b-head": Step(
        config_of("llama-3.1-8b"),
        {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]},
    ),
    "llama-3.1-8b-whole": Step(
        config_of("llama-3.1-8b"), {"modules_to_save": ["embed_tokens", "lm_head"]},
        optimizer="lion",
    ),
    "qwen3.5-4b": Step(
        _sizes(
            "qwen3_5_text", 2560, 9216, 32, 16, 4, 248_320, head_dim=256, attn_output_gate=True,
            full_attention_interval=2, rope_parameters={
                "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            },
        )
    ),
    "qwen3-next-80b-a3b": Step(
        _sizes(
            "qwen3_next", 2048, 5120, 48, 16, 2, 151_936, head_dim=256, full_attention_interval=2,
            num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, rope_theta=10_000_000,
            partial_rotary_factor=0.25, moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        {"lora_dropout": 0.1},
        balance=0.001,
    ),
    "lfm2-1.2b": Step(
        _sizes("lfm2", 2048, 12_288, 16, 32, 8, 65_536, full_attn_idxs=[1, 3, 5, 8, 10, 12, 14])
    ),
    "gpt-oss-20b": Step(
        _sizes("gpt_oss", 2880, 2880, 24, 64, 8, 201_088, head_dim=64, num_local_experts=32)
    ),
    "apertus-8b": Step(_sizes("apertus", 4096, 21_504, 32, 32, 8, 131_072)),
    "olmoe-1b-7b": Step(
        _sizes(
            "olmoe", 2048, 1024, 16, 16, 16, 50_304, num_experts=64, num_experts_per_tok=8,
            clip_qkv=8.0,
        )
    ),
    "gemma-2-2b": Step(_sizes("gemma2", 2304, 9216, 26, 8, 4, 256_000, head_dim=256)),
    "gemma-3n-e2b": Step(
        _sizes(
            "gemma3n_text", 2048, 8192, 30, 8, 2, 262_400, head_dim=256, num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
        )
    ),
    "phi-3-mini": Step(_sizes("phi3", 3072, 8192, 32, 32, 32, 32_064)),
    "deepseek-v2-lite": Step(
        _sizes(
            "deepseek_v2", 2048, 10_944, 27, 16, 16, 102_400, q_lora_rank=None,
            moe_intermediate_size=1408, num_experts_per_tok=6, first_k_dense_replace=1,
        )
    ),
    "moonlight-16b-a3b": Step(
        _sizes(
            "deepseek_v3", 2048, 11_264, 27, 16, 16, 163_840, q_lora_rank=None,
            moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_group=1,
            topk_group=1, n_shared_experts=2, first_k_dense_replace=1,
        )
    ),
    "starcoder2-3b": Step(_sizes("starcoder2", 3072, 12_288, 30, 24, 2, 49_152)),
    "falcon-h1-1.5b": Step(
        _sizes(
            "falcon_h1", 2048, 4096, 24, 8, 2, 65_537, head_dim=128, mamba_d_ssm=3072,
            mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256,
            mamba_rms_norm=True, mamba_norm_before_gate=False,
            ssm_multipliers=[0.5, 0.5, 0.3, 0.5, 0.7],
        )
    ),
    "stablelm-2-12b": Step(
        _sizes(
            "stablelm", 5120, 13_824, 40, 32, 8, 100_352, qk_layernorm=True,
            use_parallel_residual=True,
        )
    ),
}  # fmt: skip


def step_of(model: str) -> Step:
    """A step by its name, or a plain one of a shape's name, a config.json or a model's folder.

    Raises:
        ConfigError: If it is none of them.
        QLoRAError: If the file is no model's that is trained here.
    """
    if model in STEPS:
        return STEPS[model]
    if model.lower() in map(str.lower, SHAPES) or exists(Path(model)):
        return Step(dict(find_shape(model).config))
    raise ConfigError(
        f"there is no model {model!r}: give one of {', '.join({**STEPS, **SHAPES})}, all, or the "
        "path of a model folder or of a config.json"
    )
