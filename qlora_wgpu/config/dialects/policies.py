"""TRL's settings for GRPO and RLOO, also as Axolotl's ``trl`` section has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects.draft import Draft, KeyTable

_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
_MARKS = (
    "num_generations reward_funcs reward_weights num_iterations steps_per_generation "
    "generation_batch_size scale_rewards importance_sampling_level epsilon_high "
    "mask_truncated_completions normalize_advantages reward_clip_range use_vllm"
)
"""Keys that only TRL's trainers with sampled completions have."""
_RLOO = ("normalize_advantages", "reward_clip_range")
_SAME = (
    "num_generations num_generations_eval max_completion_length steps_per_generation "
    "num_iterations temperature top_p top_k min_p repetition_penalty beta epsilon epsilon_high "
    "delta loss_type importance_sampling_level scale_rewards multi_objective_aggregation "
    "mask_truncated_completions use_bias_correction_kl sapo_temperature_pos sapo_temperature_neg "
    "top_entropy_quantile "
    "normalize_advantages reward_clip_range reward_weights log_completions"
)
_OWN_ENGINE = "completions are sampled by the run itself, on the same GPU"
_FIXED_REFERENCE = "the reference model is the one at the start of the run"
_REASONS = {
    _OWN_ENGINE: (
        "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged cache_implementation "
        "ds3_gather_for_generation vllm_dtype vllm_device vllm_max_model_len"
    ),
    "constrained generation is not supported": (
        "vllm_structured_outputs_regex vllm_guided_decoding_regex"
    ),
    "generation has no other options": "generation_kwargs",
    "set chat_template_kwargs in the rows": "chat_template_kwargs",
    "entropy bonuses are not supported": (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta "
        "entropy_target"
    ),
    _FIXED_REFERENCE: "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "masks of off-policy completions are not supported": "off_policy_mask_threshold",
    "loss_type: vespo is not supported": (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    ),
    "completions are not packed": "packing sample_packing packing_strategy",
    "load balancing is not supported for GRPO": "router_aux_loss_coef moe_aux_loss_coef",
    "noise is not supported for GRPO": "neftune_noise_alpha noisy_embedding_alpha",
    "tools are not called": "max_tool_calling_iterations environment_factory",
    "prompts are shuffled by the seed": "shuffle_dataset",
    "prompts that are longer than data.max_seq_length are dropped": "max_prompt_length",
    "logits are computed in float32 in any case": "cast_lm_head_to_fp32",
    "completions are in samples.jsonl": (
        "log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo"
    ),
    "rows are padded to a few lengths": "pad_to_multiple_of",
    "set grpo.reward_funcs to {reward_model: PATH}, of a run with train.objective: reward": (
        "reward_model_name_or_path reward_model_path"
    ),
}
_INERT: Mapping[str, Any] = {"entropy_coef": 0.0, "use_vllm": False}
_THINK = r"^(?!.*<think>)(.*?)</think>.*$"
_FUNCTIONS = {
    "think_format_reward": {"regex": {"pattern": _THINK}},
    "accuracy_reward": {"math_verify": {"column": "solution"}},
}


def convert_policy(draft: Draft, default: str = "grpo") -> str | None:
    """The objective if a file is for GRPO or RLOO, whose keys it converts; else None."""
    keys = {key for key, value in draft.remaining.items() if value is not None}
    loss = draft.remaining.get("loss_type")
    if not keys & set(_MARKS.split()) and loss not in _LOSSES:
        return None
    objective = "rloo" if keys & set(_RLOO) else default
    draft.set("train.objective", objective, "keys of TRL's trainer")
    if loss is not None and loss not in _LOSSES:
        raise draft.refuse("loss_type", loss, "is a loss that is not supported "
                           f"(supported: {', '.join(_LOSSES)})")  # fmt: skip
    _convert_sizes(draft)
    for key, value in _INERT.items():
        if draft.remaining.get(key) == value:
            del draft.remaining[key]
    if isinstance(scale := draft.remaining.get("scale_rewards"), bool):
        draft.remaining["scale_rewards"] = "group" if scale else "none"
    table: KeyTable = {key: f"grpo.{key}" for key in _SAME.split()}
    _convert_functions(draft)
    draft.convert(table)
    for reason, names in _REASONS.items():
        for name in names.split():
            if draft.remaining.get(name) is not None:
                draft.drop_key(name, reason)
    for name in [n for n in draft.remaining if n.startswith("vllm_")]:
        draft.drop_key(name, _OWN_ENGINE)
    if draft.remaining.get("disable_dropout"):
        draft.remaining.pop("lora_dropout", None)
        draft.set("lora.lora_dropout", 0.0, "disable_dropout")
    draft.take("disable_dropout")
    if draft.remaining.get("learning_rate") is None:
        draft.set("optim.learning_rate", 1e-6, "TRL's default for GRPO and RLOO")
    return objective


def _convert_sizes(draft: Draft) -> None:
    """Converts ``generation_batch_size``, which counts completions instead of micro-batches."""
    size = draft.take("generation_batch_size")
    rows = draft.remaining.get("per_device_train_batch_size") or 8
    if size and not size % rows:
        draft.set("grpo.steps_per_generation", size // rows, f"generation_batch_size: {size}")
    elif size:
        draft.drop("generation_batch_size", size, "it is not a multiple of the batch size")


def _convert_functions(draft: Draft) -> None:
    given = draft.take("reward_funcs")
    names = given if isinstance(given, list) else [] if given is None else [given]
    made: list[Any] = []
    weights = draft.remaining.get("reward_weights")
    for name in names:
        if name in _FUNCTIONS:
            made.append(_FUNCTIONS[name])
            continue
        module, _, function = str(name).rpartition(".")
        if module and draft.is_file(f"{module.replace('.', '/')}.py"):
            made.append(f"{draft.resolve(module.replace('.', '/') + '.py')}:{function}")
            continue
        draft.drop("reward_funcs", name, "set grpo.reward_funcs to a built-in function, or to your "
                   "own as FILE.py:FUNCTION")  # fmt: skip
    if made:
        draft.set("grpo.reward_funcs", made, "reward_funcs")
    if weights is not None and len(made) != len(names):
        draft.drop_key("reward_weights", "not all of its reward functions were converted")
