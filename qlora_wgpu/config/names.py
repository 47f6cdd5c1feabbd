"""Other trainers' names and everyday words: the setting they mean, or why there is none."""

from __future__ import annotations

from typing import Any

SYNONYMS = {
    "model.path": (
        "base_model model_name model_name_or_path model_id model_path name_or_path hub name id "
        "base model"
    ),
    "quant.scheme": "quantization quant_type bnb_4bit_quant_type load_in_4bit bits method",
    "quant.blocksize": "group_size bnb_4bit_blocksize",
    "quant.double_quant": (
        "bnb_4bit_use_double_quant use_double_quant nested use_bnb_nested_quant double_quantization"
    ),
    "lora.r": "rank lora_r lora_rank dim",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "targets modules lora_target_modules target keys",
    "lora.use_rslora": "rslora rank_stabilized peft_use_rslora",
    "lora.trainable_token_indices": (
        "lora_trainable_token_indices token_indices trainable_tokens peft_trainable_token_indices"
    ),
    "data.train": "dataset train_file train_data train_path path train_dataset datasets",
    "data.eval": (
        "eval_file eval_data validation validation_file valid val val_file test eval_dataset"
    ),
    "data.max_seq_length": (
        "max_length max_len sequence_len sequence_length seq_len seq_length max_seq_len "
        "model_max_length cutoff_len context_length block_size max_tokens"
    ),
    "data.chat_template": "template chat_template_path chat_template_jinja custom_chat_template",
    "train.num_train_epochs": "epochs num_epochs n_epochs epoch",
    "train.max_steps": "steps iters iterations num_steps total_steps",
    "train.per_device_train_batch_size": (
        "batch_size micro_batch_size train_batch_size micro_batch minibatch_size"
    ),
    "train.gradient_accumulation_steps": (
        "grad_accum gradient_accumulation accumulation_steps grad_accumulation_steps "
        "accumulate_grad_batches grad_accum_steps"
    ),
    "train.gradient_checkpointing": (
        "grad_checkpoint checkpointing activation_checkpointing enable_activation_checkpointing"
    ),
    "train.compute_dtype": (
        "dtype torch_dtype precision bf16 fp16 mixed_precision bnb_4bit_compute_dtype"
    ),
    "train.gradient_dtype": "grad_dtype grad_accum_dtype gradient_accumulation_dtype",
    "train.neftune_noise_alpha": "neftune noise_alpha noisy_embedding_alpha",
    "train.objective": "rl training_type stage trainer",
    "train.beta": "dpo_beta pref_beta rl_beta kto_beta orpo_beta orpo_alpha",
    "train.desirable_weight": "kto_desirable_weight",
    "train.undesirable_weight": "kto_undesirable_weight",
    "train.z_loss_weight": "z_loss",
    "train.router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef output_router_logits",
    "optim.loraplus_lr_ratio": "lora_plus loraplus",
    "lora.init_from": "lora_model_dir resume_adapter_file init_adapter",
    "data.packing": "sample_packing pack neat_packing",
    "data.train_on": "train_on_inputs mask_prompt train_on_responses_only roles_to_train",
    "data.columns": "column_mapping field_mapping",
    "eval.load_best_model_at_end": "load_best save_best",
    "eval.metric_for_best_model": "best_metric metric_for_best early_stopping_metric",
    "eval.early_stopping_patience": "early_stopping patience early_stopping_steps",
    "train.seed": "random_seed random_state",
    "optim.name": "optimizer optim optimizer_type optimizer_name",
    "optim.learning_rate": "lr max_lr",
    "optim.lr_scheduler_type": "scheduler lr_scheduler schedule lr_schedule scheduler_type",
    "optim.lr_scheduler_kwargs": "scheduler_kwargs scheduler_args lr_scheduler_args",
    "optim.warmup_ratio": "warmup warm_up",
    "optim.weight_decay": "wd decay",
    "optim.max_grad_norm": "grad_clip gradient_clipping clip clip_grad_norm max_norm clip_norm",
    "optim.adam_beta1": "beta1 beta_1",
    "optim.adam_beta2": "beta2 beta_2",
    "optim.adam_epsilon": "eps epsilon adam_eps",
    "eval.eval_steps": "steps_per_eval eval_every eval_interval eval_freq",
    "log.logging_steps": (
        "log_every log_interval log_steps steps_per_report report_every log_every_n_steps"
    ),
    "output.dir": "output_dir out out_dir save_dir folder output_path adapter_path",
    "output.save_steps": "save_every save_interval checkpoint_every checkpoint_steps",
    "output.save_total_limit": "keep keep_last max_checkpoints",
    "device.gpu": "device device_name gpu_id",
    "device.backend": "webgpu implementation library",
    "lora.use_dora": "peft_use_dora",
    "lora.init_lora_weights": "peft_init_lora_weights",
    "lora.layers_to_transform": "peft_layers_to_transform",
    "lora.modules_to_save": "lora_modules_to_save",
    "lora.ensure_weight_tying": "peft_ensure_weight_tying",
}
"""Other names of a setting, by its key."""

_FROZEN = (
    "norms and biases are frozen; lora.trainable_token_indices and lora.modules_to_save train the "
    "embedding and head"
)
_MIN_LR = (
    "use optim.lr_scheduler_type: cosine_with_min_lr with min_lr_rate, a fraction of the peak, in "
    "optim.lr_scheduler_kwargs"
)
_LORA = "use lora.r (rank), lora.lora_alpha (scale times rank) and lora.target_modules (keys)"
_NOT_NEEDED = {
    "attention is always tiled, as in FlashAttention": (
        "flash_attention xformers_attention sdp_attention eager_attention flash_attn "
        "attn_implementation use_flash_attention_2 s2_attention flash_attn_cross_entropy "
        "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv flex_attention sage_attention"
    ),
    "this program's own fused kernels are always used": (
        "enable_liger_kernel use_liger_kernel use_liger use_unsloth unsloth plugins torch_compile "
        "torch_compile_backend torch_compile_mode lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "kernel_config cut_cross_entropy use_unsloth_gc tf32 activation_offloading liger_* "
        "unsloth_* use_kernels* use_scattermoe* use_sonicmoe* fused_attn* flex_attn* "
        "experts_implementation* use_v1_kernels* moe_grouped*"
    ),
    "rows are never padded more than necessary": (
        "pad_to_sequence_len pad_to_multiple_of eval_sample_packing packing_strategy eval_packing "
        "padding_free dpo_padding_free sample_packing_group_size sample_packing_bin_size "
        "sample_packing_eff_est total_num_tokens pad_token"
    ),
    "a step's rows are always grouped by length": "group_by_length length_column_name",
    "batches are made on the fly from cached, prepared data": (
        "dataset_prepared_path dataset_num_proc preprocessing_num_workers dataloader_num_workers "
        "dataset_processes dataloader_pin_memory dataloader_prefetch_factor overwrite_cache "
        "remove_unused_columns dataset_keep_in_memory shuffle_merged_datasets streaming "
        "dataloader_drop_last preprocessing_batch_size tokenized_path cache_dir "
        "clear_cache_threshold batching_workers skip_prepare_dataset"
    ),
    "evaluations use all held-out rows and train.per_device_train_batch_size": (
        "eval_batch_size per_device_eval_batch_size val_batches test_batches "
        "eval_accumulation_steps eval_max_new_tokens eval_table_size eval_table_max_new_tokens "
        "max_eval_samples predict_with_generate do_eval do_predict eval_on_start "
        "prediction_loss_only do_bench_eval"
    ),
    "the reference model runs once, before the first step": (
        "precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size"
    ),
    "`train --resume` (in Python, resume=True) resumes a run": (
        "resume_from_checkpoint auto_resume_from_checkpoints"
    ),
    "`train --overwrite` (in Python, overwrite=True) replaces a run": "overwrite_output_dir",
    "config.json and the tokenizer's files contain it": (
        "model_type tokenizer_type base_model_config tokenizer_config tokenizer_name_or_path "
        "trust_remote_code is_llama_derived_model tokenizer_use_fast use_fast_tokenizer "
        "tokenizer_legacy is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model "
        "model_class torchscript"
    ),
    "`qlora-wgpu doctor --check` tests the machine": (
        "debug profiler_steps gc_steps torch_empty_cache_steps log_on_each_node"
    ),
    "every run trains an adapter, and quant.scheme quantizes the base": (
        "adapter use_peft finetuning_type do_train fine_tune_type train task_type peft_type"
    ),
    "`qlora-wgpu generate` and `chat` have options for it": "sample_backend max_new_tokens",
    "every run writes report.html and loss.png": "plot_loss",
    "use the commands `qlora-wgpu merge` and `eval`": (
        "merge_lora test_after_training do_merge test"
    ),
    "checkpoints contain everything needed to resume": (
        "save_safetensors save_only_model save_strategy save_on_each_node save_ckpt_as_hf"
    ),
    "log.logging_steps and output.save_steps determine it": (
        "logging_strategy logging_first_step include_num_input_tokens_seen "
        "include_tokens_per_second disable_tqdm log_level logging_dir logging_nan_inf_filter"
    ),
    "a process uses one GPU": (
        "ddp_timeout ddp_find_unused_parameters local_rank ddp_bucket_cap_mb ddp_backend "
        "device_map*"
    ),
    "a run that diverges stops with an error": "loss_watchdog*",
    "use train.gradient_checkpointing": "gradient_checkpointing_kwargs*",
    "the model's family determines it": "lora_fan_in_fan_out*",
    "the tokenizer's own files determine it": "tokenizer_use*",
    "weights are read one at a time": "low_cpu_mem_usage*",
    "rows without labels are dropped": "min_sample_len*",
    "every key is always checked": "strict",
    "every epoch shuffles all rows": "train_sampling_strategy",
}
_UNSUPPORTED = {
    "a process uses one GPU (several: cluster.scheduler)": (
        "accelerator_config tensor_parallel_size dp_shard_size dp_replicate_size use_ray ddp "
        "world_size dist_config init_config dp_size cp_size cp_mode mp_replicate_size "
        "mp_shard_size dist_timeout fsdp* deepspeed* ddp_* ray_* expert_parallel* "
        "expert_model_parallel* tensor_model_parallel* pipeline_model_parallel* context_par* "
        "sequence_parallel* kt_* use_kt*"
    ),
    "duplicate rows are not removed from the data": "dataset_exact_deduplication",
    "the tokenizer's own files determine it": (
        "special_tokens added_tokens_overrides resize_token_embeddings_to_32x eos_token unk_token "
        "bos_token"
    ),
    _FROZEN: (
        "additional_target lora_bias bias unfrozen_parameters embedding_lr embedding_lr_scale "
        "freeze_trainable_layers"
    ),
    "only dpo, orpo and kto use it, and this run is sft": (
        "rl dpo_beta pref_beta pref_loss rl_beta beta loss_type reward_model pref_ftx kl_coef "
        "ref_model training_mode stage"
    ),
    "use the environment for Weights & Biases, such as WANDB_PROJECT": (
        "run_name project project_name wandb_*"
    ),
    "log.report_to logs to TensorBoard, Weights & Biases and Trackio": (
        "mlflow_tracking_uri mlflow_experiment_name comet_project_name use_comet use_swanlab "
        "swanlab_project use_mlflow trackio_project trackio_space_id swanlab_* mlflow_* comet_* "
        "trackio_* use_otel* otel_*"
    ),
    "rows are tokenized by data.chat_template and data.format": (
        "train_on_eos train_on_eot eot_tokens roles tool_format default_system "
        "train_on_inputs_of_tools dataset_kwargs enable_thinking chat_template_jinja_kwargs "
        "formatting_func reserved_label_len mask_history_of_tools datasets_type assistant_tokens "
        "completion_tokens eos_tokens"
    ),
    "weights are stored in 4 bits (nf4) or unquantized": (
        "load_in_8bit gptq quantization_method quantization_device_map gptq_disable_exllama "
        "bnb_config_kwargs export_quantization_bit llm_int8_threshold fp8* quantize_moe* "
        "model_quantization* nvfp4*"
    ),
    "only LoRA and DoRA are trained": (
        "relora relora_steps relora_warmup_steps galore use_galore lisa_n_layers "
        "lisa_step_interval use_badam llama_pro loftq_config peft galore_target galore_rank "
        "use_apollo use_adam_mini use_muon freeze_layers create_new_adapter use_llama_pro"
    ),
    "only LoRA and DoRA are trained, with cross-entropy": (
        "galore_* apollo_* badam_* lisa_* relora_* oft_* freeze_* use_dft* qat* use_eaft* eaft_* "
        "jagged_restart* diffusion* reft_*"
    ),
    "positions are those of the model": (
        "rope_scaling rope_theta overrides_of_model_config shift_attn use_s2_attn"
    ),
    "only text is trained on": "image_* video_* audio_* processor_type*",
}
_INSTEAD = {
    "use output.save_steps, in steps": "saves_per_epoch save_epochs",
    "use model.add_tokens or model.add_special_tokens": (
        "tokens add_tokens add_special_tokens new_special_tokens resize_vocab"
    ),
    "`qlora-wgpu push` uploads a run's adapter to the Hub": (
        "push_to_hub hf_use_auth_token push_dataset_to_hub hf_hub_token hub_*"
    ),
    "use a slice such as PATH[:1000], or rows in data.sources": (
        "max_samples shards shards_idx dataset_shard_num dataset_shard_idx max_train_samples"
    ),
    "use data.train_on; the chat template separates the turns": (
        "instruction_part response_part instruction_template response_template"
    ),
    "use optim.lr_scheduler_type": "cosine_constant_lr_ratio lr_div_factor",
    "use optim.name: adamw, adamw_8bit or lion": (
        "optim_args optim_target_modules optimizer_config torchao optimizer optim"
    ),
    "lora.target_modules includes experts' layers": "lora_target_parameters*",
    "use data.sources, with a weight or rows for each data set": (
        "interleave_probs dataset_mixture_fractions dataset_mixer"
    ),
    "use data.stopping_strategy": "mix_strategy",
    _MIN_LR: "cosine_min_lr_ratio min_lr_ratio min_lr_rate",
    "use optim.lr_scheduler_kwargs": "min_lr",
    "it is lora.lora_alpha / lora.r: set lora.lora_alpha to scale times lora.r": "scale",
    "use lora.layers_to_transform, a list of layer indices": "num_layers lora_layers",
    _LORA: "lora_parameters",
    "use data.eval_split": "val_set_size val_size",
    "use data.train with owner/name:split": "hf_dataset",
    "use eval.eval_steps, which may be a fraction of the run": "evals_per_epoch",
    "use lora.target_modules: all-linear": "lora_target_linear",
    "use min_lr in optim.lr_scheduler_kwargs, with cosine_with_min_lr": "eta_min*",
}
"""Keys by the reason why they are not read, or what to use instead; ``*`` is any ending."""

PEFT_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "auto_mapping": (None,),
    "base_model_name_or_path": (None,),
    "bias": ("none",),
    "exclude_modules": (None,),
    "fan_in_fan_out": (False,),
    "inference_mode": (False,),
    "layer_replication": (None,),
    "layers_pattern": (None,),
    "loftq_config": (None, {}),
    "lora_bias": (False,),
    "megatron_config": (None,),
    "megatron_core": ("megatron.core", None),
    "peft_type": ("LORA",),
    "revision": (None,),
    "target_parameters": (None,),
    "task_type": ("CAUSAL_LM", None),
}
"""Arguments of PEFT's LoraConfig that have no effect here, with the values that are accepted."""

_KEY_OF = {word: key for key, words in SYNONYMS.items() for word in words.split()}
_REASONS = {
    key: f"{prefix}{why}"
    for prefix, reasons in (
        ("not needed: ", _NOT_NEEDED),
        ("not supported: ", _UNSUPPORTED),
        ("", _INSTEAD),
    )
    for why, keys in reasons.items()
    for key in keys.split()
}


def key_for(word: str) -> tuple[str, str] | None:
    """Section and key of the setting that has this name elsewhere, or None."""
    section, _, key = _KEY_OF.get(word, "").partition(".")
    return (section, key) if key else None


def reason_for(key: str) -> str | None:
    """Why another trainer's key is not read, or what to use instead."""
    prefixes = (f"{key[:end]}*" for end in range(len(key), 0, -1))
    return next((_REASONS[name] for name in (key, *prefixes) if name in _REASONS), None)
