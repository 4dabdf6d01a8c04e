"""The reader of WEKA sessions, plain and compact."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from traces.errors import TraceError
from traces.formats import read
from traces.profile import profile


def call(t: float, num_input: int, hash_ids: list[int], num_output: int = 10, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_input, "out": num_output, "hash_ids": hash_ids, "api_time": 2.0, **more}


def session(*requests: Any, name: str = "one", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "block_size": 64, "hash_id_scope": "local", "tool_tokens": 50, "system_tokens": 20,
        "requests": list(requests), **more,
    }  # fmt: skip


def write(path: Path, *sessions: dict[str, Any]) -> Path:
    text = "\n".join(json.dumps(item) for item in sessions)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def ids(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


TURNS = (
    call(0.0, 200, ids(3), think_time=0.0),
    call(5.0, 330, ids(5), input_types=["tool_result"], think_time=3.0),
    call(60.0, 460, ids(7), think_time=53.0),
)


@pytest.mark.parametrize("name", ["s.json", "s.json.gz"])
def test_turns_go_on_from_the_call_before_and_wait_for_it(tmp_path: Path, name: str) -> None:
    trace = read(write(tmp_path / name, session(*TURNS)), "weka")
    assert [row.request_id for row in trace.rows] == ["one/0", "one/1", "one/2"]
    assert [row.prefix_id for row in trace.rows] == ["one/system", "one/0", "one/1"]
    assert [row.after for row in trace.rows] == [(), ("one/0",), ("one/1",)]
    assert [row.delay_s for row in trace.rows] == [None, 3.0, 53.0]
    assert [row.delay_kind for row in trace.rows] == [None, "tool", "think"]
    assert [row.service_s for row in trace.rows] == [2.0] * 3
    assert trace.rows[0].arrival_s == 0.0
    assert trace.rows[1].raw_ref == f"{name}: requests[1]"
    assert trace.roots["one/system"].tokens == 70


def test_answers_are_reused_or_absent_as_the_option_says(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json", session(*TURNS))
    reused, absent = read(path, "weka"), read(path, "weka", {"answers": "absent"})
    assert [row.keep_tokens for row in reused.rows] == [70, 210, 340]
    assert [row.keep_tokens for row in absent.rows] == [70, 192, 320]
    assert (reused.meta.answers, absent.meta.answers) == ("reused", "absent")
    with pytest.raises(TraceError, match=r"trace\.answers"):
        read(path, "weka", {"answers": "perhaps"})


def test_a_compacted_history_keeps_what_the_hashes_share_and_the_longest_of_it(tmp_path: Path) -> None:
    turns = (*TURNS, call(70.0, 200, [1, 20, 21]), call(80.0, 460, [*ids(6), 30]))
    trace = read(write(tmp_path / "s.json", session(*turns)), "weka")
    assert [(row.prefix_id, row.keep_tokens) for row in trace.rows[3:]] == [("one/2", 64), ("one/2", 384)]


def test_a_sub_agent_counts_from_its_marker_and_the_session_waits_for_it(tmp_path: Path) -> None:
    agent = {
        "t": 3.0, "type": "subagent", "tool_tokens": 9, "system_tokens": 1,
        "requests": [call(0.5, 100, [50]), call(4.0, 200, [50, 51, 52])],
    }  # fmt: skip
    other = {"t": 4.0, "type": "subagent", "requests": [call(0.0, 100, [50])]}
    trace = read(write(tmp_path / "s.json", session(TURNS[0], agent, other, call(20.0, 330, ids(5)))), "weka")
    rows = {row.request_id: row for row in trace.rows}
    assert list(rows) == ["one/0", "one~1/0", "one~1/1", "one~2/0", "one/1"]
    assert {row.kind for row in trace.rows[1:4]} == {"subagent"} and {r.root_session_id for r in trace.rows} == {"one"}
    assert (rows["one~1/0"].after, rows["one~1/0"].delay_s) == (("one/0",), 1.5)
    assert (rows["one~1/0"].prefix_id, rows["one~1/0"].keep_tokens) == ("one~1/system", 10)
    assert (rows["one~2/0"].after, rows["one~2/0"].prefix_id) == (("one/0",), "one~1/1")
    assert rows["one/1"].after == ("one/0", "one~1/1", "one~2/0")
    assert rows["one/1"].delay_s == 20 - (3 + 4 + 2)
    assert set(trace.roots) == {"one/system", "one~1/system"}


def test_where_a_calls_length_is_unknown_the_sources_think_time_is_the_gap(tmp_path: Path) -> None:
    first = {key: value for key, value in TURNS[0].items() if key != "api_time"}
    trace = read(write(tmp_path / "s.json", session(first, TURNS[1])), "weka")
    assert (trace.rows[0].service_s, trace.rows[1].delay_s) == (None, 3.0)


def test_a_call_that_began_before_the_last_one_ended_waits_no_time(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "s.json", session(TURNS[0], call(1.0, 330, ids(5)))), "weka")
    assert trace.rows[1].delay_s == 0.0


def test_the_compact_form_reads_as_the_plain_one(tmp_path: Path) -> None:
    short = [{key: value for key, value in turn.items() if key != "hash_ids"} for turn in TURNS]
    short[0]["h"], short[1]["h"], short[2]["h"] = [-1, 0, [[1, 3]]], [0, 3, [[4, 2]]], [1, 5, [[6, 1], [7, 1]]]
    plain = read(write(tmp_path / "s.json", session(*TURNS)), "weka")
    compact = read(write(tmp_path / "s.jsonl.gz", session(*short), session(*short, name="two")), "weka")
    assert [(r.prefix_id, r.keep_tokens) for r in compact.rows] == [(r.prefix_id, r.keep_tokens) for r in plain.rows]
    assert compact.rows[1].raw_ref == "s.jsonl.gz:1: requests[1]"
    assert compact.meta.notes["sessions_read"] == 2 and compact.meta.notes["duplicates_dropped"] == 1


def test_hashes_are_local_to_the_session(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", session(*TURNS), session(call(0.0, 200, [3, 2, 1]), name="two"))
    trace = read(path, "weka")
    assert trace.rows[3].prefix_id == "two/system"
    assert len(read(path, "weka", {"limit": 1}).rows) == 3


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (7, "entry"),
        (call(-1.0, 64, [1]), "t"),
        ({"type": "n", "in": 64}, "t"),
        (call(99.0, 0, []), "in"),
        (call(99.0, 64, [1], num_output=-1), "out"),
        (call(99.0, 200, ids(4)), "hash_ids"),
        (call(99.0, 200, [2, 1, 3]), "hash_ids"),
        (call(99.0, 64, None), "hash_ids"),  # type: ignore[arg-type]
        (call(99.0, 64, [1], api_time="long"), "api_time"),
        ({"t": 99.0, "in": 64, "out": 1, "h": [9, 1]}, "h"),
        ({"t": 99.0, "in": 64, "out": 1, "h": [99, 1, []]}, "h"),
        ({"t": 99.0, "type": "subagent"}, "requests"),
        ({"t": 99.0, "type": "subagent", "requests": [], "tool_tokens": "x"}, "tool_tokens"),
    ],
)
def test_a_broken_entry_is_named_by_file_line_place_and_field(tmp_path: Path, broken: Any, field: str) -> None:
    path = write(tmp_path / "s.jsonl", session(*TURNS), session(*TURNS, broken, name="two"))
    with pytest.raises(TraceError) as caught:
        read(path, "weka")
    assert caught.value.where.startswith(f"{path}:2: requests")
    assert caught.value.field == field


def test_a_file_that_is_no_session_is_refused(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", "{"),
        ("b.json", "[]"),
        ("c.json", "{}"),
        ("d.jsonl", '{"requests": []}\n{'),
        ("e.jsonl", ""),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TraceError, match=name):
            read(tmp_path / name, "weka")


def test_two_sessions_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there twice"):
        read(write(tmp_path / "s.jsonl", session(*TURNS), session(*TURNS[:2])), "weka")


def test_public_sessions_have_their_turns_in_order(public_traces: Path) -> None:
    for name, count in (("weka_0001", 41), ("weka_0006", 46), ("weka_0274", 105)):
        trace = read(public_traces / f"{name}.json.gz", "weka")
        assert len(trace.rows) == count
        main = [row.turn for row in trace.rows if row.kind == "main"]
        assert main == list(range(len(main)))


def test_all_public_sessions_have_the_known_ideal_hits(public_traces: Path) -> None:
    found = profile(read(public_traces / "weka_710.compact.jsonl.gz", "weka", {"answers": "absent"}), page_size=64)
    assert found.mean_hit == pytest.approx(0.958, abs=0.001)
    assert sum(found.bin_shares[2:]) == pytest.approx(0.881, abs=0.003)
