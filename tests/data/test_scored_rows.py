"""Rows of reward models and classifiers as tokens and targets."""

import json

import pytest
from e2e.tiny import write_model

from qlora_wgpu.data import PreprocessConfig, Tokenizer, load_dataset
from qlora_wgpu.data.scored_rows import label_names, problem_type_of
from qlora_wgpu.errors import DataError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoded(folder, tmp_path):
    """The ids and targets that rows become; with a padding token, EOS is not one."""

    def made(rows, objective, *, padding="", **how):
        tokenizer = Tokenizer.from_folder(folder)
        if padding:
            tokenizer.special_tokens["pad_token"] = padding
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = PreprocessConfig(64, objective=objective, **how)
        dataset = load_dataset(file, tokenizer, 64, how=config)
        return [(each.input_ids.tolist(), each.targets.tolist()) for each in dataset]

    return made


def test_pairs_of_text_are_one_text_with_eos(folder, encoded):
    ids = Tokenizer.from_folder(folder).encode
    eos = Tokenizer.from_folder(folder).eos_token_id
    rows = [
        {"chosen": "ab cd", "rejected": "ab ef", "margin": 0.5},
        {"prompt": "gh ", "chosen": "a", "rejected": "b"},
    ]
    texts = ["ab cd", "ab ef", "gh a", "gh b"]
    targets = [[0.5], [0.0], [0.0], [0.0]]
    found = encoded(rows, "reward", padding="z")
    assert found == list(zip([[*ids(text), eos] for text in texts], targets, strict=True))
    # Without a padding token it is EOS, which transformers does not score at.
    found = encoded(rows, "reward")
    assert found == list(zip(map(ids, texts), targets, strict=True))


def test_pairs_of_chats_may_differ_anywhere(encoded):
    asked = {"role": "user", "content": "ab"}
    other = [{"role": "user", "content": "cd"}, {"role": "assistant", "content": "e"}]
    chosen = [asked, {"role": "assistant", "content": "f"}]
    ((one, _), (two, _)) = encoded([{"chosen": chosen, "rejected": other}], "reward")
    ((again, _), _) = encoded(
        [{"prompt": [asked], "chosen": chosen[1:], "rejected": chosen[1:]}], "reward"
    )
    assert one == again != two


def test_labelled_text_has_no_eos(folder, encoded):
    ids = Tokenizer.from_folder(folder).encode
    rows = [{"text": "ab", "label": "yes"}, {"text": "c", "label": "1"}, {"text": "d", "label": 0}]
    found = encoded(rows, "classification", labels=("no", "yes"), padding="z")
    assert found == [(ids("ab"), [1.0]), (ids("c"), [1.0]), (ids("d"), [0.0])]


@pytest.mark.parametrize(
    ("label", "targets"), [([2, "a"], [1, 0, 1]), ([0.0, 1.0, 0.0], [0, 1, 0]), ([], [0, 0, 0])]
)
def test_several_labels_become_a_vector(encoded, label, targets):
    how = {"labels": ("a", "b", "c"), "problem_type": "multi_label_classification"}
    ((_, found),) = encoded([{"text": "ab", "label": label}], "classification", **how)
    assert found == targets


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([0, 2], ["0", "1", "2"]),
        (["1", "0"], ["0", "1"]),
        ([True, False], ["0", "1"]),
    ],
)
def test_names_of_labels(labels, names):
    rows = [(f"row {i}", {"text": "a", "label": label}) for i, label in enumerate(labels)]
    assert label_names(rows, {}, "single_label_classification") == names


def test_rows_without_labels_have_no_names_and_those_after_them_do():
    rows = [("row 1", {"text": "a", "label": None}), ("row 2", {"text": "a", "label": "b"})]
    assert label_names(rows, {}, "single_label_classification") == ["b"]
    vectors = [(f"row {n}", {"text": "a", "label": [0.0] * n}) for n in (1, 2)]
    assert label_names(vectors, {}, "multi_label_classification") == ["0", "1"]


def test_vectors_of_labels_name_as_many_as_they_have():
    rows = [("row 1", {"text": "a", "label": [0.0, 1.0, 0.0]})]
    assert label_names(rows, {}, "multi_label_classification") == ["0", "1", "2"]


@pytest.mark.parametrize(("label", "expected"), [
    ([0, 1], "multi_label_classification"), (1, "single_label_classification"),
    ("a", "single_label_classification"), (1.0, "single_label_classification"),
    (1.5, "regression"), (True, "single_label_classification"),
])  # fmt: skip
def test_the_problem_that_labels_are_of(label, expected):
    assert problem_type_of(label) == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, "a"], "a number in some rows"), ([{"a": 1}], "must be a class's number or name")],
)
def test_labels_that_have_no_names(labels, message):
    rows = [(f"row {i}", {"label": label}) for i, label in enumerate(labels)]
    with pytest.raises(DataError, match=message):
        label_names(rows, {}, "single_label_classification")


@pytest.mark.parametrize("margin", [True, "much"])
def test_margins_are_numbers(encoded, margin):
    with pytest.raises(DataError, match="'margin' must be a finite number"):
        encoded([{"chosen": "a", "rejected": "b", "margin": margin}], "reward")
