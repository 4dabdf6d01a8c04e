"""`python -m harness.results list [ROOT]` and `recover RUN`: find runs, and save one that was killed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.store import read_manifest, recover, runs_under
from traces.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 when the user can mend it."""
    parser = argparse.ArgumentParser(prog="python -m harness.results", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the runs under a folder")
    listing.add_argument("root", nargs="?", type=Path, default=Path("results"))
    saving = commands.add_parser("recover", help="make Parquet of a killed run's parts")
    saving.add_argument("run", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            list_runs(args.root)
        else:
            report = recover(args.run)
            words = ", ".join(f"{count:,} {name}" for name, count in report.rows.items())
            planned = (read_manifest(args.run).get("selection") or {}).get("requests", "?")
            if report.was_needed:
                words += (
                    f" (the run had planned {planned} measured requests; what had not ended by the kill has no row)"
                )
            print(f"{args.run}: {'recovered' if report.was_needed else 'had ended by itself; it holds'} {words}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def list_runs(root: Path) -> None:
    """One line a run: folder, status, clock, whether it is valid."""
    found = runs_under(root)
    if not found:
        print(f"no run under {root}")
    for path in found:
        try:
            manifest = read_manifest(path)
        except UserError as error:
            print(f"{path}  unreadable: {error}")
            continue
        validity = manifest.get("validity") or {}
        word = "valid" if validity.get("valid") else "not valid"
        print(f"{path}  {manifest['status']}  {manifest.get('clock')}  {word}")


if __name__ == "__main__":
    sys.exit(main())
