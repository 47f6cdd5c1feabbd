"""The adapter on the device: all A and B in one flat vector; the same for gradient and moments."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec, RouterSpec
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import ITEM_SIZE, Tensor, ceil_div, matrix, padded, row
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.lora.compatibility import is_written_together, peft_differences
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.flat_vector import (
    FLOAT32,
    AdapterDtypes,
    FlatVector,
    Group,
    OptimizerKind,
    Place,
    aligned,
    cut,
)
from qlora_wgpu.lora.init import draw_head, draw_start
from qlora_wgpu.lora.moments import Moments, moments_of, most_words
from qlora_wgpu.lora.peft_names import (
    EMBEDDING_A,
    EMBEDDING_B,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TOKENS,
    WHOLE,
    Float32Array,
    pair_shapes,
    parse_name,
    tensor_name,
)
from qlora_wgpu.lora.targets import (
    bare_parameters,
    check_experts,
    check_patterns,
    check_saved,
    check_start,
    in_layers,
    peft_config,
    saved_modules,
    targeted,
)
from qlora_wgpu.lora.trained_tokens import Vocabulary, check_ends
from qlora_wgpu.ops.trained import SavedModule, TrainableTokens

_VIEW_ROWS = 256  # a view of a matrix of any width may begin at multiples of this many rows


def _slack_of(flat: FlatVector, stacked: Collection[str]) -> int:
    """Floats to add at the end: bindings of experts' matrices are whole rows and may exceed it."""
    places = ((parse_name(name), place) for name, place in flat.items())
    rows = [padded(place.columns) for parsed, place in places if parsed and parsed[0] in stacked]
    return aligned(max(rows, default=0))


def _cuts_of(flat: FlatVector, stacks: Sequence[ExpertSpec], most: int) -> tuple[int, ...]:
    """Where the pieces of the flat vectors begin, in floats, except the first.

    Layers of one input, which kernels may bind as one, stay together if possible; a layer's experts
    always do. A piece has at most ``most`` floats.
    """
    of_stacks = {spec.name: stack.name for stack in stacks for spec in stack.linears}
    begins, sizes, groups = [], [], []
    for name, place in flat.items():
        module, leaf = parse_name(name) or (name, "")
        stack = of_stacks.get(module)
        kind = module.rpartition(".")[0] if stack is None else stack
        if leaf == WHOLE:
            for begin, size in _row_blocks(place, most):
                begins.append(begin)
                sizes.append(size)
                groups.append(Group(name))
            continue
        begins.append(place.offset)
        sizes.append(max(aligned(place.size), most_words(place)))
        groups.append(Group(f"{kind}.{leaf}", always=stack is not None))
    return tuple(begins[i] for i in cut(sizes, groups, most))


def _row_blocks(place: Place, most: int) -> Iterator[tuple[int, int]]:
    """Yields the offset and size of blocks of rows, at most ``most`` floats each."""
    stride = place.size // place.rows
    rows = max(most // stride // _VIEW_ROWS * _VIEW_ROWS, _VIEW_ROWS)
    for first in range(0, place.rows, rows):
        count = min(rows, place.rows - first)
        yield place.offset + first * stride, aligned(count * stride)


def _check_classes(vocabulary: Vocabulary, max_binding: int | None) -> None:
    nbytes = 4 * vocabulary.classes * padded(vocabulary.columns)
    if max_binding is not None and nbytes > max_binding:
        most = max_binding // (4 * padded(vocabulary.columns))
        raise ConfigError(
            f"{vocabulary.classes:,} classes are not supported: this GPU supports at most {most:,} "
            "for this model"
        )


class AdapterLayout(FlatVector):
    """The places of each A and B by name, and the vectors that hold them.

    Vectors that are larger than a binding are split into pieces, all at the same places; offsets
    count from the beginning of the whole vector.
    """

    peft: AdapterConfig  # as PEFT writes it, without the base model's name
    targets: list[LinearSpec]  # the adapted layers, except the embedding
    embedding: LinearSpec | None  # the embedding as a layer, if it is adapted
    peft_differences: list[str]  # a sentence for each thing that PEFT computes differently
    is_written_together: bool  # whether files name ``target_parameters``, as PEFT has experts
    bare: frozenset[str]  # the adapted routers that are bare parameters in transformers
    b_begin: int  # where in the flat vectors A's end and B's begin, in floats
    cuts: tuple[int, ...]  # where their pieces begin, in floats, except the first
    parameters: ShardedVector  # the flat vector of all parameters
    gradient: ShardedVector  # their gradients, summed
    forms: AdapterDtypes  # the element types of gradient and moments
    loras: dict[str, Lora]  # each layer's A and B, by module
    embedding_lora: Lora | None  # A is (r, vocab_size), B (hidden_size, r)
    expert_loras: dict[str, Lora]  # the first expert's, by the names of ExpertSpec
    # The trained rows of the embedding and of an untied head, or all of them, by module.
    trained_rows: dict[str, TrainableTokens]
    trained_whole: dict[str, SavedModule]
    start: Float32Array | None = None  # its initial values, if these are a part of the base
    new_head: str = ""  # the head that the base's files lack, so that it is initialized
    head_std: float = 0.02  # the standard deviation of its initial values

    def __init__(
        self,
        config: LoraConfig,
        linears: Sequence[LinearSpec],
        experts: Sequence[ExpertSpec] = (),
        forms: AdapterDtypes = FLOAT32,
        max_binding: int | None = None,
        within: str = "",
        vocabulary: Vocabulary | None = None,
        routers: Sequence[RouterSpec] = (),
    ) -> None:
        """Lays out an adapter for the targeted layers, experts and routers of a model.

        No piece of a vector has more than ``max_binding`` bytes, if given. For ``within`` see
        ``Architecture.adapted_within``. Without a vocabulary, no rows are trained.
        """
        super().__init__()
        self.config = config
        tokens: dict[str, tuple[int, ...]] = {}
        if vocabulary is not None:
            tokens = vocabulary.trained(config.trainable_token_indices)
        ends = () if vocabulary is None else (vocabulary.head_layer, vocabulary.embedding_layer)
        chosen = targeted(linears, config.target_modules, experts, ends, routers)
        chosen = in_layers(chosen, config.layers_to_transform)
        check_patterns(config, chosen)
        self.embedding = next((s for s in chosen if s in ends[1:]), None)
        self.targets = [spec for spec in chosen if spec is not self.embedding]
        saved = () if vocabulary is None else saved_modules(config, vocabulary)
        self.peft = peft_config(config, chosen, experts, within)
        adapted = {spec.name for spec in chosen}
        if vocabulary is not None:
            check_ends(config, vocabulary, adapted, trains_rows=bool(tokens))
            indices = vocabulary.with_new(config.trainable_token_indices)
            self.peft = replace(self.peft, trainable_token_indices=indices)
        if vocabulary is not None and vocabulary.classes:
            names = sorted({*(config.modules_to_save or ()), "score"})
            self.peft = replace(self.peft, modules_to_save=names, task_type="SEQ_CLS")
            _check_classes(vocabulary, max_binding)
        check_saved(saved, config, adapted, forms, trains_rows=bool(tokens))
        stacks = [stack for stack in experts if stack.linears[0].name in adapted]
        check_experts(self.peft, stacks)
        self.bare = bare_parameters(config, adapted, routers)
        check_start(self.peft, config.init_lora_weights, self.targets, stacks)
        self.peft_differences = peft_differences(self.peft, self.targets, experts)
        self.is_written_together = bool(self.bare) or is_written_together(
            self.peft, self.targets, experts
        )
        self._place_all(vocabulary, tokens, saved)
        stacked = {spec.name for stack in stacks for spec in stack.linears}
        self.slack = _slack_of(self, stacked)
        self.cuts = ()
        if max_binding is not None:
            self.cuts = _cuts_of(self, stacks, max_binding // 4 - self.slack)
        self.forms = forms
        self.parameters, self.gradient = (
            ShardedVector.laid_out(label, kind, dtype, self.piece_lengths, self.slack)
            for label, kind, dtype in (
                ("adapter", "adapter", "float32"),
                ("gradient", "gradients", forms.gradient),
            )
        )
        self.moments = self._moments()
        self.loras = {s.name: self._pair(s) for s in self.targets if s.name not in stacked}
        self.expert_loras = {stack.name: self._pair(stack.linears[0], stack) for stack in stacks}
        self.embedding_lora = self._embedding_pair()
        self.trained_rows, self.trained_whole = {}, {}
        if vocabulary is not None:
            self.trained_rows = {m: self._rows(m, rows, vocabulary) for m, rows in tokens.items()}
            self.trained_whole = {m: self._whole(m, vocabulary) for m in saved}

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        config: LoraConfig,
        forms: AdapterDtypes = FLOAT32,
        max_binding: int | None = None,
    ) -> AdapterLayout:
        return cls(
            config,
            architecture.linears,
            architecture.experts,
            forms,
            max_binding,
            architecture.adapted_within,
            Vocabulary.of(architecture),
            architecture.routers,
        )

    def _place_all(
        self,
        vocabulary: Vocabulary | None,
        tokens: Mapping[str, Sequence[int]],
        saved: Sequence[str],
    ) -> None:
        """Places all A's, trained rows and matrices, then B's and magnitudes.

        LoRA+ has one learning rate for B's and vectors, and another for the rest.
        """
        ranks = {s.name: self.peft.rank_of(s.name) for s in self.adapted}
        for spec in self.targets:
            self.append(tensor_name(spec.name, LORA_A), ranks[spec.name], spec.in_features)
        if (of := self.embedding) is not None:
            for name, shape in pair_shapes(of, ranks[of.name], (EMBEDDING_A, EMBEDDING_B)).items():
                self.append(name, *shape)
        if vocabulary is not None:
            for module, indices in tokens.items():
                self.append(tensor_name(module, TOKENS), len(indices), vocabulary.columns)
            for module in saved:
                rows = vocabulary.rows_of(module)
                self.append(tensor_name(module, WHOLE), rows, vocabulary.columns)
        self.b_begin = self.end
        for spec in self.targets:
            self.append(tensor_name(spec.name, LORA_B), spec.out_features, ranks[spec.name])
        if self.config.use_dora:
            for spec in self.targets:
                self.append(tensor_name(spec.name, MAGNITUDE), 0, spec.out_features)

    # -- tensors by their places, in the pieces of both vectors ----------------------------

    def _pair(self, spec: LinearSpec, stack: ExpertSpec | None = None) -> Lora:
        return Lora(
            r=self.peft.rank_of(spec.name),
            scaling=self.peft.scaling_of(spec.name),
            dropout=self.config.lora_dropout,
            key=zlib.crc32(spec.name.encode()),
            a=self._matrix(self.parameters, spec, LORA_A, stack),
            b=self._matrix(self.parameters, spec, LORA_B, stack),
            grad_a=self._matrix(self.gradient, spec, LORA_A, stack),
            grad_b=self._matrix(self.gradient, spec, LORA_B, stack),
            a_stride=self._stride(LORA_A, stack),
            b_stride=self._stride(LORA_B, stack),
            magnitude=self._magnitude(self.parameters, spec),
            grad_magnitude=self._magnitude(self.gradient, spec),
        )

    def _embedding_pair(self) -> Lora | None:
        if self.embedding is None:
            return None
        name = self.embedding.name
        a, b, grad_a, grad_b = (
            self._window(flat, name, leaf)
            for flat in (self.parameters, self.gradient)
            for leaf in (EMBEDDING_A, EMBEDDING_B)
        )
        rank, scaling = self.peft.rank_of(name), self.peft.scaling_of(name)
        # PEFT applies no dropout to lookups.
        return Lora(rank, scaling, 0.0, 0, a, b, grad_a, grad_b)

    def _rows(self, module: str, indices: Sequence[int], of: Vocabulary) -> TrainableTokens:
        rows, gradient = (
            self._window(flat, module, TOKENS) for flat in (self.parameters, self.gradient)
        )
        padding = of.padding if module == of.embedding else None
        return TrainableTokens(module, tuple(indices), rows, gradient, of.rows, padding)

    def _whole(self, module: str, of: Vocabulary) -> SavedModule:
        rows, gradients = (
            tuple(self._row_pieces(flat, module)) for flat in (self.parameters, self.gradient)
        )
        padding = of.padding if module == of.embedding else None
        return SavedModule(module, rows, gradients, padding)

    def _matrix(
        self, flat: ShardedVector, spec: LinearSpec, leaf: str, stack: ExpertSpec | None
    ) -> Tensor:
        """A or B within a flat vector, with the other experts' up to the last."""
        place = self.place(spec.name, leaf)
        rows = place.rows
        if stack is not None:
            others = (stack.experts - 1) * self._stride(leaf, stack)
            rows += ceil_div(others, padded(place.columns))
        return self._window(flat, spec.name, leaf, rows)

    def _window(
        self, flat: ShardedVector, module: str, leaf: str, rows: int | None = None
    ) -> Tensor:
        """A tensor within a flat vector; with ``rows``, the first rows of a matrix."""
        place = self.place(module, leaf)
        piece, first = flat.find(place.offset)
        name, offset = f"{module}.{leaf}", ITEM_SIZE[flat.dtype] * first
        if not place.rows:
            return row(name, place.columns, flat.dtype, piece.storage, offset)
        rows = place.rows if rows is None else rows
        return matrix(name, rows, place.columns, flat.dtype, piece.storage, offset)

    def _row_pieces(self, flat: ShardedVector, module: str) -> Iterator[tuple[int, Tensor]]:
        """Yields ``(first row, rows)`` of a whole matrix, which may span several pieces."""
        place = self.place(module, WHOLE)
        stride = place.size // place.rows
        for begin, piece in flat.numbered():
            first = max(begin, place.offset)
            count = (min(begin + piece.columns, place.offset + place.size) - first) // stride
            if count > 0:
                name, offset = f"{module}.{WHOLE}", ITEM_SIZE[flat.dtype] * (first - begin)
                rows = matrix(name, count, place.columns, flat.dtype, piece.storage, offset)
                yield (first - place.offset) // stride, rows

    def _stride(self, leaf: str, stack: ExpertSpec | None) -> int:
        if stack is None or stack.experts == 1:
            return 0
        first, second = (self.place(spec.name, leaf).offset for spec in stack.linears[:2])
        return second - first

    def _magnitude(self, flat: ShardedVector, spec: LinearSpec) -> Tensor | None:
        return self._window(flat, spec.name, MAGNITUDE) if self.config.use_dora else None

    # -- what it is ------------------------------------------------------------------------

    @property
    def first_moment(self) -> ShardedVector:
        return self.moments.vectors[0]

    @property
    def second_moment(self) -> ShardedVector:
        """AdamW's v; Lion has none."""
        return self.moments.vectors[1]

    def keep_moments(self, optimizer: OptimizerKind) -> None:
        """Allocates moments for another optimizer, unless they already are that optimizer's."""
        if optimizer != self.forms.optimizer:
            self.forms = replace(self.forms, optimizer=optimizer)
            self.moments = self._moments()

    @property
    def piece_lengths(self) -> list[int]:
        return [end - begin for begin, end in pairwise([0, *self.cuts, self.length])]

    def beyond_a_binding(self, max_binding: int) -> tuple[str, int] | None:
        """The name and bytes of the first matrix of a pair that is larger than a binding."""
        pairs = [*self.loras.items(), *self.expert_loras.items()]
        if self.embedding is not None and self.embedding_lora is not None:
            pairs.append((self.embedding.name, self.embedding_lora))
        for name, pair in pairs:
            for tensor in (pair.a, pair.b):
                if tensor.nbytes > max_binding:
                    return name, tensor.nbytes
        return None

    @property
    def adapted(self) -> list[LinearSpec]:
        """All layers that have a pair, the embedding last."""
        return [*self.targets, *([] if self.embedding is None else [self.embedding])]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything that decides a step's launches: adapters of equal shape share programs."""
        layers = tuple(
            (s.name, self.peft.rank_of(s.name), self.peft.scaling_of(s.name)) for s in self.adapted
        )
        return layers, self.config.use_dora, self.config.lora_dropout

    def place(self, module: str, leaf: str) -> Place:
        return self[tensor_name(module, leaf)]

    def initial(self, seed: int) -> Float32Array:
        """The initial values, by ``draw_start``; zeros if they are computed from the base."""
        values = np.zeros(self.length, np.float32)
        if not self.config.changes_base:
            gaussian = self.config.init_lora_weights == "gaussian"
            draw_start(self, values, self.targets, self.embedding, seed, gaussian=gaussian)
        if self.new_head:
            draw_head(self, values, self.new_head, self.head_std, seed)
        return values

    def _moments(self) -> Moments:
        if self.forms.optimizer == "adamw_8bit" and any(
            place.offset < cut < place.offset + place.size
            for place in self.values()
            for cut in self.cuts
        ):
            raise ConfigError(
                "optim.name: adamw_8bit does not support whole matrices (lora.modules_to_save) "
                "that are larger than a binding of this GPU: set optim.name to adamw"
            )
        places = FlatVector(self)  # not self: a reference cycle would keep vectors in memory
        places.end, places.slack = self.end, self.slack
        return moments_of(places, self.forms, self.cuts)
