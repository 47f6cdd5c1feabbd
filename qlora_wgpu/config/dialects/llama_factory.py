"""LLaMA-Factory's YAML or JSON, in both of its forms, with the data sets that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import preferences, trl
from qlora_wgpu.config.dialects.draft import (
    PACKED_APART,
    Defaults,
    Dialect,
    Draft,
    RowsOf,
    Source,
    listed,
    listed_tokens,
)
from qlora_wgpu.config.yaml import read_json_object, read_yaml_file
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.files import is_file, open_file
from qlora_wgpu.limits import MODEL_JSON_BYTES

_MARKS = (
    "model_name_or_path stage finetuning_type lora_target lora_rank template "
    "cutoff_len dataset dataset_dir quantization_bit val_size do_train "
    "overwrite_cache plot_loss preprocessing_num_workers"
)
_KEYS = (
    f"{trl.KEYS} "
    "model_name_or_path lora_rank lora_alpha cutoff_len packing neat_packing moe_aux_loss_coef "
    "double_quantization early_stopping_steps"
)
_DEFAULTS: Defaults = {
    **trl.DEFAULTS,
    "lora": {"r": 8},
    "data": {"max_seq_length": 2048},
    "optim": {**trl.DEFAULTS["optim"], "learning_rate": 5e-5},
    "log": {"logging_steps": 500},
}
AS_CHATS = "LLaMA-Factory writes instructions as turns of a chat"
_MEDIA = ("images", "videos", "audios")
_SCANNED = 1 << 16  # bytes of a file, in which its rows' keys are looked for
_TEMPLATES = {
    "default": "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ 'System: ' + message['content'] + eos_token + '\\n' }}{% elif message['role'] == 'user' %}"
    "{{ 'Human: ' + message['content'] + eos_token + '\\nAssistant:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}",
}
"""Of its templates those that no tokenizer has, as Jinja."""
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool", "function"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}


def _convert(draft: Draft) -> None:
    stage, objective = draft.take("stage", "sft"), "sft"
    if stage not in ("sft", "pt"):
        objective = preferences.convert_llama_factory(draft, str(stage))
    if (kind := draft.take("finetuning_type", "lora")) != "lora":
        draft.notes.append(f"finetuning_type: {kind} trains other weights; a LoRA adapter is made")
    bits = draft.take("quantization_bit")
    trl.set_quantization(draft, bits, "quantization_bit" if bits else "16 bits")
    draft.drop("quantization_type", "4 bits are always nf4")
    _convert_lora(draft)
    _convert_tokens(draft)
    _convert_data(draft, objective, documents=stage == "pt")
    preferences.settle_rows(draft, objective)
    _convert_packing(draft, documents=stage == "pt")
    trl.convert_evaluation(draft, _DEFAULTS["log"]["logging_steps"])
    trl.convert_training(draft)
    off = draft.take("disable_gradient_checkpointing", False)
    draft.take("gradient_checkpointing")
    draft.set("train.gradient_checkpointing", not off, "LLaMA-Factory's way")


def _convert_lora(draft: Draft) -> None:
    target = draft.take("lora_target", "all")
    names = target if isinstance(target, list) else str(target).replace(",", " ").split()
    modules = "all-linear" if names == ["all"] else names
    draft.set("lora.target_modules", modules, f"lora_target: {target}")
    rank = draft.theirs.get("lora_rank") or _DEFAULTS["lora"]["r"]
    if draft.theirs.get("lora_alpha") is None:
        draft.set("lora.lora_alpha", 2 * rank, "LLaMA-Factory's default, twice the rank")
    begins, rounds = draft.take("pissa_init", False), draft.take("pissa_iter", 16)
    if begins:
        kind = "pissa" if rounds < 0 else f"pissa_niter_{rounds}"
        draft.set("lora.init_lora_weights", kind, "pissa_init")
    draft.convert({
        "pissa_convert": "what began with PiSSA is always saved as plain LoRA",
        "adapter_name_or_path": ("lora.init_from", draft.place),
    })  # fmt: skip


def _convert_tokens(draft: Draft) -> None:
    plain, special = draft.take("add_tokens", []), draft.take("add_special_tokens")
    origin = "add_special_tokens" if special is not None else "new_special_tokens"
    if special is None:
        special = draft.take("new_special_tokens")
    tokens = listed_tokens(special or [])
    others = [token for token in listed_tokens(plain or []) if token not in tokens]
    draft.set_tokens("add_tokens", others, "add_tokens")
    draft.set_tokens("add_special_tokens", tokens, origin)
    draft.drop("resize_vocab", "the embedding has as many rows as there are tokens")


def _convert_data(draft: Draft, objective: str, *, documents: bool) -> None:
    folder = Path(draft.place(draft.take("dataset_dir", "data")))
    names = _names(draft.take("dataset", draft.theirs.get("train_dataset")))
    portions = _portions(draft, len(names))
    sources = [
        _source(draft, name, folder, portion, objective, documents=documents)
        for name, portion in zip(names, portions, strict=True)
    ]
    most = draft.take("max_samples")
    if most is not None and "data.train" in draft.given:
        reason = f"--data 'PATH[:{most}]' takes the first rows of a path"
        draft.leave_out("max_samples", most, reason)
    elif most is not None:
        sources = draft.first_rows(sources, int(most), "max_samples")
    if sources:
        draft.set_sources(sources, f"dataset: {', '.join(names)}")
    held_out, size = _names(draft.take("eval_dataset")), draft.take("val_size", 0)
    if held_out:
        entry = _description(draft, held_out[0], folder)
        held = [Source(_place(draft, entry, folder))]
        held = held if most is None else draft.first_rows(held, int(most), "max_samples")
        draft.set_held_out([held[0].path, *held_out[1:]], "eval_dataset")
    elif size:
        draft.set("data.eval_split", size if size < 1 else int(size), "val_size")
    if draft.take("use_dft_loss") and objective == "sft":
        draft.set("train.loss_type", "dft", "use_dft_loss")
    if draft.take("train_on_prompt"):
        draft.set("data.train_on", "all", "train_on_prompt")
    elif draft.take("mask_history"):
        draft.set("data.train_on", "last_turn", "mask_history")
    template = draft.take("template")
    if template in _TEMPLATES:
        draft.set("data.chat_template", _TEMPLATES[template], f"template: {template}")
    else:
        draft.set_template(template, "template")


def _convert_packing(draft: Draft, *, documents: bool) -> None:
    """Rows that share a sequence, which see each other there unless they are packed neatly."""
    packing, neat = draft.take("packing"), draft.take("neat_packing", False)
    if documents and packing is not False:
        draft.set("data.packing", True, "packing, or stage: pt")
        draft.set("data.truncation", "windows", "stage: pt")
        draft.notes.append(
            "stage: pt learns all texts as one, cut every cutoff_len tokens; here each text is cut "
            "by itself, and what is packed does not see each other"
        )
    elif packing or neat:
        draft.set("data.packing", True, "neat_packing" if neat else "packing")
        if not neat:
            draft.notes.append(PACKED_APART)


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(v).strip() for v in (value if isinstance(value, list) else str(value).split(","))]


def _portions(draft: Draft, count: int) -> list[dict[str, float]]:
    """What each data set gives: all, or a share of the rows."""
    strategy, shares = draft.take("mix_strategy", "concat"), draft.take("interleave_probs")
    if count < 2 or not str(strategy).startswith("interleave"):
        return [{}] * count
    if strategy == "interleave_over_without_replacement":
        draft.notes.append("interleave_over_without_replacement learns each row once, as all do")
        return [{}] * count
    weights = [1.0] * count
    if shares is not None:
        listed = shares if isinstance(shares, list) else str(shares).split(",")
        weights = [float(share) for share in listed]
    if len(weights) != count:
        raise draft.refuse("interleave_probs", shares, f"has {len(weights)} of {count} data sets")
    ends = "first_exhausted" if strategy == "interleave_under" else "all_exhausted"
    draft.set("data.stopping_strategy", ends, f"mix_strategy: {strategy}")
    return [{"weight": weight} for weight in weights]


def _source(
    draft: Draft,
    name: str,
    folder: Path,
    portion: Mapping[str, float],
    objective: str,
    *,
    documents: bool,
) -> Source:
    entry = _description(draft, name, folder)
    if entry.get("ranking") and objective == "sft":
        raise draft.refuse("dataset", name, "holds preferences, which stage: dpo learns from")
    if not portion and isinstance(count := entry.get("num_samples"), int):
        portion = {"rows": count}
    if objective != "sft":
        rows = preferences.rows_of_llama_factory(draft, entry, name, objective)
    else:
        rows = _rows(draft, entry, name, documents=documents)
    place = _place(draft, entry, folder)
    if not documents:
        _leave_columns_out(draft, entry, name, place)
    return Source(place, rows, portion)


def _rows(draft: Draft, entry: Mapping[str, Any], name: str, *, documents: bool) -> RowsOf:
    """How the rows of a data set are read, by its description."""
    columns, tags = _mapping(entry, "columns"), _mapping(entry, "tags")
    origin = f"dataset_info.json: {name}"
    more = {key: columns.get(key) for key in ("system", "tools")}
    if documents:
        return RowsOf.named("text", {"text": columns.get("prompt")}, origin)
    formatting = entry.get("formatting", "alpaca")
    if formatting is None:  # nothing describes them: their keys tell
        draft.set("data.apply_chat_template", True, AS_CHATS)
        return RowsOf()
    if formatting == "alpaca":
        draft.set("data.apply_chat_template", True, AS_CHATS)
        prompt = preferences.prompt_of_llama_factory(columns)
        row_format = "prompt/completion" if "prompt" in prompt else "instruction/output"
        answer = {row_format.partition("/")[2]: columns.get("response", "output")}
        return RowsOf.named(row_format, {**prompt, **answer, **more}, origin)
    _leave_tags_out(draft, tags)
    if formatting == "openai":
        draft.notes.append(
            "formatting: openai has LLaMA-Factory add `detailed thinking off` to system messages "
            "of rows without tools, and join several results of tools; here they stay as they are"
        )
    is_openai = formatting == "openai" or tags.get("role_tag") == "role"
    row_format = "messages" if is_openai else "conversations"
    column = columns.get("messages", "conversations")
    return RowsOf.named(row_format, {row_format: column, **more}, origin)


def _leave_columns_out(draft: Draft, entry: Mapping[str, Any], name: str, place: str) -> None:
    """Says which columns are read here alone, or there alone."""
    columns = _mapping(entry, "columns")
    for key in _MEDIA:
        if columns.get(key):
            draft.leave_out(f"{name}: {key}", columns[key], "text alone is learnt")
    if not is_file(Path(place)):
        return
    with open_file(place) as file:
        begin = file.read(_SCANNED)
    named = {"system": columns.get("system"), "tools": columns.get("tools")}
    prompt = preferences.prompt_of_llama_factory(columns)
    if entry.get("formatting", "alpaca") == "alpaca" and "prompt" not in prompt:
        named |= {"history": columns.get("history"), "input": columns.get("query", not columns)}
    for key, column in named.items():
        if not column and f'"{key}":'.encode() in begin:
            draft.notes.append(
                f"LLaMA-Factory does not read the column {key} of {name}, which dataset_info.json "
                "does not name; here it is read: remove it from the rows"
            )


def _leave_tags_out(draft: Draft, tags: Mapping[str, Any]) -> None:
    """Names the tags that call keys and roles of messages otherwise than rows here may."""
    keys = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    odd = any(tags.get(tag, roles[0]) not in roles for tag, roles in _ROLES.items())
    if odd or keys not in (("from", "value"), ("role", "content")):
        draft.leave_out("tags", ", ".join(map(str, tags.values())), "keys are role and content, or "
                        "from and value, roles user and assistant, or human and gpt: rename them"
                        )  # fmt: skip


def _description(draft: Draft, name: str, folder: Path) -> Mapping[str, Any]:
    """What dataset_info.json says of a data set."""
    path = folder / "dataset_info.json"
    if not is_file(path):
        draft.notes.append(
            f"{path.as_posix()} is not there, so {name!r} is taken for a file or name"
        )
        return {"hf_hub_url": draft.place(name), "formatting": None}
    entry = read_json_object(path, MODEL_JSON_BYTES, ConfigError).get(name)
    if not isinstance(entry, dict):
        raise ConfigError(f"{path} describes no data set {name!r}")
    return entry


def _place(draft: Draft, entry: Mapping[str, Any], folder: Path) -> str:
    if entry.get("hf_hub_url"):
        if (revision := entry.get("revision")) not in (None, "main"):
            draft.leave_out("revision", revision, f"of {entry['hf_hub_url']} the newest is read")
        part = entry.get("subset") or entry.get("folder")
        return draft.hub_place(str(entry["hf_hub_url"]), part, entry.get("split"))
    if entry.get("file_name"):
        return draft.hub_place(
            (folder / str(entry["file_name"])).as_posix(), None, entry.get("split")
        )
    raise draft.refuse("dataset", entry, "has neither file_name nor hf_hub_url")


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, Mapping) else {}


DIALECT = Dialect("LLaMA-Factory", _MARKS, _KEYS, _convert, _DEFAULTS)


# ---- its second form (``USE_V1``), whose parts are plugins with names ----------------------------

_MARKS_V1 = (
    "model_class peft_config kernel_config dist_config init_config quant_config train_dataset "
    "micro_batch_size global_batch_size batching_strategy optim_config lr_scheduler_config "
    "sample_backend custom_chat_template enable_activation_checkpointing"
)
_KEYS_V1 = (
    "model custom_chat_template cutoff_len learning_rate max_grad_norm max_steps seed "
    "enable_activation_checkpointing output_dir save_steps save_total_limit logging_steps"
)
_DEFAULTS_V1: Defaults = {
    "data": {"max_seq_length": 2048},
    "lora": {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"},
    "train": {"num_train_epochs": 3.0, "seed": 42, "gradient_checkpointing": True},
    "optim": {
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.01,
    },
    "log": {"logging_steps": 1},
    "output": {"save_total_limit": None},
}
_LORA_V1 = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
_FORMATS_V1 = {"alpaca": "instruction/output", "sharegpt": "conversations"}


def _convert_v1(draft: Draft) -> None:
    _convert_adapter_v1(draft)
    quant = _plugin_v1(draft, "quant_config")
    bits = quant.get("quantization_bit") if quant else None
    trl.set_quantization(draft, bits, "quant_config" if quant else "16 bits")
    _convert_data_v1(draft)
    rows, step = draft.take("micro_batch_size", 1), draft.take("global_batch_size")
    draft.set("train.per_device_train_batch_size", rows, "micro_batch_size")
    accumulation = max(int(step) // rows, 1) if step else 1
    origin = "global_batch_size / micro_batch_size" if step else "LLaMA-Factory's default"
    draft.set("train.gradient_accumulation_steps", accumulation, origin)
    draft.convert({"num_train_epochs": ("train.num_train_epochs", float)})
    trl.convert_precision(draft)
    if (strategy := draft.take("batching_strategy", "normal")) != "normal":
        draft.set("data.packing", True, f"nearest to batching_strategy: {strategy}")
    for key in ("optim_config", "lr_scheduler_config"):
        if plugin := _plugin_v1(draft, key):
            reason = "AdamW trains here, by the shapes of optim.lr_scheduler_type"
            draft.leave_out(key, plugin.get("name"), reason)


def _convert_adapter_v1(draft: Draft) -> None:
    adapter = _plugin_v1(draft, "peft_config")
    if adapter.get("name", "lora") != "lora" or not adapter:
        kind = adapter.get("name", "full")
        draft.notes.append(f"peft_config: {kind} trains other weights; a LoRA adapter is made")
    draft.convert({key: f"lora.{key}" for key in _LORA_V1}, adapter, "peft_config.")
    targets = adapter.get("target_modules", "all")
    modules = "all-linear" if targets == "all" else targets
    draft.set("lora.target_modules", modules, f"peft_config.target_modules: {targets}")
    begun = ("lora.init_from", lambda folder: draft.place(listed(folder)[0]))
    draft.convert({"adapter_name_or_path": begun}, adapter, "peft_config.")
    if saved := adapter.get("modules_to_save"):
        draft.set("lora.modules_to_save", saved, "peft_config.modules_to_save")


def _convert_data_v1(draft: Draft) -> None:
    if (train := draft.take("train_dataset")) is not None:
        entries = _descriptions_v1(draft, "train_dataset", str(train))
        sources = []
        for entry in entries:
            place, converter = _place_v1(draft, entry), str(entry.get("converter"))
            rows = RowsOf(_FORMATS_V1.get(converter), {}, f"converter: {converter}")
            sources.append(Source(place, rows, _portion_v1(draft, entry)))
        draft.set_sources(sources, f"train_dataset: {train}")
        formats = {source.rows.format for source in sources}
        if "instruction/output" in formats:
            draft.set("data.apply_chat_template", True, AS_CHATS)
        if None in formats:
            draft.notes.append(
                "parts of messages are read as {type: text, text: ...}, where LLaMA-Factory writes "
                "{type: text, value: ...}"
            )
    if (held_out := draft.take("eval_dataset")) is not None:
        first, *others = _descriptions_v1(draft, "eval_dataset", str(held_out))
        draft.set("data.eval", _place_v1(draft, first), "eval_dataset")
        for other in others:
            draft.leave_out("eval_dataset", other.get("path"), "one is measured on")


def _descriptions_v1(draft: Draft, key: str, path: str) -> list[Mapping[str, Any]]:
    """What a YAML of data sets says of each; another file is the data itself."""
    place = Path(draft.place(path))
    if place.suffix not in (".yaml", ".yml"):
        return [{"path": path}]
    entries = [dict(entry) for entry in read_yaml_file(place, aliases=True).values.values()]
    if any(entry.get("converter") == "pair" for entry in entries):
        raise draft.refuse(key, path, "holds preferences; only supervised rows are learnt")
    return list(entries)


def _portion_v1(draft: Draft, entry: Mapping[str, Any]) -> dict[str, float]:
    """The rows that a data set gives, where it says how many; its weight is a share of its own."""
    size, weight = entry.get("size"), entry.get("weight") or 1.0
    rows = size * weight if isinstance(size, int) else weight
    if size is None and weight > 1:
        draft.leave_out("weight", weight, "name the rows that it is to give, such as rows: 5000")
        return {}
    return {} if rows == 1 else {"rows": rows if rows < 1 else int(rows)}


def _place_v1(draft: Draft, entry: Mapping[str, Any]) -> str:
    return draft.hub_place(str(entry["path"]), None, entry.get("split"))


def _plugin_v1(draft: Draft, key: str) -> Mapping[str, Any]:
    value = draft.take(key, {})
    return value if isinstance(value, Mapping) else {"name": value}


DIALECT_V1 = Dialect("LLaMA-Factory (v1)", _MARKS_V1, _KEYS_V1, _convert_v1, _DEFAULTS_V1)
