"""What the synchronous cores ask of their driver."""

from __future__ import annotations

from dataclasses import dataclass

from engines.pdd.executor.base import BatchItem, KVBytes
from engines.pdd.messages import AnyMessage

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Send:
    """Carry `message` to node `dst`; KV goes on its `lane`, all else on the control connection."""

    dst: str
    message: AnyMessage
    payload: KVBytes | None = None
    lane: int | None = None


@dataclass(frozen=True, slots=True)
class RunStep:
    """Release the slots of `released`, run `items`, then call `step_done`."""

    items: tuple[BatchItem, ...]
    released: tuple[str, ...]


Command = Send | RunStep
