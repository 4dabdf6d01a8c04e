"""The reader of Mooncake JSONL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from traces.errors import TraceError
from traces.formats import read
from traces.profile import profile
from traces.prompts import PromptBuilder
from traces.table import digest


def line(ms: int, num_input: int, hash_ids: list[int], num_output: int = 10, **more: Any) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": num_input, "output_length": num_output, "hash_ids": hash_ids, **more}


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


GOOD = [
    line(0, 1100, [0, 1, 2]),
    line(0, 1600, [0, 1, 3, 4]),
    line(3000, 1100, [0, 1, 2]),
    line(3000, 400, [9], num_output=0),
    line(6000, 2600, [0, 1, 3, 5, 6, 7]),
]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_rows_keep_the_longest_common_prefix_of_the_latest_request_that_has_it(tmp_path: Path, name: str) -> None:
    trace = read(write(tmp_path / name, GOOD), "mooncake")
    assert [(row.prefix_id, row.keep_tokens) for row in trace.rows] == [
        (None, 0), ("mooncake/1", 1024), ("mooncake/1", 1099), (None, 0), ("mooncake/2", 1536),
    ]  # fmt: skip
    assert [row.input_tokens for row in trace.rows] == [1100, 1600, 1100, 400, 2600]
    assert [row.raw_ref for row in trace.rows] == [f"{name}:{n}" for n in range(1, 6)]
    assert trace.meta.answers == "absent" and trace.meta.mode == "emergent" and trace.meta.origin == "public"


def test_prompts_share_exactly_the_blocks_that_the_hashes_share(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t.jsonl", GOOD), "mooncake")
    builder = PromptBuilder(trace, 2**31 - 1)
    prompts = [builder.prompt(row.request_id) for row in trace.rows]
    for i, a in enumerate(GOOD):
        for j, b in enumerate(GOOD[:i]):
            shared = sum(x == y for x, y in zip(a["hash_ids"], b["hash_ids"], strict=False))
            tokens = min(len(prompts[i]), len(prompts[j]))
            equal = int((prompts[i][:tokens] == prompts[j][:tokens]).argmin()) if not (
                prompts[i][:tokens] == prompts[j][:tokens]
            ).all() else tokens  # fmt: skip
            assert equal == min(shared * 512, tokens - (1 if shared * 512 >= tokens else 0))


def test_requests_of_one_stamp_are_spread_over_the_tick_in_order_and_seeded(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [line(3000 * (n // 10), 10, [n]) for n in range(40)])
    trace = read(path, "mooncake", {"seed": 1})
    times = [row.arrival_s or 0.0 for row in trace.rows]
    assert times == sorted(times) and len(set(times)) == 40
    assert all(3 * (n // 10) <= time_s < 3 * (n // 10 + 1) for n, time_s in enumerate(times))
    assert trace.meta.notes["spread"] == {"tick_s": 3.0, "seed": 1}
    assert digest(trace) == digest(read(path, "mooncake", {"seed": 1}))
    assert digest(trace) != digest(read(path, "mooncake", {"seed": 2}))


def test_reused_answers_stand_in_the_prompt_that_goes_on_and_not_behind_a_shared_system_prompt(tmp_path: Path) -> None:
    lines = [
        line(0, 600, [0, 1]),  # first to hold block 0
        line(1, 700, [0, 2]),  # goes on from 1
        line(2, 700, [0, 3]),  # the latest to hold block 0 is 2, which did not bring it: only the block is shared
        line(3, 2000, [0, 4, 5, 6]),
        line(4, 3000, [0, 4, 5, 7, 8, 9]),
        line(5, 2005, [0, 4, 5, 10]),  # no room for request 4's answer
    ]
    trace = read(write(tmp_path / "t.jsonl", lines), "mooncake", {"answers": "reused"})
    assert [row.keep_tokens for row in trace.rows] == [0, 610, 512, 512, 2010, 1536]
    assert trace.meta.answers == "reused"


def test_an_output_of_no_tokens_becomes_one_and_is_counted(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t.jsonl", GOOD), "mooncake")
    assert trace.rows[3].output_tokens == 1
    assert trace.meta.notes["outputs_raised_to_1"] == 1


def test_a_limit_reads_so_many_rows_and_looks_at_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [*GOOD, "broken"])
    assert len(read(path, "mooncake", {"limit": 3}).rows) == 3


@pytest.mark.parametrize(
    ("broken", "field", "reason"),
    [
        ('{"timestamp": 1', "line", "is no JSON"),
        ("[1, 2]", "line", "no object"),
        ({"timestamp": 50_000}, "input_length", "is missing"),
        (line(50_000, 0, []), "input_length", "at least 1"),
        (line(50_000, 10**30, [77]), "input_length", "at most 1,000,000,000"),
        (line(50_000, 1.5, [1]), "input_length", "whole number"),  # type: ignore[arg-type]
        (line(50_000, 10, [77], num_output=-1), "output_length", "at least 0"),
        (line(50_000, 600, [77]), "hash_ids", "1 blocks, but 600 tokens are 2 of 512"),
        (line(50_000, 600, [77, "x"]), "hash_ids", "whole numbers"),  # type: ignore[list-item]
        (line(50_000, 600, [77, 77]), "hash_ids", "hash 77 follows 77 here and nothing earlier"),
        (line(50_000, 600, [3, 0]), "hash_ids", "hash 3 follows nothing here and 1 earlier"),
        (line(50_000, 600, [1, 2]), "hash_ids", "hash 1 follows nothing here and 0 earlier"),
        (line(50_000, 1100, [0, 1, 1001]), "hash_ids", "hash 1001 follows 1 here and nothing earlier"),
        (line(50_000, 600, [77, 2]), "hash_ids", "hash 2 follows 77 here and 1 earlier"),
        (line(-5, 10, [77]), "timestamp", "0 or more"),
        (line(1, 10, [77]), "timestamp", "goes back"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [77]}', "timestamp", "0 or more"),
    ],
)
def test_a_broken_row_17_is_named_by_file_line_field_and_reason(
    tmp_path: Path, broken: Any, field: str, reason: str
) -> None:
    lines: list[Any] = [*GOOD, *(line(9000 + n, 100, [1000 + n]) for n in range(11))]
    path = write(tmp_path / "t.jsonl", [*lines, broken, line(99_999, 5, [5000])])
    with pytest.raises(TraceError) as caught:
        read(path, "mooncake")
    assert caught.value.where == f"{path}:17"
    assert caught.value.field == field
    assert reason in caught.value.reason and caught.value.remedy


def test_the_public_conversation_has_the_known_ideal_hits(public_traces: Path) -> None:
    trace = read(public_traces / "mooncake_conversation.jsonl.gz", "mooncake")
    found = profile(trace)
    assert found.num_requests == 12_031
    assert found.mean_hit == pytest.approx(0.409, abs=0.001)
    assert sum(found.bin_shares[2:]) == pytest.approx(0.098, abs=0.001)
    assert max(row.arrival_s or 0 for row in trace.rows) < 3600
