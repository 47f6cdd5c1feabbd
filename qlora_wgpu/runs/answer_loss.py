"""The held-out loss and metrics of objectives over answers, of the base and of an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.settings import named_init_from
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.evaluation import answer_sums
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.preferences import PreferenceData, preference_of
from qlora_wgpu.training.references import ReferenceModel
from qlora_wgpu.training.step_log import answer_metrics


class PreferenceEvaluator:
    """Measures a model as it is, against the reference that its run had."""

    def __init__(
        self, model: QLoRAModel, dataset: Dataset, settings: Config, observer: Observer
    ) -> None:
        """Asks the reference."""
        preference = preference_of(settings.train)
        assert preference is not None
        self._model, self._dataset, self._settings = model, dataset, settings
        self._computing = LocalExecutor(model)
        self._observer = observer
        model.options = training_options(settings.train)
        longest = max(settings.data.max_seq_length, dataset.longest)
        begun_from = settings.lora.init_from if preference.has_reference else None
        with model.adapter_off() if begun_from is None else _adapter(model, begun_from):
            given = model, self._computing, dataset, preference, settings.rows_at_once, longest
            references = ReferenceModel(*given).logps(
                keep=settings.data.cache, progress=observer.activity
            )
        self._answers = PreferenceData(dataset, preference, references, longest)

    def measured(self, what: str) -> tuple[float, int, dict[str, float]]:
        """Mean loss, pairs or answers, and metrics by TRL's names, with the adapter as it is."""

        def progress(done: int, rows: int) -> None:
            self._observer.activity(f"measuring {what}: {done:,} of {rows:,} rows")

        rows, settings = self._dataset, self._settings
        given = self._model, self._computing, self._answers, rows, settings.rows_at_once
        loss, count, *sums = answer_sums(*given, progress)
        return loss / count, int(count), answer_metrics(settings.train, sums)


@contextmanager
def _adapter(model: QLoRAModel, folder: str) -> Iterator[None]:
    """While it is entered, the model computes with the adapter in a folder."""
    if model.adapter.trained_rows or model.adapter.trained_whole:
        with _in_its_place(model, folder):
            yield
        return
    own, name = model.active_adapter, "reference"
    with named_init_from():
        model.load_adapter(folder, name)
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(own)
        model.delete_adapter(name)


@contextmanager
def _in_its_place(model: QLoRAModel, folder: str) -> Iterator[None]:
    """The same where the model's own adapter, of one shape with it, suffers none beside it."""
    with model.device.in_turn, model.biases.off():
        before, kept = model.parameters_changed, model.read_flat(model.adapter.parameters).copy()
        with named_init_from():
            AdapterModel.load_adapter(model, folder)  # the model stays that of its own folder
        try:
            yield
        finally:
            model.write_parameters(kept)
            model.parameters_changed = before
