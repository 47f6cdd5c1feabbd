"""Images of a micro-batch: places of features, M-RoPE's positions, and what does not fit."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.model.batch_encoding import positions
from qlora_wgpu.model.image_inputs import ImageFeatures, image_inputs, rope_delta
from qlora_wgpu.ops.batch import ImageLayout

I, WIDTH = 9, 4  # noqa: E741


def image(height, width, columns=WIDTH):
    return ImageFeatures(np.full((height * width, columns), height, np.float32), (height, width))


def inputs(ids, images, mask=None, **layout):
    ids = np.array(ids)
    mask = np.ones_like(ids) if mask is None else np.array(mask)
    told = ImageLayout(I, **{"axes": (0, 1, 2), **layout})
    return image_inputs(ids, mask, images, SimpleNamespace(images=told, hidden_size=WIDTH))


def test_positions_of_images_and_of_text_after_them():
    """As transformers' ``get_rope_index`` of Qwen2-VL gives them."""
    ids = [[5, I, I, I, I, I, I, 6, 6, I, I, 7]]
    made = inputs(ids, [[image(2, 3), image(1, 2)]])
    time, height, width = made.positions[0].T.tolist()
    assert time == [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 6, 8]
    assert height == [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 6, 8]
    assert width == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rope_delta(made, 0, 12) == 9 - 12
    assert made.rows[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 0]


def test_samples_of_a_row_count_from_zero():
    """Samples without images keep their positions, which count padding."""
    mask = [[1, 1, 1, 1, 2, 2, 0, 2, 3, 3, 0, 0], [1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    ids = [[I, I, I, I, 5, 5, 5, 5, 5, I, 5, 5], [5] * 12]
    made = inputs(ids, [[image(2, 2), image(1, 1)], []], mask)
    plain = positions(np.array(mask))
    assert made.positions[0, :4, 2].tolist() == [0, 1, 0, 1]
    assert (made.positions[0, 4:8] == plain[0, 4:8, None]).all()
    assert (made.positions[0, 8:10] == [[0], [1]]).all()
    assert (made.positions[1] == plain[1, :, None]).all()


def test_blocks_are_the_runs_of_placeholders():
    made = inputs([[I, I, 5, I, I], [5, 5, 5, 5, I]], [[image(1, 2)] * 2, [image(1, 1)]],
                  bidirectional=True)  # fmt: skip
    assert made.blocks[0].tolist() == [[0, 2], [0, 2], [0, 0], [3, 5], [3, 5]]
    assert made.blocks[1].tolist() == [[0, 0]] * 4 + [[4, 5]]


@pytest.mark.parametrize(
    ("ids", "images", "sentence"),
    [
        ([[I, I, 5]], [[image(1, 1)]], r"row 0 has 2 image tokens \(id 9\), but its 1 images have"),
        ([[I, 5, 5]], [[]], "row 0 has 1 image tokens"),
        ([[5, 5, 5]], [], "images must have a list for each of 1 rows, got 0"),
        ([[I, 5, I]], [[image(2, 1)]], "an image's 2 tokens must follow each other"),
        ([[I, 5, 5]], [[image(1, 1, 8)]], r"must have shape \(tokens, 4\), got \(1, 8\)"),
        ([[I, I, 5]], [[ImageFeatures(np.ones((2, 4), np.float32))]], "2 tokens, got None"),
    ],
)
def test_what_does_not_fit_is_refused(ids, images, sentence):
    with pytest.raises(ShapeError, match=sentence):
        inputs(ids, images)


def test_a_model_without_images_refuses_them():
    of = SimpleNamespace(images=None, hidden_size=WIDTH)
    with pytest.raises(ShapeError, match="not supported for this model"):
        image_inputs(np.array([[I]]), np.array([[1]]), [[image(1, 1)]], of)
