"""`python -m traces.synth.check`: what the generators give beside their targets. It decides nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from traces.profile import BIN_LABELS, Profile, profile
from traces.synth.agents import DAY_S, MONTHS, generate

TARGET_BINS = {
    "agent_jan": (16.5, 8.5, 3.5, 5.0, 7.5, 16.0, 43.0),
    "agent_feb": (14.5, 8.0, 3.5, 5.0, 7.5, 16.5, 45.0),
}
"""Percent of requests; the published envelope (mean 0.90, 75% and 77.5% above 0.95) with our reading of the bins inside it."""


def measure(name: str, seeds: int, days: float, start_day: float) -> list[Profile]:
    """One profile a seed, of all sessions that begin in the given days."""
    return [
        profile(generate(name, seed=seed, start_s=start_day * DAY_S, duration_s=days * DAY_S, lookback_s=0.0))
        for seed in range(seeds)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m traces.synth.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--month", choices=sorted(MONTHS), action="append", help="one month (default: both)")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--start-day", type=float, default=7.0)
    args = parser.parse_args(argv)
    for name in args.month or sorted(MONTHS):
        found = measure(name, args.seeds, args.days, args.start_day)
        shares = 100 * np.array([one.bin_shares for one in found])
        print(f"{name}: {sum(one.num_requests for one in found):,} requests, {args.seeds} seeds of {args.days:g} days")
        print(f"  {'bin':<12}{'target %':>9}{'mean %':>9}{'min %':>8}{'max %':>8}")
        for label, target, column in zip(BIN_LABELS, TARGET_BINS[name], shares.T, strict=True):
            print(f"  {label:<12}{target:>9.1f}{column.mean():>9.1f}{column.min():>8.1f}{column.max():>8.1f}")
        for label, goal, values in (
            ("mean hit", "0.90", [one.mean_hit for one in found]),
            ("mean input", "64K", [one.mean_input for one in found]),
            ("mean output", "1K", [one.mean_output for one in found]),
            ("singular", "0.03-0.04", [one.singular_share for one in found]),
        ):
            print(f"  {label:<12}{goal:>9}{np.mean(values):>12,.3f}")


if __name__ == "__main__":
    main()
