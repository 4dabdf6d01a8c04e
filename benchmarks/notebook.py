"""`python -m benchmarks.notebook`: run results/compare.ipynb on fresh small runs; fails on an error in any cell. The
file itself stays as it is."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.__main__ import main as harness_main

NOTEBOOK = Path(__file__).resolve().parents[1] / "results" / "compare.ipynb"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a cell fails."""
    # By name, so that types are checked alike with and without the notebook packages.
    nbformat = importlib.import_module("nbformat")
    nbclient = importlib.import_module("nbclient")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebook", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, help="use the runs under this folder in place of fresh ones")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        root = args.runs or Path(scratch)
        if args.runs is None:
            for engine in ("cross_pd", "pdd"):
                if code := harness_main([f"engine={engine}", "clock=virtual", f"results_dir={root}"]):
                    return code
        os.environ["RUNS"] = str(root.resolve())
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        try:
            nbclient.NotebookClient(
                notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
            ).execute()
        except nbclient.exceptions.CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
    num_figures = sum(
        "image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )
    print(f"{NOTEBOOK.name}: {len(notebook.cells)} cells ran, {num_figures} figures")
    return 0 if num_figures else 1


if __name__ == "__main__":
    sys.exit(main())
