"""llama.cpp's names of a model's tensors, and its order of their rows.

Writing uses this; reading uses its inverse (``placements.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture, ExpertSpec
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.latent_attention import LatentAttention
from qlora_wgpu.families.parts.mamba import Mamba, MambaSizes, ParallelMixers
from qlora_wgpu.families.parts.mixers import DeltaHeads, GatedDeltaNet
from qlora_wgpu.gguf.architecture import GGUFArchitecture
from qlora_wgpu.gguf.mamba import row_factors

Number = TypeVar("Number", bound="np.generic[Any]")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"

# ---- orders --------------------------------------------------------------------------------------


def to_pairs(rows: IntArray, heads: int) -> IntArray:
    """Each head's rows, from RoPE on halves to RoPE on neighbours."""
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def by_kind(heads: int, rows: int) -> IntArray:
    """All queries, keys, then values, where Hugging Face has q, k and v head by head."""
    return np.arange(rows).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)


def tiled_order(heads: DeltaHeads, size: int) -> IntArray:
    """The order of a delta net's value heads, of ``size`` rows each, for Qwen 3.5.

    For two key heads with three value heads each, Hugging Face has k0v0 k0v1 k0v2 k1v0 k1v1 k1v2,
    llama.cpp k0v0 k1v0 k0v1 k1v1 k0v2 k1v2.
    """
    rows = np.arange(heads.value_heads * size)
    return rows.reshape(heads.key_heads, -1, size).swapaxes(0, 1).reshape(-1)


def qkv_order(heads: DeltaHeads) -> IntArray:
    """The same for queries, keys and values in one matrix, and for the convolution's channels."""
    first = 2 * heads.key_size
    return np.concatenate([np.arange(first), first + tiled_order(heads, heads.value_dim)])


def grouped_orders(heads: DeltaHeads) -> tuple[IntArray, IntArray]:
    """The rows of queries, keys and values, and of gates, in Qwen3-Next's one matrix.

    That has the query, key, values and gates of one key head after the other.
    """
    key, value = heads.key_dim, heads.per_key * heads.value_dim
    rows = np.arange(heads.key_heads * (2 * key + 2 * value)).reshape(heads.key_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([key, key, value]), axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


@dataclass(frozen=True)
class Columns:
    """The order of groups of columns."""

    width: int  # columns of a group
    order: IntArray  # the source group of each group

    def of(self, rows: npt.NDArray[Number], width: int) -> npt.NDArray[Number]:
        """(..., groups · width) elements or bytes in this order."""
        groups = rows.reshape(*rows.shape[:-1], -1, width)
        return groups[..., self.order, :].reshape(rows.shape)

    @property
    def inverse(self) -> Columns:
        """The order that reverts it."""
        return Columns(self.width, np.argsort(self.order))


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of the file that is made from one of the model's."""

    module: str  # the source, by a name that gguf's tensor map has
    # The source's rows in the file's order; None for all rows unchanged
    rows: IntArray | None = None
    columns: Columns | None = None  # the same for columns
    heads: int = 0  # the number of matrices that the rows are split into; 0 for a single matrix
    transposed: bool = False  # whether each of these is transposed
    decays: bool = False  # whether -exp of the values is stored
    own_shape: tuple[int, ...] | None = None  # the file's, if it is not the model's
    factors: FloatArray | None = None  # of each row, which only the file's rows include

    def of(self, array: FloatArray) -> FloatArray:
        """The file's tensor, from the model's."""
        taken = self.by_columns(array if self.rows is None else array[self.rows])
        if self.factors is not None:
            taken = taken * self.factors[:, None]
        if self.decays:
            taken = -np.exp(taken)
        if self.own_shape is not None:
            taken = taken.reshape(self.own_shape)
        if self.heads:
            taken = taken.reshape(self.heads, -1, taken.shape[1])
        return np.ascontiguousarray(taken.swapaxes(1, 2)) if self.transposed else taken

    def back(self, array: FloatArray) -> FloatArray:
        """The model's rows from the file's tensor, still in the file's order."""
        given = array.swapaxes(1, 2) if self.transposed else array
        if self.heads:
            given = given.reshape(-1, given.shape[2])
        return np.log(-given) if self.decays else given

    def by_rows(self, array: FloatArray) -> FloatArray:
        """The rows of a bias, an adapter's B, or each matrix of a stack."""
        if self.factors is not None:
            return array * self.factors[:, None]
        if self.rows is None:
            return array
        return array[..., self.rows, :] if array.ndim > 1 else array[self.rows]

    def by_columns(self, array: FloatArray) -> FloatArray:
        """A weight or an adapter's A with its columns in the file's order."""
        if self.columns is None or array.ndim < 2:
            return array
        return self.columns.of(array, self.columns.width)

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The tensor's shape, from the model's."""
        rows = rows if self.rows is None else len(self.rows)
        if not self.heads:
            return rows, columns
        of_head = rows // self.heads
        own = (columns, of_head) if self.transposed else (of_head, columns)
        return self.heads, *own


# ---- names, and parts of layers ------------------------------------------------------------------

# Layers that llama.cpp splits, or names differently.
_NAMES = {
    "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_mlp.output_linear": ("mlp.down_proj",),
    **{
        f"block_sparse_moe.experts.{leaf}_proj": (f"mlp.experts.{leaf}_proj",)
        for leaf in ("gate", "up", "down")
    },
    "feed_forward.experts.w1": ("feed_forward.experts.gate_proj",),
    "feed_forward.experts.w3": ("feed_forward.experts.up_proj",),
    "feed_forward.experts.w2": ("feed_forward.experts.down_proj",),
}
_SHARED_MLP = {
    "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_experts.down_proj",),
}
LAYER = re.compile(r"\.layers\.([0-9]+)\.")
# Scales are parameters of their own here, and belong to the matrix before them in llama.cpp.
_FACTORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_CORRECTION, _BIAS_OF_EXPERTS = "e_score_correction_bias", ".expert_bias"
_SINKS = "self_attn.sinks"  # a parameter without a module


class Layout:
    """The names and parts of an architecture's tensors."""

    def __init__(self, architecture: Architecture, llama_cpp: GGUFArchitecture) -> None:
        import gguf  # slow to import

        labels = {name: label for label, name in gguf.MODEL_ARCH_NAMES.items()}
        self._decoder = architecture.config
        self._map = gguf.get_tensor_name_map(
            labels[llama_cpp.named_as or llama_cpp.name], 1
        )  # for layer 0
        self._llama_cpp = llama_cpp
        self._names = _NAMES | _SHARED_MLP if architecture.experts else _NAMES
        decoder = architecture.config
        mixers = [layer.attention for layer in decoder.layers]
        self._sizes = decoder.dimensions
        fused = next((m.fused for m in mixers if isinstance(m, Attention) and m.fused), None)
        self.by_head = fused.name if fused is not None and fused.by_head else None
        self.latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
        each = (mixer.mamba if isinstance(mixer, ParallelMixers) else mixer for mixer in mixers)
        self._mamba = next((mixer.sizes for mixer in each if isinstance(mixer, Mamba)), None)
        self._rotated = next((m.rope.rotary_dim for m in mixers if _is_rotated(m)), None)
        self._delta = next((m.heads for m in mixers if isinstance(m, GatedDeltaNet)), None)

    def find(self, name: str) -> str | None:
        """llama.cpp's name for one of Hugging Face's tensors; None if it has none."""
        layer = LAYER.search(name)
        if layer is not None and name[layer.end() :] in _FACTORS:
            return f"blk.{layer[1]}.{_FACTORS[name[layer.end() :]]}"
        plain = LAYER.sub(".layers.0.", name, count=1)
        plain = plain.replace(".language_model.", ".").replace(".text_model.", ".")
        plain = plain.replace(".norms.*", "")
        if ".mixer." in plain:  # Nemotron-H's files call the model's trunk otherwise
            plain = plain.replace("mixer.experts.", "mlp.experts.").replace("dt_bias", "dt.bias")
            if ".mixer." in plain:
                plain = plain.replace("model.layers.", "backbone.layers.")
        if plain.endswith(("linear_attn.dt_bias", "mamba.dt_bias")):
            plain = plain.replace("dt_bias", "dt_proj.bias")
        if plain.endswith(_CORRECTION):  # a bias to llama.cpp
            plain = f"{plain.removesuffix('_bias')}.bias"
        if plain.endswith(_BIAS_OF_EXPERTS):
            plain += ".bias"
        found: str | None = self._map.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            return None
        found = f"{found}.weight" if plain.endswith(_SINKS) else found
        return found if layer is None else found.replace("blk.0.", f"blk.{layer[1]}.", 1)

    def stored_name(self, name: str) -> str:
        """The same as ``find``, but required."""
        found = self.find(name)
        if found is None:
            raise UnsupportedModelError(
                f"llama.cpp has no tensor for {name}: use qlora-wgpu merge and transformers"
            )
        return found

    def parts(self, module: str, rows: int) -> list[TensorSlice]:
        """The file's tensors for a linear layer."""
        at, _, leaf = module.rpartition(".")
        if self._delta is not None and at.endswith("linear_attn"):
            return self._of_delta_net(at, leaf, self._delta)
        if self._llama_cpp.name == "falcon-h1":
            factors = row_factors(self._decoder, leaf, rows)
            return [TensorSlice(module, factors=factors)]
        if leaf == "kv_b_proj" and self.latent is not None:
            return _of_latent(at, rows, self.latent)
        own = next((leaf for leaf in self._names if module.endswith(leaf)), None)
        if own is not None:
            at, names = module.removesuffix(own), self._names[own]
            if len(names) == 1:
                return [TensorSlice(at + names[0])]
            parts = np.arange(rows).reshape(len(names), -1)
            return [TensorSlice(at + name, part) for name, part in zip(names, parts, strict=True)]
        return [TensorSlice(module, self._row_order(leaf, rows))]

    def end(self, leaf: str, rows: int) -> TensorSlice:
        """The file's embedding or head."""
        is_scaled = self._llama_cpp.name == "falcon-h1"
        factors = row_factors(self._decoder, leaf, rows) if is_scaled else None
        return TensorSlice(leaf, factors=factors)

    def small(self, name: str) -> TensorSlice:
        """The file's tensor for a small one that is stored in float32."""
        if self._mamba is not None and (".mamba." in name or ".mixer." in name):
            return _of_mamba(name, self._mamba)
        if self._delta is None or ".linear_attn." not in name:
            return TensorSlice(name)
        of_head = tiled_order(self._delta, 1) if self._llama_cpp.tiled else None
        if name.endswith("A_log"):
            return TensorSlice(name, of_head, decays=True)
        if name.endswith("dt_bias"):
            return TensorSlice(name, of_head)
        if name.endswith("conv1d.weight") and self._llama_cpp.tiled:
            return TensorSlice(name, qkv_order(self._delta))
        return TensorSlice(name)

    def stacks(self, experts: Iterable[ExpertSpec]) -> Iterator[tuple[str, list[ExpertSpec]]]:
        """The name of each stack of experts in the file, and the stacks that it is made from."""
        held: list[ExpertSpec] = []
        for stack in experts:
            if self._llama_cpp.joins_experts and stack.leaf != "down_proj":
                held.append(stack)
                if len(held) == 2:
                    yield f"{stack.at}.gate_up_proj", held
                    held = []
            else:
                yield stack.name, [stack]

    def paired_heads(self, leaf: str) -> int:
        """The number of heads whose rows are stored for RoPE on neighbours; 0 for none."""
        sizes = self._sizes
        heads = {"q_proj": sizes.num_attention_heads, "k_proj": sizes.num_key_value_heads}
        return heads.get(leaf, 0) if self._llama_cpp.pairs else 0

    def _row_order(self, leaf: str, rows: int) -> IntArray | None:
        """The order of rows that are stored for RoPE on neighbours, or by q, k and v."""
        if leaf == self.by_head:
            return by_kind(self._sizes.num_attention_heads, rows)
        heads = self.paired_heads(leaf)
        if not heads:
            return None
        of_heads = np.arange(rows).reshape(heads, -1)
        rotated, rest = np.split(of_heads, [self._rotated or of_heads.shape[1]], axis=1)
        pairs = to_pairs(rotated.reshape(-1), heads).reshape(heads, -1)
        return np.concatenate([pairs, rest], axis=1).reshape(-1)

    def _of_delta_net(self, at: str, leaf: str, heads: DeltaHeads) -> list[TensorSlice]:
        module = f"{at}.{leaf}"
        if leaf == "in_proj_qkvz":
            qkv, z = grouped_orders(heads)
            return [TensorSlice(f"{at}.in_proj_qkv", qkv), TensorSlice(f"{at}.in_proj_z", z)]
        if not self._llama_cpp.tiled:
            return [TensorSlice(module)]
        if leaf == "out_proj":
            return [TensorSlice(module, columns=Columns(heads.value_dim, tiled_order(heads, 1)))]
        orders = {
            "in_proj_qkv": qkv_order(heads),
            "in_proj_z": tiled_order(heads, heads.value_dim),
            "in_proj_b": tiled_order(heads, 1),
            "in_proj_a": tiled_order(heads, 1),
        }
        return [TensorSlice(module, orders[leaf])]


def _is_rotated(mixer: Any) -> bool:
    return isinstance(mixer, Attention) and mixer.rope is not None


def _of_mamba(name: str, sizes: MambaSizes) -> TensorSlice:
    """Mamba's numbers of each head, which are columns of one in the file, and its norm by group."""
    if name.endswith(("A_log", ".D")):
        return TensorSlice(name, decays=name.endswith("A_log"), own_shape=(sizes.heads, 1))
    if name.endswith("norm.weight"):
        return TensorSlice(name, own_shape=(sizes.groups, sizes.inner_size // sizes.groups))
    return TensorSlice(name)


def _of_latent(at: str, rows: int, attention: LatentAttention) -> list[TensorSlice]:
    """kv_b_proj's keys, which llama.cpp transposes to multiply queries by them, and its values."""
    heads = attention.dimensions.num_attention_heads
    keys, values = np.split(np.arange(rows).reshape(heads, -1), [attention.nope_dim], axis=1)
    return [
        TensorSlice(f"{at}.k_b_proj", keys.reshape(-1), heads=heads, transposed=True),
        TensorSlice(f"{at}.v_b_proj", values.reshape(-1), heads=heads),
    ]
