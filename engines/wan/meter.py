"""What really passed one direction of a line, by route or in all: bytes, busy time, rate, delay, lateness.

It counts what happened, by the times at which chunks were written; what was intended comes from the model. It never
decides anything.
"""

from __future__ import annotations

from collections import Counter

from engines.wan.link import LinkSpec

# A chunk written later than this after its time is late.
LATE_S = 1e-3
_BIN_S = 2e-5


class Meter:
    """Counters of one route and direction, or of a whole direction.

    Bytes and busy time count from the start. Rate, delay and lateness count from the last `restart`, so that priming
    over an unshaped line does not mix in. Busy: at least one chunk waits to leave.
    """

    def __init__(self, spec: LinkSpec) -> None:
        self.num_connections = 0
        self.num_failed_connections = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self._busy_s = 0.0
        self._num_waiting = 0
        self._busy_from_s = 0.0
        self.restart(0.0, spec)

    def restart(self, now_s: float, spec: LinkSpec) -> None:
        """Rate, delay and lateness begin anew, on another line."""
        self._pause_busy(now_s)
        self._since_s = now_s
        self._half_rtt_s = spec.rtt_s / 2
        self._bytes_left = 0
        self._busy_before_s = self._busy_s
        self._tail_s = 0.0
        self._num_chunks = 0
        self._num_late = 0
        self._max_late_s = 0.0
        self._late_bins: Counter[int] = Counter()
        self._extra_bins: Counter[int] = Counter()

    def _pause_busy(self, now_s: float) -> None:
        if self._num_waiting:
            self._busy_s += now_s - self._busy_from_s
            self._busy_from_s = now_s

    def enter(self, now_s: float, nbytes: int) -> None:
        """A chunk begins to wait. Whatever left before `now_s` must have been told."""
        self.bytes_in += nbytes
        if not self._num_waiting:
            self._busy_from_s = now_s
        self._num_waiting += 1

    def leave(self, left_s: float, nbytes: int) -> bool:
        """A chunk's last byte has left; True if no other waits."""
        self._bytes_left += nbytes
        self._num_waiting -= 1
        if not self._num_waiting:
            self._busy_s += left_s - self._busy_from_s
        return not self._num_waiting

    def drop(self, now_s: float) -> None:
        """A chunk that waits will never leave."""
        self._pause_busy(now_s)
        self._num_waiting -= 1

    def write(self, now_s: float, deliver_s: float, left_s: float, nbytes: int, *, ends_busy: bool) -> None:
        """A chunk was written at `now_s` where `deliver_s` was intended."""
        self.bytes_out += nbytes
        if left_s < self._since_s:
            return
        late_s = now_s - deliver_s
        self._num_chunks += 1
        self._num_late += late_s > LATE_S
        self._max_late_s = max(self._max_late_s, late_s)
        self._late_bins[int(late_s / _BIN_S)] += 1
        self._extra_bins[int((now_s - left_s - self._half_rtt_s) / _BIN_S)] += 1
        if ends_busy:
            self._tail_s += late_s

    def as_dict(self, now_s: float) -> dict[str, float | int | None]:
        """`realised_rate_bps`: bytes over busy time, which ends when a period's last chunk was written, less its
        intended delay. `allowed_rate_bps`: the same by the model alone. `delay`: from leaving to the write, to 20 us.
        """
        self._pause_busy(now_s)
        busy_s = self._busy_s - self._busy_before_s
        extra = {q: _quantile(self._extra_bins, q) for q in (0.5, 0.95)}
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "connections": self.num_connections,
            "failed_connections": self.num_failed_connections,
            "busy_s": self._busy_s,
            "chunks": self._num_chunks,
            "allowed_rate_bps": _rate(self._bytes_left, busy_s),
            "realised_rate_bps": _rate(self._bytes_left, busy_s + self._tail_s),
            **{f"delay_p{round(q * 100)}_s": None if x is None else self._half_rtt_s + x for q, x in extra.items()},
            "late_p50_s": _quantile(self._late_bins, 0.5),
            "late_p95_s": _quantile(self._late_bins, 0.95),
            "late_max_s": self._max_late_s if self._num_chunks else None,
            "late_share": self._num_late / self._num_chunks if self._num_chunks else None,
        }


def _rate(nbytes: int, busy_s: float) -> float | None:
    return nbytes * 8 / busy_s if nbytes and busy_s > 0 else None


def _quantile(bins: Counter[int], q: float) -> float | None:
    """The middle of the bin that holds quantile `q`: a reading of a histogram, not of the values."""
    wanted = q * bins.total()
    seen = 0
    for index in sorted(bins):
        seen += bins[index]
        if seen >= wanted:
            return (index + 0.5) * _BIN_S
    return None
