"""What a folder is: a language model or a classifier, with a head of its own or not."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.model import pretrained
from qlora_wgpu.model.pretrained import has_own_head, stored_classes

SCORED = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        ({}, 0),
        ({"architectures": "LlamaForSequenceClassification"}, 0),
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 4}, 0),
        (SCORED, 2),
        (SCORED | {"num_labels": 1}, 1),
        (SCORED | {"num_labels": 5, "id2label": {}}, 5),
        (SCORED | {"num_labels": 5, "id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"architectures": ["A", "BForSequenceClassification"], "id2label": {"0": "a"}}, 1),
    ],
)
def test_classes_of_a_file(config, classes):
    assert stored_classes(config) == classes


@pytest.mark.parametrize("count", [0, -1, "2", True, 2.0])
def test_numbers_of_classes_that_are_none(count):
    with pytest.raises(UnsupportedModelError, match=f"num_labels .* integer, got {count!r}"):
        stored_classes(SCORED | {"num_labels": count})


def weight(array):
    array = np.asarray(array)
    return SimpleNamespace(
        shape=array.shape, stored_dtype=str(array.dtype), read=lambda: array.astype("float32"),
        raw=lambda: array,
    )  # fmt: skip


ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.mark.parametrize(
    ("embedding", "head", "own"),
    [
        (ROWS, None, False),
        (None, ROWS, False),
        (ROWS, ROWS.copy(), False),
        (ROWS, ROWS.astype(np.float16), False),
        (ROWS, ROWS.astype(np.float16) + 1, True),
        (ROWS, ROWS[:4], True),
        (ROWS, np.where(np.arange(10).reshape(5, 2) == 9, 0, ROWS).astype("f4"), True),
        (ROWS, np.where(np.arange(10).reshape(5, 2) == 4, 0, ROWS).astype("f4"), True),
    ],
)
def test_a_head_that_is_a_copy_of_the_embedding_is_none(monkeypatch, embedding, head, own):
    monkeypatch.setattr(pretrained, "_ROWS", 2)
    monkeypatch.setattr(pretrained, "stored_name", lambda folder, of, name: name)
    found = {"e": embedding, "h": head}
    folder = SimpleNamespace(find=lambda name: None if found[name] is None else weight(found[name]))
    assert has_own_head(folder, SimpleNamespace(embed_name="e", head_name="h")) == own
