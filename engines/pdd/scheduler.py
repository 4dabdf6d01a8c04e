"""Continuous batching: which legs run in the next step, and how many tokens of each.

One fused step holds every decode and extend that can run, then prompt chunks in order of arrival. No prompt takes
more than a chunk, so short prompts pass beside a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.pdd.config import InstanceSpec
from engines.pdd.executor.base import BatchItem
from engines.pdd.leg import Leg


@dataclass(frozen=True, slots=True)
class Work:
    """`leg` runs `count` tokens from its `num_computed` on; `is_sampled`: the step gives the token after them."""

    leg: Leg
    count: int
    is_sampled: bool

    def item(self) -> BatchItem:
        leg = self.leg
        return BatchItem(
            request_id=leg.r,
            token_ids=leg.tokens_at(leg.num_computed, self.count),
            start=leg.num_computed,
            pages=leg.pages,
            is_sampled=self.is_sampled,
            temperature=leg.ask.temperature,
            seed=leg.ask.seed,
        )


class Scheduler:
    """Keeps the order of legs. `waiting` prompts are admitted when a step has room for their first chunk, so that
    they match the cache as late as can be; `running` legs have their pages."""

    def __init__(self, spec: InstanceSpec) -> None:
        self._spec = spec
        self.waiting: list[Leg] = []
        self.running: list[Leg] = []

    def next_batch(self, admit: Callable[[Leg], bool]) -> list[Work]:
        """The next step's work, empty when nothing can run. `admit` gives a waiting leg its pages or says no."""
        budget = self._spec.max_step_tokens
        batch: list[Work] = []
        for leg in self.running:
            if leg.num_todo and leg.num_computed >= leg.num_prompt and len(batch) < self._spec.max_batch_seqs:
                batch.append(self._take(leg, leg.num_todo))
                budget -= leg.num_todo
        for leg in self.running:
            if budget > 0 and leg.num_todo and leg.num_computed < leg.num_prompt:
                batch.append(self._take(leg, min(self._spec.prefill_chunk_tokens, budget, leg.num_todo)))
                budget -= batch[-1].count
        while budget > 0 and self.waiting and len(self.running) < self._spec.max_batch_seqs:
            leg = self.waiting[0]
            if not admit(leg):
                break
            self.waiting.pop(0)
            self.running.append(leg)
            batch.append(self._take(leg, min(self._spec.prefill_chunk_tokens, budget, leg.num_todo)))
            budget -= batch[-1].count
        return batch

    @staticmethod
    def _take(leg: Leg, count: int) -> Work:
        is_last = count == leg.num_todo
        return Work(leg, count, is_sampled=is_last and not leg.is_concluding)

    def remove(self, leg: Leg) -> None:
        if leg in self.running:
            self.running.remove(leg)
        elif leg in self.waiting:
            self.waiting.remove(leg)
