"""The line as a process: `python -m engines.wan.gateway` shapes every TCP connection that passes through it.

One listening port a route, on loopback; each connection is one flow, shaped both ways, full duplex. stdin (a pipe): one
JSON line with the `GatewayConfig`, then commands; stdout: one JSON line for each, the first
`{"ready": true, "ports": {...}}`. It ends when stdin closes or on SIGTERM, and never outlives its parent. Commands:
    {"cmd": "stats"}               counters, see `Gateway.stats`
    {"cmd": "set", "spec": {...}}  another line from now on; rates, delays and lateness begin anew
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from engines.child import die_with_parent
from engines.clock import Clock, run
from engines.wan.link import LinkSpec, LinkSpecError
from engines.wan.meter import Meter
from engines.wan.proxy import Pair, Side
from engines.wan.shaper import Shaper, buffer_bytes, chunk_bytes
from traces.errors import UserError

HOST = "127.0.0.1"
DIRECTIONS = ("forward", "back")
STATS_PERIOD_S = 1.0


class GatewayError(UserError):
    """The gateway cannot start or obey: the message names route, port or key."""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where connections to one listening port go. `listen_port` 0: the system chooses."""

    name: str
    host: str
    port: int
    listen_port: int = 0


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line on stdin. `spec` has the fields of `LinkSpec`; `stats_path`: a file that gets the counters once a
    second, a JSON object a line."""

    spec: dict[str, Any]
    routes: tuple[Route, ...]
    stats_path: str | None = None


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A later line on stdin."""

    cmd: Literal["stats", "set"]
    spec: dict[str, Any] | None = None


class Gateway:
    """The proxy itself, in whatever loop runs it. `forward` is client to target, `back` the other way."""

    def __init__(self, spec: LinkSpec, routes: Sequence[Route]) -> None:
        names = [route.name for route in routes]
        if len(set(names)) != len(names):
            raise GatewayError(f"routes: names must differ, got {', '.join(names)}")
        self._routes = tuple(routes)
        self._meters = {name: (Meter(spec), Meter(spec)) for name in names}
        self._servers: list[asyncio.Server] = []
        self._pairs: set[Pair] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._num_pairs = 0
        self._shapers: tuple[Shaper, Shaper] | None = None
        self._apply(spec)

    def _apply(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._chunk_bytes = chunk_bytes(spec)
        self._buffer_bytes = buffer_bytes(spec)

    async def start(self) -> dict[str, int]:
        """Listen; returns the port of each route. Raises GatewayError when one is in use."""
        loop = asyncio.get_running_loop()
        self._shapers = (Shaper(loop, self._spec, seed=0), Shaper(loop, self._spec, seed=1))
        ports = {}
        for route in self._routes:
            try:
                server = await loop.create_server(self._acceptor(route), HOST, route.listen_port)
            except OSError as error:
                await self.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                raise GatewayError(
                    f"route {route.name}: port {route.listen_port} on {HOST} is in use; choose another, or 0 for any"
                ) from None
            self._servers.append(server)
            ports[route.name] = server.sockets[0].getsockname()[1]
        return ports

    def _acceptor(self, route: Route) -> Callable[[], Side]:
        def accept() -> Side:
            assert self._shapers is not None
            self._num_pairs += 1
            pair = Pair(
                f"{route.name}#{self._num_pairs}", self._shapers, self._meters[route.name],
                lambda: self._chunk_bytes, lambda: self._buffer_bytes, self._pairs.discard,
            )  # fmt: skip
            self._pairs.add(pair)
            task = asyncio.get_running_loop().create_task(self._connect(route, pair))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            return pair.client

        return accept

    async def _connect(self, route: Route, pair: Pair) -> None:
        meters = self._meters[route.name]
        try:
            await asyncio.get_running_loop().create_connection(lambda: pair.target, route.host, route.port)
        except OSError as error:
            for meter in meters:
                meter.num_failed_connections += 1
            print(f"route {route.name}: no connection to {route.host}:{route.port}: {error}", file=sys.stderr)
            pair.close()
            return
        for meter in meters:
            meter.num_connections += 1

    def set_spec(self, spec: LinkSpec) -> None:
        """Another line from now on, for connections that are open too."""
        self._apply(spec)
        if self._shapers is not None:
            for index, shaper in enumerate(self._shapers):
                shaper.set_spec(spec, [meters[index] for meters in self._meters.values()])
        for pair in self._pairs:
            pair.update_reading()

    def stats(self) -> dict[str, Any]:
        """`time_s` (monotonic), `cpu_s` (this process), `spec`, `open_connections`; `line`: one entry a direction,
        `routes`: one a route and direction, each with the fields of `Meter.as_dict`."""
        assert self._shapers is not None
        now_s = max(shaper.settle() for shaper in self._shapers)
        return {
            "time_s": now_s,
            "cpu_s": time.process_time(),
            "spec": self._spec.as_dict(),
            "open_connections": len(self._pairs),
            "line": [
                {"direction": direction, **shaper.meter.as_dict(now_s)}
                for direction, shaper in zip(DIRECTIONS, self._shapers, strict=True)
            ],
            "routes": [
                {"route": name, "direction": direction, **meter.as_dict(now_s)}
                for name, meters in self._meters.items()
                for direction, meter in zip(DIRECTIONS, meters, strict=True)
            ],
        }

    async def close(self) -> None:
        """Stop listening and reset every connection; safe to call twice."""
        for server in self._servers:
            server.close()
        for task in list(self._connecting):
            task.cancel()
        for pair in list(self._pairs):
            pair.close()
        await asyncio.sleep(0)
        for shaper in self._shapers or ():
            shaper.close()
        self._servers = []


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(gateway: Gateway, line: bytes) -> dict[str, Any]:
    try:
        command = msgspec.json.decode(line, type=Command)
        if command.cmd == "stats":
            return gateway.stats()
        if command.spec is None:
            return {"error": "set: needs a spec"}
        gateway.set_spec(LinkSpec.from_dict(command.spec))
        return {"ok": True}
    except (msgspec.MsgspecError, LinkSpecError) as error:
        return {"error": str(error)}


async def _append_stats(gateway: Gateway, path: str, clock: Clock) -> None:
    while True:
        await clock.sleep(STATS_PERIOD_S)
        _append(gateway, path)


def _append(gateway: Gateway, path: str) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(gateway.stats()) + "\n")
    except OSError as error:
        raise GatewayError(f"stats_path: {path} cannot be written: {error.strerror}") from None


async def _obey(gateway: Gateway, stdin: asyncio.StreamReader) -> None:
    while line := await stdin.readline():
        _say(_answer(gateway, line))


def _stop_on_fault(loop: asyncio.AbstractEventLoop, stopped: asyncio.Future[None]) -> None:
    """A fault in a callback ends the gateway: a line that loses bytes must not go on in silence."""

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError) and not stopped.done():
            stopped.set_exception(error)
        elif error is None:
            loop.default_exception_handler(context)

    loop.set_exception_handler(note)


async def _serve(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopped.done():
            stopped.set_result(None)

    loop.add_signal_handler(signal.SIGTERM, stop)
    _stop_on_fault(loop, stopped)
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0)):
        raise GatewayError("stdin: must be a pipe that stays open as long as the gateway is wanted, not a file")
    stdin = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    first = await stdin.readline()
    if not first:
        return
    try:
        config = msgspec.json.decode(first, type=GatewayConfig)
    except msgspec.MsgspecError as error:
        raise GatewayError(f"configuration: {error}") from None
    gateway = Gateway(LinkSpec.from_dict(config.spec), config.routes)
    ports = await gateway.start()
    if config.stats_path is not None:
        _append(gateway, config.stats_path)  # a path that cannot be written is told before anything runs
    _say({"ready": True, "ports": ports})
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(_obey(gateway, stdin)), stopped]
    if config.stats_path is not None:
        tasks.append(asyncio.ensure_future(_append_stats(gateway, config.stats_path, clock)))
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if config.stats_path is not None:
        _append(gateway, config.stats_path)
    await gateway.close()
    for task in done:
        task.result()


def main() -> int:
    """Serve until stdin closes or SIGTERM; 2 after an error that the user can mend, which is one line on stderr."""
    die_with_parent()
    try:
        run(_serve, is_virtual=False)
    except (UserError, OSError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
