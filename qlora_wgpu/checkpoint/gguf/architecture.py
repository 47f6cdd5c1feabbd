"""What architectures of llama.cpp have in common: names, placement, heads, windows, rotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys, shortest
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

# ---- placements ----------------------------------------------------------------------------------

Number = TypeVar("Number", bound="np.generic[Any]")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """How a tensor is made of floats that a file has in its place, where no order of them is it."""

    sources: tuple[Placement, ...]  # what the file has
    # Makes the tensor of these, each by its placement's shape
    make: Callable[[Sequence[FloatArray]], FloatArray]
    # What the file would have for a tensor, in the order of ``sources``
    undo: Callable[[FloatArray], Sequence[FloatArray]]


@dataclass(frozen=True)
class Columns:
    """The order of groups of columns."""

    width: int  # columns of a group
    order: IntArray  # which of the file's groups each is

    def of(self, rows: npt.NDArray[Number], width: int) -> npt.NDArray[Number]:
        """Rows (n, groups · width) of elements, or of bytes, in this order."""
        groups = rows.reshape(len(rows), -1, width)
        return groups[:, self.order].reshape(rows.shape)


@dataclass(frozen=True)
class Placement:
    """A tensor, or some rows of one."""

    stored: str  # the name of the file's tensor
    shape: tuple[int, ...]  # the dimensions of what is meant here
    first_row: int = 0  # the first of its rows among those of the file's
    heads: int = 0  # as many heads' rows are stored for a rotation of neighbours; 0 for none
    offset: float = 0.0  # what was added to the weights
    # What has the rows that follow, of the same type; ``shape`` has them, too
    then: Placement | None = None
    # Which stored row each is, those of ``then`` counted on; None where they are in order
    order: IntArray | None = field(default=None, compare=False)
    # The order of columns, if it is another
    columns: Columns | None = field(default=None, compare=False)
    # What it is made of, if the file has no rows of it; of the rest ``shape`` alone counts then
    change: Change | None = field(default=None, compare=False)

    @property
    def parts(self) -> Iterator[tuple[Placement, slice]]:
        """The parts, and which rows are theirs."""
        if self.then is None:
            yield self, slice(None)
            return
        rows = self.shape[0] - self.then.shape[0]
        yield replace(self, shape=(rows, *self.shape[1:]), then=None), slice(0, rows)
        yield self.then, slice(rows, None)

    @property
    def row_order(self) -> IntArray | None:
        """Which stored row each row is: llama.cpp stores the two of a pair as neighbours."""
        if not self.heads:
            return self.order
        rows = self.shape[0]
        stored = np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2)
        return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)

    @property
    def leaves(self) -> tuple[Placement, ...]:
        """What the file has of it, one after the other."""
        if self.change is not None:
            return self.change.sources
        return tuple(part for part, _ in self.parts)

    def as_stored(self, array: FloatArray) -> list[FloatArray]:
        """A tensor as the file has it, in parts as ``leaves`` are.

        Args:
            array: The tensor, of ``shape``.
        """
        if self.change is not None:
            made = self.change.undo(array)
            return [p.as_stored(a)[0] for p, a in zip(self.change.sources, made, strict=True)]
        if self.offset:
            array = array + np.float32(self.offset)
        if self.columns is not None:
            back = replace(self.columns, order=np.argsort(self.columns.order))
            array = back.of(array, self.columns.width)
        if self.row_order is not None:
            array = np.ascontiguousarray(array[np.argsort(self.row_order)])
        return [array[rows] for _, rows in self.parts]


# ---- an architecture -----------------------------------------------------------------------------

Config = dict[str, Any]
More = Callable[[Keys, GGUFFile, Config], Config]
Arrange = Callable[[dict[str, Placement], GGUFFile, Config], None]
RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
MEAN = "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture."""

    model_type: str  # config.json's name of it
    causal_class: str  # transformers' class
    more: More  # the keys that this architecture has beside what all have
    pairs: bool = False  # whether q and k are stored for a rotation of neighbours instead of halves
    norm_offset: float = 0.0  # what was added to the norms' weights
    # What its blocks' tensors are called in Hugging Face's files, where others differ
    names: tuple[tuple[str, str], ...] = ()
    outside: tuple[tuple[str, str], ...] = ()  # the same of tensors outside of blocks
    epsilon: tuple[str, str] = RMS  # the key of what norms add, and config.json's
    # Keys without the architecture's name that tell a number of each layer, and what these are
    # called in Hugging Face's files, which hold them as tensors
    scalars: tuple[tuple[str, str], ...] = ()
    # Tensors that are one in Hugging Face's files: its name, and those of its halves
    joined: tuple[tuple[str, str, str], ...] = ()
    some_attend: bool = False  # whether layers without heads of keys do something else
    # How norms end to which nothing was added, whatever was to the others
    as_stored: tuple[str, ...] = ()
    # Whether ``more`` reads the sizes of heads and MLPs, which may differ from layer to layer
    own_sizes: bool = False
    # What the modules of its blocks begin with in Hugging Face's files
    layers: str = "model.layers"
    # Changes placements of tensors that the file has in another order or form
    arrange: Arrange = lambda *given: None


# ---- heads of delta nets -------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Sizes of a delta net.

    Hugging Face has the heads of values that share a key side by side: of two keys and three values
    each, k0v0 k0v1 k0v2 k1v0 k1v1 k1v2. For Qwen 3.5 llama.cpp has them in turns, k0v0 k1v0 k0v1
    k1v1 k0v2 k1v2; for Qwen3-Next as Hugging Face, but queries, keys, values and gates each by
    themselves.
    """

    key_heads: int  # heads of queries, and of keys
    value_heads: int  # heads of values, a multiple of it
    key_dim: int  # elements of a query or key
    value_dim: int  # elements of a value


def tiled_order(heads: Heads, size: int) -> IntArray:
    """Which of Hugging Face's rows each of llama.cpp's is, where a head of values has ``size``."""
    rows = np.arange(heads.value_heads * size)
    return rows.reshape(heads.key_heads, -1, size).swapaxes(0, 1).reshape(-1)


def qkv_order(heads: Heads) -> IntArray:
    """The same of queries, keys and values in one matrix, and of the convolution's channels."""
    first = 2 * heads.key_heads * heads.key_dim
    return np.concatenate([np.arange(first), first + tiled_order(heads, heads.value_dim)])


def grouped_orders(heads: Heads) -> tuple[IntArray, IntArray]:
    """Qwen3-Next's: the rows of queries, keys and values, and those of gates, of one matrix.

    There what belongs to a head of keys is together: its query, its key, its values, their gates.
    """
    key, value = heads.key_dim, heads.value_heads // heads.key_heads * heads.value_dim
    rows = np.arange(heads.key_heads * (2 * key + 2 * value)).reshape(heads.key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([key, key, value]), axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def inverse(order: IntArray) -> IntArray:
    """The order that undoes one."""
    return np.argsort(order, kind="stable")


# ---- keys that several architectures read alike --------------------------------------------------


def whole_heads(keys: Keys, config: Config) -> None:
    """Refuses heads of which a part is rotated."""
    keys.refuse("rope.dimension_count", config["head_dim"])


def usual_scale(keys: Keys, config: Config) -> None:
    """Refuses scores that are scaled in another way."""
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, config["head_dim"] ** -0.5, rel_tol=1e-5):
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.scale = {scale} is not computed"
        )


def window_pattern(keys: Keys, config: Config, usual: int) -> Config:
    """``layer_types``: all layers slide but each n-th one, or those slide that a list names."""
    name, layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = keys.raw(name, usual)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} has {len(pattern)} values for {layers} "
                "layers"
            )
        slides = [bool(value) for value in pattern]
    else:
        every = keys.integer(name, usual)
        if every < 0:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} must be 0 or more, got {every}"
            )
        slides = [every == 0 or (i + 1) % every != 0 for i in range(min(layers, 1 << 16))]
    names = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [names[slide] for slide in slides]}


# ---- rotations -----------------------------------------------------------------------------------

_BASE = 10_000.0
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Llama 3's: what its factors are made of is not stored beside them.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_SAME = 1e-5  # relative: factors are made in float32, in another order


def read_rope(keys: Keys, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and, where it is scaled, ``rope_scaling``."""
    theta = keys.number("rope.freq_base", _BASE)
    scaling = _scaling(keys) or {}
    if any(name in file for name in (LONG_FACTORS, SHORT_FACTORS)):
        scaling = _longrope(keys, file)
    elif scaling.get("rope_type") == "longrope":
        raise CheckpointError(f"{keys.where} lacks {LONG_FACTORS}, which its rope.scaling asks for")
    elif FACTORS in file:
        if scaling:
            raise UnsupportedModelError(
                f"{keys.where} has both {FACTORS} and rope.scaling, which are not computed together"
            )
        scaling = _of_factors(file.floats(FACTORS), theta, head_dim)
    keys.ignore("rope.scaling.finetuned", "rope.scaling.original_context_length")
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _scaling(keys: Keys) -> dict[str, Any] | None:
    kind = keys.raw("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", None)
    old = keys.number("rope.scale_linear", None)  # the key's first name
    if factor is None:
        factor = old
    if kind == "none" or (kind is None and factor in (None, 0.0, 1.0)):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor} if factor else None
    if kind == "longrope":
        return {"rope_type": "longrope"}
    if kind != "yarn" or not factor:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.rope.scaling.type = {brief(kind)} is not computed"
        )
    keys.refuse("rope.scaling.yarn_ext_factor", 1.0)
    scaling = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        value = keys.number(f"rope.scaling.yarn_{name}", None)
        if value is not None:
            scaling[name] = value
    length = keys.integer("rope.scaling.original_context_length", None)
    return scaling if length is None else {**scaling, "original_max_position_embeddings": length}


def _longrope(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    factor = keys.number("rope.scaling.attn_factor", None)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _shortest(file.floats(SHORT_FACTORS)),
        "long_factor": _shortest(file.floats(LONG_FACTORS)),
    }
    length = keys.integer("rope.scaling.original_context_length", None)
    more = {"attention_factor": factor, "original_max_position_embeddings": length}
    return scaling | {key: value for key, value in more.items() if value is not None}


def _of_factors(factors: npt.NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters, if these are its factors; else the factors, for texts of any length."""
    factor = float(factors.max(initial=1.0))
    if np.allclose(factors, _llama3(factor, theta, head_dim, len(factors)), rtol=_SAME, atol=0):
        return {
            "rope_type": "llama3",
            "factor": shortest(factor),
            **_LLAMA3_BANDS,
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
    listed = _shortest(factors)
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": 1.0,
    }


def _llama3(factor: float, theta: float, head_dim: int, pairs: int) -> npt.NDArray[np.float64]:
    """By what Llama 3 divides the frequency of each pair."""
    low, high = _LLAMA3_BANDS.values()
    waves = 2 * np.pi * theta ** (2 * np.arange(pairs) / head_dim)
    share = np.clip((_LLAMA3_LENGTH / waves - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors


def _shortest(values: npt.NDArray[np.float32]) -> list[float]:
    return [shortest(value) for value in values.tolist()]
