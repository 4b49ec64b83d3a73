"""The status line of a command that works for long: what a terminal shows, and that nothing else gets it."""

from __future__ import annotations

import io
import itertools
import threading

import pytest

from services.launcher.running_status import RunningStatus
from services.launcher.terminal import Terminal

PATIENCE_S = 20.0


class Screen(io.StringIO):
    """A terminal; `ticked` is set once a line has been written for the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.ticked = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "2 s: loading" in text:
            self.ticked.set()
        return super().write(text)


def test_a_terminal_sees_what_goes_on_and_for_how_long_and_nothing_at_the_end() -> None:
    screen, seconds = Screen(), itertools.count()
    with RunningStatus(Terminal(screen), clock=lambda: next(seconds) - 1, tick_s=0.001) as status:
        status.show("loading")
        assert screen.ticked.wait(PATIENCE_S), "the line was not written anew"
        status.show("measuring")
    shown = screen.getvalue().split("\r\033[K")
    assert all("loading" in line or "measuring" in line for line in shown[1:-1])
    assert shown[-1] == ""
    assert not any(thread.name == "status" for thread in threading.enumerate())


def test_a_line_that_stays_is_not_written_behind_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, seconds = Screen(), itertools.count()
    monkeypatch.setattr("sys.stdout", screen)
    with RunningStatus(Terminal(screen), clock=lambda: next(seconds) - 1, tick_s=0.001) as status:
        status.show("loading")
        assert screen.ticked.wait(PATIENCE_S), "the line was not written anew"
        screen.ticked.clear()
        status.line("one of two")
        status.show("2 s: loading")  # which the screen waits for
        assert screen.ticked.wait(PATIENCE_S), "the status did not go on"
    assert "\r\033[Kone of two\n\r\033[K" in screen.getvalue()


def test_what_is_no_terminal_gets_nothing() -> None:
    stream = io.StringIO()
    with RunningStatus(Terminal(stream)) as status:
        status.show("loading")
    assert stream.getvalue() == ""
