"""`python -m traces.synth.check`: what the generators give beside their targets. It decides nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from traces.profile import BIN_LABELS, Profile, profile
from traces.synth.agents import DAY_S, HOUR_S, generate
from traces.synth.months import MONTHS, TARGET_BINS


def measure(name: str, seeds: int, hours: float, every_days: int) -> dict[int, list[Profile]]:
    """day -> one profile a seed, of the sessions that begin in the `hours` from 10 o'clock on every so many days."""
    return {
        day: [
            profile(
                generate(name, seed=seed, start_s=day * DAY_S + 10 * HOUR_S, duration_s=hours * HOUR_S, lookback_s=0)
            )
            for seed in range(seeds)
        ]
        for day in range(0, MONTHS[name].num_days, every_days)
    }


def _mean(found: Sequence[Profile], field: str) -> np.ndarray:
    """The mean over all requests of a field of the profiles."""
    weights = [one.num_requests for one in found]
    return np.asarray(np.average([getattr(one, field) for one in found], axis=0, weights=weights))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m traces.synth.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--month", choices=sorted(MONTHS), action="append", help="one month (default: both)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hours", type=float, default=2.0, help="hours of each day that is looked at")
    parser.add_argument("--every-days", type=int, default=3, help="look at each so many days of the month")
    args = parser.parse_args(argv)
    for name in args.month or sorted(MONTHS):
        by_day = measure(name, args.seeds, args.hours, args.every_days)
        found = [one for profiles in by_day.values() for one in profiles]
        days = 100 * np.array([_mean(profiles, "bin_shares") for profiles in by_day.values()])
        print(f"{name}: {sum(one.num_requests for one in found):,} requests of {len(by_day)} days, {args.seeds} seeds")
        print(f"  {'bin':<12}{'target %':>9}{'mean %':>9}{'lowest day':>12}{'highest day':>12}")
        for label, target, mean, column in zip(
            BIN_LABELS, TARGET_BINS[name], 100 * _mean(found, "bin_shares"), days.T, strict=True
        ):
            print(f"  {label:<12}{target:>9.1f}{mean:>9.1f}{column.min():>12.1f}{column.max():>12.1f}")
        for label, goal, field in (
            ("mean hit", "0.90", "mean_hit"),
            ("mean input", "64K", "mean_input"),
            ("mean output", "1K", "mean_output"),
            ("singular", "0.03-0.04", "singular_share"),
        ):
            print(f"  {label:<12}{goal:>9}{float(_mean(found, field)):>13,.3f}")


if __name__ == "__main__":
    main()
