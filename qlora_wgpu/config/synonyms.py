"""Names that other trainers use for the keys of this one."""

from __future__ import annotations

# Names from other trainers and everyday words, to the key that means the same here.
_SYNONYMS = {
    "model.path": "base_model model_name model_name_or_path model_id model_path name_or_path hub "
    "name id base",
    "quant.scheme": "quantization quant_type bnb_4bit_quant_type load_in_4bit bits method",
    "quant.blocksize": "group_size bnb_4bit_blocksize",
    "quant.double_quant": "bnb_4bit_use_double_quant use_double_quant nested",
    "lora.r": "rank lora_r lora_rank dim",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "targets modules lora_target_modules target keys",
    "lora.use_rslora": "rslora rank_stabilized",
    "lora.trainable_token_indices": "lora_trainable_token_indices token_indices trainable_tokens",
    "data.train": "dataset train_file train_data train_path path train_dataset datasets",
    "data.eval": "eval_file eval_data validation validation_file valid val val_file test "
    "eval_dataset",
    "data.max_seq_length": "max_length max_len sequence_len sequence_length seq_len seq_length "
    "max_seq_len model_max_length cutoff_len context_length block_size max_tokens",
    "data.chat_template": "template chat_template_path chat_template_jinja",
    "train.num_train_epochs": "epochs num_epochs n_epochs epoch",
    "train.max_steps": "steps iters iterations num_steps total_steps",
    "train.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size "
    "micro_batch minibatch_size",
    "train.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps "
    "grad_accumulation_steps accumulate_grad_batches grad_accum_steps",
    "train.gradient_checkpointing": "grad_checkpoint checkpointing activation_checkpointing",
    "train.compute_dtype": "dtype torch_dtype precision bf16 fp16 mixed_precision "
    "bnb_4bit_compute_dtype",
    "train.gradient_dtype": "grad_dtype grad_accum_dtype gradient_accumulation_dtype",
    "train.neftune_noise_alpha": "neftune noise_alpha",
    "train.objective": "rl training_type stage trainer",
    "train.beta": "dpo_beta pref_beta rl_beta kto_beta orpo_beta orpo_alpha",
    "train.desirable_weight": "kto_desirable_weight",
    "train.undesirable_weight": "kto_undesirable_weight",
    "train.z_loss_weight": "z_loss",
    "train.router_aux_loss_coef": "moe_aux_loss_coef aux_loss_coef output_router_logits",
    "optim.loraplus_lr_ratio": "lora_plus loraplus",
    "lora.init_from": "lora_model_dir resume_adapter_file init_adapter",
    "data.packing": "sample_packing pack",
    "data.train_on": "train_on_inputs mask_prompt train_on_responses_only roles_to_train",
    "data.columns": "column_mapping field_mapping",
    "eval.load_best_model_at_end": "load_best save_best",
    "eval.metric_for_best_model": "best_metric metric_for_best early_stopping_metric",
    "eval.early_stopping_patience": "early_stopping patience",
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
    "log.logging_steps": "log_every log_interval log_steps steps_per_report report_every",
    "output.dir": "output_dir out out_dir save_dir folder output_path adapter_path",
    "output.save_steps": "save_every save_interval checkpoint_every checkpoint_steps",
    "output.save_total_limit": "keep keep_last max_checkpoints",
    "device.gpu": "device device_name gpu_id",
    "device.backend": "webgpu implementation library",
}
KEY_OF = {word: tuple(key.split(".")) for key, words in _SYNONYMS.items() for word in words.split()}
