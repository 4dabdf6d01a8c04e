"""One run: trace + engine + load -> records -> store -> summary.

The straight path of a run, and what is said of it: manifest and validity. It has no formula of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import engines.clock
from engines.base import CacheEvent, Completion, Engine, EngineError, EngineInfo, EngineReport, TokenArray
from engines.clock import Clock
from engines.pdd.config import EngineSpec
from harness.config import RunConfig, git_commit, machine, versions
from harness.live import LiveView
from harness.load import LoadedTrace
from harness.plan import PageKeys, Prepared, Touch, bins_table, hits_by_site, plan_table, planned_hits, prepare
from harness.record import RequestRecord, StreamRecorder, spans_of
from harness.replay import Replay, ReplaySettings
from harness.similitude import similitude_table
from harness.store import SCHEMA_VERSION, RunStore
from traces.errors import UserError
from traces.prompts import page_keys

TICK_S = 0.2
TICKS_PER_FLUSH, TICKS_PER_REPORT = 2, 5
"""Records go to disk every 0.4 s, counters are read every second."""
SETTLE_S, SETTLE_POLL_S = 10.0, 0.1
"""Transfers of requests that ended on RLD go on after their answers: a run waits this long for them at most."""
MAX_OVERRUN_SHARE = 0.05
MAX_LATE_S = 0.002
"""The gateway's P95 lateness: some 5% of the default run's median TTFT."""

EngineFactory = Callable[[EngineSpec, Clock, Path], Engine]


def engine_factory_of(build: str) -> EngineFactory:
    """What `engine.build` (module:callable) names; imported late, so that a plan starts fast. Raises UserError."""
    module, _, name = build.partition(":")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"engine.build: {build!r} cannot be imported: {error}; write module:callable") from None
    return factory


def execute(
    config: RunConfig, plain: Mapping[str, Any], argv: Sequence[str], trace: LoadedTrace, *,
    engine_factory: EngineFactory | None = None, console: Console | None = None,
) -> int:  # fmt: skip
    """Plan, run, store, report. The exit code: 0, 1 when a request failed, 130 when interrupted. Raises
    UserError.
    """
    console = console or Console()
    prepared = prepare(config, trace)
    console.print(f"{prepared.what}\n")
    for table in (plan_table(prepared.plan), similitude_table(prepared.similitude), bins_table(prepared.plan)):
        console.print(table)
    if config.dry_run:
        console.print("dry run: nothing was run")
        return 0
    factory = engine_factory or engine_factory_of(config.engine.build)
    run_dir = new_run_dir(config)
    store = RunStore.create(run_dir, first_manifest(prepared, plain, argv, run_dir))
    console.print(f"results: {run_dir}")
    try:
        run = engines.clock.run(
            lambda clock: Run(prepared, store, clock, console).main(factory, run_dir),
            is_virtual=config.clock == "virtual",
        )
    except BaseException as error:
        store.close({"status": "failed", "error": str(error) or type(error).__name__}, {})
        raise
    return run.close(run_dir)


class Run:
    """A run under way: the sink of its replay, its timers, its validity."""

    def __init__(self, prepared: Prepared, store: RunStore, clock: Clock, console: Console) -> None:
        self._prepared = prepared
        self._store = store
        self._clock = clock
        self._console = console
        self._rows = {item.row.request_id: item.row for item in prepared.selection.planned}
        self._rows |= {row.request_id: row for row in prepared.primes}
        self._sequences: dict[str, PageKeys] = {}
        self._touches: dict[str, list[Touch]] = defaultdict(list)
        self._statuses: Counter[tuple[str, str]] = Counter()
        self._first_error: str | None = None
        self._first_report: EngineReport | None = None
        self._last_report: EngineReport | None = None
        self._counter_error: str | None = None
        self._stop_reason: str | None = None
        self._info: EngineInfo | None = None

    # --- driving ------------------------------------------------------------------------------------------------------

    async def main(self, factory: EngineFactory, run_dir: Path) -> Run:
        """Start the engine, prime, replay, close. Raises EngineStartError when the engine does not start."""
        config = self._prepared.config
        engine = factory(self._prepared.spec, self._clock, run_dir)
        try:
            self._info = await engine.start()
            settings = ReplaySettings(
                request_timeout_s=config.request_timeout_s, time_limit_s=config.limit.time_s,
                prime_concurrency=config.prime_concurrency, temperature=config.sampling.temperature, seed=config.seed,
            )  # fmt: skip
            replay = Replay(engine, self._clock, self._prepared.prompts, self._prepared.selection, settings, self)
            with (
                self._signals(replay),
                LiveView(replay.progress, self._console, is_virtual=self._clock.is_virtual) as view,
            ):
                stage = ["prime"]
                ticker = asyncio.create_task(self._tick(engine, view, stage))
                try:
                    await replay.prime(self._prepared.primes)
                    self._first_report = await self._report(engine)
                    stage[0] = "replay"
                    await replay.run()
                    await self._settle(engine)
                finally:
                    ticker.cancel()
                    await asyncio.gather(ticker, return_exceptions=True)
            await self._report(engine)
        finally:
            await engine.close()
        return self

    async def _tick(self, engine: Engine, view: LiveView, stage: list[str]) -> None:
        start_ns = due_ns = self._clock.now_ns()
        num_ticks = 0
        while True:
            view.update((self._clock.now_ns() - start_ns) / 1e9, stage[0])
            due_ns += round(TICK_S * 1e9)
            await self._clock.sleep_until_ns(due_ns)
            num_ticks += 1
            if num_ticks % TICKS_PER_FLUSH == 0:
                self._store.flush()
            if num_ticks % TICKS_PER_REPORT == 0:
                await self._report(engine)

    async def _report(self, engine: Engine) -> EngineReport | None:
        try:
            report = await engine.report()
        except EngineError as error:
            self._counter_error = str(error)
            return None
        self._last_report = report
        self._store.add_instances([{"time_ns": report.time_ns, **row} for row in report.instances])
        self._store.add_links([{"time_ns": report.time_ns, **row} for row in report.links])
        for request_id, event in report.late_cache_events:
            self._touch(request_id, event)
            self._store.add_cache_events(request_id, [event])
        return report

    async def _settle(self, engine: Engine) -> None:
        """Wait until no instance holds anything for a request, so that bytes and cache events are whole."""
        deadline_s = self._clock.now_s() + SETTLE_S
        while self._clock.now_s() < deadline_s:
            report = await self._report(engine)
            if report is None or not any(_count(row, "num_legs") for row in report.instances):
                return
            await self._clock.sleep(SETTLE_POLL_S)

    @contextlib.contextmanager
    def _signals(self, replay: Replay) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the replay with every record written."""
        loop = asyncio.get_running_loop()

        def stop(number: int, _frame: object = None) -> None:
            self._stop_reason = f"interrupted by {signal.Signals(number).name}"
            loop.call_soon_threadsafe(replay.stop, self._stop_reason)

        numbers = (signal.SIGINT, signal.SIGTERM)
        if self._clock.is_virtual:  # a virtual loop never waits in select, so Python's own handlers run at once
            before = [signal.signal(number, stop) for number in numbers]
        else:
            for number in numbers:
                loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            if self._clock.is_virtual:
                for number, handler in zip(numbers, before, strict=True):
                    signal.signal(number, handler)
            else:
                for number in numbers:
                    loop.remove_signal_handler(number)

    # --- the replay's sink --------------------------------------------------------------------------------------------

    def request_ended(
        self, record: RequestRecord, stream: StreamRecorder, prompt: TokenArray | None, completion: Completion | None
    ) -> None:
        """Keep one record with what belongs to it."""
        page_size = self._prepared.spec.page_size
        record.page_size = page_size
        record.ideal_hit_tokens = self._rows[record.request_id].md_hit(page_size)
        self._statuses[record.phase, record.status] += 1
        if record.status not in ("ok", "skipped") and self._first_error is None:
            self._first_error = f"{record.request_id}: {record.error or record.status}"
        events = () if completion is None else completion.cache_events
        if prompt is not None:
            tokens = np.concatenate([prompt, np.asarray(stream.token_ids, dtype=np.int32)])
            self._sequences[record.request_id] = PageKeys(
                page_keys(tokens, page_size), len(prompt), len(stream.token_ids)
            )
        for event in events:
            self._touch(record.request_id, event)
        spans = spans_of(record) if record.sent_ns is not None else []
        self._store.add_request(record, stream.chunks, spans, events)

    def session_ended(self, row: dict[str, object]) -> None:
        self._store.add_session(row)

    def _touch(self, request_id: str, event: CacheEvent) -> None:
        self._touches[event.instance].append(Touch(event.seq, request_id, event.op))

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, run_dir: Path) -> int:
        """Plan the hits from the recorded order, write everything, print the summary."""
        from harness.metrics import summarize, summary_table

        assert self._info is not None
        planned = planned_hits(self._touches, self._sequences, self._prepared.spec.page_size)
        self._store.set_planned_hits(hits_by_site(planned, self._info.roles))
        reasons = self.invalid_reasons()
        updates: dict[str, Any] = {
            "status": "interrupted" if self._stop_reason else "complete",
            "engine_info": info_dict(self._info),
            "validity": {"valid": not reasons, "reasons": reasons},
        }
        summary = summarize(self._store.close(updates, None))
        self._store.write_summary(summary)
        self._store.write_summary(summary)
        console = self._console
        manifest = self._store.manifest
        console.print(summary_table(summary, manifest))
        console.print(bins_table(self._prepared.plan))
        for reason in reasons:
            console.print(f"not valid: {reason}", highlight=False)
        if not self._prepared.plan.is_representative:
            console.print("not representative: a hit bin of the slice is more than 5 points off the trace's")
        for path in sorted(run_dir.glob("*.*")):
            console.print(f"  {path}", highlight=False)
        if self._stop_reason:
            return 130
        return 0 if self._first_error is None and self._statuses["measured", "ok"] else 1

    def invalid_reasons(self) -> list[str]:
        """Why the run's figures should not be used; empty when they may."""
        reasons = [] if self._stop_reason is None else [self._stop_reason]
        for phase in ("measured", "prime"):
            bad = {status: n for (at, status), n in sorted(self._statuses.items()) if at == phase and status != "ok"}
            if bad:
                reasons.append(
                    f"{phase} requests did not end ok: " + ", ".join(f"{n} {name}" for name, n in bad.items())
                )
        if self._first_error is not None:
            reasons.append(f"the first that failed: {self._first_error}")
        if self._counter_error is not None:
            reasons.append(f"counters are missing: {self._counter_error}")
        if self._last_report is None:
            return reasons
        first = {str(row["instance"]): row for row in self._first_report.instances} if self._first_report else {}
        for row in self._last_report.instances:
            before = first.get(str(row["instance"]), {})
            busy, over = (_count(row, name) - _count(before, name) for name in ("busy_ns", "overrun_ns"))
            if busy > 0 and over > MAX_OVERRUN_SHARE * busy:
                reasons.append(
                    f"{row['instance']} overran its paced steps by {over / busy:.1%} of its busy time "
                    f"(at most {MAX_OVERRUN_SHARE:.0%})"
                )
        for row in self._last_report.links:
            line = self._prepared.spec.line
            late_s = _count(row, "delay_p95_ns") / 1e9 - line.rtt_s / 2 - line.jitter_s
            if late_s > MAX_LATE_S:
                reasons.append(
                    f"the gateway delivered on {row['link']} {row.get('direction')} {late_s * 1e3:.1f} ms late at P95 "
                    f"(at most {MAX_LATE_S * 1e3:.0f} ms)"
                )
        return reasons


def _count(row: Mapping[str, object], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


# --- what is said of a run --------------------------------------------------------------------------------------------


def new_run_dir(config: RunConfig) -> Path:
    """A folder of its own, even for runs that start in the same second."""
    stamp = Clock(is_virtual=False).wall_time_iso().removesuffix("Z").replace("T", "_").replace(":", "")
    name = f"{stamp}_{config.engine.policy}_{config.trace.name}_{config.seed}"
    root = Path(config.results_dir)
    for count in range(1000):
        path = root / (name if count == 0 else f"{name}-{count}")
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            if not root.is_dir():
                raise UserError(f"results_dir: {root} is not a folder") from None
            continue
        except OSError as error:
            raise UserError(f"results_dir: {path} cannot be made: {error.strerror}") from None
        return path
    raise UserError(f"results_dir: {root} holds 1,000 runs of this second")


def first_manifest(prepared: Prepared, plain: Mapping[str, Any], argv: Sequence[str], run_dir: Path) -> dict[str, Any]:
    """All that is known before the run. Never a value of the environment, never the host's name."""
    config, plan, selection = prepared.config, prepared.plan, prepared.selection
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_dir.name,
        "status": "running",
        "created": Clock(is_virtual=False).wall_time_iso(),
        "argv": list(argv),
        "config": dict(plain),
        "seeds": {"run": config.seed, "model": config.model.seed},
        "versions": versions(),
        "git": git_commit(),
        "machine": machine(),
        "clock": config.clock,
        "trace": prepared.trace_info,
        "selection": {
            "requests": plan.num_requests, "sessions": plan.num_sessions, "primed": plan.num_primed,
            "time_compression": selection.time_compression, "entered_running": len(selection.entries),
        },
        "engine_info": None,
        "plan": plan.as_dict(),
        "similitude": prepared.similitude.as_dict(),
        "validity": {"valid": False, "reasons": ["the run has not ended"]},
        "hit_bins": {"slice": list(plan.slice_bins), "trace": list(plan.trace_bins)},
        "representative": plan.is_representative,
    }  # fmt: skip


def info_dict(info: EngineInfo) -> dict[str, object]:
    return {
        "name": info.name, "model": info.model, "vocab_size": info.vocab_size, "max_context": info.max_context,
        "page_size": info.page_size, "kv_bytes_per_token": info.kv_bytes_per_token, "roles": dict(info.roles),
        "capabilities": sorted(info.capabilities), "instances": {name: dict(facts) for name, facts in
        info.instances.items()},
        "versions": dict(info.versions),
    }  # fmt: skip
