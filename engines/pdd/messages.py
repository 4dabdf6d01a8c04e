"""What instances and the router say to each other, and nothing else goes over a socket.

Every message names its request `r` and epoch `e`; what an older epoch says is dropped. T[0] is P's token, T[i] later
ones. Each may arrive twice: receivers look at positions and indexes, never at how often something came.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Stage = Literal[
    "received", "md_reserved", "decided", "prefill_start", "prefill_end", "rld_ready", "md_ready", "kv_first_sent",
    "seal", "extend_start", "commit", "finished",
]  # fmt: skip


class Message(msgspec.Struct, tag_field="t", frozen=True, kw_only=True, omit_defaults=True):
    """A message about request `r` in its epoch `e`."""

    r: str
    e: int = 0


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A cache event, as in engines.base.CacheEvent: (instance, seq, op, tokens)."""

    instance: str
    seq: int
    op: str
    tokens: int


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be generated: `prompt` is int32 little endian bytes, `max_tokens` bounds the output."""

    prompt: bytes
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Target(msgspec.Struct, frozen=True):
    """Where P sends KV: the positions from `start` on, over `link` (line | local)."""

    node: str
    start: int
    link: str


# --- router to instances ----------------------------------------------------------------------------------------------


class Reserve(Message, frozen=True, tag="reserve"):
    """Match the prompt, lock what is kept, admit the rest; decode once the KV is there. `is_relay`: no cache, starts
    at once with P's token and hands over when MD is ready. `waits_for_seal`: MD under a relay."""

    ask: Ask
    is_relay: bool = False


class Begin(Message, frozen=True, tag="begin"):
    """To MD: the pipeline is decided. With `relay` named MD waits for that RLD's SEAL, else it owns the output from
    T[0]."""

    relay: str | None = None


class Prefill(Message, frozen=True, tag="prefill"):
    """To P: compute the prompt's KV, sample T[0], send to `targets`."""

    ask: Ask
    targets: tuple[Target, ...]


class Serve(Message, frozen=True, tag="serve"):
    """To a mixed instance: prefill and decode in place."""

    ask: Ask


class Stop(Message, frozen=True, tag="stop"):
    """The request has ended with `output` (all its tokens), or is aborted: let go, keep in the cache what is sound."""

    output: tuple[int, ...] = ()
    is_abort: bool = False


class Cancel(Message, frozen=True, tag="cancel"):
    """To RLD or P: this leg alone ends; the request goes on elsewhere."""


class AskStats(msgspec.Struct, tag_field="t", tag="ask_stats", frozen=True):
    """To an instance: tell your counters."""

    number: int


# --- instances to the router ------------------------------------------------------------------------------------------


class Reserved(Message, frozen=True, tag="reserved"):
    """Admitted: KV is wanted from `decode_prefix_len` on, which is fixed from now to the end."""

    node: str
    decode_prefix_len: int
    time_ns: int
    events: tuple[Event, ...] = ()


class Refused(Message, frozen=True, tag="refused"):
    """Not admitted. `is_final`: it can never be (too long); else there is no room now."""

    node: str
    reason: str
    is_final: bool


class Prefilled(Message, frozen=True, tag="prefilled"):
    """P has computed the prompt: `first_token` is T[0]; `cached_tokens` were found in P's cache."""

    node: str
    first_token: int
    cached_tokens: int
    start_ns: int
    time_ns: int
    events: tuple[Event, ...] = ()


class Tokens(Message, frozen=True, tag="tokens"):
    """Output tokens T[index..] from `source` (RLD | MD | MIXED)."""

    index: int
    ids: tuple[int, ...]
    source: str
    time_ns: int


class Held(Message, frozen=True, tag="held"):
    """RLD holds the prompt's KV and starts: `kv_bytes` came over its link."""

    node: str
    kv_bytes: int
    time_ns: int


class Done(Message, frozen=True, tag="done"):
    """The leg at `node` has ended and freed what it held."""

    node: str
    time_ns: int
    events: tuple[Event, ...] = ()


class Stats(msgspec.Struct, tag_field="t", tag="stats", frozen=True):
    """An instance's counters, as in the `instances` table."""

    number: int
    node: str
    values: dict[str, int]


# --- P to RLD and MD, and back ----------------------------------------------------------------------------------------


class KVFrame(Message, frozen=True, tag="kv"):
    """KV of the absolute positions [start, stop); the payload follows the header. The last frame of a prompt carries
    T[0]."""

    start: int
    stop: int
    nbytes: int
    first_sent_ns: int
    first_token: int | None = None


class KVApplied(Message, frozen=True, tag="applied"):
    """The receiver has applied [start, stop) (or has dropped it because the leg is gone: `is_gone`)."""

    node: str
    start: int
    stop: int
    is_gone: bool = False


# --- the handoff, MD, RLD and router ----------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag="ready"):
    """MD holds the prompt's KV."""

    node: str
    kv_bytes: int
    first_sent_ns: int
    time_ns: int
    events: tuple[Event, ...] = ()


class Seal(Message, frozen=True, tag="seal"):
    """RLD stopped at `num_tokens` tokens; `ids` are T[start..num_tokens). Its KV stays until COMMIT. num_tokens 0: it
    never began."""

    start: int
    ids: tuple[int, ...]
    num_tokens: int
    time_ns: int


class Commit(Message, frozen=True, tag="commit"):
    """MD's KV covers T[0..num_tokens): index `num_tokens` and on come from MD, RLD frees."""

    num_tokens: int
    extend_start_ns: int
    time_ns: int


AnyMessage = (
    Reserve | Begin | Prefill | Serve | Stop | Cancel | AskStats
    | Reserved | Refused | Prefilled | Tokens | Held | Done | Stats
    | KVFrame | KVApplied | Ready | Seal | Commit
)  # fmt: skip
