"""The report of a run: a self-contained HTML page."""

from qlora_wgpu.report.page import Facts, TextSample, write_png, write_report

__all__ = ["Facts", "TextSample", "write_png", "write_report"]
