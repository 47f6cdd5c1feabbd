"""Images in a micro-batch: which rows of features replace which tokens' embeddings, and where.

The features are computed before training, since the tower is frozen. Each token with the model's
image token id is a placeholder for one row of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.batch_encoding import IntArray, positions
from qlora_wgpu.ops.batch import ImageLayout

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """What a frozen tower makes of an image, for the language model.

    Attributes:
        rows: float32 (tokens, (1 + DeepStack layers) · hidden_size): what replaces the embeddings
            of the image's placeholders, then what is added to the hidden states after the layers
            0, 1, … of models with DeepStack.
        grid: Rows and columns of the image's tokens, for models with M-RoPE; else None.
    """

    rows: FloatArray
    grid: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """A micro-batch's images, besides its token ids."""

    features: FloatArray  # the rows of all images, in the order of their placeholders
    rows: IntArray  # (batch, seq): 0, or for a placeholder 1 + its row of ``features``
    # (batch, seq, 3), for M-RoPE: time, height and width of each token; else None.
    positions: IntArray | None = None
    # (batch, seq, 2), for models whose images attend in both directions: the first place of the
    # token's image in its row and one past the last, equal for other tokens; else None.
    blocks: IntArray | None = None


Images = Sequence[Sequence[ImageFeatures]]
"""The images of each row of a micro-batch, in the order of their placeholders."""


def image_inputs(ids: IntArray, mask: IntArray, images: Images, of: Architecture) -> ImageInputs:
    """The images of a micro-batch with checked ids and mask, (batch, seq) each.

    Raises:
        ShapeError: If the model takes no images, or if they do not fit their placeholders.
    """
    layout = of.images
    if layout is None:
        raise ShapeError("images are not supported for this model")
    if len(images) != len(ids):
        raise ShapeError(f"images must have a list for each of {len(ids)} rows, got {len(images)}")
    is_image = (ids == layout.token_id) & (mask > 0)
    width = (1 + layout.deepstack) * of.hidden_size
    for row, own in enumerate(images):
        _check(row, own, int(is_image[row].sum()), layout, width)
    features = [image.rows for own in images for image in own]
    numbers = np.cumsum(is_image).reshape(ids.shape)
    return ImageInputs(
        np.concatenate(features) if features else np.zeros((0, width), np.float32),
        np.where(is_image, numbers, 0),
        None if layout.axes is None else _positions(mask, is_image, images),
        _blocks(is_image) if layout.bidirectional else None,
    )


def _check(
    row: int, images: Sequence[ImageFeatures], count: int, layout: ImageLayout, width: int
) -> None:
    for image in images:
        shape, grid = image.rows.shape, image.grid
        if len(shape) != 2 or shape[1] != width:
            raise ShapeError(
                f"the features of an image must have shape (tokens, {width}), got {shape}"
            )
        if layout.axes is not None and (grid is None or grid[0] * grid[1] != shape[0]):
            raise ShapeError(f"the grid of an image must have its {shape[0]} tokens, got {grid}")
    given = sum(len(image.rows) for image in images)
    if given != count:
        raise ShapeError(
            f"row {row} has {count} image tokens (id {layout.token_id}), but its {len(images)} "
            f"images have {given}"
        )


def _positions(mask: IntArray, is_image: npt.NDArray[np.bool_], images: Images) -> IntArray:
    """The positions of M-RoPE; those of samples without images are the ordinary ones."""
    places = np.repeat(positions(mask)[..., None], 3, axis=-1)
    for row, own in enumerate(images):
        left = iter(own)
        for number in np.unique(mask[row][is_image[row]]):
            sample = np.flatnonzero(mask[row] == number)
            places[row, sample] = _sample_positions(is_image[row, sample], left)
    return places


def _sample_positions(is_image: npt.NDArray[np.bool_], images: Iterator[ImageFeatures]) -> IntArray:
    """(tokens, 3): an image's tokens lie on its grid, and text continues from its longer side."""
    places = np.empty((len(is_image), 3), np.int64)
    begin = following = 0
    while begin < len(is_image):
        rest = is_image[begin:]
        if is_image[begin]:
            grid = next(images).grid
            assert grid is not None  # checked
            count, longest = grid[0] * grid[1], max(grid)
            if not rest[:count].all():
                raise ShapeError(f"an image's {count} tokens must follow each other in one sample")
            places[begin : begin + count] = following
            places[begin : begin + count, 1:] += np.indices(grid).reshape(2, -1).T
        else:
            count = longest = int(rest.argmax()) if rest.any() else len(rest)
            places[begin : begin + count] = following + np.arange(count)[:, None]
        begin, following = begin + count, following + longest
    return places


def _blocks(is_image: npt.NDArray[np.bool_]) -> IntArray:
    """(batch, seq, 2): the run of placeholders that a token is in, as in transformers."""
    edges = np.diff(is_image.astype(np.int8), prepend=0, append=0, axis=1)
    blocks = np.zeros((*is_image.shape, 2), np.int64)
    for row, begin in np.argwhere(edges == 1):
        end = begin + int((edges[row, begin:] == -1).argmax())
        blocks[row, begin:end] = begin, end
    return blocks


def image_rows(ids: IntArray, images: ImageInputs | None) -> int:
    """The capacity for image tokens of a step with these ids, so that equal shapes are one step."""
    return 0 if images is None else ids.size


def rope_delta(inputs: ImageInputs, row: int, length: int) -> int:
    """What M-RoPE adds to the position of tokens after a row's first ``length`` ones."""
    if inputs.positions is None:
        return 0
    return int(inputs.positions[row, :length].max()) + 1 - length
