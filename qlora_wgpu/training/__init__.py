"""Training an adapter."""

from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.resume_check import check_same_run, holds_run
from qlora_wgpu.training.run_folder import refuse_existing_run
from qlora_wgpu.training.trainer import Trainer, TrainResult

__all__ = [
    "Observer",
    "TrainResult",
    "Trainer",
    "check_same_run",
    "holds_run",
    "refuse_existing_run",
]
