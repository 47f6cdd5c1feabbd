"""The adapter on the device: all A and B in one flat float32 vector, gradient and moments alike."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import ALL_LINEAR, LoraConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, padded, vector
from qlora_wgpu.models.family import ExpertSpec, LinearSpec
from qlora_wgpu.ops.modules import Lora

_WINDOW = 64  # floats: every matrix starts at a multiple of 256 bytes, as bindings must
_PREFIX = "base_model.model."


def targeted(
    linears: Sequence[LinearSpec],
    wanted: str | Sequence[str],
    experts: Sequence[ExpertSpec] = (),
) -> list[LinearSpec]:
    """The layers that get an adapter, matched as PEFT does: a whole name or its last parts.

    Experts get one where they are named, all of a layer's or none.

    Raises:
        ConfigError: If a name fits no layer.
    """
    if wanted == ALL_LINEAR:
        return list(linears)
    linears = [*linears, *(spec for stack in experts for spec in stack.linears)]
    chosen: set[str] = set()
    for target in [wanted] if isinstance(wanted, str) else wanted:
        fitting = {s.name for s in linears if s.name == target or s.name.endswith("." + target)}
        if not fitting:
            leaves = sorted({s.name.rpartition(".")[2] for s in linears})
            near = difflib.get_close_matches(target, leaves, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"this model has {', '.join(leaves)}"
            raise ConfigError(
                f"lora.target_modules: no adaptable layer is called {target!r}; {hint}"
            )
        chosen |= fitting
    for stack in experts:
        missing = [s.name for s in stack.linears if s.name not in chosen]
        if missing and len(missing) < stack.experts:
            raise ConfigError(
                f"lora.target_modules: {missing[0]!r} is left out, but either all or none of a "
                f"layer's experts can be adapted: name {stack.leaf!r}"
            )
    return [s for s in linears if s.name in chosen]


def _module(name: str) -> str:
    """The module of a PEFT tensor name."""
    return name.removeprefix(_PREFIX).rpartition(".lora_")[0]


@dataclass(frozen=True)
class _Window:
    offset: int  # in floats
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * padded(self.columns)

    def view(self, flat: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rows = flat[self.offset : self.offset + self.size].reshape(self.rows, -1)
        return rows[:, : self.columns]


class Adapter:
    """Where each A and B lies, and the vectors they lie in.

    Attributes:
        config: Its rank, scaling, dropout and targets.
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
        self.targets = targeted(linears, config.target_modules, experts)
        self._windows: dict[str, _Window] = {}
        end = 0
        for spec in self.targets:
            for leaf, rows, columns in (
                ("lora_A", config.r, spec.in_features),
                ("lora_B", spec.out_features, config.r),
            ):
                window = _Window(end, rows, columns)
                self._windows[f"{_PREFIX}{spec.name}.{leaf}.weight"] = window
                end += -(-window.size // _WINDOW) * _WINDOW
        stacked = {s.name for stack in experts for s in stack.linears}
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

    def _flat(self, label: str, kind: str) -> Tensor:
        return vector(label, self.length, "float32", Storage(label, kind, 4 * self.length))

    def _lora(self, spec: LinearSpec, stack: ExpertSpec | None = None) -> Lora:
        stride = 0
        if stack is not None and stack.experts > 1:
            first, second = (self._window(s, "lora_A").offset for s in stack.linears[:2])
            stride = second - first

        def window(leaf: str, flat: Tensor) -> Tensor:
            at = self._window(spec, leaf)
            name = f"{spec.name}.{leaf}"
            rows = at.rows
            if stack is not None:
                rows += -(-(stack.experts - 1) * stride // padded(at.columns))
            return matrix(name, rows, at.columns, "float32", flat.storage, 4 * at.offset)

        return Lora(
            r=self.config.r,
            scaling=self.config.scaling,
            dropout=self.config.lora_dropout,
            key=zlib.crc32(spec.name.encode()),
            a=window("lora_A", self.parameters),
            b=window("lora_B", self.parameters),
            grad_a=window("lora_A", self.gradient),
            grad_b=window("lora_B", self.gradient),
            stride=stride,
        )

    def _window(self, spec: LinearSpec, leaf: str) -> _Window:
        return self._windows[f"{_PREFIX}{spec.name}.{leaf}.weight"]

    @property
    def names(self) -> list[str]:
        """PEFT's names of all A and B."""
        return list(self._windows)

    @property
    def num_parameters(self) -> int:
        """Trained numbers, padding not counted."""
        return sum(w.rows * w.columns for w in self._windows.values())

    @property
    def peft_target_modules(self) -> list[str]:
        """What adapter_config.json names: the user's list, or the layers' last names."""
        if self.config.target_modules == ALL_LINEAR:
            return sorted({s.name.rpartition(".")[2] for s in self.targets})
        return list(self.config.target_modules)

    def initial(self, seed: int) -> npt.NDArray[np.float32]:
        """PEFT's default start: A uniform in ±1/√in_features (Kaiming, a = √5), B zero.

        Each matrix has its own stream, so the start does not depend on what else is adapted.
        """
        flat = np.zeros(self.length, np.float32)
        for name, window in self._windows.items():
            if name.endswith("lora_A.weight"):
                stream = np.random.Generator(
                    np.random.Philox(key=[seed, zlib.crc32(name.encode())])
                )
                bound = 1 / np.sqrt(window.columns)
                window.view(flat)[:] = stream.uniform(-bound, bound, (window.rows, window.columns))
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
            if array.shape != (window.rows, window.columns):
                raise CheckpointError(
                    f"the adapter's {name!r} has shape {array.shape}, "
                    f"this model needs {(window.rows, window.columns)}"
                )
            if not np.isfinite(array).all():
                raise CheckpointError(f"the adapter's {name!r} is not finite")
            window.view(flat)[:] = array
        return flat
