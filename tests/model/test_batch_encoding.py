"""A micro-batch's checks and its bytes: every field where the shaders look for it."""

import numpy as np
import pytest

from qlora_wgpu.data import Example
from qlora_wgpu.errors import DataError, ShapeError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import (
    checked_ids,
    checked_labels,
    checked_mask,
    encode_batch,
    positions,
    sample_lengths,
    segments,
    shifted_targets,
)
from qlora_wgpu.ops.batch import INFO_DROPOUT, INFO_KEY, INFO_LABEL_ROWS, make_batch_buffers
from qlora_wgpu.training.data import as_dataset

VOCAB = 83


@pytest.mark.parametrize("given", [[[0, 82]], np.array([[0, 82]], np.uint8), ((0, 82),)])
def test_ids(given):
    ids = checked_ids(given, VOCAB)
    assert ids.dtype == np.int64 and ids.tolist() == [[0, 82]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2], r"shape \(batch, seq\), got \(2,\)"),
        ([[[1]]], r"got \(1, 1, 1\)"),
        (np.zeros((0, 4), int), r"got \(0, 4\)"),
        (np.zeros((4, 0), int), r"got \(4, 0\)"),
        ([[1.0, 2.0]], "integers, got float64"),
        ([[True]], "integers, got bool"),
        ([["a"]], "integers"),
        ([[0, 83]], "from 0 to 82"),
        ([[-1, 0]], "got -1 to 0"),
        ([[-100, 0]], "got -100"),
    ],
)
def test_wrong_ids(given, message):
    with pytest.raises(ShapeError, match=message):
        checked_ids(given, VOCAB)


def test_ids_of_images_and_sound_are_refused():
    holes = range(4, 5), range(80, 90)
    assert checked_ids([[3, 5, 79]], VOCAB, holes).tolist() == [[3, 5, 79]]
    for wrong in 4, 80, 82:
        with pytest.raises(ShapeError, match=rf"input_ids contain {wrong}, a token of images"):
            checked_ids([[3, wrong]], VOCAB, holes)


def test_labels():
    labels = checked_labels([[-100, 0, 82]], (1, 3), VOCAB)
    assert labels.tolist() == [[-100, 0, 82]]
    assert (checked_labels([[-100] * 3], (1, 3), VOCAB) == IGNORE_INDEX).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 2]], r"shape \(1, 3\), got \(1, 2\)"),
        ([1, 2, 3], r"got \(3,\)"),
        ([[1, 2, 83]], "got 1 to 83"),
        ([[1, 2, -1]], "got -1 to 2"),
        ([[1, 2, -101]], "got -101"),
        ([[1.0, 2.0, 3.0]], "integers"),
        ([[float("nan"), 2, 3]], "integers"),
    ],
)
def test_wrong_labels(given, message):
    with pytest.raises(ShapeError, match=message):
        checked_labels(given, (1, 3), VOCAB)


def test_masks():
    assert checked_mask(None, (2, 3)).tolist() == [[1] * 3] * 2
    assert checked_mask([[True, False]], (1, 2)).tolist() == [[1, 0]]
    assert checked_mask([[0, 0]], (1, 2)).tolist() == [[0, 0]]


def test_packed_samples():
    mask = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]])
    assert checked_mask(mask, mask.shape).tolist() == mask.tolist()
    assert positions(mask).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert segments(mask).tolist() == [[1, 1, 1, 4, 4, 6, 0, 0], [0, 0, *[3] * 6]]
    # Padding within a sample does not end it.
    holes = np.array([[1, 0, 1, 2, 0, 2]])
    assert segments(holes).tolist() == [[1, 0, 1, 4, 0, 4]]
    assert positions(holes).tolist() == [[0, 1, 2, 0, 1, 2]]
    assert shifted_targets(np.arange(6)[None], holes).tolist() == [[1, 2, -100, 4, 5, -100]]
    labels = np.arange(16).reshape(2, 8)
    targets = shifted_targets(labels, mask)
    # Nothing predicts the first token of another sample.
    assert targets.tolist() == [[1, 2, -100, 4, -100, 6, 7, -100], [*range(9, 16), -100]]


@pytest.mark.parametrize("given", [[[2, 1]], [[-1, 0]], [[1]], [1, 0], [[1.0, 0.0]], [["1", "0"]]])
def test_wrong_masks(given):
    with pytest.raises(ShapeError, match="attention_mask"):
        checked_mask(given, (1, 2))


def test_targets_are_the_next_labels():
    labels = np.array([[5, 6, IGNORE_INDEX, 8], [1, IGNORE_INDEX, 3, 4]])
    before = labels.copy()
    expected = [[6, IGNORE_INDEX, 8, IGNORE_INDEX], [IGNORE_INDEX, 3, 4, IGNORE_INDEX]]
    assert shifted_targets(labels).tolist() == expected
    assert np.array_equal(labels, before)
    assert shifted_targets(np.array([[7]])).tolist() == [[IGNORE_INDEX]]


def unpacked(batch, data):
    fields = {}
    for name in ("input_ids", "targets", "label_rows", "positions", "segments", "info"):
        tensor = getattr(batch, name)
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        fields[name] = raw.view(tensor.dtype).tolist()
    return fields


@pytest.mark.parametrize("shape", [(2, 3), (3, 67)])
def test_packing(shape):
    rng = np.random.default_rng(0)
    batch, ids = make_batch_buffers(*shape), rng.integers(0, VOCAB, shape)
    mask = rng.integers(0, 2, shape)
    targets = np.where(rng.random(shape) < 0.5, ids, IGNORE_INDEX)
    data = encode_batch(batch, ids, mask, targets, dropout_key=2**32 - 1)
    assert data.nbytes == batch.storage.nbytes and data.dtype == np.uint8
    fields = unpacked(batch, data)
    rows = [i for i, t in enumerate(targets.reshape(-1)) if t != IGNORE_INDEX]
    assert fields["input_ids"] == ids.reshape(-1).tolist()
    assert fields["targets"] == targets.reshape(-1).tolist()
    first = [(row > 0).argmax() + 1 for row in mask]
    assert fields["segments"] == (mask * np.array(first)[:, None]).reshape(-1).tolist()
    assert fields["positions"] == list(range(shape[1])) * shape[0]
    assert fields["label_rows"][: len(rows)] == rows
    info = fields["info"]
    assert (info[INFO_LABEL_ROWS], info[INFO_DROPOUT], info[INFO_KEY]) == (len(rows), 1, 2**32 - 1)


def test_packing_without_dropout_or_labels():
    batch, ids = make_batch_buffers(1, 4), np.array([[1, 2, 3, 4]])
    mask = np.ones_like(ids)
    info = unpacked(batch, encode_batch(batch, ids, mask, np.full_like(ids, IGNORE_INDEX)))["info"]
    assert (info[INFO_LABEL_ROWS], info[INFO_DROPOUT]) == (0, 0)
    asked = unpacked(batch, encode_batch(batch, ids, mask, rows=np.array([3, 1])))
    assert asked["label_rows"][:2] == [3, 1] and asked["info"][INFO_LABEL_ROWS] == 2


def test_fields_of_a_batch_can_be_bound_and_do_not_overlap():
    batch = make_batch_buffers(3, 67)
    names = ("input_ids", "targets", "label_rows", "positions", "segments", "info")
    fields = sorted((getattr(batch, n).offset, getattr(batch, n).nbytes) for n in names)
    ends = [offset + nbytes for offset, nbytes in fields]
    assert all(offset % 256 == 0 for offset, _ in fields)
    assert all(end <= start for end, (start, _) in zip(ends, fields[1:], strict=False))
    assert ends[-1] <= batch.storage.nbytes


def test_rows_of_a_data_set():
    example = Example(np.array([1, 2], np.int32), np.array([-100, 2], np.int32))
    mapped = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]}
    one, two, three = as_dataset([example, mapped, {"input_ids": np.array([4, 5])}], "d", VOCAB)
    assert one.input_ids.tolist() == [1, 2] and one.labels.tolist() == [-100, 2]
    assert two.input_ids.tolist() == [1, 2] and two.labels.tolist() == [-100, 2]
    assert three.labels.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "d is empty"),
        ([{"input_ids": [1]}, {"labels": [1]}], r"d\[1\] must have input_ids"),
        (["text"], "got str"),
        ([{"input_ids": []}], r"d\[0\].* (integers|no tokens)"),
        ([{"input_ids": [[1, 2]]}], "list of integers"),
        ([{"input_ids": [1.5]}], "list of integers"),
        ([{"input_ids": [1, 83]}], r"token id 83.*vocab_size is 83"),
        ([{"input_ids": [1, 2], "labels": [1, 83]}], "token id 83"),
        ([{"input_ids": [1, -1], "labels": [1, 2]}], "token id -1"),
        ([{"input_ids": [1, 2], "labels": [1, -1]}], "token id -1"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids but 1 labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "attention_mask of 1"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "no tokens"),
    ],
)
def test_wrong_rows(rows, message):
    with pytest.raises(DataError, match=message):
        as_dataset(rows, "d", VOCAB)


def test_lengths_of_samples():
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [1, 1, 2, 3, 3], [0, 0, 0, 0, 0]])
    expected = [[3, 3, 3, 1, 1], [1, 3, 3, 1, 1], [2, 2, 1, 2, 2], [1] * 5]
    assert sample_lengths(mask).tolist() == expected
    # What follows a sample changes nothing for it, and padding within one counts as ever.
    assert sample_lengths(np.array([[1, 0, 1, 0, 2, 0]]))[0, [0, 2, 4]].tolist() == [3, 3, 1]
