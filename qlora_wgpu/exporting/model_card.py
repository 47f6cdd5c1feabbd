"""A model card for the Hub: how a model was trained, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from qlora_wgpu.lora import AdapterConfig

_TAGS = ("lora", "qlora", "qlora-wgpu")
CardKind = Literal["adapter", "merged", "gguf"]
_LIBRARIES: dict[CardKind, str] = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_WHAT: dict[CardKind, str] = {
    "adapter": "A LoRA adapter of",
    "merged": "A LoRA adapter, merged into",
    "gguf": "A LoRA adapter, merged into and stored as GGUF with",
}


def model_card(
    name: str,
    base: str | None,
    adapter: AdapterConfig,
    results: Mapping[str, str],
    prompt: str,
    *,
    kind: CardKind = "adapter",
    file: str = "model.gguf",
    plot: str | None = None,
    labels: Sequence[str] = (),
) -> str:
    """The text of README.md, without a licence; ``labels`` are the names of a scored adapter."""
    title = name.rpartition("/")[2]
    head = [f"base_model: {json.dumps(base)}"] if base else []
    if base and kind != "adapter":
        head.append("base_model_relation: finetune")
    task = "text-classification" if adapter.task_type == "SEQ_CLS" else "text-generation"
    head += [f"library_name: {_LIBRARIES[kind]}", f"pipeline_tag: {task}", "tags:"]
    head += [f"  - {tag}" for tag in _TAGS]
    head += ["# license: add one here; the base model's licence also applies to adapters"]
    table = {**_adapter_rows(adapter), **results}
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in table.items())
    of = f"[{base}](https://huggingface.co/{base})" if base else "a base model"
    about = f"{_WHAT[kind]} {of}, trained with qlora-wgpu. {prompt}"
    picture = [f"![Loss over the steps of the run]({plot})", ""] if plot else []
    return "\n".join(
        ["---", *head, "---", "", f"# {title}", "", about, "", "| | |", "|---|---|", rows, "",
         *picture, "## Use", "", _usage(name, base, adapter, kind, file, labels), ""]
    )  # fmt: skip


def _adapter_rows(adapter: AdapterConfig) -> dict[str, str]:
    targets = adapter.target_modules
    kind = "DoRA" if adapter.use_dora else "rsLoRA" if adapter.use_rslora else "LoRA"
    return {
        "adapter": f"{kind}, rank {adapter.r}, alpha {adapter.lora_alpha}",
        "target modules": targets if isinstance(targets, str) else ", ".join(targets),
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _usage(
    name: str, base: str | None, adapter: AdapterConfig, kind: CardKind, file: str,
    labels: Sequence[str],
) -> str:  # fmt: skip
    if kind == "gguf":
        return f"""\
```
llama-cli --hf-repo {name} --hf-file {file}
ollama run hf.co/{name}
```"""
    if adapter.task_type == "SEQ_CLS":
        return _usage_of_scores(name, kind, labels)
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")']
    if kind == "merged":
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    else:
        lines = ["from peft import PeftModel", *lines]
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{base or "the base model"}")']
        lines += [f'model = PeftModel.from_pretrained(model, "{name}")']
    return "\n".join(["```python", *lines, "```"])


def _usage_of_scores(name: str, kind: CardKind, labels: Sequence[str]) -> str:
    lines = ["from transformers import AutoModelForSequenceClassification, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")']
    if kind == "adapter":  # PEFT keeps no names
        lines += [f"labels = {json.dumps(list(labels), ensure_ascii=False)}"]
        lines += ["model = AutoModelForSequenceClassification.from_pretrained("]
        lines += [f'    "{name}", id2label=dict(enumerate(labels)),']
        lines += ["    label2id={label: number for number, label in enumerate(labels)},", ")"]
    else:
        lines += [f'model = AutoModelForSequenceClassification.from_pretrained("{name}")']
    return "\n".join(["```python", *lines, "```"])
