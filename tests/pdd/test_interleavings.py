"""Seeded interleavings of the whole engine on virtual time: right tokens, sound books, every request ends."""

from __future__ import annotations

import pytest

from engines.pdd.check import run_seed
from engines.pdd.policy import POLICIES

BLOCK = 25


@pytest.mark.parametrize("block", range(12))
def test_every_token_is_right_on_every_interleaving(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        run_seed(seed)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_seed_gives_right_tokens_under_each_policy(policy: str) -> None:
    for seed in range(1000, 1015):
        run_seed(seed, policy)


def test_handoffs_happen_in_the_seeds_that_are_run() -> None:
    outcomes = [run_seed(seed, "pdd") for seed in range(1000, 1030)]
    assert sum(outcome.num_handoffs for outcome in outcomes) >= 20
    assert sum(outcome.num_relayed for outcome in outcomes) > sum(outcome.num_handoffs for outcome in outcomes)


def test_the_same_seed_repeats_exactly() -> None:
    assert run_seed(12) == run_seed(12)
