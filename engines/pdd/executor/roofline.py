"""How long a step takes on a modelled chip, and an executor that is nothing but that: no model, no bytes.

Must never import torch: runs on virtual time start without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from engines.pdd.config import StepTiming
from engines.pdd.executor.base import BatchItem, KVBytes

# Ids below are left to special tokens, which made-up outputs must not contain.
NUM_RESERVED_TOKENS = 8


def step_duration_s(timing: StepTiming, items: Sequence[BatchItem]) -> float:
    """Seconds for one fused step of `items` (the formula in StepTiming's docstring); 0 for an empty step.

    All items share one pass over the weights, so the step takes the longer of computing and reading, not their sum.
    """
    if not items:
        return 0.0
    compute_s = 0.0
    memory_s = timing.weights_s
    for item in items:
        num_tokens = item.num_tokens
        if num_tokens > 1:
            compute_s += timing.prefill_token_s * num_tokens
            compute_s += timing.attention_s * num_tokens * (item.start + num_tokens / 2)
        else:
            memory_s += timing.kv_read_s * item.start
    return timing.base_s + max(compute_s, memory_s)


class RooflineExecutor:
    """An Executor that only tells the time. Its tokens are made from (request_id, position), so that
    every instance gives a request the same output, and caches work as with a model."""

    def __init__(self, timing: StepTiming, vocab_size: int, seed: int = 0) -> None:
        if vocab_size <= NUM_RESERVED_TOKENS:
            raise ValueError(f"vocab_size must exceed {NUM_RESERVED_TOKENS}, got {vocab_size}")
        self._timing = timing
        self._num_choices = vocab_size - NUM_RESERVED_TOKENS
        self._hash_key = seed.to_bytes(8, "little", signed=True)

    def run(self, items: Sequence[BatchItem]) -> list[int | None]:
        """A made-up token per item that asks for one; reads and writes no page."""
        return [
            self._token(item.request_id, item.start + item.num_tokens) if item.is_sampled else None for item in items
        ]

    def duration_s(self, items: Sequence[BatchItem]) -> float:
        """See `step_duration_s`."""
        return step_duration_s(self._timing, items)

    def read_kv(self, pages: Sequence[int], start: int, stop: int) -> KVBytes | None:
        """None: no model computes, so there are no bytes."""
        return None

    def write_kv(self, pages: Sequence[int], start: int, stop: int, payload: KVBytes | None) -> None:
        """Takes None alone. Raises ValueError on bytes: the sender computes, this one does not."""
        if payload is not None:
            raise ValueError(
                f"got {payload.nbytes} bytes of KV for positions [{start}, {stop}), but no model "
                "computes here: both ends of a transfer must run the same kind of executor"
            )

    def release(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def _token(self, request_id: str, position: int) -> int:
        digest = hashlib.blake2b(f"{position}:{request_id}".encode(), digest_size=8, key=self._hash_key).digest()
        return NUM_RESERVED_TOKENS + int.from_bytes(digest, "little") % self._num_choices
