"""The images of a run's rows and prompts, without a tower."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.data import Example
from qlora_wgpu.limits import MIB
from qlora_wgpu.runs.images import ImagesOfPrompt, images_with_own_device
from qlora_wgpu.training import images
from qlora_wgpu.training.images import BatchImages, images_of, planned_tower, prompt_images

TOKEN = 9


def example(ids, keys):
    ids = np.array(ids, np.int32)
    return Example(ids, ids, images=tuple(keys))


@pytest.mark.parametrize(
    ("length", "longer", "shown"),
    [
        (1, 1, ()),  # before the first image
        (2, 4, ("a",)),  # would cut it
        (3, 4, ("a",)),
        (4, 4, ("a",)),
        (5, 5, ("a",)),
        (6, 8, ("a", "b")),
        (8, 8, ("a", "b")),
        (9, 9, ("a", "b")),
    ],
)
def test_a_prompt_ends_after_an_image_or_before_it(length, longer, shown):
    row = example([1, TOKEN, TOKEN, TOKEN, 2, TOKEN, TOKEN, TOKEN, 3], ("a", "b"))
    tokens = SimpleNamespace(token_id=TOKEN, count=lambda source: source)
    data = SimpleNamespace(image_sources={"a": 3, "b": 3})
    files = SimpleNamespace(tokens=tokens)
    assert prompt_images(row, length, data, files) == (longer, shown)
    assert prompt_images(row, length, data, None) == (length, ())
    assert prompt_images(example([1, 2], ()), length, data, files) == (length, ())


def test_images_of_data_sets_are_all_of_theirs():
    one, two = (SimpleNamespace(image_sources=own) for own in ({"a": 1}, {"a": 1, "b": 2}))
    assert images_of(one, None, two) == {"a": 1, "b": 2} and images_of(None) == {}


def test_a_batch_has_the_images_of_its_rows_and_none_for_padding(monkeypatch):
    monkeypatch.setattr(images, "image_inputs", lambda *given: given)
    of = SimpleNamespace(images=SimpleNamespace(token_id=7))
    batch = BatchImages({"a": 1, "b": 2, "c": 3}, of)
    rows = [[example([1], "a"), example([1], "bc")], [example([1], "")]]
    assert batch(rows, ["ids"] * 4, "mask") == (
        ["ids"] * 4, "mask", [[1, 2, 3], [], [], []], of
    )  # fmt: skip
    assert batch.placeholder == 7 and batch.key == ""


def test_the_largest_kinds_of_a_towers_memory_are_told():
    memory = Counter(a=MIB, b=4 * MIB, c=2 * MIB, d=3 * MIB)
    text = "planned device memory of the vision tower 10.0 MiB, freed once the images are encoded"
    assert planned_tower(memory, "") == f"{text}: b 4.0, d 3.0, c 2.0"
    assert planned_tower(memory, "streamed") == f"{text}: b 4.0, d 3.0, c 2.0; streamed"


def test_without_images_there_is_nothing_to_encode():
    assert images.encoded_images(None, None, {}, None, "float32", None, None) is None


def test_images_of_a_prompt_are_read_by_their_keys():
    shown = ImagesOfPrompt({"a": 1, "b": 2, "c": 3}, ("c", "a", "b"))
    assert (len(shown), shown[0], shown[-1], shown[1:]) == (3, 3, 2, [1, 2]) and [*shown] == [
        3,
        1,
        2,
    ]
    assert images_with_own_device(None, None, {}, None) is None
