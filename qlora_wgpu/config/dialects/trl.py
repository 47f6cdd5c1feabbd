"""The YAML of ``trl sft``, ``dpo`` and ``kto``: the keys of their arguments, model and script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.config.dialects import hugging_face, preferences
from qlora_wgpu.config.dialects.draft import (
    PACKED_APART,
    Defaults,
    Dialect,
    Draft,
    RowsOf,
    Source,
    listed,
)
from qlora_wgpu.config.names import reason_for

_MARKS = (
    "model_name_or_path dataset_name use_peft lora_r lora_target_modules load_in_4bit "
    "dataset_text_field dataset_train_split assistant_only_loss completion_only_loss "
    "max_length per_device_train_batch_size dataset_config dataset_mixer dataset_splits "
    "dataset_configs dataset_mixture lora_modules_to_save lora_task_type"
)
_KEYS = (
    f"{hugging_face.KEYS} "
    "model_name_or_path lora_r lora_alpha lora_target_modules max_length max_seq_length packing "
    "router_aux_loss_coef use_bnb_nested_quant bnb_4bit_use_double_quant"
)
_NOT_TAKEN = {
    "bnb_4bit_quant_type": "4 bits are always nf4",
    "bnb_4bit_compute_dtype": "train.compute_dtype is bfloat16 unless it says float32",
    "bnb_4bit_quant_storage": "weights are stored as WebGPU reads them",
    "torch_dtype": "weights are read in the type of their files",
    "dtype": "weights are read in the type of their files",
}
_ENTRY = "path id name config data_files data_dir split fraction weight"
_DEFAULTS: Defaults = {
    **hugging_face.DEFAULTS,
    "lora": {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": hugging_face.PEFT_TARGETS,
    },
    "quant": {"double_quant": False},
    "data": {"max_seq_length": 1024},
    "optim": {**hugging_face.DEFAULTS["optim"], "learning_rate": 2e-5},
    "log": {"logging_steps": 10},
}


def _convert(draft: Draft) -> None:
    objective = preferences.convert_trl(draft)
    if not draft.take("use_peft", True):
        draft.notes.append("TRL trains every weight of the model here; a LoRA adapter is made")
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    bits = 4 if four else 8 if eight else None
    hugging_face.set_quantization(draft, bits, "load_in_4bit" if four else f"{bits or 16} bits")
    draft.convert(_NOT_TAKEN)
    modules = draft.theirs.get("lora_target_modules")
    if modules == ["all-linear"]:
        draft.theirs["lora_target_modules"] = "all-linear"
    elif isinstance(modules, str) and modules != "all-linear":
        draft.theirs["lora_target_modules"] = modules.replace(",", " ").split()
    _convert_data(draft)
    _convert_learnt(draft, objective)
    preferences.settle_rows(draft, objective)
    hugging_face.convert_evaluation(draft, _DEFAULTS["log"]["logging_steps"])
    hugging_face.convert_training(draft)


def _convert_data(draft: Draft) -> None:
    name, config = draft.take("dataset_name"), draft.take("dataset_config")
    train, test = draft.take("dataset_train_split"), draft.take("dataset_test_split", "test")
    nested = draft.take("dataset_mixture", {})  # of the alignment handbook
    given = draft.take("datasets", nested.get("datasets", []))
    mixture = [entry for entry in given if isinstance(entry, Mapping)]
    if mixture:
        _mix(draft, mixture, train)
        name = None
        if (size := draft.take("test_split_size", nested.get("test_split_size"))) is not None:
            draft.set("data.eval_split", size, "test_split_size")
    mixer, splits = draft.take("dataset_mixer", {}), draft.take("dataset_splits", [])
    if mixer and name is None and not mixture:  # as in the alignment handbook
        _convert_mixer(draft, mixer, splits, config)
    elif name is not None:
        draft.set("data.train", draft.hub_place(str(name), config, train), "dataset_name")
        _convert_held_out(draft, str(name), config, test)
    if draft.theirs.get("truncation_mode") in ("keep_start", "keep_end"):
        draft.convert({"truncation_mode": "data.truncation"})
    if draft.theirs.get("packing") and draft.theirs.get("packing_strategy") == "wrapped":
        draft.notes.append(f"packing_strategy: wrapped cuts rows where a sequence is full; "
                           f"{PACKED_APART}, and none is cut")  # fmt: skip
    if (text := draft.take("dataset_text_field", "text")) != "text":
        draft.set_rows(RowsOf.named("text", {"text": text}, "dataset_text_field"))
    for key in ("chat_template_path", "chat_template"):
        draft.set_template(draft.take(key), key)


def _convert_mixer(draft: Draft, mixer: Mapping[str, float], splits: Any, config: Any) -> None:
    """The alignment handbook's data sets, each with the share of its rows that is taken."""
    configs = listed(draft.take("dataset_configs", [config] * len(mixer)))
    if len(configs) != len(mixer):
        raise draft.refuse("dataset_configs", configs, f"has not {len(mixer)} as dataset_mixer")
    splits = splits or ["train", "test"]
    learnt = [split for split in splits if "train" in split]
    tests = [split for split in splits if "train" not in split]
    if not learnt:
        raise draft.refuse("dataset_splits", splits, "names no split to train on")
    sources = []
    for (path, share), subset in zip(mixer.items(), configs, strict=True):
        for split in learnt:
            rows = f"[:{100 * share:g}%]" if 0 < share < 1 and (100 * share).is_integer() else ""
            place = draft.hub_place(str(path), subset, split + rows)
            portion = {"rows": share} if 0 < share < 1 and not rows else {}
            sources.append(Source(place, portion=portion))
    draft.set_sources(sources, "dataset_mixer")
    if tests:
        _convert_held_out(draft, str(next(iter(mixer))), configs[0], tests[0])
        others = [*tests[1:], *list(mixer)[1:]]
        if others and "data.eval" in draft.taken:
            draft.leave_out("dataset_splits", ", ".join(others), "data.eval names one data set")
    if (text := draft.take("text_column")) is not None:
        draft.set_rows(RowsOf.named("text", {"text": text}, "text_column"))


def _convert_learnt(draft: Draft, objective: str) -> None:
    """Which tokens of a supervised row are learnt."""
    assistant, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if assistant:
        draft.set("data.train_on", "assistant", "assistant_only_loss")
    elif completion is False:
        draft.set("data.train_on", "all", "completion_only_loss: false")
    elif completion is None and objective == "sft":
        draft.notes.append(
            "of chats TRL learns every token unless assistant_only_loss is set, this program the "
            "assistant's turns: `data.train_on: all` does as TRL"
        )


def _mix(draft: Draft, entries: Sequence[Mapping[str, Any]], split: Any) -> None:
    """Several data sets, of which all rows are taken, or as many as their shares say."""
    sources = []
    for number, entry in enumerate(entries):
        key = f"datasets[{number}]"
        name, subset = entry.get("path", entry.get("id")), entry.get("name", entry.get("config"))
        files, fraction = entry.get("data_files"), entry.get("fraction")
        portion: dict[str, float] = {}
        if fraction is not None:
            portion = {"weight": fraction}
        elif (share := entry.get("weight", 1)) != 1:  # the handbook's, of the data set's own rows
            portion = {"rows": share}
        listed = files if isinstance(files, list) else [files] if isinstance(files, str) else []
        places = draft.file_places(listed, entry.get("split"), key) if listed else []
        if files and not listed:
            draft.leave_out(f"{key}.data_files", files, "name the files")
        if folder := entry.get("data_dir"):
            draft.leave_out(f"{key}.data_dir", folder, "name the folder, or the files")
        if portion and len(places) > 1:
            draft.leave_out(key, portion, "of several files all rows are taken: set it by hand")
            portion = {}
        places = places or draft.hub_places(str(name), subset, entry.get("split", split))
        for other, value in entry.items():
            if other not in _ENTRY.split() and value is not None:
                reason = "the columns of a format are read, as data.format and data.columns say"
                if other != "columns":
                    reason = reason_for(other) or "no counterpart here"
                draft.leave_out(f"{key}.{other}", value, reason)
        sources += [Source(place, portion=portion) for place in places]
    draft.set_sources(sources, "datasets")


def _convert_held_out(draft: Draft, name: str, config: Any, split: Any) -> None:
    strategy = draft.theirs.get("eval_strategy", draft.theirs.get("evaluation_strategy", "no"))
    if strategy in ("no", False):
        return
    if draft.is_file(name):
        draft.leave_out("eval_strategy", strategy, "a file has no test split: data.eval names "
                        "another, data.eval_split holds rows of it out")  # fmt: skip
    else:
        draft.set("data.eval", draft.hub_place(name, config, split), "dataset_test_split")


DIALECT = Dialect("TRL", _MARKS, _KEYS, _convert, _DEFAULTS)
