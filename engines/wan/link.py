"""The model of a line: what it is (`LinkSpec`) and how messages share one direction of it (`FluidLink`).

Nothing here does I/O, sleeps or reads a clock: time comes in as an argument. On virtual time the engine drives a
`FluidLink` with timers; on the wall clock the gateway drives the same class with sockets.
"""

from __future__ import annotations

import difflib
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from traces.errors import UserError

# Preset key -> (field, factor to its SI unit). `null` stands for "no limit" where the field may be None.
_PRESET_KEYS: dict[str, tuple[str, float]] = {
    "rate_mbps": ("rate_bps", 1e6),
    "rtt_ms": ("rtt_s", 1e-3),
    "jitter_ms": ("jitter_s", 1e-3),
    "flow_mbps": ("flow_rate_bps", 1e6),
}
_LIMITS = ("rate_bps", "flow_rate_bps")


class LinkSpecError(UserError, ValueError):
    """A line that cannot be: the message names the key, what it was, and what it must be."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A line, the same in both directions. Checked when made: raises `LinkSpecError`.

    `rate_bps` is shared by all flows of one direction, `flow_rate_bps` caps each flow (one TCP connection's window over
    the round trip); None is no limit. A byte arrives rtt_s / 2 after it has left, plus jitter: uniform in
    [0, jitter_s), drawn per message. `lanes` is the size of the connection pool that uses the line. Loss and slow start
    are not modelled: connections are warm, and a flow has its full share from its first byte.
    """

    name: str
    rate_bps: float | None = None
    rtt_s: float = 0.0
    jitter_s: float = 0.0
    flow_rate_bps: float | None = None
    lanes: int = 4

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `LinkSpecError` for the first field that is wrong."""
        if not isinstance(self.name, str) or not self.name:
            raise LinkSpecError(f"name: must be a word, got {self.name!r}")
        for key in _LIMITS:
            if getattr(self, key) is not None:
                _check_number(key, getattr(self, key), is_zero_allowed=False)
        for key in ("rtt_s", "jitter_s"):
            _check_number(key, getattr(self, key), is_zero_allowed=True)
        if not isinstance(self.lanes, int) or isinstance(self.lanes, bool) or self.lanes < 1:
            raise LinkSpecError(f"lanes: must be a whole number of at least 1, got {self.lanes!r}")

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> LinkSpec:
        """From a preset's keys: name, rate_mbps, rtt_ms, jitter_ms, flow_mbps, lanes. Raises `LinkSpecError`."""
        known = ["name", *_PRESET_KEYS, "lanes"]
        values: dict[str, object] = {}
        _refuse_unknown(config, known)
        for key, value in config.items():
            if key not in _PRESET_KEYS:
                values[key] = value
                continue
            target, factor = _PRESET_KEYS[key]
            if value is None and target in _LIMITS:
                values[target] = None
            else:
                values[target] = _check_number(key, value, is_zero_allowed=target not in _LIMITS) * factor
        if "name" not in values:
            raise LinkSpecError("name: a line needs one")
        return cls(**values)  # type: ignore[arg-type]  # validate() checks name and lanes

    def unshaped(self) -> LinkSpec:
        """The same line without limits and delay: for priming, which is not measured."""
        return replace(self, rate_bps=None, rtt_s=0.0, jitter_s=0.0, flow_rate_bps=None)

    def as_dict(self) -> dict[str, object]:
        """Field by field, in SI units."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> LinkSpec:
        """What `as_dict` gave. Raises `LinkSpecError` that names the key."""
        _refuse_unknown(values, [entry.name for entry in fields(cls)])
        if "name" not in values:
            raise LinkSpecError("name: a line needs one")
        return cls(**values)  # type: ignore[arg-type]  # validate() checks them all

    def flow_limit_Bps(self, num_active: int = 1) -> float:
        """Bytes per second that each of `num_active` backlogged flows gets; inf without a limit.

        All flows have the same cap, so max-min fairness is min(cap, rate / n): what a capped flow leaves over, no other
        flow could take either.
        """
        cap = math.inf if self.flow_rate_bps is None else self.flow_rate_bps / 8
        share = math.inf if self.rate_bps is None else self.rate_bps / 8 / max(1, num_active)
        return min(cap, share)


def _refuse_unknown(keys: Iterable[str], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
            raise LinkSpecError(f"{key}: no such key of a line; {hint}")


def _check_number(key: str, value: object, *, is_zero_allowed: bool) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and (value > 0 or (is_zero_allowed and value == 0)):  # type: ignore[arg-type,operator]
        return float(value)  # type: ignore[arg-type]
    bound = "of at least 0" if is_zero_allowed else "above 0 (null: no limit)"
    raise LinkSpecError(f"{key}: must be a finite number {bound}, got {value!r}")


class Delivery(NamedTuple):
    """One message at the far end. Its last byte left at `left_s`."""

    deliver_s: float
    item: object
    left_s: float


@dataclass(slots=True)
class _Flow:
    """A flow's queue of (nbytes, seq, item). While it is not empty, its head has left at the service `head_end`."""

    queue: deque[tuple[int, int, object]] = field(default_factory=deque)
    head_end: float = 0.0
    last_delivery_s: float = -math.inf
    bytes_sent: int = 0


class FluidLink:
    """One direction of a line: max-min fair fluid sharing between flows, each at most at its cap. No I/O.

    Messages of one flow are FIFO; the head of every backlogged flow is served at the flow's share, all at the same
    time. A message is delivered when its last byte has left, plus rtt / 2, plus jitter, and never before its
    predecessor in the flow. Keeping that order makes jitter j later than its mean: messages that leave with gaps
    g >= j are j / 2 late on average, dense ones about j - sqrt(pi * g * j / 2) (a maximum over earlier draws).

    All active flows get the same service, so one number (`_served`: bytes given to each since the line was last idle)
    and a heap of the heads' ends are the whole state: O(log flows) a message, and equal inputs give equal floats.
    Times are seconds on the caller's clock and must not go back. `on_left(item, left_s)` is told of each message as its
    last byte leaves, in order of time.
    """

    def __init__(self, spec: LinkSpec, seed: int = 0, on_left: Callable[[object, float], None] | None = None) -> None:
        self.spec = spec
        self._on_left = on_left
        self.bytes_sent = 0  # of messages whose last byte has left
        self.bytes_dropped = 0
        self.bytes_accepted = 0
        self._random = random.Random(seed)
        self._flows: dict[str, _Flow] = {}
        self._heads: list[tuple[float, int, str]] = []  # (head_end, seq, flow); a dropped flow leaves a stale entry
        self._deliveries: list[tuple[float, int, Delivery]] = []
        self._num_active = 0
        self._served = 0.0
        self._now_s = -math.inf
        self._busy_s = 0.0
        self._num_messages = 0

    # --- in and out ---------------------------------------------------------------------------------------------------

    def send(self, now_s: float, flow: str, nbytes: int, item: object) -> None:
        """Queue a message of `nbytes` (0 is allowed: it marks a place in the flow)."""
        if nbytes < 0:
            raise ValueError(f"nbytes: must be at least 0, got {nbytes}")
        self.run_to(now_s)
        state = self._flows.setdefault(flow, _Flow())
        seq = self._num_messages
        self._num_messages += 1
        self.bytes_accepted += nbytes
        state.queue.append((nbytes, seq, item))
        if len(state.queue) == 1:
            self._num_active += 1
            self._begin_head(flow, state)
            if self._head_due_s() <= now_s:  # an unlimited line, or nothing to carry
                self.run_to(now_s)

    def next_event_s(self) -> float | None:
        """The earliest time at which `advance` may deliver something if nothing else is sent; None: nothing waits."""
        due_s = self._deliveries[0][0] if self._deliveries else math.inf
        if self._num_active:
            due_s = min(due_s, self._head_due_s() + self.spec.rtt_s / 2)
        return None if due_s == math.inf else due_s

    def advance(self, now_s: float) -> list[tuple[float, object]]:
        """All deliveries due until `now_s`, in order of time: (deliver_s, item)."""
        return [(delivery.deliver_s, delivery.item) for delivery in self.take_due(now_s)]

    def take_due(self, now_s: float) -> list[Delivery]:
        """As `advance`, with when each message left."""
        self.run_to(now_s)
        due = []
        while self._deliveries and self._deliveries[0][0] <= now_s:
            due.append(heapq.heappop(self._deliveries)[2])
        return due

    def drop(self, now_s: float, flow: str) -> list[object]:
        """Forget a flow: what has not left never will; what has left still arrives. Returns the items dropped."""
        self.run_to(now_s)
        state = self._flows.pop(flow, None)
        if state is None:
            return []
        self.bytes_dropped += sum(nbytes for nbytes, _, _ in state.queue)
        if state.queue:
            self._num_active -= 1
            if not self._num_active:
                self._fall_idle()
        return [item for _, _, item in state.queue]

    def set_spec(self, now_s: float, spec: LinkSpec) -> None:
        """Another line from now on. What has left keeps its time of arrival; order within a flow holds."""
        self.run_to(now_s)
        self.spec = spec
        self.run_to(now_s)  # without limits the backlog leaves at once

    # --- readings (as of the last call that carried a time) -----------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one flow had something to send."""
        return self._busy_s

    @property
    def num_active_flows(self) -> int:
        return self._num_active

    @property
    def share_Bps(self) -> float:
        """Bytes per second that each active flow gets; inf without a limit."""
        return self.spec.flow_limit_Bps(self._num_active)

    def backlog_bytes(self, flow: str | None = None) -> int:
        """Bytes of messages whose last byte has not left, of one flow or of all."""
        if flow is None:
            return self.bytes_accepted - self.bytes_sent - self.bytes_dropped
        state = self._flows.get(flow)
        return 0 if state is None else sum(nbytes for nbytes, _, _ in state.queue)

    def flow_bytes_sent(self) -> dict[str, int]:
        """Bytes of messages that have left, by flow (those not dropped)."""
        return {name: state.bytes_sent for name, state in self._flows.items()}

    def expected_transfer_s(self, nbytes: int, now_s: float) -> float:
        """How long `nbytes` on one more flow would take to arrive if the flows active at `now_s` stay so."""
        self.run_to(now_s)
        return nbytes / self.spec.flow_limit_Bps(self._num_active + 1) + self.spec.rtt_s / 2

    # --- service ------------------------------------------------------------------------------------------------------

    def _begin_head(self, flow: str, state: _Flow) -> None:
        nbytes, seq, _ = state.queue[0]
        state.head_end = self._served + nbytes
        heapq.heappush(self._heads, (state.head_end, seq, flow))

    def _head_due_s(self) -> float:
        """When the first of all heads will have left. Needs an active flow."""
        while True:
            end, seq, name = self._heads[0]
            state = self._flows.get(name)
            if state is not None and state.queue and state.queue[0][1] == seq:
                return self._now_s + max(0.0, end - self._served) / self.share_Bps
            heapq.heappop(self._heads)  # its flow was dropped

    def run_to(self, now_s: float) -> None:
        """Serve until `now_s`: each head leaves at its exact time, however late this is called."""
        if now_s < self._now_s:
            raise ValueError(f"time went back from {self._now_s!r} to {now_s!r} s")
        while self._num_active:
            due_s = self._head_due_s()
            if due_s > now_s:
                self._served += (now_s - self._now_s) * self.share_Bps
                self._busy_s += now_s - self._now_s
                break
            self._busy_s += due_s - self._now_s
            self._now_s = due_s
            self._leave()
        self._now_s = now_s

    def _leave(self) -> None:
        end, seq, name = heapq.heappop(self._heads)
        state = self._flows[name]
        self._served = max(self._served, end)  # exact at the event: no error adds up over a long backlog
        nbytes, _, item = state.queue.popleft()
        self.bytes_sent += nbytes
        state.bytes_sent += nbytes
        if state.queue:
            self._begin_head(name, state)
        else:
            self._num_active -= 1
            if not self._num_active:
                self._fall_idle()
        jitter_s = self._random.random() * self.spec.jitter_s if self.spec.jitter_s else 0.0
        deliver_s = max(self._now_s + self.spec.rtt_s / 2 + jitter_s, state.last_delivery_s)
        state.last_delivery_s = deliver_s
        heapq.heappush(self._deliveries, (deliver_s, seq, Delivery(deliver_s, item, self._now_s)))
        if self._on_left is not None:
            self._on_left(item, self._now_s)

    def _fall_idle(self) -> None:
        self._served = 0.0
        self._heads.clear()
