"""The contract between an instance's scheduler and whatever runs its steps.

A prefill chunk, an extend of handed-over tokens and a decode are one thing here: run `token_ids` at positions
[start, start + n) with the KV of [0, start) in place, and sample the token after the last if asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

KVBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a step.

    `pages` is the sequence's page table (page i holds positions [i * page_size, (i + 1) * page_size)) and covers at
    least [0, start + len(token_ids)). The sampled token stands at position start + len(token_ids); with `temperature`
    > 0 the draw depends on (seed, that position) alone.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    is_sampled: bool
    temperature: float = 0.0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Executor(Protocol):
    """Owns the KV pages' bytes. Called from one thread at a time, except `read_kv` and `write_kv`, which may run beside
    `run` on pages that the step does not touch."""

    def run(self, items: Sequence[BatchItem]) -> list[int | None]:
        """Run one step, write the new KV into the pages; the sampled token per item, None where none was asked."""
        ...

    def duration_s(self, items: Sequence[BatchItem]) -> float:
        """How long the modelled chip takes for this step, in seconds (0 where nothing is modelled)."""
        ...

    def read_kv(self, pages: Sequence[int], start: int, stop: int) -> KVBytes | None:
        """A copy of the KV of positions [start, stop) as raw bytes, laid out [layer, k/v, token, kv_head, head_dim];
        None where no model computes."""
        ...

    def write_kv(self, pages: Sequence[int], start: int, stop: int, payload: KVBytes | None) -> None:
        """Put what `read_kv` gave elsewhere at the same positions. Raises ValueError when the size is wrong."""
        ...

    def release(self, request_id: str) -> None:
        """Forget working memory kept for this request (its slot); the pages stay."""
        ...
