"""Whether a model is of a size that there can be, before anything is made for each of its parts."""

from __future__ import annotations

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Weights
from qlora_wgpu.limits import LINEARS, MATRIX_ELEMENTS, PARAMETERS


def check_sizes(weights: Weights, embedding: int) -> None:
    """Refuses what is far larger than any model.

    Args:
        weights: All of a model but its embedding and head.
        embedding: Elements of the embedding.

    Raises:
        UnsupportedModelError: If a matrix, or all of them, are too large or too many.
    """
    sizes = [spec.out_features * spec.in_features for spec in weights.linears]
    stacks = {spec.name: spec.out_features * spec.in_features for spec in weights.experts}
    count = len(sizes) + sum(spec.experts for spec in weights.experts)
    if count > LINEARS:
        raise UnsupportedModelError(
            f"config.json: {count:,} matrices of layers and experts are more than the {LINEARS:,} "
            "that are read"
        )
    tables = [rows * columns for rows, columns in weights.tables.values()]
    largest = max([embedding, *tables, *sizes, *stacks.values()])
    if largest > MATRIX_ELEMENTS:
        raise UnsupportedModelError(
            f"config.json: a matrix of {largest:,} elements is larger than the "
            f"{MATRIX_ELEMENTS:,} that are read"
        )
    total = embedding + sum(sizes) + sum(tables)
    total += sum(spec.experts * stacks[spec.name] for spec in weights.experts)
    if total > PARAMETERS:
        raise UnsupportedModelError(
            f"config.json: {total:,} parameters are more than the {PARAMETERS:,} that are read"
        )
