"""The table: its rules, Parquet there and back, scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import TraceError, UserError
from traces.profile import ideal_hits
from traces.table import (
    REQUEST_SCHEMA,
    Root,
    Segment,
    Trace,
    TraceMeta,
    TraceRow,
    digest,
    read_parquet,
    scale,
    to_table,
    validate,
    write_parquet,
)

MakeTrace = Callable[[int], Trace]
META = TraceMeta("t", "yours", "a test", "none")
FIRST = TraceRow("a", "s", "s", 0, "main", "root", 10, 30, 5, arrival_s=0.0)
NEXT = TraceRow("b", "s", "s", 1, "main", "a", 35, 50, 5, after=("a",), delay_s=1.0, delay_from="end")
ROOTS = {"root": Root("root", 10)}


def trace_of(*rows: TraceRow, roots: dict[str, Root] = ROOTS, meta: TraceMeta = META) -> Trace:
    return Trace(rows, roots, meta)


def test_a_valid_trace_passes(make_trace: MakeTrace) -> None:
    validate(trace_of(FIRST, NEXT))
    for seed in range(50):
        validate(make_trace(seed))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("request_id", {"request_id": "a"}),
        ("request_id", {"request_id": "root"}),
        ("request_id", {"request_id": ""}),
        ("kind", {"kind": "agent"}),
        ("prefix_id", {"prefix_id": "c"}),
        ("keep_tokens", {"keep_tokens": 36}),
        ("keep_tokens", {"keep_tokens": -1}),
        ("keep_tokens", {"prefix_id": None}),
        ("input_tokens", {"input_tokens": 35}),
        ("output_tokens", {"output_tokens": 0}),
        ("after", {"after": ("b",)}),
        ("after", {"after": ("c",)}),
        ("arrival_s", {"arrival_s": 1.0}),
        ("arrival_s", {"after": ()}),
        ("arrival_s", {"after": (), "arrival_s": float("nan")}),
        ("delay_s", {"delay_s": -1.0}),
        ("delay_s", {"delay_s": float("inf")}),
        ("delay_from", {"delay_from": "middle"}),
        ("delay_kind", {"delay_kind": "sleep"}),
        ("service_s", {"service_s": -0.1}),
        ("turn", {"turn": 0}),
        ("segments", {"segments": (Segment("user", 14),)}),
        ("segments", {"segments": (Segment("user", 16), Segment("tool", -1))}),
    ],
)
def test_a_broken_rule_is_refused_by_row_and_field(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"row 1 .*: .+: ") as caught:
        validate(trace_of(FIRST, replace(NEXT, **change)))
    assert caught.value.field == field


def test_a_prefix_must_stand_before_what_uses_it() -> None:
    with pytest.raises(TraceError, match="neither an earlier request nor a root"):
        validate(trace_of(replace(NEXT, turn=0, arrival_s=0.0, after=()), replace(FIRST, turn=1)))


@pytest.mark.parametrize(
    ("field", "roots", "meta"),
    [
        ("tokens", {"root": Root("root", -1)}, META),
        ("root_id", {"root": Root("other", 10)}, META),
        ("origin", ROOTS, replace(META, origin="found")),
        ("mode", ROOTS, replace(META, mode="raw")),
        ("answers", ROOTS, replace(META, answers="maybe")),
    ],
)
def test_a_broken_root_or_origin_is_refused(field: str, roots: dict[str, Root], meta: TraceMeta) -> None:
    with pytest.raises(TraceError) as caught:
        validate(trace_of(FIRST, roots=roots, meta=meta))
    assert caught.value.field == field


def test_an_error_is_the_users_and_carries_place_field_reason_and_remedy() -> None:
    error = TraceError("file.jsonl:17", "in", "is missing", "mend the row")
    assert isinstance(error, UserError)
    assert str(error) == "file.jsonl:17: in: is missing; mend the row"


def test_the_table_has_the_columns_of_the_row_type(make_trace: MakeTrace) -> None:
    assert list(TraceRow.__dataclass_fields__) == REQUEST_SCHEMA.names
    assert to_table(make_trace(1)).schema.equals(REQUEST_SCHEMA)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_parquet_gives_back_the_same_trace(
    make_trace: MakeTrace, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    trace = make_trace(seed)
    path = tmp_path_factory.mktemp("parquet") / "trace.parquet"
    write_parquet(trace, path)
    assert read_parquet(path) == trace
    assert digest(read_parquet(path)) == digest(trace)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, make_trace: MakeTrace) -> None:
    text, other, torn, short = (tmp_path / name for name in ("text", "other", "torn", "short"))
    text.write_text("hello")
    pq.write_table(pa.table({"a": [1]}), other)
    write_parquet(make_trace(1), torn)
    torn.write_bytes(torn.read_bytes()[:-20])
    write_parquet(make_trace(1), short)
    pq.write_table(pq.read_table(short).drop_columns(["turn"]), short)
    for path in (text, other, torn, short, tmp_path / "missing"):
        with pytest.raises(TraceError, match=path.name):
            read_parquet(path)


def test_a_broken_row_in_parquet_is_refused(tmp_path: Path) -> None:
    write_parquet(trace_of(replace(FIRST, output_tokens=0)), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="output_tokens"):
        read_parquet(tmp_path / "t.parquet")


def test_a_digest_sees_content_and_time_and_not_the_name() -> None:
    whole = digest(trace_of(FIRST, NEXT))
    assert whole == digest(trace_of(FIRST, NEXT, meta=replace(META, name="u")))
    assert whole != digest(trace_of(FIRST, replace(NEXT, delay_s=2.0)))
    assert whole != digest(trace_of(FIRST, replace(NEXT, input_tokens=51)))
    assert whole != digest(trace_of(FIRST, NEXT, roots={"root": Root("root", 11)}))


@given(seed=st.integers(0, 10**6), factor=st.sampled_from((1.0, 0.5, 0.3, 1 / 32, 1e-4)))
@settings(max_examples=60)
def test_scaling_keeps_a_trace_valid_and_floors_positions(make_trace: MakeTrace, seed: int, factor: float) -> None:
    trace = make_trace(seed)
    scaled = scale(trace, factor)
    validate(scaled)
    for old, new in zip(trace.rows, scaled.rows, strict=True):
        assert new.keep_tokens == int(old.keep_tokens * factor)
        assert new.input_tokens == max(int(old.input_tokens * factor), new.keep_tokens + 1)
        assert (new.request_id, new.prefix_id, new.after, new.arrival_s) == (
            old.request_id, old.prefix_id, old.after, old.arrival_s,
        )  # fmt: skip
        assert (new.segments is None) == (old.segments is None)


def test_scaling_by_a_32th_keeps_hit_ratios() -> None:
    rows = [replace(FIRST, keep_tokens=14_000, input_tokens=64_000, output_tokens=1_000)]
    for turn in range(1, 40):
        end = rows[-1].input_tokens + rows[-1].output_tokens
        rows.append(
            replace(NEXT, request_id=f"b{turn}", turn=turn, prefix_id=rows[-1].request_id, after=(rows[-1].request_id,),
                    keep_tokens=end, input_tokens=end + 40 * turn + 7, output_tokens=990)
        )  # fmt: skip
    trace = trace_of(*rows, roots={"root": Root("root", 14_000)})
    scaled = scale(trace, 1 / 32)
    validate(scaled)
    assert scaled.meta.notes["scale"] == 1 / 32
    for old, new, a, b in zip(trace.rows, scaled.rows, ideal_hits(trace), ideal_hits(scaled), strict=True):
        assert a / old.input_tokens == pytest.approx(b / new.input_tokens, abs=1 / new.input_tokens)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_outside_of_0_to_1_is_refused(factor: float) -> None:
    with pytest.raises(TraceError, match=r"trace\.scale"):
        scale(trace_of(FIRST), factor)
