"""The one internal form of a trace: rows, shared roots, where it came from; its checks; Parquet in and out.

A prompt is the first `keep_tokens` of the prefix's prompt followed by its output, then new tokens. The prefix is an
earlier request or a root (a shared system prompt, never sent). Time comes from `arrival_s` or `after` alone, never from
the prefix. What is unknown is null. Nothing here makes tokens or sends anything.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import TraceError

SCHEMA_VERSION = 1
SEGMENT = pa.struct([("role", pa.string()), ("tokens", pa.int64()), ("ref", pa.string())])
REQUEST_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("session_id", pa.string()),
        ("root_session_id", pa.string()),
        ("turn", pa.int32()),
        ("kind", pa.string()),
        ("prefix_id", pa.string()),
        ("keep_tokens", pa.int64()),
        ("input_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("segments", pa.list_(SEGMENT)),
        ("raw_ref", pa.string()),
        ("arrival_s", pa.float64()),
        ("after", pa.list_(pa.string())),
        ("delay_s", pa.float64()),
        ("delay_from", pa.string()),
        ("delay_kind", pa.string()),
        ("service_s", pa.float64()),
        ("observed_cached_tokens", pa.int64()),
    ]
)
ROOT_SCHEMA = pa.schema([("root_id", pa.string()), ("tokens", pa.int64()), ("scope", pa.string())])
KINDS = ("main", "subagent", "singular")
ORIGINS = ("synthetic", "public", "yours")
MODES = ("baked", "emergent")


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the new tokens: whose they are; `ref` names the text in a side table, if any."""

    role: str
    tokens: int
    ref: str | None = None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Lengths in tokens, times in seconds.

    Either it is sent at `arrival_s`, or `delay_s` after the last of `after` has ended (or started: `delay_from`).
    """

    request_id: str
    session_id: str
    root_session_id: str
    turn: int
    kind: str
    prefix_id: str | None
    keep_tokens: int
    input_tokens: int
    output_tokens: int
    segments: tuple[Segment, ...] | None = None
    raw_ref: str | None = None
    arrival_s: float | None = None
    after: tuple[str, ...] = ()
    delay_s: float | None = None
    delay_from: str | None = None
    delay_kind: str | None = None
    service_s: float | None = None
    observed_cached_tokens: int | None = None

    @property
    def new_tokens(self) -> int:
        return self.input_tokens - self.keep_tokens


@dataclass(frozen=True, slots=True)
class Root:
    """A shared system prompt: `tokens` long, known to all of `scope`. Never sent."""

    root_id: str
    tokens: int
    scope: str = "global"


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """Where a trace came from. `origin` is synthetic, public or yours. `sha256` is of the file that was read.

    `mode` says whether misses stand in the content (baked) or are left to the cache under test (emergent). `answers`
    says whether answers come back in later prompts (reused | absent). `notes` holds what JSON can hold.
    """

    name: str
    origin: str
    source: str
    licence: str
    sha256: str | None = None
    mode: str = "emergent"
    answers: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order (a prefix stands before what uses it), roots by id, origin."""

    rows: tuple[TraceRow, ...]
    roots: Mapping[str, Root]
    meta: TraceMeta


def validate(trace: Trace) -> None:
    """Raises TraceError for the first root or row that breaks a rule, naming it, its field and the reason."""
    _check_head(trace)
    seen: dict[str, TraceRow] = {}
    turns: dict[str, int] = {}
    for index, row in enumerate(trace.rows):
        where = f"{trace.meta.name}: row {index} ({row.request_id})"
        if not row.request_id or row.request_id in seen or row.request_id in trace.roots:
            raise TraceError(where, "request_id", "empty or used before", "give every request an id of its own")
        _check_row(where, row)
        if row.prefix_id is None:
            limit = 0
        elif row.prefix_id in trace.roots:
            limit = trace.roots[row.prefix_id].tokens
        elif row.prefix_id in seen:
            prefix = seen[row.prefix_id]
            limit = prefix.input_tokens + prefix.output_tokens
        else:
            raise TraceError(
                where, "prefix_id", f"{row.prefix_id!r} is neither an earlier request nor a root",
                "put a row after its prefix",
            )  # fmt: skip
        if row.keep_tokens > limit:
            raise TraceError(where, "keep_tokens", f"{row.keep_tokens} exceed the prefix's {limit} tokens")
        for name in row.after:
            if name not in seen:
                raise TraceError(where, "after", f"{name!r} is no earlier request", "order rows by what they wait for")
        if row.turn <= turns.get(row.session_id, -1):
            raise TraceError(where, "turn", f"{row.turn} does not come after {turns[row.session_id]}")
        turns[row.session_id] = row.turn
        seen[row.request_id] = row


def _check_head(trace: Trace) -> None:
    for field_name, value, known in (
        ("origin", trace.meta.origin, ORIGINS),
        ("mode", trace.meta.mode, MODES),
        ("answers", trace.meta.answers, (None, "reused", "absent")),
    ):
        if value not in known:
            raise TraceError(trace.meta.name, field_name, f"{value!r} is none of {', '.join(map(str, known))}")
    for root_id, root in trace.roots.items():
        where = f"{trace.meta.name}: root {root_id}"
        if root.root_id != root_id:
            raise TraceError(where, "root_id", f"stands under another name, {root.root_id!r}")
        if root.tokens < 0:
            raise TraceError(where, "tokens", f"must be 0 or more, got {root.tokens}")


def _check_row(where: str, row: TraceRow) -> None:
    if row.kind not in KINDS:
        raise TraceError(where, "kind", f"{row.kind!r} is none of {', '.join(KINDS)}")
    if row.keep_tokens < 0:
        raise TraceError(where, "keep_tokens", f"must be 0 or more, got {row.keep_tokens}")
    if row.new_tokens < 1:
        raise TraceError(where, "input_tokens", f"{row.input_tokens} leave no new token after {row.keep_tokens} kept")
    if row.output_tokens < 1:
        raise TraceError(where, "output_tokens", f"must be 1 or more, got {row.output_tokens}")
    if (row.arrival_s is None) == (not row.after):
        raise TraceError(where, "arrival_s", "exactly one of arrival_s and after must be given")
    for name in ("arrival_s", "delay_s", "service_s"):
        value = getattr(row, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise TraceError(where, name, f"must be a finite number of 0 or more, got {value}")
    if row.delay_from not in (None, "end", "start"):
        raise TraceError(where, "delay_from", f"{row.delay_from!r} is neither end nor start")
    if row.delay_kind not in (None, "think", "tool", "none"):
        raise TraceError(where, "delay_kind", f"{row.delay_kind!r} is none of think, tool, none")
    if row.segments is not None:
        lengths = [segment.tokens for segment in row.segments]
        if min(lengths, default=0) < 0 or sum(lengths) != row.new_tokens:
            raise TraceError(where, "segments", f"{lengths} are not parts of the {row.new_tokens} new tokens")


def scale(trace: Trace, factor: float) -> Trace:
    """Token counts times `factor`, so that hit ratios stay as they are.

    Cumulative positions (keep, input, input + output) are floored; new and output are at least 1. Roots and prefixes
    shrink alike, so that what is kept stays within them. Raises TraceError unless 0 < factor <= 1.
    """
    if not 0 < factor <= 1:
        raise TraceError(trace.meta.name, "trace.scale", f"must be above 0 and at most 1, got {factor}")
    if factor == 1:
        return trace
    roots = {name: replace(root, tokens=int(root.tokens * factor)) for name, root in trace.roots.items()}
    rows = []
    for row in trace.rows:
        keep = int(row.keep_tokens * factor)
        input_tokens = max(int(row.input_tokens * factor), keep + 1)
        observed = row.observed_cached_tokens
        rows.append(
            replace(
                row,
                keep_tokens=keep,
                input_tokens=input_tokens,
                # Not less than the floored end: the next turn's floored keep must lie within it.
                output_tokens=max(int((row.input_tokens + row.output_tokens) * factor) - input_tokens, 1),
                segments=None if row.segments is None else _scaled(row, factor, keep, input_tokens),
                observed_cached_tokens=None if observed is None else int(observed * factor),
            )
        )
    notes = {**trace.meta.notes, "scale": factor * float(trace.meta.notes.get("scale", 1.0))}
    return Trace(tuple(rows), roots, replace(trace.meta, notes=notes))


def _scaled(row: TraceRow, factor: float, keep: int, input_tokens: int) -> tuple[Segment, ...]:
    """The row's segments with their ends floored; the last end is the new prompt's. Empty ones go."""
    found, end, old_end = [], keep, row.keep_tokens
    for index, segment in enumerate(row.segments or ()):
        old_end += segment.tokens
        is_last = index + 1 == len(row.segments or ())
        new_end = input_tokens if is_last else min(int(old_end * factor), input_tokens)
        if new_end > end:
            found.append(replace(segment, tokens=new_end - end))
            end = new_end
    return tuple(found)


def to_table(trace: Trace) -> pa.Table:
    """The rows as an Arrow table of REQUEST_SCHEMA."""
    names = [item.name for item in fields(TraceRow)]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row in trace.rows:
        for name in names:
            value = getattr(row, name)
            if name == "segments" and value is not None:
                value = [asdict(segment) for segment in value]
            columns[name].append(list(value) if name == "after" else value)
    return pa.table(columns, schema=REQUEST_SCHEMA)


def write_parquet(trace: Trace, path: Path) -> None:
    """One file: the rows, with roots and origin in the schema's metadata."""
    about = {
        "schema_version": SCHEMA_VERSION,
        "meta": asdict(trace.meta),
        "roots": [asdict(root) for root in trace.roots.values()],
    }
    table = to_table(trace).replace_schema_metadata({b"trace": json.dumps(about, sort_keys=True).encode()})
    pq.write_table(table, path, compression="zstd")


def read_parquet(path: Path) -> Trace:
    """What `write_parquet` wrote, checked. Raises TraceError for a file that is not one of ours or breaks a rule."""
    try:
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"trace"])
        version = about["schema_version"]
        roots = {item["root_id"]: Root(**item) for item in about["roots"]}
        meta = TraceMeta(**about["meta"])
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise TraceError(str(path), "file", f"is no trace in Parquet: {error!r}", "write it anew") from None
    if version != SCHEMA_VERSION:
        raise TraceError(str(path), "schema_version", f"{version} is not {SCHEMA_VERSION}", "write the trace anew")
    if not table.schema.equals(REQUEST_SCHEMA, check_metadata=False):
        raise TraceError(str(path), "schema", "has other columns or types than a trace", "write the trace anew")
    trace = Trace(tuple(_rows_of(table)), roots, meta)
    validate(trace)
    return trace


def _rows_of(table: pa.Table) -> Iterable[TraceRow]:
    for item in table.to_pylist():
        if item["segments"] is not None:
            item["segments"] = tuple(Segment(**segment) for segment in item["segments"])
        item["after"] = tuple(item["after"] or ())
        yield TraceRow(**item)


def digest(trace: Trace) -> str:
    """SHA-256 of rows and roots: equal digests mean equal requests at equal times."""
    found = hashlib.sha256()
    for root in sorted(trace.roots.values(), key=lambda one: one.root_id):
        found.update(repr(root).encode())
    for row in trace.rows:
        found.update(repr(row).encode())
    return found.hexdigest()
