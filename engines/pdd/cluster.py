"""What carries the router's messages to instances: the seam between the core and the world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engines.pdd.messages import AnyMessage

OnMessage = Callable[[AnyMessage], None]
OnFailure = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Started:
    """Facts of what was started, per instance (pid, port ...), and versions of what computes."""

    instances: Mapping[str, Mapping[str, object]]


class Cluster(Protocol):
    """Instances and links, in processes or on virtual time. `on_message` takes what instances say to the router,
    `on_failure` a sentence when the cluster cannot go on."""

    on_message: OnMessage
    on_failure: OnFailure

    async def start(self) -> Started:
        """Raises EngineStartError with one clear message."""
        ...

    def send(self, dst: str, message: AnyMessage) -> None: ...

    async def shape(self, *, is_shaped: bool) -> None:
        """Shape the line as configured, or let all pass (while priming)."""
        ...

    async def link_rows(self) -> list[dict[str, object]]:
        """Counters of the links, as in the `links` table."""
        ...

    def own_counters(self, name: str) -> dict[str, int]:
        """Counters of instance `name` that its driver keeps and its STATS does not carry."""
        ...

    async def close(self) -> None: ...
