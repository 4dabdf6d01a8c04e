"""What a trace holds: lengths, sessions, and the hits that a cache of unlimited size would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.table import Trace

BIN_EDGES = (0.0, 0.90, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
BIN_LABELS = ("[0,.90)", "[.90,.95)", "[.95,.96)", "[.96,.97)", "[.97,.98)", "[.98,.99)", "[.99,1]")


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares are of requests and sum to 1; lengths in tokens."""

    num_requests: int
    num_sessions: int
    mean_input: float
    mean_output: float
    mean_hit: float
    token_weighted_hit: float
    bin_shares: tuple[float, ...]
    singular_share: float


def ideal_hits(trace: Trace, page_size: int = 1) -> npt.NDArray[np.int64]:
    """Hit tokens per row under a cache that keeps all, prompts and outputs, with roots warm; shape (rows,).

    A row's hit is what it keeps of its prefix, floored to whole pages; at least one token is left to compute.
    """
    keep = np.array([row.keep_tokens for row in trace.rows], dtype=np.int64)
    inputs = np.array([row.input_tokens for row in trace.rows], dtype=np.int64)
    hits: npt.NDArray[np.int64] = np.minimum(keep, inputs - 1) // page_size * page_size
    return hits


def bin_shares(ratios: npt.NDArray[np.float64] | Sequence[float]) -> tuple[float, ...]:
    """Share of values in each of the seven hit-ratio bins; the last one has both its ends."""
    counts, _ = np.histogram(np.asarray(ratios, dtype=np.float64), bins=np.array(BIN_EDGES))
    total = max(1, int(counts.sum()))
    return tuple(float(count) / total for count in counts)


def profile(trace: Trace, page_size: int = 1) -> Profile:
    """The figures above for all rows of `trace`."""
    inputs = np.array([row.input_tokens for row in trace.rows], dtype=np.float64)
    hits = ideal_hits(trace, page_size).astype(np.float64)
    ratios = hits / inputs
    return Profile(
        num_requests=len(trace.rows),
        num_sessions=len({row.session_id for row in trace.rows}),
        mean_input=float(inputs.mean()),
        mean_output=float(np.mean([row.output_tokens for row in trace.rows])),
        mean_hit=float(ratios.mean()),
        token_weighted_hit=float(hits.sum() / inputs.sum()),
        bin_shares=bin_shares(ratios),
        singular_share=float(np.mean([row.kind == "singular" for row in trace.rows])),
    )
