"""A configuration in the making from another trainer's file, and why keys have no place in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.presence import exists

# ---- why keys have no place here -----------------------------------------------------------------

_ATTENTION = "attention is always computed in tiles"
_ONE_GPU = "a run takes one GPU"
_KERNELS = "the kernels are this program's own, and always on"
_TOKENIZER = "the tokenizer's own files decide"
_HUB = "`hf upload` brings a run's adapter to the hub"
_FROZEN = (
    "norms and biases stay frozen: LoRA pairs train, rows of the embedding with "
    "lora.trainable_token_indices, and it and the head as a whole with lora.modules_to_save"
)
_NEW_TOKENS = "model.add_tokens and model.add_special_tokens add tokens, and train their rows"
_SUPERVISED = "it belongs to preferences, which this run does not learn from"
_WANDB = "Weights & Biases takes these from the environment, such as WANDB_PROJECT"

NOT_NEEDED = {
    _ATTENTION: (
        "flash_attention xformers_attention sdp_attention eager_attention flash_attn "
        "attn_implementation use_flash_attention_2 s2_attention flash_attn_cross_entropy "
        "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv flex_attention "
        "sage_attention"
    ),
    _KERNELS: (
        "liger_rope liger_rms_norm liger_glu_activation liger_swiglu liger_layer_norm "
        "liger_fused_linear_cross_entropy liger_cross_entropy enable_liger_kernel "
        "use_liger_kernel use_liger use_unsloth unsloth plugins torch_compile "
        "torch_compile_backend torch_compile_mode lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel kernel_config cut_cross_entropy use_unsloth_gc tf32 activation_offloading"
    ),
    "rows are never padded further than they need": (
        "pad_to_sequence_len pad_to_multiple_of eval_sample_packing packing_strategy "
        "eval_packing padding_free dpo_padding_free sample_packing_group_size "
        "sample_packing_bin_size sample_packing_eff_est total_num_tokens pad_token"
    ),
    "rows of a step are grouped by length in any case": "group_by_length length_column_name",
    "batches are made on the fly, from data that is kept prepared": (
        "dataset_prepared_path dataset_num_proc preprocessing_num_workers "
        "dataloader_num_workers dataset_processes dataloader_pin_memory "
        "dataloader_prefetch_factor overwrite_cache remove_unused_columns "
        "dataset_keep_in_memory shuffle_merged_datasets streaming dataloader_drop_last "
        "preprocessing_batch_size tokenized_path cache_dir clear_cache_threshold "
        "batching_workers skip_prepare_dataset"
    ),
    "held-out data is measured with train.per_device_train_batch_size, and whole": (
        "eval_batch_size per_device_eval_batch_size val_batches test_batches "
        "eval_accumulation_steps eval_max_new_tokens eval_table_size "
        "eval_table_max_new_tokens max_eval_samples predict_with_generate do_eval do_predict "
        "eval_on_start prediction_loss_only do_bench_eval"
    ),
    "the reference is asked once, before the first step": (
        "precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size"
    ),
    "`train --resume` goes on with a run": ("resume_from_checkpoint auto_resume_from_checkpoints"),
    "`train --overwrite` replaces a run": "overwrite_output_dir",
    "config.json and the tokenizer's files say it": (
        "model_type tokenizer_type base_model_config tokenizer_config tokenizer_name_or_path "
        "trust_remote_code is_llama_derived_model tokenizer_use_fast use_fast_tokenizer "
        "tokenizer_legacy is_mistral_derived_model is_falcon_derived_model "
        "is_qwen_derived_model model_class torchscript"
    ),
    "`qlora-wgpu doctor --check` looks at the machine": (
        "debug profiler_steps gc_steps torch_empty_cache_steps log_on_each_node"
    ),
    "every run trains an adapter; quant.scheme says how the base is stored": (
        "adapter use_peft finetuning_type do_train fine_tune_type train task_type peft_type"
    ),
    "`qlora-wgpu generate` and `chat` have options for it": "sample_backend max_new_tokens",
    "a run leaves report.html and loss.png": "plot_loss",
    "`qlora-wgpu merge` and `eval` are commands": ("merge_lora test_after_training do_merge test"),
    "checkpoints hold all that a run needs to go on": (
        "save_safetensors save_only_model save_strategy save_on_each_node save_ckpt_as_hf"
    ),
    "its steps are given by other keys": (
        "logging_strategy logging_first_step include_num_input_tokens_seen "
        "include_tokens_per_second disable_tqdm log_level logging_dir logging_nan_inf_filter"
    ),
    _ONE_GPU: ("ddp_timeout ddp_find_unused_parameters local_rank ddp_bucket_cap_mb ddp_backend"),
}

NO_COUNTERPART = {
    "output.save_steps counts steps": "saves_per_epoch save_epochs",
    "every key is checked in any case": "strict",
    _ONE_GPU: (
        "deepspeed fsdp fsdp_config fsdp_version accelerator_config tensor_parallel_size "
        "context_parallel_size sequence_parallel_degree dp_shard_size dp_replicate_size "
        "ray_num_workers use_ray ddp world_size dist_config init_config dp_size cp_size cp_mode "
        "mp_replicate_size mp_shard_size dist_timeout"
    ),
    "each epoch has all rows in another order": "train_sampling_strategy",
    "equal rows are all learnt: remove them from the data": "dataset_exact_deduplication",
    _TOKENIZER: (
        "special_tokens added_tokens_overrides resize_token_embeddings_to_32x eos_token unk_token "
        "bos_token"
    ),
    _NEW_TOKENS: "tokens add_tokens add_special_tokens new_special_tokens resize_vocab",
    _HUB: (
        "hub_model_id push_to_hub hub_strategy hub_token hub_private_repo hf_use_auth_token "
        "push_dataset_to_hub hub_revision hf_hub_token hub_always_push"
    ),
    _FROZEN: (
        "additional_target "
        "lora_bias bias unfrozen_parameters embedding_lr embedding_lr_scale "
        "freeze_trainable_layers"
    ),
    _SUPERVISED: (
        "rl dpo_beta pref_beta pref_loss rl_beta beta loss_type reward_model pref_ftx kl_coef "
        "ref_model training_mode stage"
    ),
    _WANDB: (
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id run_name wandb_mode "
        "wandb_run_group project project_name"
    ),
    "MLflow, Comet and others are not written to": (
        "mlflow_tracking_uri mlflow_experiment_name comet_project_name use_comet use_swanlab "
        "swanlab_project use_mlflow trackio_project trackio_space_id"
    ),
    "PATH[:1000] takes the first rows of a data set, and data.sources says how many each gives": (
        "max_samples shards shards_idx dataset_shard_num dataset_shard_idx max_train_samples"
    ),
    "rows are tokenized as the template and format say": (
        "train_on_eos train_on_eot eot_tokens roles tool_format default_system "
        "train_on_inputs_of_tools dataset_kwargs enable_thinking chat_template_jinja_kwargs "
        "formatting_func reserved_label_len mask_history_of_tools datasets_type "
        "assistant_tokens completion_tokens eos_tokens"
    ),
    "data.train_on says what is learnt, and the chat template tells turns apart": (
        "instruction_part response_part instruction_template response_template"
    ),
    "weights are stored in 4 bits (nf4) or as they are": (
        "load_in_8bit gptq quantization_method quantization_device_map gptq_disable_exllama "
        "bnb_config_kwargs export_quantization_bit llm_int8_threshold"
    ),
    "only LoRA and DoRA train": (
        "relora relora_steps relora_warmup_steps galore use_galore lisa_n_layers "
        "lisa_step_interval use_badam llama_pro "
        "loftq_config peft galore_target galore_rank use_apollo use_adam_mini use_muon "
        "freeze_layers create_new_adapter use_llama_pro"
    ),
    "positions are the model's own": (
        "rope_scaling rope_theta overrides_of_model_config shift_attn use_s2_attn"
    ),
    "the shapes are those of optim.lr_scheduler_type": "cosine_constant_lr_ratio lr_div_factor",
    "the optimizer is optim.name, AdamW or Lion": (
        "optim_args optim_target_modules optimizer_config torchao"
    ),
}

_LEAST_RATE = (
    "optim.lr_scheduler_type: cosine_with_min_lr takes min_lr_rate, a share of the peak, in "
    "optim.lr_scheduler_kwargs"
)
_MIXTURE = "data.sources takes several data sets, with a weight or rows each"
HINTS = {
    **dict.fromkeys(("interleave_probs", "dataset_mixture_fractions", "dataset_mixer"), _MIXTURE),
    "mix_strategy": "data.stopping_strategy says where weighted sources end",
    **dict.fromkeys(("cosine_min_lr_ratio", "min_lr_ratio", "min_lr_rate"), _LEAST_RATE),
    "min_lr": "it stands in optim.lr_scheduler_kwargs",
    "scale": "it is lora.lora_alpha / lora.r: multiply it by lora.r for lora.lora_alpha",
    "num_layers": "lora.layers_to_transform lists the numbers of the layers",
    "lora_layers": "lora.layers_to_transform lists the numbers of the layers",
    "lora_parameters": "its rank is lora.r, its scale times the rank lora.lora_alpha, its keys "
    "lora.target_modules",
    "val_set_size": "data.eval_split holds rows of data.train out",
    "val_size": "data.eval_split holds rows of data.train out",
    "hf_dataset": "data.train takes a data set of the hub, as owner/name:split",
    "evals_per_epoch": "eval.eval_steps takes a fraction of the whole run",
    "optimizer": "optim.name says which optimizer trains: adamw, adamw_8bit or lion",
    "optim": "optim.name says which optimizer trains: adamw, adamw_8bit or lion",
    "lora_target_linear": "lora.target_modules: all-linear",
}


PREFIXES = {
    "wandb_": f"no counterpart here: {_WANDB}",
    **dict.fromkeys(
        ("swanlab_", "mlflow_", "comet_", "trackio_", "use_otel", "otel_"),
        "no counterpart here: TensorBoard and Weights & Biases are written to",
    ),
    **dict.fromkeys(
        (
            "fsdp",
            "deepspeed",
            "ddp_",
            "ray_",
            "expert_parallel",
            "expert_model_parallel",
            "tensor_model_parallel",
            "pipeline_model_parallel",
            "context_par",
            "sequence_parallel",
            "kt_",
            "use_kt",
        ),
        f"no counterpart here: {_ONE_GPU}",
    ),
    **dict.fromkeys(
        (
            "liger_",
            "unsloth_",
            "use_kernels",
            "use_scattermoe",
            "use_sonicmoe",
            "fused_attn",
            "flex_attn",
            "experts_implementation",
            "use_v1_kernels",
            "moe_grouped",
        ),
        f"not needed here: {_KERNELS}",
    ),
    **dict.fromkeys(
        (
            "galore_",
            "apollo_",
            "badam_",
            "lisa_",
            "relora_",
            "oft_",
            "freeze_",
            "use_dft",
            "qat",
            "use_eaft",
            "eaft_",
            "jagged_restart",
            "diffusion",
            "reft_",
        ),
        "no counterpart here: only LoRA and DoRA train, by cross-entropy",
    ),
    **dict.fromkeys(
        ("image_", "video_", "audio_", "processor_type"),
        "no counterpart here: text alone is learnt",
    ),
    **dict.fromkeys(("hub_",), f"no counterpart here: {_HUB}"),
    **dict.fromkeys(
        ("fp8", "quantize_moe", "model_quantization", "nvfp4"),
        "no counterpart here: weights are stored in 4 bits (nf4) or as they are",
    ),
    "loss_watchdog": "not needed here: a run that diverges ends with a sentence",
    "gradient_checkpointing_kwargs": "not needed here: train.gradient_checkpointing says it",
    "lora_target_parameters": "no counterpart here: lora.target_modules names experts' layers",
    "lora_fan_in_fan_out": "not needed here: the model's family knows it",
    "tokenizer_use": f"not needed here: {_TOKENIZER}",
    "device_map": f"not needed here: {_ONE_GPU}",
    "low_cpu_mem_usage": "not needed here: weights are read one by one",
    "min_sample_len": "not needed here: rows with nothing to learn are left out",
    "eta_min": "it is min_lr in optim.lr_scheduler_kwargs, with cosine_with_min_lr",
}


def _by_key(groups: dict[str, str], words: str) -> dict[str, str]:
    return {key: f"{words}: {why}" for why, keys in groups.items() for key in keys.split()}


_REASONS = {
    **_by_key(NOT_NEEDED, "not needed here"),
    **_by_key(NO_COUNTERPART, "no counterpart here"),
    **HINTS,
}


def reason_for(key: str) -> str | None:
    """Why another trainer's key has no place here, or how it is said instead."""
    if key in _REASONS:
        return _REASONS[key]
    return next((why for prefix, why in PREFIXES.items() if key.startswith(prefix)), None)


# ---- a configuration in the making ---------------------------------------------------------------

NumLayers = Callable[[str], int | None]
"""Number of a model's layers by its name, where it is known."""


@dataclass(frozen=True)
class Taken:
    """A value of ours and where it comes from."""

    value: Any  # as the schema takes it
    origin: str  # their key, or why the value stands there


@dataclass(frozen=True)
class LeftOut:
    """A key of theirs that is not taken over."""

    key: str  # theirs, with the value
    reason: str  # why


@dataclass
class Draft:
    """What has been made of a file, and what is left of it."""

    theirs: dict[str, Any]  # their keys that have not been looked at yet
    file: Path  # the file
    num_layers: NumLayers = lambda model: None  # asked for a model's layers
    # Our keys that win over what the file says
    given: Mapping[str, str] = field(default_factory=dict)
    taken: dict[str, Taken] = field(default_factory=dict)  # our values by dotted keys
    left_out: list[LeftOut] = field(default_factory=list)  # keys that are not taken over
    notes: list[str] = field(default_factory=list)  # sentences about what is otherwise here

    def take(self, key: str, default: Any = None) -> Any:
        """A value of theirs, which is done with; an empty one is the default."""
        value = self.theirs.pop(key, None)
        return default if value is None else value

    def set(self, key: str, value: Any, origin: str) -> None:
        """Sets a key of ours."""
        self.taken[key] = Taken(value, origin)

    def move(self, key: str, ours: str) -> None:
        """Takes a value over as it is, if it is there."""
        if (value := self.take(key)) is not None:
            self.set(ours, value, key)

    def leave_out(self, key: str, value: Any, reason: str) -> None:
        """Leaves a key out."""
        self.left_out.append(LeftOut(f"{key}: {brief(value)}", reason))

    def drop(self, key: str, reason: str = "") -> None:
        """Leaves a key out, if it is there, for a reason or for the usual one."""
        if (value := self.take(key)) is not None:
            self.leave_out(key, value, reason or reason_for(key) or "no counterpart here")

    def value_of(self, ours: str, default: Any = None) -> Any:
        """What a key of ours has been set to."""
        return self.taken[ours].value if ours in self.taken else default

    def refuse(self, key: str, value: Any, reason: str) -> ConfigError:
        """The error for a file that trains something else."""
        return ConfigError(f"{self.file.name} cannot be converted: {key}: {brief(value)} {reason}")

    def place(self, path: str) -> str:
        """A path of theirs as it is found from here: they go from where they are started."""
        beside = self.file.parent / path
        return beside.as_posix() if not exists(Path(path)) and exists(beside) else path


@dataclass(frozen=True)
class Dialect:
    """Another trainer's way to write a run down."""

    name: str  # the trainer's
    marks: frozenset[str]  # keys by which its files are known
    keys: Mapping[str, str]  # our keys by theirs that mean the same
    convert: Callable[[Draft], None]  # makes of a draft what is more than another name
    defaults: Mapping[str, Any]  # what the trainer does where its file says nothing, by our keys


def brief(value: Any) -> str:
    """A value of theirs in few characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(map(str, list(value)[:4])) + "}"
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
