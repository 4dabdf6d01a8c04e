"""An instance's KV: the page pool and the radix cache as one thing that admits, keeps and frees legs.

It records every look-up and every insert with a number that counts up: this order alone fixes what hits should have
been.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from engines.pdd.kv_pool import PagePool
from engines.pdd.leg import Leg
from engines.pdd.messages import Event
from engines.pdd.radix_cache import RadixCache
from traces.prompts import page_keys


class KVCache:
    """Pages and kept prefixes of instance `name`. Without `is_keeping` nothing is matched and nothing kept (RLD, DRC
    off)."""

    def __init__(self, name: str, num_pages: int, page_size: int, *, is_keeping: bool) -> None:
        self.name = name
        self.page_size = page_size
        self.is_keeping = is_keeping
        self.pool = PagePool(num_pages, page_size)
        self.tree = RadixCache(self.pool)
        self._seq = 0

    def fits_ever(self, num_tokens: int) -> bool:
        return self.pool.pages_for(num_tokens) <= self.pool.num_pages

    def admit(self, leg: Leg, num_tokens: int) -> bool:
        """Match the prompt, lock what is kept, take pages for `num_tokens` tokens in all. False: no room now, nothing
        changed."""
        matched, node = self.tree.match(leg.keys, leg.num_prompt - 1) if self.is_keeping else ([], None)
        self.tree.lock(node)
        missing = self.pool.pages_for(num_tokens) - len(matched)
        if missing > self.pool.num_free + self.tree.num_evictable:
            self.tree.unlock(node)
            return False
        self.tree.evict(missing - self.pool.num_free)
        self.pool.share(matched, leg.r)
        leg.pages = matched + self.pool.alloc(missing, leg.r)
        leg.lock = node
        leg.is_admitted = True
        leg.num_cached = len(matched) * self.page_size
        if self.is_keeping:
            self._note(leg, "match", leg.num_cached)
        return True

    def keep_prompt(self, leg: Leg) -> None:
        """Keep the prompt's full pages; their KV must be in place."""
        if self.is_keeping:
            num_pages = leg.num_prompt // self.page_size
            node = self.tree.insert(leg.keys[:num_pages], leg.pages[:num_pages])
            self.tree.lock(node)
            self.tree.unlock(leg.lock)
            leg.lock = node
            self._note(leg, "insert_prompt", num_pages * self.page_size)

    def keep_all(self, leg: Leg) -> None:
        """Keep the full pages of prompt and output. The last token has no KV: it was sampled and never run."""
        if self.is_keeping:
            num_pages = min(leg.num_computed, leg.num_known - 1) // self.page_size
            tokens = np.concatenate([leg.prompt, np.asarray(leg.output, dtype=np.int32)])
            keys = page_keys(tokens[: num_pages * self.page_size], self.page_size)
            self.tree.insert(keys, leg.pages[:num_pages])
            self._note(leg, "insert_full", num_pages * self.page_size)

    def free(self, leg: Leg) -> None:
        """The leg lets go of its pages and of its lock. Safe on a leg that was never admitted."""
        self.tree.unlock(leg.lock)
        leg.lock = None
        self.pool.release_owner(leg.r)
        leg.pages = []
        leg.is_admitted = False

    def check_integrity(self) -> None:
        """Raises PoolIntegrityError where pages, owners and tree disagree."""
        self.tree.check_integrity()
        self.pool.check_integrity(self.tree.tree_pages())

    def _note(self, leg: Leg, op: Literal["match", "insert_prompt", "insert_full"], tokens: int) -> None:
        leg.events.append(Event(self.name, self._seq, op, tokens))
        self._seq += 1
