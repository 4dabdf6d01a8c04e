"""Mooncake JSONL: one request a line with `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`.

Rules: blocks of 512 tokens, the last one partial (ceil), hashes chained and global to the file. No sessions: each
request is one of its own, sent at its time. Stamps are coarse (many requests share one): requests of one stamp are
spread over the tick, seeded, and `notes.spread` says so. An output of 0 tokens becomes 1, counted in `notes`.
`answers` (default absent): whether an answer is taken to stand in the prompt that goes on from it; hashes do not say.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.formats import _blocks, _fields, text_of
from traces.table import Trace, TraceRow

NAME = "mooncake"
BLOCK_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(path: Path, options: Mapping[str, Any]) -> Trace:
    """More options: `seed` of the spread, `limit` (rows to read). Raises TraceError with file:line and field."""
    answers, is_reused = _fields.is_reused(options.get("answers"), "absent")
    seed = int(options.get("seed") or 0)
    index = _blocks.BlockIndex(BLOCK_TOKENS)
    rows: list[TraceRow] = []
    last_s = 0.0
    num_raised = 0
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if options.get("limit") is not None and len(rows) >= options["limit"]:
            break
        if not line.strip():
            continue
        where = f"{path}:{number}"
        raw = _fields.json_object(line, where, remedy="mend or remove the line")
        for key in KEYS:
            if key not in raw:
                raise TraceError(where, key, "is missing", f"a Mooncake line has {', '.join(KEYS)}")
        row = _row(raw, number, where, path.name, index, is_answer_reused=is_reused)
        if (row.arrival_s or 0.0) < last_s:
            raise TraceError(where, "timestamp", "goes back in time", "sort the file by timestamp")
        last_s = row.arrival_s or 0.0
        num_raised += raw["output_length"] == 0
        rows.append(row)
    if not rows:
        raise TraceError(str(path), "file", "holds no request", "give a file of Mooncake lines")
    rows, tick_s = _spread(rows, seed)
    notes = {
        "block_tokens": BLOCK_TOKENS,
        "spread": {"tick_s": tick_s, "seed": seed},
        "outputs_raised_to_1": num_raised,
    }
    return Trace(tuple(rows), {}, _fields.meta_of(NAME, path, options, answers, notes))


def _row(
    raw: dict[str, Any], number: int, where: str, file: str, index: _blocks.BlockIndex, *, is_answer_reused: bool
) -> TraceRow:
    input_tokens = _fields.whole_number(raw["input_length"], where, "input_length", minimum=1)
    output_tokens = _fields.whole_number(raw["output_length"], where, "output_length", minimum=0)
    hash_ids = _fields.hash_list(raw["hash_ids"], where)
    num_blocks = -(-input_tokens // BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise TraceError(
            where, "hash_ids", f"{len(hash_ids)} blocks, but {input_tokens} tokens are {num_blocks} of {BLOCK_TOKENS}",
            "Mooncake hashes the last, partial block too",
        )  # fmt: skip
    prefix, keep = _blocks.shared_prefix(
        index, hash_ids, input_tokens, lambda: where, is_answer_reused=is_answer_reused
    )
    request_id = f"{NAME}/{number}"
    row = TraceRow(
        request_id=request_id,
        session_id=request_id,
        root_session_id=request_id,
        turn=0,
        kind="main",
        prefix_id=prefix.request_id if prefix is not None and keep else None,
        keep_tokens=keep,
        input_tokens=input_tokens,
        output_tokens=max(1, output_tokens),
        raw_ref=f"{file}:{number}",
        arrival_s=_fields.seconds(raw["timestamp"], where, "timestamp") / 1e3,
    )
    index.add(row, hash_ids)
    return row


def _spread(rows: list[TraceRow], seed: int) -> tuple[list[TraceRow], float]:
    """Requests of one stamp spread over [stamp, stamp + tick), in their order; and the tick, in seconds: the smallest
    gap between stamps."""
    by_stamp: dict[float, list[TraceRow]] = defaultdict(list)
    for row in rows:
        by_stamp[row.arrival_s or 0.0].append(row)
    tick_s = round(min((later - earlier for earlier, later in itertools.pairwise(by_stamp)), default=0.0), 6)
    rng = random.Random(seed)
    spread = []
    for stamp, group in by_stamp.items():
        offsets = sorted(rng.random() * tick_s for _ in group) if len(group) > 1 else [0.0]
        spread += [replace(row, arrival_s=stamp + offset) for row, offset in zip(group, offsets, strict=True)]
    return spread, tick_s
