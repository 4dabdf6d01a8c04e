"""The gateway inside this process: bytes stay whole and in order, ends travel, memory is bounded, counts are true."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.clock import Clock, run
from engines.wan.gateway import Gateway, GatewayError, Route
from engines.wan.link import LinkSpec
from engines.wan.shaper import MAX_CHUNK_BYTES, buffer_bytes, chunk_bytes

FAST = LinkSpec("line", rate_bps=2e9, rtt_s=0.002, jitter_s=0.001, flow_rate_bps=4e8)
FREE = LinkSpec("line")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Use = Callable[[Gateway, int], Awaitable[Any]]


def with_gateway(spec: LinkSpec, handler: Handler, use: Use, *, name: str = "kv:md0") -> Any:
    """`use(gateway, port)` with one route to a target that `handler` serves."""

    async def main(clock: Clock) -> Any:
        handled: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handled.add(asyncio.ensure_future(handler(reader, writer)))

        target = await asyncio.start_server(accept, "127.0.0.1", 0)
        gateway = Gateway(spec, [Route(name, "127.0.0.1", target.sockets[0].getsockname()[1])])
        ports = await gateway.start()
        try:
            return await asyncio.wait_for(use(gateway, ports[name]), 60.0)
        finally:
            await gateway.close()
            target.close()
            for task in handled:
                task.cancel()

    return run(main, is_virtual=False)


def route_stats(gateway: Gateway) -> dict[str, dict[str, Any]]:
    return {entry["direction"]: entry for entry in gateway.stats()["routes"]}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def send_in_pieces(writer: asyncio.StreamWriter, data: bytes, rng: random.Random) -> None:
    begin = 0
    while begin < len(data):
        size = int(10 ** rng.uniform(0, 5.5))
        writer.write(data[begin : begin + size])
        begin += size
        await (writer.drain() if rng.random() < 0.5 else asyncio.sleep(0))
    writer.write_eof()


async def reverse_when_ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The client's end arrives first, then everything goes back: needs half-close."""
    data = await reader.read()
    writer.write(data[::-1])
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("spec", [FAST, FREE, LinkSpec("line", rtt_s=0.004), LinkSpec("line", rate_bps=4e7)])
@pytest.mark.parametrize("seed", [1, 2])
def test_bytes_stay_whole_and_in_order_both_ways_at_once(spec: LinkSpec, seed: int) -> None:
    back = {size: random.Random(size).randbytes(size) for size in (0, 1, 70_001, 300_000)}
    received: dict[int, bytes] = {}

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = (await reader.readexactly(1))[0]
        answer = back[list(back)[number % len(back)]]
        sending = asyncio.ensure_future(send_in_pieces(writer, answer, random.Random(number)))
        received[number] = await reader.read()
        await sending
        writer.close()

    async def use(gateway: Gateway, port: int) -> None:
        rng = random.Random(seed)
        sent = {number: rng.randbytes(rng.choice([0, 1, 1000, 65_536, 250_000])) for number in range(24)}

        async def talk(number: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reading = asyncio.ensure_future(reader.read())
            writer.write(bytes([number]))
            await send_in_pieces(writer, sent[number], random.Random(seed * 100 + number))
            assert await reading == back[list(back)[number % len(back)]]
            writer.close()

        await asyncio.gather(*(talk(number) for number in sent))
        assert received == sent
        await until(lambda: gateway.stats()["open_connections"] == 0)
        stats = route_stats(gateway)
        forward = sum(1 + len(data) for data in sent.values())
        returned = sum(len(back[list(back)[number % len(back)]]) for number in sent)
        assert stats["forward"]["bytes_in"] == stats["forward"]["bytes_out"] == forward
        assert stats["back"]["bytes_in"] == stats["back"]["bytes_out"] == returned
        assert stats["forward"]["connections"] == len(sent)
        assert [entry["bytes_out"] for entry in gateway.stats()["line"]] == [forward, returned]

    with_gateway(spec, handler, use)


def test_a_half_closed_connection_still_carries_the_answer() -> None:
    async def use(gateway: Gateway, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"abc" * 100_000)
        writer.write_eof()
        assert await reader.read() == b"cba" * 100_000
        writer.close()

    with_gateway(FAST, reverse_when_ended, use)


@pytest.mark.parametrize("is_client_first", [True, False])
def test_a_reset_reaches_the_other_side_as_a_reset_and_both_are_forgotten(is_client_first: bool) -> None:
    def reset(writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    was_reset = asyncio.Event()

    async def see_reset(reader: asyncio.StreamReader) -> None:
        with pytest.raises(ConnectionError):
            await reader.read()
        was_reset.set()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(5) == b"hello"
        writer.write(b"world")
        if is_client_first:
            await see_reset(reader)
        else:
            await reader.readexactly(1)
            reset(writer)

    async def use(gateway: Gateway, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"world"
        if is_client_first:
            reset(writer)
            await was_reset.wait()
        else:
            writer.write(b"!")
            await see_reset(reader)
        await until(lambda: gateway.stats()["open_connections"] == 0)

    with_gateway(FAST, handler, use)


def test_a_target_that_is_not_there_resets_the_client_and_is_counted() -> None:
    async def main(clock: Clock) -> None:
        nobody = await asyncio.start_server(reverse_when_ended, "127.0.0.1", 0)
        port = nobody.sockets[0].getsockname()[1]
        nobody.close()
        await nobody.wait_closed()
        gateway = Gateway(FAST, [Route("a", "127.0.0.1", port)])
        ports = await gateway.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["a"])
        with pytest.raises(ConnectionError):
            writer.write(b"lost" * 10_000)
            assert await reader.read() == b""
            raise ConnectionResetError("an end of stream tells as much")
        writer.close()
        await until(lambda: gateway.stats()["open_connections"] == 0)
        assert route_stats(gateway)["forward"]["failed_connections"] == 1
        await gateway.close()

    run(main, is_virtual=False)


@pytest.mark.parametrize("spec", [FREE, FAST])
def test_a_receiver_that_does_not_read_stops_the_sender_and_loses_nothing(spec: LinkSpec) -> None:
    data = random.Random(7).randbytes(1 << 20) * 48
    may_read = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        received = bytearray()
        while block := await reader.read(1 << 20):
            received += block
        writer.write(b"same" if received == data else b"differs")
        writer.close()

    async def use(gateway: Gateway, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        seen = -1
        while seen != (seen := route_stats(gateway)["forward"]["bytes_in"]) or not seen:
            await asyncio.sleep(0.2)
        kernel_bytes = 16 << 20  # socket buffers on both sides of the gateway, at their largest
        assert seen < buffer_bytes(spec) + kernel_bytes < len(data)
        may_read.set()
        assert await reader.read() == b"same"
        writer.close()

    with_gateway(spec, handler, use)


def test_a_new_spec_holds_for_bytes_that_already_wait() -> None:
    slow = LinkSpec("line", rate_bps=8_000.0)  # 300 KB would take five minutes

    async def use(gateway: Gateway, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"ab" * 150_000)
        writer.write_eof()
        await until(lambda: route_stats(gateway)["forward"]["bytes_in"] > 0)
        gateway.set_spec(slow.unshaped())
        assert await reader.read() == b"ba" * 150_000
        writer.close()
        assert gateway.stats()["spec"]["rate_bps"] is None

    with_gateway(slow, reverse_when_ended, use)


def test_rates_begin_anew_with_a_new_spec_and_bytes_do_not() -> None:
    async def use(gateway: Gateway, port: int) -> None:
        async def talk() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x" * 100_000)
            writer.write_eof()
            assert len(await reader.read()) == 100_000
            writer.close()

        await talk()
        assert route_stats(gateway)["forward"]["realised_rate_bps"] > 0
        gateway.set_spec(FREE)
        assert route_stats(gateway)["forward"]["realised_rate_bps"] is None
        assert route_stats(gateway)["forward"]["chunks"] == 0
        gateway.set_spec(FAST)
        await talk()
        stats = route_stats(gateway)["forward"]
        assert stats["bytes_out"] == 200_000
        # By the model alone, so no machine is too slow for this: one flow gets its cap.
        assert stats["allowed_rate_bps"] <= FAST.flow_rate_bps * (1 + 1e-6)  # type: ignore[operator]
        assert stats["realised_rate_bps"] <= stats["allowed_rate_bps"]
        assert stats["delay_p50_s"] >= FAST.rtt_s / 2

    with_gateway(FAST, reverse_when_ended, use)


def test_chunks_are_short_in_time_and_buffers_hold_the_line() -> None:
    for rate_bps in (1e4, 1e6, 1e7, 1e9, 1e11):
        spec = LinkSpec("line", rate_bps=rate_bps, rtt_s=0.02)
        assert chunk_bytes(spec) * 8 / rate_bps <= 0.005 or chunk_bytes(spec) == 256
        assert chunk_bytes(spec) <= MAX_CHUNK_BYTES
        if rate_bps <= 1e9:
            assert buffer_bytes(spec) >= rate_bps / 8 * spec.rtt_s / 2
    assert chunk_bytes(LinkSpec("line", rate_bps=1e9, flow_rate_bps=1e6)) == chunk_bytes(LinkSpec("line", rate_bps=1e6))


def test_routes_of_one_name_are_refused() -> None:
    with pytest.raises(GatewayError, match="a, a"):
        Gateway(FREE, [Route("a", "127.0.0.1", 1), Route("a", "127.0.0.1", 2)])
