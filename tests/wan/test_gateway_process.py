"""The gateway as a child: it starts, tells, obeys, and is never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineError, EngineStartError
from engines.clock import Clock, run
from engines.wan.link import LinkSpec
from engines.wan.process import GatewayProcess, Route

ROOT = Path(__file__).resolve().parents[2]
LINE = LinkSpec("line", rate_bps=1e8, rtt_s=0.002)
PARENT = """
import asyncio, sys
from engines.wan.process import GatewayProcess, Route
from engines.wan.link import LinkSpec

async def main():
    gateway = GatewayProcess()
    await gateway.start(LinkSpec("line"), [Route("a", "127.0.0.1", 9)])
    print(gateway.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def start_child(config: object) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "engines.wan.gateway"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert child.stdin is not None
    child.stdin.write(config if isinstance(config, str) else json.dumps(config))
    child.stdin.write("\n")
    child.stdin.flush()
    return child


def ports_of(child: subprocess.Popen[str]) -> dict[str, int]:
    assert child.stdout is not None
    answer = json.loads(child.stdout.readline())
    assert answer["ready"] is True
    ports: dict[str, int] = answer["ports"]
    return ports


def config(**changes: Any) -> dict[str, Any]:
    return {"spec": LINE.as_dict(), "routes": [{"name": "kv:md0", "host": "127.0.0.1", "port": 9}], **changes}


def with_process(use: Callable[[GatewayProcess, int], Awaitable[Any]], stats_path: Path | None = None) -> Any:
    """`use(gateway, port)` with one route to a target that sends back what it got."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(65_536):
            writer.write(block)
            await writer.drain()
        writer.close()

    async def main(clock: Clock) -> Any:
        target = await asyncio.start_server(echo, "127.0.0.1", 0)
        gateway = GatewayProcess()
        route = Route("kv:md0", "127.0.0.1", target.sockets[0].getsockname()[1])
        ports = await gateway.start(LINE, [route], stats_path)
        try:
            return await use(gateway, ports["kv:md0"])
        finally:
            await gateway.close()
            target.close()

    return run(main, is_virtual=False)


async def echoed(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def wait_gone(pid: int) -> None:
    """Returns when the process is gone, or a zombie of somebody else's; the test's time limit ends a wait in vain."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.02)


def test_the_rows_of_a_gateway_count_what_was_sent(tmp_path: Path) -> None:
    data = os.urandom(200_000)

    async def use(gateway: GatewayProcess, port: int) -> list[dict[str, object]]:
        assert await echoed(port, data) == data
        return await gateway.link_rows()

    forward, back = with_process(use, tmp_path / "gateway.jsonl")
    assert (forward["direction"], back["direction"]) == ("forward", "back")
    assert forward["bytes_total"] == back["bytes_total"] == forward["kv_bytes"] == len(data)
    assert back["kv_bytes"] == 0
    assert forward["configured_rate_bps"] == LINE.rate_bps
    assert set(forward) == {
        "link", "direction", "route", "bytes_total", "kv_bytes", "configured_rate_bps", "configured_flow_rate_bps",
        "realised_rate_bps", "delay_p50_ns", "delay_p95_ns", "late_share", "busy_ns",
    }  # fmt: skip
    last = json.loads((tmp_path / "gateway.jsonl").read_text().splitlines()[-1])
    assert [entry["bytes_out"] for entry in last["routes"]] == [len(data), len(data)]


def test_a_new_spec_is_obeyed_and_a_wrong_one_is_refused_by_key() -> None:
    async def use(gateway: GatewayProcess, port: int) -> None:
        await gateway.set_spec(LINE.unshaped())
        assert (await gateway.stats())["spec"] == LINE.unshaped().as_dict()
        with pytest.raises(EngineError, match=r"rate_mbps.*did you mean"):
            await gateway._ask(b'{"cmd":"set","spec":{"name":"x","rate_mbps":3}}', 5.0)
        with pytest.raises(EngineError, match="dance"):
            await gateway._ask(b'{"cmd":"dance"}', 5.0)
        assert await echoed(port, b"alive") == b"alive"

    with_process(use)


def test_a_question_that_was_cancelled_does_not_give_its_answer_to_the_next() -> None:
    async def use(gateway: GatewayProcess, port: int) -> None:
        for _ in range(3):
            asking = asyncio.ensure_future(gateway.stats())
            while not gateway._num_unread:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        assert await gateway._ask(b'{"cmd":"set","spec":{"name":"x"}}', 5.0) == {"ok": True}
        assert (await gateway.stats())["spec"]["name"] == "x"

    with_process(use)


def test_a_gateway_that_died_is_named_with_its_exit_code() -> None:
    async def use(gateway: GatewayProcess, port: int) -> None:
        assert gateway.pid is not None
        os.kill(gateway.pid, signal.SIGKILL)
        assert "exit code -9" in await gateway.wait_dead()
        with pytest.raises(EngineError, match="exit code -9"):
            await gateway.stats()

    with_process(use)


def test_it_ends_when_its_stdin_closes() -> None:
    child = start_child(config())
    port = ports_of(child)["kv:md0"]
    with socket.create_connection(("127.0.0.1", port)):
        _, stderr = child.communicate()
    assert child.returncode == 0
    assert "Traceback" not in stderr


def test_a_file_as_stdin_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()) + "\n")
    with path.open() as stdin:
        command = [sys.executable, "-m", "engines.wan.gateway"]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert "stdin" in done.stderr and done.stderr.count("\n") == 1


def test_it_ends_on_sigterm() -> None:
    child = start_child(config())
    ports_of(child)
    child.terminate()
    assert child.wait() == 0
    child.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's; elsewhere stdin closes")
def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment())
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_gone(pid)


def test_a_port_in_use_is_one_clear_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        route = {"name": "kv:md0", "host": "127.0.0.1", "port": 9, "listen_port": port}
        child = start_child(config(routes=[route]))
        _, stderr = child.communicate()
        assert child.returncode == 2
        assert stderr.count("\n") == 1
        assert "kv:md0" in stderr and f"port {port}" in stderr and "in use" in stderr

        async def main(clock: Clock) -> None:
            await GatewayProcess().start(LINE, [Route("kv:md0", "127.0.0.1", 9, port)])

        with pytest.raises(EngineStartError, match=f"kv:md0.*port {port}.*in use"):
            run(main, is_virtual=False)


@pytest.mark.parametrize(
    "line, words",
    [
        ("no json", "configuration"),
        (config(spec={"name": "line", "rate_bps": -1}), "rate_bps"),
        (config(spec={"name": "line", "rate_bpm": 1}), "rate_bpm.*did you mean rate_bps"),
        (config(colour="red"), "colour"),
        (config(stats_path="/no/such/folder/gateway.jsonl"), "/no/such/folder"),
    ],
)
def test_a_wrong_configuration_is_one_clear_line_and_exit_code_2(line: object, words: str) -> None:
    child = start_child(line)
    stdout, stderr = child.communicate()
    assert (child.returncode, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert re.search(words, stderr)
