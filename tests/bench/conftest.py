"""The scripts of a GPU's measurement, which are no package."""

import signal
import sys
from pathlib import Path

import pytest
from bench.parts import BENCHMARKS


@pytest.fixture
def gpu(monkeypatch):
    """The scripts, as a run in their folder finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    import gpu_rows
    import gpu_session
    import gpu_summary
    import gpu_written

    yield type(
        "Scripts",
        (),
        {**vars(gpu_session), **vars(gpu_rows), "summary": gpu_summary, "written": gpu_written},
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == BENCHMARKS:  # what they import of the package stays
            del sys.modules[name]
