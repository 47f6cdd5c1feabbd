"""Which tensors of the file a layer's weight becomes, and how its rows and columns lie in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.delta_orders import (
    Heads,
    grouped_orders,
    qkv_order,
    tiled_order,
)
from qlora_wgpu.checkpoint.gguf.gpt_neox import kind_order
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.pairs import to_pairs
from qlora_wgpu.families.family import Architecture, ExpertSpec
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.latent_attention import LatentAttention
from qlora_wgpu.families.parts.mixers import GatedDeltaNet

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# One layer here that is two of llama.cpp's, or is called otherwise there.
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
_BESIDE_EXPERTS = {
    "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_mlp.output_linear": ("mlp.shared_experts.down_proj",),
}
_IN_LAYER = re.compile(r"\.layers\.([0-9]+)\.(.+)")
OF_FILE = "blk."
"""How a name begins that is llama.cpp's already."""
# What multiplies is a tensor of its own here, and there beside the matrix before it.
_FACTORS = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_JOINS_EXPERTS = ("GEMMA4",)  # where an expert's gate and up are one matrix
_TILED = ("QWEN35", "QWEN35MOE")  # whose heads of values that share a key are apart


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is made of a layer's weight.

    Attributes:
        module: The layer by a name that llama.cpp knows.
        rows: Which of the layer's rows it has, in its own order; None for all as they are.
        columns: The same of columns.
        heads: As many matrices the rows are, each by itself in the tensor; 0 for one in all.
        transposed: Whether each of these is transposed.
    """

    module: str
    rows: IntArray | None = None
    columns: IntArray | None = None
    heads: int = 0
    transposed: bool = False

    def of(self, array: FloatArray) -> FloatArray:
        """What of a weight the tensor holds."""
        taken = self.by_columns(self.by_rows(array))
        if self.heads:
            taken = taken.reshape(self.heads, -1, taken.shape[1])
        return np.ascontiguousarray(taken.swapaxes(1, 2)) if self.transposed else taken

    def by_rows(self, array: FloatArray) -> FloatArray:
        """Some rows of a weight, a bias or an adapter's B; of a stack's, of each matrix."""
        if self.rows is None:
            return array
        return array[..., self.rows, :] if array.ndim > 1 else array[self.rows]

    def by_columns(self, array: FloatArray) -> FloatArray:
        """The columns of a weight or of an adapter's A in their order."""
        return array if self.columns is None or array.ndim < 2 else array[..., self.columns]

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The tensor's shape, of a weight of this shape."""
        rows = rows if self.rows is None else len(self.rows)
        if not self.heads:
            return rows, columns
        of_head = rows // self.heads
        own = (columns, of_head) if self.transposed else (of_head, columns)
        return self.heads, *own


class LayerParts:
    """The parts of an architecture's layers."""

    def __init__(self, architecture: Architecture, llama_cpp: LlamaCpp) -> None:
        """Takes the architecture here, and llama.cpp's."""
        self._llama_cpp = llama_cpp
        self._has_experts = bool(architecture.experts)
        decoder = architecture.config
        halves = [layer.attention for layer in decoder.layers]
        self._sizes = decoder.dimensions
        fused = next((h.fused for h in halves if isinstance(h, Attention) and h.fused), None)
        self._by_head = fused.name if fused is not None and fused.by_head else None
        self._latent = next((half for half in halves if isinstance(half, LatentAttention)), None)
        nets = [half.heads for half in halves if isinstance(half, GatedDeltaNet)]
        self._delta: Heads | None = None
        if nets:
            own = nets[0]
            self._delta = Heads(own.key_heads, own.value_heads, own.key_dim, own.value_dim)

    def of(self, module: str, rows: int) -> list[Part]:
        """The tensors that a layer becomes.

        Args:
            module: The layer.
            rows: Rows of its weight.
        """
        at, _, leaf = module.rpartition(".")
        if self._delta is not None and at.endswith("linear_attn"):
            return _of_delta_net(at, leaf, self._delta, tiled=self._is_tiled)
        if leaf == "kv_b_proj" and self._latent is not None:
            return _of_latent(at, rows, self._latent)
        names = _NAMES | _BESIDE_EXPERTS if self._has_experts else _NAMES
        own = next((leaf for leaf in names if module.endswith(leaf)), None)
        if own is not None:
            at, count = module.removesuffix(own), rows // len(names[own])
            cuts = np.arange(rows).reshape(-1, count)
            return [Part(at + name, cut) for name, cut in zip(names[own], cuts, strict=True)]
        return [Part(module, self._paired(leaf, rows))]

    def small(self, name: str) -> tuple[str, Callable[[FloatArray], FloatArray]]:
        """What is small and float32: its name where llama.cpp's differs, and what it becomes.

        Args:
            name: The tensor's name.
        """
        in_layer = _IN_LAYER.search(name)
        if in_layer is not None and in_layer[2] in _FACTORS:
            return f"{OF_FILE}{in_layer[1]}.{_FACTORS[in_layer[2]]}", _as_it_is
        at, _, leaf = name.rpartition("linear_attn.")
        if self._delta is None or not at:
            return name, _as_it_is
        heads = self._delta
        of_head = tiled_order(heads, 1) if self._is_tiled else np.arange(heads.value_heads)
        if leaf == "A_log":
            return name, lambda array: -np.exp(array[of_head])
        if leaf == "dt_bias":
            return f"{at}linear_attn.dt_proj.bias", lambda array: array[of_head]
        if leaf == "conv1d.weight" and self._is_tiled:
            return name, lambda array: array[qkv_order(heads)]
        return name, _as_it_is

    def stacks(self, experts: Iterable[ExpertSpec]) -> Iterator[tuple[str, list[ExpertSpec]]]:
        """The stacks of experts in the file: the name of each, and what its rows are of.

        Args:
            experts: The stacks here.
        """
        held: list[ExpertSpec] = []
        for stack in experts:
            if self.joins_experts and stack.leaf != "down_proj":
                held.append(stack)
                if len(held) == 2:
                    yield f"{stack.at}.gate_up_proj", held
                    held = []
            else:
                yield stack.name, [stack]

    @property
    def joins_experts(self) -> bool:
        """Whether an expert's gate and up are one matrix in the file."""
        return self._llama_cpp.label in _JOINS_EXPERTS

    @property
    def _is_tiled(self) -> bool:
        return self._llama_cpp.label in _TILED

    def _paired(self, leaf: str, rows: int) -> IntArray | None:
        """The order of rows that are stored as pairs which rotate together, or kind by kind."""
        sizes = self._sizes
        heads = {"q_proj": sizes.num_attention_heads, "k_proj": sizes.num_key_value_heads}
        if leaf == self._by_head:
            return kind_order(sizes.num_attention_heads, rows)
        if not self._llama_cpp.pairs or leaf not in heads:
            return None
        return to_pairs(np.arange(rows), heads[leaf])


def _of_delta_net(at: str, leaf: str, heads: Heads, *, tiled: bool) -> list[Part]:
    module = f"{at}.{leaf}"
    if leaf == "in_proj_qkvz":
        qkv, z = grouped_orders(heads)
        return [Part(f"{at}.in_proj_qkv", qkv), Part(f"{at}.in_proj_z", z)]
    if not tiled:
        return [Part(module)]
    if leaf == "out_proj":
        return [Part(module, columns=tiled_order(heads, heads.value_dim))]
    orders = {
        "in_proj_qkv": qkv_order(heads),
        "in_proj_z": tiled_order(heads, heads.value_dim),
        "in_proj_b": tiled_order(heads, 1),
        "in_proj_a": tiled_order(heads, 1),
    }
    return [Part(module, orders[leaf])]


def _of_latent(at: str, rows: int, attention: LatentAttention) -> list[Part]:
    """The halves of what is made of a latent vector: keys, which llama.cpp transposes, and values.

    So a query is multiplied by the first instead, and attends to latent vectors.
    """
    heads = attention.dimensions.num_attention_heads
    keys, values = np.split(np.arange(rows).reshape(heads, -1), [attention.nope_dim], axis=1)
    return [
        Part(f"{at}.k_b_proj", keys.reshape(-1), heads=heads, transposed=True),
        Part(f"{at}.v_b_proj", values.reshape(-1), heads=heads),
    ]


def _as_it_is(array: FloatArray) -> FloatArray:
    return array
