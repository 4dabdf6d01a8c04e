"""`python -m benchmarks.engine`: what this machine and this code can do. It compares nothing and decides nothing.

Prints prefill and decode speed of the kernels, MB/s of KV between two processes' ends of a connection, and the
engine's tokens/s end to end in real processes without pacing, with the machine's description.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

import numpy as np

from engines.base import GenerateRequest
from engines.clock import Clock, run
from engines.pdd.channel import Channels
from engines.pdd.config import EngineSpec, InstanceSpec, ModelSpec
from engines.pdd.engine import PddEngine
from engines.pdd.messages import KVFrame
from engines.wan.link import LinkSpec

FRAME_BYTES = 256 << 10
MODEL = ModelSpec()


class _Sink:
    def tokens(self, time_ns: int, token_ids: Sequence[int], source: str) -> None:
        """Drop them: the engine's own count is what is printed."""


async def transfer_mb_per_s(clock: Clock, total_bytes: int = 256 << 20) -> float:
    """MB/s of KV frames over loopback TCP between two `Channels` in one process (so sending and receiving share a
    core)."""
    done = asyncio.get_running_loop().create_future()
    received = 0

    def on_message(src: str, message: object, payload: np.ndarray[tuple[int], np.dtype[np.uint8]] | None) -> None:
        nonlocal received
        received += 0 if payload is None else payload.nbytes
        if received >= total_bytes and not done.done():
            done.set_result(None)

    receiver = Channels("md0", "secret", on_message, lambda peer, reason: None)
    sender = Channels("p0", "secret", on_message, lambda peer, reason: None)
    port = await receiver.listen()
    await sender.connect("md0", "127.0.0.1", port, lane=0)
    payload = np.zeros(FRAME_BYTES, dtype=np.uint8)
    start_ns = clock.now_ns()
    for index in range(total_bytes // FRAME_BYTES):
        sender.send("md0", KVFrame(r="r", start=index, stop=index + 1, nbytes=FRAME_BYTES, first_sent_ns=0), payload, 0)
        if index % 8 == 7:
            await asyncio.sleep(0)
    await done
    seconds = (clock.now_ns() - start_ns) / 1e9
    await sender.close()
    await receiver.close()
    return total_bytes / seconds / 1e6


async def engine_tokens_per_s(clock: Clock, policy: str, concurrency: int, num_requests: int) -> dict[str, float]:
    """Tokens/s end to end: `num_requests` prompts of 512 tokens and outputs of 64, `concurrency` at a time, no prefix
    shared."""
    free = LinkSpec(name="line")
    spec = EngineSpec(
        policy=policy,
        instances=(
            InstanceSpec("p0", "P", "a"),
            InstanceSpec("md0", "MD", "b", max_batch_seqs=64),
        )
        if policy != "colocated"
        else (InstanceSpec("m0", "MIXED", "a", max_batch_seqs=64),),
        line=free,
        local=free,
        model=MODEL,
        executor="unpaced",
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, MODEL.vocab_size, size=512).astype(np.int32) for _ in range(num_requests)]
    engine = PddEngine(spec, clock)
    await engine.start()
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> int:
        async with gate:
            completion = await engine.generate(GenerateRequest(f"r{index}", prompts[index], 64), _Sink())
            return completion.output_tokens

    try:
        start_ns = clock.now_ns()
        counts = await asyncio.gather(*(one(i) for i in range(num_requests)))
        seconds = (clock.now_ns() - start_ns) / 1e9
    finally:
        await engine.close()
    return {
        "output_tokens_per_s": sum(counts) / seconds,
        "prompt_tokens_per_s": 512 * num_requests / seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the tables")
    parser.add_argument("--requests", type=int, default=64, help="requests per end-to-end figure")
    args = parser.parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    from benchmarks import kernels

    figures = kernels.all_figures(MODEL)
    moved = run(transfer_mb_per_s, is_virtual=False)
    end_to_end = {}
    for policy in ("colocated", "cross_pd"):
        for concurrency in (1, 8, 32):
            end_to_end[policy, concurrency] = run(
                lambda clock, p=policy, c=concurrency: engine_tokens_per_s(clock, p, c, args.requests),  # type: ignore[misc]
                is_virtual=False,
            )
    if args.json:
        rows = [{"policy": p, "concurrency": c, **values} for (p, c), values in end_to_end.items()]
        print(json.dumps({"machine": kernels.machine_description(), "transfer_mb_per_s": moved, "end_to_end": rows}))
        return
    console = Console()
    console.print(kernels.table(figures, f"{MODEL.name}, {MODEL.dtype}: {kernels.machine_description()}"))
    console.print(f"KV frames over loopback TCP, both ends on one core: {moved:,.0f} MB/s")
    table = Table(title="end to end, real processes, not paced: prompts of 512 tokens, outputs of 64, no shared prefix")
    for column in ("policy", "concurrent", "output tok/s", "prompt tok/s"):
        table.add_column(column, justify="right")
    for (policy, concurrency), values in end_to_end.items():
        table.add_row(
            policy, str(concurrency), f"{values['output_tokens_per_s']:,.0f}", f"{values['prompt_tokens_per_s']:,.0f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
