"""Progress while a run goes on: one live line on a terminal, a plain line every few seconds elsewhere.

It reads counts that it is given and nothing else, and never touches results.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.replay import Progress

PLAIN_EVERY_S = 5.0


class LiveView:
    """Shows `progress`; `update` is called by the run's timer with seconds since the start and what is being done."""

    def __init__(self, progress: Progress, console: Console, *, is_virtual: bool) -> None:
        self._progress = progress
        self._console = console
        self._is_virtual = is_virtual
        self._next_plain_s = 0.0
        self._last_tenth = -1
        self._last_stage = ""
        self._live = (
            Live(Text(""), console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, elapsed_s: float, stage: str) -> None:
        text = self._line(elapsed_s, stage)
        if self._live is not None:
            self._live.update(Text(text))
        elif self._is_due(elapsed_s, stage):
            self._console.print(text, highlight=False)

    def _is_due(self, elapsed_s: float, stage: str) -> bool:
        """Plain lines: every few seconds; on virtual time, which may fly, every tenth of the requests. A new
        stage is always told.
        """
        if stage != self._last_stage:
            self._last_stage = stage
            self._next_plain_s = elapsed_s + PLAIN_EVERY_S
            return True
        if self._is_virtual:
            tenth = 10 * self._num_done // max(1, self._progress.num_planned)
            is_due = tenth != self._last_tenth
            self._last_tenth = tenth
            return is_due
        if elapsed_s < self._next_plain_s:
            return False
        self._next_plain_s = elapsed_s + PLAIN_EVERY_S
        return True

    @property
    def _num_done(self) -> int:
        return self._progress.num_ok + self._progress.num_failed + self._progress.num_skipped

    def _line(self, elapsed_s: float, stage: str) -> str:
        p = self._progress
        if stage == "prime":
            return f"[{elapsed_s:6.1f} s] priming: {p.num_primed} histories done, {p.num_in_flight} under way"
        return (
            f"[{elapsed_s:6.1f} s] {stage}: {self._num_done}/{p.num_planned} requests ended, "
            f"{p.num_in_flight} in flight, {p.num_failed} failed, {p.num_skipped} skipped, {p.output_tokens:,} tokens"
        )
