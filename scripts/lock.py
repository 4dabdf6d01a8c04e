"""Writes requirements/*.lock from what is installed in .venv; never fetches or installs anything.

Three files, so that optional parts never weigh on a plain run: `run` (what `python -m harness`
needs), `dev` (tests and checks, on top of run) and `notebook` (on top of both). Run by `make lock`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
# {what}
# Written by `make lock` from what is installed in .venv (Python {python}): do not edit by hand.
# To renew: .venv/bin/python -m pip install --upgrade -e '.[dev,notebook]' && make lock
"""
TORCH = """\
#
# torch has one version here and several builds; the package index decides which one pip takes.
# A CPU build is all that is needed. It is the default on macOS; on x86-64 Linux the default may
# carry CUDA, several GB more. To choose, look up the index address of the build you want on
# PyTorch's install page ("pip", then CPU or CUDA) and
#     PIP_EXTRA_INDEX_URL=<that address> make run
# A named build (2.13.0+cpu, 2.13.0+cu130) wins over the plain one: nothing else is to change.
# To change builds later, `make clean-venv` first.
"""


def closure(requirements: Iterable[str]) -> dict[str, Requirement]:
    """Name -> first requirement met, for everything that the requirements need, as installed here.

    Raises `metadata.PackageNotFoundError` for what is not installed.
    """
    found: dict[str, Requirement] = {}
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found[name] = requirement
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                needed.marker = None
                todo.append(needed)
    return found


def pin(name: str, requirement: Requirement) -> str:
    """`name==version`, without the local part: the build (`+cpu`) is the user's choice."""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{name}=={Version(metadata.version(name)).public}{marker}"


def lock_files() -> dict[Path, str]:
    """Path -> text of each lock file."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = config["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    parts = [
        ("run", "What a run needs.", project["dependencies"] + config["build-system"]["requires"]),
        ("dev", "Tests and checks, on top of run.lock.", extras["dev"]),
        ("notebook", "Notebooks, on top of run.lock and dev.lock.", extras["notebook"]),
    ]
    files: dict[Path, str] = {}
    known: set[str] = set()
    for part, what, requirements in parts:
        needed = closure(requirements)
        pins = [pin(name, needed[name]) for name in sorted(needed) if name not in known]
        known |= needed.keys()
        head = HEAD.format(what=what, python=python) + (TORCH if part == "run" else "")
        files[ROOT / "requirements" / f"{part}.lock"] = head + "\n".join(pins) + "\n"
    return files


def main() -> None:
    """Writes the files and says so."""
    for path, text in lock_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
