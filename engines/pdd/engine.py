"""The PDD engine as the harness sees it: the router's core, the cluster that carries its messages, and the clients'
streams."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.base import (
    Completion,
    EngineError,
    EngineInfo,
    EngineReport,
    GenerateRequest,
    RequestFailed,
    RequestRejected,
    TokenStream,
)
from engines.clock import Clock
from engines.pdd.cluster import Cluster
from engines.pdd.cluster_virtual import VirtualCluster
from engines.pdd.commands import Send
from engines.pdd.config import EngineSpec
from engines.pdd.messages import AnyMessage, AskStats, Stats
from engines.pdd.policy import arranged
from engines.pdd.router import Emit, Router

STATS_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Client:
    stream: TokenStream
    future: asyncio.Future[Completion]


class PddEngine:
    """Implements engines.base.Engine on both clocks. `run_dir` takes the workers' logs."""

    def __init__(
        self, spec: EngineSpec, clock: Clock, run_dir: Path | None = None, *, cluster: Cluster | None = None
    ) -> None:
        self.policy, self.spec = arranged(spec)
        self._clock = clock
        self.cluster: Cluster
        if cluster is not None:
            self.cluster = cluster
        elif clock.is_virtual:
            self.cluster = VirtualCluster(self.spec, clock)
        else:
            from engines.pdd.cluster_process import ProcessCluster

            self.cluster = ProcessCluster(self.spec, clock, run_dir)
        self.cluster.on_message = self._on_message
        self.cluster.on_failure = self._on_failure
        self.router = Router(self.spec, self.policy)
        self._clients: dict[str, _Client] = {}
        self._failure: str | None = None
        self._stats: dict[int, tuple[dict[str, Mapping[str, int]], asyncio.Event]] = {}
        self._num_asked = 0

    async def start(self) -> EngineInfo:
        started = await self.cluster.start()
        model = self.spec.model
        return EngineInfo(
            name=f"pdd/{self.policy.name}",
            model=model.name,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            page_size=self.spec.page_size,
            kv_bytes_per_token=model.kv_bytes_per_token,
            roles={spec.name: spec.role for spec in self.spec.instances},
            capabilities=frozenset({"token_ids", "cached_tokens", "abort", "stages"}),
            instances={
                spec.name: {
                    "role": spec.role,
                    "site": spec.site,
                    "pages": spec.num_pages,
                    **started.instances[spec.name],
                }
                for spec in self.spec.instances
            },
            versions=_versions(),
        )

    async def generate(self, request: GenerateRequest, stream: TokenStream) -> Completion:
        """Serve one request. Raises RequestRejected, RequestFailed; a cancelled task aborts the request everywhere."""
        if self._failure is not None:
            raise RequestFailed(self._failure)
        if len(request.prompt) == 0 or request.max_tokens < 1:
            raise RequestRejected("a request needs at least one prompt token and max_tokens of at least 1")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        try:
            self.router.submit(self._clock.now_ns(), request)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        self._clients[request.request_id] = _Client(stream, future)
        self._carry()
        try:
            return await future
        except asyncio.CancelledError:
            self.router.abort(request.request_id)
            self._carry()
            raise
        finally:
            self._clients.pop(request.request_id, None)

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Stats):
            self._note_stats(message)
            return
        self.router.handle(self._clock.now_ns(), message)
        self._carry()

    def _carry(self) -> None:
        for command in self.router.take_commands():
            if isinstance(command, Send):
                self.cluster.send(command.dst, command.message)
                continue
            client = self._clients.get(command.r)
            if client is None or client.future.done():
                continue
            if isinstance(command, Emit):
                client.stream.tokens(self._clock.now_ns(), command.ids, command.source)
            elif command.completion is not None:
                client.future.set_result(command.completion)
            else:
                client.future.set_exception(RequestRejected(command.reason or "refused"))

    def _on_failure(self, reason: str) -> None:
        """The cluster cannot go on: every request under way fails with the reason, and so does every later one."""
        if self._failure is not None:
            return
        self._failure = reason
        for client in list(self._clients.values()):
            if not client.future.done():
                client.future.set_exception(RequestFailed(reason))

    # --- counters -----------------------------------------------------------------------------------------------------

    async def report(self) -> EngineReport:
        """Counters of all instances and links now; raises EngineError when an instance does not answer in time."""
        time_ns = self._clock.now_ns()
        number = self._num_asked = self._num_asked + 1
        answers: dict[str, Mapping[str, int]] = {}
        has_all = asyncio.Event()
        self._stats[number] = (answers, has_all)
        try:
            for spec in self.spec.instances:
                self.cluster.send(spec.name, AskStats(number))
            await asyncio.wait_for(has_all.wait(), STATS_TIMEOUT_S)
        except TimeoutError:
            silent = sorted({spec.name for spec in self.spec.instances} - set(answers))
            raise EngineError(f"no counters from {', '.join(silent)} within {STATS_TIMEOUT_S} s") from None
        finally:
            del self._stats[number]
        rows = tuple(
            {
                "instance": spec.name,
                "role": spec.role,
                "site": spec.site,
                **answers[spec.name],
                **self.cluster.own_counters(spec.name),
            }
            for spec in self.spec.instances
        )
        late, self.router.late_events = self.router.late_events, []
        links = tuple(await self.cluster.link_rows())
        return EngineReport(time_ns=time_ns, instances=rows, links=links, late_cache_events=tuple(late))

    def _note_stats(self, stats: Stats) -> None:
        waiting = self._stats.get(stats.number)
        if waiting is not None:
            waiting[0][stats.node] = stats.values
            if len(waiting[0]) == len(self.spec.instances):
                waiting[1].set()

    async def set_phase(self, phase: str) -> None:
        """Priming runs over an unshaped line: it builds state, and nothing of it is measured."""
        is_shaped = phase != "prime"
        await self.cluster.shape(is_shaped=is_shaped)
        self.router.set_line(self.spec.line if is_shaped else self.spec.line.unshaped())

    async def close(self) -> None:
        await self.cluster.close()


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "numpy", "msgspec", "uvloop"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
