"""Inputs that checks share."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.selfcheck.runner import Array, Runner

CheckT = TypeVar("CheckT", bound=Callable[..., None])

ROWS = 37
ONES = np.ones((1, ROWS), np.int64)
# A sample that ends with its row, and the next row's, which are told apart by the rows alone.
SAMPLES = np.array([19 * [1], 8 * [1] + 11 * [2]])
KEY = 12345  # of dropout


def each(*arguments: tuple[Any, ...]) -> Callable[[CheckT], CheckT]:
    """Marks a check that is run once with each of these arguments."""

    def mark(check: CheckT) -> CheckT:
        vars(check)["arguments"] = arguments
        return check

    return mark


def arguments_of(check: Callable[..., None]) -> tuple[tuple[Any, ...], ...]:
    """What a check is run with; nothing, once, if it is not marked."""
    marked: tuple[tuple[Any, ...], ...] = vars(check).get("arguments", ((),))
    return marked


def normal(name: str, *shape: int) -> Array:
    """Normal numbers that follow from a name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def no_ties(name: str, *shape: int) -> Array:
    """Normal numbers, none as near to two of float16, of which kernels take the larger one."""
    numbers = normal(name, *shape).astype(np.float32)
    return (numbers.view(np.uint32) | 1).view(np.float32).astype(np.float64)


def uneven(name: str, rows: int, columns: int) -> Array:
    """Normal numbers whose rows are of several sizes, so small that a norm's ε counts, too."""
    sizes = np.array([1.0, 2e-3, 30.0])[np.arange(rows) % 3, None]
    scaled: Array = normal(name, rows, columns) * sizes
    return scaled


def filled_adapter(
    config: LoraConfig,
    linears: list[LinearSpec],
    experts: list[ExpertSpec] | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Adapter, dict[str, Array]]:
    """An adapter of normal numbers, its gradient so far one; and its parts in float32."""
    adapter = Adapter(config, linears, experts or [], vocabulary=vocabulary)
    parts = adapter.split(adapter.initial(0))
    values = {n: normal(n, *a.shape).astype(np.float32) for n, a in parts.items()}
    flat = adapter.join(values)
    for vector, data in ((adapter.parameters, flat), (adapter.gradient, np.ones_like(flat))):
        (storage,) = vector.storages
        storage.data = data
    return adapter, {name: array.astype(np.float64) for name, array in values.items()}


def whole_gradient(adapter: Adapter) -> Tensor:
    """The flat vector of an adapter's gradients."""
    return matrix("gradient", 1, adapter.length, "float32", adapter.gradient.whole.storage)


def joined(adapter: Adapter, gradients: dict[str, Array]) -> Array:
    """The flat vector that was one before these gradients, by names, were added to it."""
    values = {name: array.astype(np.float32) for name, array in gradients.items()}
    return adapter.join(values)[None].astype(np.float64) + 1.0


def of_halves(run: Runner) -> float:
    """What attention's factors of float16 allow, as a share of the largest value, if it has such.

    On matrix units each is off by half of its last place at most, 2⁻¹¹ of itself, either way: sums
    of products of two, by 2⁻¹⁰ of what such sums are.
    """
    halved = any(launch.constants.get("HALF") is True for launch in run.graph.launches)
    return 2.0**-10 * halved
