"""Time as one object: a wall clock, or a virtual one that jumps to the next deadline.

Nothing in engines/ and harness/ sleeps or reads a clock but through here. On virtual time a run with nothing left to
wait for is a deadlock, reported with what each task waits on.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Virtual time cannot go on: no callback is ready and none is scheduled."""


class _NoSelector(selectors.BaseSelector):
    """A selector without files: `select` moves virtual time to the loop's next deadline."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._map: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers its own self-pipe; it is never waited on.
        key = selectors.SelectorKey(fileobj, -1, events, data)
        self._map[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.loop is not None and (timeout is None or timeout > 0):
            self.loop.jump()
        return []

    def get_map(self) -> Any:
        return self._map

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map[fileobj]


class _OrderedTimer(asyncio.TimerHandle):
    """A timer that comes after every earlier-made timer of the same deadline: the base class leaves ties to the
    heap."""

    __slots__ = ("order",)
    order: int

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, _OrderedTimer):
            return (self._when, self.order) < (other._when, other.order)  # type: ignore[attr-defined]
        return super().__lt__(other)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while callbacks run and jumps when none is ready. It never does I/O."""

    def __init__(self) -> None:
        selector = _NoSelector()
        self._virtual_s = 0.0
        super().__init__(selector)
        selector.loop = self
        self._num_timers = 0
        self._failure: BaseException | None = None
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._virtual_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As in the base loop, but equal deadlines run in the order in which they were set."""
        timer = _OrderedTimer(when, callback, args, self, context)
        timer.order = self._num_timers
        self._num_timers += 1
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = self._failure or context.get("exception") or RuntimeError(context["message"])

    def jump(self) -> None:
        """Go to the next scheduled callback; raise `Deadlock` where there is none, or what a callback has raised."""
        if self._failure is not None:
            raise self._failure
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if not scheduled:
            waiting = [_describe(task) for task in asyncio.all_tasks(self)]
            raise Deadlock("nothing left to wait for; waiting: " + ("; ".join(sorted(waiting)) or "no task"))
        # A deadline is taken as it stands, so equal deadlines stay equal and repeat exactly.
        self._virtual_s = max(self._virtual_s, scheduled[0].when())

    def _run_once(self) -> None:
        # The base loop pops handles with `when < time + resolution`; with resolution 0 a deadline that is
        # reached exactly would never be popped, so the comparison gets the next float up.
        self._clock_resolution = 1e-9 * max(1.0, self._virtual_s) * 1e-3
        super()._run_once()  # type: ignore[misc]


def _describe(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "?"
    return f"{task.get_name()} at {where}"


class Clock:
    """The run's time. `now_ns` counts from one monotonic start (wall: the machine's boot; virtual: 0)."""

    def __init__(self, *, is_virtual: bool) -> None:
        self.is_virtual = is_virtual

    def now_ns(self) -> int:
        if self.is_virtual:
            return round(asyncio.get_running_loop().time() * 1e9)
        return time.monotonic_ns()

    def now_s(self) -> float:
        return self.now_ns() / 1e9

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))

    async def sleep_until_ns(self, deadline_ns: int) -> None:
        """Sleep to an absolute time: a late wake-up never shifts the next one, and it never wakes early (a loop's
        timers may, by half a millisecond)."""
        while (remaining_ns := deadline_ns - self.now_ns()) > 0:
            await asyncio.sleep(remaining_ns / 1e9)

    def wall_time_iso(self) -> str:
        """The calendar time in UTC, for names and manifests only."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def run(main: Callable[[Clock], Coroutine[Any, Any, T]], *, is_virtual: bool) -> T:
    """Run `main(clock)` to its end on a wall loop (uvloop where installed) or a virtual one."""
    clock = Clock(is_virtual=is_virtual)
    if is_virtual:
        factory: Callable[[], asyncio.AbstractEventLoop] = VirtualLoop
    else:
        factory = _wall_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main(clock))


def _wall_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on Windows; the standard loop is slower and otherwise equal
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def monotonic_s() -> float:
    """The wall clock, seconds since the machine's boot: for what has no loop, or distrusts its cached time."""
    return time.monotonic()


def block_until_ns(deadline_ns: int) -> None:
    """Block this thread (never an event loop's) until the wall clock shows `deadline_ns`."""
    remaining_ns = deadline_ns - time.monotonic_ns()
    if remaining_ns > 0:
        time.sleep(remaining_ns / 1e9)
