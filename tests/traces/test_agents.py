"""The synthetic months: their targets, their windows, their structure."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from traces.errors import TraceError
from traces.profile import profile
from traces.synth import MONTHS, TARGET_BINS, generate
from traces.synth.agents import DAY_S, HOUR_S
from traces.synth.check import main
from traces.table import Trace, digest, scale, validate


@pytest.fixture(scope="module", params=sorted(MONTHS))
def month(request: pytest.FixtureRequest) -> list[Trace]:
    """Two hours of every fourth day, one seed: some 60,000 requests."""
    days = range(0, MONTHS[request.param].num_days, 4)
    return [
        generate(request.param, seed=11, start_s=day * DAY_S + 10 * HOUR_S, duration_s=2 * HOUR_S, lookback_s=0)
        for day in days
    ]


def test_the_month_meets_its_bins_and_means(month: list[Trace]) -> None:
    found = [profile(trace) for trace in month]
    weights = [one.num_requests for one in found]
    bins = 100 * np.average([one.bin_shares for one in found], axis=0, weights=weights)
    assert np.abs(bins - TARGET_BINS[month[0].meta.name]).max() < 1.5
    assert np.average([one.mean_hit for one in found], weights=weights) == pytest.approx(0.90, abs=0.01)
    assert np.average([one.mean_input for one in found], weights=weights) == pytest.approx(64_000, rel=0.05)
    assert np.average([one.mean_output for one in found], weights=weights) == pytest.approx(1000, rel=0.05)
    assert 0.03 <= np.average([one.singular_share for one in found], weights=weights) <= 0.04


def test_scaled_to_a_32th_the_hits_stay(month: list[Trace]) -> None:
    whole, small = profile(month[0]), profile(scale(month[0], 1 / 32))
    assert small.mean_hit == pytest.approx(whole.mean_hit, abs=0.002)
    # The top bin's edge is 20 tokens of a mean prompt: rounding moves some requests over it.
    assert np.abs(np.subtract(small.bin_shares, whole.bin_shares)).max() < 0.025


def test_rows_obey_the_table(month: list[Trace]) -> None:
    validate(month[0])
    rows = month[0].rows
    assert {row.kind for row in rows} == {"main", "subagent", "singular"}
    singular = [row for row in rows if row.kind == "singular"]
    assert all(row.output_tokens < 500 and row.input_tokens >= 32_000 and row.prefix_id is None for row in singular)
    assert 80_000 < np.median([row.input_tokens for row in singular]) < 112_000


def test_a_parent_goes_on_after_its_sub_agents_last_call(month: list[Trace]) -> None:
    lists: dict[str, list[str]] = defaultdict(list)
    for row in month[0].rows:
        lists[row.session_id].append(row.request_id)
    agents = {row.session_id for row in month[0].rows if row.kind == "subagent"}
    last_calls = {lists[name][-1] for name in agents}
    waited_for = {name for row in month[0].rows if row.kind == "main" for name in row.after}
    assert agents and last_calls <= waited_for


def test_a_session_is_the_same_in_every_window_that_has_it() -> None:
    wide = generate("agent_jan", seed=2, start_s=5 * DAY_S, duration_s=3 * HOUR_S, lookback_s=HOUR_S)
    narrow = generate("agent_jan", seed=2, start_s=5 * DAY_S + 0.5 * HOUR_S, duration_s=HOUR_S, lookback_s=0)
    by_id = {row.request_id: row for row in wide.rows}
    assert narrow.rows
    assert all(by_id[row.request_id] == row for row in narrow.rows)
    assert narrow.roots == wide.roots


def test_seeds_and_months_differ_and_repeat() -> None:
    window = {"start_s": DAY_S, "duration_s": 0.2 * HOUR_S, "lookback_s": 0.0}
    found = [digest(generate(name, seed=seed, **window)) for name in sorted(MONTHS) for seed in (0, 1)]
    assert len(set(found)) == 4
    assert found == [digest(generate(name, seed=seed, **window)) for name in sorted(MONTHS) for seed in (0, 1)]


def test_a_window_holds_the_sessions_that_begin_in_it_or_its_lookback() -> None:
    trace = generate("agent_feb", start_s=2 * DAY_S, duration_s=HOUR_S, lookback_s=6 * HOUR_S)
    starts = [row.arrival_s for row in trace.rows if row.arrival_s is not None]
    assert 2 * DAY_S - 6 * HOUR_S <= min(starts) < 2 * DAY_S <= max(starts) < 2 * DAY_S + HOUR_S
    assert trace.meta.notes["window_start_s"] == 2 * DAY_S


def test_a_lookback_before_the_month_moves_the_clock_and_says_so() -> None:
    trace = generate("agent_feb", start_s=HOUR_S, duration_s=HOUR_S, lookback_s=6 * HOUR_S)
    starts = [row.arrival_s for row in trace.rows if row.arrival_s is not None]
    assert trace.meta.notes["window_start_s"] == 6 * HOUR_S
    assert min(starts) >= 0 and max(starts) < 7 * HOUR_S
    validate(trace)


def test_load_multiplies_the_sessions() -> None:
    def count(load: float) -> int:
        window = {"start_s": DAY_S + 10 * HOUR_S, "duration_s": 3 * HOUR_S, "lookback_s": 0.0, "load": load}
        traces = [generate("agent_jan", seed=seed, **window) for seed in range(4)]
        return sum(row.arrival_s is not None and row.kind == "main" for trace in traces for row in trace.rows)

    # Three standard deviations of the smaller Poisson count, about 200, are a fifth of it.
    assert count(1.0) / count(0.25) == pytest.approx(4, rel=0.21)


def test_arrivals_follow_day_and_week() -> None:
    def count(day: int, hour: int) -> int:
        start_s = day * DAY_S + hour * HOUR_S
        window = {"start_s": start_s, "duration_s": HOUR_S, "lookback_s": 0.0, "load": 2.0}
        return sum(len({row.session_id for row in generate("agent_feb", seed=s, **window).rows}) for s in range(3))

    assert count(2, 14) > 2 * count(2, 2)
    assert count(2, 14) > 1.4 * count(5, 14)


@pytest.mark.parametrize(
    "window",
    [
        {"start_s": -1.0},
        {"start_s": 31 * DAY_S},
        {"start_s": 31 * DAY_S - 10, "duration_s": 20.0},
        {"duration_s": 0.0},
        {"lookback_s": -1.0},
        {"load": 0.0},
        {"start_s": float("nan")},
    ],
)
def test_a_window_outside_of_the_month_is_refused(window: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="agent_jan"):
        generate("agent_jan", **window)


def test_an_unknown_month_is_refused() -> None:
    with pytest.raises(TraceError, match="unknown month 'agent_mar'; choose one of agent_jan, agent_feb"):
        generate("agent_mar")


def test_the_check_prints_targets_beside_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--month", "agent_jan", "--seeds", "1", "--hours", "0.2", "--every-days", "10"])
    printed = capsys.readouterr().out
    assert "[.99,1]" in printed and " 43.0" in printed and "mean hit" in printed
