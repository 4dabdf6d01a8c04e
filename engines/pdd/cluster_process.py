"""Every instance in a process of its own, the line through a gateway process, the router's side of it all.

Whatever crosses sites goes through the gateway: KV on its own routes, so that the gateway's own count of them can be
held against the plan. The router talks to each worker directly. Nothing survives this process: workers and gateway
die with it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engines.base import EngineStartError
from engines.child import child_environment
from engines.clock import Clock
from engines.pdd.channel import Channels
from engines.pdd.cluster import OnFailure, OnMessage, Started
from engines.pdd.commands import ROUTER
from engines.pdd.config import EngineSpec, InstanceSpec
from engines.pdd.executor.base import KVBytes
from engines.pdd.messages import AnyMessage
from engines.pdd.worker import Peer, WorkerSetup
from engines.wan.process import GatewayProcess, Route

START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 3.0


class _WorkerProcess:
    """One worker and its pipe: JSON lines both ways."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr_path: Path | None) -> None:
        self.name = name
        self.process = process
        self.port = 0
        self._stderr_path = stderr_path

    async def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        await self.process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        """The next line; raises EngineStartError when the worker died or reports an error."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise EngineStartError(
                f"worker {self.name} did not answer within {START_TIMEOUT_S:.0f} s; see {self._stderr_path}"
            ) from None
        if not line:
            code = await self.process.wait()
            raise EngineStartError(f"worker {self.name} died at start with exit code {code}: {self.last_words()}")
        fields: dict[str, Any] = json.loads(line)
        if "error" in fields:
            raise EngineStartError(f"worker {self.name}: {fields['error']}")
        return fields

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        if self._stderr_path is None or not self._stderr_path.exists():
            return "no message"
        lines = self._stderr_path.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1]} (all of it: {self._stderr_path})" if lines else "no message"


class ProcessCluster:
    """See the module."""

    def __init__(self, spec: EngineSpec, clock: Clock, run_dir: Path | None) -> None:
        self._spec = spec
        self._clock = clock
        self._log_dir = None if run_dir is None else run_dir / "logs"
        self._secret = secrets.token_hex(16)  # stays in memory and pipes
        self._workers: dict[str, _WorkerProcess] = {}
        self._gateway: GatewayProcess | None = None
        self._channels = Channels(ROUTER, self._secret, self._on_message, self._on_lost)
        self._watchers: list[asyncio.Task[None]] = []
        self._is_closing = False
        self.on_message: OnMessage = lambda message: None
        self.on_failure: OnFailure = lambda reason: None

    def _on_message(self, src: str, message: AnyMessage, payload: KVBytes | None) -> None:
        self.on_message(message)

    def _on_lost(self, peer: str, reason: str) -> None:
        if not self._is_closing:
            self.on_failure(f"the connection to {peer} was lost: {reason}")

    # --- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> Started:
        if self._spec.executor == "roofline":
            raise EngineStartError("executor: roofline computes no tokens and needs clock=virtual; use executor=paced")
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.gather(*(self._spawn(i, spec) for i, spec in enumerate(self._spec.instances)))
            ports = await self._start_gateway()
            peers = {spec.name: self._peers_of(spec, ports) for spec in self._spec.instances}
            await asyncio.gather(*(self._connect(self._workers[name], found) for name, found in peers.items()))
        except BaseException:
            await self.close()
            raise
        self._watchers = [asyncio.create_task(self._watch(worker)) for worker in self._workers.values()]
        if self._gateway is not None:
            self._watchers.append(asyncio.create_task(self._watch_gateway(self._gateway)))
        return Started({name: {"pid": w.process.pid, "port": w.port} for name, w in self._workers.items()})

    async def _spawn(self, index: int, spec: InstanceSpec) -> None:
        stderr_path = None if self._log_dir is None else self._log_dir / f"{spec.name}.log"
        stderr = asyncio.subprocess.DEVNULL if stderr_path is None else stderr_path.open("wb")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engines.pdd.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=child_environment(), start_new_session=True,
            )  # fmt: skip
        finally:
            if not isinstance(stderr, int):
                stderr.close()
        worker = self._workers[spec.name] = _WorkerProcess(spec.name, process, stderr_path)
        port = self._spec.base_port + index if self._spec.base_port else 0
        await worker.say(msgspec.json.encode(WorkerSetup(spec.name, self._spec, self._secret, port)))
        worker.port = (await worker.answer())["port"]

    async def _connect(self, worker: _WorkerProcess, peers: list[Peer]) -> None:
        await worker.say(msgspec.json.encode(peers))
        await worker.answer()
        await self._channels.connect(worker.name, "127.0.0.1", worker.port)

    async def _start_gateway(self) -> Mapping[str, int]:
        routes = [
            Route(f"{kind}:{spec.name}", "127.0.0.1", self._workers[spec.name].port)
            for spec in self._spec.instances
            if spec.role == "MD" and any(other.site != spec.site for other in self._spec.instances)
            for kind in ("kv", "control")
        ]
        if not routes:
            return {}
        stats_path = None if self._log_dir is None else self._log_dir / "gateway.jsonl"
        self._gateway = GatewayProcess()
        return await self._gateway.start(self._spec.line, routes, stats_path)

    def _peers_of(self, spec: InstanceSpec, gateway_ports: Mapping[str, int]) -> list[Peer]:
        """P connects to RLD and MD, RLD to MD: who sends opens the connection."""
        wanted = {"P": ("RLD", "MD"), "RLD": ("MD",)}.get(spec.role, ())
        peers = []
        for other in self._spec.instances:
            if other.role not in wanted:
                continue
            is_line = other.site != spec.site
            direct = self._workers[other.name].port
            lanes = (self._spec.line if is_line else self._spec.local).lanes if spec.role == "P" else 0
            peers.append(
                Peer(
                    other.name,
                    "127.0.0.1",
                    gateway_ports[f"control:{other.name}"] if is_line else direct,
                    gateway_ports[f"kv:{other.name}"] if is_line else direct,
                    lanes,
                )
            )
        return peers

    async def _watch(self, worker: _WorkerProcess) -> None:
        """A worker that dies while the run goes on is a failure of the run, named."""
        code = await worker.process.wait()
        if not self._is_closing:
            self.on_failure(f"worker {worker.name} died with exit code {code}: {worker.last_words()}")

    async def _watch_gateway(self, gateway: GatewayProcess) -> None:
        reason = await gateway.wait_dead()
        if not self._is_closing:
            self.on_failure(reason)

    # --- while running ------------------------------------------------------------------------------------------------

    def send(self, dst: str, message: AnyMessage) -> None:
        self._channels.send(dst, message)

    async def shape(self, *, is_shaped: bool) -> None:
        if self._gateway is not None:
            await self._gateway.set_spec(self._spec.line if is_shaped else self._spec.line.unshaped())

    async def link_rows(self) -> list[dict[str, object]]:
        return [] if self._gateway is None else await self._gateway.link_rows()

    def own_counters(self, name: str) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        self._is_closing = True
        for watcher in self._watchers:
            watcher.cancel()
        await self._channels.close()
        for worker in self._workers.values():
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        await asyncio.gather(*(_reap(worker.process) for worker in self._workers.values()))
        if self._gateway is not None:
            await self._gateway.close()


async def _reap(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
