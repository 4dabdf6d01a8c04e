"""WEKA / kv-cache-tester sessions: a JSON object with `requests` (also .gz), or one such object a line in the compact form.

Rules: times in seconds from the session's start, blocks of `block_size` (64) tokens, full blocks only (floor), hashes chained and local to the
session. A request has `t`, `in`, `out`, `hash_ids`, `api_time`. An entry of type `subagent` has `requests` of its own, whose `t` counts from the marker;
the main session goes on when both its own last call and the sub-agent's have ended. Tool and system tokens are a root of the session: warm, never
sent. The compact form has `h` for `hash_ids`: [ref, keep, [[start, n], ...]], the first `keep` ids of request `ref` (depth first, -1: none) and runs.
`answers` (default reused): whether an answer is taken to stand in the next prompt; the hashes do not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.formats import _blocks, sha256_of, text_of
from traces.table import Root, Trace, TraceMeta, TraceRow

NAME = "weka"


def read(path: Path, options: Mapping[str, Any]) -> Trace:
    """Options: `answers` (reused | absent), `limit` (sessions to read). Raises TraceError naming file, place and field."""
    answers, is_reused = _blocks.is_reused(options.get("answers"), "reused")
    rows: list[TraceRow] = []
    roots: dict[str, Root] = {}
    for where, raw in _sessions(path, options.get("limit")):
        session = _Session(where, raw, is_answer_reused=is_reused)
        session.read()
        if session.root.root_id in roots:
            raise TraceError(where, "id", f"session {session.name!r} is there twice")
        roots[session.root.root_id] = session.root
        rows.extend(session.rows)
    if not rows:
        raise TraceError(str(path), "file", "holds no request")
    meta = TraceMeta(NAME, "public", path.name, "see the file's source", sha256_of(path), "emergent", answers, {})
    return Trace(tuple(rows), roots, meta)


def _sessions(path: Path, limit: int | None) -> list[tuple[str, dict[str, Any]]]:
    text = text_of(path)
    try:
        whole = json.loads(text)
        found = [(str(path), whole)]
    except json.JSONDecodeError:
        found = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    found.append((f"{path}:{number}", json.loads(line)))
                except json.JSONDecodeError as error:
                    raise TraceError(f"{path}:{number}", "line", f"is no JSON: {error.msg}") from None
    for where, raw in found:
        if not isinstance(raw, dict) or not isinstance(raw.get("requests"), list):
            raise TraceError(where, "requests", "is missing or no list", "a WEKA file is an object with a list `requests`")
    return found[:limit]


@dataclass
class _Session:
    """One session being read. `hashes` are those of all its requests so far, depth first; `end_s` when each ended on its own clock."""

    where: str
    raw: dict[str, Any]
    is_answer_reused: bool
    rows: list[TraceRow] = field(default_factory=list)
    hashes: list[list[int]] = field(default_factory=list)
    end_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = str(self.raw.get("id", "session"))
        self.block = _blocks.whole_number(self.raw.get("block_size", 64), self.where, "block_size", minimum=1)
        self.index = _blocks.BlockIndex(self.block)
        tokens = sum(_blocks.whole_number(self.raw.get(key, 0), self.where, key, minimum=0) for key in ("tool_tokens", "system_tokens"))
        self.root = Root(f"{self.name}/system", tokens, f"session {self.name}")

    def read(self) -> None:
        self._list(self.raw["requests"], "requests", self.name, "main", begin_s=0.0, after=())

    def _list(
        self, entries: list[Any], place: str, session_id: str, kind: str, begin_s: float, after: tuple[TraceRow, ...]
    ) -> TraceRow | None:
        """Rows of one list. Returns its last row."""
        last = after[0] if after else None
        waits_for = list(after)
        turn = num_subagents = 0
        own_last: TraceRow | None = None
        for number, entry in enumerate(entries):
            where = f"{self.where}: {place}[{number}]"
            if not isinstance(entry, dict):
                raise TraceError(where, "entry", "is no JSON object")
            t_s = begin_s + _blocks.seconds(entry.get("t"), where, "t")
            if entry.get("type") == "subagent":
                num_subagents += 1
                inner = entry.get("requests")
                if not isinstance(inner, list):
                    raise TraceError(where, "requests", "is missing or no list")
                name = f"{session_id}~{num_subagents}"
                ended = self._list(
                    inner, f"{place}[{number}].requests", name, "subagent", t_s, (own_last,) if own_last else ()
                )
                if ended is not None:
                    waits_for.append(ended)
                continue
            row = self._row(entry, where, session_id, kind, turn, t_s, waits_for)
            self.rows.append(row)
            turn += 1
            own_last = last = row
            waits_for = [row]
        return own_last if own_last is not None else last

    def _row(
        self, entry: dict[str, Any], where: str, session_id: str, kind: str, turn: int, t_s: float, waits_for: list[TraceRow]
    ) -> TraceRow:
        input_tokens = _blocks.whole_number(entry.get("in"), where, "in", minimum=1)
        output_tokens = _blocks.whole_number(entry.get("out"), where, "out", minimum=0)
        hash_ids = self._hashes(entry, where)
        if len(hash_ids) != input_tokens // self.block:
            raise TraceError(
                where, "hash_ids", f"{len(hash_ids)} blocks, but {input_tokens} tokens have {input_tokens // self.block} full ones",
                f"WEKA hashes full blocks of {self.block} tokens only",
            )  # fmt: skip
        self.index.check_chained(hash_ids, lambda: where)
        prefix_id, keep = self._prefix(hash_ids, input_tokens)
        types = entry.get("input_types") or []
        is_first = not waits_for
        ready_s = max((self.end_s[row.request_id] for row in waits_for), default=0.0)
        row = TraceRow(
            request_id=f"{session_id}/{turn}", session_id=session_id, root_session_id=self.name, turn=turn, kind=kind,
            prefix_id=prefix_id if keep else None, keep_tokens=keep, input_tokens=input_tokens,
            output_tokens=max(1, output_tokens), raw_ref=where.rsplit("/", 1)[-1], arrival_s=t_s if is_first else None,
            after=tuple(row.request_id for row in waits_for),
            delay_s=None if is_first else round(max(0.0, t_s - ready_s), 6), delay_from=None if is_first else "end",
            delay_kind=None if is_first else ("tool" if "tool_result" in types else "think"),
            service_s=_blocks.seconds(entry.get("api_time", 0.0), where, "api_time"),
        )  # fmt: skip
        self.end_s[row.request_id] = t_s + (row.service_s or 0.0)
        self.index.add(row, hash_ids)
        self.hashes.append(hash_ids)
        return row

    def _prefix(self, hash_ids: list[int], input_tokens: int) -> tuple[str | None, int]:
        prefix, shared = self.index.longest(hash_ids)
        if prefix is None or shared < self.root.tokens:
            keep = min(self.root.tokens, input_tokens - 1)
            if keep > shared or prefix is None:
                return self.root.root_id, keep
        keep = _blocks.kept_tokens(
            prefix, shared, input_tokens, is_answer_reused=self.is_answer_reused, block_tokens=self.block
        )
        return prefix.request_id, keep

    def _hashes(self, entry: dict[str, Any], where: str) -> list[int]:
        if "h" not in entry:
            return _blocks.hash_list(entry.get("hash_ids"), where)
        try:
            ref, keep, runs = entry["h"]
            head = self.hashes[ref][:keep] if ref >= 0 else []
            return head + [hash_id for start, count in runs for hash_id in range(start, start + count)]
        except (TypeError, ValueError, IndexError) as error:
            raise TraceError(where, "h", f"is no [ref, keep, runs]: {error}") from None
