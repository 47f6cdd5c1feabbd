"""What an architecture of llama.cpp is described by, for reading its files and for writing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.gguf.keys import REQUIRED, Keys

Config = dict[str, Any]
Head = Literal["own or tied", "own", "tied"]
Windows = Literal["none", "periodic", "every other", "of 64 layers"]

# ---- what a file is to say of a model ------------------------------------------------------------


@dataclass
class ModelKeys:
    """What a file says of a model, while it is put together."""

    model_type: str  # config.json's name of it
    config: Mapping[str, Any]  # its text part of config.json
    decoder: Decoder  # what that describes
    architecture: GGUFArchitecture  # llama.cpp's
    # The keys, without the architecture's name
    values: dict[str, Any] = field(default_factory=dict)
    # What llama.cpp does otherwise, for the user to know
    notes: list[str] = field(default_factory=list)

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for what llama.cpp computes otherwise."""
        return UnsupportedModelError(
            f"llama.cpp does not compute {what} for {self.model_type} models, so nothing is "
            "exported: keep to transformers (qlora-wgpu merge)"
        )

    @property
    def halves(self) -> list[Any]:
        """What attends in each layer, or stands in place of attention."""
        return [layer.attention for layer in self.decoder.layers]

    @property
    def attentions(self) -> list[Attention]:
        """The layers' attentions."""
        return [half for half in self.halves if isinstance(half, Attention)]

    @property
    def mixtures(self) -> list[SparseMoeBlock]:
        """The layers' mixtures of experts."""
        return [layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, SparseMoeBlock)]

    @cached_property
    def experts(self) -> SparseMoeBlock:
        """The first of them."""
        return self.mixtures[0]

    @property
    def scoring(self) -> Any:
        """How the first one's experts are scored."""
        assert self.experts.choice is not None
        return self.experts.choice.scoring

    @property
    def shared_size(self) -> int:
        """The size of what every token meets beside its experts, 0 without."""
        shared = self.experts.shared
        return shared.mlp.dimensions.intermediate_size if shared else 0

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.attentions[0].scale or self.decoder.dimensions.head_dim**-0.5

    @cached_property
    def delta_net(self) -> GatedDeltaNet:
        """The first delta net."""
        return next(half for half in self.halves if isinstance(half, GatedDeltaNet))


# ---- pairs of keys -------------------------------------------------------------------------------

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of expert_gating_func
_FLAGS = ("expert_weights_norm", "use_parallel_residual")
_NUMBERS = ("attention.clamp_kqv", "expert_weights_scale")
Tell = Callable[[ModelKeys], Any]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _of_experts(name: str) -> Tell:
    return lambda keys: getattr(keys.experts, name)


def _taps(keys: ModelKeys) -> int:
    return next(half.taps for half in keys.halves if isinstance(half, ShortConv))


def _sections(keys: ModelKeys) -> Any:
    """How many pairs of a head turn by each kind of position, of which a text has one.

    Those for time, height and width take turns; a pair that is nobody's would not turn at all.
    """
    pairs = keys.values["rope.dimension_count"] // 2
    whole = [(pairs + 2 - i) // 3 for i in range(3)]
    told = (keys.config.get("rope_parameters") or {}).get("mrope_section")
    if isinstance(told, list) and sorted(told) == sorted(whole):
        whole = told
    return np.array([*whole, 0], np.int32)  # llama.cpp has four kinds


_TOLD: dict[str, Tell] = {
    "use_parallel_residual": lambda keys: keys.decoder.layers[0].order.parallel,
    "attention.clamp_kqv": lambda keys: _float(keys.attentions[0].clip),
    "attention.scale": lambda keys: float(keys.score_scale),
    "embedding_scale": lambda keys: float(keys.decoder.embedding_scale),
    "residual_scale": lambda keys: float(keys.decoder.layers[0].residual_scale),
    "logit_scale": lambda keys: float(keys.decoder.logit_scale),
    "attn_logit_softcapping": lambda keys: _float(keys.attentions[0].softcap),
    "final_logit_softcapping": lambda keys: _float(keys.decoder.logit_softcap),
    "shortconv.l_cache": _taps,
    "ssm.conv_kernel": lambda keys: keys.delta_net.taps,
    "ssm.state_size": lambda keys: keys.delta_net.heads.key_dim,
    "ssm.group_count": lambda keys: keys.delta_net.heads.key_heads,
    "ssm.time_step_rank": lambda keys: keys.delta_net.heads.value_heads,
    "ssm.inner_size": lambda keys: keys.delta_net.heads.value_size,
    "attention.recurrent_layers": (
        lambda keys: np.array([isinstance(half, GatedDeltaNet) for half in keys.halves])
    ),
    "full_attention_interval": (lambda keys: int(keys.config.get("full_attention_interval") or 4)),
    "rope.dimension_sections": _sections,
    "expert_count": _of_experts("num_experts"),
    "expert_used_count": _of_experts("num_experts_per_tok"),
    "expert_feed_forward_length": _of_experts("intermediate_size"),
    "expert_shared_count": lambda keys: keys.shared_size // keys.experts.intermediate_size,
    "expert_shared_feed_forward_length": lambda keys: keys.shared_size,
    "leading_dense_block_count": (
        lambda keys: [isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers].index(
            True
        )
    ),
    "interleave_moe_layer_step": lambda keys: 1,
    "expert_gating_func": lambda keys: SIGMOID if keys.scoring.sigmoid else SOFTMAX,
    "expert_weights_norm": lambda keys: keys.scoring.normalized,
    "expert_weights_scale": lambda keys: float(keys.scoring.scale),
}
"""What a file says under a key, made of a decoder; None where the key is left out."""


@dataclass(frozen=True)
class Pair:
    """A key of files, and the key of config.json that says the same.

    Where it has no such key, something else reads it; where nothing is told of it, something else
    writes it.
    """

    key: str  # the file's, without the architecture's name
    name: str = ""  # config.json's
    default: Any = REQUIRED  # what is read where the file lacks it, or makes that of the config
    none: bool = False  # whether zero stands for null
    tell: Tell | None = None  # what is written, if not what all write under this key

    def read(self, keys: Keys, config: Config) -> Any:
        """config.json's value."""
        default = self.default(config) if callable(self.default) else self.default
        if self.key in _FLAGS:
            return keys.flag(self.key, default)
        is_number = self.key.endswith(("scale", "softcapping")) or self.key in _NUMBERS
        value = keys.number(self.key, default) if is_number else keys.integer(self.key, default)
        return value or None if self.none else value

    def write(self, keys: ModelKeys) -> None:
        """Adds the file's value."""
        tell = self.tell or _TOLD.get(self.key)
        value = None if tell is None else tell(keys)
        if value is not None:
            keys.values[self.key] = value


# ---- factors -------------------------------------------------------------------------------------

_SAME = 1e-5  # relative: files have float32


def usual_scale(keys: Keys, config: Config) -> None:
    """Refuses scores that are scaled in another way."""
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, config["head_dim"] ** -0.5, rel_tol=1e-5):
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.scale = {scale} is not computed"
        )


def check_scales(keys: ModelKeys, **told: float | None) -> None:
    """Refuses factors that are neither usual nor told by a key of the architecture."""
    decoder, head_dim = keys.decoder, keys.decoder.dimensions.head_dim
    usual: dict[str, tuple[Any, Any]] = {
        "embedding_scale": (decoder.embedding_scale, 1.0),
        "residual_scale": (decoder.layers[0].residual_scale, 1.0),
        "logit_scale": (decoder.logit_scale, 1.0),
        "final softcap": (decoder.logit_softcap, None),
    }
    for attention in keys.attentions:
        usual["score scale"] = (attention.scale or head_dim**-0.5, head_dim**-0.5)
        usual["score softcap"] = (attention.softcap, None)
    for name, (value, expected) in usual.items():
        expected = told.get(name.replace(" ", "_"), expected)
        if value is None or expected is None:
            is_same = value is expected
        else:
            is_same = math.isclose(value, expected, rel_tol=_SAME)
        if not is_same:
            raise keys.refuse(f"a {name.replace('_', ' ')} of {value:.6g}")


# ---- windows -------------------------------------------------------------------------------------


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


def window_keys(keys: ModelKeys) -> None:
    """Adds the window and its pattern."""
    windows = [attention.window for attention in keys.attentions]
    widths = {window for window in windows if window is not None}
    kind = keys.architecture.windows
    if kind == "of 64 layers":  # llama.cpp knows that family's largest model by it
        kind = "periodic" if len(windows) == 64 else "none"
    if not widths and kind != "every other":
        return
    if len(widths) > 1:
        raise keys.refuse(f"windows of {len(widths)} widths")
    if kind == "none":
        [width] = widths
        keys.notes.append(
            f"llama.cpp has no sliding window for {keys.model_type} models: texts of more than "
            f"{width:,} tokens are computed otherwise there than here"
        )
        if keys.architecture.name in ("llama", "phi3"):  # by which the file is read back
            keys.values["attention.sliding_window"] = width
        return
    slides = [window is not None for window in windows]
    period = _period(slides)
    if period is None or (kind == "every other" and period != 2):
        raise keys.refuse("this order of layers with and without a window")
    if widths:
        keys.values["attention.sliding_window"] = widths.pop()
    if kind == "periodic":
        keys.values["attention.sliding_window_pattern"] = period


def _period(slides: list[bool]) -> int | None:
    """The n by which each n-th layer sees everything, all others slide; 0 where all slide."""
    if all(slides):
        return 0
    period = slides.index(False) + 1
    expected = [(i + 1) % period != 0 for i in range(len(slides))]
    return period if slides == expected else None


# ---- an architecture -----------------------------------------------------------------------------

BIAS = "blk.0.attn_q.bias"
XIELU = tuple((f"xielu.{n}", f"mlp.act_fn.{n}") for n in ("alpha_p", "alpha_n", "beta", "eps"))
"""Keys without the architecture's name that tell a number of each layer, and the tensors that they
are in Hugging Face's files."""


def _nothing(keys: Keys, file: GGUFFile, config: Config) -> Config:
    return {}


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp.

    What is refused, told and fixed is said here as data, both ways; ``read`` and ``write`` do what
    no pair of keys says.
    """

    name: str  # what files call it
    # config.json's names of what is written as this; it is read as the first, if ``read`` says
    # nothing else
    model_types: tuple[str, ...]
    causal_class: str  # transformers' class of that one
    # -- keys --
    keys: tuple[Pair, ...] = ()  # in the order in which they are written
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what config.json says always
    told: Mapping[str, str] = field(default_factory=dict)  # what it says where a tensor is there
    # Keys of which no other values are computed than these; some are made of the config
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # keys that tell nothing of what is computed
    # config.json's key of the share of heads that is rotated; None where all of them are
    rotated_share: str | None = None
    usual_scale: bool = True  # whether a key may say how scores are scaled, as they usually are
    epsilon: str = "rms_norm_eps"  # config.json's name of what norms add
    layer_norm: bool = False  # whether that is a key of LayerNorm's
    own_sizes: bool = False  # whether ``read`` reads sizes of heads and MLPs, and rotations
    some_attend: bool = False  # whether layers without heads of keys do something else
    spare_layers: bool = False  # whether layers at the end may be for multi-token prediction
    read: Callable[[Keys, GGUFFile, Config], Config] = _nothing
    # Refuses what llama.cpp computes otherwise, and adds keys that are not among ``keys``
    write: Callable[[ModelKeys], None] = check_scales
    # -- tensors --
    pairs: bool = False  # whether q and k are stored for a rotation of neighbours instead of halves
    # Whether the file has a matrix for the logits: always ("own"), where it is not the embedding
    # ("own or tied"), or never ("tied")
    head: Head = "own or tied"
    tiled: bool = False  # whether heads of values that share a delta net's key are apart
    joins_experts: bool = False  # whether an expert's gate and up are one matrix in the file
    scalars: tuple[tuple[str, str], ...] = ()  # as ``XIELU``
    # -- what else llama.cpp has --
    is_square: bool = False  # whether all heads together must be as wide as the residual stream
    # Modules that may have biases, by the last part of their name
    biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    windows: Windows = "none"  # which layers llama.cpp has slide
    activation: str = "silu"  # the MLP's activation
    # Activations for which it computes ``activation``, of which a note tells
    nearly: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()  # kinds of RoPE whose factors llama.cpp reads as a tensor
    # Layers that it multiplies by without looking for an adapter, by the last part of their name
    unadapted: tuple[str, ...] = ()
