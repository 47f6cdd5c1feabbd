"""Ollama's Modelfile for a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.data.ollama.templates import ollama_template
from qlora_wgpu.data.prompts import PromptFormat

# generation_config.json's names, and Ollama's.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_WITHOUT = (
    "# Ollama knows a GGUF file's own chat template in part only, and this model's does more\n"
    "# than put texts around turns, or takes no system message: look at what the model reads\n"
    "# (OLLAMA_DEBUG=1)."
)


def modelfile(
    file: str,
    prompt: PromptFormat,
    generation: Mapping[str, Any],
    *,
    adapter_of: str | None = None,
) -> str:
    """The text of a Modelfile, for ``ollama create NAME -f Modelfile``."""
    named = [f"FROM ./{file}"]
    if adapter_of is not None:
        named = [f"FROM {adapter_of}", f"ADAPTER ./{file}"]
    template = ollama_template(prompt)
    lines = [*named, _WITHOUT if template is None else f"TEMPLATE {_quoted(template)}"]
    lines += [f"PARAMETER stop {_quoted(text)}" for text in stop_texts(prompt)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(generation).items()]
    return "\n".join(lines) + "\n"


def stop_texts(prompt: PromptFormat) -> list[str]:
    """What ends an answer: the tokens that do, as text, and the text that does."""
    tokenizer = prompt.tokenizer
    tokens = [
        tokenizer.decode([token], skip_special_tokens=False) for token in sorted(prompt.stop_ids)
    ]
    return [text for text in dict.fromkeys([*tokens, prompt.stop_text]) if text.strip()]


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """How the model's own settings have tokens chosen; the likeliest where they do not sample."""
    if generation.get("do_sample") is False:
        return {"temperature": 0}
    values: dict[str, Any] = {name: generation.get(key) for key, name in _PARAMETERS.items()}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def _quoted(text: str) -> str:
    return f'"""{text}"""'
