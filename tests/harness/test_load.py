"""What is sent and when follows from the trace alone: entries, order, compression, representative slices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import load
from harness.load import Row, SessionPool, Want
from traces.errors import UserError


def service_s(prompt_tokens: int, output_tokens: int) -> float:
    return 0.5


def session(name: str, at_s: float, length: int, gap_s: float = 30.0, keep: float = 0.97) -> list[Row]:
    rows = []
    for turn in range(length):
        size = 1000 + 40 * turn
        rows.append(
            Row(
                f"{name}.{turn}", name, name, turn, "main", f"{name}.{turn - 1}" if turn else None,
                int(size * keep) if turn else 0, size, 30, at_s if turn == 0 else None,
                (f"{name}.{turn - 1}",) if turn else (), gap_s, False, 10.0,
            )
        )  # fmt: skip
    return rows


def agents(count: int = 300, seed: int = 3) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        gap_s, keep = float(rng.uniform(5, 60)), float(rng.choice([0.5, 0.93, 0.97, 0.995]))
        rows += session(f"s{number}", float(rng.uniform(0, 7200)), int(rng.integers(1, 60)), gap_s, keep)
    return rows


POOL = SessionPool(agents(), 3600.0, service_s)
WANT = Want(num_requests=180, requests_per_s=3.0, num_running=24)


def test_a_snapshot_brings_the_asked_requests_at_the_asked_rate() -> None:
    selection = load.select_snapshot(POOL, WANT, "seed0")
    assert len(selection.planned) == 180
    assert selection.num_sessions >= 24
    starts = load.run_timeline(selection.planned, service_s)
    assert 0.9 * 60 < max(starts.values()) < 60


def test_a_running_session_enters_at_the_turn_that_comes_next() -> None:
    selection = load.select_snapshot(POOL, WANT, "seed0")
    for name, turn in selection.entries.items():
        before = [row for row in POOL.trees[name] if row.turn < turn]
        assert before and all(POOL.begins[row.request_id] < 3600 for row in before)
        assert POOL.begins[f"{name}.{turn}"] >= 3600


def test_every_prefix_is_in_the_slice_or_primed() -> None:
    selection = load.select_snapshot(POOL, WANT, "seed0")
    inside: set[str] = set(selection.prime_ids)
    for item in selection.planned:
        assert item.row.prefix_id is None or item.row.prefix_id in inside
        assert item.start_s is not None or set(item.after) <= inside
        inside.add(item.row.request_id)


def test_selection_repeats_and_differs_by_seed() -> None:
    assert load.select_snapshot(POOL, WANT, "a") == load.select_snapshot(POOL, WANT, "a")
    assert load.select_snapshot(POOL, WANT, "a") != load.select_snapshot(POOL, WANT, "b")


def test_the_slice_nearest_to_the_traces_bins_is_taken() -> None:
    target = load.hit_bins([row.hit_share(1) for row in agents()])
    distances = [
        load.bins_distance(
            load.hit_bins([p.row.hit_share(1) for p in load.select_snapshot(POOL, WANT, "z", 1, bins).planned]), target
        )
        for bins in ([], target)
    ]
    assert distances[1] <= distances[0]


def test_compression_divides_arrivals_and_gaps_alike() -> None:
    one, four = POOL.plan(["s1", "s2", "s3"], 1.0), POOL.plan(["s1", "s2", "s3"], 4.0)
    for slow, fast in zip(one, four, strict=True):
        assert slow.gap_s == pytest.approx(4 * fast.gap_s)
        assert (slow.start_s is None) == (fast.start_s is None)
        if slow.start_s is not None and fast.start_s is not None:
            assert slow.start_s == pytest.approx(4 * fast.start_s)


def test_a_given_compression_takes_more_sessions_instead() -> None:
    selection = load.select_snapshot(POOL, Want(180, 3.0, num_running=5, time_compression=2.0), "x")
    assert selection.time_compression == 2.0
    assert len(selection.entries) > 5


def test_limits_by_sessions_hold() -> None:
    selection = load.select_snapshot(POOL, Want(50, 3.0, max_sessions=3), "x")
    assert selection.num_sessions <= 3
    assert load.select_from_start(agents(), Want(50, 3.0, max_sessions=2), service_s).num_sessions <= 2


def test_open_rows_are_sent_at_their_arrivals() -> None:
    rows = [
        Row(f"r{i}", f"r{i}", f"r{i}", 0, "main", None, 0, 10, 5, 100.0 + i * 0.3, (), 0.0, False, None)
        for i in range(300)
    ]
    selection = load.select_from_start(rows, Want(200, 3.0, time_compression=1.0), service_s)
    assert [item.row.request_id for item in selection.planned] == [f"r{i}" for i in range(200)]
    assert [item.start_s for item in selection.planned] == pytest.approx([i * 0.3 for i in range(200)])
    fitted = load.select_from_start(rows, Want(200, 6.0), service_s)
    assert fitted.planned[-1].start_s == pytest.approx(200 / 6.0, rel=0.02)


def test_rates_give_start_times_that_are_functions_of_the_seed() -> None:
    assert load.starts_at_rate(4, 2.0, "constant", 0) == [0.0, 0.5, 1.0, 1.5]
    poisson = load.starts_at_rate(4000, 2.0, "poisson", 1)
    assert poisson == load.starts_at_rate(4000, 2.0, "poisson", 1)
    assert poisson[-1] == pytest.approx(2000, rel=0.1)


def test_a_row_without_a_time_names_itself() -> None:
    bad = Row("r9", "s", "s", 1, "main", None, 0, 10, 5, None, ("gone",), 0.0, False, None)
    with pytest.raises(UserError, match="r9"):
        load.trace_timeline([bad], service_s)


def test_bins_are_shares_with_their_lower_edge_inside() -> None:
    assert load.hit_bins([0.0, 0.9, 0.95, 1.0]) == [25.0, 25.0, 25.0, 0.0, 0.0, 0.0, 25.0]
    assert load.hit_bins([]) == []


@given(st.floats(0.06, 9000), st.integers(1, 1000))
@settings(max_examples=40)
def test_the_fitted_compression_is_the_smallest_that_suffices(edge: float, wanted: int) -> None:
    found = load.fitting_compression(lambda c: wanted if c >= edge else 0, wanted)
    assert edge <= found or math.isclose(found, edge)
    assert found <= edge * 1.02
