"""The one small interface between the harness and whatever serves requests, and its error tree.

An engine is started once, serves many requests at a time and is closed once. It never keeps a record of its own about a
request: all that it knows goes into the `Completion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from traces.errors import UserError

TokenArray = npt.NDArray[np.int32]


class EngineError(Exception):
    """Root of what an engine raises."""


class EngineStartError(UserError, EngineError):
    """The engine could not start: a port in use, a worker that died. The message names what and the remedy."""


class RequestRejected(EngineError):
    """The request can never be served here (too long for the model or the pool). Maps to status `error_http` (400)."""


class RequestFailed(EngineError):
    """The engine lost the request (a worker died, a link broke). Maps to status `error_net`."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to be completed.

    `prompt` has shape (num_tokens,), dtype int32. `seed` and the token position alone decide a draw when
    `temperature` > 0, so any instance would draw the same. `phase` is prime, warmup, measured or drain.
    """

    request_id: str
    prompt: TokenArray
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    phase: str = "measured"


class TokenStream(Protocol):
    """Where an engine hands over tokens while a request runs; the client's side of the stream."""

    def tokens(self, time_ns: int, token_ids: Sequence[int], source: str) -> None:
        """Take one chunk of one or more tokens that reached the client at `time_ns`; `source` is P, RLD, MD or
        server."""
        ...


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change or reading of a radix cache: the order of these, per instance, fixes every planned hit.

    `op` is `match` (the prompt was looked up, `tokens` of it were found) `insert_prompt` or `insert_full` (`tokens`
    tokens of the prompt, or of prompt and output, are now kept). `seq` counts up per instance.
    """

    instance: str
    seq: int
    op: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended, as the engine counted it.

    `cached_tokens` maps a cache (`P`, `MD`, or `server` where it is not known whose) to the prompt tokens found there.
    `stages_ns` maps a stage's name (see engines/pdd/messages.py `Stage`) to its absolute time on the run's clock.
    `bytes_by_link` counts KV bytes by link name (`line`, `local`). `eager_tokens` were decoded by RLD.
    """

    finish_reason: str  # length | stop | abort
    prompt_tokens: int
    output_tokens: int
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    pipeline: str | None = None  # p-md | p-rld-md | rld-only | mixed
    instances: Mapping[str, str] = field(default_factory=dict)  # role (P, RLD, MD) -> instance name
    stages_ns: Mapping[str, int] = field(default_factory=dict)
    bytes_by_link: Mapping[str, int] = field(default_factory=dict)
    planned_bytes_by_link: Mapping[str, int] = field(default_factory=dict)
    eager_tokens: int = 0
    first_token_site: str | None = None
    cache_events: tuple[CacheEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was started. `page_size` is in tokens; `roles` maps an instance's name to its role; `instances` gives
    facts of each (site, pages, pid ...); `kv_bytes_per_token` is 0 where unknown."""

    name: str
    model: str
    vocab_size: int
    max_context: int
    page_size: int
    kv_bytes_per_token: int
    roles: Mapping[str, str]
    capabilities: frozenset[str] = frozenset()
    instances: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Counters at one instant, for `links` and `instances` rows and for a run's validity. Times in ns, sizes in bytes.

    `late_cache_events` are (request_id, event) that came after the request's completion, each reported once.
    """

    time_ns: int
    instances: tuple[Mapping[str, object], ...]
    links: tuple[Mapping[str, object], ...]
    late_cache_events: tuple[tuple[str, CacheEvent], ...] = ()


class Engine(Protocol):
    """Whatever serves requests. A new engine is one file with this and one YAML in conf/engine."""

    async def start(self) -> EngineInfo:
        """Bring the engine up; raises EngineStartError with one clear message."""
        ...

    async def generate(self, request: GenerateRequest, stream: TokenStream) -> Completion:
        """Serve one request; raises RequestRejected or RequestFailed. Cancelling the task aborts the request
        everywhere."""
        ...

    async def report(self) -> EngineReport:
        """Read the counters of instances and links now."""
        ...

    async def set_phase(self, phase: str) -> None:
        """Told when `prime` begins and ends: an engine may prime over an unshaped line. Default engines do nothing."""
        ...

    async def close(self) -> None:
        """Stop everything that was started; safe to call twice."""
        ...
