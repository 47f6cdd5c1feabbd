"""The adapter on the device: all A and B in one flat float32 vector, gradient and moments alike."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.dtype import padded
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.targets import check_stacks, in_layers, peft_targets, targeted
from qlora_wgpu.ops.modules import Lora

_WINDOW = 64  # floats: every matrix starts at a multiple of 256 bytes, as bindings must
_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"  # of DoRA


def _name(spec: LinearSpec, leaf: str) -> str:
    """PEFT's name of a tensor."""
    return f"{_PREFIX}{spec.name}.{leaf}" + ("" if leaf == _MAGNITUDE else ".weight")


def _module(name: str) -> str:
    """The module of a PEFT tensor name."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


@dataclass(frozen=True)
class _Window:
    offset: int  # in floats
    rows: int  # 0 for a vector
    columns: int

    @property
    def size(self) -> int:
        return max(self.rows, 1) * padded(self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.rows else (self.columns,)

    def view(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        values = flat[self.offset : self.offset + self.size]
        if not self.rows:
            return values[: self.columns]
        return values.reshape(self.rows, -1)[:, : self.columns]


class Adapter:
    """Where each A and B lies, and the vectors they lie in.

    Attributes:
        config: Its rank, scaling, dropout and targets.
        peft: The same as PEFT writes it, without the base model's name.
        b_begin: Where in the flat vectors, in floats, A's end and B's begin.
        loras: By module name, as layers use them.
        expert_loras: The first expert's, by the names of ``ExpertSpec``.
        parameters: The flat vector of all A and B.
        gradient: Their gradients, summed.
        first_moment: AdamW's m.
        second_moment: AdamW's v.
    """

    def __init__(
        self,
        config: LoraConfig,
        linears: Sequence[LinearSpec],
        experts: Sequence[ExpertSpec] = (),
    ) -> None:
        """Lays out an adapter for the targeted layers."""
        self.config = config
        found = targeted(linears, config.target_modules, experts)
        self.targets = in_layers(found, config.layers_to_transform)
        check_stacks({s.name for s in self.targets}, experts)
        self.peft = AdapterConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=peft_targets(config.target_modules, self.targets),
            use_rslora=config.use_rslora,
            base_model_name_or_path=None,
            rank_pattern=config.rank_pattern,
            alpha_pattern=config.alpha_pattern,
            layers_to_transform=config.layers_to_transform,
            use_dora=config.use_dora,
        )
        self._windows: dict[str, _Window] = {}
        end = self._place("lora_A", 0)
        self.b_begin = end
        end = self._place("lora_B", end)
        self._check_ranks(experts)
        stacked = {s.name for stack in experts for s in stack.linears}
        if config.use_dora:
            if config.lora_dropout > 0:
                raise ConfigError(
                    "lora.use_dora needs lora.lora_dropout = 0: its dropout is not computed here"
                )
            if not stacked.isdisjoint(s.name for s in self.targets):
                raise ConfigError(
                    "lora.use_dora cannot adapt experts: leave them out of lora.target_modules"
                )
            end = self._place(_MAGNITUDE, end)
        # A binding of experts' matrices is counted in rows, so it may end past the last one.
        longest = [padded(w.columns) for n, w in self._windows.items() if _module(n) in stacked]
        self.length = end + -(-max(longest, default=0) // _WINDOW) * _WINDOW
        self.parameters = self._flat("adapter", "adapter")
        self.gradient = self._flat("gradient", "gradients")
        self.first_moment = self._flat("first moment", "optimizer")
        self.second_moment = self._flat("second moment", "optimizer")
        self.loras = {s.name: self._lora(s) for s in self.targets if s.name not in stacked}
        adapted = {spec.name for spec in self.targets}
        self.expert_loras = {
            stack.name: self._lora(stack.linears[0], stack)
            for stack in experts
            if stack.linears[0].name in adapted
        }

    def _place(self, leaf: str, end: int) -> int:
        """Lays out all A or all B from ``end`` on; where they end."""
        for spec in self.targets:
            r = self.peft.rank_of(spec.name)
            shapes = {
                "lora_A": (r, spec.in_features),
                "lora_B": (spec.out_features, r),
                _MAGNITUDE: (0, spec.out_features),
            }
            window = _Window(end, *shapes[leaf])
            self._windows[_name(spec, leaf)] = window
            end += -(-window.size // _WINDOW) * _WINDOW
        return end

    def _check_ranks(self, experts: Sequence[ExpertSpec]) -> None:
        for stack in experts:
            names = [s.name for s in stack.linears]
            kinds = {(self.peft.rank_of(n), self.peft.alpha_of(n)) for n in names}
            if len(kinds) > 1:
                raise ConfigError(
                    "lora.rank_pattern or alpha_pattern gives the experts of "
                    f"{stack.name} unlike values: they must have the same"
                )

    def _flat(self, label: str, kind: str) -> Tensor:
        return vector(label, self.length, "float32", Storage(label, kind, 4 * self.length))

    def _lora(self, spec: LinearSpec, stack: ExpertSpec | None = None) -> Lora:
        def stride(leaf: str) -> int:
            if stack is None or stack.experts == 1:
                return 0
            first, second = (self._window(each, leaf).offset for each in stack.linears[:2])
            return second - first

        def window(leaf: str, flat: Tensor) -> Tensor:
            at = self._window(spec, leaf)
            name = f"{spec.name}.{leaf}"
            rows = at.rows
            if stack is not None:
                rows += -(-(stack.experts - 1) * stride(leaf) // padded(at.columns))
            return matrix(name, rows, at.columns, "float32", flat.storage, 4 * at.offset)

        return Lora(
            r=self.peft.rank_of(spec.name),
            scaling=self.peft.scaling_of(spec.name),
            dropout=self.config.lora_dropout,
            key=zlib.crc32(spec.name.encode()),
            a=window("lora_A", self.parameters),
            b=window("lora_B", self.parameters),
            grad_a=window("lora_A", self.gradient),
            grad_b=window("lora_B", self.gradient),
            a_stride=stride("lora_A"),
            b_stride=stride("lora_B"),
            magnitude=self._magnitude(spec, self.parameters),
            grad_magnitude=self._magnitude(spec, self.gradient),
        )

    def _magnitude(self, spec: LinearSpec, flat: Tensor) -> Tensor | None:
        if not self.config.use_dora:
            return None
        at = self._window(spec, _MAGNITUDE)
        name = f"{spec.name}.{_MAGNITUDE}"
        return vector(name, at.columns, "float32", flat.storage, 4 * at.offset)

    def _window(self, spec: LinearSpec, leaf: str) -> _Window:
        return self._windows[_name(spec, leaf)]

    @property
    def names(self) -> list[str]:
        """PEFT's names of all A and B."""
        return list(self._windows)

    @property
    def num_parameters(self) -> int:
        """Trained numbers, padding not counted."""
        return sum(math.prod(w.shape) for w in self._windows.values())

    def initial(self, seed: int) -> npt.NDArray[np.float32]:
        """PEFT's starts: A uniform in ±1/√in_features (Kaiming, a = √5) or normal, B zero.

        Each matrix has its own stream, so the start does not depend on what else is adapted.
        """
        flat = np.zeros(self.length, np.float32)
        for name, window in self._windows.items():
            if name.endswith("lora_A.weight"):
                stream = np.random.Generator(
                    np.random.Philox(key=[seed, zlib.crc32(name.encode())])
                )
                shape = (window.rows, window.columns)
                if self.config.init_lora_weights == "gaussian":
                    window.view(flat)[:] = stream.normal(0.0, 1 / window.rows, shape)
                else:
                    bound = 1 / np.sqrt(window.columns)
                    window.view(flat)[:] = stream.uniform(-bound, bound, shape)
        return flat

    def split(self, flat: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
        """A flat vector as PEFT's tensors."""
        return {name: window.view(flat).copy() for name, window in self._windows.items()}

    def join(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """PEFT's tensors as a flat vector.

        Raises:
            CheckpointError: If a tensor is missing, unknown, of another shape or not finite.
        """
        wrong = sorted(set(tensors) ^ set(self._windows))
        if wrong:
            where = "lacks" if wrong[0] in self._windows else "has, and this model has not,"
            raise CheckpointError(f"the adapter {where} {wrong[0]!r} ({len(wrong)} such tensors)")
        flat = np.zeros(self.length, np.float32)
        for name, window in self._windows.items():
            array = np.asarray(tensors[name])
            if array.shape != window.shape:
                raise CheckpointError(
                    f"the adapter's {name!r} has shape {array.shape}, "
                    f"this model needs {window.shape}"
                )
            if not np.isfinite(array).all():
                raise CheckpointError(f"the adapter's {name!r} is not finite")
            window.view(flat)[:] = array
        return flat
