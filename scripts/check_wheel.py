"""Checks what a wheel holds: all of conf/, and nothing that is not to be installed.

Usage: python scripts/check_wheel.py WHEEL. Exit 1 with one line for each fault.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("conf", "engines", "harness", "traces")


def faults(wheel: Path) -> list[str]:
    """What is wrong with the wheel, in words; empty when nothing is."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    found = [f"{wheel.name} installs {top}/" for top in sorted(tops - set(PACKAGES))]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in (".py", ".yaml") and name not in names:
                found.append(f"{wheel.name} lacks {name}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append(f"{wheel.name} lacks LICENSE")
    return found


def main(arguments: list[str]) -> int:
    """Prints the faults of the wheel named; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python scripts/check_wheel.py WHEEL (one only)")
        return 2
    found = faults(Path(arguments[0]))
    for fault in found:
        print(fault)
    if not found:
        print(f"{Path(arguments[0]).name}: content as it should be")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
