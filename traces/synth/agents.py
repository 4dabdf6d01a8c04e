"""`agent_jan` and `agent_feb`: months of coding-agent sessions with the skewed prefix hits that the published reports describe.

Published: mean hit 0.90; 75% (January) and 77.5% (February) of requests above 0.95; 64K tokens of input and 1K of output on average; 3-4%
singular requests. The seven bins inside that envelope are our reading, shaped by real coding-agent sessions. Misses stand in the content
(`mode` baked): a request that lost its cache keeps less of its prefix.

A session is made from (month, seed, hour block, number) alone, so any window of the month is the same whichever process makes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from traces.errors import TraceError
from traces.table import Root, Trace, TraceMeta, TraceRow

HOUR_S = 3600.0
DAY_S = 86_400.0
NUM_APPS = 8
MAX_SESSION_S = 12 * HOUR_S  # sessions that began earlier than this before a window are left out of it


@dataclass(frozen=True, slots=True)
class Month:
    """The knobs of a month, and what each moves. Lengths in tokens, times in seconds; `*_mu`, `*_sigma` of lognormals.

    Hit bins: `tool_mu`, `tool_sigma` (new tokens per tool result) set the shares above 0.95; `miss_share`, `edit_share`, `evict_s` the low
    tail; `compact_at` the mean context and with it all bins; `drift` moves `tool_mu` over the month.
    """

    name: str
    num_days: int
    tool_mu: float
    tool_sigma: float
    miss_share: float
    edit_share: float
    fork_share: float = 0.012
    sessions_per_hour: float = 40.0
    calls_mu: float = 3.5
    calls_sigma: float = 1.1
    max_calls: int = 1500
    user_share: float = 1.0 / 9.0
    user_mu: float = 5.2
    user_sigma: float = 1.2
    output_mu: float = 6.27
    output_sigma: float = 1.17
    root_median: float = 14_000.0
    root_sigma: float = 0.4
    first_mu: float = 7.2
    first_sigma: float = 1.1
    compact_at: float = 108_000.0
    compact_to_mu: float = 10.6
    compact_to_sigma: float = 0.3
    max_new: int = 30_000
    evict_s: float = 1_900.0
    tool_gaps_s: tuple[float, ...] = (0.5, 8.0, 120.0)
    tool_gap_weights: tuple[float, ...] = (0.62, 0.33, 0.05)
    user_gap_median_s: float = 84.0
    user_gap_sigma: float = 1.5
    singular_share: float = 0.036
    singular_median: float = 96_000.0
    drift: float = 0.06


MONTHS = {
    "agent_jan": Month("agent_jan", 31, tool_mu=6.46, tool_sigma=1.41, miss_share=0.005, edit_share=0.022),
    "agent_feb": Month("agent_feb", 28, tool_mu=6.39, tool_sigma=1.41, miss_share=0.001, edit_share=0.008),
}


def generate(name: str, *, seed: int = 0, start_s: float = 0.0, duration_s: float = HOUR_S, lookback_s: float = MAX_SESSION_S) -> Trace:
    """All sessions that begin in [start_s - lookback_s, start_s + duration_s), whole, in order of arrival.

    Times count from the month's first midnight. With the lookback, sessions that are running at `start_s` are there with their earlier turns,
    so a caller can prime their history and begin in a steady state. Raises TraceError for an unknown month or a window outside of it.
    """
    month = MONTHS.get(name)
    if month is None:
        raise TraceError("trace", "trace.name", f"unknown month {name!r}", f"choose one of {', '.join(MONTHS)}")
    if not (0 <= start_s < month.num_days * DAY_S and duration_s > 0):
        raise TraceError(name, "start_s", f"{start_s} is outside of the month's {month.num_days} days")
    roots = _roots(month, seed)
    rows: list[TraceRow] = []
    begin_s, end_s = start_s - lookback_s, start_s + duration_s
    for block in range(math.floor(begin_s / HOUR_S), math.ceil(end_s / HOUR_S)):
        for session_rows in _block(month, seed, block, roots):
            if begin_s <= (session_rows[0].arrival_s or 0.0) < end_s:
                rows.extend(session_rows)
    rows = _shifted(rows, begin_s)
    meta = TraceMeta(
        name=name, origin="synthetic", source="traces/synth/agents.py", licence="Apache-2.0", mode="baked",
        answers="reused", notes={"seed": seed, "start_s": start_s, "duration_s": duration_s, "lookback_s": lookback_s},
    )  # fmt: skip
    return Trace(tuple(rows), roots, meta)


def _shifted(rows: list[TraceRow], begin_s: float) -> list[TraceRow]:
    """Arrivals before the month's first midnight (the lookback's) are negative: count from the window's begin instead if so."""
    if begin_s >= 0:
        return rows
    return [row if row.arrival_s is None else replace(row, arrival_s=row.arrival_s - begin_s) for row in rows]


def _rng(*parts: object) -> np.random.Generator:
    key = hashlib.blake2b("\x00".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _roots(month: Month, seed: int) -> dict[str, Root]:
    rng = _rng(month.name, seed, "roots")
    sizes = np.exp(rng.normal(math.log(month.root_median), month.root_sigma, size=NUM_APPS))
    # The median of eight draws wanders; their shape is kept and their median set.
    sizes *= month.root_median / float(np.median(sizes))
    return {f"{month.name}/app{i}": Root(f"{month.name}/app{i}", int(size), "global") for i, size in enumerate(sizes)}


def _rhythm(block: int) -> float:
    """Load of an hour against the mean: a working-day hump, quieter nights and weekends."""
    hour, day = block % 24, block // 24 % 7
    hump = 1.0 + 0.75 * math.sin((hour - 9) / 24 * 2 * math.pi)
    return hump * (0.55 if day in (5, 6) else 1.18)


def _block(month: Month, seed: int, block: int, roots: dict[str, Root]) -> Iterator[list[TraceRow]]:
    """The sessions that begin in one hour: a Poisson count whose rate is Gamma-mixed and follows day and week."""
    rng = _rng(month.name, seed, "block", block)
    rate = month.sessions_per_hour * _rhythm(block) * rng.gamma(8.0, 1 / 8.0)
    starts = np.sort(rng.random(rng.poisson(rate))) * HOUR_S + block * HOUR_S
    mean_calls = math.exp(month.calls_mu + month.calls_sigma**2 / 2)
    num_singular = month.singular_share / (1 - month.singular_share) * mean_calls * len(starts)
    batches = []
    while num_singular > 0 and rng.random() < min(1.0, num_singular / 3):
        batches.append((float(rng.random()) * HOUR_S + block * HOUR_S, int(rng.integers(1, 6))))
        num_singular -= batches[-1][1]
    events = [(float(start), "session", i) for i, start in enumerate(starts)]
    events += [(start, "batch", size) for start, size in batches]
    for number, (start_s, kind, value) in enumerate(sorted(events)):
        name = f"{month.name}/{seed}/{block}.{number}"
        if kind == "session":
            yield _Session(month, seed, name, start_s, roots).rows()
        else:
            yield from _batch(month, seed, name, start_s, value)


def _batch(month: Month, seed: int, name: str, start_s: float, size: int) -> Iterator[list[TraceRow]]:
    """One-shots: ultra-long input, ultra-short output, nothing shared."""
    rng = _rng(month.name, seed, "batch", name)
    for i in range(size):
        row_id = f"{name}.{i}"
        yield [
            TraceRow(
                request_id=f"{row_id}/0", session_id=row_id, root_session_id=row_id, turn=0, kind="singular", prefix_id=None,
                keep_tokens=0, input_tokens=int(np.clip(month.singular_median * math.exp(rng.normal(0, 0.3)), 32_000, 180_000)),
                output_tokens=int(np.clip(150 * math.exp(rng.normal(0, 0.6)), 5, 499)),
                arrival_s=start_s + 2.0 * i * float(rng.random()),
            )
        ]  # fmt: skip


class _Session:
    """One agent session: rows of its calls, sub-agents' in between."""

    def __init__(self, month: Month, seed: int, name: str, start_s: float, roots: dict[str, Root]) -> None:
        self._month = month
        self._rng = _rng(month.name, seed, "session", name)
        self._name = name
        self._start_s = start_s
        weights = 1.0 / np.arange(1, NUM_APPS + 1) ** 1.1
        self._root = roots[f"{month.name}/app{self._rng.choice(NUM_APPS, p=weights / weights.sum())}"]
        day = start_s / DAY_S
        self._tool_mu = month.tool_mu + month.drift * math.sin(2 * math.pi * day / month.num_days)
        self._num_subagents = 0

    def rows(self) -> list[TraceRow]:
        calls = int(np.clip(self._lognormal(self._month.calls_mu, self._month.calls_sigma), 1, self._month.max_calls))
        rows: list[TraceRow] = []
        self._play(rows, self._name, "main", calls, after=None, first_mu=self._month.first_mu)
        return rows

    def _play(
        self, rows: list[TraceRow], session_id: str, kind: str, calls: int, after: str | None, first_mu: float
    ) -> None:
        month, rng = self._month, self._rng
        prefix_id, total, waits_for = self._root.root_id, self._root.tokens, after
        for turn in range(calls):
            is_user = turn == 0 or rng.random() < month.user_share
            gap_s, gap_kind = self._gap(is_user)
            if turn == 0:
                keep, new = self._root.tokens, self._lognormal(first_mu, month.first_sigma)
            elif is_user:
                keep, new = total, self._lognormal(month.user_mu, month.user_sigma)
            else:
                keep, new = total, self._lognormal(self._tool_mu, month.tool_sigma)
            new = min(max(1.0, new), month.max_new)
            if turn:
                keep, new = self._lose(keep, new, gap_s)
            input_tokens = int(keep) + int(new)
            output_tokens = int(np.clip(self._lognormal(month.output_mu, month.output_sigma), 1, 16_000))
            is_first = turn == 0 and after is None
            row = TraceRow(
                request_id=f"{session_id}/{turn}", session_id=session_id, root_session_id=self._name, turn=turn, kind=kind,
                prefix_id=prefix_id if keep else None, keep_tokens=int(keep), input_tokens=input_tokens,
                output_tokens=output_tokens, arrival_s=self._start_s if is_first else None,
                after=() if is_first else (waits_for or "",), delay_s=None if is_first else round(gap_s, 3),
                delay_from=None if is_first else "end", delay_kind=None if is_first else gap_kind,
            )  # fmt: skip
            rows.append(row)
            prefix_id, total, waits_for = row.request_id, input_tokens + output_tokens, row.request_id
            if kind == "main" and turn + 1 < calls and rng.random() < month.fork_share:
                waits_for = self._fork(rows, row)

    def _fork(self, rows: list[TraceRow], parent: TraceRow) -> str:
        """A sub-agent with the same system prompt; the parent waits for its last call."""
        self._num_subagents += 1
        name = f"{self._name}~{self._num_subagents}"
        self._play(rows, name, "subagent", 1 + int(self._rng.geometric(1 / 8)), after=parent.request_id, first_mu=7.5)
        return rows[-1].request_id

    def _lose(self, keep: float, new: float, gap_s: float) -> tuple[float, float]:
        """What a turn loses of its prefix: compaction, idle eviction, a rare miss, an edit of the history."""
        month, rng = self._month, self._rng
        root = min(self._root.tokens, keep)
        if keep + new > month.compact_at * (1 + 0.1 * rng.normal()):
            return root, min(self._lognormal(month.compact_to_mu, month.compact_to_sigma), 60_000.0)
        draw = rng.random()
        if rng.random() < 1 - math.exp(-gap_s / month.evict_s) or draw < month.miss_share:
            return root, keep + new - root
        if draw < month.miss_share + month.edit_share:
            kept = root + (keep - root) * (0.25 + 0.73 * rng.random())
            return kept, keep + new - kept
        return keep, new

    def _gap(self, is_user: bool) -> tuple[float, str]:
        month, rng = self._month, self._rng
        if is_user:
            return self._lognormal(math.log(month.user_gap_median_s), month.user_gap_sigma), "think"
        middle = month.tool_gaps_s[int(rng.choice(len(month.tool_gaps_s), p=month.tool_gap_weights))]
        return self._lognormal(math.log(middle), 0.7), "tool"

    def _lognormal(self, mu: float, sigma: float) -> float:
        return float(np.exp(mu + sigma * self._rng.standard_normal()))
