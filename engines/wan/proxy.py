"""One proxied connection: two sockets, and what each receives travels to the other through its direction's shaper.

Bytes stay whole and in order; an end of stream (half-close) and a reset travel as marks behind the bytes before them.
The TCP handshake itself is not delayed: it is local, and warm connections are what the line is modelled for.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

from engines.wan.meter import Meter
from engines.wan.shaper import Chunk, Shaper

_NO_BYTES = memoryview(b"")
_NO_LINGER = struct.pack("ii", 1, 0)
_WRITE_BUFFER_BYTES = 256 * 1024


class Side(asyncio.Protocol):
    """One socket. What it receives is this side's flow; the other side is where the flow's chunks are written."""

    def __init__(self, pair: Pair, flow: str, shaper: Shaper, meter: Meter) -> None:
        self._pair = pair
        self._flow = flow
        self._shaper = shaper
        self._meter = meter
        self._transport: asyncio.Transport | None = None
        self._before_connect: list[Chunk] = []  # arrived here before this side's socket was there
        self._held_bytes = 0  # received and not yet written to the other side
        self._is_write_paused = False
        self._is_read_paused = False
        self._is_lost = False
        self.other: Side = self
        self.is_ended = False  # the end of this side's stream has been passed on

    # --- the socket ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are none by inheritance
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        early, self._before_connect = self._before_connect, []
        for chunk in early:
            self.write(chunk)
        self.update_reading()
        self.other.update_reading()
        if self._pair.is_closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        size = self._pair.chunk_bytes()
        view = memoryview(data)
        self._held_bytes += len(data)
        for begin in range(0, len(data), size):
            self._shaper.send(self._flow, Chunk(self, self._meter, view[begin : begin + size]))
        self._shaper.pump()
        self.update_reading()

    def eof_received(self) -> bool:
        self._mark("eof")
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._pair.is_closed:
            self._pair.forget_if_lost()
            return
        self._shaper_of_other_drop()
        self._mark("reset")  # behind what this side has sent, as on a real line
        self._pair.forget_if_lost()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.other.update_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.other.update_reading()

    # --- the flow -----------------------------------------------------------------------------------------------------

    def arrived(self, chunk: Chunk) -> None:
        """A chunk of this side's flow is at the far end."""
        self._held_bytes -= len(chunk.payload)
        self.other.write(chunk)
        if self._is_read_paused:
            self.update_reading()

    def write(self, chunk: Chunk) -> None:
        """Pass a chunk of the other side's flow on to this side's socket."""
        if self._transport is None:
            self._before_connect.append(chunk)
        elif chunk.mark == "reset":
            self._pair.close()
        elif self._is_lost or self._transport.is_closing():
            return
        elif chunk.mark == "eof":
            self._transport.write_eof()
            self.other.is_ended = True
            self._pair.close_if_ended()
        else:
            self._transport.write(chunk.payload)

    def update_reading(self) -> None:
        """Read while the flow's buffer has room and the other socket takes what arrives: bounded memory, no loss."""
        if self._transport is None or self._transport.is_closing():
            return
        limit = self._pair.buffer_bytes()
        room = limit if not self._is_read_paused else limit // 2
        may_read = self._held_bytes < room and not self.other._is_write_paused and self.other._transport is not None
        if may_read and self._is_read_paused:
            self._is_read_paused = False
            self._transport.resume_reading()
        elif not may_read and not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def finish(self, *, is_reset: bool) -> None:
        """Close the socket: at once, or after what is written."""
        if self._transport is None:
            self._is_lost = True
        elif is_reset:
            # Without lingering the kernel sends a reset, not an orderly end: a cut stream must not look whole.
            if not self._is_lost:
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        else:
            self._transport.close()
        self._shaper.drop(self._flow)

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def _mark(self, mark: str) -> None:
        self._shaper.send(self._flow, Chunk(self, self._meter, _NO_BYTES, mark))
        self._shaper.pump()

    def _shaper_of_other_drop(self) -> None:
        self.other._shaper.drop(self.other._flow)


class Pair:
    """The two sides of one connection, and when both are to be closed."""

    def __init__(
        self,
        flow: str,
        shapers: tuple[Shaper, Shaper],
        meters: tuple[Meter, Meter],
        chunk_bytes: Callable[[], int],
        buffer_bytes: Callable[[], int],
        on_end: Callable[[Pair], None],
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.buffer_bytes = buffer_bytes
        self.is_closed = False
        self._on_end = on_end
        self.client = Side(self, flow, shapers[0], meters[0])
        self.target = Side(self, flow, shapers[1], meters[1])
        self.client.other, self.target.other = self.target, self.client

    def close_if_ended(self) -> None:
        if self.client.is_ended and self.target.is_ended:
            self._finish(is_reset=False)

    def close(self) -> None:
        """Reset both sides."""
        self._finish(is_reset=True)

    def update_reading(self) -> None:
        self.client.update_reading()
        self.target.update_reading()

    def forget_if_lost(self) -> None:
        if self.client.is_lost and self.target.is_lost:
            self._on_end(self)

    def _finish(self, *, is_reset: bool) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.client.finish(is_reset=is_reset)
        self.target.finish(is_reset=is_reset)
        self.forget_if_lost()
