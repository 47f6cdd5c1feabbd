"""Rows of tool calls in LLaMA-Factory's form of ShareGPT, by templates of models."""

from __future__ import annotations

import json

import pytest
from support.recorded import RECORDED, needs_recordings
from support.tiny_tokenizer import trained_text

from qlora_wgpu.data import PreprocessConfig, Tokenizer
from qlora_wgpu.data.dataset import encode_rows

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOLS = [
    [{"name": "weather", "description": "Tells it", "parameters": PARAMETERS}],
    [{"name": "weather", "description": "", "parameters": {}}, {"name": "other"}],
    [],
]
CALLS = [
    {"name": "weather", "arguments": {"town": "Zürich"}},
    {"name": "weather", "arguments": {}},
    {"name": "weather", "arguments": {"days": [1, 2.5, None], "of": {"a": True}}},
    {"name": "weather", "arguments": '{"town": "Rome"}'},
    [{"name": "weather", "arguments": {"town": town}} for town in ("Rome", "Bern")],
]
RESULTS = ['{"sky": "RESULT"}', "RESULT", '["RESULT", 1]', "RESULT: 5 < 6 & more"]


def glaive_row(number):
    """A row as LLaMA-Factory's glaive_toolcall has them: calls and tools are JSON in a text."""
    calls = [json.dumps(CALLS[(number + i) % len(CALLS)], ensure_ascii=False) for i in range(2)]
    turns = [("human", "Hello"), ("gpt", "ANSWER 1")] if number % 3 == 0 else []
    for call in calls[: number % 3]:
        result = RESULTS[number % len(RESULTS)]
        turns += [("human", "And now?"), ("function_call", call), ("observation", result),
                  ("gpt", "ANSWER 2")]  # fmt: skip
    return {
        "conversations": [{"from": name, "value": value} for name, value in turns],
        "tools": json.dumps(TOOLS[number % len(TOOLS)] if number % 3 == 0 else TOOLS[number % 2]),
    }


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3_1"])
def test_rows_of_tool_calls_as_llama_factory_has_them(template):
    tokenizer = Tokenizer.from_folder(RECORDED / "tokenizers" / "qwen3")
    rows = [glaive_row(number) for number in range(50)]
    how = PreprocessConfig(4096, str(RECORDED / "chat_templates" / f"{template}.jinja"))
    if template == "llama3_1":  # it writes one call alone, as it says
        rows = [row for row in rows if '"value": "[{' not in json.dumps(row)]
    examples = encode_rows(rows, tokenizer, how)
    assert len(examples) == len(rows) >= 30
    for row, example in zip(rows, examples, strict=True):
        said = trained_text(tokenizer, example.input_ids.tolist(), example.labels.tolist())
        turns = [turn["from"] for turn in row["conversations"]]
        assert said.count("ANSWER") == turns.count("gpt") and "RESULT" not in said
        assert ("weather" in said) == ("function_call" in turns)
        assert ("RESULT" in tokenizer.decode(example.input_ids.tolist())) == (
            "observation" in turns
        )
