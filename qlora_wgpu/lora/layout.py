"""The adapter on the device: all A and B in one flat float32 vector, gradient and moments alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.pieces import Pieces
from qlora_wgpu.lora.adapter_tensors import AdapterTensors
from qlora_wgpu.lora.embedding_pair import check_ends
from qlora_wgpu.lora.flat_vector import FlatVector, Place
from qlora_wgpu.lora.forms import FLOAT32, AdapterForms, OptimizerKind
from qlora_wgpu.lora.moments import Moments, moments_of
from qlora_wgpu.lora.names import Float32Array, tensor_name
from qlora_wgpu.lora.peft_differences import is_written_together, peft_differences
from qlora_wgpu.lora.placing import cuts_of, is_within, place_all, slack_of
from qlora_wgpu.lora.random_start import draw_start
from qlora_wgpu.lora.saved_modules import check_saved, saved_modules
from qlora_wgpu.lora.targets import (
    check_experts,
    check_patterns,
    check_start,
    in_layers,
    peft_config,
    targeted,
)
from qlora_wgpu.lora.tokens import Vocabulary
from qlora_wgpu.ops.trained_matrix import TrainedMatrix
from qlora_wgpu.ops.trained_rows import TrainedRows


class Adapter:
    """The places of each A and B, and the vectors they lie in.

    A vector that is larger than a binding lies in pieces, all vectors in the same; places are those
    in the whole.

    Attributes:
        config: The adapter's rank, scaling, dropout and targets.
        targets: The adapted layers, but the embedding.
        embedding: The embedding as such a layer, if it is adapted.
        peft_differences: A sentence for each thing that PEFT computes otherwise.
        is_written_together: Whether files have experts' matrices as those of what holds them.
        peft: ``config`` as PEFT writes it, without the base model's name.
        b_begin: Where in the flat vectors, in floats, A's end and B's begin.
        length: Length of the flat vectors, in floats.
        cuts: Where their pieces begin, in floats, but the first.
        loras: Each layer's A and B, by module name.
        embedding_lora: The embedding's: A is (r, vocab_size), B (hidden_size, r).
        expert_loras: The first expert's, by the names of ``ExpertSpec``.
        parameters: The flat vector of all A and B.
        gradient: Their gradients, summed.
        forms: In which types gradient and moments are kept.
        moments: The optimizer's moments.
        trained_rows: The trained rows of the embedding, and of a head of its own, by their modules.
        trained_whole: The embedding, and a head of its own, if they are trained whole, likewise.
        start: The flat vector that it began as, where that is a part of the base and known.
    """

    def __init__(
        self,
        config: LoraConfig,
        linears: Sequence[LinearSpec],
        experts: Sequence[ExpertSpec] = (),
        forms: AdapterForms = FLOAT32,
        max_binding: int | None = None,
        within: str = "",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """Lays out an adapter for the targeted layers.

        Args:
            config: Rank, scaling, dropout and targets.
            linears: The model's layers.
            experts: Its experts.
            forms: In which types gradient and moments are kept.
            max_binding: Most bytes of a piece of a vector, where there is a limit.
            within: See ``Architecture.adapted_within``.
            vocabulary: The matrices that may have trained rows; without, none are trained.

        Raises:
            ConfigError: If the configuration does not fit the layers.
        """
        self.config = config
        self._tokens = (
            {} if vocabulary is None else vocabulary.trained(config.trainable_token_indices)
        )
        ends = () if vocabulary is None else (vocabulary.head_layer, vocabulary.embedding_layer)
        chosen = targeted(linears, config.target_modules, experts, ends)
        chosen = in_layers(chosen, config.layers_to_transform)
        check_patterns(config, chosen)
        self.embedding = next((s for s in chosen if s in ends[1:]), None)
        self.targets = [spec for spec in chosen if spec is not self.embedding]
        self._saved = () if vocabulary is None else saved_modules(config, vocabulary)
        self.peft = peft_config(config, chosen, experts, within)
        adapted = {spec.name for spec in chosen}
        if vocabulary is not None:
            check_ends(config, vocabulary, adapted, trains_rows=bool(self._tokens))
            tokens = vocabulary.with_new(config.trainable_token_indices)
            self.peft = replace(self.peft, trainable_token_indices=tokens)
        check_saved(self._saved, config, adapted, forms, trains_rows=bool(self._tokens))
        stacks = [stack for stack in experts if stack.linears[0].name in adapted]
        check_experts(self.peft, stacks)
        check_start(self.peft, config.init_lora_weights, self.targets, stacks)
        self.start: Float32Array | None = None
        self.peft_differences = peft_differences(self.peft, self.targets, experts)
        self.is_written_together = is_written_together(self.peft, self.targets, experts)
        self._flat = FlatVector()
        self.b_begin = place_all(
            self._flat, self.peft, self.targets, self.embedding, vocabulary, self._tokens,
            self._saved, use_dora=config.use_dora,
        )  # fmt: skip
        slack = slack_of(self._flat, stacks)
        self.length = self._flat.end + slack
        self.cuts = (
            () if max_binding is None else cuts_of(self._flat, stacks, max_binding // 4 - slack)
        )
        self.forms = forms
        self.parameters, self.gradient = (
            Pieces.laid_out(label, kind, dtype, self.piece_lengths, slack)
            for label, kind, dtype in (
                ("adapter", "adapter", "float32"),
                ("gradient", "gradients", forms.gradient),
            )
        )
        self.moments = self._moments()
        self._make_tensors(stacks, vocabulary)

    def _make_tensors(self, stacks: Sequence[ExpertSpec], vocabulary: Vocabulary | None) -> None:
        tensors = AdapterTensors(
            self._flat, self.peft, self.config.lora_dropout, self.config.use_dora,
            self.parameters, self.gradient,
        )  # fmt: skip
        stacked = {spec.name for stack in stacks for spec in stack.linears}
        self.loras = {s.name: tensors.pair(s) for s in self.targets if s.name not in stacked}
        self.expert_loras = {stack.name: tensors.pair(stack.linears[0], stack) for stack in stacks}
        self.embedding_lora = (
            None if self.embedding is None else tensors.embedding_pair(self.embedding.name)
        )
        self.trained_rows: dict[str, TrainedRows] = {}
        self.trained_whole: dict[str, TrainedMatrix] = {}
        if vocabulary is not None:
            self.trained_rows = {
                name: tensors.rows(name, rows, vocabulary) for name, rows in self._tokens.items()
            }
            self.trained_whole = {name: tensors.whole(name, vocabulary) for name in self._saved}

    @property
    def first_moment(self) -> Pieces:
        """The first of the optimizer's moments."""
        return self.moments.vectors[0]

    @property
    def second_moment(self) -> Pieces:
        """AdamW's v; Lion has none."""
        return self.moments.vectors[1]

    def keep_moments(self, optimizer: OptimizerKind) -> None:
        """Makes room for another optimizer's moments, unless they are its own already."""
        if optimizer != self.forms.optimizer:
            self.forms = replace(self.forms, optimizer=optimizer)
            self.moments = self._moments()

    @property
    def piece_lengths(self) -> list[int]:
        """Floats of each piece of the flat vectors."""
        return [end - begin for begin, end in pairwise([0, *self.cuts, self.length])]

    def beyond_a_binding(self, max_binding: int) -> tuple[str, int] | None:
        """The first of what kernels read as one and no binding shows: its name and its bytes."""
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
        """All layers that have a pair, the embedding the last."""
        return [*self.targets, *([] if self.embedding is None else [self.embedding])]

    @property
    def shape(self) -> tuple[Any, ...]:
        """What of an adapter decides the launches of a step; equal ones may share programs."""
        layers = tuple(
            (s.name, self.peft.rank_of(s.name), self.peft.scaling_of(s.name)) for s in self.adapted
        )
        return layers, self.config.use_dora, self.config.lora_dropout

    def place(self, module: str, leaf: str) -> Place:
        """Where a layer's A, B or magnitude lies in the flat vectors."""
        return self._flat[tensor_name(module, leaf)]

    def placed(self, name: str) -> Place:
        """Where a tensor lies in the flat vectors, by PEFT's name."""
        return self._flat[name]

    @property
    def names(self) -> list[str]:
        """PEFT's names of all A and B."""
        return list(self._flat)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors as PEFT has them, by its names."""
        return {name: self._flat[name].shape for name in self._flat}

    @property
    def num_parameters(self) -> int:
        """Trained numbers, padding not counted."""
        return self._flat.num_parameters

    def initial(self, seed: int) -> Float32Array:
        """PEFT's start, by ``draw_start``; zeros where it is to be found in the base."""
        values = np.zeros(self.length, np.float32)
        if not self.config.changes_base:
            gaussian = self.config.init_lora_weights == "gaussian"
            draw_start(self._flat, values, self.targets, self.embedding, seed, gaussian=gaussian)
        return values

    def split(self, flat: Float32Array) -> dict[str, Float32Array]:
        """A flat vector as PEFT's tensors."""
        return self._flat.split(flat)

    def views(self, flat: Float32Array) -> dict[str, Float32Array]:
        """The same where they lie in it."""
        return self._flat.views(flat)

    def join(self, tensors: Mapping[str, Float32Array]) -> Float32Array:
        """PEFT's tensors as a flat vector.

        Raises:
            CheckpointError: If a tensor is missing, unknown, of another shape or not finite.
        """
        return self._flat.join(tensors, self.length)

    def _moments(self) -> Moments:
        if self.forms.optimizer == "adamw_8bit" and any(
            is_within(self._flat, cut) for cut in self.cuts
        ):
            raise ConfigError(
                "optim.name: adamw_8bit cannot train a matrix whole (lora.modules_to_save) that is "
                "larger than a binding of this GPU: set optim.name to adamw"
            )
        return moments_of(self._flat, self.length, self.forms, self.cuts)
