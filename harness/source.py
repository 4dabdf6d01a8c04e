"""The trace that a configuration names, as the running side needs it: read or generated, scaled, with its prompts.

The only place that knows both the trace's table and the harness's rows.
"""

from __future__ import annotations

from engines.base import TokenArray
from harness.config import RunConfig
from harness.load import LoadedTrace, Row
from traces import formats, synth
from traces.errors import UserError
from traces.prompts import PromptBuilder
from traces.table import Trace, TraceRow, digest, scale, validate

HOUR_S, DAY_S = 3600.0, 86_400.0
SLICE_HOUR = 10.0
"""Slices begin at ten in the morning, two days apart from the third day on: neither at night's low nor at the peak."""
SYNTH_LOAD = 3.0
"""Density of the synthetic month: enough sessions run at any instant that a slice can be chosen among them."""
SYNTH_LOOKBACK_S, SYNTH_FUTURE_S = 4 * HOUR_S, 0.5 * HOUR_S
"""What is generated around a slice's start: the sessions that may run then, and those to come."""


def load_trace(config: RunConfig) -> LoadedTrace:
    """The trace that `config` names, scaled and checked. Raises UserError: no such file, a broken row (file, line,
    field), a scale out of range."""
    wanted = config.trace
    start_s = 0.0
    if wanted.name in synth.MONTHS:
        start_s = (2 + 2 * config.slice) * DAY_S + SLICE_HOUR * HOUR_S
        trace = synth.generate(
            wanted.name, seed=config.seed, start_s=start_s, duration_s=SYNTH_FUTURE_S,
            lookback_s=SYNTH_LOOKBACK_S, load=SYNTH_LOAD,
        )  # fmt: skip
    elif wanted.path is None:
        raise UserError(f"trace.path: trace={wanted.name} is read from a file; give trace.path=FILE")
    else:
        trace = formats.read(wanted.path, wanted.name, {"answers": wanted.answers, "seed": config.seed})
    trace = scale(trace, wanted.scale)
    validate(trace)
    rows = [_row(row) for row in trace.rows]
    roots = {name: _root_row(name, root.tokens) for name, root in trace.roots.items() if root.tokens > 0}
    meta = trace.meta
    return LoadedTrace(
        rows=rows,
        by_id={**roots, **{row.request_id: row for row in rows}},
        slice_start_s=start_s,
        has_sessions=meta.origin == "synthetic",
        info={
            "name": meta.name, "origin": meta.origin, "source": meta.source, "licence": meta.licence,
            "sha256": meta.sha256, "digest": digest(trace), "mode": meta.mode, "answers": meta.answers,
            "scale": wanted.scale, "notes": dict(meta.notes),
        },
        prompts=lambda run, _rows: TracePrompts(trace, run),
    )  # fmt: skip


def _row(row: TraceRow) -> Row:
    return Row(
        request_id=row.request_id, session_id=row.session_id, root_session_id=row.root_session_id, turn=row.turn,
        kind=row.kind, prefix_id=row.prefix_id, keep_tokens=row.keep_tokens, input_tokens=row.input_tokens,
        output_tokens=row.output_tokens, arrival_trace_s=row.arrival_s, after=row.after,
        gap_trace_s=row.delay_s or 0.0, is_gap_from_start=row.delay_from == "start", service_trace_s=row.service_s,
    )  # fmt: skip


def _root_row(name: str, tokens: int) -> Row:
    """A shared prompt as something to prime: never part of a slice."""
    return Row(
        request_id=name, session_id=name, root_session_id=name, turn=0, kind="main", prefix_id=None, keep_tokens=0,
        input_tokens=tokens, output_tokens=1, arrival_trace_s=None, after=(), gap_trace_s=0.0, is_gap_from_start=False,
        service_trace_s=None,
    )  # fmt: skip


class TracePrompts:
    """Prompts of a trace's rows and roots. With `history: recorded`, outputs stay the trace's own."""

    def __init__(self, trace: Trace, config: RunConfig) -> None:
        self._builder = PromptBuilder(trace, config.model.vocab_size, config.seed)
        self._roots = trace.roots
        self._is_live = config.history == "live"

    def prompt(self, request_id: str) -> TokenArray:
        return self._builder.prompt(request_id)

    def filled_history_tokens(self, request_id: str) -> int:
        return 0 if request_id in self._roots else self._builder.filled_history_tokens(request_id)

    def note_output(self, request_id: str, token_ids: list[int]) -> None:
        if self._is_live and request_id not in self._roots:
            self._builder.note_output(request_id, token_ids)
