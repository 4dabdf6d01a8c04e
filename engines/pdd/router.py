"""A request's legs, placement, cancellation, and the one owner of its output stream.

Synchronous, like an instance: messages in, commands out. It passes on each output index once, in order, applies the
stop rules in one place, and tells all legs when a request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.base import CacheEvent, Completion, GenerateRequest
from engines.pdd.commands import Send
from engines.pdd.config import EngineSpec, InstanceSpec
from engines.pdd.decider import LineView, decide
from engines.pdd.messages import (
    AnyMessage,
    Ask,
    Begin,
    Cancel,
    Commit,
    Done,
    Event,
    Held,
    Prefill,
    Prefilled,
    Ready,
    Refused,
    Reserve,
    Reserved,
    Seal,
    Serve,
    Stop,
    Target,
    Tokens,
)
from engines.pdd.placement import Placement
from engines.pdd.policy import Policy
from engines.wan.link import LinkSpec
from traces.prompts import page_keys


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand tokens of request `r` to its client."""

    r: str
    ids: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Request `r` has ended: with a completion, or refused with `reason`."""

    r: str
    completion: Completion | None = None
    reason: str | None = None


RouterCommand = Send | Emit | Finish


@dataclass(slots=True)
class Flight:
    """One request under way. `open_legs` are the nodes that still hold something for it."""

    request: GenerateRequest
    ask: Ask
    keys: list[bytes]
    md: str
    p: str | None = None
    rld: str | None = None
    pipeline: str = "mixed"
    decode_prefix_len: int = 0
    owner: str | None = None
    emitted: list[int] = field(default_factory=list)
    pending: dict[int, tuple[int, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    is_finished: bool = False
    is_prefilling: bool = False
    eager_tokens: int = 0
    first_source: str | None = None
    stages: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    bytes_by_link: dict[str, int] = field(default_factory=dict)
    planned_bytes: dict[str, int] = field(default_factory=dict)
    events: list[CacheEvent] = field(default_factory=list)
    open_legs: set[str] = field(default_factory=set)


class Router:
    """See the module. `submit`, `abort` and `handle` are the ways in, `take_commands` the way out."""

    def __init__(self, spec: EngineSpec, policy: Policy) -> None:
        self._spec = spec
        self._policy = policy
        self._instances = {instance.name: instance for instance in spec.instances}
        self._kv_bytes = spec.model.kv_bytes_per_token
        self._mains = self._place("MIXED" if policy.is_colocated else "MD")
        self._prefills = self._place("P")
        self._relays = self._place("RLD")
        self.line = LineView(spec.line)
        self.flights: dict[str, Flight] = {}
        self.late_events: list[tuple[str, CacheEvent]] = []
        self.num_stale = 0
        self._commands: list[RouterCommand] = []

    def _place(self, role: str) -> Placement:
        return Placement({name: spec.num_pages for name, spec in self._instances.items() if spec.role == role})

    def set_line(self, line: LinkSpec) -> None:
        """The line's spec from now on (an unshaped one while priming)."""
        self.line.spec = line

    def take_commands(self) -> list[RouterCommand]:
        commands, self._commands = self._commands, []
        return commands

    # --- from the client ----------------------------------------------------------------------------------------------

    def submit(self, now_ns: int, request: GenerateRequest) -> None:
        """Begin a request; raises ValueError when its id is in use."""
        if request.request_id in self.flights:
            raise ValueError(f"request id {request.request_id!r} is in use")
        ask = Ask(
            prompt=request.prompt.astype("<i4").tobytes(), max_tokens=request.max_tokens,
            temperature=request.temperature, seed=request.seed,
        )  # fmt: skip
        keys = page_keys(request.prompt, self._spec.page_size)
        flight = Flight(request, ask, keys, md=self._mains.choose(keys))
        flight.stages["received"] = now_ns
        self.flights[request.request_id] = flight
        self._open_leg(flight, flight.md, self._mains)
        r = request.request_id
        if self._policy.is_colocated:
            flight.owner = flight.md
            self._send(flight.md, Serve(r=r, ask=ask))
        else:
            self._send(flight.md, Reserve(r=r, ask=ask))

    def abort(self, r: str) -> None:
        """The client is gone: tell P, RLD and MD at once."""
        flight = self.flights.get(r)
        if flight is None:
            return
        flight.is_finished = True
        flight.finish_reason = flight.finish_reason or "abort"
        for node in sorted(flight.open_legs):
            self._send(node, Stop(r=r, is_abort=True))
        if flight.p is not None:
            self._send(flight.p, Cancel(r=r))
        self._forget_if_done(flight)

    # --- from instances -----------------------------------------------------------------------------------------------

    def handle(self, now_ns: int, message: AnyMessage) -> None:
        """Take one message; what speaks of a request that is gone is dropped and counted."""
        flight = self.flights.get(getattr(message, "r", ""))
        if flight is None:
            self.num_stale += 1
            return
        match message:
            case Reserved():
                self._on_reserved(now_ns, flight, message)
            case Refused():
                self._on_refused(now_ns, flight, message)
            case Prefilled():
                self._on_prefilled(flight, message)
            case Held():
                flight.stages["rld_ready"] = message.time_ns
                flight.bytes_by_link["local"] = message.kv_bytes
            case Ready():
                self._on_ready(flight, message)
            case Seal():
                flight.stages["seal"] = message.time_ns
            case Commit():
                flight.stages["extend_start"] = message.extend_start_ns
                flight.stages["commit"] = message.time_ns
                flight.owner = flight.md
            case Tokens():
                self._accept(flight, message.index, message.ids, message.source)
            case Done():
                self._on_done(flight, message)
            case _:
                self.num_stale += 1

    def _on_reserved(self, now_ns: int, flight: Flight, message: Reserved) -> None:
        if flight.is_finished:
            return
        if message.node == flight.rld:
            self._dispatch(now_ns, flight)
            return
        flight.stages["md_reserved"] = message.time_ns
        flight.decode_prefix_len = message.decode_prefix_len
        flight.cached["MD"] = message.decode_prefix_len
        self._note_events(flight, message.events)
        uncached_bytes = (len(flight.request.prompt) - message.decode_prefix_len) * self._kv_bytes
        flight.planned_bytes[self._link(flight)] = uncached_bytes
        if self._policy.has_relay:
            rld = self._relays.least_loaded()
            if decide(self._spec.decider, self.line, uncached_bytes, self._relays.load[rld]) == "p-rld-md":
                flight.rld = rld
                self._open_leg(flight, rld, self._relays)
                self._send(rld, Reserve(r=message.r, ask=flight.ask, is_relay=True))
                return
        self._dispatch(now_ns, flight)

    def _on_refused(self, now_ns: int, flight: Flight, message: Refused) -> None:
        self._close_leg(flight, message.node)
        if message.node == flight.rld and not flight.is_finished:
            flight.rld = None
            self._dispatch(now_ns, flight)
            return
        if not flight.is_finished:
            self._finish(flight, Finish(message.r, reason=message.reason))
            for node in sorted(flight.open_legs):
                self._send(node, Stop(r=message.r, is_abort=True))
        self._forget_if_done(flight)

    def _dispatch(self, now_ns: int, flight: Flight) -> None:
        """The pipeline is fixed: tell MD, then let P begin."""
        r = flight.request.request_id
        flight.stages["decided"] = now_ns
        flight.pipeline = "p-md" if flight.rld is None else "p-rld-md"
        flight.owner = flight.rld or flight.md
        flight.p = self._prefills.choose(flight.keys)
        flight.is_prefilling = True
        self._prefills.load[flight.p] += 1
        targets = [Target(flight.md, flight.decode_prefix_len, self._link(flight))]
        if flight.rld is not None:
            targets.insert(0, Target(flight.rld, 0, "local"))
            flight.planned_bytes["local"] = len(flight.request.prompt) * self._kv_bytes
        if self._link(flight) == "line":
            self.line.outstanding[r] = flight.planned_bytes["line"]
        self._send(flight.md, Begin(r=r, relay=flight.rld))
        self._send(flight.p, Prefill(r=r, ask=flight.ask, targets=tuple(targets)))

    def _on_prefilled(self, flight: Flight, message: Prefilled) -> None:
        flight.stages["prefill_start"] = message.start_ns
        flight.stages["prefill_end"] = message.time_ns
        flight.cached["MD" if self._policy.is_colocated else "P"] = message.cached_tokens
        if self._policy.is_colocated:
            flight.cached["P"] = message.cached_tokens
        self._note_events(flight, message.events)
        if flight.p is not None and flight.is_prefilling:
            flight.is_prefilling = False
            self._prefills.load[flight.p] -= 1
            self._prefills.remember(flight.p, flight.keys)
        if self._spec.first_token == "prefill" and not flight.is_finished:
            self._accept(flight, 0, (message.first_token,), "P")

    def _on_ready(self, flight: Flight, message: Ready) -> None:
        flight.stages["md_ready"] = message.time_ns
        flight.stages["kv_first_sent"] = message.first_sent_ns
        flight.bytes_by_link[self._link(flight)] = message.kv_bytes
        self.line.outstanding.pop(message.r, None)
        self._note_events(flight, message.events)

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _accept(self, flight: Flight, index: int, ids: tuple[int, ...], source: str) -> None:
        """Take tokens T[index..] from whoever says them; each index goes on once, in order. Greedy or seeded by
        position, RLD and MD would say the same, so the first to say an index is as good as any."""
        if flight.finish_reason is not None:
            return
        for offset, token in enumerate(ids):
            if index + offset >= len(flight.emitted):
                flight.pending.setdefault(index + offset, (token, source))
        fresh: list[int] = []
        fresh_source = source
        request = flight.request
        while flight.finish_reason is None and len(flight.emitted) in flight.pending:
            token, fresh_source = flight.pending.pop(len(flight.emitted))
            flight.first_source = flight.first_source or fresh_source
            flight.emitted.append(token)
            flight.eager_tokens += fresh_source == "RLD"
            fresh.append(token)
            if token in request.stop_token_ids:
                flight.finish_reason = "stop"
            elif len(flight.emitted) >= request.max_tokens:
                flight.finish_reason = "length"
        if fresh:
            self._commands.append(Emit(request.request_id, tuple(fresh), fresh_source))
        if flight.finish_reason is not None:
            stop = Stop(r=request.request_id, output=tuple(flight.emitted))
            for node in sorted(flight.open_legs):
                self._send(node, stop)

    def _on_done(self, flight: Flight, message: Done) -> None:
        self._close_leg(flight, message.node)
        self._note_events(flight, message.events)
        if message.node == flight.md:
            self.line.outstanding.pop(message.r, None)
            self._mains.remember(flight.md, flight.keys)
        if flight.finish_reason is not None and not flight.is_finished and message.node == flight.owner:
            flight.stages["finished"] = message.time_ns
            self._finish(flight, Finish(message.r, completion=self._completion(flight)))
        self._forget_if_done(flight)

    def _completion(self, flight: Flight) -> Completion:
        instances = {"P": flight.p, "RLD": flight.rld, "MD": flight.md}
        if self._policy.is_colocated:
            instances = {"P": flight.md, "MD": flight.md}
        return Completion(
            finish_reason=flight.finish_reason or "abort",
            prompt_tokens=len(flight.request.prompt),
            output_tokens=len(flight.emitted),
            cached_tokens=dict(flight.cached),
            pipeline=flight.pipeline,
            instances={role: name for role, name in instances.items() if name is not None},
            stages_ns=dict(flight.stages),
            bytes_by_link=dict(flight.bytes_by_link),
            planned_bytes_by_link=dict(flight.planned_bytes),
            eager_tokens=flight.eager_tokens,
            first_token_site=self._site_of(flight),
            cache_events=tuple(flight.events),
        )

    def _site_of(self, flight: Flight) -> str | None:
        by_source = {"P": flight.p, "RLD": flight.rld, "MD": flight.md, "MIXED": flight.md}
        name = by_source.get(flight.first_source or "")
        spec: InstanceSpec | None = self._instances.get(name or "")
        return None if spec is None else spec.site

    # --- books --------------------------------------------------------------------------------------------------------

    def _link(self, flight: Flight) -> str:
        """The link between P and this request's MD."""
        return "local" if self._policy.is_one_site else "line"

    def _open_leg(self, flight: Flight, node: str, placement: Placement) -> None:
        flight.open_legs.add(node)
        placement.load[node] += 1

    def _close_leg(self, flight: Flight, node: str) -> None:
        if node in flight.open_legs:
            flight.open_legs.discard(node)
            placement = self._relays if node in self._relays.load else self._mains
            placement.load[node] -= 1

    def _note_events(self, flight: Flight, events: tuple[Event, ...]) -> None:
        for event in events:
            noted = CacheEvent(event.instance, event.seq, event.op, event.tokens)
            if flight.is_finished:
                self.late_events.append((flight.request.request_id, noted))
            else:
                flight.events.append(noted)

    def _finish(self, flight: Flight, finish: Finish) -> None:
        flight.is_finished = True
        self._commands.append(finish)

    def _forget_if_done(self, flight: Flight) -> None:
        if flight.is_finished and not flight.open_legs:
            self.line.outstanding.pop(flight.request.request_id, None)
            if flight.p is not None and flight.is_prefilling:
                self._prefills.load[flight.p] -= 1
            del self.flights[flight.request.request_id]

    def _send(self, dst: str, message: AnyMessage) -> None:
        self._commands.append(Send(dst, message))
