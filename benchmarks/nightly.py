"""`python -m benchmarks.nightly`: four policies on virtual time, compared exactly with the last time.

Virtual runs of one seed repeat to the byte, so any difference is a change of the code. Exit code 1 on a difference
unless `--accept`. The last figures stand in results/nightly/last.json, every night's in
results/nightly/history.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.clock import Clock
from harness.__main__ import main as harness_main
from harness.metrics import summarize
from harness.store import SCHEMAS, read_run, read_table, write_json

POLICIES = ("colocated", "pd", "cross_pd", "pdd")
WORDS = ("trace=agent_jan", "clock=virtual", "seed=0", "slice=0")


def run_policy(policy: str, root: Path) -> dict[str, Any]:
    """One run: its summary, and a digest of each file's content. Raises RuntimeError when the run fails."""
    folder = root / policy
    shutil.rmtree(folder, ignore_errors=True)
    code = harness_main([f"engine={policy}", f"results_dir={folder}", *WORDS])
    if code != 0:
        raise RuntimeError(f"engine={policy} ended with exit code {code}")
    (manifest,) = folder.glob("*/manifest.json")
    path = manifest.parent
    digests = {name: content_digest(path, name) for name in SCHEMAS}
    return {"summary": summarize(read_run(path)), "digests": digests}


def content_digest(run_dir: Path, name: str) -> str:
    """SHA-256 over the rows of one file, so that a new version of the Parquet library changes nothing."""
    found = hashlib.sha256()
    for row in read_table(run_dir, name).to_pylist():
        found.update(json.dumps(row, sort_keys=True).encode())
    return found.hexdigest()


def changes(last: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs, a line each: files by digest, and the figures that moved."""
    lines = []
    for policy in POLICIES:
        before, after = last.get(policy), now[policy]
        if before is None:
            continue
        changed = [name for name, value in after["digests"].items() if before["digests"].get(name) != value]
        if changed:
            lines.append(f"{policy}: rows of {', '.join(changed)} differ")
            for metric in ("ttft", "tpot", "e2el"):
                for key in ("mean", "p90"):
                    one, two = before["summary"][metric][key], after["summary"][metric][key]
                    if one != two:
                        lines.append(f"  {metric} {key}: {one} -> {two}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nightly", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--accept", action="store_true", help="take the new figures as the last ones even where they differ"
    )
    parser.add_argument("--root", type=Path, default=Path("results/nightly"))
    args = parser.parse_args(argv)
    now = {policy: run_policy(policy, args.root) for policy in POLICIES}
    last_path = args.root / "last.json"
    last = json.loads(last_path.read_text()) if last_path.exists() else {}
    found = changes(last, now)
    with (args.root / "history.jsonl").open("a") as history:
        row = {
            "created": Clock(is_virtual=False).wall_time_iso(),
            "differs": found,
            **{p: now[p]["summary"] for p in POLICIES},
        }
        history.write(json.dumps(row) + "\n")
    print(f"{'policy':<11}{'TTFT mean':>11}{'P90':>9}{'TPOT':>9}{'rps':>7}{'line MB':>9}")
    for policy, result in now.items():
        one = result["summary"]
        print(
            f"{policy:<11}{one['ttft']['mean']:>10.3f}s{one['ttft']['p90']:>8.3f}s{one['tpot']['mean']:>8.4f}s"
            f"{one['rps']:>7.2f}{one['line']['planned_bytes'] / 1e6:>9.1f}"
        )
    if found and not args.accept:
        print("\n".join(["differs from the last time:", *found, "take it with: python -m benchmarks.nightly --accept"]))
        return 1
    write_json(last_path, now)
    print("equal to the last time" if last and not found else "taken as the last figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
