"""Rows that compare or judge answers, in the forms that files have."""

import json

import numpy as np
import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import (
    Dataset,
    Example,
    PreprocessConfig,
    load_dataset,
    row_format,
    train_test_split,
)
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.preferences import pair_of
from qlora_wgpu.errors import DataError
from qlora_wgpu.training.preferences import KLPairs

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "ab?"), ("assistant", "good"), ("assistant", "bad"))
)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def how(objective="dpo", **more):
    return PreprocessConfig(64, TEMPLATE, objective=objective, **more)


def read(tokenizer, *rows, objective="dpo", **more):
    return encode_rows(list(rows), tokenizer, how(objective, **more))


def texts(tokenizer, dataset):
    """The text of each example that is trained on."""
    return [
        tokenizer.decode([int(i) for i in e.input_ids[e.labels != -100]], True) for e in dataset
    ]


FORMS = {
    "conversations": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "text beside conversations": {"prompt": "ab?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "texts behind messages": {"prompt": [USER], "chosen": "good", "rejected": "bad"},
    "text before messages": {"prompt": "ab?", "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "ab?"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "as json": {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": [BAD]},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_forms_of_conversations(tokenizer, form):
    usual = read(tokenizer, FORMS["conversations"])
    dataset = read(tokenizer, FORMS[form])
    assert dataset.fingerprint == usual.fingerprint
    assert (len(dataset), dataset.unit, dataset.num_rows) == (2, 2, 1)
    assert [t.strip() for t in texts(tokenizer, dataset)] == ["good;", "bad;"]


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_marks_of_the_template_do_not_decide_what_counts(tokenizer, objective):
    """``{% generation %}`` is SFT's alone, as in TRL."""
    marks = "{% generation %}{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}"
    marked = TEMPLATE.replace("{{ m.content }}", marks)
    plain = [FORMS["conversations"]]
    own = encode_rows(plain, tokenizer, PreprocessConfig(64, marked, objective=objective))
    assert own.fingerprint == read(tokenizer, *plain, objective=objective).fingerprint
    assert {t.strip() for t in texts(tokenizer, own) if t} == {"good;", "bad;"}


def test_columns_of_other_names(tokenizer):
    row = {"prompt": "ab ", "chosen": "good", "rejected": "bad"}
    named = {"prompt": "ask", "chosen": "up", "rejected": "down"}
    theirs = {column: row[key] for key, column in named.items()}
    dataset = read(tokenizer, theirs, columns=named)
    assert texts(tokenizer, dataset) == texts(tokenizer, read(tokenizer, row)) == ["good", "bad"]


def test_plain_texts(tokenizer):
    given = {"prompt": "ab ", "chosen": "good", "rejected": "bad"}
    dataset = read(tokenizer, given)
    assert texts(tokenizer, dataset) == ["good", "bad"]
    assert row_format([given], tokenizer, how()) == "prompt/completion"
    implicit = read(tokenizer, {"chosen": "ab good", "rejected": "ab gone"})
    assert texts(tokenizer, implicit) == ["od", "ne"]


def test_a_space_before_texts_that_differ_is_theirs():
    chosen, rejected = pair_of({"chosen": "what? a cat", "rejected": "what? dogs"})
    assert chosen.row == {"prompt": "what?", "completion": " a cat"}
    assert rejected.row["completion"] == " dogs"


def test_judged_answers(tokenizer):
    rows = [
        {"prompt": [USER], "completion": [GOOD], "label": True},
        {"prompt": "ab?", "completion": [BAD], "label": 0},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    ]
    dataset = read(tokenizer, *rows[:2], objective="kto")
    assert [len(e) > 0 for e in dataset] == [True, False, False, True]
    apart = read(tokenizer, rows[2], objective="kto")
    assert [len(e) > 0 for e in apart] == [True, False, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "with 'chosen' and 'rejected', got 'prompt', 'c"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "both be text"),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "differ before their last messages"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "must end with a message of"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "an answer has no prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' must be text or messages"),
    ],
)
def test_rows_that_are_no_pairs(tokenizer, row, message):
    with pytest.raises(DataError, match=rf"rows\[0\]: .*{message}"):
        read(tokenizer, row)


def test_labels_that_are_none(tokenizer):
    with pytest.raises(DataError, match="'label' must be true or false, got text"):
        read(tokenizer, {"prompt": "a", "completion": "b", "label": "yes"}, objective="kto")


def test_answers_that_are_cut_away_take_their_row_along(tokenizer):
    short = FORMS["conversations"]
    long = {"prompt": [{"role": "user", "content": "x" * 70}], "chosen": [GOOD], "rejected": [BAD]}
    cut = {"prompt": [USER], "chosen": [GOOD], "rejected": [{**BAD, "content": "b" * 70}]}
    dataset = read(tokenizer, short, long, cut)
    assert dataset.num_rows == 2 and dataset.counts.without_labels == 1
    assert dataset.counts.truncated == 1 and dataset.longest == 64
    assert any("nothing to train on within max_seq_length=64" in text for text in dataset.warnings)
    kept = read(tokenizer, long, truncation="keep_end")
    assert [t.strip() for t in texts(tokenizer, kept)] == ["good;", "bad;"]
    assert read(tokenizer, short, cut, truncation="drop").counts.dropped == 1
    with pytest.raises(DataError, match="nothing to train on"):
        read(tokenizer, long)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_pairs_of_one_answer_are_told(tokenizer, objective):
    """TRL keeps them as well; what differs may have been cut away."""
    same = {"prompt": "a?", "chosen": "b", "rejected": "b"}
    cut = {"prompt": "a?", "chosen": "b" * 80 + "c", "rejected": "b" * 80 + "d"}
    other = {"prompt": "a?", "chosen": "b", "rejected": "c"}
    dataset = read(tokenizer, other, same, cut, same, objective=objective)
    assert dataset.num_rows == (8 if objective == "kto" else 4)
    assert [text for text in dataset.warnings if "identical" in text] == [
        "rows: 3 of 4 rows have identical chosen and rejected answers within "
        "max_seq_length=64 and thus no preference (rows[1], rows[2], rows[3])"
    ]
    assert not any("same" in text for text in read(tokenizer, other, objective=objective).warnings)


def test_empty_answers_are_left_out(tokenizer):
    dataset = read(
        tokenizer, FORMS["conversations"], {"prompt": "a", "chosen": " ", "rejected": "b"}
    )
    assert (dataset.num_rows, dataset.counts.empty) == (1, 1)


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": None}),
        ("dpo", {"prompt": "a", "chosen": None, "rejected": None}),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": " "}),
        ("kto", {"prompt": "a", "completion": None, "label": True}),
        ("kto", {"prompt": "a", "completion": "b", "label": None}),
    ],
)
def test_a_first_row_that_lacks_an_answer_is_left_out(tokenizer, tmp_path, objective, missing):
    """As tables have it, all columns in every row; what prompts are like the next row says."""
    whole = {key: "c" if key != "label" else True for key in missing}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (missing, whole)))
    dataset = load_dataset(file, tokenizer, 64, how=how(objective))
    assert (dataset.num_rows, dataset.counts.empty) == (1, 1)
    assert row_format(file, tokenizer, how(objective)) == "prompt/completion"


def test_pairs_are_held_out_whole(tokenizer):
    rows = [{"prompt": f"{i} ", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)]
    train, held_out = train_test_split(read(tokenizer, *rows), 0.25, 3)
    assert (train.num_rows, held_out.num_rows, held_out.unit) == (15, 5, 2)
    numbers = [t.split()[-1] for t in texts(tokenizer, held_out)]
    assert numbers[::2] == numbers[1::2]


def test_mismatched_answers(tokenizer):
    """Each prompt gets the nearest earlier answer of another prompt."""
    rows = [
        {"prompt": prompt, "completion": answer, "label": True}
        for prompt, answer in (("a ", "one"), ("b ", "two"), ("b ", "three"), ("c ", "four"))
    ]
    dataset = read(tokenizer, *rows, objective="kto")
    found = KLPairs(dataset, 64)
    present = np.flatnonzero(dataset.lengths)
    shown = [tokenizer.decode([int(t) for t in found[i].input_ids], True) for i in present.tolist()]
    assert shown == ["a four", "b one", "b one", "c three"]
    assert [len(found[i]) for i in (1, 3)] == [0, 0]


def test_answers_of_other_prompts_have_a_token_that_is_predicted():
    """Where truncation has left no prompt, a first token is predicted from nothing."""
    ids, none = np.arange(10, 16, dtype=np.int32), np.zeros(0, np.int32)
    behind = np.concatenate([np.full(3, -100, np.int32), ids[3:4]])
    nothing = Example(none, none)
    alone, short = Example(ids, ids), Example(ids[:4], behind)
    found = KLPairs(Dataset([nothing, short, nothing, alone]), 8)
    assert found[3].input_ids.tolist() == ids.tolist()  # not the other's one token, without a label
    assert found[1].labels.tolist() == [-100] * 3 + [10, 11, 12, 13, 14]


def test_prepared_data_is_read_again(tokenizer, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(FORMS["conversations"]) + "\n")
    first, again = (load_dataset(path, tokenizer, 64, how=how(), cache=True) for _ in range(2))
    assert first.fingerprint == again.fingerprint and again.unit == 2


def test_texts_are_no_pairs(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(DataError, match="requires rows with answers"):
        load_dataset(tmp_path / "a.txt", tokenizer, 64, how=how())
