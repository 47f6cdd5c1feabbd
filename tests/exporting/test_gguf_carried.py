"""What goes from one GGUF file into another as it is, and what is stored anew, and how."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.exporting.gguf import passthrough_metadata, passthrough_tensors
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD

OTHER, SHAPE = "blk.0.attn_q.weight", (4, 64)
Q4_0, Q8_0 = (find_file_type(name).kind for name in ("q4_0", "q8_0"))


class File:
    """A file whose tensors are all of one shape and type."""

    def __init__(self, names):
        self._names = names
        self.metadata = {
            "split.count": 2, "general.architecture": "llama", "llama.block_count": 1,
            "general.alignment": 32, "quantize.imatrix": 1, "general.name": "a",
        }  # fmt: skip

    def names(self):
        return self._names

    def __contains__(self, name):
        return name in self._names

    def tensor(self, name):
        place = SimpleNamespace(shape=SHAPE, type="stored type")
        return SimpleNamespace(place=place, data=np.arange(8, dtype=np.uint8))


def carried(names, adapted, *, untied=False):
    """The tensors of a new file, of which some are adapted."""
    leaf = lambda name: SimpleNamespace(stored=name, first_row=0)  # noqa: E731
    placements = {
        f"model.{name}": SimpleNamespace(
            leaves=[leaf(name)], stored=name, as_stored=lambda array: [array]
        )
        for name in names
    }
    file = File(names)
    merged = SimpleNamespace(
        is_adapted=lambda name: name.removeprefix("model.") in adapted, untied=untied,
        float32=lambda name: np.full(SHAPE, 0.5, np.float32),
        architecture=SimpleNamespace(head_name=HEAD), stored_name=lambda name: f"model.{name}",
        source_of=lambda name: f"model.{EMBEDDING}",
    )  # fmt: skip
    made = passthrough_tensors(merged, SimpleNamespace(file=file, placements=placements), Q4_0)
    return {tensor.name: tensor for tensor in made}


def test_keys_of_the_file_itself_stay_behind():
    assert passthrough_metadata(SimpleNamespace(file=File([]))) == {
        "llama.block_count": 1, "general.name": "a"
    }  # fmt: skip


def test_what_no_adapter_changes_goes_on_bit_for_bit(monkeypatch):
    released = []
    release_pages = "qlora_wgpu.exporting.gguf.release_pages"
    monkeypatch.setattr(release_pages, lambda array: released.append(array.tolist()))
    made = carried([EMBEDDING, OTHER], [OTHER])
    assert (made[EMBEDDING].kind, made[OTHER].kind) == ("stored type", Q4_0)
    (part,) = made[EMBEDDING].parts
    assert np.concatenate(list(part())).tolist() == list(range(8)) and released == [[*range(8)]]
    (part,) = made[OTHER].parts
    assert sum(each.nbytes for each in part()) == made[OTHER].nbytes


@pytest.mark.parametrize(("names", "name", "untied", "kind"), [
    ([EMBEDDING, OTHER], EMBEDDING, False, Q8_0),  # the head, too
    ([EMBEDDING, OTHER], EMBEDDING, True, Q4_0),
    ([EMBEDDING, HEAD], EMBEDDING, False, Q4_0),
    ([EMBEDDING, HEAD], HEAD, False, Q8_0),
])  # fmt: skip
def test_what_makes_logits_keeps_more_bits(names, name, untied, kind):
    assert carried(names, [name], untied=untied)[name].kind == kind


@pytest.mark.parametrize(("adapted", "kind"), [([HEAD], Q8_0), ([EMBEDDING], "stored type")])
def test_a_head_that_is_the_embedding_no_longer_comes_last(adapted, kind):
    made = carried([EMBEDDING, OTHER], adapted, untied=True)
    assert list(made) == [EMBEDDING, OTHER, HEAD] and made[HEAD].kind == kind
    assert made[HEAD].shape == SHAPE
