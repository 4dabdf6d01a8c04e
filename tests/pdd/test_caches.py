"""Pages, their owners and the radix cache: nothing leaks, nothing is freed under an owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.pdd.kv_cache import KVCache
from engines.pdd.kv_pool import PagePool, PoolIntegrityError
from engines.pdd.leg import Leg, LegKind
from engines.pdd.messages import Ask
from traces.prompts import page_keys

PAGE = 4


def leg(name: str, tokens: list[int], max_tokens: int = 1) -> Leg:
    prompt = np.array(tokens, dtype=np.int32)
    ask = Ask(prompt=prompt.tobytes(), max_tokens=max_tokens)
    return Leg(name, 0, LegKind.MIXED, ask, prompt, page_keys(prompt, PAGE))


def finish(cache: KVCache, one: Leg, output: list[int]) -> None:
    one.output = output
    one.num_computed = one.num_known - 1
    cache.keep_all(one)
    cache.free(one)


def test_a_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = PagePool(2, PAGE)
    pages = pool.alloc(1, "a")
    pool.share(pages, "b")
    pool.release_owner("a")
    assert pool.num_free == 1
    pool.release_owner("b")
    assert pool.num_free == 2


def test_integrity_names_the_page_whose_owners_disagree() -> None:
    pool = PagePool(2, PAGE)
    page = pool.alloc(1, "a")[0]
    pool._refs[page] = 2
    with pytest.raises(PoolIntegrityError, match=f"page {page}: 1 owners are known, 2 are counted"):
        pool.check_integrity([])


def test_releasing_twice_frees_once() -> None:
    pool = PagePool(2, PAGE)
    pool.alloc(2, "a")
    pool.release_owner("a")
    pool.release_owner("a")
    assert pool.num_free == 2
    pool.check_integrity([])


def test_a_full_hit_leaves_at_least_one_token_to_compute() -> None:
    cache = KVCache("md0", 16, PAGE, is_keeping=True)
    first = leg("a", list(range(10, 18)))
    assert cache.admit(first, 9)
    first.num_computed = 8
    cache.keep_prompt(first)
    cache.free(first)
    again = leg("b", list(range(10, 18)))
    assert cache.admit(again, 9)
    assert again.num_cached == 4


def test_a_prompt_shorter_than_a_page_matches_and_keeps_nothing() -> None:
    cache = KVCache("md0", 4, PAGE, is_keeping=True)
    short = leg("a", [9, 9, 9])
    assert cache.admit(short, 4)
    finish(cache, short, [10])
    assert cache.tree.num_pages == 0
    assert cache.pool.num_free == 4


def test_two_equal_prompts_at_once_keep_one_copy_and_free_the_other() -> None:
    cache = KVCache("p0", 16, PAGE, is_keeping=True)
    one, two = leg("a", list(range(10, 19))), leg("b", list(range(10, 19)))
    for item in (one, two):
        assert cache.admit(item, 10)
        item.num_computed = 9
    for item in (one, two):
        cache.keep_prompt(item)
        cache.check_integrity()
    cache.free(one)
    cache.check_integrity()
    cache.free(two)
    assert cache.tree.num_pages == 2
    assert cache.pool.num_free == 14


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = KVCache("md0", 4, PAGE, is_keeping=True)
    kept = leg("a", list(range(10, 22)))
    assert cache.admit(kept, 12)
    kept.num_computed = 12
    cache.keep_prompt(kept)
    assert not cache.admit(leg("b", list(range(50, 58))), 9)
    cache.check_integrity()
    cache.free(kept)
    assert cache.admit(leg("c", list(range(50, 58))), 9)
    cache.check_integrity()


def test_a_failed_admission_changes_nothing() -> None:
    cache = KVCache("md0", 3, PAGE, is_keeping=True)
    first = leg("a", list(range(10, 18)))
    assert cache.admit(first, 8)
    finish(cache, first, [1])
    big = leg("b", [*range(10, 18), *range(60, 70)])
    assert not cache.admit(big, 20)
    assert cache.tree.num_evictable == cache.tree.num_pages
    assert not big.events


def test_without_keeping_nothing_is_matched_and_nothing_stays() -> None:
    cache = KVCache("rld0", 8, PAGE, is_keeping=False)
    for name in ("a", "b"):
        item = leg(name, list(range(10, 22)))
        assert cache.admit(item, 14)
        assert item.num_cached == 0
        finish(cache, item, [5, 6])
    assert cache.pool.num_free == 8


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(0, 6), st.booleans()), max_size=40))
def test_books_add_up_after_any_order_of_admissions_and_endings(steps: list[tuple[int, int, int, bool]]) -> None:
    cache = KVCache("md0", 12, PAGE, is_keeping=True)
    open_legs: list[Leg] = []
    for number, (family, length, num_output, ends_first) in enumerate(steps):
        if ends_first and open_legs:
            ending = open_legs.pop(0)
            finish(cache, ending, list(range(60, 60 + ending.ask.max_tokens)))
            cache.check_integrity()
        item = leg(f"r{number}", [10 * family + i % 7 for i in range(length)], max_tokens=num_output + 1)
        if cache.admit(item, length + num_output + 1):
            assert item.num_cached < length
            item.num_computed = length
            cache.keep_prompt(item)
            open_legs.append(item)
        cache.check_integrity()
    for item in open_legs:
        cache.free(item)
    cache.check_integrity()
    assert cache.pool.num_free + cache.tree.num_evictable == 12
