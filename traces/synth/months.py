"""The knobs of the synthetic months, and what each moves. Data only.

Published: mean hit 0.90; 75% (January) and 77.5% (February) of requests above 0.95; 64K tokens of input and 1K of
output on average; 3-4% singular requests. The seven bins inside that envelope are our reading, shaped by real
coding-agent sessions: the reports give no figure for a bin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Month:
    """Lengths in tokens, times in seconds; `*_mu`, `*_sigma` of lognormals.

    Hit bins: `tool_mu` and `tool_sigma` (new tokens of a tool result) set the shares above 0.95; `miss_share`,
    `edit_share` and `evict_s` the low tail; `compact_at` and `compact_to_mu` the mean context and with it all bins;
    `drift` moves `tool_mu` over the month, one wave.
    """

    name: str
    num_days: int
    tool_mu: float
    tool_sigma: float
    compact_to_mu: float
    miss_share: float
    edit_share: float
    sessions_per_hour: float = 40.0
    calls_mu: float = 3.5
    calls_sigma: float = 1.1
    max_calls: int = 1500
    user_share: float = 1.0 / 9.0
    user_mu: float = 5.2
    user_sigma: float = 1.2
    output_mu: float = 6.27
    output_sigma: float = 1.17
    num_apps: int = 8
    app_zipf: float = 1.1
    root_median: float = 14_000.0
    root_sigma: float = 0.4
    first_mu: float = 7.2
    first_sigma: float = 1.1
    subagent_first_mu: float = 7.5
    subagent_mean_calls: float = 8.0
    fork_share: float = 0.012
    compact_at: float = 110_000.0
    compact_to_sigma: float = 0.3
    max_new: float = 30_000.0
    evict_s: float = 1_900.0
    tool_gaps_s: tuple[float, ...] = (0.5, 8.0, 120.0)
    tool_gap_weights: tuple[float, ...] = (0.62, 0.33, 0.05)
    user_gap_median_s: float = 84.0
    user_gap_sigma: float = 1.5
    singular_share: float = 0.036
    singular_median: float = 96_000.0
    singular_output_median: float = 150.0
    drift: float = 0.06


MONTHS = {
    "agent_jan": Month(
        "agent_jan", 31, tool_mu=6.52, tool_sigma=1.36, compact_to_mu=10.66, miss_share=0.005, edit_share=0.022
    ),
    "agent_feb": Month(
        "agent_feb", 28, tool_mu=6.46, tool_sigma=1.34, compact_to_mu=10.69, miss_share=0.001, edit_share=0.008
    ),
}

TARGET_BINS = {
    "agent_jan": (16.5, 8.5, 3.5, 5.0, 7.5, 16.0, 43.0),
    "agent_feb": (14.5, 8.0, 3.5, 5.0, 7.5, 16.5, 45.0),
}
"""Percent of requests in each of the seven hit bins."""
