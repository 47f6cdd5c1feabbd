"""Rows that are held out: by their contents, on every machine the same."""

import json

import numpy as np
import pytest

from qlora_wgpu import Config
from qlora_wgpu.data import Dataset, Example, content_digest, rows_in_both, split_off
from qlora_wgpu.errors import ConfigError, DataError


def dataset(texts):
    arrays = [np.array(text, np.int32) for text in texts]
    return Dataset([Example(ids, ids) for ids in arrays])


def contents(data):
    return [tuple(example.input_ids.tolist()) for example in data]


ROWS = [(n, n % 7, 3) for n in range(100)]
RECORDED = [4, 31, 53, 78, 85]


@pytest.mark.parametrize(("size", "count"), [(0.05, 5), (0.5, 50), (7, 7), (0.001, 1), (99, 99)])
def test_both_parts_are_the_whole(size, count):
    train, held_out = split_off(dataset(ROWS), size, seed=3)
    assert len(held_out) == count and len(train) == 100 - count
    assert sorted(contents(train) + contents(held_out)) == ROWS
    assert train.num_tokens == 3 * len(train) and held_out.longest == 3
    assert train.max_token_id == max(max(row) for row in contents(train))
    assert train.num_label_tokens == 2 * len(train)


def test_the_choice_follows_from_seed_and_contents_alone():
    _, held_out = split_off(dataset(ROWS), 5, seed=0)
    # As computed on other machines, for ever.
    assert [row[0] for row in contents(held_out)] == RECORDED
    _, other_order = split_off(dataset(ROWS[::-1]), 5, seed=0)
    assert sorted(contents(other_order)) == contents(held_out)
    _, other_seed = split_off(dataset(ROWS), 5, seed=1)
    assert contents(other_seed) != contents(held_out)


def test_equal_rows_stay_together():
    train, held_out = split_off(dataset([*ROWS[:20], *ROWS[:20]]), 0.3, seed=0)
    assert rows_in_both(train, held_out) == 0 and len(held_out) >= 12


def test_something_must_be_left():
    with pytest.raises(DataError, match=r"holds 100 rows out, but there are 100"):
        split_off(dataset(ROWS), 100, seed=0)
    with pytest.raises(DataError, match="the rows are all the same"):
        split_off(dataset([(1, 2)] * 10), 2, seed=0)


def test_rows_in_both():
    assert rows_in_both(dataset(ROWS), dataset([*ROWS[:3], (1, 2, 3), (4, 4)])) == 3
    assert rows_in_both(dataset(ROWS), dataset([])) == 0


def test_a_digest_has_one_value_everywhere():
    assert content_digest([1, 2, 3]) == content_digest(np.array([1, 2, 3], np.int64))
    assert content_digest([1, 2, 3]) != content_digest([1, 2, 3], seed=1)


def test_parts_are_told_apart():
    first, second = split_off(dataset(ROWS), 50, seed=0)
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == split_off(dataset(ROWS), 50, seed=0)[0].fingerprint


@pytest.mark.parametrize("value", [0, 1.0, -0.1, True, "5%"])
def test_other_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="must be a share between 0 and 1, a whole number"):
        Config(model={"path": "m"}, data={"eval_split": value})


def test_one_of_both():
    with pytest.raises(ConfigError, match=r"eval_split.* cannot stand beside data\.eval"):
        Config(model={"path": "m"}, data={"train": "a", "eval": "b", "eval_split": 0.1})
    assert json.loads(Config(model={"path": "m"}).model_dump_json())["data"]["eval_split"] is None
