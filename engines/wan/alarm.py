"""One alarm at an absolute time of `engines.clock.monotonic_s`, finer than an event loop's own timers.

Event loops round their timers to whole milliseconds; a chunk on a fast line takes half of one. On Linux a timerfd wakes
the loop within some 0.1 ms; elsewhere the loop's timer has to do. It never calls back early.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

from engines.clock import monotonic_s

# Alarms nearer than this wait for it: bounds wake-ups to 10,000 a second, at the price of that much lateness.
MIN_AHEAD_S = 1e-4

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class Alarm:
    """Calls `callback()` in the loop at the time set last; one time is pending at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._due_s: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd >= 0:
                loop.add_reader(self._fd, self._on_timerfd)

    def set(self, due_s: float | None) -> None:
        """Move the alarm to `due_s` (monotonic seconds); None takes it away."""
        if due_s == self._due_s or self._is_closed:
            return
        self._due_s = due_s
        if self._fd >= 0:
            self._arm_timerfd(due_s)
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if due_s is not None:
            self._handle = self._loop.call_later(max(MIN_AHEAD_S, due_s - monotonic_s()), self._on_due)

    def close(self) -> None:
        """For good: an alarm set after this is none."""
        self.set(None)
        self._is_closed = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm_timerfd(self, due_s: float | None) -> None:
        due_ns = 0 if due_s is None else round(max(due_s, monotonic_s() + MIN_AHEAD_S) * 1e9)
        # struct itimerspec: interval (s, ns), value (s, ns); an all-zero value disarms.
        when = (ctypes.c_long * 4)(0, 0, due_ns // 1_000_000_000, due_ns % 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, when, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _on_timerfd(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew since it went off
            return
        self._on_due()

    def _on_due(self) -> None:
        due_s, self._due_s, self._handle = self._due_s, None, None
        if due_s is None:
            return
        if due_s > monotonic_s():  # the loop's own timer may be early
            self.set(due_s)
            return
        self._callback()
