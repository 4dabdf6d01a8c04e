"""One instance in a process of its own: `python -m engines.pdd.worker`.

The event loop owns the core and the sockets; one thread runs the steps. The parent writes a JSON line with the
configuration to stdin, later one with the peers' addresses; the worker answers each with a JSON line on stdout, and
ends when stdin closes.
"""

from __future__ import annotations

import os

# Two spinning threads each would make workers that share cores an order of magnitude slower; before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from engines.child import die_with_parent, rss_bytes
from engines.clock import Clock, block_until_ns, run
from engines.pdd.channel import Channels
from engines.pdd.commands import RunStep, Send
from engines.pdd.config import EngineSpec
from engines.pdd.executor.base import Executor, KVBytes
from engines.pdd.instance import Instance
from engines.pdd.messages import AnyMessage, Stats

# A step that follows the last one within this time counts as back to back: the gap is the driver's own and is taken
# off.
BACK_TO_BACK_NS = 3_000_000


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first line from the parent."""

    name: str
    engine: EngineSpec
    secret: str
    port: int = 0


class Peer(msgspec.Struct, frozen=True):
    """A peer to connect to: a control connection, and `lanes` KV lanes (0 for none). Ports may be the gateway's."""

    node: str
    host: str
    control_port: int
    kv_port: int
    lanes: int


def build_executor(setup: WorkerSetup) -> Executor:
    """The torch executor of instance `setup.name`, on one thread."""
    import torch

    from engines.pdd.executor.torch_executor import TorchExecutor

    torch.set_num_threads(1)
    spec = next(spec for spec in setup.engine.instances if spec.name == setup.name)
    return TorchExecutor(
        setup.engine.model,
        num_pages=spec.num_pages,
        page_size=setup.engine.page_size,
        max_seqs=spec.max_batch_seqs,
        timing=spec.timing,
        device=setup.engine.device,
    )


@dataclass(slots=True)
class Pace:
    """Steps end at max(compute, modelled duration); what ran over is kept apart. Times in ns."""

    is_paced: bool
    free_at_ns: int = 0
    busy_ns: int = 0
    compute_ns: int = 0
    overrun_ns: int = 0
    overrun_steps: int = 0

    def deadline_ns(self, now_ns: int, duration_s: float) -> int:
        if not self.is_paced:
            return now_ns
        is_back_to_back = 0 <= now_ns - self.free_at_ns < BACK_TO_BACK_NS
        return (self.free_at_ns if is_back_to_back else now_ns) + round(duration_s * 1e9)

    def note(self, start_ns: int, computed_ns: int, deadline_ns: int) -> None:
        self.compute_ns += computed_ns - start_ns
        self.free_at_ns = max(deadline_ns, computed_ns)
        self.busy_ns += self.free_at_ns - start_ns
        if self.is_paced and computed_ns > deadline_ns:
            self.overrun_ns += computed_ns - deadline_ns
            self.overrun_steps += 1


class Worker:
    """The driver around one Instance: carries its commands to the thread and the sockets."""

    def __init__(self, clock: Clock, setup: WorkerSetup) -> None:
        self._clock = clock
        self._executor = build_executor(setup)
        spec = next(spec for spec in setup.engine.instances if spec.name == setup.name)
        self.core = Instance(spec, setup.engine, self._executor)
        self._pace = Pace(is_paced=setup.engine.executor == "paced")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self.channels = Channels(setup.name, setup.secret, self._on_message, self._on_lost)
        self._failure: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @property
    def failure(self) -> asyncio.Future[bytes]:
        """Fails when a step has failed: the process cannot go on."""
        return self._failure

    def _on_message(self, src: str, message: AnyMessage, payload: KVBytes | None) -> None:
        self.core.handle(self._clock.now_ns(), src, message, payload)
        self._carry()

    def _on_lost(self, peer: str, reason: str) -> None:
        if peer == "router":
            self._failure.cancel()

    def _carry(self) -> None:
        for command in self.core.take_commands():
            match command:
                case RunStep():
                    self._run(command)
                case Send(message=Stats() as stats):
                    self.channels.send(command.dst, self._with_own_counters(stats))
                case Send():
                    self.channels.send(command.dst, command.message, command.payload, command.lane)

    def _run(self, step: RunStep) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._compute, step)
        future.add_done_callback(self._computed)

    def _compute(self, step: RunStep) -> list[int | None]:
        start_ns = self._clock.now_ns()
        deadline_ns = self._pace.deadline_ns(start_ns, self._executor.duration_s(step.items))
        for request_id in step.released:
            self._executor.release(request_id)
        tokens = self._executor.run(step.items)
        computed_ns = self._clock.now_ns()
        self._pace.note(start_ns, computed_ns, deadline_ns)
        block_until_ns(deadline_ns)
        return tokens

    def _computed(self, future: asyncio.Future[list[int | None]]) -> None:
        error = future.exception()
        if error is not None:
            if not self._failure.done():
                self._failure.set_exception(error)
            return
        self.core.step_done(self._clock.now_ns(), future.result())
        self._carry()

    def _with_own_counters(self, stats: Stats) -> Stats:
        pace = self._pace
        own = {
            "pid": os.getpid(),
            "rss_bytes": rss_bytes(),
            "busy_ns": pace.busy_ns,
            "compute_ns": pace.compute_ns,
            "overrun_ns": pace.overrun_ns,
            "overrun_steps": pace.overrun_steps,
            "frames_refused": self.channels.num_refused,
        }
        return Stats(stats.number, stats.node, {**stats.values, **own})

    async def connect(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            await self.channels.connect(peer.node, peer.host, peer.control_port)
            for lane in range(peer.lanes):
                await self.channels.connect(peer.node, peer.host, peer.kv_port, lane)

    async def close(self) -> None:
        await self.channels.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=64 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def main(clock: Clock) -> int:
    """Serve until stdin closes; 1 after an error, which is said as {"error": ...} on stdout."""
    die_with_parent()
    stdin = await _stdin()
    setup = msgspec.json.decode(await stdin.readline(), type=WorkerSetup)
    os.nice(setup.engine.worker_nice)
    try:
        worker = Worker(clock, setup)
        port = await worker.channels.listen(setup.port)
    except OSError as error:
        _say(error=f"cannot listen on port {setup.port}: {error.strerror or error}")
        return 1
    _say(ready=True, port=port, pid=os.getpid())
    peers = await stdin.readline()
    if not peers:
        return 0
    await worker.connect(msgspec.json.decode(peers, type=list[Peer]))
    _say(connected=True)
    eof = asyncio.ensure_future(stdin.read())
    await asyncio.wait([eof, worker.failure], return_when=asyncio.FIRST_COMPLETED)
    await worker.close()
    failed = worker.failure.exception() if worker.failure.done() and not worker.failure.cancelled() else None
    if failed is not None:
        _say(error=f"a step failed: {type(failed).__name__}: {failed}")
        return 1
    return 0


if __name__ == "__main__":
    code = run(main, is_virtual=False)
    sys.stdout.flush()
    os._exit(code)  # a step that still blocks in its thread must not keep the process
