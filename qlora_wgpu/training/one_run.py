"""A model is trained by one run at a time: its adapter, gradient and sums are the run's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.model.adapter_model import AdapterModel

_runs: WeakKeyDictionary[AdapterModel, str] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def one_run_of(model: AdapterModel, folder: str) -> Iterator[None]:
    """Keeps other runs from a model.

    Two at a time would each go on from what the other one has learnt, and neither could be resumed.

    Args:
        model: The model.
        folder: The run's, for the message to others.

    Raises:
        ConfigError: If another run trains it, be it in another thread.
    """
    with _lock:
        if model in _runs:
            raise ConfigError(
                f"the run in {_runs[model]} trains this model: let it end, or open the model once "
                "more for the other run"
            )
        _runs[model] = folder
    try:
        yield
    finally:
        with _lock:
            _runs.pop(model, None)
