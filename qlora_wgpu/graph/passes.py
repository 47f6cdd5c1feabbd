"""Passes over launches before memory planning: late scheduling, and the choice of textures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import fold_workgroups
from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.tensor import ITEM_SIZE, TEXEL, Storage, Tensor, ceil_div, vector

# ---- scheduling ------------------------------------------------------------------------------


def schedule_late(launches: Sequence[Launch], counted: Tensor | None = None) -> list[Launch]:
    """The same launches, with those that read no intermediate moved as late as possible.

    Each is placed right before the first launch that accesses its output or writes its input. So
    weights that are dequantized for a product are in memory only when its other factor is ready.
    """
    before = list(range(len(launches)))  # the launch that each is placed before, or itself
    touched: dict[Tensor | Storage, int] = {}  # the next launch that accesses it
    written: dict[Tensor | Storage, int] = {}  # the next launch that writes it
    for index in reversed(range(len(launches))):
        launch = launches[index]
        made = {_place(tensor) for tensor in launch.written() if tensor is not counted}
        read = {_place(t) for t in launch.tensors.values() if t is not counted} - made
        if _may_wait(launch, made, read):
            target = min([*_found(touched, made), *_found(written, read)], default=index)
            before[index] = before[target]
        touched.update(dict.fromkeys(made | read, index))
        written.update(dict.fromkeys(made, index))
    return [launches[i] for i in sorted(range(len(launches)), key=lambda i: (before[i], i))]


def _place(tensor: Tensor) -> Tensor | Storage:
    return tensor if tensor.storage is None else tensor.storage.whole


def _may_wait(launch: Launch, made: set[Tensor | Storage], read: set[Tensor | Storage]) -> bool:
    # Zero-filling stays before a loop, whose iterations are then equal.
    return (
        bool(read)
        and all(isinstance(place, Tensor) for place in made)
        and all(isinstance(place, Storage) for place in read)
        and not launch.saves
        and not launch.fetches
    )


def _found(known: dict[Tensor | Storage, int], places: set[Tensor | Storage]) -> Iterator[int]:
    return (known[place] for place in places if place in known)


# ---- buffers and textures --------------------------------------------------------------------

Wants = Callable[[Tensor], bool]


def assign_layouts(launches: list[Launch], profile: Profile, max_binding: int) -> list[Launch]:
    """Chooses a buffer or a texture for every tensor, and inserts the necessary copies.

    Kernels declare what they require (``gpu/operands.py``); ops do not. A tensor is in a texture if
    some reader requires one and all its writers can write one. Tensors larger than a binding, and
    with a profile's ``in_textures`` all tensors, are in textures if all readers and writers allow
    it.
    """

    def wants(tensor: Tensor) -> bool:
        """Whether an intermediate should be in a texture though no reader requires one."""
        return profile.in_textures or (profile.textures and tensor.nbytes > max_binding)

    launches = _sums_apart(launches, wants)
    _choose_memory(launches, wants)
    copies = _Copies(profile)
    for launch in launches:
        copies.place(launch)
    return copies.launches


def _choose_memory(launches: list[Launch], wants: Wants) -> None:
    intermediates: set[Tensor] = set()
    in_texture: set[Tensor] = set()
    in_buffer: set[Tensor] = set()
    for launch in launches:
        for name, tensor in launch.tensors.items():
            if tensor.storage is None:
                binding = launch.shader.bindings[name]
                intermediates.add(tensor)
                if binding.memory == "texture":
                    in_texture.add(tensor)
                elif binding.memory == "buffer" and (binding.writable or wants(tensor)):
                    in_buffer.add(tensor)
                elif wants(tensor):
                    in_texture.add(tensor)
    for tensor in intermediates:
        tensor.texture = tensor in in_texture and tensor not in in_buffer


def _sums_apart(launches: list[Launch], wants: Wants) -> list[Launch]:
    """Makes launches that add to a texture write the sum to another one, if they can.

    A texture cannot be both read and written. The last sum is the original tensor.
    """
    added = [_added_to(launch, wants) for launch in launches]
    left = Counter(tensor for each in added for tensor in each.values())
    now = {tensor: copy(tensor) for tensor in left}
    apart = []
    for launch, sums in zip(launches, added, strict=True):
        tensors = {name: now.get(tensor, tensor) for name, tensor in launch.tensors.items()}
        for name, tensor in sums.items():
            tensors[f"{name}_before"] = now[tensor]
            left[tensor] -= 1
            now[tensor] = tensors[name] = copy(tensor) if left[tensor] else tensor
        apart.append(replace(launch, tensors=tensors) if tensors != launch.tensors else launch)
    return apart


def _added_to(launch: Launch, wants: Wants) -> dict[str, Tensor]:
    """The intermediates that a launch adds to and can read from another tensor, by name."""
    if launch.constants.get("ACCUMULATE") is not True:
        return {}
    bindings = launch.shader.bindings
    return {
        name: tensor
        for name, tensor in launch.tensors.items()
        if tensor.storage is None
        and wants(tensor)
        and bindings[name].sums
        and f"{name}_before" in bindings
    }


class _Copies:
    """Launches with copies in between, each made once while its source is unchanged."""

    def __init__(self, profile: Profile) -> None:
        self.launches: list[Launch] = []
        self._profile = profile
        self._copies: dict[Tensor | Storage, Tensor] = {}

    def place(self, launch: Launch) -> None:
        tensors, first_texels = {}, {}
        for name, tensor in launch.tensors.items():
            binding = launch.shader.bindings[name]
            if binding.memory == "any" or (binding.memory == "texture") == tensor.texture:
                tensors[name] = tensor
            elif binding.writable:
                raise GraphError(f"{launch.shader.label}: {name} = {tensor} is no {binding.memory}")
            elif tensor.texture:
                tensors[name] = self._copy(tensor, tensor, launch)
            else:  # windows share a copy of the whole
                whole = _whole(tensor)
                tensors[name] = self._copy(tensor.storage or tensor, whole, launch)
                first_texels[name] = tensor.first_texel
        if tensors != launch.tensors or any(tensor.texture for tensor in tensors.values()):
            launch = replace(launch, tensors=tensors, first_texels=first_texels)
        self.launches.append(launch)
        for tensor in launch.written():
            self._forget(tensor)

    def _copy(self, key: Tensor | Storage, source: Tensor, reader: Launch) -> Tensor:
        if key not in self._copies:
            kind = "buffer" if source.texture else "texture"
            self._copies[key] = replace(
                source,
                name=f"{source.name} as {kind}",
                storage=None,
                offset=0,
                texture=not source.texture,
            )
            self._launch(source, self._copies[key], reader)
        return self._copies[key]

    def _launch(self, source: Tensor, copy: Tensor, reader: Launch) -> None:
        units = ceil_div(source.nbytes, TEXEL)
        flat, each = self._profile.flat_group, self._profile.elements_per_thread
        self.launches.append(
            Launch(
                "tensor/copy.wgsl",
                {"x": source, "y": copy},
                {"units": units},
                {"FLAT": flat, "ELEMENTS": each},
                fold_workgroups(ceil_div(units, flat * each)),
                "tensor/copy",
                0,
                times=reader.times,
                repeats=reader.repeats,
            )
        )

    def _forget(self, written: Tensor) -> None:
        self._copies.pop(written, None)
        if written.storage is not None:
            self._copies.pop(written.storage, None)
            windows = [
                k for k in self._copies if isinstance(k, Tensor) and k.storage is written.storage
            ]
            for window in windows:
                del self._copies[window]


def _whole(tensor: Tensor) -> Tensor:
    """The whole storage that a tensor is a window of, or the tensor itself."""
    storage = tensor.storage
    if storage is None:
        return tensor
    length = storage.nbytes // ITEM_SIZE[tensor.dtype]
    return vector(storage.label, length, tensor.dtype, storage)
