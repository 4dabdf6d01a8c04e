"""One direction of a line on the wall clock: a `FluidLink` whose deliveries are written to sockets when they are due.

A chunk that is handled late leaves and arrives by the model's times all the same, so lateness never adds up into a
lower rate. It must never read from a socket; what enters comes through `send`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from engines.clock import monotonic_s
from engines.wan.alarm import Alarm
from engines.wan.link import Delivery, FluidLink, LinkSpec
from engines.wan.meter import Meter

# A chunk takes at most this long at the highest rate of one flow: finer costs CPU, coarser delays what is in its front.
CHUNK_S = 0.003
MIN_CHUNK_BYTES = 256
MAX_CHUNK_BYTES = 65_536
# A sender that is woken late must still find bytes waiting on the line.
WAKE_S = 0.02
MIN_BUFFER_BYTES = 256 * 1024
MAX_BUFFER_BYTES = 64 * 1024 * 1024
FREE_BUFFER_BYTES = 16 * 1024 * 1024


class Source(Protocol):
    """Whose chunks travel: told when one has arrived."""

    def arrived(self, chunk: Chunk) -> None: ...


class Chunk:
    """Bytes on their way, or a mark in the flow without bytes (`mark`: eof | reset)."""

    __slots__ = ("ends_busy", "ends_route_busy", "mark", "meter", "payload", "source")

    def __init__(self, source: Source, meter: Meter, payload: memoryview, mark: str = "") -> None:
        self.source = source
        self.meter = meter
        self.payload = payload
        self.mark = mark
        self.ends_busy = False
        self.ends_route_busy = False


class Shaper:
    """See the module. Times are `engines.clock.monotonic_s`: a loop's `time()` may be cached and rounded to 1 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop, spec: LinkSpec, seed: int) -> None:
        self.meter = Meter(spec)
        self._link = FluidLink(spec, seed, on_left=self._left)
        self._alarm = Alarm(loop, self.pump)
        self._is_pumping = False

    def send(self, flow: str, chunk: Chunk) -> None:
        """Put a chunk into `flow`; call `pump` after the last of several."""
        now_s = monotonic_s()
        nbytes = len(chunk.payload)
        self._link.run_to(now_s)
        self.meter.enter(now_s, nbytes)
        chunk.meter.enter(now_s, nbytes)
        self._link.send(now_s, flow, nbytes, chunk)

    def pump(self) -> None:
        """Write what is due and set the alarm for what comes next."""
        # An arrival may end a connection, which drops its flows and comes back here: what became due since then must
        # not overtake the rest of this batch.
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            for delivery in self._link.take_due(monotonic_s()):
                self._arrive(delivery)
        finally:
            self._is_pumping = False
        self._alarm.set(self._link.next_event_s())

    def _arrive(self, delivery: Delivery) -> None:
        chunk = delivery.item
        assert isinstance(chunk, Chunk)
        now_s, nbytes = monotonic_s(), len(chunk.payload)
        chunk.source.arrived(chunk)
        self.meter.write(now_s, delivery.deliver_s, delivery.left_s, nbytes, ends_busy=chunk.ends_busy)
        chunk.meter.write(now_s, delivery.deliver_s, delivery.left_s, nbytes, ends_busy=chunk.ends_route_busy)

    def drop(self, flow: str) -> None:
        """A flow whose receiver is gone gives its place on the line to others."""
        now_s = monotonic_s()
        for chunk in self._link.drop(now_s, flow):
            assert isinstance(chunk, Chunk)
            self.meter.drop(now_s)
            chunk.meter.drop(now_s)
        self.pump()

    def set_spec(self, spec: LinkSpec, meters: list[Meter]) -> None:
        """Another line from now on; `meters` are the routes' of this direction."""
        now_s = monotonic_s()
        self._link.run_to(now_s)
        for meter in (self.meter, *meters):
            meter.restart(now_s, spec)
        self._link.set_spec(now_s, spec)
        self.pump()

    def settle(self) -> float:
        """Bring all counters up to now, which is returned."""
        now_s = monotonic_s()
        self._link.run_to(now_s)
        return now_s

    def close(self) -> None:
        self._alarm.close()

    def _left(self, item: object, left_s: float) -> None:
        assert isinstance(item, Chunk)
        nbytes = len(item.payload)
        item.ends_busy = self.meter.leave(left_s, nbytes)
        item.ends_route_busy = item.meter.leave(left_s, nbytes)


def chunk_bytes(spec: LinkSpec) -> int:
    """How much of a flow is one message of the model: `CHUNK_S` at its highest rate, within bounds."""
    return int(max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, spec.flow_limit_Bps() * CHUNK_S)))


def buffer_bytes(spec: LinkSpec) -> int:
    """How much of a flow may wait or be on its way before its sender is paused: twice rate x (delay + wake-up)."""
    rate_Bps = spec.flow_limit_Bps()
    if rate_Bps == float("inf"):
        return FREE_BUFFER_BYTES
    wanted = 2 * rate_Bps * (spec.rtt_s / 2 + spec.jitter_s + WAKE_S)
    return int(max(MIN_BUFFER_BYTES, min(MAX_BUFFER_BYTES, wanted)))
