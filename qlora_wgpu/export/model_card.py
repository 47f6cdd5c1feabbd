"""A model card for an adapter: what the hub shows of it, and how others use it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from qlora_wgpu.lora import AdapterConfig

_TAGS = ("lora", "qlora", "qlora-wgpu")


def model_card(
    name: str,
    base: str | None,
    adapter: AdapterConfig,
    figures: Mapping[str, str],
    prompt: str,
) -> str:
    """The text of README.md; its licence is left to the user.

    Args:
        name: owner/name of the adapter.
        base: The base's name on the hub, if it has one.
        adapter: How it was trained.
        figures: Rows of a table: what there is to tell of its run.
        prompt: A sentence on how prompts are written.
    """
    title = name.rpartition("/")[2]
    head = [f"base_model: {json.dumps(base)}"] if base else []
    head += ["library_name: peft", "pipeline_tag: text-generation", "tags:"]
    head += [f"  - {tag}" for tag in _TAGS]
    head += ["# license: the licence of the base model binds its adapters, too; name it here"]
    table = {**_adapter_rows(adapter), **figures}
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in table.items())
    of = f"of [{base}](https://huggingface.co/{base})" if base else "of a base model"
    about = f"A LoRA adapter {of}, trained with qlora-wgpu. {prompt}"
    return "\n".join(
        ["---", *head, "---", "", f"# {title}", "", about, "", "| | |", "|---|---|", rows, "",
         "## Use", "", _usage(name, base), ""]
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


def _usage(name: str, base: str | None) -> str:
    base = base or "the base model"
    return f"""\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "{name}")
```"""
