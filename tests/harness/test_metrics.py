"""Each formula against hand-made records; spans that add up; what is missing stays missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics import percentile, request_latencies, summarize
from harness.record import Chunk, RequestRecord, StreamRecorder, spans_of
from harness.store import Run, RunStore

MS = 1_000_000


def stored(tmp_path: Path, streams: list[StreamRecorder]) -> Run:
    store = RunStore.create(tmp_path / "run", {})
    for stream in streams:
        store.add_request(stream.record, stream.chunks, spans_of(stream.record), [])
    return store.close({}, None)


def streamed(name: str, sent_ms: int, times: list[tuple[int, int]], **fields: Any) -> StreamRecorder:
    """A request whose chunks of `count` tokens came at `ms`."""
    record = RequestRecord(name, name, name, 0, "main", status="ok", sent_ns=sent_ms * MS, scheduled_ns=sent_ms * MS)
    for key, value in fields.items():
        setattr(record, key, value)
    stream = StreamRecorder(record)
    for at_ms, count in times:
        stream.tokens(at_ms * MS, [7] * count, "MD")
    record.output_tokens = len(stream.token_ids)
    record.end_ns = (times[-1][0] if times else sent_ms + 1) * MS
    record.prompt_tokens = 100
    return stream


def test_latencies_follow_their_definitions(tmp_path: Path) -> None:
    found = stored(tmp_path, [streamed("a", 0, [(100, 1), (120, 1), (180, 2)])])
    values = request_latencies(found.requests, found.chunks)
    assert values["ttft"].tolist() == pytest.approx([0.1])
    assert values["ttst"].tolist() == pytest.approx([0.12])
    assert sorted(values["tbt"].tolist()) == pytest.approx([0.0, 0.02, 0.06])
    assert sorted(values["icl"].tolist()) == pytest.approx([0.02, 0.06])
    assert values["tpot"].tolist() == pytest.approx([0.08 / 3])
    assert values["e2el"].tolist() == pytest.approx([0.18])
    assert values["longest_gap"].tolist() == pytest.approx([0.06])


def test_the_first_gap_is_never_the_time_to_first_token(tmp_path: Path) -> None:
    found = stored(tmp_path, [streamed("a", 0, [(100, 1), (101, 1)]), streamed("b", 0, [(500, 1), (501, 1)])])
    assert request_latencies(found.requests, found.chunks)["tbt"].tolist() == pytest.approx([0.001, 0.001])


def test_a_run_of_steps_counts_as_its_single_tokens(tmp_path: Path) -> None:
    one = streamed("a", 0, [(100, 1), (110, 1), (120, 1), (130, 1)])
    whole = stored(tmp_path / "x", [one])
    one.chunks = [Chunk(0, 100 * MS, 10 * MS, 4, "MD")]
    runs = stored(tmp_path / "y", [one])
    for name in ("tbt", "icl", "longest_gap"):
        first, second = (request_latencies(run.requests, run.chunks)[name] for run in (whole, runs))
        assert first.tolist() == pytest.approx(second.tolist())


def test_one_token_has_no_tpot_and_no_token_no_ttft(tmp_path: Path) -> None:
    found = stored(tmp_path, [streamed("a", 0, [(100, 1)]), streamed("b", 0, [])])
    summary = summarize(found)
    assert summary["tpot"]["count"] == 0
    assert summary["ttft"] == {**summary["ttft"], "count": 1, "null_count": 1}
    assert summary["notes"][0].startswith("TTFT is missing for 1 of 2")


def test_requests_that_failed_count_as_errors_and_in_no_latency(tmp_path: Path) -> None:
    bad = streamed("bad", 0, [(900, 1)], status="error_net", error="gone")
    summary = summarize(stored(tmp_path, [streamed("a", 0, [(100, 1)]), bad]))
    assert (summary["requests"], summary["ok"], summary["errors"]) == (2, 1, {"error_net": 1})
    assert summary["ttft"]["mean"] == pytest.approx(0.1)


def test_primed_requests_are_in_no_figure(tmp_path: Path) -> None:
    primed = streamed("p", 0, [(900, 1)], phase="prime")
    summary = summarize(stored(tmp_path, [streamed("a", 0, [(100, 1)]), primed]))
    assert (summary["requests"], summary["sessions"]) == (1, 1)


def test_a_percentile_with_fewer_than_ten_values_beyond_it_is_not_given() -> None:
    assert percentile(np.arange(99.0), 0.9) is None
    assert percentile(np.arange(100.0), 0.9) == pytest.approx(89.1)
    assert percentile([float("nan")] * 200, 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=20, max_size=60))
def test_percentile_agrees_with_pandas(values: list[float]) -> None:
    assert percentile(values, 0.5) == pytest.approx(float(pd.Series(values).quantile(0.5)))


@settings(max_examples=150)
@given(
    st.sampled_from(["p-md", "p-rld-md", "mixed", None]),
    st.integers(0, 50),
    st.integers(0, 300),
    st.lists(st.one_of(st.none(), st.integers(-20, 400)), min_size=9, max_size=9),
)
def test_critical_spans_partition_the_wait_whatever_the_stages_say(
    pipeline: str | None, sent: int, length: int, times: list[int | None]
) -> None:
    names = (
        "received",
        "prefill_start",
        "prefill_end",
        "kv_first_sent",
        "rld_ready",
        "md_ready",
        "seal",
        "extend_start",
        "commit",
    )
    record = RequestRecord("r", "s", "s", 0, "main", status="ok", sent_ns=sent, end_ns=sent + length, pipeline=pipeline)
    for name, value in zip(names, times, strict=True):
        setattr(record, f"stage_{name}_ns", value)
    record.first_token_ns = times[0]
    spans = [span for span in spans_of(record) if span.critical]
    assert sum(span.end_ns - span.start_ns for span in spans) == length
    edges = [sent, *(span.end_ns for span in spans)]
    assert [span.start_ns for span in spans] == edges[:-1]
