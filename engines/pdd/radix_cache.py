"""Which prefixes' KV is kept: match, insert, lock, evict, over chained page keys.

A key names a page of tokens and all that stands before it, so a dictionary of keys is the tree: a node's parent is
the page before. Only full pages are kept. Leaves go first, least recently used; a locked node protects all before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.pdd.kv_pool import PagePool, PoolIntegrityError


@dataclass(slots=True, eq=False)
class Node:
    """One page of a kept prefix. `num_locks` counts locks on it or on any node after it."""

    key: bytes
    page: int
    parent: Node | None
    num_children: int = 0
    num_locks: int = 0
    last_used: int = 0
    is_alive: bool = field(default=True)


class RadixCache:
    """The kept prefixes of one instance. It owns its pages through `pool` and hands them to requests by sharing."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._nodes: dict[bytes, Node] = {}
        self._tick = 0
        self._num_protected = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Pages that could be given back if asked (some only after the ones behind them)."""
        return len(self._nodes) - self._num_protected

    def match(self, keys: Sequence[bytes], max_tokens: int) -> tuple[list[int], Node | None]:
        """The pages of the longest kept prefix of `keys`, at most floor(max_tokens / page_size) of them, and its last
        node.

        Callers pass prompt length - 1: at least one token is left to compute, or there would be no logits.
        """
        self._tick += 1
        pages: list[int] = []
        last: Node | None = None
        for key in keys[: max(0, max_tokens) // self._pool.page_size]:
            node = self._nodes.get(key)
            if node is None:
                break
            node.last_used = self._tick
            pages.append(node.page)
            last = node
        return pages, last

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> Node | None:
        """Keep `pages` under `keys`; the last one's node. A page whose key is kept already stays with its request
        alone (the canonical page is the one in the tree, and later matches get that one). A request that goes on
        owning its pages locks the node, so that what counts as evictable is owned by the tree alone."""
        self._tick += 1
        parent: Node | None = None
        for key, page in zip(keys, pages, strict=True):
            node = self._nodes.get(key)
            if node is None:
                node = Node(key, page, parent)
                self._pool.add_tree(page)
                self._nodes[key] = node
                if parent is not None:
                    parent.num_children += 1
            node.last_used = self._tick
            parent = node
        if parent is not None:
            self._offer(parent)
        return parent

    def lock(self, node: Node | None) -> None:
        """Forbid the eviction of `node` and all before it, until `unlock`."""
        while node is not None:
            node.num_locks += 1
            if node.num_locks == 1:
                self._num_protected += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        leaf = node
        while node is not None:
            if node.num_locks <= 0:
                raise PoolIntegrityError(f"page {node.page} is unlocked more often than it was locked")
            node.num_locks -= 1
            if node.num_locks == 0:
                self._num_protected -= 1
            node = node.parent
        if leaf is not None:
            self._offer(leaf)

    def evict(self, count: int) -> int:
        """Let go of up to `count` pages, least recently used leaves first; returns how many."""
        num_evicted = 0
        while num_evicted < count and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if not node.is_alive or node.num_children or node.num_locks:
                continue
            if node.last_used != last_used:
                self._offer(node)
                continue
            node.is_alive = False
            del self._nodes[node.key]
            self._pool.drop_tree(node.page)
            num_evicted += 1
            if node.parent is not None:
                node.parent.num_children -= 1
                self._offer(node.parent)
        return num_evicted

    def clear(self) -> None:
        """Forget everything that is not locked."""
        self.evict(len(self._nodes))

    def _offer(self, node: Node) -> None:
        # Invariant: every alive leaf without locks stands in the heap at least once.
        if node.is_alive and not node.num_children and not node.num_locks:
            self._serial += 1
            heapq.heappush(self._heap, (node.last_used, self._serial, node))

    def tree_pages(self) -> list[int]:
        return [node.page for node in self._nodes.values()]

    def check_integrity(self) -> None:
        """Walk the tree: parents alive, children counted, locks no smaller than the children's, protected pages
        counted."""
        children: dict[int, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
                if not node.parent.is_alive or node.parent.num_locks < node.num_locks:
                    raise PoolIntegrityError(f"page {node.page} stands behind a dead or less locked page")
        protected = 0
        for node in self._nodes.values():
            protected += node.num_locks > 0
            if not node.num_locks and self._pool.num_owners(node.page) != 1:
                raise PoolIntegrityError(f"page {node.page} counts as evictable and a request owns it")
            if children.get(id(node), 0) != node.num_children:
                raise PoolIntegrityError(
                    f"page {node.page}: {children.get(id(node), 0)} children, {node.num_children} counted"
                )
        if protected != self._num_protected:
            raise PoolIntegrityError(f"{protected} locked pages, {self._num_protected} counted")
