"""One P, RLD, MD or mixed instance: scheduler, KV cache and transfers behind one synchronous door.

It takes a message or the end of a step and `now`, changes its state, and leaves commands for a driver: send this, run
that step. No `await`, no socket, no clock. All roles are this one class: a role is only what the router asks of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.pdd.commands import ROUTER, Command, RunStep, Send
from engines.pdd.config import EngineSpec, InstanceSpec
from engines.pdd.executor.base import Executor, KVBytes
from engines.pdd.handoff import Handoff
from engines.pdd.kv_cache import KVCache
from engines.pdd.leg import Leg, LegKind, prompt_of
from engines.pdd.messages import (
    AnyMessage,
    AskStats,
    Begin,
    Cancel,
    Commit,
    Done,
    Held,
    KVApplied,
    KVFrame,
    Prefill,
    Prefilled,
    Ready,
    Refused,
    Reserve,
    Reserved,
    Seal,
    Serve,
    Stats,
    Stop,
    Tokens,
)
from engines.pdd.scheduler import Scheduler, Work
from engines.pdd.transfer import KVSender
from traces.prompts import page_keys


class Instance:
    """See the module. `handle` and `step_done` are the only ways in, `take_commands` the only way out."""

    def __init__(self, spec: InstanceSpec, engine: EngineSpec, executor: Executor) -> None:
        self.spec = spec
        self.name = spec.name
        self._engine = engine
        self._executor = executor
        self._kv_bytes = engine.model.kv_bytes_per_token
        is_keeping = spec.role != "RLD" and (spec.role != "MD" or engine.drc)
        self.cache = KVCache(spec.name, spec.num_pages, engine.page_size, is_keeping=is_keeping)
        self.scheduler = Scheduler(spec)
        lanes = {"line": engine.line.lanes, "local": engine.local.lanes}
        self.sender = KVSender(lanes, engine.kv_frame_tokens)
        self._handoff = Handoff(self)
        self.legs: dict[str, Leg] = {}
        self._admission: list[Leg] = []  # reservations that wait for pages, first come first served
        self._commands: list[Command] = []
        self._step: list[Work] = []
        self._released: list[str] = []
        self.counters = dict.fromkeys(("steps", "late_frames", "stale_messages", "aborted", "refused"), 0)

    # --- the door -----------------------------------------------------------------------------------------------------

    def handle(self, now_ns: int, src: str, message: AnyMessage, payload: KVBytes | None = None) -> None:
        """Take one message. An unknown kind or a stale epoch is dropped and counted."""
        match message:
            case Reserve():
                self._on_reserve(now_ns, message)
            case Begin():
                self._on_begin(now_ns, message)
            case Prefill():
                self._on_prefill(now_ns, message)
            case Serve():
                self._on_serve(now_ns, message)
            case Stop():
                self._on_stop(now_ns, message)
            case Cancel():
                self._on_stop(now_ns, Stop(r=message.r, e=message.e, is_abort=True))
            case KVFrame():
                self._on_kv(now_ns, src, message, payload)
            case KVApplied():
                self._on_applied(message)
            case Ready():
                self._count_stale(self._handoff.ready(now_ns, src, self._leg(message.r, message.e)))
            case Seal():
                self._count_stale(self._handoff.sealed(now_ns, self._leg(message.r, message.e), message))
            case Commit():
                self._handoff.committed(now_ns, self._leg(message.r, message.e))
            case AskStats():
                self._tell_stats(src, message)
            case _:
                self.counters["stale_messages"] += 1
        self._pump(now_ns)

    def _count_stale(self, was_of_use: bool) -> None:
        self.counters["stale_messages"] += not was_of_use

    def step_done(self, now_ns: int, tokens: Sequence[int | None]) -> None:
        """The running step has ended with one sampled token, or None, per item."""
        step, self._step = self._step, []
        self.counters["steps"] += 1
        for work, token in zip(step, tokens, strict=True):
            self._advance(now_ns, work, token)
        self._pump(now_ns)

    def take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    @property
    def is_idle(self) -> bool:
        return not self.legs and not self._step

    # --- admission ----------------------------------------------------------------------------------------------------

    def _open(self, now_ns: int, message: Reserve | Prefill | Serve, kind: LegKind) -> Leg | None:
        """A new leg, or None: it is known already, or refused for good (too long for the model or the pool)."""
        if message.r in self.legs:
            self.counters["stale_messages"] += 1
            return None
        prompt = prompt_of(message.ask)
        num_tokens = len(prompt) + (0 if kind is LegKind.PREFILL else message.ask.max_tokens)
        reason = None
        if len(prompt) + message.ask.max_tokens > self._engine.model.max_context:
            reason = (
                f"prompt of {len(prompt)} tokens and output of {message.ask.max_tokens} exceed the model's context of "
                f"{self._engine.model.max_context}"
            )
        elif not self.cache.fits_ever(num_tokens):
            reason = f"{num_tokens} tokens exceed {self.name}'s pool of {self.spec.num_pages} pages"
        if reason is not None:
            self._refuse(message.r, message.e, reason, is_final=True)
            return None
        leg = Leg(message.r, message.e, kind, message.ask, prompt, page_keys(prompt, self._engine.page_size))
        self.legs[leg.r] = leg
        return leg

    def _refuse(self, r: str, e: int, reason: str, *, is_final: bool) -> None:
        self.counters["refused"] += 1
        self.send(ROUTER, Refused(r=r, e=e, node=self.name, reason=reason, is_final=is_final))

    def _admit_computing(self, leg: Leg) -> bool:
        """For the scheduler: pages for a leg that computes its prompt here."""
        output = 0 if leg.kind is LegKind.PREFILL else leg.ask.max_tokens
        if not self.cache.admit(leg, leg.num_prompt + output):
            return False
        leg.num_computed = leg.num_cached
        leg.may_run = True
        self.sender.make_available(leg.r, leg.num_cached)
        return True

    def _admit_reserved(self, now_ns: int) -> None:
        while self._admission:
            leg = self._admission[0]
            if not self.cache.admit(leg, leg.num_prompt + leg.ask.max_tokens):
                return
            self._admission.pop(0)
            self.send(
                ROUTER,
                Reserved(
                    r=leg.r, e=leg.e, node=self.name, decode_prefix_len=leg.num_cached, time_ns=now_ns,
                    events=tuple(leg.events),
                ),
            )  # fmt: skip
            leg.events.clear()

    def _on_reserve(self, now_ns: int, message: Reserve) -> None:
        leg = self._open(now_ns, message, LegKind.RELAY if message.is_relay else LegKind.MAIN)
        if leg is None:
            return
        self._admission.append(leg)
        self._admit_reserved(now_ns)
        if message.is_relay and not leg.is_admitted:  # the relay never makes a request wait
            self._admission.remove(leg)
            del self.legs[leg.r]
            self._refuse(leg.r, leg.e, "no pages now", is_final=False)

    def _on_prefill(self, now_ns: int, message: Prefill) -> None:
        leg = self._open(now_ns, message, LegKind.PREFILL)
        if leg is not None:
            self.scheduler.waiting.append(leg)
            self.sender.open(leg.r, message.targets, leg.num_prompt)
            leg.may_run = True

    def _on_serve(self, now_ns: int, message: Serve) -> None:
        leg = self._open(now_ns, message, LegKind.MIXED)
        if leg is not None:
            self.scheduler.waiting.append(leg)
            leg.may_run = True

    # --- steps --------------------------------------------------------------------------------------------------------

    def _pump(self, now_ns: int) -> None:
        """Whatever can go on now: reservations, the next step, frames."""
        self._admit_reserved(now_ns)
        if not self._step:
            self._step = self.scheduler.next_batch(self._admit_computing)
            if self._step:
                for work in self._step:
                    work.leg.is_in_step = True
                    if work.leg.step_start_ns is None:
                        work.leg.step_start_ns = now_ns
                self._commands.append(RunStep(tuple(work.item() for work in self._step), tuple(self._released)))
                self._released.clear()
        for frame in self.sender.pump(now_ns):
            leg = self.legs[frame.r]
            payload = self._executor.read_kv(leg.pages, frame.start, frame.stop)
            nbytes = (frame.stop - frame.start) * self._kv_bytes
            header = KVFrame(
                r=leg.r, e=leg.e, start=frame.start, stop=frame.stop, nbytes=nbytes,
                first_sent_ns=frame.first_sent_ns, first_token=leg.output[0] if frame.is_last else None,
            )  # fmt: skip
            self._commands.append(Send(frame.node, header, payload, frame.lane))

    def _advance(self, now_ns: int, work: Work, token: int | None) -> None:
        leg = work.leg
        leg.is_in_step = False
        if leg.ending is not None and leg.ending.is_abort:
            self.finish(now_ns, leg)
            return
        leg.num_computed += work.count
        self._handoff.extended(now_ns, leg)
        if token is not None:
            leg.output.append(token)
            if leg.kind in (LegKind.PREFILL, LegKind.MIXED) and len(leg.output) == 1:
                self._report_prefill(now_ns, leg)
            if leg.kind is not LegKind.PREFILL:
                self._emit(now_ns, leg, len(leg.output) - 1)
        if leg.kind is LegKind.PREFILL:
            self._prefilled(leg, has_ended=token is not None)
        elif leg.ending is not None:
            self._conclude(now_ns, leg)
        elif leg.seal_to is not None and not leg.is_sealed:
            self._handoff.seal(now_ns, leg)

    def _emit(self, now_ns: int, leg: Leg, index: int) -> None:
        ids = tuple(leg.output[index:])
        self.send(ROUTER, Tokens(r=leg.r, e=leg.e, index=index, ids=ids, source=leg.kind.value, time_ns=now_ns))

    def _prefilled(self, leg: Leg, *, has_ended: bool) -> None:
        """A chunk of P's is done: what it computed may be sent; after the last the leg stays until all is
        acknowledged."""
        self.sender.make_available(leg.r, leg.num_computed)
        if has_ended:
            leg.may_run = False
            self.scheduler.remove(leg)
            if not self.sender.has(leg.r):
                self._close(leg)

    def _report_prefill(self, now_ns: int, leg: Leg) -> None:
        self.cache.keep_prompt(leg)
        self.send(
            ROUTER,
            Prefilled(
                r=leg.r, e=leg.e, node=self.name, first_token=leg.output[0], cached_tokens=leg.num_cached,
                start_ns=leg.step_start_ns or now_ns, time_ns=now_ns, events=tuple(leg.events),
            ),
        )  # fmt: skip
        leg.events.clear()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _on_kv(self, now_ns: int, src: str, message: KVFrame, payload: KVBytes | None) -> None:
        leg = self._leg(message.r, message.e)
        applied = KVApplied(
            r=message.r, e=message.e, node=self.name, start=message.start, stop=message.stop, is_gone=leg is None
        )
        if leg is None:
            self.counters["late_frames"] += 1
            self.send(src, applied)
            return
        if not leg.holds_prompt and leg.num_cached <= message.start < message.stop <= leg.num_prompt:
            self._executor.write_kv(leg.pages, message.start, message.stop, payload)
            leg.note_received(message.start, message.stop)
            leg.kv_bytes += message.nbytes
            leg.first_sent_ns = message.first_sent_ns
            if message.first_token is not None:
                leg.first_token = message.first_token
            if leg.has_whole_prompt:
                self._hold_prompt(now_ns, leg)
        self.send(src, applied)

    def _hold_prompt(self, now_ns: int, leg: Leg) -> None:
        leg.holds_prompt = True
        leg.num_computed = leg.num_prompt
        if leg.kind is LegKind.RELAY:
            self.send(ROUTER, Held(r=leg.r, e=leg.e, node=self.name, kv_bytes=leg.kv_bytes, time_ns=now_ns))
            if not leg.is_sealed:  # else MD was ready first and owns all of the output
                self.own_output(now_ns, leg)
            return
        self.cache.keep_prompt(leg)
        self.send(ROUTER, self._ready(now_ns, leg))
        leg.events.clear()
        self._start_main(now_ns, leg)

    def _ready(self, now_ns: int, leg: Leg) -> Ready:
        return Ready(
            r=leg.r, e=leg.e, node=self.name, kv_bytes=leg.kv_bytes, first_sent_ns=leg.first_sent_ns, time_ns=now_ns,
            events=tuple(leg.events),
        )  # fmt: skip

    def _on_begin(self, now_ns: int, message: Begin) -> None:
        leg = self._leg(message.r, message.e)
        if leg is not None and not leg.has_begun:
            leg.has_begun = True
            leg.relay = message.relay
            self._start_main(now_ns, leg)

    def _start_main(self, now_ns: int, leg: Leg) -> None:
        """MD knows the pipeline and holds the prompt: decode, ask RLD to seal, or end at once what has ended
        meanwhile."""
        if not (leg.has_begun and leg.holds_prompt):
            return
        if leg.ending is not None:
            self._conclude(now_ns, leg)
        elif leg.relay is None:
            self.own_output(now_ns, leg)
        else:
            self.send(leg.relay, self._ready(now_ns, leg))

    def own_output(self, now_ns: int, leg: Leg) -> None:
        """Emit T[0] and decode from there."""
        assert leg.first_token is not None
        leg.output = [leg.first_token]
        leg.may_run = True
        self.scheduler.running.append(leg)
        self._emit(now_ns, leg, 0)

    def _on_applied(self, message: KVApplied) -> None:
        leg = self._leg(message.r, message.e)
        is_all_sent = self.sender.on_applied(
            message.r, message.node, message.start, message.stop, is_gone=message.is_gone
        )
        if leg is not None and leg.kind is LegKind.PREFILL and is_all_sent and not leg.may_run:
            self._close(leg)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _on_stop(self, now_ns: int, message: Stop) -> None:
        leg = self._leg(message.r, message.e)
        if leg is None:
            self.counters["stale_messages"] += 1
            return
        leg.ending = message
        if message.is_abort:
            self.counters["aborted"] += 1
            if not leg.is_in_step:  # else the step's end closes it: its pages are being written
                self.finish(now_ns, leg)
        elif leg.kind is LegKind.RELAY:
            if not leg.is_in_step:
                self.finish(now_ns, leg)
        elif leg.kind is LegKind.MIXED or leg.holds_prompt:
            self._conclude(now_ns, leg)

    def _conclude(self, now_ns: int, leg: Leg) -> None:
        """The output is final: run what the cache still lacks of it, keep all, free."""
        if leg.is_in_step:
            return
        assert leg.ending is not None
        if leg.kind is LegKind.RELAY:
            self.finish(now_ns, leg)
            return
        if not leg.is_concluding:
            leg.is_concluding = True
            leg.sealed_len = None
            leg.output = list(leg.ending.output)
            leg.may_run = True
            if leg not in self.scheduler.running:
                self.scheduler.running.append(leg)
        if leg.num_todo == 0:
            self.cache.keep_all(leg)
            self.finish(now_ns, leg)

    def finish(self, now_ns: int, leg: Leg) -> None:
        self.send(ROUTER, Done(r=leg.r, e=leg.e, node=self.name, time_ns=now_ns, events=tuple(leg.events)))
        self._close(leg)

    def _close(self, leg: Leg) -> None:
        self.sender.cancel(leg.r)
        self.scheduler.remove(leg)
        if leg in self._admission:
            self._admission.remove(leg)
        self.cache.free(leg)
        self._released.append(leg.r)
        del self.legs[leg.r]

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _tell_stats(self, src: str, message: AskStats) -> None:
        values = {
            **self.counters,
            "pages_total": self.spec.num_pages,
            "pages_free": self.cache.pool.num_free,
            "pages_cached": self.cache.tree.num_pages,
            "num_legs": len(self.legs),
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting) + len(self._admission),
        }
        self.send(src, Stats(message.number, self.name, values))

    def _leg(self, r: str, e: int) -> Leg | None:
        leg = self.legs.get(r)
        return leg if leg is not None and leg.e == e else None

    def send(self, dst: str, message: AnyMessage) -> None:
        self._commands.append(Send(dst, message))

    def check_integrity(self) -> None:
        """Raises where pages, owners, tree and legs disagree; every owner must be a living leg."""
        self.cache.check_integrity()
        strays = set(self.cache.pool.owners()) - set(self.legs)
        if strays:
            raise AssertionError(f"{self.name}: pages are owned by requests that are gone: {sorted(strays)}")
