"""The executors: batching, chunking, paging and moving KV never change a token."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.pdd.config import ModelSpec, StepTiming
from engines.pdd.executor.base import BatchItem, Executor
from engines.pdd.executor.roofline import RooflineExecutor, step_duration_s
from engines.pdd.executor.torch_executor import TorchExecutor
from engines.pdd.model.llama import plain_generate
from engines.pdd.model.weights import random_weights

PAGE = 4
TOY = ModelSpec(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    head_dim=8,
    intermediate_size=48,
    max_context=256,
    dtype="float64",
)
WEIGHTS = random_weights(TOY)


def make_executor(num_pages: int = 256, max_seqs: int = 8, spec: ModelSpec = TOY) -> TorchExecutor:
    return TorchExecutor(spec, num_pages, PAGE, max_seqs, StepTiming(), device="cpu")


@dataclass
class Driven:
    """A request as a scheduler would drive it: `tokens` holds prompt and output, KV exists for [0, done)."""

    request_id: str
    tokens: list[int]
    num_output: int
    pages: list[int]
    temperature: float = 0.0
    seed: int = 0
    done: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        return len(self.output) == self.num_output

    def item(self, num_tokens: int) -> BatchItem:
        stop = min(self.done + num_tokens, len(self.tokens))
        return BatchItem(
            self.request_id,
            self.tokens[self.done : stop],
            self.done,
            self.pages,
            is_sampled=stop == len(self.tokens),
            temperature=self.temperature,
            seed=self.seed,
        )

    def take(self, item: BatchItem, token: int | None) -> None:
        assert (token is None) is not item.is_sampled
        self.done += item.num_tokens
        if token is not None:
            self.tokens.append(token)


def sequence(rng: random.Random, name: str, length: int, num_output: int, free: list[int]) -> Driven:
    prompt = [rng.randrange(TOY.vocab_size) for _ in range(length)]
    pages = [free.pop() for _ in range(-(-(length + num_output) // PAGE))]
    return Driven(name, prompt, num_output, pages)


def shuffled_pages(rng: random.Random, num_pages: int = 256) -> list[int]:
    return rng.sample(range(num_pages), num_pages)


def drive(executor: Executor, live: Sequence[Driven], chunk: int = 1_000) -> None:
    while unfinished := [one for one in live if not one.is_finished]:
        items = [one.item(chunk) for one in unfinished]
        for one, item, token in zip(unfinished, items, executor.run(items), strict=True):
            one.take(item, token)


def plain(one: Driven) -> list[int]:
    prompt = one.tokens[: one.num_prompt]
    return plain_generate(WEIGHTS, TOY, prompt, one.num_output, one.temperature, one.seed)


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 127, 129])
def test_output_is_the_plain_models_at_page_and_slot_edges(length: int) -> None:
    rng = random.Random(length)
    one = sequence(rng, "r", length, num_output=6, free=shuffled_pages(rng))
    drive(make_executor(), [one])
    assert one.output == plain(one)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_chunks_batches_and_lost_slots_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    free = shuffled_pages(rng)
    executor = make_executor(max_seqs=3)
    waiting = [sequence(rng, f"r{i}", rng.randint(1, 40), rng.randint(1, 8), free) for i in range(6)]
    for one in waiting[:2]:
        one.temperature, one.seed = 0.8, rng.randrange(2**64)
    sequences = list(waiting)
    while waiting:
        chosen = rng.sample(waiting, min(len(waiting), rng.randint(1, 3)))
        items = [one.item(rng.choice([1, 2, 5, 16, 64])) for one in chosen]
        for one, item, token in zip(chosen, items, executor.run(items), strict=True):
            one.take(item, token)
        if rng.random() < 0.2:
            executor.release(rng.choice(sequences).request_id)
        waiting = [one for one in waiting if not one.is_finished]
    assert [one.output for one in sequences] == [plain(one) for one in sequences]


@pytest.mark.parametrize("length", [15, 16, 17, 300])
def test_the_default_model_in_float64_gives_the_plain_models_tokens(length: int) -> None:
    spec = ModelSpec(dtype="float64")
    rng = random.Random(length)
    prompt = [rng.randrange(spec.vocab_size) for _ in range(length)]
    one = Driven("r", list(prompt), 6, list(range(20)))
    drive(TorchExecutor(spec, 20, 16, 1, StepTiming(), device="cpu"), [one], chunk=100)
    assert one.output == plain_generate(random_weights(spec), spec, prompt, 6)


def test_float32_agrees_with_the_plain_model_in_float32() -> None:
    spec = replace(TOY, dtype="float32")
    rng = random.Random(4)
    one = sequence(rng, "r", 37, num_output=12, free=shuffled_pages(rng))
    drive(make_executor(spec=spec), [one], chunk=9)
    expected = plain_generate(random_weights(spec), spec, one.tokens[:37], 12)
    assert one.output == expected


def test_bfloat16_runs_and_moves_its_kv() -> None:
    spec = replace(TOY, dtype="bfloat16")
    rng = random.Random(4)
    one = sequence(rng, "r", 37, num_output=4, free=shuffled_pages(rng))
    executor = make_executor(spec=spec)
    drive(executor, [one], chunk=9)
    payload = executor.read_kv(one.pages, 0, 40)
    assert payload.nbytes == 40 * spec.kv_bytes_per_token
    executor.write_kv(one.pages, 0, 40, payload)
    assert np.array_equal(executor.read_kv(one.pages, 0, 40), payload)


def test_an_extend_of_known_tokens_continues_as_if_decoded() -> None:
    rng = random.Random(1)
    free = shuffled_pages(rng)
    source = sequence(rng, "r", 21, num_output=12, free=free)
    drive(make_executor(), [source])
    taker = make_executor()
    handed = Driven("r", source.tokens[:21], 12, source.pages)
    taker.run([replace(handed.item(21), is_sampled=False)])
    handed.done = 21
    handed.tokens += source.output[:5]  # the log: five tokens that another instance decoded
    drive(taker, [handed])
    assert handed.output == source.output


def test_two_requests_share_the_pages_of_a_prefix() -> None:
    rng = random.Random(2)
    free = shuffled_pages(rng)
    executor = make_executor()
    first = sequence(rng, "a", 5 * PAGE, num_output=6, free=free)
    drive(executor, [first])
    prefix = first.tokens[: 5 * PAGE]
    tail = [rng.randrange(TOY.vocab_size) for _ in range(3)]
    pages = [*first.pages[:5], *(free.pop() for _ in range(4))]
    second = Driven("b", prefix + tail, 6, pages, done=5 * PAGE)
    third = Driven("c", list(prefix), 6, [*first.pages[:4], *(free.pop() for _ in range(4))])
    third.done = 4 * PAGE  # a full hit leaves the last page to run again
    drive(executor, [second, third])
    assert second.output == plain(second)
    assert third.output == first.output == plain(first)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_kv_sent_to_another_executor_continues_identically(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(2, 60)
    source = sequence(rng, "r", length, num_output=5, free=shuffled_pages(rng))
    sender, taker = make_executor(), make_executor()
    drive(sender, [source], chunk=rng.randint(1, 32))
    moved = sequence(rng, "r", length, num_output=5, free=shuffled_pages(rng))
    moved.tokens = source.tokens[:length]
    moved.done = rng.randint(1, length - 1)
    cuts = sorted({0, moved.done, *(rng.randint(0, moved.done) for _ in range(3))})
    frames = list(itertools.pairwise(cuts))
    for start, stop in rng.sample(frames, len(frames)):
        payload = sender.read_kv(source.pages, start, stop).tobytes()
        # Received bytes are read-only.
        taker.write_kv(moved.pages, start, stop, np.frombuffer(payload, dtype=np.uint8))
    drive(taker, [moved])
    assert moved.output == source.output


def test_kv_bytes_are_layer_kv_token_head_major() -> None:
    rng = random.Random(3)
    one = sequence(rng, "r", 11, num_output=1, free=shuffled_pages(rng))
    executor = make_executor()
    drive(executor, [one])
    shape = (TOY.num_layers, 2, -1, TOY.num_kv_heads, TOY.head_dim)
    whole = executor.read_kv(one.pages, 0, 11).view(np.float64).reshape(shape)
    part = executor.read_kv(one.pages, 3, 9).view(np.float64).reshape(shape)
    assert np.array_equal(whole[:, :, 3:9], part)
    embedded = WEIGHTS["model.embed_tokens.weight"][one.tokens[:11]]
    normed = torch.nn.functional.rms_norm(embedded, (TOY.hidden_size,), eps=TOY.rms_eps)
    values = normed @ WEIGHTS["model.layers.0.self_attn.v_proj.weight"].T
    assert np.allclose(whole[0, 1], values.numpy().reshape(11, TOY.num_kv_heads, TOY.head_dim))


def test_read_kv_is_a_copy() -> None:
    executor = make_executor()
    one = sequence(random.Random(5), "r", 8, num_output=1, free=list(range(8)))
    drive(executor, [one])
    executor.read_kv(one.pages, 0, 8)[:] = 0
    assert executor.read_kv(one.pages, 0, 8).any()


def test_a_request_that_starts_elsewhere_takes_its_history_from_its_pages() -> None:
    rng = random.Random(8)
    free = shuffled_pages(rng)
    executor = make_executor()
    other = sequence(rng, "other", 12, num_output=1, free=free)
    drive(executor, [other, sequence(rng, "r", 30, num_output=1, free=free)])
    tail = [rng.randrange(TOY.vocab_size) for _ in range(5)]
    again = Driven("r", other.tokens[:8] + tail, 6, [*other.pages[:2], *free[:4]], done=8)
    drive(executor, [again])
    assert again.output == plain(again)


def test_kv_moves_beside_a_running_step() -> None:
    rng = random.Random(7)
    free = shuffled_pages(rng)
    one, mine = sequence(rng, "r", 30, num_output=40, free=free), free[:16]
    executor = make_executor()
    payload = np.arange(16 * PAGE * TOY.kv_bytes_per_token).astype(np.uint8)
    with ThreadPoolExecutor(max_workers=1) as pool:
        step = pool.submit(drive, executor, [one])
        while not step.done():
            executor.write_kv(mine, 0, 16 * PAGE, payload)
            assert np.array_equal(executor.read_kv(mine, 0, 16 * PAGE), payload)
        step.result()
    assert one.output == plain(one)


def test_slots_stay_within_the_pools_size() -> None:
    executor = make_executor(num_pages=64, max_seqs=8)  # 256 positions: two slots of 128
    rng = random.Random(6)
    free = shuffled_pages(rng, 64)
    live = [sequence(rng, f"r{i}", 20, num_output=4, free=free) for i in range(8)]
    for one in live:
        drive(executor, [one])
        assert executor.slot_bytes <= executor.pool_bytes
    assert [one.output for one in live] == [plain(one) for one in live]


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_pages"),
    [(0, 9, 2), (8, 1, 2), (0, 0, 2), (-1, 2, 2), (255, 2, 70)],
)
def test_positions_that_do_not_fit_are_refused(start: int, num_tokens: int, num_pages: int) -> None:
    item = BatchItem("r", [1] * num_tokens, start, range(num_pages), is_sampled=True)
    with pytest.raises(ValueError, match="request r: positions"):
        make_executor().run([item])


def test_a_request_twice_or_too_many_requests_are_refused() -> None:
    items = [BatchItem(name, [1], 0, [page], True) for page, name in enumerate("aab")]
    with pytest.raises(ValueError, match="twice"):
        make_executor().run(items)
    with pytest.raises(ValueError, match="max_seqs"):
        make_executor(max_seqs=2).run(items)


def test_kv_of_the_wrong_size_or_beyond_the_table_is_refused() -> None:
    executor = make_executor()
    with pytest.raises(ValueError, match="takes"):
        executor.write_kv([0], 0, 2, np.zeros(3, dtype=np.uint8))
    with pytest.raises(ValueError, match="takes"):
        executor.write_kv([0], 0, 2, None)
    with pytest.raises(ValueError, match="outside"):
        executor.read_kv([0], 0, PAGE + 1)


TIMING = StepTiming(base_s=0.001, prefill_token_s=1e-4, attention_s=1e-8, weights_s=0.01, kv_read_s=1e-6)


def item(start: int, num_tokens: int) -> BatchItem:
    return BatchItem(f"{start}-{num_tokens}", [0] * num_tokens, start, [], is_sampled=True)


def test_duration_is_the_larger_of_compute_and_memory() -> None:
    chunk, extend, decode = item(100, 200), item(100, 20), item(1000, 1)
    compute_s = 200 * 1e-4 + 1e-8 * 200 * 200
    assert step_duration_s(TIMING, [chunk]) == pytest.approx(0.001 + compute_s)
    assert step_duration_s(TIMING, [decode]) == pytest.approx(0.001 + 0.01 + 0.001)
    assert step_duration_s(TIMING, [extend, decode]) == pytest.approx(0.001 + 0.011)
    assert step_duration_s(TIMING, []) == 0.0


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 500)), min_size=1, max_size=6))
def test_duration_grows_with_items_tokens_and_context(shapes: list[tuple[int, int]]) -> None:
    items = [item(*shape) for shape in shapes]
    whole_s = step_duration_s(TIMING, items)
    assert whole_s >= step_duration_s(TIMING, items[1:])
    start, num_tokens = shapes[0]
    assert step_duration_s(TIMING, [item(start + 9, num_tokens), *items[1:]]) >= whole_s
    if num_tokens > 1:
        assert step_duration_s(TIMING, [item(start, num_tokens + 1), *items[1:]]) >= whole_s


def test_both_executors_tell_the_same_time() -> None:
    torch_executor = TorchExecutor(TOY, 8, PAGE, 2, TIMING, device="cpu")
    items = [item(3, 5), item(9, 1)]
    roofline_s = RooflineExecutor(TIMING, TOY.vocab_size).duration_s(items)
    assert torch_executor.duration_s(items) == roofline_s == step_duration_s(TIMING, items)


def test_roofline_tokens_depend_on_request_and_position_alone() -> None:
    one, other = RooflineExecutor(TIMING, 96), RooflineExecutor(StepTiming(), 96)
    chunked = one.run([item(0, 10)])
    tokens = [one.run([BatchItem("r", [0], start, [], True)])[0] for start in range(200)]
    assert chunked != [None]
    assert tokens == [other.run([BatchItem("r", [5], start, [1], True)])[0] for start in range(200)]
    assert one.run([BatchItem("r", [0] * 4, 6, [], True)]) == [tokens[9]]
    assert one.run([BatchItem("r", [0], 0, [], False)]) == [None]
    assert all(token is not None and 8 <= token < 96 for token in tokens)
    assert len(set(tokens)) > 60


def test_roofline_moves_no_bytes() -> None:
    executor = RooflineExecutor(TIMING, 96)
    assert executor.read_kv([0], 0, 4) is None
    executor.write_kv([0], 0, 4, None)
    with pytest.raises(ValueError, match="no model"):
        executor.write_kv([0], 0, 4, np.zeros(8, dtype=np.uint8))


def test_the_roofline_executor_loads_without_torch() -> None:
    code = "import sys, engines.pdd.executor.roofline; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
