"""What is refused or warned of in data that is given, and how it becomes token ids."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.data import IGNORE_INDEX, Dataset, Example
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.training import data
from qlora_wgpu.training.data import (
    as_dataset,
    check_ids,
    is_text,
    require_both_kinds,
    require_labels,
    warn_of_left_out,
    warn_of_long_rows,
    warn_of_shared_rows,
    warn_of_shared_windows,
)


@pytest.fixture
def told():
    texts = []
    return SimpleNamespace(warning=texts.append, note=texts.append, texts=texts)


def example(*ids, labels=None):
    own = np.array(ids, np.int32)
    return Example(own, own if labels is None else np.array(labels, np.int32))


# ---- token ids -----------------------------------------------------------------------------------


def test_rows_of_token_ids_become_examples():
    rows = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3], "labels": [IGNORE_INDEX, 2, 3], "attention_mask": [1, 0, 1]},
        example(4, 5),
    ]
    made = as_dataset(rows, "rows", 6)
    assert [each.input_ids.tolist() for each in made] == [[1, 2, 3], [1, 3], [4, 5]]
    assert [each.labels.tolist() for each in made] == [[1, 2, 3], [IGNORE_INDEX, 3], [4, 5]]
    assert as_dataset(made, "rows", 6) is made
    again = Dataset([example(5, labels=[7])])  # whose largest id is a label's
    assert as_dataset(again, "rows", 8)[0].labels.tolist() == [7]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "rows is empty"),
        (Dataset([]), "rows is empty"),
        ([{"input_ids": np.zeros(0, int)}], r"rows\[0\] has no tokens"),
        ([{"input_ids": []}], r"rows\[0\] has no tokens"),
        ([example(1), {"input_ids": [1, 6]}], r"rows\[1\] contains the token id 6, but the"),
        ([{"input_ids": [0, 5]}, {"input_ids": [-1]}], r"rows\[1\] contains the token id -1"),
        ([{"input_ids": [-1, 6]}], r"rows\[0\] contains the token id -1"),
        ([{"input_ids": [1], "labels": [6]}], r"rows\[0\] contains the token id 6"),
        (Dataset([example(6)]), r"rows\[0\] contains the token id 6"),
        ([{"input_ids": [1], "labels": [1, 2]}], "has 1 input_ids but 2 labels"),
        ([{"input_ids": [1], "attention_mask": [1, 1]}], "1 input_ids but an attention_mask of 2"),
        ([{"input_ids": [1.5]}], r"rows\[0\].input_ids must be a list of integers"),
        ([{"input_ids": [[1]]}], r"rows\[0\].input_ids must be a list of integers"),
        ([{"input_ids": [1], "labels": ["a"]}], r"labels must be a list of integers"),
        ([{"input_ids": [2**31]}], r"a number beyond 32 bits"),
        ([{"input_ids": [-(2**31) - 1]}], r"a number beyond 32 bits"),
        ([{"input_ids": [1], "loss_mask": [1]}], "has loss_mask, which is not supported"),
        ([{"text": "a"}], r"rows\[0\] must have input_ids and labels"),
        ([7], "or be a row in a format of files, .* got int"),
    ],
)
def test_rows_that_are_none_are_refused_by_name(rows, told):
    with pytest.raises(DataError, match=told):
        as_dataset(rows, "rows", 6)


def test_the_largest_id_is_within_the_vocabulary():
    whole = Dataset([example(0, 5)])
    assert as_dataset([example(0, 5)], "rows", 6)[0].input_ids.tolist() == [0, 5]
    assert as_dataset(whole, "rows", 6) is whole
    with pytest.raises(DataError, match="the token id 5, but the model's vocab_size is 5"):
        as_dataset(whole, "rows", 5)
    assert data._integers([2**31 - 1, -(2**31)], "x").tolist() == [2**31 - 1, -(2**31)]
    assert data._integers(np.zeros(0, np.int64), "x").size == 0


@pytest.mark.parametrize(
    ("rows", "text"),
    [([{"text": "a"}], True), ([{"input_ids": [1]}], False), ([{}], False), ([], False),
     ([example(1)], False), ([1], False)],
)  # fmt: skip
def test_rows_of_text_are_mappings_without_ids(rows, text):
    assert is_text(rows) == text


def test_a_data_set_must_have_labels():
    assert len(require_labels([example(1, 2)], "rows", 6, "no")) == 1
    with pytest.raises(DataError, match="rows has no labels at all: nothing to measure"):
        require_labels([example(1, labels=[IGNORE_INDEX])], "rows", 6, "nothing to measure")


@pytest.mark.parametrize(
    ("ids", "told"),
    [((9, 2), None), ((1, 10), "example 2 has the token id 10, but the model's vocab_size"),
     ((1, 8), "example 2 has the token id 8, which")],
)  # fmt: skip
@pytest.mark.cover("all")
def test_ids_are_those_of_texts(monkeypatch, ids, told):
    architecture = SimpleNamespace(vocab_size=10, media_ids=(range(8, 9),), text_vocab_size=8)
    monkeypatch.setattr(data, "MEDIA_TOKEN", "which is no text's")
    rows = Dataset([example(1), example(*ids)])
    if told is None:
        check_ids("rows", rows, architecture)
    else:
        with pytest.raises(DataError, match=told):
            check_ids("rows", rows, architecture)
    check_ids("rows", Dataset([example(7)]), architecture)


# ---- warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "long"), [(None, None), (1, 2), (2, 1), (3, 0), (4, 0)])
def test_rows_beyond_the_models_length_are_counted(told, positions, long):
    rows = Dataset([example(1), example(1, 2), example(1, 2, 3)])
    warn_of_long_rows("a/rows.jsonl", rows, positions, told)
    expected = f"rows.jsonl: {long} of 3 rows are longer than the model's maximum of {positions}"
    assert len(told.texts) == bool(long) and all(t.startswith(expected) for t in told.texts)


def held_out_of(rows=4, windows=False):
    return SimpleNamespace(num_rows=rows, has_windows=windows)


@pytest.mark.parametrize(
    ("shared", "words"),
    [(0, None), (1, "1 of 4 rows of data.eval"), (3, "3 of 4 rows"), (4, "all rows of data.eval")],
)
def test_rows_that_are_trained_on_measure_nothing(told, monkeypatch, shared, words):
    monkeypatch.setattr(data, "rows_in_both", lambda train, held_out: shared)
    warn_of_shared_rows(None, held_out_of(), told)
    assert len(told.texts) == (words is not None)
    assert all(text.startswith(words) for text in told.texts)


@pytest.mark.parametrize(
    ("train", "held_out", "shared", "warns"),
    [(False, False, 1, False), (True, False, 1, True), (False, True, 1, True),
     (True, True, 0, False)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_windows_on_both_sides_are_told(told, monkeypatch, train, held_out, shared, warns):
    monkeypatch.setattr(data, "rows_in_both", lambda train, held_out: shared)
    warn_of_shared_windows(held_out_of(9, train), held_out_of(4, held_out), told)
    kind = "windows" if held_out else "rows"
    assert [t.startswith(f"1 of the 4 {kind} that data.eval_split") for t in told.texts] == (
        [True] * warns
    )


@pytest.mark.parametrize(
    ("counts", "metric", "lacks"),
    [
        ((1, 1), "rewards/margins", None),
        ((0, 1), "rewards/margins", "desirable"),
        ((1, 0), "rewards/margins", "undesirable"),
        ((0, 1), "rewards/chosen", "desirable"),
        ((1, 0), "rewards/chosen", None),
        ((1, 0), "rewards/rejected", "undesirable"),
        ((0, 1), "rewards/rejected", None),
        ((0, 1), "loss", None),
    ],
)
@pytest.mark.cover("all")
def test_a_metric_of_both_kinds_of_answers_needs_both(counts, metric, lacks):
    lengths = np.array([[5, 0]] * counts[0] + [[0, 5]] * counts[1]).ravel()
    rows = SimpleNamespace(lengths=lengths)
    config = SimpleNamespace(
        train=SimpleNamespace(objective="kto"), eval=SimpleNamespace(metric_for_best_model=metric)
    )
    require_both_kinds(None, config)
    if lacks is None:
        require_both_kinds(rows, config)
    else:
        with pytest.raises(ConfigError, match=f"have no {lacks} answer"):
            require_both_kinds(rows, config)
    config.train.objective = "dpo"
    require_both_kinds(rows, config)


@pytest.mark.parametrize(
    ("path", "held_out", "has_eval", "left_out", "words"),
    [
        ("rows", False, False, {}, None),
        ("rows", False, False, {"validation": ["v.jsonl"]},
         "rows: files of other splits are not trained on: v.jsonl; data.eval: rows:validation"),
        ("rows", False, False, {"test": ["t.jsonl"], "validation": ["v.jsonl"]},
         "t.jsonl, v.jsonl; data.eval: rows:validation evaluates on"),
        ("rows", False, False, {"test": ["t.jsonl"]}, "t.jsonl; data.eval: rows:test"),
        ("rows", False, False, {"": ["x.jsonl"]}, "are not trained on: x.jsonl"),
        ("rows", False, True, {"validation": ["v.jsonl"]}, None),
        ("rows", False, True, {"": ["x.jsonl"], "test": ["t.jsonl"]}, "trained on: x.jsonl"),
        ("rows", True, True, {"train": ["a.jsonl"]}, None),
        ("rows", True, True, {"train": ["a.jsonl"], "test": ["t.jsonl"]}, "measured on: t.jsonl"),
        ("rows:test", False, False, {"validation": ["v.jsonl"]}, None),
    ],
)  # fmt: skip
@pytest.mark.cover("all")
def test_files_of_other_splits_are_told(
    told, monkeypatch, tmp_path, path, held_out, has_eval, left_out, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    given = {"train": "a"} | ({"eval": "b"} if has_eval else {})
    settings = Config.model_validate({"model": {"path": "m"}, "data": given}).data
    rows = SimpleNamespace(left_out=left_out)
    warn_of_left_out(settings, path, rows, told, held_out=held_out)
    assert len(told.texts) == (words is not None)
    for text in told.texts:
        assert words in text and ("data.eval:" in text) == (
            not held_out and not has_eval and "" not in left_out
        )


# ---- objectives and sources ----------------------------------------------------------------------


def prepared(*, unit=1, targets=None, lengths=(3, 3), prompt=None):
    class Rows(list):
        def prompt_row(self, index):
            return prompt

    rows = Rows([SimpleNamespace(targets=targets)] * len(lengths))
    rows.unit, rows.lengths = unit, np.array(lengths)
    return rows


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        (prepared(), {"sft"}),
        (prepared(unit=2, lengths=(3, 4)), {"dpo", "orpo"}),
        (prepared(unit=2, lengths=(3, 4, 0, 4)), {"dpo", "orpo"}),
        (prepared(unit=2, lengths=(3, 0, 0, 4)), {"kto"}),
        (prepared(targets=(1,)), {"classification"}),
        (prepared(unit=2, targets=(1,)), {"reward"}),
        (prepared(prompt={}), {"sft", "grpo", "rloo"}),
    ],
)
def test_data_that_was_prepared_for_another_objective_is_refused(rows, fits):
    found = set()
    for objective in ("sft", "dpo", "orpo", "kto", "classification", "reward", "grpo", "rloo"):
        try:
            data.refuse_other_objectives(rows, "rows", objective)
            found.add(objective)
        except DataError as err:
            assert objective in str(err)
    assert found == fits


class Source:
    """Rows of two sources; the third example is half of its row, as its partner is."""

    source_names, source_sizes = ("a", "b"), (4, 5)
    source_of, unit = np.array([0, 1, 1, 1]), 1
    lengths, label_counts = np.array([1, 1, 1, 1]), np.array([2, 3, 4, 5])

    def __len__(self):
        return 4


def test_rows_of_each_source_are_counted():
    plan = SimpleNamespace(examples_until=lambda step: (step, np.array([0, 3])))
    counter = data.SourceCounter(Source(), plan)
    assert counter.until(0) == {"a": 1, "b": 1} and counter.until(2) == {"a": 3, "b": 7}
    shares = data.source_shares(Source())
    assert [(s.name, s.rows, s.of, s.tokens) for s in shares] == [("a", 1, 4, 2), ("b", 3, 5, 12)]
    pairs = Source()
    pairs.unit, pairs.lengths, pairs.source_of = 2, np.array([3, 0, 5, 6]), np.array([0, 0, 1, 1])
    assert data._shares_of_rows(pairs).tolist() == [1.0, 0.0, 0.5, 0.5]
    assert [each.rows for each in data.source_shares(pairs)] == [1, 1]
    one = SimpleNamespace(source_of=None, source_names=())
    assert data.source_shares(one) == () and data.SourceCounter(one, plan).until(3) == {}


def test_a_source_is_named_as_it_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data._name("org/rows") == "org/rows"
    assert data._name(str(tmp_path / "rows.jsonl")) == "rows.jsonl"
    (tmp_path / "org" / "rows").mkdir(parents=True)
    assert data._name("org/rows") == "rows"


def test_a_mixture_tells_what_is_repeated(told, monkeypatch):
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "a"}}).data
    assert data._mixed(["only"], config, 1, told) == "only"
    sources = [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 1.0}]
    config = Config.model_validate({"model": {"path": "m"}, "data": {"sources": sources}}).data
    shares = [SimpleNamespace(name=n, rows=r, of=4) for n, r in (("a", 4), ("b", 10), ("c", 3))]
    monkeypatch.setattr(data, "interleave", lambda parts, names, *how: (parts, names))
    monkeypatch.setattr(data, "source_shares", lambda mixture: shares)
    assert data._mixed(["x", "y"], config, 1, told) == (["x", "y"], ["a.jsonl", "b.jsonl"])
    assert told.texts == ["b has 4 rows and gives 10 per epoch: they are trained on 2.5 times"]


# ---- reading -------------------------------------------------------------------------------------


@pytest.fixture
def reader(monkeypatch):
    """Makes readers whose rows are told by where they are from; and what they compare."""
    compared = []
    for name in ("warn_of_shared_rows", "warn_of_shared_windows"):
        monkeypatch.setattr(data, name, lambda *given, name=name: compared.append(name))
    monkeypatch.setattr(data, "train_test_split", lambda whole, size, seed: ("rest", "held"))
    monkeypatch.setattr(
        data.DataReader, "_dataset",
        lambda self, rows, name, settings, *, held_out=False: (rows, name, held_out),
    )  # fmt: skip

    def made(train=None, held_out=None, **given):
        config = Config.model_validate({"model": {"path": "m"}, "data": given})
        return data.DataReader(config, None, None, train=train, held_out=held_out)

    made.compared = compared
    return made


FILE, HELD_OUT = ("a", "", False), ("b", "eval_dataset", True)


@pytest.mark.parametrize(
    ("given", "both", "compared"),
    [
        ({}, (FILE, None), []),
        ({"eval": "b"}, (FILE, HELD_OUT), ["warn_of_shared_rows"]),
        ({"eval_split": 0.5}, ("rest", "held"), ["warn_of_shared_windows"]),
    ],
)
def test_held_out_rows_are_read_or_split_off(reader, given, both, compared):
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "a", **given}})
    made = data.DataReader(config, None, None)
    assert made.read() == both and reader.compared == compared
    assert made.read_one(held_out=False) == both[0]
    assert made.read_one(held_out=True) == (both[1] or both[0])


def test_rows_of_a_program_come_before_those_of_files(reader):
    made = reader(train="x", held_out="y", eval="b")
    expected = ("x", "train_dataset", False), ("y", "eval_dataset", True)
    assert made.read() == expected and made.read_one(held_out=True) == expected[1]
    assert reader(train="x", eval="b").read() == (expected[0], None)
