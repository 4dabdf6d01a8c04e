"""Configured against realised: `python -m engines.wan.probe` sends bytes through a gateway, measures at the receiver.

It measures the line as a user of it would, with sockets of its own; the gateway's own counters are shown beside, never
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engines.clock import Clock, block_until_ns, monotonic_s, run
from engines.wan.link import LinkSpec
from engines.wan.process import GatewayProcess, Route
from traces.errors import UserError

WARM_UP_S = 0.4
PING_BYTES = 64
PING_PERIOD_S = 0.004
NUM_PINGS = 100
_BLOCK = bytes(256 * 1024)
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class Reading:
    """One row. Rates in bit/s; delays are errors in seconds against rtt / 2 plus the ping's own bytes at its share."""

    rate_bps: float | None
    num_flows: int
    allowed_bps: float  # what the model lets that many flows have together
    realised_bps: float
    min_share: float  # of the slowest and of the fastest flow, relative to an equal one
    max_share: float
    idle_error_p50_s: float
    idle_error_p95_s: float
    loaded_error_p50_s: float
    loaded_error_p95_s: float
    cpu_s_per_mb: float
    gateway_rate_bps: float | None
    gateway_late_share: float | None


class _Sink:
    """Accepts connections and notes when how many bytes came, by connection."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self.arrivals: list[list[tuple[float, int]]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            arrivals: list[tuple[float, int]] = []
            self.arrivals.append(arrivals)
            threading.Thread(target=self._receive, args=(connection, arrivals), daemon=True).start()

    def _receive(self, connection: socket.socket, arrivals: list[tuple[float, int]]) -> None:
        buffer = bytearray(1 << 20)
        with connection:
            while True:
                try:
                    nbytes = connection.recv_into(buffer)
                except ConnectionError:
                    return
                if not nbytes:
                    return
                arrivals.append((monotonic_s(), nbytes))

    def bytes_between(self, begin_s: float, end_s: float) -> list[int]:
        return [sum(n for at, n in list(arrivals) if begin_s <= at < end_s) for arrivals in self.arrivals]

    def close(self) -> None:
        self._server.close()


class _Pinger:
    """One connection whose messages carry the time at which they were sent."""

    def __init__(self, gateway_port: int, server: socket.socket) -> None:
        self._sender = socket.create_connection(("127.0.0.1", gateway_port))
        self._sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._receiver, _ = server.accept()

    def delays_s(self) -> list[float]:
        """One-way delays of `NUM_PINGS` messages, sorted."""
        delays: list[float] = []
        receiver = threading.Thread(target=self._receive, args=(delays,))
        receiver.start()
        for _ in range(NUM_PINGS):
            self._sender.sendall(struct.pack("<d", monotonic_s()).ljust(PING_BYTES, b"\0"))
            block_until_ns(round((monotonic_s() + PING_PERIOD_S) * 1e9))
        receiver.join()
        return sorted(delays)

    def _receive(self, delays: list[float]) -> None:
        for _ in range(NUM_PINGS):
            message = self._receiver.recv(PING_BYTES, socket.MSG_WAITALL)
            delays.append(monotonic_s() - struct.unpack_from("<d", message)[0])

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def _send_for_ever(gateway_port: int, stop: threading.Event) -> socket.socket:
    sender = socket.create_connection(("127.0.0.1", gateway_port))

    def send() -> None:
        try:
            while not stop.is_set():
                sender.sendall(_BLOCK)
        except OSError:  # closed at the end, in the middle of a block
            return

    threading.Thread(target=send, daemon=True).start()
    return sender


async def measure(spec: LinkSpec, num_flows: int, duration_s: float, clock: Clock) -> Reading:
    """One row: pings on an idle line, then `num_flows` senders at full speed with pings beside them."""
    sink, ping_server = _Sink(), socket.create_server(("127.0.0.1", 0))
    gateway, stop = GatewayProcess(), threading.Event()
    senders: list[socket.socket] = []
    routes = [Route("load", "127.0.0.1", sink.port), Route("ping", "127.0.0.1", ping_server.getsockname()[1])]
    try:
        ports = await gateway.start(spec, routes)
        pinger = await asyncio.to_thread(_Pinger, ports["ping"], ping_server)
        idle = await asyncio.to_thread(pinger.delays_s)
        senders = [_send_for_ever(ports["load"], stop) for _ in range(num_flows)]
        await clock.sleep(WARM_UP_S + spec.rtt_s)
        before, begin_s = await gateway.stats(), monotonic_s()
        loaded = await asyncio.to_thread(pinger.delays_s)
        await clock.sleep(begin_s + duration_s - monotonic_s())
        end_s, after = monotonic_s(), await gateway.stats()
        by_flow = sink.bytes_between(begin_s, end_s)
        pinger.close()
    finally:
        stop.set()
        for sender in senders:
            sender.close()
        await gateway.close()
        sink.close()
        ping_server.close()
    total, ping_bytes = sum(by_flow), NUM_PINGS * PING_BYTES  # the pings under load share the line too
    idle_s, loaded_s = (spec.rtt_s / 2 + PING_BYTES / spec.flow_limit_Bps(n) for n in (1, num_flows + 1))
    load = next(entry for entry in after["routes"] if entry["route"] == "load" and entry["direction"] == "forward")
    return Reading(
        rate_bps=spec.rate_bps,
        num_flows=num_flows,
        allowed_bps=num_flows * spec.flow_limit_Bps(num_flows) * 8,
        realised_bps=(total + ping_bytes) * 8 / (end_s - begin_s),
        min_share=min(by_flow) * num_flows / total,
        max_share=max(by_flow) * num_flows / total,
        idle_error_p50_s=idle[len(idle) // 2] - idle_s,
        idle_error_p95_s=idle[len(idle) * 95 // 100] - idle_s,
        loaded_error_p50_s=loaded[len(loaded) // 2] - loaded_s,
        loaded_error_p95_s=loaded[len(loaded) * 95 // 100] - loaded_s,
        cpu_s_per_mb=(after["cpu_s"] - before["cpu_s"]) / (total / 1e6),
        gateway_rate_bps=load["realised_rate_bps"],
        gateway_late_share=load["late_share"],
    )


def parse_rate(text: str) -> float | None:
    """`10M`, `2.5G`, `9600` in bit/s; `none` is no limit. Raises UserError."""
    if text == "none":
        return None
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        raise UserError(f"--rates: {text!r} is no rate; write 10M, 2.5G or none") from None


def _print_table(readings: Sequence[Reading], rtt_s: float) -> None:
    print("rates in Mbit/s, set: the lesser of line and flows x cap")
    print(f"one-way delay set to {rtt_s / 2 * 1e3:g} ms; delay columns: error P50 / P95 in ms, idle and under load")
    print(f"{'set':>11} {'flows':>5} {'realised':>10} {'error %':>8} {'flow shares':>13}"
          f" {'idle':>13} {'loaded':>13} {'CPU ms/MB':>9} {'late %':>7}")  # fmt: skip
    for r in readings:
        is_limited = r.allowed_bps < float("inf")
        error = f"{(r.realised_bps / r.allowed_bps - 1) * 100:8.2f}" if is_limited else f"{'-':>8}"
        print(
            f"{r.allowed_bps / 1e6:11.1f} {r.num_flows:5d} {r.realised_bps / 1e6:10.2f} {error}"
            f" {r.min_share:6.3f}-{r.max_share:.3f} {r.idle_error_p50_s * 1e3:6.2f}/{r.idle_error_p95_s * 1e3:6.2f}"
            f" {r.loaded_error_p50_s * 1e3:6.2f}/{r.loaded_error_p95_s * 1e3:6.2f} {r.cpu_s_per_mb * 1e3:9.2f}"
            f" {(r.gateway_late_share or 0.0) * 100:7.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 2 after a wrong option, with one line."""
    parser = argparse.ArgumentParser(prog="python -m engines.wan.probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="10M,100M,1G", help="bit/s of the line: 10M,1G or none")
    parser.add_argument("--flow-rate", default="none", help="cap of each flow, bit/s")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--flows", default="1,4", help="how many connections send at once")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each row measures")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(2e-4)  # threads measure here: a thread that waits 5 ms for its turn would measure that

    async def measure_all(clock: Clock) -> list[Reading]:
        readings = []
        for rate in options.rates.split(","):
            for flows in options.flows.split(","):
                spec = LinkSpec(
                    "probe", parse_rate(rate), options.rtt_ms / 1e3, flow_rate_bps=parse_rate(options.flow_rate)
                )
                readings.append(await measure(spec, int(flows), options.seconds, clock))
                if options.json:
                    print(json.dumps(asdict(readings[-1])), flush=True)
        return readings

    try:
        readings = run(measure_all, is_virtual=False)
    except UserError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2
    if not options.json:
        _print_table(readings, options.rtt_ms / 1e3)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
