"""Rows that a program hands to a trainer: tables, iterators, numbers of other libraries."""

from types import SimpleNamespace

import numpy as np
import pytest

from e2e.test_training import config, opened
from e2e.tiny import write_model
from qlora_wgpu import Tokenizer, Trainer, load_dataset
from qlora_wgpu.data import PreprocessConfig
from qlora_wgpu.errors import DataError
from qlora_wgpu.training import Observer
from qlora_wgpu.training.data import DataReader, as_dataset, refuse_other_objectives

pytestmark = pytest.mark.quick

TEXTS = [{"text": f"row number {i}"} for i in range(6)]
PAIRS = [{"prompt": f"{i}? ", "chosen": "yes", "rejected": "no"} for i in range(4)]


class Frame:
    """What is asked of pandas' ``DataFrame``, which the tests do without."""

    iloc = None

    def __init__(self, rows):
        self.rows, self.columns = rows, list(rows[0])

    def __iter__(self):
        return iter(self.columns)

    def to_dict(self, how):
        assert how == "records"
        return [dict(row) for row in self.rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def model(folder, device):
    return opened(folder, device)


def read(model, out, rows, held_out=None):
    reader = DataReader(
        config(model.folder.path, out), lambda: Tokenizer.from_folder(model.folder.path),
        Observer(), architecture=model.architecture, positions=None, train=rows,
        held_out=held_out,
    )  # fmt: skip
    train, measured = reader.read()
    return SimpleNamespace(train=train, held_out=measured, prompt=reader.prompt())


@pytest.mark.parametrize(
    "form", [iter, lambda rows: (row for row in rows), lambda rows: map(dict, rows), Frame]
)
def test_every_row_counts_once(model, tmp_path, form):
    own = read(model, tmp_path, form(TEXTS), form(TEXTS[:2]))
    assert (len(own.train), len(own.held_out)) == (6, 2)
    assert own.prompt is not None and own.prompt.kind == "text"
    assert own.train.fingerprint == read(model, tmp_path, TEXTS).train.fingerprint
    assert len(load_dataset(form(TEXTS), model.folder.path, 32)) == 6


def test_gaps_of_a_table_are_no_values(model, tmp_path):
    rows = [{"text": "some", "more": 1.0}, {"text": float("nan"), "more": float("nan")}]
    own = read(model, tmp_path, Frame(rows))
    assert (len(own.train), own.train.counts.empty) == (1, 1)


def test_weights_of_numpy(folder):
    rows = [{"text": "a b", "w": np.float32(2)}, {"text": "a b", "w": np.int64(3)}]
    how = PreprocessConfig(32, columns={"weight": "w"})
    assert [e.weight for e in load_dataset(rows, folder, 32, how=how)] == [2, 3]
    rows[1]["w"] = np.float32("nan")
    with pytest.raises(DataError, match=r"rows\[1\]: the weight in 'w' must be 0 or a number"):
        load_dataset(rows, folder, 32, how=how)


@pytest.mark.quick("values")
@pytest.mark.parametrize("key", ["input_ids", "labels", "attention_mask"])
@pytest.mark.parametrize("number", [2**32 + 1, -(2**40), 2**62])
def test_numbers_that_32_bits_do_not_hold(model, tmp_path, key, number):
    rows = [{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1], key: [number, 1]}]
    with pytest.raises(
        DataError, match=rf"train_dataset\[0\].{key} contains a number beyond 32 bits"
    ):
        read(model, tmp_path, rows)


@pytest.mark.parametrize(
    ("tokenizer", "length", "message"),
    [
        (None, 32, "tokenizer must be a Tokenizer or the model's folder, got NoneType"),
        ("folder", "32", "max_seq_length must be an integer, got '32'"),
        ("folder", 1.5, "max_seq_length must be an integer, got 1.5"),
    ],
)
def test_what_is_no_tokenizer_and_no_length(folder, tokenizer, length, message):
    with pytest.raises(DataError, match=message):
        load_dataset(TEXTS, folder if tokenizer else None, length)


@pytest.mark.quick
@pytest.mark.parametrize("made_for", ["dpo", "kto"])
@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo", "kto"])
def test_data_of_another_objective_is_refused(model, tmp_path, made_for, objective):
    data = load_dataset(PAIRS, model.folder.path, 32, how=PreprocessConfig(32, objective=made_for))
    settings = config(model.folder.path, tmp_path, train={"objective": objective})
    trainer = Trainer(model, settings)
    if objective in (("kto",) if made_for == "kto" else ("dpo", "orpo")):
        refuse_other_objectives(data, "data", objective)
        # A list of its examples no longer says which make a pair.
        with pytest.raises(DataError, match="requires answers: pass a path"):
            trainer.train([each for each in data if len(each)][:3])
        return
    with pytest.raises(DataError, match=f"train_dataset was prepared for .*{made_for}.* not for"):
        trainer.train(data)


MASKED = [
    {"text": "what is", "weights": [1, 0]},
    {"prompt": "what", "completion": " is", "completion_mask": [0, 1]},
    {"input_ids": [5, 6], "loss_mask": [1, 0]},
]
UNEVEN = {"input_ids": [5, 6], "turns": [[1], [1, 2]]}  # lists that numpy makes no array of


@pytest.mark.quick("values")
@pytest.mark.parametrize("row", MASKED, ids=lambda row: list(row)[-1])
def test_what_says_which_tokens_are_learnt_is_read_or_refused(model, tmp_path, row):
    trainer = Trainer(model, config(model.folder.path, tmp_path))
    column = list(row)[-1]
    with pytest.raises(DataError, match=rf"train_dataset\[1\].*{column}.*, which is not"):
        trainer.train([dict(list(row.items())[:-1]), row])


def test_lists_of_several_lengths_beside_token_ids_say_nothing_of_tokens():
    assert len(as_dataset([UNEVEN], "rows", 100)) == 1
