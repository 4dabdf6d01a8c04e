"""`python -m harness.compare RUN RUN [...]`: side by side, paired differences where both ran the same requests, a
verdict per metric.

Exit code 0: compared; 1: a `--fail-on` rule was hit; 2: not comparable, or bad input. The first run is the baseline.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.metrics import percentile, request_latencies, summarize
from harness.store import Run, read_run
from traces.errors import UserError

METRICS = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "tpot_mean",
    "tpot_p50",
    "tpot_p90",
    "e2el_mean",
    "e2el_p50",
    "e2el_p90",
    "rps",
)
HIGHER_IS_BETTER = frozenset({"rps"})
NUM_RESAMPLES = 1000
_RULE = re.compile(r"^worse:([a-z0-9_]+):([0-9.]+)%$")


@dataclass(frozen=True, slots=True)
class Difference:
    """`change` is (other - base) / base; `low` and `high` bound it at 95% (bootstrap over sessions, paired), None
    where nothing was paired."""

    metric: str
    base: float | None
    other: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: str


def is_paired(base: Run, other: Run) -> bool:
    """Whether both ran the same requests of the same trace."""
    digests = [(run.manifest.get("trace") or {}).get("digest") for run in (base, other)]
    return digests[0] is not None and digests[0] == digests[1]


def differences(base: Run, other: Run) -> list[Difference]:
    """One per metric. Raises UserError when the two runs share no request that ended ok in both."""
    if not is_paired(base, other):
        raise UserError("not comparable: the runs are of different traces (trace.digest in their manifests differs)")
    frames = [_measured(run) for run in (base, other)]
    shared = frames[0].index.intersection(frames[1].index)
    if not len(shared):
        raise UserError("not comparable: no request ended ok in both runs")
    pair = [frame.loc[shared].reset_index() for frame in frames]
    values = [request_latencies(frame, run.chunks) for frame, run in zip(pair, (base, other), strict=True)]
    sessions = pair[0]["session_id"].to_numpy()
    found = []
    for metric in METRICS:
        if metric == "rps":
            found.append(_throughput(base, other))
            continue
        name, statistic = metric.rsplit("_", 1)
        found.append(_latency(metric, statistic, values[0][name], values[1][name], sessions))
    return found


def _measured(run: Run) -> Any:
    requests = run.requests
    return requests[(requests["phase"] == "measured") & (requests["status"] == "ok")].set_index("request_id")


def _statistic(values: Any, name: str) -> float | None:
    if name == "mean":
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else None
    return percentile(values, int(name[1:]) / 100)


def _latency(metric: str, statistic: str, base: Any, other: Any, sessions: Any) -> Difference:
    """Bootstrap over sessions: requests of one session are not independent."""
    a, b = _statistic(base, statistic), _statistic(other, statistic)
    if a is None or b is None:
        return Difference(metric, a, b, None, None, None, "too few requests")
    if np.array_equal(base, other, equal_nan=True):
        return Difference(metric, a, b, 0.0, 0.0, 0.0, "same")
    _, codes = np.unique(sessions, return_inverse=True)
    groups = [np.flatnonzero(codes == code) for code in range(codes.max() + 1)]
    rng = np.random.default_rng(0)
    changes = []
    for _ in range(NUM_RESAMPLES):
        rows = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        one, two = _statistic(base[rows], statistic), _statistic(other[rows], statistic)
        if one and two is not None:
            changes.append((two - one) / one)
    if not changes:
        return Difference(metric, a, b, (b - a) / a if a else None, None, None, "undecided")
    low, high = np.quantile(changes, [0.025, 0.975])
    return Difference(metric, a, b, (b - a) / a, float(low), float(high), _verdict(metric, float(low), float(high)))


def _verdict(metric: str, low: float, high: float) -> str:
    if low <= 0 <= high:
        return "undecided"
    return "better" if (low > 0) == (metric in HIGHER_IS_BETTER) else "worse"


def _throughput(base: Run, other: Run) -> Difference:
    """One figure a run: no interval, so no verdict but for equal ones."""
    a, b = summarize(base)["rps"], summarize(other)["rps"]
    change = (b - a) / a if a and b is not None else None
    return Difference("rps", a, b, change, None, None, "same" if change == 0 else "one figure a run: no verdict")


def config_differences(
    base: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Keys of the two configurations whose values differ, dotted, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for key in sorted(set(base) | set(other)):
        one, two = base.get(key), other.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += config_differences(one, two, f"{prefix}{key}.")
        elif one != two:
            found.append((f"{prefix}{key}", one, two))
    return found


def failed_rules(rules: Sequence[str], found: Sequence[Difference]) -> list[str]:
    """Rules `worse:METRIC:PERCENT%` that are hit: the metric is worse by more than that. Raises UserError for another
    form."""
    by_name = {item.metric: item for item in found}
    hit = []
    for rule in rules:
        match = _RULE.match(rule)
        if match is None or match[1] not in by_name:
            raise UserError(f"--fail-on {rule}: write worse:METRIC:PERCENT%, METRIC one of {', '.join(by_name)}")
        item, limit = by_name[match[1]], float(match[2]) / 100
        loss = None if item.change is None else (-item.change if item.metric in HIGHER_IS_BETTER else item.change)
        if loss is None or loss > limit:
            hit.append(f"{rule}: {'cannot be told' if loss is None else f'{loss:+.1%}'}")
    return hit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.compare", description=(__doc__ or "").strip())
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; the first is the baseline")
    parser.add_argument(
        "--fail-on", action="append", default=[], metavar="RULE", help="worse:ttft_p90:5%% ends with exit code 1"
    )
    args = parser.parse_args(argv)
    try:
        if len(args.runs) < 2:
            raise UserError("two runs or more are needed: python -m harness.compare RUN RUN")
        base, *others = [read_run(path) for path in args.runs]
        hit = []
        for other in others:
            found = differences(base, other)
            _print(base, other, found)
            hit += failed_rules(args.fail_on, found)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for rule in hit:
        print(f"failed: {rule}")
    return 1 if hit else 0


def _print(base: Run, other: Run, found: Sequence[Difference]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{base.path.name} (base) against {other.path.name}", title_justify="left")
    table.add_column("metric")
    for name in ("base", "other", "change", "95% interval", "verdict"):
        table.add_column(name, justify="right")
    for item in found:
        interval = "-" if item.low is None else f"{item.low:+.1%} .. {item.high:+.1%}"
        table.add_row(
            item.metric, _number(item.base), _number(item.other), "-" if item.change is None else f"{item.change:+.1%}",
            interval, item.verdict,
        )  # fmt: skip
    console.print(table)
    for key, one, two in config_differences(base.manifest.get("config") or {}, other.manifest.get("config") or {}):
        console.print(f"  {key}: {one} | {two}", highlight=False)
    for run in (base, other):
        validity = run.manifest.get("validity") or {}
        if not validity.get("valid"):
            console.print(
                f"  {run.path.name} is not valid: {'; '.join(validity.get('reasons') or ['not said'])}", highlight=False
            )
    console.print(
        "Latencies in seconds, requests paired by id, intervals by bootstrap over sessions. Undecided is not the same."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
