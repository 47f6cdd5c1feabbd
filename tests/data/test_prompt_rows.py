"""Rows with prompts alone: their tokens, what reward functions get, and what is refused."""

import json

import pytest
from e2e.tiny import write_tokenizer

from qlora_wgpu.data import Tokenizer, load_dataset, train_test_split
from qlora_wgpu.data.mixture import MixtureSource, interleave
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import DataError

TURN = [{"role": "user", "content": "ab"}]
ANSWER = {"role": "assistant", "content": "cd"}


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return Tokenizer.from_folder(tmp_path)


def how(**changes):
    return PreprocessConfig(**{"max_seq_length": 64, "objective": "grpo", **changes})


def loaded(rows, tokenizer, **changes):
    return load_dataset(rows, tokenizer, 64, how=how(**changes))


@pytest.mark.parametrize(
    ("row", "text", "columns"),
    [
        ({"prompt": "ab", "fact": 1}, "ab", {"fact": 1}),
        ({"prompt": TURN, "fact": None}, "<|user|>ab</s><|assistant|>", {"fact": None}),
        ({"messages": [*TURN, ANSWER]}, "<|user|>ab</s><|assistant|>", {"answer": "cd"}),
        ({"prompt": "ab", "completion": "cd"}, "ab", {"answer": "cd"}),
        ({"prompt": json.dumps(TURN)}, "<|user|>ab</s><|assistant|>", {}),
        (
            {"conversations": [{"from": "human", "value": "ab"}], "system": "z"},
            "<|system|>z</s><|user|>ab</s><|assistant|>",
            {"system": "z"},
        ),
    ],
)
def test_a_prompt_and_its_columns(tokenizer, row, text, columns):
    rows = loaded([row], tokenizer)
    ids = rows[0].input_ids.tolist()
    expected = tokenizer.encode(text, False)
    assert ids == expected and rows.num_label_tokens == 0
    assert rows.prompt_row(0).columns == columns


def test_other_columns_and_chat_turns(tokenizer):
    rows = loaded([{"q": "ab", "a": "x"}], tokenizer, columns={"prompt": "q"}, as_chats=True)
    assert rows.prompt_row(0).prompt == TURN and rows.prompt_row(0).columns == {"q": "ab", "a": "x"}


def test_long_prompts_are_dropped_and_counted(tokenizer):
    rows = loaded([{"prompt": "a" * 9}, {"prompt": "ab"}, {"prompt": " "}], tokenizer,
                  max_seq_length=8)  # fmt: skip
    assert len(rows) == 1 and rows.prompt_row(0).prompt == "ab"
    assert "1 of 3 prompts have more than data.max_seq_length = 8" in rows.warnings[0]
    with pytest.raises(DataError, match=r"data.truncation is error"):
        loaded([{"prompt": "a" * 9}], tokenizer, max_seq_length=8, truncation="error")
    with pytest.raises(DataError, match="only prompts of more than"):
        loaded([{"prompt": "a" * 9}], tokenizer, max_seq_length=8)


def test_columns_stay_with_their_prompts(tokenizer):
    rows = loaded([{"prompt": f"a{n}", "n": n} for n in range(9)], tokenizer)
    parts = train_test_split(rows, 3, 0)
    for part in (*parts, interleave(parts, ["a", "b"], [MixtureSource(rows=4)] * 2,
                                    "all_exhausted", 0)):  # fmt: skip
        for number in range(len(part)):
            row = part.prompt_row(number)
            assert row.prompt == f"a{row.columns['n']}"
            assert part[number].input_ids.tolist() == tokenizer.encode(row.prompt, False)


def test_a_column_changes_the_fingerprint(tokenizer):
    one, other = (loaded([{"prompt": "ab", "n": n}], tokenizer) for n in (1, 2))
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_files(tokenizer, tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_text({
        "jsonl": '{"prompt": "ab", "fact": "c"}\n', "json": '[{"prompt": "ab", "fact": "c"}]',
        "csv": "prompt,fact\nab,c\n",
    }[suffix])  # fmt: skip
    rows = load_dataset(path, tokenizer, 64, how=how(), cache=True)
    assert rows.prompt_row(0).columns == {"fact": "c"}


def test_what_is_refused(tokenizer, tmp_path):
    with pytest.raises(
        DataError, match="requires rows with a 'prompt' or with 'messages', got 'q'"
    ):
        loaded([{"q": "ab"}], tokenizer)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="requires rows with prompts"):
        load_dataset(tmp_path / "a.txt", tokenizer, 64, how=how())
