"""What tests of traces build on: traces made from a seed, the folder of public files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from traces.table import Root, Segment, Trace, TraceMeta, TraceRow

MakeTrace = Callable[[int], Trace]


def _trace(seed: int) -> Trace:
    """Up to 30 rows of up to 4 sessions: turns, cuts of the history, roots, misses, singular rows, unknowns as None."""
    rng = random.Random(seed)
    roots = {f"root{i}": Root(f"root{i}", rng.choice((0, 1, 40, 300))) for i in range(2)}
    rows: list[TraceRow] = []
    last: dict[str, TraceRow] = {}
    for number in range(rng.randint(1, 30)):
        session = f"s{rng.randint(0, 3)}"
        parent = last.get(session)
        prefix_id, limit = None, 0
        if parent is not None and rng.random() < 0.9:
            prefix_id, limit = parent.request_id, parent.input_tokens + parent.output_tokens
        elif rng.random() < 0.5:
            root = roots[rng.choice(sorted(roots))]
            prefix_id, limit = root.root_id, root.tokens
        keep = limit if rng.random() < 0.6 else rng.randint(0, limit)
        new = rng.choice((1, 2, 17, 400))
        cut = rng.randint(0, new)
        row = TraceRow(
            request_id=f"r{number}",
            session_id=session,
            root_session_id=session,
            turn=0 if parent is None else parent.turn + 1,
            kind="singular" if prefix_id is None else "main",
            prefix_id=prefix_id,
            keep_tokens=keep,
            input_tokens=keep + new,
            output_tokens=rng.choice((1, 3, 90)),
            segments=(Segment("tool", cut), Segment("user", new - cut, "text/1")) if rng.random() < 0.5 else None,
            raw_ref=None if rng.random() < 0.5 else f"file:{number}",
            arrival_s=rng.random() * 9 if parent is None else None,
            after=() if parent is None else (parent.request_id,),
            delay_s=None if parent is None else rng.random() * 3,
            delay_from=None if parent is None else rng.choice(("start", "end")),
            delay_kind=None if parent is None else rng.choice(("think", "tool", "none")),
            service_s=None if rng.random() < 0.5 else rng.random(),
            observed_cached_tokens=None if rng.random() < 0.5 else rng.randint(0, keep),
        )
        rows.append(row)
        last[session] = row
    meta = TraceMeta("invented", "synthetic", "a test", "Apache-2.0", mode="baked", answers="reused", notes={"a": [1]})
    return Trace(tuple(rows), roots, meta)


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """A valid trace from a seed."""
    return _trace


@pytest.fixture(scope="session")
def public_traces() -> Path:
    """The folder of public files beside the repository; skips where it is not."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("the public traces are not here")
    return folder
