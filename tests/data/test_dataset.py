"""Whole data sets: windows, truncation, what is left out, and the counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import Dataset, Example, load_dataset
from qlora_wgpu.errors import DataError, TokenizerError


def write(tmp_path, rows, name="train.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(dataset, tokenizer):
    return [trained_text(tokenizer, e.input_ids, e.labels) for e in dataset]


def test_rows_become_examples(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    path = write(
        tmp_path, [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "de"}]
    )
    dataset = load_dataset(str(path), tokenizer, 64)
    assert texts(dataset, tokenizer) == ["c</s>", "de</s>"]
    assert len(dataset) == 2
    assert dataset.num_label_tokens == 2 + 3
    assert dataset.num_tokens == 5 + 4
    assert dataset.longest == 5
    assert dataset.max_token_id == max(tokenizer.encode("abcde"))
    assert (dataset.counts.truncated, dataset.counts.without_labels) == (0, 0)
    assert dataset.warnings == ()
    for example in dataset:
        assert example.input_ids.dtype == example.labels.dtype == np.int32
        assert example.input_ids.shape == example.labels.shape == (len(example),)
    assert dataset[0].input_ids.tolist() == dataset[-2].input_ids.tolist()
    assert [e.input_ids.tolist() for e in dataset[1:]] == [dataset[1].input_ids.tolist()]
    with pytest.raises(IndexError):
        dataset[2]


def test_rows_are_cut_at_the_end(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    rows = [
        {"prompt": "ab", "completion": "cdefgh"},
        {"prompt": "abcdefgh", "completion": "i"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "abc", "completion": "de"},  # exactly 7 tokens: not cut
    ]
    dataset = load_dataset(write(tmp_path, rows), tokenizer, 7)
    assert texts(dataset, tokenizer) == ["cdef", "b</s>", "de</s>"]
    assert (dataset.counts.truncated, dataset.counts.without_labels) == (1, 1)
    assert [w.split(": ")[1][:20] for w in dataset.warnings] == [
        "1 of 4 rows is longer than"[:20],
        "1 of 4 rows has nothing"[:20],
    ]
    assert dataset.num_label_tokens == 4 + 2 + 3


def test_the_first_label_is_never_predicted() -> None:
    example = Example(np.array([5, 6], np.int32), np.array([5, -100], np.int32))
    assert example.num_label_tokens == 0
    assert Dataset([example]).num_label_tokens == 0


def test_an_empty_dataset_has_no_extent() -> None:
    dataset = Dataset([])
    assert (len(dataset), dataset.longest, dataset.max_token_id, dataset.num_tokens) == (
        0,
        0,
        -1,
        0,
    )


def test_nothing_to_learn(tmp_path) -> None:
    path = write(tmp_path, [{"prompt": "a" * 50, "completion": "b"}])
    with pytest.raises(DataError, match=r"train\.jsonl has nothing to train on.*its only row"):
        load_dataset(path, tiny_tokenizer(), 8)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="has no rows"):
        load_dataset(path, tiny_tokenizer(), 8)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match="has no rows"):
        load_dataset(tmp_path / "a.json", tiny_tokenizer(), 8)


def test_errors_name_file_and_line(tmp_path) -> None:
    path = write(tmp_path, [{"text": "a"}, {"text": "b"}, {"text": 3}])
    with pytest.raises(
        DataError, match=r"^train\.jsonl line 3: 'text' must be text, got a number$"
    ):
        load_dataset(path, tiny_tokenizer(), 8)
    path = write(tmp_path, [{"text": "a"}, {"txet": "b"}])
    with pytest.raises(DataError, match=r"^train\.jsonl line 2: a row must .*looks like 'text'"):
        load_dataset(path, tiny_tokenizer(), 8)


def test_one_format_per_file(tmp_path) -> None:
    path = write(tmp_path, [{"text": "a"}, {"prompt": "a", "completion": "b"}])
    match = r"^train\.jsonl line 2: .*'prompt/completion', but that .* is 'text' \(train.jsonl"
    with pytest.raises(DataError, match=match):
        load_dataset(path, tiny_tokenizer(), 8)


@pytest.mark.slow
def test_chat_template_argument(tmp_path) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    path = write(tmp_path, [{"messages": messages}])
    tokenizer = tiny_tokenizer()
    dataset = load_dataset(path, tokenizer, 64, "chatml")
    assert texts(dataset, tokenizer) == ["A<|im_end|>\n"]
    with pytest.raises(DataError, match=r"line 1: .*no chat template"):
        load_dataset(path, tokenizer, 64)
    with pytest.raises(TokenizerError, match=r"gone\.jinja does not exist"):
        load_dataset(path, tokenizer, 64, str(tmp_path / "gone.jinja"))
    with pytest.raises(TokenizerError, match=r"^train\.jsonl line 1: the chat template was"):
        load_dataset(path, tokenizer, 64, "{{ 'x' * 1000000000 }}")


def test_warnings(tmp_path) -> None:
    dataset = load_dataset(write(tmp_path, [{"text": "abc"}]), tiny_tokenizer(eos=False), 8)
    assert "no EOS token" in dataset.warnings[0]
    messages = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    template = "{% for m in messages[1:] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    dataset = load_dataset(
        write(tmp_path, [{"messages": messages}]), tiny_tokenizer(), 64, template
    )
    assert "no end-of-turn token is trained on" in dataset.warnings[0]
    assert "omits the system message from 1 row" in dataset.warnings[1]


@pytest.mark.parametrize(
    ("num_characters", "expected"),
    [(1, [2]), (5, [6]), (7, [8]), (8, [8]), (9, [8, 2]), (14, [8, 7]), (15, [8, 8]), (16, [8, 8])],
)
def test_text_windows(tmp_path, num_characters, expected) -> None:
    path = tmp_path / "a.txt"
    text = "abcdefghijklmnopqrstuvwxyz"[:num_characters]
    path.write_text(text)
    tokenizer = tiny_tokenizer()
    dataset = load_dataset(path, tokenizer, 8)
    assert [len(example) for example in dataset] == expected
    together = np.concatenate([example.input_ids for example in dataset]).tolist()
    whole = tokenizer.encode(text)
    assert together == (whole[:-1] if len(whole) % 8 == 1 else whole)  # one alone teaches nothing
    for example in dataset:
        assert np.array_equal(example.input_ids, example.labels)
        assert example.labels is not example.input_ids
    assert dataset.num_label_tokens == sum(n - 1 for n in expected)


def test_text_of_one_token(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    with pytest.raises(DataError, match="fewer than two tokens"):
        load_dataset(path, tiny_tokenizer(bos=False), 8)


def test_text_of_white_space(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b" \n")
    with pytest.raises(DataError, match="has no text"):
        load_dataset(path, tiny_tokenizer(), 8)


def test_max_seq_length_of_one(tmp_path) -> None:
    with pytest.raises(DataError, match="at least 2"):
        load_dataset(tmp_path / "a.txt", tiny_tokenizer(), 1)
