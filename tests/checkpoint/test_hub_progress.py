"""The bars of a download: nothing where all is here already, and nothing left behind."""

import io
import signal
import sys

import pytest

from qlora_wgpu.checkpoint.hub import download_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, seconds: float, stderr: io.StringIO) -> str:
    """What a download writes that is looked at and moved on after so long."""
    monkeypatch.setattr(sys, "stderr", stderr)
    with download_bars("owner/name") as bars:
        for options in ({"total": 5, "desc": "Fetching"}, {"total": 8_000_000, "unit": "B"}):
            bar = bars(**options, mininterval=0, ncols=60)
            bar._time = lambda bar=bar: bar.start_t + seconds
            bar.refresh()
            bar.update(bar.total // 2)
    return stderr.getvalue()


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_what_is_here_already_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]
) -> None:
    assert drawn(monkeypatch, 0.5, kind()) == ""


def test_what_takes_long_has_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, 30, Terminal())
    assert "Fetching:  40%" in text
    assert text.splitlines()[-1].strip("\x1b[A ") == ""


def test_without_a_terminal_it_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, 30, io.StringIO()) == "downloading owner/name: 0 of 5 files\n"


def test_beside_another_bar_it_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    proxied = Terminal()
    proxied.rich_proxied_file = None  # type: ignore[attr-defined]
    assert drawn(monkeypatch, 30, proxied) == "downloading owner/name: 0 of 5 files\n"


def test_bytes_are_told_with_their_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlora_wgpu.checkpoint.hub._LINE_INTERVAL", 0)
    text = drawn(monkeypatch, 30, io.StringIO())
    assert text.splitlines()[-1] == "downloading owner/name: 4.00MB of 8.00MB"


def test_ctrl_c_ends_files_that_threads_have_begun() -> None:
    before = signal.getsignal(signal.SIGINT)
    with download_bars("owner/name") as bars:
        bar = bars(total=5, file=io.StringIO())
        bar.update(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            bar.update(1)
    assert signal.getsignal(signal.SIGINT) is before
