"""Training an adapter."""

from qlora_wgpu.training.callbacks import Step, TrainerCallback
from qlora_wgpu.training.observers import Observer, RunSetup, Sample, TrainResult, WorkerMetrics
from qlora_wgpu.training.preferences import training_options
from qlora_wgpu.training.run_folder import (
    checkpoint_folders,
    read_rows,
    refuse_existing_run,
    require_writable,
    settle_run,
)
from qlora_wgpu.training.start import check_resumable
from qlora_wgpu.training.trainer import Trainer

__all__ = [
    "Observer",
    "RunSetup",
    "Sample",
    "Step",
    "TrainResult",
    "Trainer",
    "TrainerCallback",
    "WorkerMetrics",
    "check_resumable",
    "checkpoint_folders",
    "read_rows",
    "refuse_existing_run",
    "require_writable",
    "settle_run",
    "training_options",
]
