"""The tensors of a GGUF file: their types and names, and the weights that they are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16
from qlora_wgpu.checkpoint.gguf_file import TYPES, ElementType
from qlora_wgpu.errors import ConfigError, UnsupportedModelError, command
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.families.family import Architecture, stored_parts
from qlora_wgpu.gguf.architecture import GGUFArchitecture
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD, Layout
from qlora_wgpu.model.checkpoint_reader import stored_embedding

# ---- types ---------------------------------------------------------------------------------------

_BY_NAME = {kind.name: kind for kind in TYPES.values()}
F32, F16, BF16, Q8_0 = (_BY_NAME[name] for name in ("F32", "F16", "BF16", "Q8_0"))
_MAX_FLOAT16 = 65504.0  # the scales of blocks are float16, too
_AT_ONCE = 1 << 22  # numbers that are quantized at a time


@dataclass(frozen=True)
class FileType:
    """The type of most of a file's matrices."""

    kind: ElementType
    number: int  # ``general.file_type``, which llama.cpp displays


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
"""By the value of ``--type``."""


def _option() -> str:
    return "--type" if command() else "type"


def find_file_type(name: str) -> FileType:
    """A file type by its name."""
    found = FILE_TYPES.get(name.lower())
    if found is not None:
        return found
    known = ", ".join(FILE_TYPES)
    if name.lower().startswith(("q", "iq", "tq", "mxfp", "nvfp")):
        raise ConfigError(
            f"{_option()} {name} is not supported (supported: {known}): export f16 or bf16, then "
            f"run llama-quantize model.gguf smaller.gguf {name.upper()}"
        )
    raise ConfigError(f"{_option()} {name!r} is not a type of GGUF files (supported: {known})")


def type_of_matrix(target: ElementType, shape: tuple[int, ...], *, is_head: bool) -> ElementType:
    """The type of a matrix in a file of type ``target``."""
    if shape[-1] % target.block:
        return F16  # as in llama.cpp's converter
    if is_head and not target.is_float and target.nbytes < Q8_0.nbytes:
        return Q8_0
    return target


def as_bytes(
    array: npt.NDArray[np.float32], kind: ElementType, name: str
) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes, some rows at a time."""
    largest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    if kind.name not in ("F32", "BF16") and not largest <= _MAX_FLOAT16:
        raise UnsupportedModelError(
            f"{name} contains {largest:.3g}, which is out of range for {kind.name.lower()}: use "
            "bf16 or f32"
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
    import gguf  # slow to import

    blocks: npt.NDArray[np.uint8] = gguf.quants.quantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return np.ascontiguousarray(blocks)


# ---- tensors -------------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
Read = Callable[[], FloatArray]
_IN_KEYS = ".mlp.act_fn."  # xIELU's scalars, which are keys
_ROWS_AT_ONCE = 4096  # of a table


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file."""

    name: str  # llama.cpp's
    shape: tuple[int, ...]  # rows before columns
    kind: ElementType
    # Yield its bytes, one after the other; a stack of experts has one for each expert
    parts: tuple[Callable[[], Iterator[npt.NDArray[np.uint8]]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * self.kind.row_bytes(self.shape[-1])


def model_tensors(
    merged: MergedWeights,
    llama_cpp: GGUFArchitecture,
    target: ElementType,
    extra: Mapping[str, FloatArray],
) -> list[FileTensor]:
    """A model's tensors, and ``extra`` ones in float32."""
    tensors = _Tensors(merged, llama_cpp, target)
    listed = [*tensors.ends(), *tensors.tables(), *tensors.small(), *tensors.linears()]
    listed += tensors.experts()
    for name, array in extra.items():
        listed.append(_file_tensor(name, array.shape, F32, [partial(np.asarray, array)]))
    return listed


def refuse_untied(merged: MergedWeights, llama_cpp: GGUFArchitecture) -> None:
    """Refuses to untie embedding and head if llama.cpp has a single matrix."""
    if merged.untied and llama_cpp.head == "tied":
        raise UnsupportedModelError(
            "the adapter unties embedding and head, which llama.cpp does not support for this "
            "model: use qlora-wgpu merge and transformers"
        )


class _Tensors:
    def __init__(
        self, merged: MergedWeights, llama_cpp: GGUFArchitecture, target: ElementType
    ) -> None:
        self._merged, self._llama_cpp, self._target = merged, llama_cpp, target
        self._architecture: Architecture = merged.architecture
        self._layout = Layout(self._architecture, llama_cpp)
        self._named = self._layout.stored_name

    def ends(self) -> Iterator[FileTensor]:
        """The embedding and the head."""
        architecture, head = self._architecture, self._llama_cpp.head
        shape = architecture.vocab_size, architecture.hidden_size
        stored = stored_embedding(self._merged.folder, architecture)
        if self._merged.untied:
            stored = architecture.embed_name
        refuse_untied(self._merged, self._llama_cpp)
        is_head = architecture.tied and head != "own" and not self._merged.untied
        change = self._layout.end("embed_tokens", shape[0]).of
        reads = [self._reader(stored, change=change)]
        yield self._matrix(EMBEDDING, shape, reads, is_head=is_head)
        if head == "own" or not architecture.tied or self._merged.untied:
            shared = architecture.tied and not self._merged.untied
            own = stored if shared else architecture.head_name
            reads = [self._reader(own, change=self._layout.end("lm_head", shape[0]).of)]
            yield self._matrix(HEAD, shape, reads, is_head=True)

    def tables(self) -> Iterator[FileTensor]:
        """Further embeddings, some rows in memory at a time."""
        for name, (_, columns) in self._architecture.tables.items():
            shape = self._architecture.vocab_size, columns
            reads = [
                self._table_reader(name, slice(i, min(i + _ROWS_AT_ONCE, shape[0])))
                for i in range(0, shape[0], _ROWS_AT_ONCE)
            ]
            yield self._matrix(self._named(name), shape, reads)

    def small(self) -> Iterator[FileTensor]:
        """Norms, biases and routers, all in float32."""
        architecture = self._architecture
        for name, shape in architecture.norm_shapes.items():
            if _IN_KEYS not in name:
                part, offset = self._layout.small(name), architecture.offset_of(name)
                rows = [row for row, _ in stored_parts(name, shape)]
                reads = [self._reader(row, change=part.of, offset=offset) for row in rows]
                own = part.own_shape or _squeezed(shape)
                yield _file_tensor(self._named(name), own, F32, reads)
        for name, router in architecture.router_shapes.items():
            yield _file_tensor(self._named(name), router, F32, [self._reader(name)])
        for spec in architecture.linears:
            for part in self._layout.parts(spec.name, spec.out_features) if spec.bias else ():
                shape = part.shape(spec.out_features, 1)[:1]
                read = self._reader(f"{spec.name}.bias", change=part.by_rows)
                yield _file_tensor(self._named(f"{part.module}.bias"), shape, F32, [read])

    def linears(self) -> Iterator[FileTensor]:
        """All matrices but experts'."""
        for spec in self._architecture.linears:
            for part in self._layout.parts(spec.name, spec.out_features):
                name = self._named(f"{part.module}.weight")
                shape = part.shape(spec.out_features, spec.in_features)
                read = self._reader(f"{spec.name}.weight", change=part.of)
                yield self._matrix(name, shape, [read])

    def experts(self) -> Iterator[FileTensor]:
        """Stacks of experts, one expert in memory at a time."""
        for name, stacks in self._layout.stacks(self._architecture.experts):
            stack, rows = stacks[0], sum(each.out_features for each in stacks)
            shape = stack.experts, rows, stack.in_features
            of_each = zip(*(each.linears for each in stacks), strict=True)
            specs = [spec for expert in of_each for spec in expert]
            reads = [self._reader(f"{spec.name}.weight") for spec in specs]
            [part] = self._layout.parts(name, rows)
            yield self._matrix(self._named(f"{part.module}.weight"), shape, reads)
            if stack.bias:
                name = self._named(f"{part.module}.bias")
                reads = [self._reader(f"{spec.name}.bias") for spec in stack.linears]
                yield _file_tensor(name, shape[:2], F32, reads)

    def _matrix(
        self, name: str, shape: tuple[int, ...], reads: Sequence[Read], *, is_head: bool = False
    ) -> FileTensor:
        kind = type_of_matrix(self._target, shape, is_head=is_head)
        return _file_tensor(name, shape, kind, reads)

    def _reader(
        self,
        name: str,
        *,
        change: Callable[[FloatArray], FloatArray] | None = None,
        offset: float = 0.0,
    ) -> Read:
        """A function that reads a tensor, applies ``change`` and adds ``offset``."""

        def read() -> FloatArray:
            array = self._merged.float32(self._merged.stored_name(name))
            array = array if change is None else change(array)
            return array + np.float32(offset) if offset else array

        return read

    def _table_reader(self, name: str, rows: slice) -> Read:
        weight = self._merged.folder[self._merged.stored_name(name)]

        def read() -> FloatArray:
            if weight.is_quantized:
                return weight.read()[rows]
            raw = weight.raw()[rows]
            return from_bfloat16(raw) if weight.dtype == "BF16" else raw.astype(np.float32)

        return read


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A small tensor's shape without the axis of size one of convolutions and corrections."""
    if len(shape) == 2 and shape[0] == 1:
        return shape[1:]
    return (shape[0], shape[2]) if len(shape) == 3 else shape


def _file_tensor(
    name: str, shape: tuple[int, ...], kind: ElementType, reads: Sequence[Read]
) -> FileTensor:
    def bytes_of(read: Read) -> Callable[[], Iterator[npt.NDArray[np.uint8]]]:
        return lambda: as_bytes(read(), kind, name)

    return FileTensor(name, shape, kind, tuple(map(bytes_of, reads)))
