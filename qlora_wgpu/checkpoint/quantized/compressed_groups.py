"""What compressed-tensors' config.json says of each layer: its groups, and which layers they name.

The rules are those of its ``match_targets``: a layer's own name first, then patterns, then classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.sandbox.expressions import ExpressionError, begins
from qlora_wgpu.weight_format import WHOLE

FP8, INT, PACKED, NVFP4, MXFP4 = "FP8", "INT", "PACKED", "NVFP4", "MXFP4"

_FORMATS = {
    "pack-quantized": PACKED,
    "int-quantized": INT,
    "float-quantized": FP8,
    "naive-quantized": "",  # as the type of its weights says
    "mxfp8-quantized": FP8,
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
}
_MIXED = "mixed-precision"
_PATTERN = "re:"
_CLASSES = ("Linear", "LinearBase")
_LARGEST = 2**20


@dataclass(frozen=True)
class Group:
    """How the layers of a group are quantized.

    Attributes:
        targets: Names, patterns and classes of its layers.
        kind: In which form: ``FP8``, ``INT``, ``PACKED``, ``NVFP4`` or ``MXFP4``.
        bits: Bits of an integer.
        has_zeros: Whether blocks have zeros.
        tile: Rows and columns that share a scale; ``WHOLE`` for all.
    """

    targets: tuple[str, ...]
    kind: str
    bits: int
    has_zeros: bool
    tile: tuple[int, int]


class CompressedGroups:
    """All groups of a ``quantization_config``.

    Attributes:
        quantizes_more: Whether it says more than how weights are stored: of activations, or of the
            cache of keys and values.
    """

    def __init__(self, quantization: Mapping[str, Any], place: Path | str) -> None:
        """Reads them.

        Args:
            quantization: The ``quantization_config``.
            place: The folder, for messages.

        Raises:
            CheckpointError: If a value is damaged.
            UnsupportedModelError: If a group is stored in a form that is not read.
        """
        self._place = place
        self.quantizes_more = quantization.get("kv_cache_scheme") is not None
        groups = quantization.get("config_groups", {})
        if not isinstance(groups, Mapping):
            raise self._wrong("config_groups", "an object", groups)
        self.all: list[Group] = []
        self._by_target: dict[str, Group] = {}
        for name, group in groups.items():
            where = f"config_groups.{name}"
            if not isinstance(group, Mapping):
                raise self._wrong(where, "an object", group)
            activations = (group.get("input_activations"), group.get("output_activations"))
            self.quantizes_more |= activations != (None, None)
            if group.get("weights") is not None:
                read = self._group(where, group, quantization.get("format"))
                self.all.append(read)
                self._by_target |= dict.fromkeys(read.targets, read)
        if not self.all:
            kind = self._kind(quantization.get("format"), {}, 8)
            self.all.append(Group((), kind, 8, has_zeros=False, tile=(1, WHOLE)))
        ignored = quantization.get("ignore")
        self._ignored = [n for n in ignored if isinstance(n, str)] if ignored else []

    def of(self, module: str) -> Group | None:
        """The group of a linear layer, by its full name; of a single group all are.

        Raises:
            CheckpointError: If a pattern is broken, or takes too long.
        """
        if len(self.all) == 1:
            return self.all[0]
        targets = sorted(self._by_target, key=lambda target: (_PATTERN in target, target))
        named = [target for target in targets if self._fits(target, module)]
        classes = [target for target in targets if target in _CLASSES]
        first = next(iter(named + classes), None)
        return None if first is None else self._by_target[first]

    def is_ignored(self, module: str) -> bool:
        """Whether a linear layer is kept in floats; errors as for ``of``."""
        ignored = (name in _CLASSES or self._fits(name, module) for name in self._ignored)
        return any(ignored)

    def _fits(self, target: str, module: str) -> bool:
        if not target.startswith(_PATTERN):
            return target == module
        try:
            return begins(target.removeprefix(_PATTERN), module)
        except ExpressionError as err:
            raise CheckpointError(
                f"{self._place}: the pattern {target[:80]!r} of quantization_config {err}"
            ) from err

    def _group(self, where: str, group: Mapping[str, Any], format: Any) -> Group:
        weights, targets = group["weights"], group.get("targets", [])
        if not isinstance(weights, Mapping):
            raise self._wrong(f"{where}.weights", "an object", weights)
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise self._wrong(f"{where}.targets", "a list of names", targets)
        bits = weights.get("num_bits", 8)
        if type(bits) is not int or not 1 <= bits <= 8:
            raise self._wrong(f"{where}.weights.num_bits", "from 1 to 8", bits)
        own = group.get("format")
        return Group(
            targets=tuple(targets),
            kind=self._kind(format if own is None or own == _MIXED else own, weights, bits),
            bits=bits,
            has_zeros=weights.get("symmetric") is False,
            tile=self._tile(where, weights),
        )

    def _kind(self, format: Any, weights: Mapping[str, Any], bits: int) -> str:
        kind = _FORMATS.get(format) if isinstance(format, str) else None
        is_float = str(weights.get("type", "int")).lower() == "float"
        if kind == "" and not (is_float and bits != 8):
            kind = FP8 if is_float else INT
        if not kind:
            raise UnsupportedModelError(
                f"{self._place} is quantized with compressed-tensors ({str(format)[:80]}), but "
                f"only {', '.join(_FORMATS)} of its forms are read: take the unquantized model"
            )
        return kind

    def _tile(self, where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
        size, tile = weights.get("group_size"), weights.get("block_structure")
        strategy = weights.get("strategy")
        if strategy is None:  # as compressed-tensors infers it
            strategy = "channel" if size == -1 else "tensor" if size is None else "group"
            strategy = strategy if tile is None else "block"
        if strategy == "channel":
            return 1, WHOLE
        if strategy == "tensor":
            return WHOLE, WHOLE
        if strategy in ("group", "tensor_group"):
            if type(size) is not int or not 0 < size < _LARGEST:
                raise self._wrong(f"{where}.weights.group_size", "a size", size)
            return 1, size
        if strategy == "block":
            return self._block(f"{where}.weights.block_structure", tile)
        names = "group, tensor_group, channel, tensor or block"
        raise self._wrong(f"{where}.weights.strategy", names, strategy)

    def _block(self, where: str, tile: Any) -> tuple[int, int]:
        sizes: Any = tile
        if isinstance(tile, str):  # as older versions wrote it: "128x128"
            sizes = [int(n) if n.isascii() and n.isdigit() else 0 for n in tile.split("x")]
        if (
            not isinstance(sizes, list)
            or len(sizes) != 2
            or not all(type(size) is int and 0 < size < _LARGEST for size in sizes)
        ):
            raise self._wrong(where, "two sizes", tile)
        return sizes[0], sizes[1]

    def _wrong(self, where: str, what: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self._place}: {where} of quantization_config must be {what}, got {brief(value)}"
        )
