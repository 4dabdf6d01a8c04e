"""All instances in this process, on virtual time: the same cores, with timers for steps and fluid links for bytes.

A step's tokens are computed at the moment it ends. `delay` may add time to any message, per sender and receiver in
order: with a seed it makes interleavings that no socket would show twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engines.clock import Clock
from engines.pdd.channel import encoded_bytes
from engines.pdd.cluster import OnFailure, OnMessage, Started
from engines.pdd.commands import ROUTER, RunStep, Send
from engines.pdd.config import EngineSpec, InstanceSpec
from engines.pdd.executor.base import Executor, KVBytes
from engines.pdd.executor.roofline import RooflineExecutor
from engines.pdd.instance import Instance
from engines.pdd.messages import AnyMessage, KVFrame
from engines.wan.link import FluidLink

ExecutorOf = Callable[[EngineSpec, InstanceSpec], Executor]
Delay = Callable[[str, str, AnyMessage], float]


def default_executor(engine: EngineSpec, spec: InstanceSpec) -> Executor:
    """What `engine.executor` asks for: times alone (roofline), or the torch model on virtual time."""
    if engine.executor == "roofline":
        return RooflineExecutor(spec.timing, engine.model.vocab_size, engine.model.seed)
    from engines.pdd.executor.torch_executor import TorchExecutor

    return TorchExecutor(
        engine.model,
        num_pages=spec.num_pages,
        page_size=engine.page_size,
        max_seqs=spec.max_batch_seqs,
        timing=spec.timing,
        device=engine.device,
    )


@dataclass(slots=True)
class _Packet:
    src: str
    dst: str
    message: AnyMessage
    payload: KVBytes | None = None
    nbytes: int = 0
    lane: int | None = None

    @property
    def flow(self) -> str:
        """A flow is a connection: a lane of the pair's pool, or its one control connection."""
        return f"{self.src}>{self.dst}:{'control' if self.lane is None else self.lane}"


@dataclass(slots=True)
class _Wire:
    """One direction of one link, and the timer of its next delivery."""

    link: FluidLink
    name: str
    direction: str
    kv_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Node:
    core: Instance
    executor: Executor
    busy_ns: int = 0


class VirtualCluster:
    """See the module. `after_event(cluster)` is called after every event, for checks."""

    def __init__(
        self,
        spec: EngineSpec,
        clock: Clock,
        *,
        executor_of: ExecutorOf = default_executor,
        delay: Delay | None = None,
        after_event: Callable[[VirtualCluster], None] | None = None,
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._delay = delay
        self._after_event = after_event
        self._sites = {instance.name: instance.site for instance in spec.instances}
        self.nodes: dict[str, _Node] = {}
        for instance in spec.instances:
            executor = executor_of(spec, instance)
            self.nodes[instance.name] = _Node(Instance(instance, spec, executor), executor)
        self._wires: dict[str, _Wire] = {}
        self._line_spec = spec.line
        self._last_delivery_s: dict[tuple[str, str], float] = {}
        self.on_message: OnMessage = lambda message: None
        self.on_failure: OnFailure = lambda reason: None

    async def start(self) -> Started:
        return Started(instances={name: {} for name in self.nodes})

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, dst: str, message: AnyMessage) -> None:
        self._pass(_Packet(ROUTER, dst, message))

    def _pass(self, packet: _Packet) -> None:
        """To or from the router: no link. Between instances: the line, or the site's own network."""
        if ROUTER in (packet.src, packet.dst):
            self._after_delay(packet, 0.0)
            return
        wire = self._wire(packet.src, packet.dst)
        nbytes = encoded_bytes(packet.message) + packet.nbytes
        if isinstance(packet.message, KVFrame):
            wire.kv_bytes += packet.nbytes
        wire.link.send(self._now_s(), packet.flow, nbytes, packet)
        self._arm(wire)

    def _wire(self, src: str, dst: str) -> _Wire:
        site, other = self._sites[src], self._sites[dst]
        key = f"{site}>{other}" if site != other else f"{src}>{dst}"
        wire = self._wires.get(key)
        if wire is None:
            name = "line" if site != other else "local"
            spec = self._line_spec if site != other else self._spec.local
            wire = self._wires[key] = _Wire(FluidLink(spec, seed=len(self._wires)), name, key)
        return wire

    def _arm(self, wire: _Wire) -> None:
        if wire.timer is not None:
            wire.timer.cancel()
        due_s = wire.link.next_event_s()
        if due_s is not None:
            wire.timer = asyncio.get_running_loop().call_at(due_s, self._deliver, wire)

    def _deliver(self, wire: _Wire) -> None:
        wire.timer = None
        for _, packet in wire.link.advance(self._now_s()):
            assert isinstance(packet, _Packet)
            self._after_delay(packet, 0.0)
        self._arm(wire)

    def _after_delay(self, packet: _Packet, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._delay is not None:
            delay_s += self._delay(packet.src, packet.dst, packet.message)
        pair = (packet.src, packet.dst)
        due_s = max(loop.time() + delay_s, self._last_delivery_s.get(pair, 0.0))  # in order, as TCP is
        self._last_delivery_s[pair] = due_s
        loop.call_at(due_s, self._receive, packet)

    def _receive(self, packet: _Packet) -> None:
        if packet.dst == ROUTER:
            self.on_message(packet.message)
        else:
            node = self.nodes[packet.dst]
            node.core.handle(self._clock.now_ns(), packet.src, packet.message, packet.payload)
            self._carry(packet.dst, node)
        if self._after_event is not None:
            self._after_event(self)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _carry(self, name: str, node: _Node) -> None:
        for command in node.core.take_commands():
            match command:
                case RunStep():
                    duration_s = node.executor.duration_s(command.items)
                    node.busy_ns += round(duration_s * 1e9)
                    loop = asyncio.get_running_loop()
                    loop.call_at(loop.time() + duration_s, self._end_step, name, node, command)
                case Send():
                    message = command.message
                    nbytes = message.nbytes if isinstance(message, KVFrame) else 0
                    self._pass(_Packet(name, command.dst, message, command.payload, nbytes, command.lane))

    def _end_step(self, name: str, node: _Node, step: RunStep) -> None:
        for request_id in step.released:
            node.executor.release(request_id)
        node.core.step_done(self._clock.now_ns(), node.executor.run(step.items))
        self._carry(name, node)
        if self._after_event is not None:
            self._after_event(self)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def shape(self, *, is_shaped: bool) -> None:
        self._line_spec = self._spec.line if is_shaped else self._spec.line.unshaped()
        for wire in self._wires.values():
            if wire.name == "line":
                wire.link.set_spec(self._now_s(), self._line_spec)
                self._arm(wire)

    async def link_rows(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for wire in self._wires.values():
            spec = self._line_spec if wire.name == "line" else self._spec.local
            rows.append(
                {
                    "link": wire.name,
                    "direction": wire.direction,
                    "route": "all",
                    "bytes_total": wire.link.bytes_sent,
                    "kv_bytes": wire.kv_bytes,
                    "configured_rate_bps": spec.rate_bps,
                    "configured_flow_rate_bps": spec.flow_rate_bps,
                    "busy_ns": round(wire.link.busy_s * 1e9),
                }
            )
        return rows

    def own_counters(self, name: str) -> dict[str, int]:
        return {"busy_ns": self.nodes[name].busy_ns, "overrun_ns": 0, "overrun_steps": 0}

    async def close(self) -> None:
        for wire in self._wires.values():
            if wire.timer is not None:
                wire.timer.cancel()

    def check_integrity(self) -> None:
        """Raises where any instance's pages, tree and legs disagree."""
        for node in self.nodes.values():
            node.core.check_integrity()
