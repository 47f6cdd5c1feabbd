"""Tokenizers that put an end token behind every text: rows end so, and prompts do not."""

import pytest
from support.tiny_tokenizer import tiny_backend
from tokenizers import processors

from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.messages import alpaca_prompt
from qlora_wgpu.data.row_formats import RowEncoder

ALPACA = alpaca_prompt("Say it.", "", "", [])


@pytest.fixture(scope="module")
def tokenizer():
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, None)


@pytest.mark.parametrize(
    ("row", "kind", "said", "prompt"),
    [
        ({"text": "once upon"}, "text", "once", "once"),
        ({"text": "<s>once upon"}, "text", "<s>once", "<s>once"),
        ({"prompt": "once", "completion": " upon"}, "prompt/completion", "once", "once"),
        ({"instruction": "Say it.", "output": "It."}, "instruction/output", "Say it.", ALPACA),
    ],
)
def test_a_prompt_is_what_rows_begin_with(tokenizer, row, kind, said, prompt):
    row_ids = RowEncoder(tokenizer, None).encode(row, kind).ids
    ids = PromptFormat.of_rows(kind, tokenizer, None).ids([{"role": "user", "content": said}])
    assert row_ids[-1] == 2 and row_ids[: len(ids)] == ids
    assert tokenizer.decode(ids, False) == f"<s>{prompt.removeprefix('<s>')}"


def test_a_prompt_that_is_empty(tokenizer):
    assert PromptFormat.text(tokenizer).ids([{"role": "user", "content": ""}]) == [1]
