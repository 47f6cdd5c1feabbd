"""Limits and features of GPUs, drawn between what WebGPU promises and what there is.

Those of a binding, a buffer, a texture and a dispatch are also drawn below what is promised, since
small models meet them there alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.limited import Offered
from support.matrix_units import FLOATS, HALVES

BINDING = "max-storage-buffer-binding-size"
BUFFER = "max-buffer-size"
TEXTURE = "max-texture-dimension-2d"
WORKGROUPS = "max-compute-workgroups-per-dimension"
INVOCATIONS = "max-compute-invocations-per-workgroup"
_SUBGROUPS = frozenset({"subgroup", "subgroup-barrier"})
_UNUSED = frozenset({"float32-filterable", "shader-f16", "timestamp-query", "pipeline-cache"})

# As much as WebGPU promises, and what some GPUs offer beyond.
PROMISED = {
    "max-storage-buffers-per-shader-stage": (8, 8, 10, 16),
    "max-compute-workgroup-storage-size": (16_384, 16_384, 24_576, 32_768),
    INVOCATIONS: (256, 256, 384, 512, 768, 1024),
    "max-compute-workgroup-size-x": (256, 256, 512, 1024),
    "max-compute-workgroup-size-y": (256, 256, 512),
    "max-compute-workgroup-size-z": (64, 64, 128),
    "max-bind-groups": (4,),
    "max-bindings-per-bind-group": (1000,),
    "max-uniform-buffers-per-shader-stage": (12,),
    "max-uniform-buffer-binding-size": (16_384, 32_768),
    "max-storage-textures-per-shader-stage": (4, 8),
    "max-sampled-textures-per-shader-stage": (16,),
    "max-dynamic-storage-buffers-per-pipeline-layout": (4,),
    "max-dynamic-uniform-buffers-per-pipeline-layout": (8,),
    "max-immediate-size": (0, 64),
    "min-storage-buffer-offset-alignment": (64, 128, 256, 256),
    "min-uniform-buffer-offset-alignment": (64, 128, 256, 256),
}
_WAYS = {
    "textures": Offered(),
    "buffers": Offered(without=_SUBGROUPS),
    "gpu": Offered(kind="DiscreteGPU"),
    "registers": Offered(kind="IntegratedGPU", without=_SUBGROUPS),
    "units": Offered(kind="DiscreteGPU", units=HALVES),
    "float units": Offered(kind="IntegratedGPU", units=FLOATS),
}


@dataclass(frozen=True)
class Drawn:
    """A GPU, and how kernels are cut for it.

    Attributes:
        way: A name of ``whole``.
        offered: What it offers.
        workgroups: Those along a dimension of a dispatch.
    """

    way: str
    offered: Offered
    workgroups: int

    def __str__(self) -> str:
        without = f" without {sorted(self.offered.without)}" if self.offered.without else ""
        return f"{self.way} {dict(self.offered.limits)}{without}"


def whole(way: str) -> Offered:
    """The same kind of GPU with all that there is."""
    return _WAYS[way]


def drawn_limits(rng: random.Random, way: str) -> Drawn:
    """Each limit is drawn in one of two GPUs; half of these have all of WebGPU's least."""
    offered = _WAYS[way]
    least = rng.random() < 0.3
    limits = {
        name: values[0] if least else rng.choice(values)
        for name, values in PROMISED.items()
        if least or rng.random() < 0.6
    }
    if rng.random() < 0.6:
        limits[BINDING] = 4 * int(2 ** rng.uniform(11, 20))
    if rng.random() < 0.3:
        limits[BUFFER] = 4 * int(2 ** rng.uniform(13, 20))
    if rng.random() < 0.4:
        limits[TEXTURE] = rng.choice((8192, 4096, 2048, 1024))  # which it is never wider than
    workgroups = 65_535
    if rng.random() < 0.5:
        workgroups = limits[WORKGROUPS] = rng.choice((64, 255, 1024))
    names = rng.sample(sorted(_UNUSED), rng.randint(0, len(_UNUSED)))
    without = offered.without | frozenset(names)
    return Drawn(way, replace(offered, limits=limits, without=without), workgroups)


def ways() -> list[str]:
    """All kinds of GPUs."""
    return list(_WAYS)
