"""`python -m benchmarks.slices`: pdd against cross_pd on fixed slices of a trace, run after run in turn, on the
default (real) run.

Each slice is run with both policies, in the order A B, B A, A B ... so that drift of the machine falls on both.
Prints P90 TTFT of both, their ratio, MD's hit beside P's, KV bytes at the gateway beside the planned ones, and the
medians. It decides nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.metrics import summarize
from harness.store import Run, read_run

ENGINES = ("cross_pd", "pdd")


def run_one(engine: str, slice_number: int, root: Path, overrides: Sequence[str]) -> Run:
    """One run in a process of its own; raises RuntimeError with its last words when it fails."""
    folder = root / f"slice{slice_number}-{engine}"
    command = [
        sys.executable, "-m", "harness", f"engine={engine}", "trace=agent_jan", f"slice={slice_number}",
        f"results_dir={folder}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (manifest,) = folder.glob("*/manifest.json")
    return read_run(manifest.parent)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/slices"), help="where the runs go")
    parser.add_argument("overrides", nargs="*", help="more words for both runs, as clock=virtual")
    args = parser.parse_args(argv)
    print(
        f"{'slice':>5} {'cross_pd P90':>13} {'pdd P90':>9} {'ratio':>7} {'MD-P hit':>9} {'gateway/plan':>13}"
        f" {'relayed':>8} valid"
    )
    ratios = []
    for number in range(args.slices):
        summaries = {}
        is_valid = True
        for engine in ENGINES if number % 2 == 0 else ENGINES[::-1]:
            run = run_one(engine, number, args.out, args.overrides)
            summaries[engine] = summarize(run)
            is_valid &= bool(run.manifest["validity"]["valid"])
        cross, pdd = summaries["cross_pd"], summaries["pdd"]
        ratios.append(pdd["ttft"]["p90"] / cross["ttft"]["p90"])
        hits = pdd["prefix_hit"]
        line = pdd["line"]
        print(
            f"{number:>5} {cross['ttft']['p90']:>12.3f}s {pdd['ttft']['p90']:>8.3f}s {ratios[-1]:>7.3f}"
            f" {100 * (hits['reported_hit_md']['token_share'] - hits['reported_hit_p']['token_share']):>+8.2f}p"
            f" {line['gateway_bytes'] / line['planned_bytes']:>13.4f}"
            f" {100 * pdd['pipelines'].get('p-rld-md', 0.0):>7.1f}% {is_valid}",
            flush=True,
        )
    below = sum(ratio < 1 for ratio in ratios)
    print(
        f"median ratio of P90 TTFT, pdd over cross_pd: {statistics.median(ratios):.3f}; "
        f"below 1 in {below} of {len(ratios)}"
    )


if __name__ == "__main__":
    main()
