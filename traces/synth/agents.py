"""Makes `agent_jan` and `agent_feb`: coding-agent sessions with skewed prefix hits (months.py has the figures).

Session arrivals are a Gamma-mixed Poisson process with a rhythm of day and week. A session belongs to one application,
whose system prompt is a root, and makes calls: from the user or from a tool, with a gap of its own, each on top of the
call before. Contexts are compacted, forks go to sub-agents, singular one-shots come in small batches. Misses stand in
the content (`mode` baked): a call that lost its cache (idle eviction, rare miss, edit of the history) keeps less of its
prefix and sends the rest as new tokens.

A session is made from (month, seed, hour, number) alone, so that any window is the same whichever process makes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from traces.errors import TraceError
from traces.synth.months import MONTHS, Month
from traces.table import Root, Trace, TraceMeta, TraceRow

HOUR_S = 3600.0
DAY_S = 86_400.0
MAX_SESSION_S = 12 * HOUR_S  # sessions that began earlier than this before a window are left out of it


def generate(
    name: str,
    *,
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float = HOUR_S,
    lookback_s: float = MAX_SESSION_S,
    load: float = 1.0,
) -> Trace:
    """All sessions that begin in [start_s - lookback_s, start_s + duration_s), whole, in order of arrival.

    Times count from the month's first midnight. If the lookback reaches before it, they count from the lookback's
    beginning; `meta.notes["window_start_s"]` is `start_s` on the trace's clock in either case. `load` multiplies the
    rate of sessions.

    To begin in a steady state: walk each session (a call goes out `delay_s` after the end of `after`; how long a call
    takes is the caller's to say) to find its first call at or after `window_start_s`. A session with calls on both
    sides of it is running; it enters at that call, and that call's prefix is the history to prime.

    Raises TraceError for an unknown month or a window that is not inside it.
    """
    month = MONTHS.get(name)
    if month is None:
        raise TraceError("trace", "trace.name", f"unknown month {name!r}", f"choose one of {', '.join(MONTHS)}")
    month_s = month.num_days * DAY_S
    if not (start_s >= 0 and duration_s > 0 and lookback_s >= 0 and start_s + duration_s <= month_s):
        raise TraceError(
            name, "start_s, duration_s", f"[{start_s:g}, {start_s + duration_s:g}) s is no window of the month",
            f"it has {month.num_days} days, {month_s:g} s",
        )  # fmt: skip
    if not 0 < load < math.inf:
        raise TraceError(name, "load", f"must be above 0, got {load}")
    roots = _roots(month, seed)
    rows: list[TraceRow] = []
    begin_s, end_s = start_s - lookback_s, start_s + duration_s
    for hour in range(math.floor(begin_s / HOUR_S), math.ceil(end_s / HOUR_S)):
        for session_rows in _hour(month, seed, hour, load, roots):
            if begin_s <= (session_rows[0].arrival_s or 0.0) < end_s:
                rows.extend(session_rows)
    shift_s = max(0.0, -begin_s)
    if shift_s:
        rows = [row if row.arrival_s is None else replace(row, arrival_s=row.arrival_s + shift_s) for row in rows]
    notes = {
        "seed": seed,
        "start_s": start_s,
        "duration_s": duration_s,
        "lookback_s": lookback_s,
        "load": load,
        "window_start_s": start_s + shift_s,
    }
    meta = TraceMeta(
        name=name, origin="synthetic", source="traces/synth/agents.py", licence="Apache-2.0", mode="baked",
        answers="reused", notes=notes,
    )  # fmt: skip
    return Trace(tuple(rows), roots, meta)


def _rng(*parts: object) -> np.random.Generator:
    key = hashlib.blake2b("\x00".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _roots(month: Month, seed: int) -> dict[str, Root]:
    rng = _rng(month.name, seed, "roots")
    sizes = np.exp(rng.normal(math.log(month.root_median), month.root_sigma, size=month.num_apps))
    # The median of a few draws wanders; their shape is kept and their median set.
    sizes *= month.root_median / float(np.median(sizes))
    return {f"{month.name}/app{i}": Root(f"{month.name}/app{i}", int(size), "global") for i, size in enumerate(sizes)}


def _rhythm(hour: int) -> float:
    """Load of an hour against the mean: a working-day hump, quieter nights and weekends."""
    hump = 1.0 + 0.75 * math.sin((hour % 24 - 9) / 24 * 2 * math.pi)
    return hump * (0.55 if hour // 24 % 7 in (5, 6) else 1.18)


def _hour(month: Month, seed: int, hour: int, load: float, roots: dict[str, Root]) -> Iterator[list[TraceRow]]:
    """The sessions that begin in one hour: a Poisson count whose rate is Gamma-mixed and follows day and week."""
    rng = _rng(month.name, seed, "hour", hour)
    rate = load * month.sessions_per_hour * _rhythm(hour) * rng.gamma(8.0, 1 / 8.0)
    starts = (hour + np.sort(rng.random(rng.poisson(rate)))) * HOUR_S
    mean_calls = math.exp(month.calls_mu + month.calls_sigma**2 / 2)
    num_singular = month.singular_share / (1 - month.singular_share) * mean_calls * len(starts)
    batches = []
    while num_singular > 0 and rng.random() < num_singular / 3:  # 3 is a batch's mean
        batches.append(((hour + float(rng.random())) * HOUR_S, int(rng.integers(1, 6))))
        num_singular -= batches[-1][1]
    events = [(float(start), "session", i) for i, start in enumerate(starts)]
    events += [(start, "batch", size) for start, size in batches]
    for number, (start_s, kind, value) in enumerate(sorted(events)):
        name = f"{month.name}/{seed}/{hour}.{number}"
        if kind == "session":
            yield _Session(month, seed, name, start_s, roots).rows()
        else:
            yield from _batch(month, seed, name, start_s, value)


def _batch(month: Month, seed: int, name: str, start_s: float, size: int) -> Iterator[list[TraceRow]]:
    """Singular one-shots: ultra-long input, ultra-short output, nothing shared."""
    rng = _rng(month.name, seed, "batch", name)
    for i in range(size):
        row_id = f"{name}.{i}"
        input_tokens = month.singular_median * math.exp(0.3 * rng.standard_normal())
        output_tokens = month.singular_output_median * math.exp(0.6 * rng.standard_normal())
        yield [
            TraceRow(
                request_id=f"{row_id}/0", session_id=row_id, root_session_id=row_id, turn=0, kind="singular",
                prefix_id=None, keep_tokens=0, input_tokens=int(min(max(input_tokens, 32_000), 180_000)),
                output_tokens=int(min(max(output_tokens, 5), 499)), arrival_s=start_s + 2.0 * i * float(rng.random()),
            )
        ]  # fmt: skip


class _Session:
    """One agent session: the rows of its calls, its sub-agents' in between."""

    def __init__(self, month: Month, seed: int, name: str, start_s: float, roots: dict[str, Root]) -> None:
        self._month = month
        self._rng = _rng(month.name, seed, "session", name)
        self._name = name
        self._start_s = start_s
        weights = 1.0 / np.arange(1, month.num_apps + 1) ** month.app_zipf
        self._root = roots[f"{month.name}/app{self._rng.choice(month.num_apps, p=weights / weights.sum())}"]
        self._tool_mu = month.tool_mu + month.drift * math.sin(2 * math.pi * start_s / (DAY_S * month.num_days))
        self._num_subagents = 0

    def rows(self) -> list[TraceRow]:
        month = self._month
        calls = min(max(1, int(self._lognormal(month.calls_mu, month.calls_sigma))), month.max_calls)
        rows: list[TraceRow] = []
        self._play(rows, self._name, "main", calls, None, month.first_mu)
        return rows

    def _play(
        self, rows: list[TraceRow], session_id: str, kind: str, calls: int, after: str | None, first_mu: float
    ) -> None:
        month = self._month
        prefix_id, total, waits_for = self._root.root_id, self._root.tokens, after
        for turn in range(calls):
            is_user = turn == 0 or self._rng.random() < month.user_share
            # What a sub-agent begins with comes from its parent's call, not from the user.
            gap_s, gap_kind = self._gap(is_think=is_user and kind == "main")
            new = min(max(1.0, self._new_tokens(turn, first_mu, is_user)), month.max_new)
            keep = float(total)
            if turn:
                keep, new = self._lose(keep, new, gap_s)
            keep_tokens, input_tokens = int(keep), int(keep) + max(1, int(new))
            output_tokens = min(max(1, int(self._lognormal(month.output_mu, month.output_sigma))), 16_000)
            row = TraceRow(
                request_id=f"{session_id}/{turn}", session_id=session_id, root_session_id=self._name, turn=turn,
                kind=kind, prefix_id=prefix_id if keep_tokens else None, keep_tokens=keep_tokens,
                input_tokens=input_tokens, output_tokens=output_tokens,
                arrival_s=self._start_s if waits_for is None else None,
                after=() if waits_for is None else (waits_for,),
                delay_s=None if waits_for is None else round(gap_s, 3),
                delay_from=None if waits_for is None else "end",
                delay_kind=None if waits_for is None else gap_kind,
            )  # fmt: skip
            rows.append(row)
            prefix_id, total, waits_for = row.request_id, input_tokens + output_tokens, row.request_id
            if kind == "main" and turn + 1 < calls and self._rng.random() < month.fork_share:
                waits_for = self._fork(rows, row)

    def _fork(self, rows: list[TraceRow], parent: TraceRow) -> str:
        """A sub-agent with the same system prompt; the parent's next call waits for its last."""
        self._num_subagents += 1
        name = f"{self._name}~{self._num_subagents}"
        calls = 1 + int(self._rng.geometric(1 / self._month.subagent_mean_calls))
        self._play(rows, name, "subagent", calls, parent.request_id, self._month.subagent_first_mu)
        return rows[-1].request_id

    def _new_tokens(self, turn: int, first_mu: float, is_user: bool) -> float:
        month = self._month
        if turn == 0:
            return self._lognormal(first_mu, month.first_sigma)
        if is_user:
            return self._lognormal(month.user_mu, month.user_sigma)
        return self._lognormal(self._tool_mu, month.tool_sigma)

    def _lose(self, keep: float, new: float, gap_s: float) -> tuple[float, float]:
        """What a call loses of its prefix: compaction, idle eviction, a rare miss, an edit of the history. The root
        stays warm always."""
        month, rng = self._month, self._rng
        root = min(float(self._root.tokens), keep)
        if keep + new > month.compact_at * (1 + 0.1 * rng.standard_normal()):
            return root, min(self._lognormal(month.compact_to_mu, month.compact_to_sigma), 60_000.0)
        draw = rng.random()
        if rng.random() < 1 - math.exp(-gap_s / month.evict_s) or draw < month.miss_share:
            return root, keep + new - root
        if draw < month.miss_share + month.edit_share:
            kept = root + (keep - root) * (0.25 + 0.73 * rng.random())
            return kept, keep + new - kept
        return keep, new

    def _gap(self, *, is_think: bool) -> tuple[float, str]:
        """Seconds before a call, and whose they are."""
        month, rng = self._month, self._rng
        if is_think:
            return self._lognormal(math.log(month.user_gap_median_s), month.user_gap_sigma), "think"
        draw, middle = rng.random(), month.tool_gaps_s[-1]
        for gap_s, weight in zip(month.tool_gaps_s, month.tool_gap_weights, strict=True):
            if draw < weight:
                middle = gap_s
                break
            draw -= weight
        return self._lognormal(math.log(middle), 0.7), "tool"

    def _lognormal(self, mu: float, sigma: float) -> float:
        return math.exp(mu + sigma * float(self._rng.standard_normal()))
