"""Rows with a label: answers that are good or bad, read as such, and read as any rows."""

import json

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import PreprocessConfig, load_dataset
from qlora_wgpu.data.dataset import encode_rows

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "ab?"), ("assistant", "good"), ("assistant", "bad"))
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def read(tokenizer, *rows, objective="kto", template=TEMPLATE, **more):
    how = PreprocessConfig(256, template, objective=objective, **more)
    return encode_rows(list(rows), tokenizer, how)


def pair(label, prompt="ab?", completion="good"):
    return {"prompt": prompt, "completion": completion, "label": label}


SINGLE = (
    "rows: 1 of 3 rows is labelled false and trained on like the others: remove it, or set "
    "train.objective: kto to use the labels"
)


@pytest.mark.parametrize(
    "rows",
    [
        [pair(True), pair(False), pair(True)],
        [pair("true"), pair("False"), pair(None)],
        [pair(label, [USER], [GOOD]) for label in (True, True, False)],
        [{"messages": [USER, GOOD], "label": label} for label in (True, True, False)],
    ],
)
def test_rows_labelled_false_are_told_of_where_all_are_trained_on(tokenizer, rows):
    dataset = read(tokenizer, *rows, objective="sft")
    assert len(dataset) == 3 and dataset.warnings == (SINGLE,)


@pytest.mark.parametrize(
    "rows",
    [
        [pair(True)],
        [pair(0), pair("no")],  # classes, or anything
        [{"text": "a", "label": False}],
        [pair(False, completion=" ", prompt=""), pair(True)],  # left out anyway
    ],
)
def test_other_labels_are_not_told_of(tokenizer, rows):
    dataset = read(tokenizer, *rows, objective="sft")
    assert not any("label" in text for text in dataset.warnings)


def test_the_label_may_have_another_name(tokenizer):
    rows = [{"prompt": "ab?", "completion": "bad", "liked": False}] * 2
    dataset = read(tokenizer, *rows, objective="sft", columns={"label": "liked"})
    assert (
        "2 of 2 rows are labelled false and trained on like the others: remove them"
        in dataset.warnings[0]
    )


def test_prepared_data_tells_of_labels_again(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(pair(label)) + "\n" for label in (True, False)))
    how = PreprocessConfig(64, TEMPLATE)
    told = [load_dataset(path, tokenizer, 64, how=how, cache=True).warnings for _ in range(2)]
    assert told[0] == told[1] and "1 of 2 rows is labelled false" in told[0][0]


def test_a_table_has_labels_as_words(tokenizer, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\nab? ,good,True\nab? ,bad,false\nab? ,fair,1\n")
    dataset = load_dataset(path, tokenizer, 64, how=PreprocessConfig(64, TEMPLATE, objective="kto"))
    assert [len(e) > 0 for e in dataset] == [True, False, False, True, True, False]


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_that_are_made_the_answer_are_not_its_prompt_too(tokenizer, key):
    """The columns that LLaMA-Factory's files of judged conversations come to."""
    usual = read(tokenizer, pair(False, [USER], [BAD]))
    turns = [USER, BAD]
    if key == "conversations":
        turns = [{"from": "human", "value": "ab?"}, {"from": "gpt", "value": "bad"}]
    row = {key: turns, "label": False}
    for given in (row, row | {key: json.dumps(turns)}):
        dataset = read(tokenizer, given, columns={"completion": key})
        assert dataset.fingerprint == usual.fingerprint


def test_a_prompt_beside_a_judged_conversation_is_told_twice(tokenizer):
    usual = read(tokenizer, pair(False, [USER], [BAD]))
    assert read(tokenizer, pair(False, "ab?", [USER, BAD])).fingerprint == usual.fingerprint


def test_messages_that_are_made_the_chosen_answer_are_not_its_prompt_too(tokenizer):
    usual = read(
        tokenizer, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, objective="dpo"
    )
    row = {"messages": [USER, GOOD], "other": [USER, BAD]}
    columns = {"chosen": "messages", "rejected": "other"}
    dataset = read(tokenizer, row, objective="dpo", columns=columns)
    assert dataset.fingerprint == usual.fingerprint


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, GOOD]},
        {"prompt": [USER], "completion": [GOOD]},
        {"prompt": [], "completion": [USER, GOOD]},
        {"conversations": [{"from": "human", "value": "ab?"}, {"from": "gpt", "value": "good"}]},
    ],
)
def test_a_row_s_system_message_comes_first(tokenizer, row):
    said = {"role": "system", "content": "Be brief."}
    usual = read(tokenizer, {"messages": [said, USER, GOOD]}, objective="sft")
    given = read(tokenizer, row | {"system": "Be brief."}, objective="sft")
    assert given.fingerprint == usual.fingerprint


def test_a_system_message_of_its_own_stays_alone(tokenizer):
    for role in ("system", "developer"):
        row = {"messages": [{"role": role, "content": "Own."}, USER, GOOD]}
        usual = read(tokenizer, row, objective="sft")
        given = read(tokenizer, row | {"system": "Be brief."}, objective="sft")
        assert given.fingerprint == usual.fingerprint
