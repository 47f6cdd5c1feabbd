"""The interface of the two WebGPU implementations, ``wgpu_native`` and ``dawn``."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.matrix import MatrixShape

CHECKS_VARIABLE = "QLORA_WGPU_CHECKS"
"""If 1, this package's shaders are compiled with all checks for untrusted shaders."""

Dispatch = tuple[Any, Any, tuple[int, int, int]]  # pipeline, bind group, workgroups


class Backend(ABC):
    """A Python package with wgpu-py's API, and the differences between these packages."""

    name: ClassVar[str]  # the value of ``device.backend`` in a config
    package: ClassVar[str]  # the package's name
    install: ClassVar[str]  # the command that installs the supported version
    # The used features by WebGPU's names, with the package's names for them.
    features: ClassVar[Mapping[str, tuple[str, ...]]]
    # Whether its uniformity analysis rejects barriers that depend on copies of uniforms.
    proves_uniformity: ClassVar[bool] = False
    # Whether it loads no driver of an API that is not asked for.
    leaves_out: ClassVar[bool] = False

    @abstractmethod
    def load(self) -> Any:
        """Imports the package; raises ImportError or an error of its native library."""

    @cached_property
    def module(self) -> Any:
        """The package."""
        try:
            return self.load()
        except Exception as err:
            raise DeviceError(
                f"the package {self.package} cannot be loaded ({err}): {self.install}"
            ) from err

    def adapters(self, apis: Sequence[str] = ()) -> list[Any]:
        """All adapters that the package lists; with ``leaves_out``, of these APIs if there are."""
        return list(self.module.gpu.enumerate_adapters_sync())

    def features_of(self, adapter: Any) -> dict[str, tuple[str, ...]]:
        return {
            name: own
            for name, own in self.features.items()
            if all(part in adapter.features for part in own)
        }

    def request_device(self, adapter: Any) -> Any:
        """Opens a device with the adapter's limits and the used features."""
        features = [part for own in self.features_of(adapter).values() for part in own]
        try:
            return adapter.request_device_sync(required_features=features, required_limits={})
        except Exception as err:
            raise explain_refusal(adapter, err) from err

    def release(self, device: Any) -> None:
        """Breaks a device's reference cycles, so that it is freed with the last reference to it.

        Otherwise wgpu-py's devices, and the driver's pools of freed buffers, would live until a
        garbage collection.
        """
        with suppress(AttributeError):  # private names, which another version may not have
            device._device = device._queue._device = None

    def dialect(self, code: str, subgroup_size: int = 0) -> str:
        """WGSL in the form that this implementation's compiler expects."""
        return code

    def compile(self, device: Any, code: str, label: str) -> Any:
        return device.create_shader_module(code=code, label=label)

    def record(self, compute_pass: Any, dispatches: Iterable[Dispatch]) -> None:
        current = None
        for pipeline, group, workgroups in dispatches:
            if pipeline is not current:
                compute_pass.set_pipeline(pipeline)
                current = pipeline
            compute_pass.set_bind_group(0, group)
            compute_pass.dispatch_workgroups(*workgroups)

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds of a tick of a device's timestamps."""
        return 1.0

    def matrix_shapes(self, adapter: Any) -> tuple[MatrixShape, ...]:
        """Products with float32 sums on the adapter's matrix units, the best first.

        Only those whose subgroup size is certain, because it can be requested or because the
        adapter has only one.
        """
        return ()


def checks_everything() -> bool:
    """Whether shaders are compiled with bounds checks, loop limits and cleared memory."""
    return os.environ.get(CHECKS_VARIABLE, "0") not in ("", "0")


def explain_refusal(adapter: Any, error: Exception) -> DeviceError:
    return DeviceError(
        f"cannot open the GPU {adapter.info['device']} ({error}): update its driver, or choose "
        "another GPU with device.gpu"
    )
