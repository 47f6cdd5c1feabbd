"""LLaMA-Factory's second form of YAML (``USE_V1``), whose parts are plugins with names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects.draft import Dialect, Draft
from qlora_wgpu.config.dialects.hugging_face import convert_precision, set_quantization
from qlora_wgpu.config.dialects.llama_factory import AS_CHATS
from qlora_wgpu.config.dialects.rows import RowsOf, Source, hub_place, set_sources
from qlora_wgpu.config.yaml import read_yaml_file

_MARKS = (
    "model_class peft_config kernel_config dist_config init_config quant_config train_dataset "
    "micro_batch_size global_batch_size batching_strategy optim_config lr_scheduler_config "
    "sample_backend custom_chat_template enable_activation_checkpointing"
)
_KEYS = (
    "model custom_chat_template cutoff_len learning_rate max_grad_norm max_steps seed "
    "enable_activation_checkpointing output_dir save_steps save_total_limit logging_steps"
)
_DEFAULTS = {
    "data.max_seq_length": 2048,
    "lora.r": 8,
    "lora.lora_alpha": 16,
    "lora.lora_dropout": 0.05,
    "lora.target_modules": "all-linear",
    "train.num_train_epochs": 3.0,
    "train.seed": 42,
    "train.gradient_checkpointing": True,
    "optim.learning_rate": 1e-4,
    "optim.lr_scheduler_type": "constant",
    "optim.warmup_ratio": 0.0,
    "optim.weight_decay": 0.01,
    "log.logging_steps": 1,
    "output.save_total_limit": None,
}
_LORA = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
_FORMATS = {"alpaca": "instruction/output", "sharegpt": "conversations"}


def _convert(draft: Draft) -> None:
    _convert_adapter(draft)
    quant = _plugin(draft, "quant_config")
    bits = quant.get("quantization_bit") if quant else None
    set_quantization(draft, bits, "quant_config" if quant else "16 bits")
    _convert_data(draft)
    rows, step = draft.take("micro_batch_size", 1), draft.take("global_batch_size")
    draft.set("train.per_device_train_batch_size", rows, "micro_batch_size")
    accumulation = max(int(step) // rows, 1) if step else 1
    origin = "global_batch_size / micro_batch_size" if step else "LLaMA-Factory's default"
    draft.set("train.gradient_accumulation_steps", accumulation, origin)
    if (epochs := draft.take("num_train_epochs")) is not None:
        draft.set("train.num_train_epochs", float(epochs), "num_train_epochs")
    convert_precision(draft)
    if (strategy := draft.take("batching_strategy", "normal")) != "normal":
        draft.set("data.packing", True, f"nearest to batching_strategy: {strategy}")
    for key in ("optim_config", "lr_scheduler_config"):
        if plugin := _plugin(draft, key):
            reason = "AdamW trains here, by the shapes of optim.lr_scheduler_type"
            draft.leave_out(key, plugin.get("name"), reason)


def _convert_adapter(draft: Draft) -> None:
    adapter = _plugin(draft, "peft_config")
    if adapter.get("name", "lora") != "lora" or not adapter:
        kind = adapter.get("name", "full")
        draft.notes.append(f"peft_config: {kind} trains other weights; a LoRA adapter is made")
    for key in _LORA:
        if key in adapter:
            draft.set(f"lora.{key}", adapter[key], f"peft_config.{key}")
    targets = adapter.get("target_modules", "all")
    modules = "all-linear" if targets == "all" else targets
    draft.set("lora.target_modules", modules, f"peft_config.target_modules: {targets}")
    if (folder := adapter.get("adapter_name_or_path")) is not None:
        names = folder if isinstance(folder, list) else [folder]
        draft.set("lora.init_from", draft.place(str(names[0])), "peft_config.adapter_name_or_path")
    if saved := adapter.get("modules_to_save"):
        draft.set("lora.modules_to_save", saved, "peft_config.modules_to_save")


def _convert_data(draft: Draft) -> None:
    if (train := draft.take("train_dataset")) is not None:
        entries = _descriptions(draft, "train_dataset", str(train))
        sources = [
            Source(_place(draft, entry), _rows(entry), _portion(draft, entry)) for entry in entries
        ]
        set_sources(draft, sources, f"train_dataset: {train}")
        formats = {source.rows.format for source in sources}
        if "instruction/output" in formats:
            draft.set("data.apply_chat_template", True, AS_CHATS)
        if None in formats:
            draft.notes.append(
                "parts of messages are read as {type: text, text: ...}, where LLaMA-Factory writes "
                "{type: text, value: ...}"
            )
    if (held_out := draft.take("eval_dataset")) is not None:
        first, *others = _descriptions(draft, "eval_dataset", str(held_out))
        draft.set("data.eval", _place(draft, first), "eval_dataset")
        for other in others:
            draft.leave_out("eval_dataset", other.get("path"), "one is measured on")


def _descriptions(draft: Draft, key: str, path: str) -> list[Mapping[str, Any]]:
    """What a YAML of data sets says of each; another file is the data itself."""
    place = Path(draft.place(path))
    if place.suffix not in (".yaml", ".yml"):
        return [{"path": path}]
    entries = [dict(entry) for entry in read_yaml_file(place, aliases=True).values.values()]
    if any(entry.get("converter") == "pair" for entry in entries):
        raise draft.refuse(key, path, "holds preferences; only supervised rows are learnt")
    return list(entries)


def _rows(entry: Mapping[str, Any]) -> RowsOf:
    row_format = _FORMATS.get(str(entry.get("converter")))
    origin = f"converter: {entry.get('converter')}"
    return RowsOf() if row_format is None else RowsOf(row_format, {}, origin)


def _portion(draft: Draft, entry: Mapping[str, Any]) -> dict[str, float]:
    """The rows that a data set gives, where it says how many; its weight is a share of its own."""
    size, weight = entry.get("size"), entry.get("weight") or 1.0
    rows = size * weight if isinstance(size, int) else weight
    if size is None and weight > 1:
        draft.leave_out("weight", weight, "name the rows that it is to give, such as rows: 5000")
        return {}
    return {} if rows == 1 else {"rows": rows if rows < 1 else int(rows)}


def _place(draft: Draft, entry: Mapping[str, Any]) -> str:
    split = entry.get("split")
    return hub_place(draft, str(entry["path"]), None, split)


def _plugin(draft: Draft, key: str) -> Mapping[str, Any]:
    value = draft.take(key, {})
    return value if isinstance(value, Mapping) else {"name": value}


DIALECT = Dialect("LLaMA-Factory (v1)", _MARKS, _KEYS, _convert, _DEFAULTS)
