"""report.html and loss.png of a run that has ended."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.report import Facts, write_png, write_report
from qlora_wgpu.training import Observer, TrainResult, read_rows


def write_reports(
    settings: Config, model: QLoRAModel, result: TrainResult, observer: Observer
) -> tuple[Path, ...]:
    """Writes report.html, and with matplotlib loss.png, into the run's folder.

    Those of a run that had been finished before stay as they are; what is missing is written.

    Args:
        settings: The run's.
        model: Base and adapter.
        result: The run's figures.
        observer: Who is told that one cannot be written, which does not matter to the run.

    Returns:
        What was written.
    """
    page, picture = result.run_dir / "report.html", result.run_dir / "loss.png"
    written: list[Path] = []
    try:
        rows = read_rows(result.run_dir / "metrics.jsonl")
        if not (result.was_finished and page.exists()):
            write_report(page, _facts(settings, model, result), rows)
            written.append(page)
        if not (result.was_finished and picture.exists()) and write_png(picture, rows):
            written.append(picture)
    except CheckpointError as err:
        observer.warning(str(err))
    return tuple(written)


def _facts(settings: Config, model: QLoRAModel, result: TrainResult) -> Facts:
    return Facts(
        title=f"{Path(settings.model.path).name} on {Path(settings.data.train or '').name}",
        subtitle=f"{model.device.name}; qlora-wgpu {version('qlora-wgpu')}; "
        f"{settings.quant.scheme}, {settings.train.compute_dtype}, rank {settings.lora.r}",
        figures=_figures(model, result),
        texts=asdict(result.sample) if result.sample is not None else {},
        memory=model.device.memory.by_kind,
        config=settings.to_yaml(),
    )


def _figures(model: QLoRAModel, result: TrainResult) -> dict[str, str]:
    figures = {
        "steps": f"{result.steps:,}",
        "loss": _loss(result.train_loss),
        "held-out before": _loss(result.eval_loss_before),
        "held-out after": _loss(result.eval_loss),
        "tokens": f"{result.num_tokens:,}",
        "seconds": f"{result.seconds:,.0f}",
        "adapter parameters": f"{model.adapter.num_parameters:,}",
        "device memory": f"{result.peak_bytes / 2**20:,.0f} MiB",
    }
    return {name: value for name, value in figures.items() if value}


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
