"""MD takes a request's output over from RLD by token ids, in one shot: seal, extend, commit.

RLD stops at the end of its step and sends what it has produced; MD runs those ids in one multi-token step, never checks
them, samples only after the last of them, and emits only after COMMIT. RLD's KV stays until then.
"""

from __future__ import annotations

from typing import Protocol

from engines.pdd.commands import ROUTER
from engines.pdd.leg import Leg, LegKind
from engines.pdd.messages import AnyMessage, Commit, Seal
from engines.pdd.scheduler import Scheduler


class Host(Protocol):
    """The instance whose legs are handed over."""

    scheduler: Scheduler

    def send(self, dst: str, message: AnyMessage) -> None: ...

    def own_output(self, now_ns: int, leg: Leg) -> None: ...

    def finish(self, now_ns: int, leg: Leg) -> None: ...


class Handoff:
    """Both sides of it. Methods that return a bool say whether the message was of use; a stale one changes nothing."""

    def __init__(self, host: Host) -> None:
        self._host = host

    # --- RLD ----------------------------------------------------------------------------------------------------------

    def ready(self, now_ns: int, src: str, leg: Leg | None) -> bool:
        """MD `src` holds the prompt: seal now, or at the end of the step that runs."""
        if leg is None or leg.kind is not LegKind.RELAY or leg.seal_to is not None:
            return False
        leg.seal_to = src
        if not leg.is_in_step:
            self.seal(now_ns, leg)
        return True

    def seal(self, now_ns: int, leg: Leg) -> None:
        """Stop here, and say what was produced; nothing, where the prompt's KV has not come yet."""
        assert leg.seal_to is not None
        leg.is_sealed = True
        leg.may_run = False
        self._host.scheduler.remove(leg)
        seal = Seal(r=leg.r, e=leg.e, start=0, ids=tuple(leg.output), num_tokens=len(leg.output), time_ns=now_ns)
        self._host.send(leg.seal_to, seal)
        self._host.send(ROUTER, seal)

    def committed(self, now_ns: int, leg: Leg | None) -> None:
        """MD has it: free."""
        if leg is not None and leg.kind is LegKind.RELAY and leg.is_sealed:
            self._host.finish(now_ns, leg)

    # --- MD -----------------------------------------------------------------------------------------------------------

    def sealed(self, now_ns: int, leg: Leg | None, message: Seal) -> bool:
        """RLD stopped at `num_tokens`: extend them, or own all of the output where there are none."""
        if leg is None or leg.ending is not None or leg.output or not leg.holds_prompt:
            return False
        if message.num_tokens == 0:
            self._commit(now_ns, leg, 0, now_ns)
            self._host.own_output(now_ns, leg)
            return True
        leg.output = list(message.ids)
        if len(leg.output) < leg.ask.max_tokens:  # else all is there, and the router's STOP is on its way
            leg.sealed_len = message.num_tokens
            leg.step_start_ns = None
            leg.may_run = True
            self._host.scheduler.running.append(leg)
        return True

    def extended(self, now_ns: int, leg: Leg) -> None:
        """MD's KV covers what was handed over: commit. To be called before the next token is emitted."""
        if leg.sealed_len is not None:
            num_tokens, leg.sealed_len = leg.sealed_len, None
            self._commit(now_ns, leg, num_tokens, leg.step_start_ns or now_ns)

    def _commit(self, now_ns: int, leg: Leg, num_tokens: int, start_ns: int) -> None:
        commit = Commit(r=leg.r, e=leg.e, num_tokens=num_tokens, extend_start_ns=start_ns, time_ns=now_ns)
        self._host.send(ROUTER, commit)
        if leg.relay is not None:
            self._host.send(leg.relay, commit)
