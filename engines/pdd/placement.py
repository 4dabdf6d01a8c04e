"""Which instance of a role serves a request: prefix hit against load, scored per request.

The router keeps a guess of what each instance's cache holds; the instance's own match is the truth and is what gets
reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

LOAD_WEIGHT = 0.5


class Placement:
    """The instances of one role. `capacity_pages` bounds the guess per instance."""

    def __init__(self, capacity_pages: dict[str, int]) -> None:
        self._capacity = capacity_pages
        self._keys: dict[str, OrderedDict[bytes, None]] = {name: OrderedDict() for name in capacity_pages}
        self.load: dict[str, int] = dict.fromkeys(capacity_pages, 0)

    def choose(self, keys: Sequence[bytes]) -> str:
        """Highest hit share - LOAD_WEIGHT * load / mean load; ties go to the first name. Affinity is never switched
        off for all."""
        if len(self.load) == 1:
            return next(iter(self.load))
        mean = max(1.0, sum(self.load.values()) / len(self.load))

        def score(name: str) -> float:
            return self._hit_share(name, keys) - LOAD_WEIGHT * self.load[name] / mean

        return max(self.load, key=score)

    def least_loaded(self) -> str:
        return min(self.load, key=lambda name: self.load[name])

    def remember(self, name: str, keys: Sequence[bytes]) -> None:
        if len(self.load) == 1:
            return
        known = self._keys[name]
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._capacity[name]:
            known.popitem(last=False)

    def _hit_share(self, name: str, keys: Sequence[bytes]) -> float:
        known = self._keys[name]
        count = 0
        for key in keys:
            if key not in known:
                break
            count += 1
        return count / max(1, len(keys))
