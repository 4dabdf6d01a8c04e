"""What is written comes back; what a kill has torn is saved up to the last whole batch; bad folders get clear words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engines.base import CacheEvent
from harness.record import Chunk, RequestRecord, SpanRow
from harness.results import main as results_main
from harness.store import SCHEMA_VERSION, SCHEMAS, ResultsError, RunStore, read_run, read_table, recover

README = Path(__file__).resolve().parents[2] / "results" / "README.md"


def record(name: str, **fields: Any) -> RequestRecord:
    base: dict[str, Any] = {"status": "ok", "sent_ns": 10, "end_ns": 90, "prompt_tokens": 5, "output_tokens": 2}
    return RequestRecord(name, "s", "s", 0, "main", **{**base, **fields})


def fill(store: RunStore, names: list[str]) -> None:
    for name in names:
        chunks = [Chunk(0, 40, 0, 2, "MD")]
        spans = [SpanRow(name, "main", 10, 90, True, "md0")]
        store.add_request(record(name), chunks, spans, [CacheEvent("md0", 0, "match", 4)])


def test_what_is_added_is_read_back(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {"status": "running"})
    fill(store, ["a", "b"])
    store.add_session({"session_id": "s", "turns_planned": 2})
    store.set_planned_hits({"a": (3, 4)})
    found = store.close({"status": "complete"}, {"ok": 2})
    assert found.requests["request_id"].tolist() == ["a", "b"]
    assert found.requests["planned_hit_p_tokens"].tolist()[0] == 3
    assert found.requests["planned_hit_md_tokens"].isna().tolist() == [False, True]
    assert found.manifest["status"] == "complete"
    assert found.manifest["schema_version"] == SCHEMA_VERSION
    assert not (tmp_path / "run" / "parts").exists()
    assert sorted(pd.read_parquet(tmp_path / "run" / "chunks.parquet").columns) == sorted(SCHEMAS["chunks"].names)


def test_missing_values_are_null_and_not_zero(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    store.add_request(record("a", first_token_ns=None), [], [], [])
    found = store.close({}, None)
    assert found.requests["first_token_ns"].isna().all()
    assert found.requests["planned_line_bytes"].isna().all()


def test_a_run_under_way_is_read_up_to_its_last_flush(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    fill(store, ["a"])
    assert read_table(tmp_path / "run", "requests").num_rows == 0
    store.flush()
    fill(store, ["b"])
    assert read_run(tmp_path / "run").requests["request_id"].tolist() == ["a"]


@pytest.mark.parametrize("cut", [1, 7, 60, 200])
def test_a_torn_last_batch_costs_that_batch_alone(cut: int, tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {"status": "running"})
    for name in ("a", "b", "c"):
        fill(store, [name])
        store.flush()
    part = tmp_path / "run" / "parts" / "requests.arrows"
    os.truncate(part, part.stat().st_size - cut)
    assert recover(tmp_path / "run").rows["requests"] == 2
    found = read_run(tmp_path / "run")
    assert found.requests["request_id"].tolist() == ["a", "b"]
    assert found.manifest["status"] == "recovered"


def test_recovering_twice_changes_nothing(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    fill(store, ["a"])
    store.flush()
    first = recover(tmp_path / "run")
    again = recover(tmp_path / "run")
    assert first.was_needed and not again.was_needed
    assert first.rows == again.rows


def test_a_folder_without_a_run_is_named_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results_main(["recover", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error and "harness.results list" in error and "Traceback" not in error


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    store.close({}, None)
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(ResultsError, match="schema_version"):
        read_run(tmp_path / "run")


def test_a_place_that_cannot_be_written_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        RunStore.create(tmp_path / "file" / "run", {})


def test_the_readme_lists_exactly_the_columns() -> None:
    listed: dict[str, list[str]] = {}
    name = ""
    for line in README.read_text().splitlines():
        if line.startswith("## ") and line.endswith(".parquet"):
            name = line[3:].removesuffix(".parquet")
        elif line.startswith("| `"):
            listed.setdefault(name, []).append(line.split("`")[1])
    assert listed == {file: schema.names for file, schema in SCHEMAS.items()}
