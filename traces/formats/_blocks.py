"""What formats of chained block hashes share: which earlier request has the longest common prefix, and whether the
hashes are chained at all. Knows no file format."""

from __future__ import annotations

from collections.abc import Callable

from traces.errors import TraceError
from traces.table import TraceRow


class BlockIndex:
    """Requests by block. A chained hash names its block and all before it, so it always has the same predecessor.

    Per request: `longest`, then `add`. Work is linear in the hashes, most of it in C.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holder: dict[int, tuple[TraceRow, list[int]]] = {}  # hash -> the latest request that has it
        self._first: dict[int, str] = {}  # hash -> the first request that had it

    def longest(self, hash_ids: list[int], where: Callable[[], str]) -> tuple[TraceRow | None, int]:
        """The latest earlier request that shares the most leading blocks, and how many blocks these are.

        Raises TraceError when a hash follows another one than before: then it does not name its prefix.
        """
        low, high = 0, len(hash_ids)  # chained hashes are known up to some place and unknown from there on
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hash_ids[middle] in self._holder else (low, middle)
        row, known = self._holder[hash_ids[low - 1]] if low else (None, [])
        rest = hash_ids[low:]
        if known[:low] != hash_ids[:low] or not self._first.keys().isdisjoint(rest) or len(set(rest)) != len(rest):
            self._refuse(hash_ids, where())
        return row, low

    def add(self, row: TraceRow, hash_ids: list[int]) -> None:
        for hash_id in reversed(hash_ids):
            if hash_id in self._first:
                break
            self._first[hash_id] = row.request_id
        self._holder.update(dict.fromkeys(hash_ids, (row, hash_ids)))

    def is_introduced_by(self, row: TraceRow, hash_id: int) -> bool:
        return self._first.get(hash_id) == row.request_id

    def _refuse(self, hash_ids: list[int], where: str) -> None:
        before: dict[int, int | None] = {}
        for known in {id(known): known for _, known in self._holder.values()}.values():
            before.update(zip(known, (None, *known[:-1]), strict=True))
        previous: int | None = None
        for hash_id in hash_ids:
            if before.setdefault(hash_id, previous) != previous:
                break
            previous = hash_id
        raise TraceError(
            where, "hash_ids", f"hash {hash_id} follows {_named(previous)} here and {_named(before[hash_id])} earlier",
            "the hashes are not chained over the prefix, so that hits cannot be read from them",
        )  # fmt: skip


def _named(hash_id: int | None) -> str:
    return "nothing" if hash_id is None else str(hash_id)


def shared_prefix(
    index: BlockIndex, hash_ids: list[int], input_tokens: int, where: Callable[[], str], *, is_answer_reused: bool
) -> tuple[TraceRow | None, int]:
    """The prefix of a prompt and how many of its tokens are kept: its shared blocks.

    With reused answers a prompt that holds the prefix's last full block, and is long enough, keeps the prefix's prompt
    and output whole. A last full block that older requests have too (a shared system prompt) says nothing of the kind.
    At least one token is new. Raises TraceError for hashes that are not chained.
    """
    prefix, num_shared = index.longest(hash_ids, where)
    if prefix is None:
        return None, 0
    shared = num_shared * index.block_tokens
    keep = min(shared, prefix.input_tokens)
    last_full = prefix.input_tokens // index.block_tokens
    whole = prefix.input_tokens + prefix.output_tokens
    if (
        is_answer_reused
        and 0 < last_full <= num_shared
        and whole < input_tokens
        and index.is_introduced_by(prefix, hash_ids[last_full - 1])
    ):
        keep = whole
    return prefix, min(keep, input_tokens - 1)
