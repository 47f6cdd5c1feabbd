"""The commands as a library: each function does what its command does, and returns the results.

An ``Observer`` follows the progress; nothing is printed.
"""

from qlora_wgpu.runs.data import PreparedData, prepare
from qlora_wgpu.runs.estimation import Estimate, Fits, GpuPlan, estimate
from qlora_wgpu.runs.evaluation import Evaluation, evaluate
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.runs.resolve import open_adapter
from qlora_wgpu.runs.training import train

__all__ = [
    "Estimate",
    "Evaluation",
    "Fits",
    "GpuPlan",
    "OpenedModel",
    "PreparedData",
    "estimate",
    "evaluate",
    "open_adapter",
    "prepare",
    "train",
]
