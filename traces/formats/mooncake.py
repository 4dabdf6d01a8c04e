"""Mooncake JSONL: one request a line with `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`.

Rules: blocks of 512 tokens, the last one partial (ceil), hashes chained and global to the file. No sessions: each request is one of its own,
sent at its time. Stamps are coarse (many requests share one): requests of one stamp are spread over the tick, seeded, and `notes.spread` says so.
`answers` (default absent): whether an answer is taken to stand in the prompt that goes on from it; the hashes do not say.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.formats import _blocks, sha256_of, text_of
from traces.table import Trace, TraceMeta, TraceRow

NAME = "mooncake"
BLOCK_TOKENS = 512


def read(path: Path, options: Mapping[str, Any]) -> Trace:
    """Options: `answers` (absent | reused), `seed` of the spread, `limit` (rows to read). Raises TraceError with file:line and field."""
    answers, is_reused = _blocks.is_reused(options.get("answers"), "absent")
    index = _blocks.BlockIndex(BLOCK_TOKENS)
    rows: list[TraceRow] = []
    last_ms = 0.0
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        if options.get("limit") is not None and len(rows) >= options["limit"]:
            break
        where = f"{path}:{number}"
        row, hash_ids = _row(line, where, index, is_answer_reused=is_reused)
        if (row.arrival_s or 0.0) < last_ms:
            raise TraceError(where, "timestamp", "goes back in time", "sort the file by timestamp")
        last_ms = row.arrival_s or 0.0
        index.add(row, hash_ids)
        rows.append(row)
    if not rows:
        raise TraceError(str(path), "file", "holds no request")
    spread, tick_s = _spread(rows, int(options.get("seed") or 0))
    notes = {"block_tokens": BLOCK_TOKENS, "spread": {"tick_s": tick_s, "seed": int(options.get("seed") or 0)}}
    meta = TraceMeta(
        NAME, "public", str(path.name), "see the file's source", sha256_of(path), "emergent", answers, notes
    )
    return Trace(tuple(spread), {}, meta)


def _row(line: str, where: str, index: _blocks.BlockIndex, *, is_answer_reused: bool) -> tuple[TraceRow, list[int]]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(where, "line", f"is no JSON: {error.msg}", "mend or remove the line") from None
    if not isinstance(raw, dict):
        raise TraceError(where, "line", "is no JSON object")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in raw:
            raise TraceError(where, key, "is missing")
    input_tokens = _blocks.whole_number(raw["input_length"], where, "input_length", minimum=1)
    output_tokens = _blocks.whole_number(raw["output_length"], where, "output_length", minimum=0)
    hash_ids = _blocks.hash_list(raw["hash_ids"], where)
    if len(hash_ids) != -(-input_tokens // BLOCK_TOKENS):
        raise TraceError(
            where, "hash_ids", f"{len(hash_ids)} blocks, but {input_tokens} tokens are {-(-input_tokens // BLOCK_TOKENS)} of 512",
            "Mooncake hashes the last, partial block too",
        )  # fmt: skip
    index.check_chained(hash_ids, lambda: where)
    prefix, shared = index.longest(hash_ids)
    keep = 0
    if prefix is not None:
        keep = _blocks.kept_tokens(
            prefix, shared, input_tokens, is_answer_reused=is_answer_reused, block_tokens=BLOCK_TOKENS
        )
    request_id = f"mooncake/{where.rsplit(':', 1)[1]}"
    row = TraceRow(
        request_id=request_id, session_id=request_id, root_session_id=request_id, turn=0, kind="main",
        prefix_id=prefix.request_id if prefix is not None and keep else None, keep_tokens=keep, input_tokens=input_tokens,
        output_tokens=max(1, output_tokens), raw_ref=where.rsplit("/", 1)[-1],
        arrival_s=_blocks.seconds(raw["timestamp"], where, "timestamp") / 1e3,
    )  # fmt: skip
    return row, hash_ids


def _spread(rows: list[TraceRow], seed: int) -> tuple[list[TraceRow], float]:
    """Requests of one stamp spread over [stamp, stamp + tick), in their order; the tick is the smallest gap between stamps."""
    stamps = sorted({row.arrival_s or 0.0 for row in rows})
    gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
    tick_s = min(gaps, default=0.0)
    by_stamp: dict[float, list[TraceRow]] = defaultdict(list)
    for row in rows:
        by_stamp[row.arrival_s or 0.0].append(row)
    rng = random.Random(seed)
    spread = []
    for stamp in stamps:
        group = by_stamp[stamp]
        offsets = sorted(rng.random() * tick_s for _ in group) if len(group) > 1 else [0.0]
        spread += [replace(row, arrival_s=stamp + offset) for row, offset in zip(group, offsets, strict=True)]
    return spread, tick_s
