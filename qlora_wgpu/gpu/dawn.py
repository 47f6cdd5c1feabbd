"""wgpudawn: wgpu-py's API on Dawn, an extra, for the sake of GPUs' matrix units."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from qlora_wgpu.gpu.backend import Backend, MatrixShape
from qlora_wgpu.gpu.preprocessor import without_comments

_MATRIX = "chromium-experimental-subgroup-matrix"
# Calls, builtin values and matrices; other names may have the word in them.
_SUBGROUPS = re.compile(
    r"\b(?:subgroup[A-Z]|quad[A-Z])\w*\s*[(<]|@builtin\s*\(\s*(?:subgroup_|num_subgroups\b)"
    r"|\bsubgroup_matrix_"
)


class Dawn(Backend):
    """wgpudawn; shaders are compiled by Tint."""

    name: ClassVar[str] = "dawn"
    package: ClassVar[str] = "wgpudawn"
    features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "timestamp-query": ("timestamp-query",),
        "shader-f16": ("shader-f16",),
        "subgroups": ("subgroups",),
        "subgroup-matrix": ("shader-f16", "subgroups", _MATRIX),
    }

    def load(self) -> Any:
        """Imports wgpudawn, whose experimental features it is told to offer."""
        import wgpudawn
        from wgpudawn.backends.dawn import extras

        with contextlib.suppress(RuntimeError):  # the program has opened an adapter already
            extras.set_instance_extras(
                enable_toggles=("allow_unsafe_apis",),
                # Timestamps are rounded to 0.1 ms otherwise; kernels write what they read.
                disable_toggles=("timestamp_quantization",),
            )
        return wgpudawn

    def adapters(self) -> list[Any]:
        """All adapters; what Dawn remarks about drivers that it cannot use is not printed."""
        self.module  # noqa: B018  imported first, so that a failure is told
        with _without_stderr():
            return super().adapters()

    def dialect(self, code: str) -> str:
        """Enables subgroups where they are used, on the first line so that numbers stay true."""
        used = _SUBGROUPS.search(without_comments(code))
        return f"enable subgroups; {code}" if used else code

    def matrix_shapes(self, adapter: Any) -> tuple[MatrixShape, ...]:
        """The shapes that the adapter lists, the largest first."""
        if _MATRIX not in adapter.features:
            return ()
        from wgpudawn.backends.dawn import extras

        listed = extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", ())
        shapes = {
            MatrixShape(entry["m"], entry["n"], entry["k"], entry["max_subgroup_size"])
            for entry in listed
            if (entry["component_type"], entry["result_component_type"]) == ("f16", "f32")
        }
        return tuple(sorted(shapes, key=lambda s: (-s.m * s.n * s.k, s.m)))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Sends what native code prints to stderr nowhere."""
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
