"""Prompts: the one rule of content, live history, page keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.profile import ideal_hits
from traces.prompts import NUM_RESERVED_TOKENS, PromptBuilder, page_keys, random_tokens
from traces.table import Root, Trace, TraceMeta, TraceRow

MakeTrace = Callable[[int], Trace]
META = TraceMeta("t", "yours", "a test", "none")
PINNED = [1876, 152, 365, 3960, 1654]


def chain(num_turns: int, *, output: int = 6, new: int = 4) -> Trace:
    """One session in which every turn keeps all before it; turn 0 stands on a root of 10 tokens."""
    rows = [TraceRow("t0", "s", "s", 0, "main", "root", 10, 10 + new, output, arrival_s=0.0)]
    for turn in range(1, num_turns):
        keep = rows[-1].input_tokens + rows[-1].output_tokens
        after = f"t{turn - 1}"
        rows.append(TraceRow(f"t{turn}", "s", "s", turn, "main", after, keep, keep + new, output, after=(after,)))
    return Trace(tuple(rows), {"root": Root("root", 10)}, META)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_prompt_is_the_kept_head_of_its_prefix_and_its_output_then_new_tokens(
    make_trace: MakeTrace, seed: int
) -> None:
    trace = make_trace(seed)
    builder = PromptBuilder(trace, 1000, seed=3)
    for row in trace.rows:
        prompt = builder.prompt(row.request_id)
        assert prompt.dtype == np.int32 and prompt.shape == (row.input_tokens,)
        assert prompt.min() >= NUM_RESERVED_TOKENS and prompt.max() < 1000
        if row.prefix_id is not None and row.keep_tokens:
            head = builder.prompt(row.prefix_id)
            if row.prefix_id not in trace.roots:
                head = np.concatenate([head, builder.output(row.prefix_id)])
            assert np.array_equal(prompt[: row.keep_tokens], head[: row.keep_tokens])


@given(seed=st.integers(0, 10**6), order_seed=st.integers(0, 99), memo=st.sampled_from((1, 500, 2**30)))
@settings(max_examples=40)
def test_prompts_depend_on_neither_order_nor_what_is_remembered(
    make_trace: MakeTrace, seed: int, order_seed: int, memo: int
) -> None:
    trace = make_trace(seed)
    builder, other = PromptBuilder(trace, 1000), PromptBuilder(trace, 1000, max_memo_tokens=memo)
    order = np.random.default_rng(order_seed).permutation(len(trace.rows))
    found = {trace.rows[i].request_id: other.prompt(trace.rows[i].request_id) for i in order}
    assert all(np.array_equal(builder.prompt(name), found[name]) for name in found)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_the_ideal_hit_is_what_a_cache_of_all_tokens_finds(make_trace: MakeTrace, seed: int) -> None:
    trace = make_trace(seed)
    builder = PromptBuilder(trace, 2**31 - 1)
    kept: set[bytes] = set()
    for root in trace.roots:
        kept.update(page_keys(builder.prompt(root), 1))
    for row, hit in zip(trace.rows, ideal_hits(trace), strict=True):
        keys = page_keys(builder.prompt(row.request_id), 1)
        found = next((i for i, key in enumerate(keys) if key not in kept), len(keys))
        # A cut history may share more with an older turn than with the row's own prefix, never less.
        assert min(found, row.input_tokens - 1) >= hit
        kept.update(keys)
        kept.update(page_keys(np.concatenate([builder.prompt(row.request_id), builder.output(row.request_id)]), 1))


def test_another_process_makes_the_same_tokens() -> None:
    code = "from traces.prompts import random_tokens as r; print(r(7, 'x', 5, 4096).tolist())"
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(random_tokens(7, "x", 5, 4096).tolist())


def test_tokens_are_pinned_so_that_old_records_can_be_made_again() -> None:
    assert random_tokens(7, "x", 5, 4096).tolist() == PINNED


def test_names_and_seeds_give_other_tokens_and_a_longer_draw_begins_alike() -> None:
    base = random_tokens(0, "a", 64, 30_000)
    assert np.array_equal(base[:17], random_tokens(0, "a", 17, 30_000))
    assert not np.array_equal(base, random_tokens(1, "a", 64, 30_000))
    assert not np.array_equal(base, random_tokens(0, "b", 64, 30_000))
    assert len(random_tokens(0, "a", 0, 30_000)) == 0


def test_tokens_cover_the_vocabulary_evenly() -> None:
    counts = np.bincount(random_tokens(0, "a", 40_000, 48), minlength=48)
    assert counts[:NUM_RESERVED_TOKENS].sum() == 0
    assert counts[NUM_RESERVED_TOKENS:].min() > 850 and counts[NUM_RESERVED_TOKENS:].max() < 1150


def test_a_session_of_thousands_of_turns_needs_no_recursion() -> None:
    trace = chain(3000, output=1, new=1)
    assert len(PromptBuilder(trace, 100).prompt("t2999")) == trace.rows[-1].input_tokens


def test_a_vocabulary_of_reserved_ids_only_is_refused() -> None:
    with pytest.raises(TraceError, match="vocab_size"):
        PromptBuilder(chain(1), NUM_RESERVED_TOKENS)


def test_an_unknown_request_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        PromptBuilder(chain(1), 100).prompt("nobody")


# --- live history -----------------------------------------------------------------------------------------------------


def test_a_live_output_stands_in_later_prompts() -> None:
    builder = PromptBuilder(chain(3), 100)
    builder.note_output("t0", [1, 2, 3, 4, 5, 6])
    assert builder.prompt("t1")[14:20].tolist() == [1, 2, 3, 4, 5, 6]
    assert builder.prompt("t2")[14:20].tolist() == [1, 2, 3, 4, 5, 6]
    assert builder.filled_history_tokens("t1") == 0


def test_a_shorter_output_is_filled_with_the_traces_own_and_counted() -> None:
    builder, recorded = PromptBuilder(chain(3), 100), PromptBuilder(chain(3), 100)
    builder.note_output("t0", [1, 2])
    assert builder.prompt("t1")[14:20].tolist() == [1, 2, *recorded.output("t0")[2:].tolist()]
    assert builder.filled_history_tokens("t1") == 4
    assert builder.filled_history_tokens("t2") == 0  # by then the fill is part of a prompt that was computed
    assert recorded.filled_history_tokens("t1") == 0


def test_a_longer_output_is_cut_to_the_traces_length() -> None:
    builder = PromptBuilder(chain(2), 100)
    builder.note_output("t0", list(range(20, 40)))
    assert builder.output("t0").tolist() == list(range(20, 26))
    assert len(builder.prompt("t1")) == 24
    assert builder.filled_history_tokens("t1") == 0


def test_an_output_that_stands_in_a_prompt_stays_as_it_was() -> None:
    builder = PromptBuilder(chain(3), 100, max_memo_tokens=1)
    before = builder.prompt("t1").copy()
    builder.note_output("t0", [1, 2, 3])
    assert np.array_equal(builder.prompt("t1"), before)
    assert np.array_equal(builder.prompt("t2")[:24], before)
    assert builder.filled_history_tokens("t1") == 0


def test_a_root_can_be_asked_for_and_has_no_output() -> None:
    builder = PromptBuilder(chain(2), 100)
    assert len(builder.prompt("root")) == 10
    builder.note_output("root", [1])
    assert builder.filled_history_tokens("root") == 0
    assert np.array_equal(builder.prompt("t0")[:10], builder.prompt("root"))


# --- page keys --------------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=60),
    page_size=st.integers(1, 9),
    cut=st.integers(0, 60),
)
def test_page_keys_are_equal_exactly_where_all_tokens_up_to_there_are(
    tokens: list[int], page_size: int, cut: int
) -> None:
    whole = page_keys(np.array(tokens, np.int32), page_size)
    assert len(whole) == len(tokens) // page_size
    head = tokens[:cut]
    assert page_keys(np.array(head, np.int32), page_size) == whole[: len(head) // page_size]
    if cut < len(tokens):
        changed = np.array(tokens, np.int32)
        changed[cut] ^= 1
        other = page_keys(changed, page_size)
        same = cut // page_size
        assert other[:same] == whole[:same]
        assert not set(other[same:]) & set(whole[same:])
