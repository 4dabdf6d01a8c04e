"""Pages of KV and who owns them.

A page is owned by requests, by tree nodes and by writes in flight, and is free when the last lets go. The pool counts
owners; it never looks inside a page and never decides who must go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

TREE = "tree"  # the radix cache's name as an owner


class PoolIntegrityError(AssertionError):
    """The pool's books do not add up. The message carries the numbers that disagree."""


class PagePool:
    """`num_pages` pages of `page_size` tokens each. Free pages are handed out lowest number first at the start, then in
    the order in which they came back: equal histories give equal page numbers."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._refs: list[int] = [0] * num_pages
        self._pages_of: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def alloc(self, count: int, owner: str) -> list[int]:
        """Take `count` free pages for `owner`; raises ValueError when there are fewer (callers ask `num_free`
        first)."""
        if count > len(self._free):
            raise ValueError(f"{owner} asks for {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self._pages_of.setdefault(owner, []).extend(pages)
        return pages

    def share(self, pages: Sequence[int], owner: str) -> None:
        """Make `owner` one more owner of pages that are owned already."""
        for page in pages:
            if self._refs[page] == 0:
                raise PoolIntegrityError(f"{owner} shares page {page}, which is free")
            self._refs[page] += 1
        self._pages_of.setdefault(owner, []).extend(pages)

    def release_owner(self, owner: str) -> None:
        """`owner` lets go of all its pages."""
        for page in self._pages_of.pop(owner, ()):
            self._drop(page)

    def add_tree(self, page: int) -> None:
        """The radix cache becomes an owner of `page`."""
        if self._refs[page] == 0:
            raise PoolIntegrityError(f"the tree takes page {page}, which is free")
        self._refs[page] += 1

    def drop_tree(self, page: int) -> None:
        """The radix cache lets go of `page`."""
        self._drop(page)

    def holds(self, owner: str) -> int:
        return len(self._pages_of.get(owner, ()))

    def num_owners(self, page: int) -> int:
        return self._refs[page]

    def owners(self) -> list[str]:
        return list(self._pages_of)

    def _drop(self, page: int) -> None:
        if self._refs[page] <= 0:
            raise PoolIntegrityError(f"page {page} is released more often than it was taken")
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def check_integrity(self, tree_pages: Sequence[int]) -> None:
        """Add up free + owned and every page's owners; raises PoolIntegrityError with the numbers that disagree."""
        expected = Counter(tree_pages)
        if any(count > 1 for count in expected.values()):
            raise PoolIntegrityError("a page stands twice in the tree")
        for pages in self._pages_of.values():
            expected.update(pages)
        for page in range(self.num_pages):
            if expected[page] != self._refs[page]:
                raise PoolIntegrityError(
                    f"page {page}: {expected[page]} owners are known, {self._refs[page]} are counted"
                )
        owned = sum(1 for count in self._refs if count)
        if owned + len(self._free) != self.num_pages or len(set(self._free)) != len(self._free):
            raise PoolIntegrityError(f"{owned} owned + {len(self._free)} free pages != {self.num_pages}")
