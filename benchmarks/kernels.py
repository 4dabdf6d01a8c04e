"""Speed of the executor on this machine: prefill, decode, KV in and out, and slots against gathering.

`python -m benchmarks.kernels [--dtype float32]` prints a table in under half a minute. It holds the attention
over gathered pages that the executor does not use, so that the choice stays measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engines.pdd.config import ModelSpec, StepTiming
from engines.pdd.executor.base import BatchItem, KVBytes
from engines.pdd.executor.torch_executor import TorchExecutor
from engines.pdd.model.llama import Llama
from engines.pdd.model.weights import random_weights

PAGE_SIZE = 16
CHUNK_TOKENS = 256
EVEN_BATCHES = ((1, 1024), (8, 1024), (8, 2048), (32, 2048))  # (sequences, context)
RAGGED_BATCHES = ((8, 2048), (32, 2048))  # contexts spread evenly over the upper half


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value (a median), and the case that it holds for."""

    what: str
    case: str
    value: float
    unit: str


def machine_description() -> str:
    """Processor, cores and library versions, for the head of a table."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cpu}, {os.cpu_count()} cores, {gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}"
    )


def median_s(call: Callable[[int], object], repeats: int) -> float:
    """Median duration in seconds of call(0), call(1), ...; the first two warm up and do not count."""
    durations_s = []
    for index in range(repeats + 2):
        start_s = time.perf_counter()
        call(index)
        durations_s.append(time.perf_counter() - start_s)
    return statistics.median(durations_s[2:])


def make_executor(spec: ModelSpec, num_positions: int, max_seqs: int) -> TorchExecutor:
    """An executor whose pool holds `num_positions` tokens."""
    return TorchExecutor(spec, -(-num_positions // PAGE_SIZE), PAGE_SIZE, max_seqs, StepTiming())


def random_kv(spec: ModelSpec, num_tokens: int) -> KVBytes:
    """Bytes as another executor would send them: standard normal keys and values."""
    shape = (spec.num_layers, 2, num_tokens, spec.num_kv_heads, spec.head_dim)
    kv = torch.randn(shape, dtype=random_weights(spec)["model.norm.weight"].dtype)
    flat: KVBytes = kv.view(torch.uint8).numpy().reshape(-1)
    return flat


def prefill_s(spec: ModelSpec, context: int, repeats: int = 6) -> float:
    """Seconds for one chunk of CHUNK_TOKENS after a radix hit of `context` tokens: each time a new request, so the copy
    of the hit's pages into its slot counts."""
    num_positions = context + CHUNK_TOKENS
    executor = make_executor(spec, num_positions, max_seqs=1)
    pages = range(-(-num_positions // PAGE_SIZE))
    executor.write_kv(pages, 0, context, random_kv(spec, context))
    chunk = [token % spec.vocab_size for token in range(CHUNK_TOKENS)]

    def step(index: int) -> None:
        executor.run([BatchItem(str(index), chunk, context, pages, is_sampled=True)])

    return median_s(step, repeats)


def prefill(spec: ModelSpec, contexts: Sequence[int]) -> list[Figure]:
    """Prefill tokens/s by context."""
    return [
        Figure(
            "prefill",
            f"chunk {CHUNK_TOKENS} after {context}",
            CHUNK_TOKENS / prefill_s(spec, context),
            "tok/s",
        )
        for context in contexts
    ]


def decode_s(spec: ModelSpec, contexts: Sequence[int], repeats: int = 12) -> float:
    """Seconds the executor takes to decode one token of each sequence over slots, sampling included."""
    pages_each = -(-(max(contexts) + repeats + 2) // PAGE_SIZE)
    executor = make_executor(spec, len(contexts) * pages_each * PAGE_SIZE, len(contexts))
    tables = [range(i * pages_each, (i + 1) * pages_each) for i in range(len(contexts))]
    for pages, context in zip(tables, contexts, strict=True):
        executor.write_kv(pages, 0, context, random_kv(spec, context))

    def step(index: int) -> None:
        executor.run(
            [
                BatchItem(str(i), [i], context + index, pages, is_sampled=True)
                for i, (pages, context) in enumerate(zip(tables, contexts, strict=True))
            ]
        )

    return median_s(step, repeats)


@torch.inference_mode()
def gather_decode_s(spec: ModelSpec, contexts: Sequence[int], repeats: int = 6) -> float:
    """Seconds the same step takes without slots: each layer gathers the batch's pages, padded to the longest, and
    attends to the copy, under a mask where lengths differ."""
    batch, longest = len(contexts), max(contexts)
    model = Llama(random_weights(spec), spec, torch.device("cpu"))
    pages_each = -(-(longest + 1) // PAGE_SIZE)
    shape = (spec.num_layers, 2, batch * pages_each, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    pool = torch.randn(shape, dtype=model.dtype)
    tables = torch.randperm(batch * pages_each).view(batch, pages_each)
    positions = torch.tensor(contexts)
    last_page = tables[torch.arange(batch), positions // PAGE_SIZE]
    is_held = torch.arange(longest + 1)[None, :] <= positions[:, None]
    mask = torch.zeros(is_held.shape, dtype=model.dtype).masked_fill(~is_held, -torch.inf)
    used_mask = None if min(contexts) == longest else mask[:, None, None, :]

    def attend(layer: int, queries: Tensor, new_kv: Tensor) -> Tensor:
        pool[layer, :, last_page, positions % PAGE_SIZE] = new_kv.transpose(0, 1)
        gathered = pool[layer].index_select(1, tables.view(-1))
        rows = gathered.view(2, batch, pages_each * PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        keys, values = rows[:, :, : longest + 1].transpose(2, 3)
        folded = queries.view(batch, spec.num_kv_heads, -1, spec.head_dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, used_mask)
        return attended.reshape(batch, -1, spec.head_dim)

    def step(index: int) -> None:
        model.logits(model.forward(torch.arange(batch), positions, attend)).argmax(-1)

    return median_s(step, repeats)


def decode(spec: ModelSpec, cases: Sequence[tuple[str, Sequence[int]]]) -> list[Figure]:
    """Decode by named batch of contexts: tokens/s and ms a step over slots, ms a step over pages gathered each time."""
    figures = []
    for case, contexts in cases:
        slots_s, gather_s = decode_s(spec, contexts), gather_decode_s(spec, contexts)
        figures += [
            Figure("decode", case, len(contexts) / slots_s, "tok/s"),
            Figure("decode step, slots", case, slots_s * 1e3, "ms"),
            Figure("decode step, gathered", case, gather_s * 1e3, "ms"),
            Figure("gathered / slots", case, gather_s / slots_s, "times"),
        ]
    return figures


def transfer(spec: ModelSpec, num_tokens: int, repeats: int = 20) -> list[Figure]:
    """MB/s of read_kv and write_kv over `num_tokens` positions on shuffled pages, not page-aligned."""
    executor = make_executor(spec, 65_536, max_seqs=1)
    pages = np.random.default_rng(0).permutation(65_536 // PAGE_SIZE).tolist()
    payload = random_kv(spec, num_tokens)
    num_mb = payload.nbytes / 1e6
    window = 65_536 - num_tokens - 3

    def write(index: int) -> None:
        start = 3 + index * num_tokens % window
        executor.write_kv(pages, start, start + num_tokens, payload)

    def read(index: int) -> None:
        start = 3 + index * num_tokens % window
        executor.read_kv(pages, start, start + num_tokens)

    case = f"{num_tokens} tokens, {num_mb:.2f} MB"
    return [
        Figure("write_kv", case, num_mb / median_s(write, repeats), "MB/s"),
        Figure("read_kv", case, num_mb / median_s(read, repeats), "MB/s"),
    ]


def all_figures(spec: ModelSpec) -> list[Figure]:
    """Every figure of this file for one model."""
    cases = [(f"{batch} x {context}", [context] * batch) for batch, context in EVEN_BATCHES]
    for batch, context in RAGGED_BATCHES:
        contexts = [context // 2 + context * i // (2 * batch) for i in range(1, batch + 1)]
        cases.append((f"{batch} x {context // 2}..{context}", contexts))
    return [
        *prefill(spec, (0, 2048, 8192)),
        *decode(spec, cases),
        *transfer(spec, 128),
        *transfer(spec, 2048),
    ]


def table(figures: Sequence[Figure], title: str) -> Table:
    """The figures as rows."""
    rows = Table("what", "case", "median", "unit", title=title, title_justify="left")
    for figure in figures:
        digits = 0 if figure.value >= 1000 else 2
        rows.add_row(figure.what, figure.case, f"{figure.value:,.{digits}f}", figure.unit)
    return rows


def main() -> None:
    """Measure on one thread, as workers run, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = replace(ModelSpec(), dtype=arguments.dtype)
    figures = all_figures(spec)
    Console().print(machine_description(), table(figures, f"{spec.name}, {spec.dtype}"))


if __name__ == "__main__":
    main()
