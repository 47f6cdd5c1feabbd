"""When launches run: what is made of stored tensors alone, right before it is wanted.

A layer's weights are dequantized for a product. Its other factor is prepared by launches of its
own, which need not have the weights in memory beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import Storage, Tensor


def late(launches: Sequence[Launch], counted: Tensor | None = None) -> list[Launch]:
    """The same launches, with those that read no intermediate moved behind others.

    Each comes right before the first that touches what it makes, or writes what it reads.

    Args:
        launches: In an order that computes what it should.
        counted: A tensor that launches may add to in any order.
    """
    before = list(range(len(launches)))  # the launch that each runs right before, or is
    touched: dict[Tensor | Storage, int] = {}  # the next that touches what is made
    written: dict[Tensor | Storage, int] = {}  # and that writes it
    for index in reversed(range(len(launches))):
        launch = launches[index]
        made = {_place(tensor) for tensor in launch.written() if tensor is not counted}
        read = {_place(t) for t in launch.tensors.values() if t is not counted} - made
        if _may_wait(launch, made, read):
            wanted = min([*_found(touched, made), *_found(written, read)], default=index)
            before[index] = before[wanted]
        touched.update(dict.fromkeys(made | read, index))
        written.update(dict.fromkeys(made, index))
    return [launches[i] for i in sorted(range(len(launches)), key=lambda i: (before[i], i))]


def _place(tensor: Tensor) -> Tensor | Storage:
    return tensor if tensor.storage is None else tensor.storage.whole


def _may_wait(launch: Launch, made: set[Tensor | Storage], read: set[Tensor | Storage]) -> bool:
    # What is filled with zeros reads nothing: it stays before a loop, whose turns are then alike.
    return (
        bool(read)
        and all(isinstance(place, Tensor) for place in made)
        and all(isinstance(place, Storage) for place in read)
        and not launch.saves
        and not launch.fetches
    )


def _found(known: dict[Tensor | Storage, int], places: set[Tensor | Storage]) -> Iterator[int]:
    return (known[place] for place in places if place in known)
