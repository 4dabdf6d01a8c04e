"""P's side of KV transfers: what to send next, on which lane. It reads no bytes and opens no socket.

A transfer goes to one instance, by absolute position, and keeps one lane (one connection of a fixed pool) from its
first frame until its last is acknowledged. Frames in flight are bounded. What is not yet computed is not yet sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engines.pdd.messages import Target

MAX_FRAMES_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """[start, stop) of request `r` to `node` on `lane`; `is_last` carries T[0]."""

    r: str
    node: str
    lane: int
    start: int
    stop: int
    is_last: bool
    first_sent_ns: int


@dataclass(slots=True)
class Transfer:
    """[target.start, length) of one request to one instance. Positions below `available` are computed, below `sent`
    are sent."""

    r: str
    target: Target
    length: int
    available: int = 0
    sent: int = 0
    lane: int | None = None
    first_sent_ns: int = 0
    in_flight: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.sent == self.length and not self.in_flight


class KVSender:
    """All transfers of one P. `num_lanes` gives the size of the pool to one instance, by link name."""

    def __init__(self, num_lanes: dict[str, int], frame_tokens: int) -> None:
        self._num_lanes = num_lanes
        self._frame_tokens = frame_tokens
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._free_lanes: dict[str, deque[int]] = {}
        self._order: deque[tuple[str, str]] = deque()

    def open(self, r: str, targets: tuple[Target, ...], length: int) -> None:
        for target in targets:
            self._transfers[r, target.node] = Transfer(r, target, length, sent=target.start)
            self._order.append((r, target.node))
            if target.node not in self._free_lanes:
                self._free_lanes[target.node] = deque(range(self._num_lanes[target.link]))

    def make_available(self, r: str, upto: int) -> None:
        """The KV of [0, upto) is in place."""
        for transfer in self._of(r):
            transfer.available = max(transfer.available, upto)

    def pump(self, now_ns: int) -> list[Frame]:
        """Frames that can go now, in order of arrival of their requests."""
        frames: list[Frame] = []
        for key in self._order:
            transfer = self._transfers.get(key)
            if transfer is not None:
                self._send(transfer, now_ns, frames)
        return frames

    def _send(self, transfer: Transfer, now_ns: int, frames: list[Frame]) -> None:
        while transfer.sent < transfer.available and len(transfer.in_flight) < MAX_FRAMES_IN_FLIGHT:
            if transfer.lane is None:
                lanes = self._free_lanes[transfer.target.node]
                if not lanes:
                    return
                transfer.lane = lanes.popleft()
                transfer.first_sent_ns = now_ns
            start = transfer.sent
            stop = min(start + self._frame_tokens, transfer.available)
            transfer.sent = stop
            transfer.in_flight.add((start, stop))
            is_last = stop == transfer.length
            frames.append(
                Frame(transfer.r, transfer.target.node, transfer.lane, start, stop, is_last, transfer.first_sent_ns)
            )

    def on_applied(self, r: str, node: str, start: int, stop: int, *, is_gone: bool) -> bool:
        """A frame was applied (or its leg is gone: the transfer ends). Whether request `r` has nothing left to send
        anywhere."""
        transfer = self._transfers.get((r, node))
        if transfer is not None:
            transfer.in_flight.discard((start, stop))
            if is_gone or transfer.is_done:
                self._close(transfer)
        return not any(True for _ in self._of(r))

    def cancel(self, r: str) -> None:
        """Drop all transfers of `r`. Frames that are on their way hold copies, so the pages may go at once."""
        for transfer in list(self._of(r)):
            self._close(transfer)

    def has(self, r: str) -> bool:
        return any(True for _ in self._of(r))

    def _of(self, r: str) -> list[Transfer]:
        return [transfer for (name, _), transfer in self._transfers.items() if name == r]

    def _close(self, transfer: Transfer) -> None:
        key = (transfer.r, transfer.target.node)
        del self._transfers[key]
        self._order.remove(key)
        if transfer.lane is not None:
            self._free_lanes[transfer.target.node].append(transfer.lane)
