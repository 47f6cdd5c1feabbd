"""The interface of a model family: its layers' names and shapes, and its forward pass.

A family is a module in this package, named after Hugging Face's ``model_type``, with a ``compose``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from qlora_wgpu.errors import ConfigError, UnsupportedModelError, brief
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.batch import BatchBuffers, ImageLayout
from qlora_wgpu.ops.modules import ExpertLinear, HostEmbedding, Linear, Matrix


@dataclass(frozen=True)
class Stacking:
    """How transformers stacks experts in the parameters ``gate_up_proj`` and ``down_proj``.

    PEFT adapts each of these parameters as one (``target_parameters``). Experts without a gate have
    ``up_proj`` instead of the first.
    """

    # An expert's layers in files: gate, up and down, or up and down.
    leaves: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    named: str = "experts"  # suffix of the experts' module in files
    held: str = "experts"  # and in transformers
    in_turns: bool = False  # whether rows of gate and up alternate; else gate comes first
    router: tuple[str, str] = ("", "")  # suffixes of its module in files and in transformers

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each of ``leaves`` is."""
        return ("gate", "up", "down")[-len(self.leaves) :]

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The kinds that each of transformers' parameters holds, in its order."""
        *first, down = self.kinds
        return {f"{'_'.join(first)}_proj": tuple(first), f"{down}_proj": (down,)}

    def in_files(self, at: str) -> str:
        return at.removesuffix(self.held) + self.named if at.endswith(self.held) else at

    def in_memory(self, at: str) -> str:
        return at.removesuffix(self.named) + self.held if at.endswith(self.named) else at

    def router_in_files(self, at: str) -> str:
        named, held = self.router
        return at.removesuffix(held) + named if at.endswith(held) else at

    def router_in_memory(self, at: str) -> str:
        named, held = self.router
        return at.removesuffix(named) + held if at.endswith(named) else at

    def to_json(self) -> str:
        """The value for a file's metadata."""
        told = asdict(self)
        del told["router"]
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> Stacking:
        try:
            told = json.loads(text)
            leaves = tuple(map(str, told["leaves"]))
            ends = str(told["named"]), str(told["held"])
            made = cls(leaves, *ends, bool(told["in_turns"]))
        except (TypeError, KeyError) as err:
            raise ValueError(f"invalid stacking of experts: {err}") from err
        if len(leaves) not in (2, 3):
            raise ValueError(f"invalid stacking of experts: {len(leaves)} layers")
        return made


PLAIN = Stacking()
"""The most common one."""


NormSize = int | tuple[int, ...]


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer by its module name: weight (out_features, in_features), optional bias."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    adaptable: bool = True  # False for a layer that PEFT refuses to adapt
    tied_to: str = ""  # the layer in files whose weight and bias it uses, if not its own

    @property
    def stored(self) -> str:
        """The layer's name in files."""
        return self.tied_to or self.name


@dataclass(frozen=True)
class RouterSpec(LinearSpec):
    """The layer that scores experts, which is never quantized.

    PEFT's ``all-linear`` includes it if it is a linear layer; here it is adapted only if named.
    """

    # Whether it is a linear layer in transformers; else its weight is a bare parameter, which PEFT
    # adapts by ``target_parameters``.
    is_module: bool = False


@dataclass(frozen=True)
class ExpertSpec:
    """A linear layer of every expert: ``{at}.0.{leaf}``, ``{at}.1.{leaf}`` and so on.

    PEFT's ``all-linear`` leaves them out; they are adapted only if named.
    """

    at: str  # the module of all experts
    leaf: str  # the layer's name within an expert
    experts: int
    out_features: int  # rows of an expert's weight
    in_features: int  # their columns
    bias: bool = False  # whether each has one
    stacking: Stacking = PLAIN  # how transformers stacks them with the experts' other layers
    # Whether PEFT itself stacks adapters of single experts, as it does for some model types.
    fused: bool = True

    @property
    def name(self) -> str:
        """The common name of all experts' layers."""
        return f"{self.at}.{self.leaf}"

    @property
    def linears(self) -> list[LinearSpec]:
        return [
            LinearSpec(f"{self.at}.{i}.{self.leaf}", self.out_features, self.in_features, self.bias)
            for i in range(self.experts)
        ]


@dataclass(frozen=True)
class Weights:
    """The weights of a part of a model: names and shapes, in the order of the forward pass."""

    # All linear layers that can have an adapter, without routers and experts.
    linears: tuple[LinearSpec, ...] = ()
    # Sizes of norm weights and other small float32 tensors by name: a length, or a shape. A * in
    # the name is the number of a row, if files store each row by itself.
    norms: Mapping[str, NormSize] = field(default_factory=dict)
    experts: tuple[ExpertSpec, ...] = ()  # linear layers of experts
    routers: tuple[RouterSpec, ...] = ()
    # Those of ``norms`` that never have an offset.
    as_stored: frozenset[str] = frozenset()
    # Shapes of further embeddings, whose rows the host looks up, by tensor name.
    tables: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.linears + other.linears,
            {**self.norms, **other.norms},
            self.experts + other.experts,
            self.routers + other.routers,
            self.as_stored | other.as_stored,
            {**self.tables, **other.tables},
        )


@dataclass(frozen=True)
class BalanceLoss:
    """The load-balancing loss of experts by config.json."""

    coefficient: float  # its factor, ``router_aux_loss_coef``
    enabled: bool  # whether it is added (``output_router_logits``)


def stored_parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors of a norm in files: the norm itself, or for a name with a *, one for each row."""
    if "*" not in name:
        return [(name, shape)]
    return [(name.replace("*", str(row)), shape[1:]) for row in range(shape[0])]


SCORE = "score.weight"
"""The head's tensor in a reward model or classifier."""


@dataclass(frozen=True, kw_only=True)
class Architecture(Weights):
    """Everything that loading needs from a config.json: all weights but the ends, and details."""

    config: Any  # the family's own form of it, for its forward pass
    vocab_size: int  # rows of the embedding and of the head
    hidden_size: int  # their columns
    num_layers: int
    tied: bool  # whether the head is the embedding
    embed_name: str = "model.embed_tokens.weight"  # the embedding's tensor
    head_name: str = "lm_head.weight"  # the head's tensor
    # Pairs of a prefix of module names and the prefix that files may have instead.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    # Added to the norms' stored weights, not to their biases: 1 if they mean 1 + weight.
    norm_offset: float = 0.0
    logit_scale: float = 1.0  # factor of the head's product
    logit_softcap: float | None = None  # bound of the logits, if any
    # Notes for the user on details of config.json that training ignores.
    notes: tuple[str, ...] = ()
    # Prefix of adapted modules, if transformers' model has others with the same last parts that
    # PEFT refuses to adapt; else empty.
    adapted_within: str = ""
    # The load-balancing loss, if transformers computes one for the family.
    balance: BalanceLoss | None = None
    # The row of the embedding that gets no gradient from lookups, as in transformers: config.json's
    # ``pad_token_id``.
    padding_idx: int | None = None
    # Rows of embedding and head in the files, if fewer than ``vocab_size``: the rows of new tokens
    # are initialized with their mean.
    stored_rows: int | None = None
    new_tokens: tuple[int, ...] = ()  # the tokens that were added, whose rows are trained
    head_bias: str = ""  # the bias of the logits, one of ``norms``; empty without one
    images: ImageLayout | None = None  # how the model reads images, if it does
    classes: int = 0  # rows of the head ``score`` of a reward model or classifier, if it is one
    # Tokens of images and sound that transformers does not embed as those of a text.
    media_ids: tuple[range, ...] = ()

    @property
    def text_vocab_size(self) -> int:
        """The size of the vocabulary below the first of ``media_ids``: all are tokens of texts."""
        return min((self.vocab_size, *(each.start for each in self.media_ids)))

    def scored(self, classes: int) -> Architecture:
        """The same with the head of transformers' ``…ForSequenceClassification``."""
        norms = {name: size for name, size in self.norms.items() if name != self.head_bias}
        return replace(
            self, classes=classes, tied=False, head_name=SCORE, norms=norms, head_bias="",
            logit_scale=1.0, logit_softcap=None,
        )  # fmt: skip

    def resized(self, rows: int, new_tokens: tuple[int, ...] = ()) -> Architecture:
        """The same with a larger vocabulary, as by ``resize_token_embeddings``."""
        if rows <= self.vocab_size:
            return replace(self, new_tokens=new_tokens)
        if self.tables:
            raise UnsupportedModelError(
                f"tokens cannot be added to this model, since {next(iter(self.tables))} also has a "
                "row for each token"
            )
        if self.head_bias:
            raise UnsupportedModelError(
                f"tokens beyond the vocab_size of {self.vocab_size:,} cannot be added to this "
                f"model, since {self.head_bias} has a number for each token"
            )
        return replace(self, vocab_size=rows, stored_rows=self.vocab_size, new_tokens=new_tokens)

    def balance_coefficient(self, setting: float | None) -> float:
        """The factor of the load-balancing loss in training; 0 without one."""
        if setting is None:
            return self.balance.coefficient if self.balance and self.balance.enabled else 0.0
        if setting and self.balance is None:
            raise ConfigError(
                f"train.router_aux_loss_coef = {setting:g} is not supported: transformers has no "
                "load-balancing loss for this model; set it to 0 or leave it out"
            )
        return setting

    @property
    def stacking(self) -> Stacking:
        return self.experts[0].stacking if self.experts else PLAIN

    @property
    def head(self) -> LinearSpec:
        """The head as a layer, which gets an adapter if it is named."""
        name = self.head_name.removesuffix(".weight")
        return LinearSpec(name, self.classes or self.vocab_size, self.hidden_size)

    @property
    def every_linear(self) -> list[LinearSpec]:
        """All linear layers that can be quantized, including experts."""
        return [*self.linears, *(spec for stack in self.experts for spec in stack.linears)]

    @property
    def shared_linears(self) -> frozenset[str]:
        """The layers in files whose weights several layers use."""
        counts = Counter(spec.stored for spec in self.linears)
        return frozenset(name for name, count in counts.items() if count > 1)

    @property
    def router_shapes(self) -> dict[str, tuple[int, int]]:
        return {f"{s.name}.weight": (s.out_features, s.in_features) for s in self.routers}

    def offset_of(self, name: str) -> float:
        is_offset = name.endswith("weight") and name not in self.as_stored
        return self.norm_offset if is_offset else 0.0

    @property
    def stored_norms(self) -> dict[str, tuple[int, ...]]:
        parts = (stored_parts(name, shape) for name, shape in self.norm_shapes.items())
        return {name: shape for part in parts for name, shape in part}

    @property
    def norm_shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: (size,) if isinstance(size, int) else size for n, size in self.norms.items()}


@dataclass(frozen=True)
class Modules:
    """A model's weights for the forward pass."""

    embedding: Matrix | HostEmbedding
    head: Matrix
    linears: Mapping[str, Linear]
    norms: Mapping[str, Tensor]
    experts: Mapping[str, ExpertLinear] = field(default_factory=dict)
    routers: Mapping[str, Linear] = field(default_factory=dict)
    tables: Mapping[str, HostEmbedding] = field(default_factory=dict)
    head_lora: Lora | None = None
    embedding_lora: Lora | None = None
    padding_idx: int | None = None

    def with_pairs(
        self,
        loras: Mapping[str, Lora],
        of_experts: Mapping[str, Lora],
        head: Lora | None,
        embedding: Lora | None,
    ) -> Modules:
        linears, routers = (
            {n: replace(layer, lora=loras.get(n)) for n, layer in layers.items()}
            for layers in (self.linears, self.routers)
        )
        experts = {n: replace(layer, lora=of_experts.get(n)) for n, layer in self.experts.items()}
        return replace(
            self,
            linears=linears,
            routers=routers,
            experts=experts,
            head_lora=head,
            embedding_lora=embedding,
        )


class Family(Protocol):
    """One model family."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Reads a config.json.

        Raises:
            UnsupportedModelError: If it requires something that is not supported.
        """

    def forward(
        self, g: Graph, config: Any, modules: Modules, batch: BatchBuffers, *, checkpointing: bool
    ) -> Tensor:
        """Traces the model up to the final norm: an operand (rows, hidden_size)."""


_REGISTERED: dict[str, Family] = {}
_NOT_EXACT = {
    "phimoe": "its router samples experts at random in training and estimates their gradient "
    "(SparseMixer), so there is no exact reference"
}


def register_family(model_type: str, family: Family) -> None:
    """Registers or replaces a family for the rest of the process.

    Args:
        model_type: The value of config.json's ``model_type``.
        family: An object with ``read`` and ``forward``; see ``Family``.

    Raises:
        ConfigError: If the family has no such methods.
    """
    if not all(callable(getattr(family, name, None)) for name in ("read", "forward")):
        raise ConfigError(f"a family must have the methods read and forward, got {brief(family)}")
    _REGISTERED[model_type] = family


def find_family(config: Mapping[str, Any]) -> Family:
    """Finds the family of a config.json by its ``model_type``.

    Raises:
        UnsupportedModelError: If there is none.
    """
    name = config.get("model_type")
    family = (_REGISTERED.get(name) or built_in_family(name)) if isinstance(name, str) else None
    if family is None:
        if isinstance(name, str) and name in _NOT_EXACT:
            raise UnsupportedModelError(
                f"config.json: model_type '{name}' is not supported: {_NOT_EXACT[name]}"
            )
        raise UnsupportedModelError(
            f"config.json: model_type {brief(name)} is not supported "
            f"(supported: {', '.join(known_families())})"
        )
    return family


def known_families() -> list[str]:
    """The model types that can be trained."""
    modules = pkgutil.iter_modules(importlib.import_module(__package__).__path__)
    return sorted({*_REGISTERED, *(m.name for m in modules if built_in_family(m.name) is not None)})


def built_in_family(model_type: str) -> Family | None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", model_type):
        return None
    path = f"{__package__}.{model_type}"
    try:
        compose = getattr(importlib.import_module(path), "compose", None)
    except ModuleNotFoundError as err:
        if err.name != path:
            raise
        return None
    if compose is None:
        return None
    # Imported here because parts import this module.
    family: Family = importlib.import_module(f"{__package__}.parts").DecoderFamily(compose)
    return family
