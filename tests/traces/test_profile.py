"""Hits and bins of a trace."""

from __future__ import annotations

import numpy as np
import pytest

from traces.profile import BIN_EDGES, BIN_LABELS, bin_shares, ideal_hits, profile
from traces.table import Root, Trace, TraceMeta, TraceRow

META = TraceMeta("t", "yours", "a test", "none")
TRACE = Trace(
    (
        TraceRow("a", "s", "s", 0, "main", "root", 100, 150, 10, arrival_s=0.0),
        TraceRow("b", "s", "s", 1, "main", "a", 160, 161, 30, after=("a",)),
        TraceRow("c", "u", "u", 0, "singular", None, 0, 400, 20, arrival_s=1.0),
    ),
    {"root": Root("root", 100)},
    META,
)


def test_an_ideal_hit_is_the_kept_prefix_floored_to_pages_with_roots_warm() -> None:
    assert ideal_hits(TRACE).tolist() == [100, 160, 0]
    assert ideal_hits(TRACE, 64).tolist() == [64, 128, 0]


def test_a_profile_sums_up_lengths_sessions_and_hits() -> None:
    found = profile(TRACE)
    assert (found.num_requests, found.num_sessions) == (3, 2)
    assert (found.mean_input, found.mean_output) == (237, 20)
    assert found.mean_hit == pytest.approx((100 / 150 + 160 / 161) / 3)
    assert found.token_weighted_hit == pytest.approx(260 / 711)
    assert found.singular_share == pytest.approx(1 / 3)
    assert found.bin_shares == pytest.approx((2 / 3, 0, 0, 0, 0, 0, 1 / 3))


def test_a_bin_holds_its_lower_edge_and_the_last_one_both() -> None:
    assert len(BIN_LABELS) == len(BIN_EDGES) - 1 == 7
    for index, edge in enumerate(BIN_EDGES[:-1]):
        assert bin_shares([edge])[index] == 1
    assert bin_shares([1.0])[-1] == 1
    assert bin_shares([0.9 - 1e-12])[0] == 1


def test_shares_sum_to_one_and_of_nothing_are_zero() -> None:
    assert sum(bin_shares(np.random.default_rng(0).random(999))) == pytest.approx(1)
    assert bin_shares([]) == (0,) * 7
