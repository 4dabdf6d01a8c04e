"""Which requests of a trace are sent, and when: pure functions of the trace and of time.

Nothing here sends, sleeps or reads a clock. Times are seconds; `*_trace_s` are the trace's own, all others are the
run's, which start
at 0 with the measurement. Time compression divides arrivals, think gaps and tool gaps alike.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from traces.errors import UserError
from traces.profile import bin_shares

if TYPE_CHECKING:
    from harness.config import RunConfig
    from harness.replay import Prompts

ServiceTime = Callable[[int, int], float]
"""(prompt tokens, output tokens) -> expected seconds from sending to the last token."""

MIN_COMPRESSION, MAX_COMPRESSION = 0.05, 1.0e4
NUM_CANDIDATES = 64
HORIZON = 4
"""A slice is cut from so many times its requests of the sampled sessions, in order of the trace's time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the trace, as far as sending it needs. Lengths in tokens; `prefix_id` names a request or a root."""

    request_id: str
    session_id: str
    root_session_id: str
    turn: int
    kind: str
    prefix_id: str | None
    keep_tokens: int
    input_tokens: int
    output_tokens: int
    arrival_trace_s: float | None
    after: tuple[str, ...]
    gap_trace_s: float
    is_gap_from_start: bool
    service_trace_s: float | None

    def md_hit(self, page_size: int) -> int:
        """Tokens that a cache which keeps all, outputs too, would hit: whole pages, never the last token."""
        if self.prefix_id is None:
            return 0
        return min(self.keep_tokens, self.input_tokens - 1) // page_size * page_size

    def hit_share(self, page_size: int) -> float:
        """`md_hit` over the prompt."""
        return self.md_hit(page_size) / self.input_tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send. With `start_s` it is due then; else `gap_s` after the last of `after` has ended (or
    started).

    `timeline_s` is when the session's own timeline would have been: as in the trace, compressed.
    """

    row: Row
    start_s: float | None
    after: tuple[str, ...]
    gap_s: float
    timeline_s: float | None


@dataclass(frozen=True, slots=True)
class Selection:
    """What a run sends. `prime_ids` are requests or roots to be in the caches before; `entries` maps a session
    that was running to
    the turn that it enters at. With `lanes`, sessions start as lanes fall free; `max_in_flight` bounds requests,
    not waiting turns."""

    planned: tuple[Planned, ...]
    prime_ids: tuple[str, ...]
    time_compression: float
    entries: Mapping[str, int]
    lanes: int | None = None
    max_in_flight: int | None = None

    @property
    def num_sessions(self) -> int:
        return len({planned.row.session_id for planned in self.planned})


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace as the running side needs it. `by_id` has roots too; `info` is what the manifest says of it; `prompts`
    makes a new source of prompts for the rows that a run sends."""

    rows: Sequence[Row]
    by_id: Mapping[str, Row]
    slice_start_s: float
    has_sessions: bool
    info: Mapping[str, object]
    prompts: Callable[[RunConfig, Sequence[Row]], Prompts]


# --- when, as pure functions ------------------------------------------------------------------------------------------


def starts_at_rate(count: int, rate_per_s: float, kind: Literal["constant", "poisson"], seed: int) -> list[float]:
    """Start times of `count` sessions: evenly spaced, or with exponential gaps drawn from `seed`."""
    if rate_per_s <= 0:
        raise UserError(f"load.sessions_per_s: must be above 0, got {rate_per_s}")
    if kind == "constant":
        return [i / rate_per_s for i in range(count)]
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_per_s, size=count)
    return [float(t) for t in np.cumsum(gaps)]


def trace_timeline(rows: Sequence[Row], service_s: ServiceTime) -> tuple[dict[str, float], dict[str, float]]:
    """Start and end of every request on the trace's own clock. Rows must follow what they come after.

    An end is start + the trace's service time, or the expected one where the trace has none. A row whose `after`
    is outside
    of `rows` and that has no arrival raises UserError.
    """
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for row in rows:
        if row.arrival_trace_s is not None:
            at = row.arrival_trace_s
        else:
            times = start if row.is_gap_from_start else end
            missing = [name for name in row.after if name not in times]
            if missing or not row.after:
                raise UserError(
                    f"trace: request {row.request_id} comes after {missing or 'nothing'}, which no earlier row has"
                )
            at = max(times[name] for name in row.after) + row.gap_trace_s
        start[row.request_id] = at
        took = (
            row.service_trace_s if row.service_trace_s is not None else service_s(row.input_tokens, row.output_tokens)
        )
        end[row.request_id] = at + took
    return start, end


def run_timeline(planned: Iterable[Planned], service_s: ServiceTime, compression: float = 1.0) -> dict[str, float]:
    """Expected start of each request in the run, if each takes `service_s` and times are compressed that many
    times more.
    """
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for item in planned:
        row = item.row
        times = start if row.is_gap_from_start else end
        if item.start_s is not None:
            at = item.start_s / compression
        else:
            at = max([times[name] for name in item.after]) + item.gap_s / compression
        start[row.request_id] = at
        end[row.request_id] = at + service_s(row.input_tokens, row.output_tokens)
    return start


def hit_bins(hits: Sequence[float]) -> list[float]:
    """Share of requests in each of the seven bins of prefix hit, in percent; empty when there are none."""
    return [100.0 * share for share in bin_shares(hits)] if hits else []


# --- which requests ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """How large a slice is asked for. `num_running` sessions run at the start; `time_compression` None: chosen to
    fit the rate.
    """

    num_requests: int
    requests_per_s: float
    num_running: int = 24
    max_sessions: int | None = None
    time_compression: float | None = None

    @property
    def duration_s(self) -> float:
        return self.num_requests / self.requests_per_s


class SessionPool:
    """The sessions around one start instant, as trees: a main session and its sub-agents enter together."""

    def __init__(self, rows: Sequence[Row], start_trace_s: float, service_s: ServiceTime) -> None:
        self.start_trace_s = start_trace_s
        self.service_s = service_s
        self.begins, _ = trace_timeline(rows, service_s)
        self.trees: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self.trees[row.root_session_id].append(row)
        self.running: list[str] = []
        self.new: list[str] = []
        for root, tree in self.trees.items():
            starts = [self.begins[row.request_id] for row in tree]
            if max(starts) >= start_trace_s:
                (self.running if min(starts) < start_trace_s else self.new).append(root)

    def pick(self, num_running: int, salt: str) -> list[str]:
        """`num_running` of the running sessions by hash, and the same share of the new ones: the mix stays the
        trace's.
        """
        ranked = sorted(self.running, key=lambda root: _unit(salt, root))
        chosen = ranked[:num_running]
        share = 1.0 if len(chosen) == len(ranked) else _unit(salt, ranked[len(chosen)])
        return chosen + [root for root in self.new if _unit(salt, root) < share]

    def plan(self, roots: Iterable[str], compression: float, most: int | None = None) -> list[Planned]:
        """The first `most` requests of `roots` from the start instant on, in order of the trace's time."""
        rows = [
            row for root in roots for row in self.trees[root] if self.begins[row.request_id] >= self.start_trace_s
        ]  # fmt: skip
        rows = sorted(rows, key=lambda row: self.begins[row.request_id])[:most]
        inside = {row.request_id for row in rows}
        planned = []
        for row in rows:
            after = tuple(name for name in row.after if name in inside)
            at = (self.begins[row.request_id] - self.start_trace_s) / compression
            is_first = row.arrival_trace_s is not None or not after
            planned.append(Planned(row, at if is_first else None, after, row.gap_trace_s / compression, at))
        return planned

    def cut(self, planned: Sequence[Planned], want: Want) -> list[Planned]:
        """The first `num_requests` of `planned` in the expected order of the run."""
        at = run_timeline(planned, self.service_s)
        kept = sorted(planned, key=lambda item: at[item.row.request_id])[: want.num_requests]
        return [item for item in kept if at[item.row.request_id] < want.duration_s] or list(kept)


def select_snapshot(
    pool: SessionPool, want: Want, salt: str, page_size: int = 1, target_bins: Sequence[float] = ()
) -> Selection:
    """Sessions that run at the start instant enter at their next turn, new ones come as in the trace.

    Among a few samples of sessions the one is taken whose hit bins are nearest to `target_bins`. Raises UserError
    when nothing runs
    at that instant and nothing comes.
    """
    best: tuple[float, Selection] | None = None
    for candidate in range(NUM_CANDIDATES):
        selection = _one_snapshot(pool, want, f"{salt}/{candidate}")
        distance = bins_distance(hit_bins([item.row.hit_share(page_size) for item in selection.planned]), target_bins)
        if best is None or distance < best[0]:
            best = (distance, selection)
        if not target_bins or len(selection.entries) == len(pool.running):
            break  # every sample would be the same
    assert best is not None
    return best[1]


def bins_distance(bins: Sequence[float], target: Sequence[float]) -> float:
    """The largest difference of any bin, in points; infinite for an empty slice."""
    if not bins:
        return float("inf")
    return max((abs(a - b) for a, b in zip(bins, target, strict=True)), default=0.0) if target else 0.0


def _one_snapshot(pool: SessionPool, want: Want, salt: str) -> Selection:
    num_running = min(want.num_running, want.max_sessions or want.num_running, max(1, len(pool.running)))
    most = HORIZON * want.num_requests
    while True:
        roots = pool.pick(num_running, salt)[: want.max_sessions]
        if not roots:
            raise UserError("trace: no session runs at the slice's start and none comes later; choose another slice=")
        future = pool.plan(roots, 1.0, most)

        def count_at(compression: float, future: Sequence[Planned] = future) -> int:
            at = run_timeline(future, pool.service_s, compression)
            return sum(1 for t in at.values() if t < want.duration_s)

        compression = want.time_compression or fitting_compression(count_at, want.num_requests)
        is_all = num_running >= min(len(pool.running), want.max_sessions or len(pool.running))
        if is_all or count_at(compression) >= want.num_requests:
            break
        num_running = min(num_running + max(1, num_running // 4), len(pool.running))
    planned = _without_strays(pool.cut(pool.plan(roots, compression, most), want))
    inside = {item.row.request_id for item in planned}
    prime_ids = dict.fromkeys(
        item.row.prefix_id for item in planned if item.row.prefix_id is not None and item.row.prefix_id not in inside
    )
    entries: dict[str, int] = {}
    running = set(pool.running)
    for item in planned:
        if item.row.root_session_id in running:
            entries.setdefault(item.row.session_id, item.row.turn)
    return Selection(tuple(planned), tuple(prime_ids), compression, entries)


def select_from_start(
    rows: Sequence[Row], want: Want, service_s: ServiceTime, *, start_trace_s: float = 0.0
) -> Selection:
    """The trace's requests in its own order from `start_trace_s` on, caches cold: sessions that begin there, at
    trace times.
    """
    pool = SessionPool(rows, start_trace_s, service_s)
    if not pool.new:
        raise UserError("trace: no session begins after the slice's start; choose an earlier slice=")
    first = {root: min(pool.begins[row.request_id] for row in pool.trees[root]) for root in pool.new}
    roots = sorted(pool.new, key=lambda root: first[root])[
        : min(want.max_sessions or want.num_requests, want.num_requests)
    ]
    pool.start_trace_s = first[roots[0]]

    most = want.num_requests
    future = pool.plan(roots, 1.0, most)

    def count_at(compression: float) -> int:
        return sum(1 for t in run_timeline(future, service_s, compression).values() if t <= want.duration_s)

    compression = want.time_compression or fitting_compression(count_at, len(future))
    return Selection(tuple(_without_strays(pool.plan(roots, compression, most))), (), compression, {})


def started_at(selection: Selection, starts: Sequence[float]) -> Selection:
    """`selection` with its sessions started at `starts` in place of the trace's times."""
    first: dict[str, float] = {}
    planned = []
    for item in selection.planned:
        root = item.row.root_session_id
        if root not in first:
            if len(first) == len(starts):
                continue
            first[root] = starts[len(first)]
        planned.append(replace(item, start_s=first[root] if item.start_s is not None else None, timeline_s=None))
    return replace(selection, planned=tuple(planned))


def in_lanes(selection: Selection, lanes: int) -> Selection:
    """`selection` with at most `lanes` sessions at a time, each followed by the next; as many requests in flight
    at most.
    """
    if lanes < 1:
        raise UserError(f"load.concurrency: must be at least 1, got {lanes}")
    planned = tuple(
        replace(p, start_s=0.0 if p.start_s is not None else None, timeline_s=None) for p in selection.planned
    )
    return replace(selection, planned=planned, lanes=lanes, max_in_flight=lanes)


def fitting_compression(count_at: Callable[[float], int], wanted: int) -> float:
    """The smallest compression (3 digits) at which `count_at` reaches `wanted`; the largest allowed when none does."""
    low, high = np.log(MIN_COMPRESSION), np.log(MAX_COMPRESSION)
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if count_at(float(np.exp(middle))) >= wanted else (middle, high)
    return _rounded_up(float(np.exp(high)))


def _rounded_up(value: float) -> float:
    step = 10.0 ** (np.floor(np.log10(value)) - 2)
    return min(MAX_COMPRESSION, float(round(np.ceil(value / step) * step, 9)))


def _without_strays(planned: Sequence[Planned]) -> list[Planned]:
    """`planned` less what waits for a request that was cut off."""
    inside: set[str] = set()
    kept = []
    for item in planned:
        if item.start_s is not None or all(name in inside for name in item.after):
            inside.add(item.row.request_id)
            kept.append(item)
    return kept


def _unit(salt: str, name: str) -> float:
    digest = hashlib.blake2b(f"{salt}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
