"""How an architecture of llama.cpp is described, for reading its files and for writing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.mamba import ParallelMixers
from qlora_wgpu.families.parts.mixers import GatedDeltaNet, ShortConv
from qlora_wgpu.families.parts.moe import SparseMoeBlock

Config = dict[str, Any]

# ---- a file's keys -------------------------------------------------------------------------------

REQUIRED = object()
"""As a default: the key must exist."""
MTP_LAYERS = "nextn_predict_layers"
"""Layers at the end for multi-token prediction, which do not affect the logits."""


class Keys:
    """The keys of an architecture, such as ``llama.block_count``, without its name.

    Attributes:
        where: The file, for messages.
        architecture: The file's ``general.architecture``.
        prefix: What the keys begin with, by default the architecture's name.
    """

    def __init__(self, metadata: dict[str, Any], where: object, prefix: str | None = None) -> None:
        self.where = where
        architecture = metadata.get("general.architecture")
        if metadata.get("general.type") == "adapter":
            raise CheckpointError(f"{where} is an adapter for llama.cpp, not a model")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{where} is not a model: general.architecture is missing")
        self.architecture = architecture
        self.prefix = prefix = f"{architecture}." if prefix is None else prefix
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._read: set[str] = set()

    def raw(self, key: str, default: Any = None) -> Any:
        """A value of any type."""
        self._read.add(key)
        return self._values.get(key, default)

    def ignore(self, *keys: str) -> None:
        """Accepts keys that do not affect what is computed."""
        self._read.update(keys)

    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """An integer, or an array with the same one for each layer."""
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.where}: {self.prefix}{key} differs between layers, which is not "
                    "supported"
                )
            value = value[0].item()
        if type(value) is not int:
            raise self._invalid(key, value, "an integer")
        return value

    def each(self, key: str, layers: int) -> list[Any]:
        """A number for each layer."""
        value = self._value(key, REQUIRED)
        if isinstance(value, np.ndarray) and len(value) == layers and value.dtype.kind in "iuf":
            return [shortest(v) if value.dtype.kind == "f" else v for v in value.tolist()]
        if type(value) in (int, float):
            return [shortest(value) if isinstance(value, float) else value] * min(layers, 1 << 16)
        raise self._invalid(key, value, f"a number for each of the {layers} layers")

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number, rounded to the shortest decimal that is the same in float32."""
        value = self._value(key, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not abs(value) <= float(np.finfo(np.float32).max):
            raise self._invalid(key, value, "a number")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "true or false")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuses any value but the allowed ones; the key may be missing."""
        value = self.raw(key)
        is_scalar = type(value) in (bool, int, float, str)
        if value is not None and not (is_scalar and value in allowed):
            raise UnsupportedModelError(
                f"{self.where}: {self.prefix}{key} = {_shown(value)} is not supported"
            )

    def refuse_unread(self) -> None:
        """Refuses keys that have not been read."""
        unread = [key for key in self._values if key not in self._read]
        if unread:
            raise UnsupportedModelError(
                f"{self.where}: unknown key {self.prefix}{unread[0][:200]} = "
                f"{_shown(self._values[unread[0]])}, which may change what the model computes: use "
                "its safetensors version"
            )

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.where}: the key {self.prefix}{key} is missing")
        return value

    def _invalid(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {self.prefix}{key} must be {expected}, got {_shown(value)}"
        )


def shortest(value: float) -> float:
    """A float32 number in its shortest form: 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _shown(value: Any) -> str:
    return brief(value.tolist() if isinstance(value, np.ndarray) else value)


# ---- a model's keys ------------------------------------------------------------------------------


@dataclass
class ModelKeys:
    """The keys of a model that is exported, while they are collected."""

    model_type: str  # config.json's
    config: Mapping[str, Any]  # the text model's part of config.json
    decoder: Decoder
    architecture: GGUFArchitecture
    # The keys, without the architecture's name
    values: dict[str, Any] = field(default_factory=dict)
    # What llama.cpp computes differently, for the user
    notes: list[str] = field(default_factory=list)

    def unsupported(self, what: str) -> UnsupportedModelError:
        """The error for what llama.cpp would compute differently."""
        return UnsupportedModelError(
            f"llama.cpp does not support {what} for {self.model_type} models: use qlora-wgpu merge "
            "and transformers"
        )

    @property
    def mixers(self) -> list[Any]:
        """Each layer's attention, or what it has in its place."""
        return [layer.attention for layer in self.decoder.layers]

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer that has it."""
        each = (m.attention if isinstance(m, ParallelMixers) else m for m in self.mixers)
        return [mixer for mixer in each if isinstance(mixer, Attention)]

    @property
    def mixtures(self) -> list[SparseMoeBlock]:
        """The layers' mixtures of experts."""
        return [layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, SparseMoeBlock)]

    @property
    def experts(self) -> SparseMoeBlock:
        """The first mixture of experts."""
        return self.mixtures[0]

    @property
    def scoring(self) -> Any:
        """How the experts of the first mixture are scored."""
        assert self.experts.choice is not None
        return self.experts.choice.scoring

    @property
    def shared_size(self) -> int:
        """The size of the shared experts, 0 if there are none."""
        shared = self.experts.shared
        return shared.mlp.dimensions.intermediate_size if shared else 0

    @property
    def score_scale(self) -> float:
        """The scale of the attention scores."""
        return self.attentions[0].scale or self.decoder.dimensions.head_dim**-0.5

    @property
    def delta_net(self) -> GatedDeltaNet:
        """The first delta net."""
        return next(mixer for mixer in self.mixers if isinstance(mixer, GatedDeltaNet))


# ---- pairs of keys -------------------------------------------------------------------------------

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of expert_gating_func
_FLAGS = ("expert_weights_norm", "use_parallel_residual")
_NUMBERS = ("attention.clamp_kqv", "expert_weights_scale")
ValueOf = Callable[[ModelKeys], Any]


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _mrope_sections(keys: ModelKeys) -> Any:
    """How many pairs of a head are rotated by time, height and width, which are equal for text.

    The sections must cover all pairs: llama.cpp does not rotate others.
    """
    pairs = keys.values["rope.dimension_count"] // 2
    sections = [(pairs + 2 - i) // 3 for i in range(3)]
    given = (keys.config.get("rope_parameters") or {}).get("mrope_section")
    if isinstance(given, list) and sorted(given) == sorted(sections):
        sections = given
    return np.array([*sections, 0], np.int32)  # llama.cpp has four


def _first_with_experts(keys: ModelKeys) -> int:
    return [isinstance(layer.mlp, SparseMoeBlock) for layer in keys.decoder.layers].index(True)


_VALUES: dict[str, ValueOf] = {
    "use_parallel_residual": lambda keys: keys.decoder.layers[0].order.parallel,
    "attention.clamp_kqv": lambda keys: _float(keys.attentions[0].clip),
    "attention.scale": lambda keys: float(keys.score_scale),
    "embedding_scale": lambda keys: float(keys.decoder.embedding_scale),
    "residual_scale": lambda keys: float(keys.decoder.layers[0].residual_scale),
    "logit_scale": lambda keys: float(keys.decoder.logit_scale),
    "attn_logit_softcapping": lambda keys: _float(keys.attentions[0].softcap),
    "final_logit_softcapping": lambda keys: _float(keys.decoder.logit_softcap),
    "shortconv.l_cache": (
        lambda keys: next(mixer.taps for mixer in keys.mixers if isinstance(mixer, ShortConv))
    ),
    "ssm.conv_kernel": lambda keys: keys.delta_net.taps,
    "ssm.state_size": lambda keys: keys.delta_net.heads.key_dim,
    "ssm.group_count": lambda keys: keys.delta_net.heads.key_heads,
    "ssm.time_step_rank": lambda keys: keys.delta_net.heads.value_heads,
    "ssm.inner_size": lambda keys: keys.delta_net.heads.value_size,
    "attention.recurrent_layers": (
        lambda keys: np.array([isinstance(mixer, GatedDeltaNet) for mixer in keys.mixers])
    ),
    "full_attention_interval": lambda keys: int(keys.config.get("full_attention_interval") or 4),
    "rope.dimension_sections": _mrope_sections,
    "expert_count": lambda keys: keys.experts.num_experts,
    "expert_used_count": lambda keys: keys.experts.num_experts_per_tok,
    "expert_feed_forward_length": lambda keys: keys.experts.intermediate_size,
    "expert_shared_count": lambda keys: keys.shared_size // keys.experts.intermediate_size,
    "expert_shared_feed_forward_length": lambda keys: keys.shared_size,
    "leading_dense_block_count": _first_with_experts,
    "interleave_moe_layer_step": lambda keys: 1,
    "expert_gating_func": lambda keys: SIGMOID if keys.scoring.sigmoid else SOFTMAX,
    "expert_weights_norm": lambda keys: keys.scoring.normalized,
    "expert_weights_scale": lambda keys: float(keys.scoring.scale),
}
"""The value of each key, from the decoder; None leaves the key out."""


@dataclass(frozen=True)
class Pair:
    """A key of GGUF files and its counterpart in config.json, read and written alike."""

    key: str  # the file's, without the architecture's name
    name: str = ""  # config.json's; empty if ``GGUFArchitecture.read`` reads the key
    default: Any = REQUIRED  # the value if the file lacks the key, or a function of the config
    none: bool = False  # whether zero stands for null
    value: ValueOf | None = None  # what is written, by default as ``_VALUES`` says

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
        value_of = self.value or _VALUES.get(self.key)
        value = None if value_of is None else value_of(keys)
        if value is not None:
            keys.values[self.key] = value


# ---- factors -------------------------------------------------------------------------------------

_TOLERANCE = 1e-5  # relative: files have float32


def require_default_scale(keys: Keys, config: Config) -> None:
    """Refuses a scale of the attention scores other than head_dim**-0.5."""
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, config["head_dim"] ** -0.5, rel_tol=_TOLERANCE):
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.scale = {scale} is not supported"
        )


def check_scales(keys: ModelKeys, **supported: float | None) -> None:
    """Refuses factors that are neither the default nor the ones that llama.cpp supports."""
    decoder, head_dim = keys.decoder, keys.decoder.dimensions.head_dim
    defaults: dict[str, tuple[Any, Any]] = {
        "embedding_scale": (decoder.embedding_scale, 1.0),
        "residual_scale": (decoder.layers[0].residual_scale, 1.0),
        "logit_scale": (decoder.logit_scale, 1.0),
        "final softcap": (decoder.logit_softcap, None),
    }
    for attention in keys.attentions:
        defaults["score scale"] = (attention.scale or head_dim**-0.5, head_dim**-0.5)
        defaults["score softcap"] = (attention.softcap, None)
    for name, (value, expected) in defaults.items():
        expected = supported.get(name.replace(" ", "_"), expected)
        if value is None or expected is None:
            is_same = value is expected
        else:
            is_same = math.isclose(value, expected, rel_tol=_TOLERANCE)
        if not is_same:
            raise keys.unsupported(f"a {name.replace('_', ' ')} of {value:.6g}")


# ---- windows -------------------------------------------------------------------------------------


def window_pattern(keys: Keys, config: Config, default: int) -> Config:
    """``layer_types``: every n-th layer has full attention, or a list says which layers slide."""
    name, layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = keys.raw(name, default)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} has {len(pattern)} values for {layers} "
                "layers"
            )
        slides = [bool(value) for value in pattern]
    else:
        every = keys.integer(name, default)
        if every < 0:
            raise CheckpointError(
                f"{keys.where}: {keys.architecture}.{name} must be 0 or more, got {every}"
            )
        slides = [every == 0 or (i + 1) % every != 0 for i in range(min(layers, 1 << 16))]
    names = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [names[slide] for slide in slides]}


def window_keys(keys: ModelKeys) -> None:
    """Adds the sliding window and its pattern."""
    windows = [attention.window for attention in keys.attentions]
    widths = {window for window in windows if window is not None}
    kind = keys.architecture.windows
    if kind == "of 64 layers":  # llama.cpp recognizes the family's largest model by that
        kind = "periodic" if len(windows) == 64 else "none"
    if not widths and kind != "every other":
        return
    if len(widths) > 1:
        raise keys.unsupported(f"windows of {len(widths)} widths")
    if kind == "none":
        [width] = widths
        keys.notes.append(
            f"llama.cpp has no sliding window for {keys.model_type} models: its results differ for "
            f"sequences of more than {width:,} tokens"
        )
        if keys.architecture.name in ("llama", "phi3"):  # needed to read the file back
            keys.values["attention.sliding_window"] = width
        return
    slides = [window is not None for window in windows]
    if kind == "listed":
        keys.values["attention.sliding_window"] = widths.pop()
        keys.values["attention.sliding_window_pattern"] = np.array(slides)
        return
    period = _period(slides)
    if period is None or (kind == "every other" and period != 2):
        raise keys.unsupported("this order of layers with and without a window")
    if widths:
        keys.values["attention.sliding_window"] = widths.pop()
    if kind == "periodic":
        keys.values["attention.sliding_window_pattern"] = period


def _period(slides: list[bool]) -> int | None:
    """The n if every n-th layer has full attention and all others slide; 0 if all slide."""
    if all(slides):
        return 0
    period = slides.index(False) + 1
    expected = [(i + 1) % period != 0 for i in range(len(slides))]
    return period if slides == expected else None


# ---- an architecture -----------------------------------------------------------------------------

Head = Literal["own or tied", "own", "tied"]
Windows = Literal["none", "periodic", "every other", "of 64 layers", "listed"]

BIAS = "blk.0.attn_q.bias"
XIELU = tuple((f"xielu.{n}", f"mlp.act_fn.{n}") for n in ("alpha_p", "alpha_n", "beta", "eps"))
"""Keys with a number for each layer, without the architecture's name, and Hugging Face's tensors
with the same numbers."""


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture of llama.cpp, as data that serves reading and writing.

    ``read`` and ``write`` do what cannot be expressed as a pair of keys.
    """

    name: str  # ``general.architecture``
    # config.json's model types that are written as this architecture; it is read as the first
    # one, unless ``read`` returns another
    model_types: tuple[str, ...]
    causal_class: str  # transformers' class of the first one
    # -- keys --
    keys: tuple[Pair, ...] = ()  # in the order in which they are written
    fixed: Mapping[str, Any] = field(default_factory=dict)  # constants of config.json
    flags: Mapping[str, str] = field(default_factory=dict)  # true if the file has the tensor
    # Supported values of keys, or functions of the config that return one
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # keys that do not affect what is computed
    # config.json's key for the share of a head that is rotated; None if all of it is
    rotated_share: str | None = None
    default_scale: bool = True  # whether attention.scale may exist, with its default value
    epsilon: str = "rms_norm_eps"  # config.json's name for the norms' epsilon
    layer_norm: bool = False  # whether norms are LayerNorm
    own_sizes: bool = False  # whether ``read`` reads sizes of heads and MLPs, and rotations
    hybrid: bool = False  # whether layers without key heads have something else than attention
    mtp_layers: bool = False  # whether there may be layers for multi-token prediction at the end
    # Returns further values of config.json
    read: Callable[[Keys, GGUFFile, Config], Config] = lambda keys, file, config: {}
    # Refuse what llama.cpp computes differently, and add keys that are not among ``keys``
    write: tuple[Callable[[ModelKeys], None], ...] = (check_scales,)
    # -- tensors --
    named_as: str = ""  # an architecture whose tensors have the same names, if gguf lacks this one
    pairs: bool = False  # whether rows of q and k are stored for RoPE on neighbours, not halves
    # Whether the file has an output matrix: always ("own"), unless it is the embedding ("own or
    # tied"), or never ("tied")
    head: Head = "own or tied"
    tiled: bool = False  # whether a delta net's value heads alternate between key heads
    joins_experts: bool = False  # whether an expert's gate and up are one matrix in the file
    scalars: tuple[tuple[str, str], ...] = ()  # as ``XIELU``
    # -- what else llama.cpp supports --
    is_square: bool = False  # whether all heads together must be as wide as the residual stream
    # Modules that may have biases, by the last part of their name
    biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    windows: Windows = "none"  # which layers have a sliding window
    activation: str = "silu"  # the MLP's
    # Activations that llama.cpp approximates by ``activation``, with a note
    approximates: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()  # RoPE types whose factors are a tensor of the file
    # Layers for which llama.cpp ignores adapters, by the last part of their name
    unadapted: tuple[str, ...] = ()
