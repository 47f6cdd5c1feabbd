"""wgpudawn: wgpu-py's API on Dawn, an optional extra for matrix units."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from qlora_wgpu.errors import install_command
from qlora_wgpu.gpu.backend import Backend, checks_everything, explain_refusal
from qlora_wgpu.gpu.kernel_config import has_few_registers
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.preprocessor import without_comments

_MATRIX = "chromium-experimental-subgroup-matrix"
_SIZE_CONTROL = "subgroup-size-control"
# Calls, builtin values and matrices; other names may contain the word.
_SUBGROUPS = re.compile(
    r"\b(?:subgroup[A-Z]|quad[A-Z])\w*\s*[(<]|@builtin\s*\(\s*(?:subgroup_|num_subgroups\b)"
    r"|\bsubgroup_matrix_"
)
_ENTRY = re.compile(r"@compute\b")

_ADAPTER_TOGGLES = (
    "allow_unsafe_apis",
    # Otherwise f16, and so matrix units, would be hidden on NVIDIA's drivers below 615.71.
    "vulkan_enable_f16_on_nvidia",
    "use_vulkan_memory_model",
)
# Toggles that disable protection against untrusted shaders: bounds checks, cleared memory.
_GUARDS = (
    "disable_robustness",
    "disable_workgroup_init",
    "disable_polyfills_on_integer_div_and_mod",
    "skip_validation",
)
_FACTORS = ("f16", "f32")  # float32 is slower, and the only type on Apple's GPUs
_WIDEST_VECTORS = 16  # invocations of a subgroup
_USUAL_SIZE = 32  # the usual subgroup size of matrix units


class Dawn(Backend):
    """wgpudawn; shaders are compiled by Tint."""

    name: ClassVar[str] = "dawn"
    proves_uniformity: ClassVar[bool] = True
    package: ClassVar[str] = "wgpudawn"
    install: ClassVar[str] = install_command("dawn")
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "timestamp-query": ("timestamp-query",),
        "shader-f16": ("shader-f16",),
        "subgroups": ("subgroups",),
        "subgroup-matrix": ("subgroups", _MATRIX),
        "subgroup-size-control": ("subgroups", _SIZE_CONTROL),
    }

    def load(self) -> Any:
        import wgpudawn
        from wgpudawn.backends.dawn import extras

        with contextlib.suppress(RuntimeError):  # the program has already opened an adapter
            extras.set_instance_extras(
                enable_toggles=_known(extras, _ADAPTER_TOGGLES),
                # Otherwise timestamps are rounded to 0.1 ms; kernels write everything they read.
                disable_toggles=("timestamp_quantization",),
            )
        return wgpudawn

    def adapters(self, apis: Sequence[str] = ()) -> list[Any]:
        """All adapters, of every API; Dawn's remarks about unusable drivers are not printed."""
        self.module  # noqa: B018  imported first, so that a failure is reported
        with _without_stderr():
            return super().adapters()

    def request_device(self, adapter: Any) -> Any:
        """Opens a device whose shaders are trusted, unless all checks are on."""
        from wgpudawn.backends.dawn import extras

        guards = () if checks_everything() else _known(extras, _GUARDS)
        features = [part for own in self.features_of(adapter).values() for part in own]
        try:
            return extras.request_device_sync(
                adapter, required_features=features, required_limits={}, enable_toggles=guards
            )
        except Exception as err:
            raise explain_refusal(adapter, err) from err

    def dialect(self, code: str, subgroup_size: int = 0) -> str:
        """Enables subgroups if they are used, on the first line to keep line numbers."""
        if not _SUBGROUPS.search(without_comments(code)):
            return code
        if not subgroup_size:
            return f"enable subgroups; {code}"
        sized = _ENTRY.sub(f"@compute @subgroup_size({subgroup_size})", code, count=1)
        return f"enable subgroups; enable subgroup_size_control; {sized}"

    def matrix_shapes(self, adapter: Any) -> tuple[MatrixShape, ...]:
        """The shapes that the adapter lists and kernels can use, the largest first."""
        if _MATRIX not in adapter.features:
            return ()
        from wgpudawn.backends.dawn import extras

        listed = extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", ())
        sized = _SIZE_CONTROL in adapter.features
        shapes = {
            shape
            for entry in listed
            for shape in _shapes(entry, any_size=sized)
            if shape.element != "f16" or "shader-f16" in adapter.features
        }
        if adapter.info["adapter_type"] == "CPU":
            # Mesa 26's software GPU crashes when it compiles them for 512-bit vectors.
            shapes = {shape for shape in shapes if shape.threads < _WIDEST_VECTORS}
        few = has_few_registers(adapter.info)
        return tuple(sorted(shapes, key=lambda shape: _rank(shape, few_registers=few)))


def _known(extras: Any, toggles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in toggles if name in extras.all_toggles())


def _shapes(entry: dict[str, Any], *, any_size: bool) -> Iterator[MatrixShape]:
    """The shapes of one entry of an adapter's list; none if the subgroup size is not fixed."""
    element = entry["component_type"]
    m, n, k = entry["m"], entry["n"], entry["k"]
    if entry["result_component_type"] != "f32" or element not in _FACTORS:
        return
    size, largest = entry["min_subgroup_size"], entry["max_subgroup_size"]
    if size != largest and not any_size:
        return
    while 0 < size <= largest:
        shape = MatrixShape(m, n, k, size, element)
        if not shape.problem:
            yield shape
        size *= 2


def _rank(shape: MatrixShape, *, few_registers: bool = False) -> tuple[int, ...]:
    """Sort key: f16 first, then the largest, then the usual subgroup size.

    If a wide subgroup's invocations share a narrow one's registers, the narrowest comes first.
    """
    volume = shape.m * shape.n * shape.k
    usual = 0 if few_registers else shape.threads != _USUAL_SIZE
    threads = shape.threads if few_registers else -shape.threads
    return (_FACTORS.index(shape.element), -volume, shape.m, usual, threads)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
