"""WEKA / kv-cache-tester sessions: a JSON object with `requests`, or one a line (.jsonl) in the compact form.

Rules: times in seconds from the session's start; blocks of `block_size` (64) tokens, full blocks only (floor), hashes
chained and local to the session. A request has `t`, `in`, `out`, `hash_ids`, `api_time`, `think_time`. An entry of type
`subagent` has `requests` of its own, whose `t` counts from the marker; the session goes on when both its own last call
and its sub-agents have ended. Tool and system tokens are a root, warm and never sent, of a list's first request; after
that the hashes say what is shared. The compact form has `h` for `hash_ids`: [ref, keep, [[start, n], ...]], the first
`keep` ids of request `ref` (depth first, -1: none) and then runs. A session that repeats another's requests is dropped
and counted in `notes`, as are outputs of 0 tokens, which become 1.
`answers` (default reused): whether an answer is taken to stand in the next prompt; hashes do not say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.formats import _blocks, _fields, text_of
from traces.table import Root, Trace, TraceRow

NAME = "weka"
BLOCK_TOKENS = 64


def read(path: Path, options: Mapping[str, Any]) -> Trace:
    """More options: `limit` (sessions to read). Raises TraceError naming file, line, place and field."""
    answers, is_reused = _fields.is_reused(options.get("answers"), "reused")
    rows: list[TraceRow] = []
    roots: dict[str, Root] = {}
    names: set[str] = set()
    known: set[str] = set()
    num_read = num_dropped = num_raised = 0
    for where, raw in _sessions(path):
        if options.get("limit") is not None and len(names) >= options["limit"]:
            break
        num_read += 1
        content = json.dumps(raw["requests"], sort_keys=True)
        if content in known:
            num_dropped += 1
            continue
        known.add(content)
        session = _Session(where, path.name, raw, is_answer_reused=is_reused)
        if session.name in names:
            raise TraceError(where, "id", f"session {session.name!r} is there twice", "give each an id of its own")
        names.add(session.name)
        session.read()
        rows += session.rows
        roots |= session.roots
        num_raised += session.num_raised
    if not rows:
        raise TraceError(str(path), "file", "holds no request", "give a file of WEKA sessions")
    notes = {"sessions_read": num_read, "duplicates_dropped": num_dropped, "outputs_raised_to_1": num_raised}
    return Trace(tuple(rows), roots, _fields.meta_of(NAME, path, options, answers, notes))


def _sessions(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each session of the file."""
    text = text_of(path)
    if ".jsonl" in path.suffixes:
        numbered = [(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    else:
        numbered = [(str(path), text)]
    for where, part in numbered:
        raw = _fields.json_object(part, where, remedy="a WEKA session is an object; many, one a line, end in .jsonl")
        if not isinstance(raw.get("requests"), list):
            raise TraceError(where, "requests", "is missing or no list", "a WEKA session has a list `requests`")
        yield where, raw


class _Session:
    """One session being read: `rows` in order, a sub-agent's before the call that waits for them."""

    def __init__(self, where: str, file: str, raw: dict[str, Any], *, is_answer_reused: bool) -> None:
        self.name = str(raw.get("id", "session"))
        self.rows: list[TraceRow] = []
        self.roots: dict[str, Root] = {}
        self.num_raised = 0
        self._where = where
        self._place_in_file = file + where[where.rfind(file) + len(file) :]
        self._raw = raw
        self._is_answer_reused = is_answer_reused
        block = _fields.whole_number(raw.get("block_size", BLOCK_TOKENS), where, "block_size", minimum=1)
        self._index = _blocks.BlockIndex(block)
        self._hashes: list[list[int]] = []  # of all requests so far, depth first
        self._start_s: dict[str, float] = {}  # on the session's clock

    def read(self) -> None:
        self._list(self._raw, "requests", self.name, "main", 0.0, ())

    def _list(
        self, owner: dict[str, Any], place: str, session_id: str, kind: str, begin_s: float, after: Sequence[TraceRow]
    ) -> TraceRow | None:
        """Rows of one list. Returns the last of them, or None."""
        root = self._root(owner, f"{self._where}: {place}", session_id)
        waits_for = list(after)
        turn = num_subagents = 0
        last: TraceRow | None = None
        for number, entry in enumerate(owner["requests"]):
            where = f"{self._where}: {place}[{number}]"
            if not isinstance(entry, dict):
                raise TraceError(where, "entry", "is no JSON object", "mend or remove the entry")
            t_s = begin_s + _fields.seconds(entry.get("t"), where, "t")
            if entry.get("type") != "subagent":
                last = self._row(entry, where, session_id, kind, turn, t_s, waits_for, root)
                waits_for = [last]
                turn += 1
                continue
            if not isinstance(entry.get("requests"), list):
                raise TraceError(where, "requests", "is missing or no list", "a sub-agent has a list `requests`")
            num_subagents += 1
            inner = f"{place}[{number}].requests"
            starts_after = after if last is None else (last,)
            ended = self._list(entry, inner, f"{session_id}~{num_subagents}", "subagent", t_s, starts_after)
            if ended is not None:
                waits_for.append(ended)
        return last

    def _root(self, owner: dict[str, Any], where: str, session_id: str) -> Root:
        parts = [_fields.whole_number(owner.get(k, 0), where, k, minimum=0) for k in ("tool_tokens", "system_tokens")]
        return Root(f"{session_id}/system", sum(parts), f"session {self.name}")

    def _row(
        self, entry: dict[str, Any], where: str, session_id: str, kind: str, turn: int, t_s: float,
        waits_for: Sequence[TraceRow], root: Root,
    ) -> TraceRow:  # fmt: skip
        input_tokens = _fields.whole_number(entry.get("in"), where, "in", minimum=1)
        output_tokens = _fields.whole_number(entry.get("out"), where, "out", minimum=0)
        self.num_raised += output_tokens == 0
        hash_ids = self._hash_ids(entry, where)
        num_blocks = input_tokens // self._index.block_tokens
        if len(hash_ids) != num_blocks:
            raise TraceError(
                where, "hash_ids", f"{len(hash_ids)} blocks, but {input_tokens} tokens have {num_blocks} full ones",
                f"WEKA hashes full blocks of {self._index.block_tokens} tokens only",
            )  # fmt: skip
        prefix, keep = _blocks.shared_prefix(
            self._index, hash_ids, input_tokens, lambda: where, is_answer_reused=self._is_answer_reused
        )
        prefix_id = None if prefix is None else prefix.request_id
        if prefix is None and turn == 0:
            prefix_id, keep = root.root_id, min(root.tokens, input_tokens - 1)
            self.roots[root.root_id] = root
        is_first = not waits_for
        is_tool = (turn == 0 and kind == "subagent") or "tool_result" in (entry.get("input_types") or ())
        api_time = entry.get("api_time")
        row = TraceRow(
            request_id=f"{session_id}/{turn}",
            session_id=session_id,
            root_session_id=self.name,
            turn=turn,
            kind=kind,
            prefix_id=prefix_id if keep else None,
            keep_tokens=keep,
            input_tokens=input_tokens,
            output_tokens=max(1, output_tokens),
            raw_ref=f"{self._place_in_file}{where[len(self._where) :]}",
            arrival_s=t_s if is_first else None,
            after=tuple(row.request_id for row in waits_for),
            delay_s=None if is_first else self._delay_s(entry, where, t_s, waits_for),
            delay_from=None if is_first else "end",
            delay_kind=None if is_first else "tool" if is_tool else "think",
            service_s=None if api_time is None else _fields.seconds(api_time, where, "api_time"),
        )
        self._start_s[row.request_id] = t_s
        self._index.add(row, hash_ids)
        self._hashes.append(hash_ids)
        self.rows.append(row)
        return row

    def _delay_s(self, entry: dict[str, Any], where: str, t_s: float, waits_for: Sequence[TraceRow]) -> float:
        """From the end of the last of `waits_for` to `t_s`. Where one has no known end, the source's own `think_time`
        stands, or else the time since its start."""
        if entry.get("think_time") is not None and any(row.service_s is None for row in waits_for):
            return _fields.seconds(entry["think_time"], where, "think_time")
        ends = [self._start_s[row.request_id] + (row.service_s or 0.0) for row in waits_for]
        return round(max(0.0, t_s - max(ends)), 6)

    def _hash_ids(self, entry: dict[str, Any], where: str) -> list[int]:
        if "h" not in entry:
            return _fields.hash_list(entry.get("hash_ids"), where)
        try:
            ref, keep, runs = entry["h"]
            head = self._hashes[ref][:keep] if ref >= 0 else []
            return head + [hash_id for start, count in runs for hash_id in range(start, start + count)]
        except (TypeError, ValueError, IndexError) as error:
            raise TraceError(where, "h", f"is no [ref, keep, runs]: {error}", "mend the entry") from None
