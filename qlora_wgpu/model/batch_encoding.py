"""Checking and packing a micro-batch into the one buffer that a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.tensor import pad_rows
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.steps import SampleInputs, ScoreInputs, kind_of_samples
from qlora_wgpu.ops.batch import (
    INFO_DROPOUT,
    INFO_KEY,
    INFO_LABEL_ROWS,
    INFO_LENGTH,
    INFO_SAMPLES,
    BatchBuffers,
)

if TYPE_CHECKING:  # which imports this module
    from qlora_wgpu.model.image_inputs import ImageInputs

IntArray = npt.NDArray[np.int64]
MEDIA_TOKEN = "a token of images or sound, which are not read here: leave it out"


def checked_ids(input_ids: Any, vocab_size: int, media_ids: Sequence[range] = ()) -> IntArray:
    ids = _integers("input_ids", input_ids)
    if ids.ndim != 2 or not ids.size:
        raise ShapeError(f"input_ids must have shape (batch, seq), got {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ShapeError(
            f"input_ids must be from 0 to {vocab_size - 1} (vocab_size {vocab_size}), "
            f"got {ids.min()} to {ids.max()}"
        )
    if (token := first_media_id(ids, media_ids)) is not None:
        raise ShapeError(f"input_ids contain {token}, {MEDIA_TOKEN}")
    return ids


def first_media_id(ids: npt.NDArray[np.integer[Any]], media_ids: Sequence[range]) -> int | None:
    """The first of ``Architecture.media_ids`` among token ids, if there is one."""
    largest = ids.max(initial=-1)
    for each in media_ids:
        if largest >= each.start and (found := ids[(ids >= each.start) & (ids < each.stop)]).size:
            return int(found[0])
    return None


def checked_labels(labels: Any, shape: tuple[int, ...], vocab_size: int) -> IntArray:
    array = _integers("labels", labels)
    if array.shape != shape:
        raise ShapeError(f"labels must have input_ids' shape {shape}, got {array.shape}")
    real = array[array != IGNORE_INDEX]
    if real.size and (real.min() < 0 or real.max() >= vocab_size):
        raise ShapeError(
            f"labels must be {IGNORE_INDEX} or from 0 to {vocab_size - 1}, "
            f"got {real.min()} to {real.max()}"
        )
    return array


def checked_mask(attention_mask: Any, shape: tuple[int, ...]) -> IntArray:
    """The mask as an int64 array of the ids' shape, all ones if there is none.

    Examples that are packed into one row are numbered from 1.
    """
    if attention_mask is None:
        return np.ones(shape, np.int64)
    mask = np.asarray(attention_mask)
    mask = _integers("attention_mask", mask.astype(np.int64) if mask.dtype == bool else mask)
    if mask.shape != shape:
        raise ShapeError(f"attention_mask must have input_ids' shape {shape}, got {mask.shape}")
    if mask.min() < 0:
        raise ShapeError("attention_mask must be 0 for padding, else 1 or the example's number")
    if mask.max() > 1:
        later = mask[:, 1:] < np.maximum.accumulate(mask, axis=1)[:, :-1]
        if (later & (mask[:, 1:] > 0)).any():
            raise ShapeError("attention_mask must number the examples of a row in ascending order")
    return mask


def checked_weights(weights: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    array = np.asarray(weights, np.float32)
    if array.shape != shape:
        raise ShapeError(f"weights must have input_ids' shape {shape}, got {array.shape}")
    if not np.isfinite(array).all() or array.min() < 0:
        raise ShapeError("weights must be finite and not negative")
    return array


def _integers(name: str, value: Any) -> IntArray:
    try:
        array = np.asarray(value)
    except ValueError:  # NumPy's error does not name the argument
        raise ShapeError(f"{name} must have rows of equal length: pad the shorter ones") from None
    if array.dtype.kind not in "iu":
        raise ShapeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def shifted_targets(labels: IntArray, mask: IntArray | None = None) -> IntArray:
    """Each row's labels shifted left by one: position t predicts the label of t + 1.

    If ``mask`` numbers several examples in a row, none predicts the next one's first token.
    """
    targets = np.full_like(labels, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    if mask is not None:
        targets[:, :-1][(_begins(mask) & (mask > 1))[:, 1:]] = IGNORE_INDEX
    return targets


def segments(mask: IntArray) -> IntArray:
    """(batch, seq): 0 for padding, else 1 + the position at which the token's example begins."""
    first = np.maximum.accumulate(_begins(mask) * np.arange(mask.shape[1]), axis=1)
    return np.where(mask > 0, first + 1, 0)


def _begins(mask: IntArray) -> npt.NDArray[np.bool_]:
    """Marks the first tokens of examples; there may be padding between examples of a row."""
    before = np.zeros_like(mask)
    before[:, 1:] = np.maximum.accumulate(mask, axis=1)[:, :-1]
    begins: npt.NDArray[np.bool_] = mask > before
    return begins


def positions(mask: IntArray) -> IntArray:
    """Positions (batch, seq), starting at 0 in each row and each packed example.

    Padding counts, as in Hugging Face's models.
    """
    count = np.arange(mask.shape[1])
    return count - np.maximum.accumulate((_begins(mask) & (mask > 1)) * count, axis=1)


def pooled_rows(ids: IntArray, mask: IntArray, padding: int | None) -> IntArray:
    """Where each row's sequence is scored, as in transformers: its last token other than padding.

    Positions count over all rows; rows without tokens have none. A sequence of nothing but the
    padding token is scored at its first token.
    """
    counts = (mask > 0) if padding is None else (mask > 0) & (ids != padding)
    last = (counts * np.arange(ids.shape[1])).argmax(axis=1)
    used = np.flatnonzero((mask > 0).any(axis=1))
    rows: IntArray = used * ids.shape[1] + last[used]
    return rows


def sample_lengths(mask: IntArray) -> IntArray:
    """(batch, seq): the number of positions of each token's example; 1 for padding.

    Whatever follows an example in its row, padding or another example, does not count.
    """
    rows, segment = np.arange(len(mask))[:, None], segments(mask)
    lengths = np.zeros((len(mask), mask.shape[1] + 1), np.int64)
    np.maximum.at(lengths, (rows, segment), positions(mask) + 1)
    lengths[:, 0] = 1
    return lengths[rows, segment]


def write_batch(
    device: Device,
    batch: BatchBuffers,
    ids: IntArray,
    mask: IntArray,
    targets: IntArray | None = None,
    *,
    past: int | IntArray = 0,
    images: ImageInputs | None = None,
    rotated: IntArray | None = None,
    **inputs: Any,
) -> None:
    """Writes a micro-batch to a device; arguments as for ``encode_batch``.

    ``rotated``, (batch, seq), are the positions for RoPE if they differ from the others.
    """
    data = encode_batch(batch, ids, mask, targets, past=past, images=images, **inputs)
    device.write(batch.storage.buffer, data)
    if batch.rotated is not None and rotated is not None:
        assert batch.rotated.storage is not None
        device.write(batch.rotated.storage.buffer, rotated.astype(np.uint32))
    if images is not None and batch.images is not None and batch.images.stand_in is not None:
        ids = np.where(images.rows > 0, batch.images.stand_in, ids)
    for weight, rows_of in batch.embedded.items():
        assert rows_of.table.storage is not None
        device.write(rows_of.table.storage.buffer, weight.taken(ids.reshape(-1)))
    for rotation, angles in batch.angles.items():
        assert angles.table.storage is not None
        at, lengths = positions(mask) + past, sample_lengths(mask) + past
        at = at.reshape(-1)
        if batch.axes is not None and images is not None and images.positions is not None:
            at = images.positions.reshape(-1, 3)[:, batch.axes]
        table = rotation.angles(at, lengths.reshape(-1))
        device.write(angles.table.storage.buffer, np.ascontiguousarray(table))
    if images is not None and len(images.features):
        for part, space in batch.features.items():
            assert space.storage is not None
            rows = images.features[:, part * space.columns : (part + 1) * space.columns]
            device.write(space.storage.buffer, pad_rows(rows))


def encode_batch(
    batch: BatchBuffers,
    ids: IntArray,
    mask: IntArray,
    targets: IntArray | None = None,
    rows: npt.NDArray[np.integer[Any]] | None = None,
    dropout_key: int | None = None,
    past: int | IntArray = 0,
    weights: npt.NDArray[np.float32] | None = None,
    places: int | IntArray = 0,
    samples: SampleInputs | None = None,
    images: ImageInputs | None = None,
    blocks: IntArray | None = None,
) -> npt.NDArray[np.uint8]:
    """The bytes of a batch's storage; ids, mask, targets and weights are (batch, seq).

    The mask is 0 for padding, else the number of the example. ``rows`` replace the rows with a
    target as label rows; ``images`` are required if the batch has space for some. ``past`` is the
    number of earlier tokens in the batch's KV cache, and ``places`` the sequences of the cache that
    the rows belong to, (batch, 1) if they differ. ``blocks``, (batch, seq, 2), are the begin and
    end within its row of each token's block, whose tokens see each other in both directions; a
    token with an empty one only sees causally. By default they are those of the images.
    """
    data = np.zeros(batch.storage.nbytes, np.uint8)

    def put(offset: int, values: npt.NDArray[Any], dtype: type) -> None:
        raw = np.ascontiguousarray(values.reshape(-1).astype(dtype)).view(np.uint8)
        data[offset : offset + raw.size] = raw

    if isinstance(samples, ScoreInputs):
        rows = samples.rows
    if rows is None:
        rows = np.zeros(0, np.int64)
        if targets is not None:
            rows = np.flatnonzero(targets.reshape(-1) != IGNORE_INDEX)
    info = np.zeros(INFO_LENGTH, np.uint32)
    info[INFO_LABEL_ROWS] = len(rows)
    if samples is not None:
        info[INFO_SAMPLES] = len(samples)
    if dropout_key is not None:
        info[INFO_DROPOUT], info[INFO_KEY] = 1, dropout_key
    put(batch.input_ids.offset, ids, np.uint32)
    put(batch.label_rows.offset, np.asarray(rows), np.uint32)
    put(batch.positions.offset, positions(mask) + past, np.uint32)
    put(batch.segments.offset, segments(mask), np.uint32)
    put(batch.info.offset, info, np.uint32)
    if batch.places is not None:
        put(batch.places.offset, np.broadcast_to(places, ids.shape), np.uint32)
    if batch.blocks is not None:
        if blocks is None and images is not None:
            blocks = images.blocks
        put(batch.blocks.offset, _segments_and_blocks(mask, blocks), np.uint32)
    if targets is not None:
        put(batch.targets.offset, targets, np.int32)
    if batch.weights is not None:
        given = np.ones(ids.shape, np.float32) if weights is None else weights
        put(batch.weights.offset, given.reshape(-1)[rows], np.float32)
    if batch.image_rows is not None:
        if images is None or len(images.features) > batch.image_capacity:
            raise ShapeError(
                f"the batch requires images of at most {batch.image_capacity} tokens in all"
            )
        put(batch.image_rows.offset, images.rows, np.uint32)
    kind = kind_of_samples(batch)
    if kind is not None:
        if not isinstance(samples, kind):
            raise ShapeError(f"the objective requires samples of the type {kind.__name__}")
        for tensor, values in samples.encode(batch, segments(mask), np.asarray(rows)):
            put(tensor.offset, values, np.dtype(tensor.dtype).type)
    return data


def _segments_and_blocks(mask: IntArray, blocks: IntArray | None) -> IntArray:
    """The segments, then the blocks; a token without one is a block by itself."""
    at = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    own = np.stack([at, at + 1], axis=-1)
    if blocks is not None:
        own = np.where(blocks[..., 1:] > blocks[..., :1], blocks, own)
    return np.concatenate([segments(mask).reshape(-1), own.reshape(-1)])
