"""The report of a run: one page that needs nothing else."""

from qlora_wgpu.report.page import Facts, TextSample, write_png, write_report

__all__ = ["Facts", "TextSample", "write_png", "write_report"]
