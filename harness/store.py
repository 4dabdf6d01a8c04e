"""A run's files: Arrow IPC parts while it runs, Parquet when it ends, manifest and summary; and reading them back.

Finished records reach the disk at every `flush`. A kill loses what came after the last one, and `recover` turns the
rest into Parquet. Nothing here derives a figure, and no value of the environment is ever written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from engines.base import CacheEvent
from harness.record import Chunk, RequestRecord, SpanRow
from traces.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
PARTS = "parts"


class ResultsError(UserError):
    """A run's folder that cannot be written or read: which file, why, what to do."""


def _arrow_type(hint: Any) -> pa.DataType:
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    found: pa.DataType = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[hint]
    return found


def _schema_of(record: type) -> pa.Schema:
    hints = typing.get_type_hints(record)
    return pa.schema([(field.name, _arrow_type(hints[field.name])) for field in dataclasses.fields(record)])


def _schema(**columns: type) -> pa.Schema:
    return pa.schema([(name, _arrow_type(hint)) for name, hint in columns.items()])


SCHEMAS: dict[str, pa.Schema] = {
    "requests": _schema_of(RequestRecord),
    "chunks": _schema(request_id=str, first_index=int, time_ns=int, step_ns=int, count=int, source=str),
    "spans": _schema(request_id=str, name=str, start_ns=int, end_ns=int, critical=bool, instance=str),
    "links": _schema(
        time_ns=int, link=str, direction=str, route=str, bytes_total=int, kv_bytes=int, configured_rate_bps=float,
        configured_flow_rate_bps=float, realised_rate_bps=float, delay_p50_ns=int, delay_p95_ns=int,
        late_share=float, busy_ns=int,
    ),
    "instances": _schema(
        time_ns=int, instance=str, role=str, site=str, pid=int, steps=int, busy_ns=int, compute_ns=int, overrun_ns=int,
        overrun_steps=int, pages_total=int, pages_free=int, pages_cached=int, num_legs=int, num_running=int,
        num_waiting=int, aborted=int, refused=int, late_frames=int, stale_messages=int, frames_refused=int,
        rss_bytes=int,
    ),
    "sessions": _schema(
        session_id=str, root_session_id=str, entry_turn=int, turns_planned=int, turns_done=int, turns_failed=int,
        turns_skipped=int, start_ns=int, end_ns=int, status=str,
    ),
    "cache_events": _schema(request_id=str, instance=str, seq=int, op=str, tokens=int),
}  # fmt: skip


class _Part:
    """One file of the run while it runs: rows in memory until the next flush, then a batch of an IPC stream."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        self._file = path.open("wb")
        self._writer = pa.ipc.new_stream(self._file, schema)

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)

    def flush(self) -> None:
        if not self._rows:
            return
        names = self._schema.names
        columns = {name: [row.get(name) for row in self._rows] for name in names}
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._file.flush()
        self._rows.clear()

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._file.close()


@dataclass(frozen=True)
class Run:
    """A run read back: frames of pandas by file name; a file that is not there gives an empty frame."""

    path: Path
    manifest: Mapping[str, Any]
    requests: pd.DataFrame
    chunks: pd.DataFrame
    spans: pd.DataFrame
    links: pd.DataFrame
    instances: pd.DataFrame
    sessions: pd.DataFrame
    cache_events: pd.DataFrame


class RunStore:
    """Writes one run. Every method raises ResultsError where the disk says no."""

    def __init__(self, run_dir: Path, manifest: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.manifest = manifest
        self._planned: dict[str, tuple[int | None, int | None]] = {}
        with _disk(run_dir):
            (run_dir / PARTS).mkdir(parents=True, exist_ok=True)
            write_json(run_dir / "manifest.json", manifest)
            self._parts = {name: _Part(run_dir / PARTS / f"{name}.arrows", schema) for name, schema in SCHEMAS.items()}

    @classmethod
    def create(cls, run_dir: Path, manifest: dict[str, Any]) -> RunStore:
        """A new run in `run_dir`; the manifest is on disk when this returns."""
        return cls(run_dir, {**manifest, "schema_version": SCHEMA_VERSION})

    def add_request(
        self,
        record: RequestRecord,
        chunks: Iterable[Chunk],
        spans: Iterable[SpanRow],
        cache_events: Iterable[CacheEvent],
    ) -> None:
        """A request that has ended, with all that belongs to it."""
        self._parts["requests"].add({name: getattr(record, name) for name in SCHEMAS["requests"].names})
        for chunk in chunks:
            self._parts["chunks"].add({"request_id": record.request_id, **dataclasses.asdict(chunk)})
        for span in spans:
            self._parts["spans"].add(span._asdict())
        self.add_cache_events(record.request_id, cache_events)

    def add_cache_events(self, request_id: str, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self._parts["cache_events"].add(
                {
                    "request_id": request_id,
                    "instance": event.instance,
                    "seq": event.seq,
                    "op": event.op,
                    "tokens": event.tokens,
                }
            )

    def add_links(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._parts["links"].add(row)

    def add_instances(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._parts["instances"].add(row)

    def add_session(self, row: Mapping[str, Any]) -> None:
        self._parts["sessions"].add(row)

    def set_planned_hits(self, planned: Mapping[str, tuple[int | None, int | None]]) -> None:
        """Planned hit tokens at (P, MD) by request; they enter their columns at `close`."""
        self._planned.update(planned)

    def flush(self) -> None:
        """All rows so far reach the disk."""
        with _disk(self.run_dir):
            for part in self._parts.values():
                part.flush()

    def close(self, manifest_updates: Mapping[str, Any], summary: Mapping[str, Any] | None) -> Run:
        """Parts become Parquet, the manifest its final words; with a `summary` summary.json is written too. Gives the
        run read back."""
        with _disk(self.run_dir):
            for part in self._parts.values():
                part.close()
            _parts_to_parquet(self.run_dir, self._planned)
            self.manifest.update(manifest_updates)
            write_json(self.run_dir / "manifest.json", self.manifest)
            if summary is not None:
                self.write_summary(summary)
        return read_run(self.run_dir)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with _disk(self.run_dir):
            write_json(self.run_dir / "summary.json", summary)


@contextlib.contextmanager
def _disk(run_dir: Path) -> typing.Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"{run_dir}: cannot be written: {error.strerror or error}; free some space or choose another results_dir. "
            f"What was flushed before stays: python -m harness.results recover {run_dir}"
        ) from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write and rename, so that a reader sees the old file or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value, indent=1, sort_keys=True, default=str) + "\n")
    os.replace(draft, path)


def _read_part(path: Path, schema: pa.Schema) -> pa.Table:
    """All whole batches of an IPC stream; one that a kill has torn is left out."""
    batches: list[pa.RecordBatch] = []
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            while True:
                batches.append(reader.read_next_batch())
    except (StopIteration, pa.ArrowInvalid, OSError, EOFError):
        # The end of the stream, or the point up to which it is whole.
        return pa.Table.from_batches(batches, schema=schema)


def _parts_to_parquet(run_dir: Path, planned: Mapping[str, tuple[int | None, int | None]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, schema in SCHEMAS.items():
        path = run_dir / PARTS / f"{name}.arrows"
        if not path.exists():
            continue
        table = _read_part(path, schema)
        if name == "requests" and planned:
            table = _with_planned(table, planned)
        rows[name] = table.num_rows
        about = {b"schema_version": str(SCHEMA_VERSION).encode(), b"file": name.encode()}
        draft = run_dir / f"{name}.parquet.tmp"
        pq.write_table(table.replace_schema_metadata(about), draft, compression="zstd")
        os.replace(draft, run_dir / f"{name}.parquet")
    shutil.rmtree(run_dir / PARTS)
    return rows


def _with_planned(table: pa.Table, planned: Mapping[str, tuple[int | None, int | None]]) -> pa.Table:
    ids = table.column("request_id").to_pylist()
    for place, name in enumerate(("planned_hit_p_tokens", "planned_hit_md_tokens")):
        column = pa.array([planned.get(request_id, (None, None))[place] for request_id in ids], pa.int64())
        table = table.set_column(table.schema.get_field_index(name), SCHEMAS["requests"].field(name), column)
    return table


@dataclass(frozen=True, slots=True)
class RecoverReport:
    """Rows by file after a recovery. `was_needed` is False for a run that had ended by itself."""

    rows: Mapping[str, int]
    was_needed: bool


def recover(run_dir: Path) -> RecoverReport:
    """Make Parquet of a killed run's parts. Calling it again changes nothing. Raises ResultsError where there is no
    run."""
    manifest = read_manifest(run_dir)
    if not (run_dir / PARTS).is_dir():
        rows = {
            name: pq.read_metadata(path).num_rows for name in SCHEMAS if (path := run_dir / f"{name}.parquet").exists()
        }
        return RecoverReport(rows, was_needed=False)
    with _disk(run_dir):
        rows = _parts_to_parquet(run_dir, {})
        reasons = ["the run was killed; what came after its last flush is lost, planned hits are not computed"]
        manifest |= {"status": "recovered", "validity": {"valid": False, "reasons": reasons}}
        write_json(run_dir / "manifest.json", manifest)
    return RecoverReport(rows, was_needed=True)


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """Raises ResultsError where the folder holds no run, or one of a newer schema."""
    path = run_dir / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResultsError(
            f"{run_dir}: no run (there is no manifest.json); python -m harness.results list shows runs"
        ) from None
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from None
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ResultsError(f"{path}: schema_version {version} is not {SCHEMA_VERSION}, which this version reads")
    return manifest


def read_run(run_dir: Path | str) -> Run:
    """A run that has ended, was killed or still runs. Raises ResultsError."""
    path = Path(run_dir)
    manifest = read_manifest(path)
    return Run(path, manifest, **{name: read_table(path, name).to_pandas() for name in SCHEMAS})


def read_table(run_dir: Path, name: str) -> pa.Table:
    """One file of a run as an Arrow table; empty where it is missing."""
    whole, part = run_dir / f"{name}.parquet", run_dir / PARTS / f"{name}.arrows"
    if whole.exists():
        try:
            return pq.read_table(whole)
        except (OSError, pa.ArrowInvalid) as error:
            raise ResultsError(f"{whole}: cannot be read: {error}") from None
    return _read_part(part, SCHEMAS[name]) if part.exists() else SCHEMAS[name].empty_table()


def runs_under(root: Path) -> Sequence[Path]:
    """Folders that hold a manifest, oldest name first."""
    return sorted(path.parent for path in root.glob("**/manifest.json"))
