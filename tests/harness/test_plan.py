"""Planned hits follow from the order of cache events alone; the plan's figures follow from the slice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import load_config
from harness.load import Planned, Row, Selection, hit_bins
from harness.plan import PageKeys, SequentialHits, Touch, check_lengths, hits_by_site, make_plan, planned_hits
from harness.similitude import line_of, similitude_of
from traces.errors import UserError
from traces.prompts import page_keys

PAGE = 4


def sequence(prompt: list[int], output: list[int]) -> PageKeys:
    return PageKeys(page_keys(prompt + output, PAGE), len(prompt), len(output))


def hits(order: list[tuple[str, str]], sequences: dict[str, PageKeys]) -> dict[str, int]:
    touches = [Touch(seq, name, op) for seq, (name, op) in enumerate(order)]
    return planned_hits({"md0": touches}, sequences, PAGE)["md0"]


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    same = {"a": sequence(list(range(8)), [1]), "b": sequence(list(range(8)), [1])}
    order = [("a", "match"), ("a", "insert_prompt"), ("b", "match")]
    assert hits(order, same) == {"a": 0, "b": 4}


def test_the_last_output_token_has_no_kv() -> None:
    a = sequence(list(range(4)), [10, 11, 12, 13])
    longer = {"a": a, "b": sequence([0, 1, 2, 3, 10, 11, 12, 13, 5], [1])}
    assert hits([("a", "insert_full"), ("b", "match")], longer)["b"] == 4


def test_order_decides() -> None:
    both = {"a": sequence(list(range(9)), [1]), "b": sequence(list(range(9)), [1])}
    assert hits([("b", "match"), ("a", "insert_prompt")], both)["b"] == 0
    assert hits([("a", "insert_prompt"), ("b", "match")], both)["b"] == 8


def test_events_are_ordered_by_seq_and_not_by_how_they_came() -> None:
    both = {"a": sequence(list(range(9)), [1]), "b": sequence(list(range(9)), [1])}
    touches = [Touch(2, "b", "match"), Touch(1, "a", "insert_prompt")]
    assert planned_hits({"p0": touches}, both, PAGE)["p0"]["b"] == 8


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8))
@settings(max_examples=60)
def test_the_plan_equals_the_longest_common_prefix_in_pages(prompts: list[list[int]]) -> None:
    sequences = {str(i): sequence(prompt, [9]) for i, prompt in enumerate(prompts)}
    order = [(str(i), op) for i in range(len(prompts)) for op in ("match", "insert_prompt")]
    found = hits(order, sequences)
    for i, prompt in enumerate(prompts):
        usable = (len(prompt) - 1) // PAGE * PAGE
        best = 0
        for other in prompts[:i]:
            kept = other[: len(other) // PAGE * PAGE]
            common = next(
                (n for n, (x, y) in enumerate(zip(prompt, kept, strict=False)) if x != y), min(len(prompt), len(kept))
            )
            best = max(best, min(common // PAGE * PAGE, usable))
        assert found[str(i)] == best


def test_a_mixed_instance_is_p_and_md_at_once() -> None:
    assert hits_by_site({"p0": {"r": 8}, "md0": {"r": 12}}, {"p0": "P", "md0": "MD"}) == {"r": (8, 12)}
    assert hits_by_site({"m0": {"r": 8}}, {"m0": "MIXED"}) == {"r": (8, 8)}


def asked(name: str, tokens: int, keep: int = 0, prefix: str | None = None) -> Row:
    return Row(name, name, name, 0, "main", prefix, keep, tokens, 32, 0.0, (), 0.0, False, None)


def hits_of(rows: list[Row]) -> SequentialHits:
    found = {row.request_id: row.md_hit(16) for row in rows}
    return SequentialHits(found, found)


def test_a_prompt_longer_than_the_context_is_named() -> None:
    with pytest.raises(UserError, match="big"):
        check_lengths([asked("small", 10), asked("big", 90_000)], 16_384)


def test_an_expected_hit_is_whole_pages_and_never_the_whole_prompt() -> None:
    assert asked("a", 64, keep=64, prefix="x").md_hit(16) == 48
    assert asked("a", 64, keep=64).md_hit(16) == 0


def test_the_plan_counts_tokens_bytes_and_use() -> None:
    config, _ = load_config([])
    rows = [asked(f"r{i}", 2048, keep=1856, prefix="x") for i in range(30)]
    line = line_of(config.wan, rows, 0.02, config.model.kv_bytes_per_token)
    assert line.flow_rate_bps == pytest.approx(2048 * 2048 * 8 / (32 * 0.02))
    spec = config.engine_spec(line)
    selection = Selection(tuple(Planned(row, i / 3, (), 0.0, None) for i, row in enumerate(rows)), (), 1.0, {})
    plan = make_plan(selection, [], hits_of(rows), hit_bins([row.hit_share(16) for row in rows]), spec)
    assert plan.line_bytes == 30 * (2048 - 1856) * 2048
    assert plan.offered_per_s == pytest.approx(3.0, rel=0.1)
    assert plan.md_share == pytest.approx(3 * 32 * 0.02 / 32, rel=0.1)
    assert plan.is_representative
    similitude = similitude_of(spec, rows, [], hits_of(rows), plan)
    ratios = {ratio.name: ratio for ratio in similitude.ratios}
    assert ratios["whole prompt over one flow / decode of an output"].here == pytest.approx(config.wan.ratio)
    assert ratios["whole prompt over one flow / decode of an output"].is_within


def test_a_run_is_not_called_scaled_on_values_that_nobody_published() -> None:
    config, _ = load_config([])
    rows = [asked("r", 2048, keep=1856, prefix="x")]
    spec = config.engine_spec(line_of(config.wan, rows, 0.02, 2048))
    selection = Selection((Planned(rows[0], 0.0, (), 0.0, None),), (), 1.0, {})
    plan = make_plan(selection, [], hits_of(rows), [], spec)
    assert similitude_of(spec, rows, [], hits_of(rows), plan).label == "demonstration"
