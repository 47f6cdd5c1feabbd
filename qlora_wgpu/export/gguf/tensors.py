"""The tensors of a GGUF file: types, names there, and which of a model's each is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16
from qlora_wgpu.checkpoint.gguf.architecture import Heads, grouped_orders, qkv_order, tiled_order
from qlora_wgpu.checkpoint.gguf.architectures import EMBEDDING, HEAD
from qlora_wgpu.checkpoint.gguf.header import TYPES, ElementType
from qlora_wgpu.checkpoint.gguf.plain_architectures import kind_order
from qlora_wgpu.errors import ConfigError, UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.model_keys import to_pairs
from qlora_wgpu.export.merge import MergedWeights
from qlora_wgpu.families.family import Architecture, ExpertSpec, stored_parts
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.latent_attention import LatentAttention
from qlora_wgpu.families.parts.mixers import GatedDeltaNet
from qlora_wgpu.model.checkpoint_reader import stored_embedding

# ---- types ---------------------------------------------------------------------------------------

_BY_NAME = {kind.name: kind for kind in TYPES.values()}
F32, F16, BF16, Q8_0 = (_BY_NAME[name] for name in ("F32", "F16", "BF16", "Q8_0"))
_LARGEST = 65504.0  # of float16, which scales of blocks are, too
_AT_ONCE = 1 << 22  # numbers that become blocks at once


@dataclass(frozen=True)
class FileType:
    """What most of a file's matrices are stored as."""

    kind: ElementType  # the element type
    number: int  # ``general.file_type``, by which llama.cpp shows the file


FILE_TYPES = {
    "f32": FileType(F32, 0),
    "f16": FileType(F16, 1),
    "bf16": FileType(BF16, 32),
    "q8_0": FileType(Q8_0, 7),
    "q5_1": FileType(_BY_NAME["Q5_1"], 9),
    "q5_0": FileType(_BY_NAME["Q5_0"], 8),
    "q4_1": FileType(_BY_NAME["Q4_1"], 3),
    "q4_0": FileType(_BY_NAME["Q4_0"], 2),
}
"""By the names that ``--type`` takes."""


def find_file_type(name: str) -> FileType:
    """A file type by its name."""
    found = FILE_TYPES.get(name.lower())
    if found is not None:
        return found
    known = ", ".join(FILE_TYPES)
    if name.lower().startswith(("q", "iq", "tq", "mxfp", "nvfp")):
        raise ConfigError(
            f"--type {name} is not written here (written: {known}): write f16 or bf16, and let "
            f"llama.cpp's own tool make it of that: llama-quantize model.gguf smaller.gguf "
            f"{name.upper()}"
        )
    raise ConfigError(f"--type {name!r} is not a type of GGUF files (written: {known})")


def type_within(wanted: ElementType, shape: tuple[int, ...], *, is_head: bool) -> ElementType:
    """What a matrix is stored as in a file of a type."""
    if shape[-1] % wanted.block:
        return F16  # as llama.cpp's converter has it: rows are no whole blocks
    if is_head and not wanted.is_float and wanted.nbytes * 8 < Q8_0.nbytes * 8:
        return Q8_0
    return wanted


def as_bytes(
    array: npt.NDArray[np.float32], kind: ElementType, name: str
) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes, some rows at a time."""
    largest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    if kind.name not in ("F32", "BF16") and not largest <= _LARGEST:
        raise UnsupportedModelError(
            f"{name} holds {largest:.3g}, which {kind.name.lower()} does not: write bf16 or f32"
        )
    rows = np.ascontiguousarray(array).reshape(-1, array.shape[-1] if array.ndim else 1)
    step = max(_AT_ONCE // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        yield _encoded(rows[first : first + step], kind)


def _encoded(rows: npt.NDArray[np.float32], kind: ElementType) -> npt.NDArray[np.uint8]:
    if kind == F32:
        return rows.astype("<f4", copy=False).view(np.uint8)
    if kind == F16:
        return rows.astype("<f2").view(np.uint8)
    if kind == BF16:
        return to_bfloat16(rows).view(np.uint8)
    import gguf  # takes its time, for those alone who need it

    blocks: npt.NDArray[np.uint8] = gguf.quants.quantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return np.ascontiguousarray(blocks)


# ---- names, and parts of layers ------------------------------------------------------------------

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
    """A tensor of the file that is made of a layer's weight."""

    module: str  # the layer by a name that llama.cpp knows
    # Which of the layer's rows it has, in its own order; None for all as they are
    rows: IntArray | None = None
    columns: IntArray | None = None  # the same of columns
    heads: int = 0  # as many matrices the rows are, each by itself in the tensor; 0 for one in all
    transposed: bool = False  # whether each of these is transposed

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
        """The tensors that a layer becomes."""
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
        """What is small and float32: its name where llama.cpp's differs, and what it becomes."""
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
        """The stacks of experts in the file: the name of each, and what its rows are of."""
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


# ---- tensors -------------------------------------------------------------------------------------

Read = Callable[[], FloatArray]
_SINKS = "self_attn.sinks"  # a parameter itself, where all others are modules' weights
_OF_KEYS = ".mlp.act_fn."  # xIELU's scalars, of which keys tell
_ROWS_AT_ONCE = 4096  # of a table
_CORRECTIONS, _BIAS_OF_EXPERTS = "e_score_correction_bias", "feed_forward.expert_bias"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file."""

    name: str  # llama.cpp's name
    shape: tuple[int, ...]  # its dimensions, rows before columns
    kind: ElementType  # what it is stored as
    # Make its bytes one after the other: a stack of experts has as many as experts
    parts: tuple[Callable[[], Iterator[npt.NDArray[np.uint8]]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * self.kind.row_bytes(self.shape[-1])


def model_tensors(
    merged: MergedWeights,
    llama_cpp: LlamaCpp,
    wanted: ElementType,
    extra: Mapping[str, FloatArray],
) -> list[FileTensor]:
    """A model's tensors, in the order of the forward.

    Args:
        merged: The weights.
        llama_cpp: llama.cpp's architecture.
        wanted: What matrices are stored as.
        extra: Further tensors by name, in float32.
    """
    tensors = _Tensors(merged, llama_cpp, wanted)
    listed = [*tensors.ends(), *tensors.tables(), *tensors.small(), *tensors.linears()]
    listed += tensors.experts()
    for name, array in extra.items():
        listed.append(_made(name, array.shape, F32, [_given(array)]))
    return listed


def refuse_untied(merged: MergedWeights, llama_cpp: LlamaCpp) -> None:
    """Refuses an embedding and a head that an adapter makes two, where llama.cpp has one."""
    if merged.untied and llama_cpp.head == "tied":
        raise UnsupportedModelError(
            "the adapter changes the embedding and the head apart, and llama.cpp has no head of "
            "its own for this model: keep to transformers (qlora-wgpu merge)"
        )


class _Tensors:
    def __init__(self, merged: MergedWeights, llama_cpp: LlamaCpp, wanted: ElementType) -> None:
        import gguf  # takes its time, for those alone who need it

        self._merged, self._llama_cpp, self._wanted = merged, llama_cpp, wanted
        self._architecture: Architecture = merged.architecture
        arch = gguf.MODEL_ARCH[llama_cpp.label]
        self._names = gguf.get_tensor_name_map(arch, self._architecture.num_layers)
        self._parts = LayerParts(self._architecture, llama_cpp)

    def ends(self) -> Iterator[FileTensor]:
        """The embedding and the head."""
        architecture, head = self._architecture, self._llama_cpp.head
        shape = architecture.vocab_size, architecture.hidden_size
        stored = stored_embedding(self._merged.folder, architecture)
        if self._merged.untied:
            stored = architecture.embed_name
        refuse_untied(self._merged, self._llama_cpp)
        is_head = architecture.tied and head != "own" and not self._merged.untied
        yield self._matrix(EMBEDDING, shape, stored, is_head=is_head)
        if head == "own" or not architecture.tied or self._merged.untied:
            shared = architecture.tied and not self._merged.untied
            own = stored if shared else architecture.head_name
            yield self._matrix(HEAD, shape, own, is_head=True)

    def tables(self) -> Iterator[FileTensor]:
        """Further embeddings, of the tokens that have a row, never whole in memory."""
        for name, (_, columns) in self._architecture.tables.items():
            shape = self._architecture.vocab_size, columns
            cuts = range(0, shape[0], _ROWS_AT_ONCE)
            reads = [
                self._table_reader(name, slice(i, min(i + _ROWS_AT_ONCE, shape[0]))) for i in cuts
            ]
            yield _made(
                self._named(name), shape, type_within(self._wanted, shape, is_head=False), reads
            )

    def small(self) -> Iterator[FileTensor]:
        """Norms, biases and routers, all in float32."""
        architecture = self._architecture
        for name, shape in architecture.norm_shapes.items():
            shape = shape[1:] if name.endswith(_CORRECTIONS) and len(shape) == 2 else shape
            if _OF_KEYS not in name:
                parts = [part for part, _ in stored_parts(name, shape)]
                offset = architecture.offset_of(name)
                called, change = self._parts.small(name)
                reads = [self._reader(part, change=change, offset=offset) for part in parts]
                called = self._named(called.replace(".norms.*", ""))
                yield _made(called, _squeezed(shape), F32, reads)
        for name, shape in architecture.router_shapes.items():
            yield self._small(name, shape, self._reader(name))
        for spec in architecture.linears:
            for part in self._parts.of(spec.name, spec.out_features) if spec.bias else ():
                shape = part.shape(spec.out_features, 1)[:1]
                read = self._reader(f"{spec.name}.bias", change=part.by_rows)
                yield self._small(f"{part.module}.bias", shape, read)

    def linears(self) -> Iterator[FileTensor]:
        """Matrices that are no experts'."""
        for spec in self._architecture.linears:
            for part in self._parts.of(spec.name, spec.out_features):
                name = self._named(f"{part.module}.weight")
                shape = part.shape(spec.out_features, spec.in_features)
                kind = type_within(self._wanted, shape, is_head=False)
                read = self._reader(f"{spec.name}.weight", change=part.of)
                yield _made(name, shape, kind, [read])

    def experts(self) -> Iterator[FileTensor]:
        """Stacks of experts, one after the other in the file, never together in memory."""
        for name, stacks in self._parts.stacks(self._architecture.experts):
            stack, rows = stacks[0], sum(each.out_features for each in stacks)
            shape = stack.experts, rows, stack.in_features
            of_each = zip(*(each.linears for each in stacks), strict=True)
            specs = [spec for expert in of_each for spec in expert]
            reads = [self._reader(f"{spec.name}.weight") for spec in specs]
            kind = type_within(self._wanted, shape, is_head=False)
            [part] = self._parts.of(name, rows)
            yield _made(self._named(f"{part.module}.weight"), shape, kind, reads)
            if stack.bias:
                name = self._named(f"{part.module}.bias")
                reads = [self._reader(f"{spec.name}.bias") for spec in stack.linears]
                yield _made(name, shape[:2], F32, reads)

    def _matrix(
        self, name: str, shape: tuple[int, int], source: str, *, is_head: bool
    ) -> FileTensor:
        kind = type_within(self._wanted, shape, is_head=is_head)
        return _made(name, shape, kind, [self._reader(source)])

    def _small(self, source: str, shape: tuple[int, ...], read: Read) -> FileTensor:
        return _made(self._named(source), shape, F32, [read])

    def _reader(
        self,
        name: str,
        *,
        change: Callable[[FloatArray], FloatArray] | None = None,
        offset: float = 0.0,
    ) -> Read:
        """Reads a tensor when it is written, changed, and with something added."""

        def read() -> FloatArray:
            array = self._merged.float32(self._merged.stored_name(name))
            array = array if change is None else change(array)
            return array + np.float32(offset) if offset else array

        return read

    def _table_reader(self, name: str, rows: slice) -> Read:
        folder, stored = self._merged.folder, self._merged.stored_name(name)

        def read() -> FloatArray:
            if folder.holds_quantized(stored):
                return folder.dequantized(stored)[rows]
            raw = folder.raw(stored)[rows]
            if folder.dtype(stored) == "BF16":
                return from_bfloat16(raw)
            return raw.astype(np.float32)

        return read

    def _named(self, name: str) -> str:
        """llama.cpp's name of a tensor."""
        if name.startswith(OF_FILE):
            return name
        plain = name.replace(".language_model.", ".")
        if plain.endswith(_CORRECTIONS):  # which llama.cpp takes for a bias
            plain = f"{plain.removesuffix('_bias')}.bias"
        if plain.endswith(_BIAS_OF_EXPERTS):
            plain += ".bias"
        found: str | None = self._names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedModelError(
                f"llama.cpp has no name for {name}, so nothing is exported: keep to transformers "
                "(qlora-wgpu merge)"
            )
        return f"{found}.weight" if plain.endswith(_SINKS) else found


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is small, without the convolutions' axis of one."""
    return (shape[0], shape[2]) if len(shape) == 3 else shape


def _made(
    name: str, shape: tuple[int, ...], kind: ElementType, reads: Sequence[Read]
) -> FileTensor:
    def bytes_of(read: Read) -> Callable[[], Iterator[npt.NDArray[np.uint8]]]:
        return lambda: as_bytes(read(), kind, name)

    return FileTensor(name, shape, kind, tuple(map(bytes_of, reads)))


def _given(array: FloatArray) -> Read:
    return lambda: array
