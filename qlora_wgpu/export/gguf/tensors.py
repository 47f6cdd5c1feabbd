"""The tensors of a GGUF file: what each is called there, and of which of a model's it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.gguf.configs import EMBEDDING, HEAD
from qlora_wgpu.checkpoint.gguf.element_types import ElementType
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.gguf.element_types import F32, as_bytes, type_within
from qlora_wgpu.export.gguf.parts import OF_FILE, LayerParts
from qlora_wgpu.export.merged_weights import MergedWeights
from qlora_wgpu.families.family import Architecture, stored_parts
from qlora_wgpu.model.checkpoint_reader import stored_embedding

FloatArray = npt.NDArray[np.float32]
Read = Callable[[], FloatArray]
_SINKS = "self_attn.sinks"  # a parameter itself, where all others are modules' weights
_OF_KEYS = ".mlp.act_fn."  # xIELU's scalars, of which keys tell
_ROWS_AT_ONCE = 4096  # of a table
_CORRECTIONS, _BIAS_OF_EXPERTS = "e_score_correction_bias", "feed_forward.expert_bias"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's name.
        shape: Its dimensions, rows before columns.
        kind: What it is stored as.
        parts: Make its bytes one after the other: a stack of experts has as many as experts.
    """

    name: str
    shape: tuple[int, ...]
    kind: ElementType
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

    Raises:
        UnsupportedModelError: If llama.cpp has no name for one.
    """
    tensors = _Tensors(merged, llama_cpp, wanted)
    listed = [*tensors.ends(), *tensors.tables(), *tensors.small(), *tensors.linears()]
    listed += tensors.experts()
    for name, array in extra.items():
        listed.append(_made(name, array.shape, F32, [_given(array)]))
    return listed


def refuse_untied(merged: MergedWeights, llama_cpp: LlamaCpp) -> None:
    """Refuses an embedding and a head that an adapter makes two, where llama.cpp has one.

    Raises:
        UnsupportedModelError: If so.
    """
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
        for name, router in architecture.routers.items():
            yield self._small(name, router, self._reader(name))
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
        """llama.cpp's name of a tensor.

        Raises:
            UnsupportedModelError: If it has none.
        """
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
