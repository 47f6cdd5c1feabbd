"""Operands as images, for the kernels of software adapters."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import TEXEL, Tensor, vector


def as_image(g: Graph, x: Tensor) -> tuple[Tensor, int]:
    """Finds a tensor in an image, copying it into one at most once in a graph.

    A window of a storage (the adapter's flat vector) shares the image of the whole. What is
    copied must not be written later in the graph, as sums of gradients are.

    Returns:
        The image, and the texel of it that x begins at.
    """
    if x.image:
        return x, x.texel0
    key = x.storage or x
    if key not in g.images:
        whole = x
        if x.storage is not None:
            whole = vector(x.storage.label, x.storage.nbytes // 4, "float32", x.storage)
        g.images[key] = image_copy(g, whole)
    return g.images[key], x.texel0


def image_copy(g: Graph, x: Tensor) -> Tensor:
    """Copies a tensor as it is now into an image."""
    image = replace(x, name=f"{x.name} as image", storage=None, offset=0, image=True)
    units = ceil_div(x.nbytes, TEXEL)
    g.launch(
        "tensor/to_image.wgsl",
        units,
        {"x": x, "image": image},
        {"units": units},
    )
    return image


def as_buffer(g: Graph, x: Tensor) -> Tensor:
    """Returns x itself if it lies in a buffer, else a copy there."""
    if not x.image:
        return x
    y = replace(x, name=f"{x.name} as buffer", storage=None, offset=0, image=False)
    units = ceil_div(x.nbytes, TEXEL)
    g.launch(
        "tensor/from_image.wgsl",
        units,
        {"image": x, "y": y},
        {"units": units},
    )
    return y
