"""A replay sends in order, waits as told, ends every planned turn in one record, on both clocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import clock
from engines.base import (
    Completion,
    EngineInfo,
    EngineReport,
    GenerateRequest,
    RequestFailed,
    RequestRejected,
    TokenArray,
    TokenStream,
)
from harness.load import Planned, Row, Selection
from harness.record import RequestRecord, StreamRecorder
from harness.replay import Replay, ReplaySettings


@dataclass
class FakeEngine:
    """Answers each request after `service_s`, or as `errors` says for its id."""

    time: clock.Clock
    service_s: float = 0.01
    errors: dict[str, Exception | str] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    seen: list[GenerateRequest] = field(default_factory=list)
    num_now: int = 0
    most_at_once: int = 0

    async def start(self) -> EngineInfo:
        return EngineInfo("fake", "none", 64, 1000, 4, 1, {"m0": "MIXED"})

    async def generate(self, request: GenerateRequest, stream: TokenStream) -> Completion:
        self.seen.append(request)
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            error = self.errors.get(request.request_id)
            await self.time.sleep(1e6 if error == "hang" else self.service_s)
            if isinstance(error, Exception):
                raise error
            stream.tokens(self.time.now_ns(), [7] * request.max_tokens, "MD")
            return Completion("length", len(request.prompt), request.max_tokens)
        finally:
            self.num_now -= 1

    async def report(self) -> EngineReport:
        return EngineReport(self.time.now_ns(), (), ())

    async def set_phase(self, phase: str) -> None:
        self.phases.append(phase)

    async def close(self) -> None:
        pass


class FakePrompts:
    """Prompts of the right length; outputs that were noted are kept."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[int]] = {}

    def prompt(self, request_id: str) -> TokenArray:
        return np.zeros(8, dtype=np.int32)

    def filled_history_tokens(self, request_id: str) -> int:
        return 0

    def note_output(self, request_id: str, token_ids: list[int]) -> None:
        self.outputs[request_id] = token_ids


@dataclass
class Kept:
    """A sink that keeps all."""

    records: dict[str, RequestRecord] = field(default_factory=dict)
    sessions: dict[str, dict[str, object]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def request_ended(
        self, record: RequestRecord, stream: StreamRecorder, prompt: TokenArray | None, completion: Completion | None
    ) -> None:
        self.records[record.request_id] = record
        self.counts[record.request_id] += 1

    def session_ended(self, row: dict[str, object]) -> None:
        self.sessions[str(row["session_id"])] = row


def row(name: str, session: str, turn: int = 0, *, root: str | None = None, from_start: bool = False) -> Row:
    return Row(name, session, root or session, turn, "main", None, 0, 8, 4, None, (), 0.0, from_start, None)


def first(name: str, session: str, at_s: float, **kwargs: object) -> Planned:
    return Planned(row(name, session, **kwargs), at_s, (), 0.0, at_s)  # type: ignore[arg-type]


def later(name: str, session: str, turn: int, after: tuple[str, ...], gap_s: float = 0.0, **kwargs: object) -> Planned:
    return Planned(row(name, session, turn, **kwargs), None, after, gap_s, None)  # type: ignore[arg-type]


def chain(session: str, length: int, at_s: float = 0.0, gap_s: float = 0.0) -> list[Planned]:
    turns = [first(f"{session}.0", session, at_s)]
    return turns + [later(f"{session}.{i}", session, i, (f"{session}.{i - 1}",), gap_s) for i in range(1, length)]


def play(
    planned: list[Planned],
    *,
    is_virtual: bool = True,
    lanes: int | None = None,
    settings: ReplaySettings | None = None,
    errors: dict[str, Exception | str] | None = None,
    service_s: float = 0.01,
    primes: tuple[Row, ...] = (),
    during: Callable[[Replay, clock.Clock], object] | None = None,
) -> tuple[Kept, FakeEngine, FakePrompts]:
    kept, prompts = Kept(), FakePrompts()

    async def main(time: clock.Clock) -> FakeEngine:
        engine = FakeEngine(time, service_s, errors or {})
        selection = Selection(tuple(planned), (), 1.0, {}, lanes, lanes)
        replay = Replay(engine, time, prompts, selection, settings or ReplaySettings(), kept)
        await replay.prime(primes)
        if during is not None:
            during(replay, time)
        await replay.run()
        return engine

    return kept, clock.run(main, is_virtual=is_virtual), prompts


def statuses(kept: Kept) -> dict[str, str]:
    return {name: record.status for name, record in kept.records.items()}


@pytest.mark.parametrize("is_virtual", [True, False], ids=["virtual", "wall"])
def test_turns_of_a_session_follow_each_other_on_both_clocks(is_virtual: bool) -> None:
    kept, engine, _ = play([*chain("a", 3), *chain("b", 2, at_s=0.02)], is_virtual=is_virtual)
    assert set(statuses(kept).values()) == {"ok"}
    for name, before in (("a.1", "a.0"), ("a.2", "a.1"), ("b.1", "b.0")):
        assert kept.records[name].sent_ns >= kept.records[before].end_ns
    assert kept.records["b.0"].sent_ns >= kept.records["b.0"].scheduled_ns
    assert [kept.sessions[name]["turns_done"] for name in "ab"] == [3, 2]
    assert engine.num_now == 0


def test_a_gap_counts_from_the_end_of_the_last_of_what_it_follows() -> None:
    planned = [first("a", "s", 0.0), first("b", "s", 0.5), later("c", "s", 1, ("a", "b"), gap_s=2.0)]
    kept, _, _ = play(planned, service_s=0.25)
    assert kept.records["c"].sent_ns == pytest.approx((0.5 + 0.25 + 2.0) * 1e9)


def test_a_gap_from_the_start_does_not_wait_for_the_end() -> None:
    kept, _, _ = play([first("a", "s", 0.0), later("b", "s", 1, ("a",), 0.1, from_start=True)], service_s=1.0)
    assert kept.records["b"].sent_ns == pytest.approx(0.1e9)


def test_a_failed_turn_ends_its_session_and_what_comes_after_it_but_no_other() -> None:
    planned = [*chain("a", 3), *chain("b", 2), later("x.0", "x", 0, ("a.1",), root="a")]
    kept, _, _ = play(planned, errors={"a.1": RequestFailed("a worker died")})
    found = statuses(kept)
    assert found == {"a.0": "ok", "a.1": "error_net", "a.2": "skipped", "x.0": "skipped", "b.0": "ok", "b.1": "ok"}
    assert "a.1" in (kept.records["a.2"].error or "")
    assert kept.sessions["a"]["status"] == "failed"
    assert (kept.sessions["x"]["status"], kept.sessions["x"]["start_ns"]) == ("cut", None)


@pytest.mark.parametrize(
    ("error", "status"),
    [(RequestRejected("too long"), "error_http"), (RequestFailed("lost"), "error_net"), ("hang", "timeout")],
)
def test_each_way_to_fail_has_its_status(error: Exception | str, status: str) -> None:
    kept, _, _ = play(chain("a", 2), errors={"a.0": error}, settings=ReplaySettings(request_timeout_s=5.0))
    assert statuses(kept) == {"a.0": status, "a.1": "skipped"}
    assert kept.records["a.0"].error and kept.records["a.0"].end_ns is not None


def test_a_stop_aborts_what_is_under_way_and_skips_the_rest() -> None:
    def stop_soon(replay: Replay, time: clock.Clock) -> None:
        asyncio.get_running_loop().call_later(0.5, replay.stop, "interrupted")

    kept, engine, _ = play([*chain("a", 3), *chain("b", 1, at_s=9.0)], service_s=2.0, during=stop_soon)
    assert statuses(kept) == {"a.0": "aborted", "a.1": "skipped", "a.2": "skipped", "b.0": "skipped"}
    assert engine.num_now == 0


def test_after_the_time_limit_nothing_is_sent_and_what_is_under_way_ends() -> None:
    kept, _, _ = play(chain("a", 5), service_s=1.0, settings=ReplaySettings(time_limit_s=1.5))
    assert list(statuses(kept).values()).count("ok") == 2
    assert "limit.time_s" in (kept.records["a.4"].error or "")


def test_lanes_hold_sessions_one_after_another_and_a_waiting_turn_holds_no_slot() -> None:
    planned = [*chain("a", 3, gap_s=0.5), *chain("b", 2), *chain("c", 1)]
    kept, engine, _ = play(planned, lanes=1)
    assert engine.most_at_once == 1
    assert [request.request_id for request in engine.seen] == ["a.0", "a.1", "a.2", "b.0", "b.1", "c.0"]
    diamond = [
        first("r", "s", 0.0), later("l", "s", 1, ("r",)), later("m", "s", 2, ("r",)), later("t", "s", 3, ("l", "m")),
    ]  # fmt: skip
    kept, engine, _ = play(diamond, lanes=1)
    assert (set(statuses(kept).values()), engine.most_at_once) == ({"ok"}, 1)


def test_a_lane_goes_on_after_a_session_that_failed() -> None:
    kept, _, _ = play([*chain("a", 2), *chain("b", 1)], lanes=1, errors={"a.0": RequestFailed("lost")})
    assert statuses(kept) == {"a.0": "error_net", "a.1": "skipped", "b.0": "ok"}


def test_priming_comes_first_a_few_at_a_time_in_its_own_phase() -> None:
    primes = tuple(row(f"p{i}", f"s{i}") for i in range(5))
    kept, engine, prompts = play(chain("a", 1), primes=primes, settings=ReplaySettings(prime_concurrency=2))
    assert engine.phases == ["prime", "measured"]
    assert [kept.records[f"p{i}"].phase for i in range(5)] == ["prime"] * 5
    assert engine.most_at_once == 2
    assert prompts.outputs["p0"] == [7] * 4
    assert engine.seen[-1].request_id == "a.0"


@given(st.data())
@settings(max_examples=30)
def test_every_planned_turn_ends_in_exactly_one_record(data: st.DataObject) -> None:
    planned: list[Planned] = []
    for number in range(data.draw(st.integers(1, 6))):
        planned += chain(f"s{number}", data.draw(st.integers(1, 5)), at_s=data.draw(st.floats(0, 2)), gap_s=0.1)
    names = [item.row.request_id for item in planned]
    failing = data.draw(st.lists(st.sampled_from(names), max_size=3))
    kinds: list[Exception | str] = [RequestFailed("x"), RequestRejected("y"), "hang"]
    errors = {name: data.draw(st.sampled_from(kinds)) for name in failing}
    lanes = data.draw(st.sampled_from([None, 1, 3]))
    limit = data.draw(st.sampled_from([None, 0.7]))
    kept, engine, _ = play(
        planned, lanes=lanes, errors=errors, settings=ReplaySettings(request_timeout_s=3.0, time_limit_s=limit)
    )
    assert kept.counts == Counter(names)
    assert engine.num_now == 0
    assert sum(int(str(s["turns_planned"])) for s in kept.sessions.values()) == len(names)
