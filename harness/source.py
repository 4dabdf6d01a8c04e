"""The trace that a configuration names, as the running side needs it: read or generated, scaled, checked, with its prompts.

The only place that knows both the trace table and the harness's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from engines.base import TokenArray
from harness.config import RunConfig
from harness.load import LoadedTrace, Row
from traces import formats, synth
from traces.prompts import PromptBuilder
from traces.synth.agents import DAY_S, HOUR_S
from traces.table import Trace, TraceRow, digest, scale, validate

NUM_SLICES = 10
SLICE_HOUR = 10.0
"""Slices begin at ten in the morning, two days apart from the third day on: load is neither at night's low nor at its peak."""
LOOKBACK_S = 6 * HOUR_S
HORIZON_S = 1 * HOUR_S


def load_trace(config: RunConfig) -> LoadedTrace:
    """Raises UserError (TraceError): no such file, a broken row (file, line, field), a scale or slice out of range."""
    start_s = 0.0
    if config.trace.name in synth.MONTHS:
        start_s = (2 + 2 * (config.slice % NUM_SLICES)) * DAY_S + SLICE_HOUR * HOUR_S
        trace = synth.generate(
            config.trace.name, seed=config.seed, start_s=start_s, duration_s=HORIZON_S, lookback_s=LOOKBACK_S
        )
    else:
        trace = formats.read(
            config.trace.path or "", config.trace.name, {"answers": config.trace.answers, "seed": config.seed}
        )
    trace = scale(trace, config.trace.scale)
    validate(trace)
    rows = [_row(row) for row in trace.rows]
    by_id = {row.request_id: row for row in rows}
    by_id |= {name: _root_row(name, root.tokens) for name, root in trace.roots.items()}
    return LoadedTrace(
        rows=rows,
        by_id=by_id,
        slice_start_s=start_s,
        has_sessions=any(row.after for row in rows),
        info={**asdict(trace.meta), "digest": digest(trace), "scale": config.trace.scale, "num_rows": len(rows)},
        prompts=lambda run, chosen: _Prompts(trace, run),
    )


def _row(row: TraceRow) -> Row:
    return Row(
        request_id=row.request_id,
        session_id=row.session_id,
        root_session_id=row.root_session_id,
        turn=row.turn,
        kind=row.kind,
        prefix_id=row.prefix_id,
        keep_tokens=row.keep_tokens,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        arrival_trace_s=row.arrival_s,
        after=row.after,
        gap_trace_s=row.delay_s or 0.0,
        is_gap_from_start=row.delay_from == "start",
        service_trace_s=row.service_s,
    )


def _root_row(name: str, tokens: int) -> Row:
    """A root as something that can be primed: its prompt alone, one token of output."""
    return Row(
        request_id=name, session_id=name, root_session_id=name, turn=0, kind="main", prefix_id=None, keep_tokens=0,
        input_tokens=tokens, output_tokens=1, arrival_trace_s=0.0, after=(), gap_trace_s=0.0, is_gap_from_start=False,
        service_trace_s=None,
    )  # fmt: skip


class _Prompts:
    """Prompts of one run: live history notes what the model said, recorded history does not."""

    def __init__(self, trace: Trace, config: RunConfig) -> None:
        self._builder = PromptBuilder(trace, config.model.vocab_size, config.seed)
        self._roots = trace.roots
        self._is_live = config.history == "live"

    def prompt(self, request_id: str) -> TokenArray:
        return self._builder.prompt(request_id)

    def filled_history_tokens(self, request_id: str) -> int:
        return 0 if request_id in self._roots else self._builder.filled_history_tokens(request_id)

    def note_output(self, request_id: str, token_ids: Sequence[int]) -> None:
        if self._is_live and request_id not in self._roots:
            self._builder.note_output(request_id, np.asarray(token_ids, dtype=np.int32))
