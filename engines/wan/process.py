"""The gateway as a child process, as the engine uses it: start, ask, set, stop. It never touches the bytes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engines.base import EngineError, EngineStartError
from engines.child import child_environment
from engines.wan.gateway import GatewayConfig, Route
from engines.wan.link import LinkSpec

__all__ = ["GatewayProcess", "Route"]

START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0


class GatewayProcess:
    """One gateway. After `start`, `stats`, `link_rows` and `set_spec` raise EngineError once the child is dead."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._last_words: deque[str] = deque(maxlen=20)
        self._stderr_reader: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._num_unread = 0  # answers on their way; more than one after a question that was cancelled or timed out

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, spec: LinkSpec, routes: Sequence[Route], stats_path: Path | None = None) -> dict[str, int]:
        """Route name -> port to connect to. Raises EngineStartError with the child's own words."""
        config = GatewayConfig(spec.as_dict(), tuple(routes), None if stats_path is None else str(stats_path))
        # A session of its own: Ctrl-C is the harness's to handle, and it still needs the line to end what runs.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engines.wan.gateway",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=child_environment(), start_new_session=True, limit=2**20,
        )  # fmt: skip
        self._stderr_reader = asyncio.create_task(self._read_stderr(self._process))
        try:
            ready = await self._ask(msgspec.json.encode(config), START_TIMEOUT_S)
        except EngineError as error:
            await self.close()
            raise EngineStartError(str(error)) from None
        ports: dict[str, int] = ready["ports"]
        return ports

    async def stats(self) -> dict[str, Any]:
        """See `Gateway.stats`."""
        return await self._ask(b'{"cmd":"stats"}', ANSWER_TIMEOUT_S)

    async def set_spec(self, spec: LinkSpec) -> None:
        """Another line from now on; returns when it holds."""
        await self._ask(msgspec.json.encode({"cmd": "set", "spec": spec.as_dict()}), ANSWER_TIMEOUT_S)

    async def link_rows(self) -> list[dict[str, object]]:
        """Rows of the `links` table, one a route and direction. Bytes and busy time count since the start, the rest
        since the last `set_spec`."""
        stats = await self.stats()
        return [
            {
                "link": stats["spec"]["name"],
                "direction": entry["direction"],
                "route": entry["route"],
                "bytes_total": entry["bytes_out"],
                # What comes back on a KV route only acknowledges.
                "kv_bytes": entry["bytes_out"] if (entry["route"][:3], entry["direction"]) == ("kv:", "forward") else 0,
                "configured_rate_bps": stats["spec"]["rate_bps"],
                "configured_flow_rate_bps": stats["spec"]["flow_rate_bps"],
                "realised_rate_bps": entry["realised_rate_bps"],
                "delay_p50_ns": _ns(entry["delay_p50_s"]),
                "delay_p95_ns": _ns(entry["delay_p95_s"]),
                "late_share": entry["late_share"],
                "busy_ns": _ns(entry["busy_s"]),
            }
            for entry in stats["routes"]
        ]

    async def wait_dead(self) -> str:
        """Returns when the child has ended, with what there is to say of it."""
        assert self._process is not None
        code = await self._process.wait()
        if self._stderr_reader is not None:
            await asyncio.wait([self._stderr_reader], timeout=1.0)
        said = self._last_words[-1] if self._last_words else "no message"
        return f"the gateway ended with exit code {code}: {said.removeprefix('gateway: ')}"

    async def close(self) -> None:
        """End the child; safe to call twice, and before `start`."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._stderr_reader is not None:
            await asyncio.wait([self._stderr_reader], timeout=1.0)

    async def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """One line there, one line back. Raises EngineError when the child is dead, silent, or reports an error."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EngineError("the gateway was not started")
        async with self._asking:
            try:
                process.stdin.write(line + b"\n")
                self._num_unread += 1
                await process.stdin.drain()
                raw = await asyncio.wait_for(self._read_answer(process.stdout), timeout_s)
            except TimeoutError:
                raise EngineError(f"the gateway did not answer within {timeout_s:g} s") from None
            except (ConnectionError, RuntimeError):
                raw = b""  # its stdin is closed: it is dead or dying
        if not raw:
            raise EngineError(await self.wait_dead())
        answer: dict[str, Any] = json.loads(raw)
        if "error" in answer:
            raise EngineError(f"gateway: {answer['error']}")
        return answer

    async def _read_answer(self, stdout: asyncio.StreamReader) -> bytes:
        """The answer to the last question; what earlier ones left unread is passed over."""
        while line := await stdout.readline():
            self._num_unread -= 1
            if not self._num_unread:
                break
        return line

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_words.append(text)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
