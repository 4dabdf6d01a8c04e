"""Plays sessions against an engine: turns in order, think and tool gaps, history; every planned turn ends in one
record.

It decides nothing about what is sent (load.py) and keeps nothing (the sink does). A turn that waits holds no slot and
no task
until what it comes after has ended. A turn that fails ends its session: the rest is `skipped`, with the reason.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from engines.base import Completion, Engine, EngineError, GenerateRequest, RequestFailed, RequestRejected, TokenArray
from engines.clock import Clock
from harness.load import Planned, Row, Selection
from harness.record import RequestRecord, StreamRecorder, apply_completion


class Prompts(Protocol):
    """Where prompts come from. An output that was noted stands in the prompts of later turns."""

    def prompt(self, request_id: str) -> TokenArray: ...

    def filled_history_tokens(self, request_id: str) -> int:
        """Tokens of the trace that stand in for a live output shorter than the trace's, in this request's prompt."""
        ...

    def note_output(self, request_id: str, token_ids: list[int]) -> None: ...


class Sink(Protocol):
    """Takes each record once, when its request has ended. `prompt` and `completion` are None for what was never
    sent.
    """

    def request_ended(
        self, record: RequestRecord, stream: StreamRecorder, prompt: TokenArray | None, completion: Completion | None
    ) -> None: ...

    def session_ended(self, row: dict[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """`time_limit_s`: nothing is sent later than this after the start; what is under way goes on to its end."""

    request_timeout_s: float = 120.0
    time_limit_s: float | None = None
    prime_concurrency: int = 4
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """Counts for the live view."""

    num_planned: int = 0
    num_in_flight: int = 0
    num_ok: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_primed: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Session:
    """A session's counts, kept as its row of the `sessions` table."""

    first: Row
    num_planned: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    start_ns: int | None = None
    end_ns: int | None = None

    @property
    def num_open(self) -> int:
        return self.num_planned - self.num_done - self.num_failed - self.num_skipped

    def note(self, record: RequestRecord) -> None:
        if record.status == "skipped":
            self.num_skipped += 1
        elif record.status == "ok":
            self.num_done += 1
        else:
            self.num_failed += 1
        if record.sent_ns is not None and record.end_ns is not None:
            self.start_ns = record.sent_ns if self.start_ns is None else min(self.start_ns, record.sent_ns)
            self.end_ns = max(self.end_ns or 0, record.end_ns)

    def row(self) -> dict[str, object]:
        return {
            "session_id": self.first.session_id, "root_session_id": self.first.root_session_id,
            "entry_turn": self.first.turn, "turns_planned": self.num_planned, "turns_done": self.num_done,
            "turns_failed": self.num_failed, "turns_skipped": self.num_skipped, "start_ns": self.start_ns,
            "end_ns": self.end_ns, "status": "failed" if self.num_failed else "cut" if self.num_skipped else "ok",
        }  # fmt: skip


@dataclass(slots=True)
class _Turn:
    """One planned request on its way: waiting for `num_after` others, then for its gap, then in flight, then done."""

    planned: Planned
    num_after: int
    trigger_ns: int = 0
    is_launched: bool = False
    is_sent: bool = False
    is_done: bool = False


class Replay:
    """One run of `selection`. `prime` and then `run` once; `stop` from outside ends it early, with every record."""

    def __init__(
        self, engine: Engine, clock: Clock, prompts: Prompts, selection: Selection, settings: ReplaySettings, sink: Sink
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._prompts = prompts
        self._selection = selection
        self._settings = settings
        self._sink = sink
        self.progress = Progress(num_planned=len(selection.planned))
        self._turns = {item.row.request_id: _Turn(item, len(set(item.after))) for item in selection.planned}
        self._after: dict[str, list[_Turn]] = defaultdict(list)
        self._sessions: dict[str, _Session] = {}
        self._trees: dict[str, list[_Turn]] = defaultdict(list)
        self._tree_open: dict[str, int] = defaultdict(int)
        for turn in self._turns.values():
            self._enrol(turn)
        self._lanes: deque[str] = deque()
        self._slots = None if selection.max_in_flight is None else asyncio.Semaphore(selection.max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._flying: set[asyncio.Task[Any]] = set()
        self._is_over = asyncio.Event()
        self._stop_reason: str | None = None
        self._bug: BaseException | None = None
        self._num_open = len(self._turns)
        self.start_ns = 0

    def _enrol(self, turn: _Turn) -> None:
        row = turn.planned.row
        for name in set(turn.planned.after):
            self._after[name].append(turn)
        self._trees[row.root_session_id].append(turn)
        self._tree_open[row.root_session_id] += 1
        self._sessions.setdefault(row.session_id, _Session(row)).num_planned += 1

    # --- before the measurement ---------------------------------------------------------------------------------------

    async def prime(self, rows: Iterable[Row]) -> None:
        """Send each row's own prompt, a few at a time; its output stands in its session's history."""
        slots = asyncio.Semaphore(self._settings.prime_concurrency)

        async def one(row: Row) -> None:
            async with slots:
                if self._stop_reason is None:
                    await self._exchange(row, _new_record(row, "prime"))
                    self.progress.num_primed += 1

        await self._engine.set_phase("prime")
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(one(row))
        finally:
            await self._engine.set_phase("measured")

    # --- the run ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send everything that is planned; returns when each planned request has its record."""
        self.start_ns = self._clock.now_ns()
        if self._num_open == 0:
            return
        if self._settings.time_limit_s is not None:
            self._spawn(self._end_at_limit(self._settings.time_limit_s))
        if self._stop_reason is not None:
            self._skip_all(self._stop_reason)
        elif self._selection.lanes is None:
            due = [turn for turn in self._turns.values() if turn.planned.start_s is not None]
            self._spawn(self._send_when_due(sorted(due, key=lambda turn: turn.planned.start_s or 0.0)))
        else:
            self._lanes.extend(self._trees)
            for _ in range(self._selection.lanes):
                self._start_next_tree()
        try:
            await self._is_over.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._bug is not None:
            raise self._bug

    def stop(self, reason: str) -> None:
        """End now: what was not sent is skipped, what is under way is aborted."""
        self._stop_reason = reason
        self._skip_all(reason)
        for task in self._flying:
            task.cancel()

    async def _end_at_limit(self, limit_s: float) -> None:
        await self._clock.sleep_until_ns(self.start_ns + round(limit_s * 1e9))
        self._skip_all(f"limit.time_s of {limit_s:g} s was reached")

    async def _send_when_due(self, turns: list[_Turn]) -> None:
        for turn in turns:
            due_ns = self.start_ns + round((turn.planned.start_s or 0.0) * 1e9)
            await self._clock.sleep_until_ns(due_ns)
            self._launch(turn, due_ns)

    def _start_next_tree(self) -> None:
        now_ns = self._clock.now_ns()
        while self._lanes:
            tree = [turn for turn in self._trees[self._lanes.popleft()] if not turn.is_done]
            for turn in tree:
                if turn.planned.start_s is not None:
                    self._launch(turn, now_ns)
            if tree:
                return

    def _launch(self, turn: _Turn, due_ns: int) -> None:
        if not (turn.is_launched or turn.is_done):
            turn.is_launched = True
            self._spawn(self._serve(turn, due_ns))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bug = error  # never an engine's error: those end in a record
            self._is_over.set()

    async def _serve(self, turn: _Turn, due_ns: int) -> None:
        await self._clock.sleep_until_ns(due_ns)
        if turn.is_done:
            return
        record = self._record_of(turn)
        record.scheduled_ns = due_ns
        record.ready_ns = self._clock.now_ns()
        if self._slots is None:
            await self._exchange_and_resolve(turn, record)
            return
        async with self._slots:
            await self._exchange_and_resolve(turn, record)

    async def _exchange_and_resolve(self, turn: _Turn, record: RequestRecord) -> None:
        if turn.is_done:
            return
        turn.is_sent = True
        row = turn.planned.row
        self._trigger(row.request_id, self._clock.now_ns(), is_start=True)
        await self._exchange(row, record)
        self._resolve(turn, record)

    async def _exchange(self, row: Row, record: RequestRecord) -> None:
        """One request and its answer; the record ends with a status whatever happens."""
        stream = StreamRecorder(record)
        prompt = self._prompts.prompt(row.request_id)
        record.prompt_tokens = len(prompt)
        record.filled_history_tokens = self._prompts.filled_history_tokens(row.request_id)
        request = GenerateRequest(
            row.request_id, prompt, row.output_tokens, self._settings.temperature, self._settings.seed,
            phase=record.phase,
        )  # fmt: skip
        completion = None
        self.progress.num_in_flight += 1
        record.sent_ns = self._clock.now_ns()
        call = asyncio.get_running_loop().create_task(self._generate(request, stream))
        self._flying.add(call)
        try:
            completion = await call
            apply_completion(record, completion)
            record.status = "aborted" if completion.finish_reason == "abort" else "ok"
        except TimeoutError:
            record.status, record.error = "timeout", f"no end within {self._settings.request_timeout_s:g} s"
        except RequestRejected as error:
            record.status, record.error = "error_http", str(error)
        except (RequestFailed, EngineError) as error:
            record.status, record.error = "error_net", str(error)
        except asyncio.CancelledError:
            record.status, record.error = "aborted", self._stop_reason or "cancelled"
            if self._stop_reason is None:
                raise
        finally:
            self._flying.discard(call)
            self.progress.num_in_flight -= 1
            record.end_ns = self._clock.now_ns()
            record.output_tokens = len(stream.token_ids)
            self.progress.output_tokens += len(stream.token_ids)
            if record.status == "ok":
                self._prompts.note_output(row.request_id, list(stream.token_ids))
            self._sink.request_ended(record, stream, prompt, completion)

    async def _generate(self, request: GenerateRequest, stream: StreamRecorder) -> Completion:
        async with asyncio.timeout(self._settings.request_timeout_s):
            return await self._engine.generate(request, stream)

    # --- what follows -------------------------------------------------------------------------------------------------

    def _resolve(self, turn: _Turn, record: RequestRecord) -> None:
        """`turn` has its record: let those go on that come after it, or end its session."""
        row = turn.planned.row
        self._close(turn, record)
        if record.status == "ok":
            self._trigger(row.request_id, record.end_ns or 0, is_start=False)
        elif record.status != "skipped":
            self._end_session(row, f"{row.request_id} ended with status {record.status}")

    def _trigger(self, request_id: str, time_ns: int, *, is_start: bool) -> None:
        for turn in self._after.get(request_id, ()):
            if turn.planned.row.is_gap_from_start != is_start:
                continue
            turn.num_after -= 1
            turn.trigger_ns = max(turn.trigger_ns, time_ns)
            if turn.num_after == 0:
                self._launch(turn, turn.trigger_ns + round(turn.planned.gap_s * 1e9))

    def _end_session(self, row: Row, reason: str) -> None:
        """Skip the session's unsent turns, and whatever comes after one that is skipped or failed."""
        queue = [turn for turn in self._trees[row.root_session_id] if turn.planned.row.session_id == row.session_id]
        queue += self._after.get(row.request_id, ())
        while queue:
            turn = queue.pop()
            if not turn.is_done and not turn.is_sent:
                self._skip(turn, reason)
                queue += self._after.get(turn.planned.row.request_id, ())

    def _skip_all(self, reason: str) -> None:
        for turn in self._turns.values():
            if not turn.is_done and not turn.is_sent:
                self._skip(turn, reason)

    def _skip(self, turn: _Turn, reason: str) -> None:
        record = self._record_of(turn)
        record.status, record.error = "skipped", reason
        self._sink.request_ended(record, StreamRecorder(record), None, None)
        self._close(turn, record)

    def _close(self, turn: _Turn, record: RequestRecord) -> None:
        """Count the turn for its session, its lane and the run; the last one of each ends it."""
        turn.is_done = True
        row = turn.planned.row
        session = self._sessions[row.session_id]
        session.note(record)
        if session.num_open == 0:
            self._sink.session_ended(session.row())
        if record.status == "ok":
            self.progress.num_ok += 1
        elif record.status == "skipped":
            self.progress.num_skipped += 1
        else:
            self.progress.num_failed += 1
        self._tree_open[row.root_session_id] -= 1
        if (
            self._tree_open[row.root_session_id] == 0
            and self._selection.lanes is not None
            and self._stop_reason is None
        ):
            self._start_next_tree()
        self._num_open -= 1
        if self._num_open == 0:
            self._is_over.set()

    def _record_of(self, turn: _Turn) -> RequestRecord:
        record = _new_record(turn.planned.row, "measured")
        if turn.planned.timeline_s is not None:
            record.timeline_ns = self.start_ns + round(turn.planned.timeline_s * 1e9)
        if turn.planned.start_s is not None and self._selection.lanes is None:
            record.scheduled_ns = self.start_ns + round(turn.planned.start_s * 1e9)
        return record


def _new_record(row: Row, phase: str) -> RequestRecord:
    return RequestRecord(
        request_id=row.request_id, session_id=row.session_id, root_session_id=row.root_session_id, turn=row.turn,
        kind=row.kind, phase=phase, status="skipped", prefix_id=row.prefix_id, keep_tokens=row.keep_tokens,
        max_tokens=row.output_tokens,
    )  # fmt: skip
