"""One request at one instance: plain integers and lists, changed by the instance alone.

positions   0 ............ num_computed ......... len(prompt) + len(output)
            |-- KV in pages --|-- tokens known, KV to be made --|
pages       owned by this leg (its request's name) from admission to close; matched ones are shared with the tree
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from engines.base import TokenArray
from engines.pdd.messages import Ask, Event, Stop
from engines.pdd.radix_cache import Node


class LegKind(Enum):
    PREFILL = "P"  # computes the prompt, sends its KV
    RELAY = "RLD"  # receives all, decodes until MD is ready
    MAIN = "MD"  # receives what it lacks, decodes to the end
    MIXED = "MIXED"  # computes the prompt and decodes


@dataclass(slots=True, eq=False)
class Leg:
    """`output` holds T[0..): for P the one token that it sampled. `may_run` lets the scheduler take it;
    `is_concluding` runs what is known for the cache's sake and samples nothing."""

    r: str
    e: int
    kind: LegKind
    ask: Ask
    prompt: TokenArray
    keys: list[bytes]
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    lock: Node | None = None
    is_admitted: bool = False
    num_cached: int = 0
    num_computed: int = 0
    may_run: bool = False
    is_in_step: bool = False
    is_concluding: bool = False
    ending: Stop | None = None
    events: list[Event] = field(default_factory=list)
    step_start_ns: int | None = None
    # receiving
    received: list[tuple[int, int]] = field(default_factory=list)
    first_token: int | None = None
    kv_bytes: int = 0
    first_sent_ns: int = 0
    holds_prompt: bool = False
    # handoff
    has_begun: bool = False
    relay: str | None = None
    seal_to: str | None = None  # RLD: MD is ready and waits for the seal
    is_sealed: bool = False
    sealed_len: int | None = None  # MD: tokens handed over, not committed yet

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_todo(self) -> int:
        """Tokens that the next steps have to run: 0 when paused (all of the output is there)."""
        if not self.may_run:
            return 0
        if self.is_concluding:
            return max(0, self.num_known - 1 - self.num_computed)
        if len(self.output) >= self.ask.max_tokens:
            return 0
        return self.num_known - self.num_computed

    def tokens_at(self, start: int, count: int) -> list[int]:
        """Known tokens at the positions [start, start + count)."""
        stop = start + count
        head = self.prompt[start:stop].tolist() if start < self.num_prompt else []
        first = max(0, start - self.num_prompt)
        last = max(0, stop - self.num_prompt)
        return head + self.output[first:last]

    def note_received(self, start: int, stop: int) -> None:
        """Add [start, stop) to the received ranges, merged and in order."""
        ranges = sorted([*self.received, (start, stop)])
        merged = [ranges[0]]
        for lo, hi in ranges[1:]:
            if lo <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
            else:
                merged.append((lo, hi))
        self.received = merged

    @property
    def has_whole_prompt(self) -> bool:
        """Whether the KV of [num_cached, num_prompt) and T[0] have come."""
        return self.received == [(self.num_cached, self.num_prompt)] and self.first_token is not None


def prompt_of(ask: Ask) -> TokenArray:
    return np.frombuffer(ask.prompt, dtype="<i4").astype(np.int32, copy=False)
