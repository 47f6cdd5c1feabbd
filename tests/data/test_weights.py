"""A column of weights: what each row counts in the loss."""

import numpy as np
import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.config import DataConfig
from qlora_wgpu.data import Dataset, Example, collate, load_dataset
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.mixture import MixtureSource, interleave
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import DataError
from qlora_wgpu.training.data import encoded

WEIGHTED = {"weight": "w"}


def read(weights, columns=WEIGHTED, **how):
    rows = [{"text": f"row {i}", "w": weight} for i, weight in enumerate(weights)]
    return encode_rows(rows, tiny_tokenizer(), PreprocessConfig(32, columns=columns, **how))


def test_a_column_of_weights_counts_where_it_is_named():
    assert [e.weight for e in read([1, 0.5, 2.25, "3"])] == [1.0, 0.5, 2.25, 3.0]
    assert [e.weight for e in read([1, 0.5, -3, None], columns={})] == [1.0] * 4


def test_a_row_without_weight_is_left_out():
    dataset = read([1, 0, 2])
    assert [e.weight for e in dataset] == [1.0, 2.0]
    assert dataset.counts.without_labels == 1
    assert "rows: 1 of 3 rows has the weight 0 and was dropped" in dataset.warnings
    assert not any("max_seq_length" in text for text in dataset.warnings)
    silent = [{"text": "a", "w": 0}, {"text": "b", "w": 1}, {"text": "c", "w": 0}]
    told = encode_rows(silent, tiny_tokenizer(), PreprocessConfig(32, columns=WEIGHTED)).warnings
    assert "rows: 2 of 3 rows have the weight 0 and were dropped" in told
    with pytest.raises(DataError, match="nothing to train on: all of its 2 rows have the weight 0"):
        read([0, 0.0])
    with pytest.raises(DataError, match="nothing to train on: its only row has the weight 0"):
        read([0])


@pytest.mark.parametrize(
    "weight",
    [-1, float("nan"), float("inf"), "much", None, True, [1], 10**400, 1e-40, "-0.5", ""],
)
def test_weights_that_are_none(weight):
    with pytest.raises(DataError, match=r"rows\[1\]: the weight in 'w' must be 0 or a number"):
        read([1, weight])


def test_a_row_that_lacks_the_column():
    how = PreprocessConfig(32, columns=WEIGHTED)
    with pytest.raises(
        DataError, match="maps 'weight' to the column 'w', but the row's columns are"
    ):
        encode_rows([{"text": "a", "w": 1}, {"text": "b"}], tiny_tokenizer(), how)


def test_weights_are_kept_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.csv"
    path.write_text("text,w\nsome,0.25\nmore,4\n")
    how = PreprocessConfig(32, columns=WEIGHTED)
    for _ in range(2):
        dataset = load_dataset(path, tiny_tokenizer(), 32, how=how, cache=True)
        assert [e.weight for e in dataset] == [0.25, 4.0]


def test_weights_are_part_of_what_a_data_set_is():
    assert read([1, 1]).fingerprint == read([3, 3], columns={}).fingerprint
    assert len({read([1, 1]).fingerprint, read([1, 2]).fingerprint, read([2, 1]).fingerprint}) == 3


def test_weights_stay_with_their_rows():
    a, b = read([1, 0.5]), read([3, 2, 4])
    portions = [MixtureSource(), MixtureSource(rows=2)]
    mixture = interleave([a, b], "ab", portions, "first_exhausted", 0)
    by_ids = {tuple(e.input_ids): e.weight for e in b}
    assert [e.weight for e in mixture][:2] == [1.0, 0.5]
    assert all(e.weight == by_ids[tuple(e.input_ids)] for e in list(mixture)[2:])


def test_a_batch_has_the_weight_of_every_token():
    one, two = (Example(np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32), w)
                for n, w in ((3, 0.5), (2, 4.0)))  # fmt: skip
    batch = collate([[one, two], [two]], 0, 6)
    assert batch.weights.tolist() == [[0.5] * 3 + [4.0] * 2 + [0.0], [4.0] * 2 + [0.0] * 4]
    assert Dataset([one, two])[1].weight == 4.0


def test_token_ids_have_no_columns():
    settings = DataConfig(columns=WEIGHTED)
    assert settings.has_weights and not DataConfig(columns={"text": "t"}).has_weights
    sources = [{"path": "a"}, {"path": "b", "columns": WEIGHTED}]
    assert DataConfig(sources=sources).has_weights
    with pytest.raises(DataError, match="rows has token ids, for which data"):
        encoded([{"input_ids": [1]}], "rows", tiny_tokenizer, settings)
