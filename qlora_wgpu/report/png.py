"""The loss curve as a PNG, with the extra ``plots``."""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.report.curves import smoothed
from qlora_wgpu.report.page import points


def write_png(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Writes the curve; False where matplotlib is not installed.

    Raises:
        CheckpointError: If it cannot be written.
    """
    # It tells of a home folder that cannot be written, which is none of the run's business.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        return False
    figure = figure_type(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    loss, held_out = points(rows, "loss"), points(rows, "eval_loss")
    if loss:
        axes.plot(*zip(*loss, strict=True), color="#0a6", alpha=0.3, linewidth=1)
        axes.plot(*zip(*smoothed(loss), strict=True), color="#0a6", label="training, smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#d63", label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    if loss or held_out:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
    return True
