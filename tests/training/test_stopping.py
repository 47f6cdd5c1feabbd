"""When a signal is a wish, and when it is meant at once."""

import signal

import pytest

from qlora_wgpu.training import run as stopping
from qlora_wgpu.training.run import StopRequest


def test_signals_that_come_together_are_one_wish(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.requested and stop.number == signal.SIGTERM
        monkeypatch.setattr(stopping, "DEBOUNCE_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_ignored_stays_so(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(number)
        assert not stop.requested and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
