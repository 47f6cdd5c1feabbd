"""Rows that are held out: by their contents, on every machine the same."""

import json

import numpy as np
import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu import Config
from qlora_wgpu.data import Dataset, Example, content_digest, rows_in_both, train_test_split
from qlora_wgpu.data.dataset import load_dataset
from qlora_wgpu.data.mixture import MixtureSource, interleave
from qlora_wgpu.data.row_stats import PreprocessConfig
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
    train, held_out = train_test_split(dataset(ROWS), size, seed=3)
    assert len(held_out) == count and len(train) == 100 - count
    assert sorted(contents(train) + contents(held_out)) == ROWS
    assert train.num_tokens == 3 * len(train) and held_out.longest == 3
    assert train.max_token_id == max(max(row) for row in contents(train))
    assert train.num_label_tokens == 2 * len(train)


def test_the_choice_follows_from_seed_and_contents_alone():
    _, held_out = train_test_split(dataset(ROWS), 5, seed=0)
    # As computed on other machines, for ever.
    assert [row[0] for row in contents(held_out)] == RECORDED
    _, other_order = train_test_split(dataset(ROWS[::-1]), 5, seed=0)
    assert sorted(contents(other_order)) == contents(held_out)
    _, other_seed = train_test_split(dataset(ROWS), 5, seed=1)
    assert contents(other_seed) != contents(held_out)


def test_equal_rows_stay_together():
    train, held_out = train_test_split(dataset([*ROWS[:20], *ROWS[:20]]), 0.3, seed=0)
    assert rows_in_both(train, held_out) == 0 and len(held_out) >= 12


def test_something_must_be_left():
    with pytest.raises(DataError, match=r"holds out 100 rows, but there are only 100"):
        train_test_split(dataset(ROWS), 100, seed=0)
    with pytest.raises(DataError, match="all rows are equal"):
        train_test_split(dataset([(1, 2)] * 10), 2, seed=0)


def test_rows_in_both():
    assert rows_in_both(dataset(ROWS), dataset([*ROWS[:3], (1, 2, 3), (4, 4)])) == 3
    assert rows_in_both(dataset(ROWS), dataset([])) == 0


def test_a_digest_has_one_value_everywhere():
    assert content_digest([1, 2, 3]) == content_digest(np.array([1, 2, 3], np.int64))
    assert content_digest([1, 2, 3]) != content_digest([1, 2, 3], seed=1)


def test_parts_are_told_apart():
    first, second = train_test_split(dataset(ROWS), 50, seed=0)
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == train_test_split(dataset(ROWS), 50, seed=0)[0].fingerprint


@pytest.mark.parametrize("value", [0, 1.0, -0.1, True, "5%"])
def test_other_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="must be a fraction between 0 and 1, an integer"):
        Config(model={"path": "m"}, data={"eval_split": value})


def test_one_of_both():
    with pytest.raises(ConfigError, match=r"eval_split.* and data\.eval are mutually exclusive"):
        Config(model={"path": "m"}, data={"train": "a", "eval": "b", "eval_split": 0.1})
    assert json.loads(Config(model={"path": "m"}).model_dump_json())["data"]["eval_split"] is None


def windows_of(tmp_path, texts, length, **more):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    how = PreprocessConfig(length, truncation="windows")
    return load_dataset(path, tiny_tokenizer(bos=False), length, how=how, **more)


TEXTS = [letter * (11 + n % 5) for n, letter in enumerate("abcdefghijklmnop")]


def texts_of(part):
    """The letters of the texts that its windows are of."""
    tokenizer = tiny_tokenizer(bos=False)
    return {tokenizer.decode(example.input_ids.tolist())[0] for example in part}


@pytest.mark.parametrize("cache", [False, True])
def test_the_windows_of_a_text_stay_together(tmp_path, monkeypatch, cache):
    """Else a model would be measured on texts of which it was trained on the rest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(1 + cache):  # read, and read again from the cache
        data = windows_of(tmp_path, TEXTS, 5, cache=cache)
        train, held_out = train_test_split(data, 0.2, seed=1)
        assert len(train) + len(held_out) == len(data) > 2 * len(TEXTS)
        assert not texts_of(train) & texts_of(held_out)
        assert held_out.counts.rows == len(texts_of(held_out)) == 3


def test_a_text_that_a_mixture_repeats_stays_together(tmp_path):
    whole, some = (windows_of(tmp_path, part, 5) for part in (TEXTS, TEXTS[:3]))
    mixed = interleave(
        [whole, some], ["a", "b"], [MixtureSource(), MixtureSource(rows=30)], "first_exhausted", 0
    )
    train, held_out = train_test_split(mixed, 0.5, seed=0)
    assert len(mixed) == len(whole) + 30 and not texts_of(train) & texts_of(held_out)


def test_one_text_cannot_be_parted(tmp_path):
    with pytest.raises(DataError, match=r"only 1 \(windows of a document stay together\)"):
        train_test_split(windows_of(tmp_path, ["ab" * 20], 5), 1, seed=0)
