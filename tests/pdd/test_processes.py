"""The same engine in real processes: right tokens over real sockets, and nobody left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.base import Completion, EngineStartError, GenerateRequest, RequestFailed
from engines.clock import Clock, run
from engines.pdd.channel import Channels, Hello
from engines.pdd.check import TOY, Collected, plain_choices
from engines.pdd.config import DeciderSpec, EngineSpec, InstanceSpec, StepTiming
from engines.pdd.engine import PddEngine
from engines.pdd.messages import AskStats
from engines.wan.link import LinkSpec

TIMING = StepTiming(base_s=0.0, prefill_token_s=1e-5, weights_s=0.004)
LINE = LinkSpec(name="line", rate_bps=8e6, rtt_s=0.002, flow_rate_bps=2e6, lanes=4)


def spec(policy: str) -> EngineSpec:
    instances = tuple(
        InstanceSpec(name, role, site, num_pages=400, prefill_chunk_tokens=16, timing=TIMING)  # type: ignore[arg-type]
        for name, role, site in (("p0", "P", "a"), ("rld0", "RLD", "a"), ("md0", "MD", "b"))
    )
    return EngineSpec(
        policy=policy,
        instances=instances,
        line=LINE,
        local=LinkSpec(name="local", lanes=2),
        model=TOY,
        decider=DeciderSpec(relay_threshold_s=0.02),
        page_size=4,
        worker_nice=0,
    )


def with_engine(engine_spec: EngineSpec, use: Callable[[PddEngine, Clock], Awaitable[Any]], run_dir: Path) -> Any:
    async def main(clock: Clock) -> Any:
        engine = PddEngine(engine_spec, clock, run_dir)
        await engine.start()
        try:
            return await use(engine, clock)
        finally:
            await engine.close()

    return run(main, is_virtual=False)


def workload() -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    root = rng.integers(8, TOY.vocab_size, size=24).astype(np.int32)
    prompts = [root, root, root[:23]]
    prompts += [
        np.concatenate([root, rng.integers(8, TOY.vocab_size, size=n).astype(np.int32)]) for n in (1, 3, 4, 5, 40)
    ]
    prompts += [rng.integers(8, TOY.vocab_size, size=n).astype(np.int32) for n in (1, 4, 63, 64, 65)]
    return [GenerateRequest(f"r{i}", prompt, 5 + 7 * (i % 4)) for i, prompt in enumerate(prompts)]


async def serve_all(engine: PddEngine, clock: Clock) -> list[Completion]:
    streams = [Collected() for _ in workload()]
    completions = await asyncio.gather(
        *(engine.generate(request, stream) for request, stream in zip(workload(), streams, strict=True))
    )
    for request, stream in zip(workload(), streams, strict=True):
        choices = plain_choices(request.prompt.tobytes(), tuple(stream.ids[:-1]))
        assert stream.ids == list(choices)[len(request.prompt) - 1 :]
        assert len(stream.ids) == request.max_tokens
    return list(completions)


@pytest.mark.parametrize("policy", ["colocated", "pd", "cross_pd", "pdd"])
def test_real_processes_give_the_tokens_of_the_model_run_plainly(policy: str, tmp_path: Path) -> None:
    completions = with_engine(spec(policy), serve_all, tmp_path)
    pipelines = {completion.pipeline for completion in completions}
    assert pipelines <= {"mixed", "p-md", "p-rld-md"}
    if policy == "pdd":
        assert "p-rld-md" in pipelines


def test_the_gateway_counts_the_kv_bytes_that_were_planned(tmp_path: Path) -> None:
    async def use(engine: PddEngine, clock: Clock) -> tuple[int, int, list[Any]]:
        completions = await serve_all(engine, clock)
        report = await engine.report()
        kv_bytes = sum(int(row["kv_bytes"]) for row in report.links if row["direction"] == "forward")
        planned = sum(completion.planned_bytes_by_link["line"] for completion in completions)
        counted = sum(completion.bytes_by_link["line"] for completion in completions)
        return planned, counted, [kv_bytes]

    planned, counted, (kv_bytes,) = with_engine(spec("cross_pd"), use, tmp_path)
    assert planned == counted
    assert planned < kv_bytes < planned * 1.2  # headers of tiny toy frames; the default run is held to 1%


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_worker_fails_its_requests_by_name_and_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []

    async def use(engine: PddEngine, clock: Clock) -> str:
        report = await engine.report()
        pids.extend(int(row["pid"]) for row in report.instances)  # type: ignore[call-overload]
        victim = next(int(row["pid"]) for row in report.instances if row["role"] == "MD")  # type: ignore[call-overload]
        request = GenerateRequest("long", np.arange(10, 60, dtype=np.int32), 400)
        task = asyncio.ensure_future(engine.generate(request, Collected()))
        await clock.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            await task
        return str(caught.value)

    assert "md0" in with_engine(spec("pdd"), use, tmp_path)
    assert not any(_is_alive(pid) for pid in pids)


def test_a_worker_that_dies_at_start_is_one_clear_message(tmp_path: Path) -> None:
    broken = replace(spec("cross_pd"), device="no-such-device")

    async def use(engine: PddEngine, clock: Clock) -> None:
        raise AssertionError("the engine must not start")

    with pytest.raises(EngineStartError, match=r"worker (p0|md0).*no-such-device"):
        with_engine(broken, use, tmp_path)


def test_a_port_in_use_is_one_clear_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def main(clock: Clock) -> None:
            engine = PddEngine(replace(spec("cross_pd"), base_port=port), clock, tmp_path)
            await engine.start()

        with pytest.raises(EngineStartError, match=f"port {port}"):
            run(main, is_virtual=False)


def test_strangers_and_broken_frames_are_refused_and_counted_and_the_process_lives() -> None:
    import msgspec

    async def main(clock: Clock) -> tuple[int, list[Any]]:
        heard: list[Any] = []
        channels = Channels("md0", "right", lambda src, message, payload: heard.append((src, message)), lambda *_: None)
        port = await channels.listen()

        async def knock(raw: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            try:
                return await asyncio.wait_for(reader.read(), 5.0)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        def frame(body: bytes) -> bytes:
            return struct.pack("<II", len(body), 0) + body

        hello = msgspec.msgpack.encode(Hello("wrong", "p0"))
        good = msgspec.msgpack.encode(Hello("right", "p1"))
        for raw in (
            frame(hello),
            frame(b"\xc1garbage"),
            struct.pack("<II", 1 << 31, 0),
            struct.pack("<II", 0, 0),
            frame(good) + frame(b"\x80"),
        ):
            assert await knock(raw) == b""
        friend = Channels("p0", "right", lambda *_: None, lambda *_: None)
        await friend.connect("md0", "127.0.0.1", port)
        friend.send("md0", AskStats(3))
        while not heard:
            await clock.sleep(0.01)
        await friend.close()
        await channels.close()
        return channels.num_refused, heard

    refused, heard = run(main, is_virtual=False)
    assert refused == 5
    assert heard == [("p0", AskStats(3))]
