"""The report of a run: a self-contained HTML page."""

from qlora_wgpu.report.page import (
    DataSample,
    Facts,
    TextSample,
    write_png,
    write_report,
    write_samples,
)

__all__ = ["DataSample", "Facts", "TextSample", "write_png", "write_report", "write_samples"]
