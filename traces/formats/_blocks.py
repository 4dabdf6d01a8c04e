"""What formats of chained block hashes share: which earlier request has the longest common prefix, and are the hashes chained at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces.errors import TraceError
from traces.table import TraceRow


@dataclass(slots=True)
class BlockIndex:
    """Requests by block. A hash is chained: it names its block and all before it, so it always has the same predecessor."""

    block_tokens: int
    owner: dict[int, TraceRow]
    before: dict[int, int | None]

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.owner = {}
        self.before = {}

    def longest(self, hash_ids: Sequence[int]) -> tuple[TraceRow | None, int]:
        """The latest earlier request that shares the most leading blocks, and how many tokens these are."""
        count = 0
        while count < len(hash_ids) and hash_ids[count] in self.owner:
            count += 1
        return (self.owner[hash_ids[count - 1]], count * self.block_tokens) if count else (None, 0)

    def check_chained(self, hash_ids: Sequence[int], where: Callable[[], str]) -> None:
        """Raises TraceError when a hash follows another one than before: then it does not name its prefix."""
        previous: int | None = None
        for hash_id in hash_ids:
            if self.before.setdefault(hash_id, previous) != previous:
                raise TraceError(
                    where(), "hash_ids", f"hash {hash_id} follows {previous} here and {self.before[hash_id]} earlier",
                    "the hashes are not chained over the prefix, so hits cannot be read from them",
                )  # fmt: skip
            previous = hash_id

    def add(self, row: TraceRow, hash_ids: Sequence[int]) -> None:
        for hash_id in hash_ids:
            self.owner[hash_id] = row


def kept_tokens(prefix: TraceRow, shared_tokens: int, input_tokens: int, *, is_answer_reused: bool, block_tokens: int) -> int:
    """How much of `prefix` a prompt keeps: the shared blocks, or with reused answers all of the prefix's prompt and output, where the
    blocks reach to the last full one of its prompt and the new prompt is long enough. At least one token is new."""
    keep = min(shared_tokens, prefix.input_tokens)
    whole = prefix.input_tokens + prefix.output_tokens
    if is_answer_reused and shared_tokens >= prefix.input_tokens // block_tokens * block_tokens and input_tokens > whole:
        keep = max(whole, shared_tokens if shared_tokens <= whole else whole)
    return min(keep, input_tokens - 1)


def whole_number(value: object, where: str, field: str, *, minimum: int) -> int:
    """A JSON number that is a whole one of at least `minimum`. Raises TraceError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise TraceError(where, field, f"must be a whole number of at least {minimum}, got {value!r}")
    return value


def seconds(value: object, where: str, field: str) -> float:
    """A JSON number that is finite and not negative. Raises TraceError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceError(where, field, f"must be a number of 0 or more, got {value!r}")
    return float(value)


def hash_list(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise TraceError(where, "hash_ids", "must be a list of whole numbers")
    return value


def is_reused(answers: object, default: str) -> tuple[str, bool]:
    """The option `answers` and what it means; None takes the format's default. Raises TraceError."""
    chosen = default if answers is None else str(answers)
    if chosen not in ("reused", "absent"):
        raise TraceError("trace", "trace.answers", f"must be reused or absent, got {chosen!r}")
    return chosen, chosen == "reused"
