"""Real tokenizers and templates against renderings, ids and masks recorded from transformers."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
from support.recorded import RECORDED, needs_recordings
from support.spans import assistant_spans

from qlora_wgpu.data import ChatTemplate, PromptFormat, Tokenizer, load_dataset
from qlora_wgpu.data.row_formats import tokens_in_spans

pytestmark = needs_recordings


def _cases():
    path = RECORDED / "oracles" / "chat_template_cases.json"
    if not path.is_file():
        return {"convs": {}, "cases": []}
    return json.loads(path.read_text())


CASES = _cases()


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_folder(RECORDED / name)


def template(name: str, **special: str) -> ChatTemplate:
    return ChatTemplate((RECORDED / "chat_templates" / f"{name}.jinja").read_text(), special)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    CASES["cases"],
    ids=[f"{c['template']}-{c['conv']}-{c['add_generation_prompt']}" for c in CASES["cases"]],
)
def test_recorded_chats(case) -> None:
    tok = tokenizer(f"tokenizers/{case['tokenizer']}")
    rendered = template(case["template"], **tok.special_tokens).render(
        CASES["convs"][case["conv"]], case["add_generation_prompt"]
    )
    assert rendered.text == case["text"]
    ids, offsets = tok.encode_with_offsets(rendered.text, add_special_tokens=False)
    assert ids == case["ids"]
    if "assistant_mask" in case:
        assert rendered.spans is not None
        mask = [int(inside) for inside in tokens_in_spans(offsets, rendered.spans)]
        assert mask == case["assistant_mask"]
    else:
        assert rendered.spans is None


@pytest.mark.parametrize("name", ["llama3", "gemma", "gemma3", "phi3", "qwen2_5"])
@pytest.mark.parametrize("conv", ["ua", "sua", "multi"])
def test_masks_without_marks_equal_those_of_the_marked_template(name, conv) -> None:
    if (name, conv) == ("gemma", "sua"):
        pytest.skip("gemma takes no system message")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    text, spans = assistant_spans(template(name, **special), CASES["convs"][conv], None, "</s>")
    marked_text, marked = assistant_spans(
        template(f"{name}_training", **special), CASES["convs"][conv]
    )
    assert text == marked_text
    chosen = {i for a, b in spans for i in range(a, b)}
    expected = {i for a, b in marked for i in range(a, b)}
    if name == "qwen2_5":  # its marks begin before the line break of the header
        expected -= {a for a, _ in marked}
    assert chosen == expected


def test_qwen3_leaves_the_empty_thought_to_the_last_turn() -> None:
    text, spans = assistant_spans(template("qwen3"), CASES["convs"]["multi"])
    assert [text[a:b] for a, b in spans] == [
        "B<|im_end|>\n",
        "<think>\n\n</think>\n\nE <|x|><|im_end|>\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "folder", "chat"),
    [
        ("gsm8k_test300.jsonl", "models/stories260K-hf", "chatml"),
        ("gsm8k_test300.jsonl", "tokenizers/qwen3", None),
        ("oasst_en_100tree.jsonl", "tokenizers/qwen3", None),
        ("oasst_en_100tree.jsonl", "tokenizers/tinyllama", None),
        ("rasbt_instruct_1100.jsonl", "tokenizers/tinyllama", None),
        ("mlx_wikisql_valid.jsonl", "tokenizers/smollm", None),
        ("tinystories_sample.txt", "models/TinyStories-656K", None),
    ],
)
def test_real_data_sets(file, folder, chat) -> None:
    tok = tokenizer(folder)
    dataset = load_dataset(RECORDED / "datasets" / file, tok, 4096, chat)
    assert dataset.counts.truncated == 0
    assert dataset.counts.without_labels == 0
    assert 0 < dataset.num_label_tokens < dataset.num_tokens
    assert dataset.max_token_id < tok.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tokenizers/qwen3", "tokenizers/tinyllama"])
def test_answers_of_real_chats_are_trained_on_whole(folder) -> None:
    tok = tokenizer(folder)
    path = RECORDED / "datasets" / "oasst_en_100tree.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    dataset = load_dataset(path, tok, 100_000)
    assert len(dataset) == len(rows)
    for example, row in zip(dataset, rows, strict=True):
        kept = [int(i) for i in example.labels if i != -100]
        said = [m["content"].strip() for m in row["messages"] if m["role"] == "assistant"]
        heard = [m["content"].strip() for m in row["messages"] if m["role"] != "assistant"]
        text = tok.decode(kept, skip_special_tokens=False)
        assert all(tok.decode(tok.encode(part, False)).strip() in text for part in said)
        assert not any(part in text for part in heard if len(part) > 60 and part not in said)


@pytest.mark.parametrize("name", ["tokenizers/qwen3", "tokenizers/smollm", "tokenizers/tinyllama",
                                  "models/TinyStories-656K", "models/stories260K-hf"])  # fmt: skip
def test_prompts_have_the_tokens_that_stand_before_an_answer(name) -> None:
    """Those of the text with a word behind it; where that word takes in its end, the text's own."""
    tok = tokenizer(name)
    written = PromptFormat("chat", tok, ChatTemplate("{{ messages[0].content }}", {}))
    for end in (
        "",
        " ",
        "\n",
        "\n\n",
        ": ",
        "A",
        "12",
        "é",
        "e\u0301",
        "<|im_start|>",
        "</s>",
        "▁",
    ):
        text = "First Citizen: " + end
        alone = tok.encode(text, False)
        ids, places = tok.encode_with_offsets(text + "A", False)
        before = [i for i, (_, last) in zip(ids, places, strict=True) if last <= len(text)]
        is_same = tok.decode(before, False) == tok.decode(alone, False)
        found = written.ids([{"role": "user", "content": text}])
        assert found == (before if is_same else alone), end
