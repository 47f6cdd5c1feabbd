"""LLaMA-Factory's YAML or JSON, in both of its formats, with dataset_info.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects import preferences, trl
from qlora_wgpu.config.dialects.draft import (
    ONE_EVAL,
    PACKED_ATTENTION,
    Defaults,
    Dialect,
    Draft,
    RowSpec,
    Source,
    listed,
    listed_tokens,
    mapping_of,
    words_of,
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
_AS_CHATS = "as LLaMA-Factory does for instructions"
_MEDIA = ("images", "videos", "audios")
_SCANNED = 1 << 16  # bytes of a file that are searched for its rows' keys
_TEMPLATES = {
    "default": "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ 'System: ' + message['content'] + eos_token + '\\n' }}{% elif message['role'] == 'user' %}"
    "{{ 'Human: ' + message['content'] + eos_token + '\\nAssistant:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}"
}
"""Templates that no tokenizer has, as Jinja."""
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
        draft.note(f"finetuning_type: {kind} is not supported: a LoRA adapter is trained")
    bits = draft.take("quantization_bit")
    trl.set_quantization(draft, bits, "quantization_bit" if bits else "16 bits")
    draft.drop_key("quantization_type", "4-bit quantization is always nf4")
    _convert_lora(draft)
    _convert_tokens(draft)
    _convert_data(draft, objective, documents=stage == "pt")
    preferences.settle_rows(draft, objective)
    _convert_packing(draft, documents=stage == "pt")
    trl.convert_evaluation(draft, _DEFAULTS["log"]["logging_steps"])
    trl.convert_training(draft)
    draft.take("gradient_checkpointing")
    is_enabled = not draft.take("disable_gradient_checkpointing", False)
    draft.set("train.gradient_checkpointing", is_enabled, "disable_gradient_checkpointing")


def _convert_lora(draft: Draft) -> None:
    target = draft.take("lora_target", "all")
    names = words_of(target)
    modules = "all-linear" if names == ["all"] else names
    draft.set("lora.target_modules", modules, f"lora_target: {target}")
    rank = draft.remaining.get("lora_rank") or _DEFAULTS["lora"]["r"]
    if draft.remaining.get("lora_alpha") is None:
        draft.set("lora.lora_alpha", 2 * rank, "LLaMA-Factory's default, twice the rank")
    is_pissa, iterations = draft.take("pissa_init", False), draft.take("pissa_iter", 16)
    if is_pissa:
        kind = "pissa" if iterations < 0 else f"pissa_niter_{iterations}"
        draft.set("lora.init_lora_weights", kind, "pissa_init")
    draft.convert({
        "pissa_convert": "PiSSA adapters are always saved as plain LoRA",
        "adapter_name_or_path": ("lora.init_from", draft.resolve),
    })  # fmt: skip


def _convert_tokens(draft: Draft) -> None:
    plain, special = draft.take("add_tokens"), draft.take("add_special_tokens")
    origin = "add_special_tokens" if special is not None else "new_special_tokens"
    if special is None:
        special = draft.take("new_special_tokens")
    draft.set_tokens(
        ("add_tokens", listed_tokens(plain or [])), (origin, listed_tokens(special or []))
    )
    draft.drop_key("resize_vocab", "the embedding always has a row for every token")


def _convert_data(draft: Draft, objective: str, *, documents: bool) -> None:
    folder = Path(draft.resolve(draft.take("dataset_dir", "data")))
    names = _names(draft.take("dataset", draft.remaining.get("train_dataset")))
    portions = _portions(draft, len(names))
    sources = [
        _source(draft, name, folder, portion, objective, documents=documents)
        for name, portion in zip(names, portions, strict=True)
    ]
    count = draft.take("max_samples")
    if count is not None and "data.train" in draft.overrides:
        draft.drop("max_samples", count, f"use a slice, --data 'PATH[:{count}]'")
    elif count is not None:
        sources = draft.limit_rows(sources, int(count), "max_samples")
    if sources:
        draft.set_sources(sources, f"dataset: {', '.join(names)}")
    held_out, size = _names(draft.take("eval_dataset")), draft.take("val_size", 0)
    if held_out:
        entry = _description(draft, held_out[0], folder)
        first = [Source(_path(draft, entry, folder))]
        first = first if count is None else draft.limit_rows(first, int(count), "max_samples")
        draft.set_eval([first[0].path, *held_out[1:]], "eval_dataset")
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
        draft.set_chat_template(template, "template")


def _convert_packing(draft: Draft, *, documents: bool) -> None:
    packing, neat = draft.take("packing"), draft.take("neat_packing", False)
    if documents and packing is not False:
        draft.set("data.packing", True, "packing, or stage: pt")
        draft.set("data.truncation", "windows", "stage: pt")
        draft.note("stage: pt concatenates all text and splits it every cutoff_len tokens; "
                           f"here each text is split separately, and {PACKED_ATTENTION}"
                           )  # fmt: skip
    elif packing or neat:
        draft.set("data.packing", True, "neat_packing" if neat else "packing")
        if not neat:
            draft.note(PACKED_ATTENTION)


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(v).strip() for v in (value if isinstance(value, list) else str(value).split(","))]


def _portions(draft: Draft, count: int) -> list[dict[str, float]]:
    """The weight of each data set, if they are interleaved."""
    strategy, shares = draft.take("mix_strategy", "concat"), draft.take("interleave_probs")
    if count < 2 or not str(strategy).startswith("interleave"):
        return [{}] * count
    if strategy == "interleave_over_without_replacement":
        draft.note("interleave_over_without_replacement: every row is used once per epoch")
        return [{}] * count
    weights = [1.0] * count
    if shares is not None:
        listed = shares if isinstance(shares, list) else str(shares).split(",")
        weights = [float(share) for share in listed]
    if len(weights) != count:
        problem = f"must have {count} values, got {len(weights)}"
        raise draft.refuse("interleave_probs", shares, problem)
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
        raise draft.refuse("dataset", name, "contains preferences, which require stage: dpo")
    if not portion and isinstance(count := entry.get("num_samples"), int):
        portion = {"rows": count}
    if objective != "sft":
        rows = preferences.rows_of_llama_factory(draft, entry, name, objective)
    else:
        rows = _rows(draft, entry, name, documents=documents)
    path = _path(draft, entry, folder)
    if not documents:
        _note_columns(draft, entry, name, path)
    return Source(path, rows, portion)


def _rows(draft: Draft, entry: Mapping[str, Any], name: str, *, documents: bool) -> RowSpec:
    """The rows of a data set, by its description."""
    columns, tags = mapping_of(entry.get("columns")), mapping_of(entry.get("tags"))
    origin = f"dataset_info.json: {name}"
    more = {key: columns.get(key) for key in ("system", "tools")}
    if documents:
        return RowSpec.named("text", {"text": columns.get("prompt")}, origin)
    formatting = entry.get("formatting", "alpaca")
    if formatting is None:  # there is no description
        draft.set("data.apply_chat_template", True, _AS_CHATS)
        return RowSpec()
    if formatting == "alpaca":
        draft.set("data.apply_chat_template", True, _AS_CHATS)
        prompt = preferences.prompt_of_llama_factory(columns)
        row_format = "prompt/completion" if "prompt" in prompt else "instruction/output"
        answer = {row_format.partition("/")[2]: columns.get("response", "output")}
        return RowSpec.named(row_format, {**prompt, **answer, **more}, origin)
    _check_tags(draft, tags)
    if formatting == "openai":
        draft.note(
            "with formatting: openai, LLaMA-Factory adds `detailed thinking off` to system "
            "messages of rows without tools and joins tool results; here they are unchanged"
        )
    is_openai = formatting == "openai" or tags.get("role_tag") == "role"
    row_format = "messages" if is_openai else "conversations"
    column = columns.get("messages", "conversations")
    return RowSpec.named(row_format, {row_format: column, **more}, origin)


def _note_columns(draft: Draft, entry: Mapping[str, Any], name: str, path: str) -> None:
    """Notes the columns that only one of both programs reads."""
    columns = mapping_of(entry.get("columns"))
    for key in _MEDIA:
        if columns.get(key):
            draft.drop(f"{name}: {key}", columns[key], "only text is trained on")
    if not is_file(Path(path)):
        return
    with open_file(path) as file:
        start = file.read(_SCANNED)
    named = {"system": columns.get("system"), "tools": columns.get("tools")}
    prompt = preferences.prompt_of_llama_factory(columns)
    if entry.get("formatting", "alpaca") == "alpaca" and "prompt" not in prompt:
        named |= {"history": columns.get("history"), "input": columns.get("query", not columns)}
    for key, column in named.items():
        if not column and f'"{key}":'.encode() in start:
            draft.note(
                f"LLaMA-Factory ignores the column {key} of {name}, which dataset_info.json does "
                "not name; here it is read, unless you remove it from the rows"
            )


def _check_tags(draft: Draft, tags: Mapping[str, Any]) -> None:
    keys = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    odd = any(tags.get(tag, roles[0]) not in roles for tag, roles in _ROLES.items())
    if odd or keys not in (("from", "value"), ("role", "content")):
        draft.drop("tags", ", ".join(map(str, tags.values())), "rename keys to role and content "
                   "(or from and value), and roles to user and assistant (or human and gpt)"
                   )  # fmt: skip


def _description(draft: Draft, name: str, folder: Path) -> Mapping[str, Any]:
    """The entry of a data set in dataset_info.json."""
    path = folder / "dataset_info.json"
    if not is_file(path):
        draft.note(f"{path.as_posix()} does not exist: {name!r} is used as a file or Hub name")
        return {"hf_hub_url": draft.resolve(name), "formatting": None}
    entry = read_json_object(path, MODEL_JSON_BYTES, ConfigError).get(name)
    if not isinstance(entry, dict):
        raise ConfigError(f"data set {name!r} is missing from {path}")
    return entry


def _path(draft: Draft, entry: Mapping[str, Any], folder: Path) -> str:
    if entry.get("hf_hub_url"):
        if (revision := entry.get("revision")) not in (None, "main"):
            draft.drop("revision", revision, f"the latest of {entry['hf_hub_url']} is used")
        part = entry.get("subset") or entry.get("folder")
        return draft.dataset_path(str(entry["hf_hub_url"]), part, entry.get("split"))
    if entry.get("file_name"):
        file = (folder / str(entry["file_name"])).as_posix()
        return draft.dataset_path(file, None, entry.get("split"))
    raise draft.refuse("dataset", entry, "requires file_name or hf_hub_url")


DIALECT = Dialect("LLaMA-Factory", _MARKS, _KEYS, _convert, _DEFAULTS)


# ---- its second format (``USE_V1``), with named plugins ------------------------------------------

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
            draft.drop(key, plugin.get("name"), "use optim.name and optim.lr_scheduler_type")


def _convert_adapter_v1(draft: Draft) -> None:
    adapter = _plugin_v1(draft, "peft_config")
    if adapter.get("name", "lora") != "lora" or not adapter:
        kind = adapter.get("name", "full")
        draft.note(f"peft_config: {kind} is not supported: a LoRA adapter is trained")
    draft.convert({key: f"lora.{key}" for key in _LORA_V1}, adapter, "peft_config.")
    targets = adapter.get("target_modules", "all")
    modules = "all-linear" if targets == "all" else targets
    draft.set("lora.target_modules", modules, f"peft_config.target_modules: {targets}")
    init_from = ("lora.init_from", lambda folder: draft.resolve(listed(folder)[0]))
    draft.convert({"adapter_name_or_path": init_from}, adapter, "peft_config.")
    if saved := adapter.get("modules_to_save"):
        draft.set("lora.modules_to_save", saved, "peft_config.modules_to_save")


def _convert_data_v1(draft: Draft) -> None:
    if (train := draft.take("train_dataset")) is not None:
        sources = []
        for entry in _descriptions_v1(draft, "train_dataset", str(train)):
            converter = str(entry.get("converter"))
            rows = RowSpec(_FORMATS_V1.get(converter), {}, f"converter: {converter}")
            sources.append(Source(_path_v1(draft, entry), rows, _portion_v1(draft, entry)))
        draft.set_sources(sources, f"train_dataset: {train}")
        formats = {source.rows.format for source in sources}
        if "instruction/output" in formats:
            draft.set("data.apply_chat_template", True, _AS_CHATS)
        if None in formats:
            draft.note("parts of messages must be {type: text, text: ...}, not {type: text, value: "
                       "...} as in LLaMA-Factory")  # fmt: skip
    if (held_out := draft.take("eval_dataset")) is not None:
        first, *others = _descriptions_v1(draft, "eval_dataset", str(held_out))
        draft.set("data.eval", _path_v1(draft, first), "eval_dataset")
        for other in others:
            draft.drop("eval_dataset", other.get("path"), ONE_EVAL)


def _descriptions_v1(draft: Draft, key: str, path: str) -> list[Mapping[str, Any]]:
    """The entries of a YAML file of data sets; any other file is the data itself."""
    file = Path(draft.resolve(path))
    if file.suffix not in (".yaml", ".yml"):
        return [{"path": path}]
    entries = [dict(entry) for entry in read_yaml_file(file, aliases=True).values.values()]
    if any(entry.get("converter") == "pair" for entry in entries):
        raise draft.refuse(key, path, "contains preferences, which are not supported here")
    return list(entries)


def _portion_v1(draft: Draft, entry: Mapping[str, Any]) -> dict[str, float]:
    """A data set's number of rows or fraction, from its size and weight."""
    size, weight = entry.get("size"), entry.get("weight") or 1.0
    rows = size * weight if isinstance(size, int) else weight
    if size is None and weight > 1:
        draft.drop("weight", weight, "set a number of rows, such as rows: 5000")
        return {}
    return {} if rows == 1 else {"rows": rows if rows < 1 else int(rows)}


def _path_v1(draft: Draft, entry: Mapping[str, Any]) -> str:
    return draft.dataset_path(str(entry["path"]), None, entry.get("split"))


def _plugin_v1(draft: Draft, key: str) -> Mapping[str, Any]:
    value = draft.take(key, {})
    return value if isinstance(value, Mapping) else {"name": value}


DIALECT_V1 = Dialect("LLaMA-Factory (v1)", _MARKS_V1, _KEYS_V1, _convert_v1, _DEFAULTS_V1)
