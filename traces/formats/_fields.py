"""What readers share: values from JSON, checked by type and range, and where a trace came from. Every error names its
place and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.formats import sha256_of
from traces.table import TraceMeta

MAX_TOKENS = 10**9


def json_object(text: str, where: str, *, remedy: str) -> dict[str, Any]:
    """`text` as a JSON object. Raises TraceError."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(where, "line", f"is no JSON: {getattr(error, 'msg', error)}", remedy) from None
    if not isinstance(found, dict):
        raise TraceError(where, "line", f"is a JSON {type(found).__name__}, no object", remedy)
    return found


def whole_number(value: object, where: str, field: str, *, minimum: int) -> int:
    """A JSON number that is a whole one of at least `minimum` and no nonsense. Raises TraceError."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_TOKENS:
        reason = f"must be a whole number of at least {minimum} and at most {MAX_TOKENS:,}, got {value!r}"
        raise TraceError(where, field, reason, "mend the row")
    return value


def seconds(value: object, where: str, field: str) -> float:
    """A JSON number that is finite and not negative. Raises TraceError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise TraceError(where, field, f"must be a number of 0 or more, got {value!r}", "mend the row")
    return float(value)


def hash_list(value: object, where: str) -> list[int]:
    """A JSON list of whole numbers. Raises TraceError."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise TraceError(where, "hash_ids", "must be a list of whole numbers", "mend the row")
    return value


def is_reused(answers: object, default: str) -> tuple[str, bool]:
    """The option `answers` and what it means; None takes the format's default. Raises TraceError."""
    chosen = default if answers is None else str(answers)
    if chosen not in ("reused", "absent"):
        raise TraceError("trace", "trace.answers", f"must be reused or absent, got {chosen!r}")
    return chosen, chosen == "reused"


def meta_of(
    name: str, path: Path, options: Mapping[str, Any], answers: str | None, notes: Mapping[str, Any]
) -> TraceMeta:
    """Where the trace came from, as far as the options say; its misses are left to the cache under test."""
    return TraceMeta(
        name=name,
        origin=options.get("origin") or "public",
        source=options.get("source") or path.name,
        licence=options.get("licence") or "unknown: see the file's source",
        sha256=sha256_of(path),
        mode="emergent",
        answers=answers,
        notes=notes,
    )
