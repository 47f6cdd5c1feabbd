"""The adapter that a run goes on from; what is wrong with it is told with the setting's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qlora_wgpu.config.schema import LoraConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.lora.peft_files import require_adapter_files
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.adapter_state import read_fitting
from qlora_wgpu.model.pretrained import Pretrained


def require_init_from(lora: LoraConfig) -> None:
    """Makes sure that the adapter is there, before anything takes time.

    Raises:
        CheckpointError: If a file of it is missing.
    """
    if lora.init_from is not None:
        with named_init_from():
            require_adapter_files(lora.init_from)


def check_init_from(base: Pretrained, lora: LoraConfig) -> None:
    """Makes sure that the adapter fits, before data and weights are read.

    Raises:
        CheckpointError: If it is damaged or does not fit.
        ConfigError: If the run's own adapter does not fit the base.
    """
    if lora.init_from is not None:
        of = base.architecture
        own = Adapter(
            lora, of.linears, of.experts, within=of.adapted_within, vocabulary=Vocabulary.of(of)
        )
        with named_init_from():
            tensors, _ = read_fitting(lora.init_from, own, of, base.name_or_path)
            own.join(tensors)


def load_init_from(model: AdapterModel, lora: LoraConfig) -> None:
    """Gives a model the adapter, where the run has one to go on from.

    Raises:
        CheckpointError: If it is damaged or does not fit.
    """
    if lora.init_from is not None:
        with named_init_from():
            model.load_adapter(lora.init_from)


@contextmanager
def named_init_from() -> Iterator[None]:
    """While it is entered, errors about an adapter say which setting named it."""
    try:
        yield
    except CheckpointError as err:
        raise type(err)(f"lora.init_from: {err}") from err
