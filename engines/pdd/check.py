"""The whole engine on virtual time from one seed, with real (toy, float64) tokens, every token compared with the
model run plainly.

    python -m engines.pdd.check --seeds 200          seeds 0..199
    python -m engines.pdd.check --seed 17            one seed, with its story

A seed fixes cluster, policy, workload, message delays and aborts. After every event the books of every instance must
add up; at the end every request has ended, nothing is held, and every token is right.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from engines.base import Completion, GenerateRequest, TokenArray
from engines.clock import Clock, Deadlock, run
from engines.pdd.cluster_virtual import VirtualCluster
from engines.pdd.config import DeciderSpec, EngineSpec, InstanceSpec, ModelSpec, Role, StepTiming
from engines.pdd.engine import PddEngine
from engines.pdd.messages import AnyMessage
from engines.pdd.policy import POLICIES, arranged
from engines.wan.link import LinkSpec

TOY = ModelSpec(
    name="toy", vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=48, max_context=512, dtype="float64", seed=7,
)  # fmt: skip
PAGE_SIZE = 4


class CheckFailed(AssertionError):
    """A seed went wrong. The message says what; the seed replays it."""


@dataclass(slots=True)
class Collected:
    """A client's stream: tokens in the order in which they came."""

    ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def tokens(self, time_ns: int, token_ids: Sequence[int], source: str) -> None:
        self.ids.extend(token_ids)
        self.sources.extend([source] * len(token_ids))


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a seed's workload. `abort_after_s`: the client leaves then, None: it stays."""

    request: GenerateRequest
    at_s: float
    abort_after_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed did: requests by how they ended, and how many tokens came from where."""

    policy: str
    num_ok: int
    num_aborted: int
    num_relayed: int
    num_handoffs: int


def random_cluster(rng: random.Random, policy: str) -> EngineSpec:
    """A small cluster with random counts, pools, chunks and speeds; slow lines and fast ones."""

    def instance(role: Role, index: int, site: str) -> InstanceSpec:
        return InstanceSpec(
            name=f"{role.lower()}{index}",
            role=role,
            site=site,
            num_pages=rng.choice((40, 60, 200)),
            max_batch_seqs=rng.choice((2, 4, 16)),
            prefill_chunk_tokens=rng.choice((3, 8, 32)),
            max_step_tokens=rng.choice((8, 32, 64)),
            timing=StepTiming(
                base_s=0.001, prefill_token_s=rng.choice((1e-5, 1e-3)), weights_s=rng.choice((0.002, 0.02))
            ),
        )  # fmt: skip

    instances = [instance("P", i, "a") for i in range(rng.choice((1, 1, 2)))]
    instances += [instance("RLD", i, "a") for i in range(rng.choice((1, 1, 2)))]
    instances += [instance("MD", i, "b") for i in range(rng.choice((1, 1, 2)))]
    rate_bps = rng.choice((2e6, 1e7, 2e8))
    line = LinkSpec(
        name="line",
        rate_bps=rate_bps,
        rtt_s=rng.choice((0.0, 0.02)),
        flow_rate_bps=rate_bps / 2,
        lanes=rng.choice((1, 2, 8)),
    )
    return EngineSpec(
        policy=policy,
        instances=tuple(instances),
        line=line,
        local=LinkSpec(name="local", rate_bps=1e9, rtt_s=1e-5, lanes=4),
        model=TOY,
        decider=DeciderSpec(relay_threshold_s=rng.choice((0.0, 0.05, 1.0)), relay_max_seqs=rng.choice((1, 4))),
        page_size=PAGE_SIZE,
        first_token=rng.choice(("decode", "prefill")),
        drc=rng.random() < 0.8,
        kv_frame_tokens=rng.choice((2, 5, 64)),
    )


def random_workload(rng: random.Random, seed: int) -> list[Planned]:
    """Requests with shared prefixes, lengths at page edges, repeats (full hits), follow-up prompts, and some that are
    aborted."""
    roots = [_random_tokens(rng, rng.choice((0, 4, 8, 13))) for _ in range(3)]
    planned: list[Planned] = []
    prompts: list[TokenArray] = []
    at_s = 0.0
    for index in range(rng.randint(4, 10)):
        shape = rng.random()
        if prompts and shape < 0.2:
            prompt = rng.choice(prompts)
        elif prompts and shape < 0.5:
            parent = rng.choice(prompts)
            prompt = np.concatenate([parent[: rng.randint(1, len(parent))], _random_tokens(rng, rng.randint(1, 12))])
        else:
            length = rng.choice((1, 3, 4, 5, 8, 11, 16, 27, 40))
            prompt = np.concatenate([rng.choice(roots), _random_tokens(rng, length)])
        prompt = prompt[:64]
        prompts.append(prompt)
        at_s += rng.choice((0.0, 0.0, 0.005, 0.05, 0.3))
        request = GenerateRequest(f"s{seed}-r{index}", prompt, max_tokens=rng.choice((1, 2, 5, 9, 17, 33)))
        abort_after_s = rng.choice((0.001, 0.02, 0.1)) if rng.random() < 0.15 else None
        planned.append(Planned(request, at_s, abort_after_s))
    return planned


def _random_tokens(rng: random.Random, count: int) -> TokenArray:
    return np.array([rng.randrange(8, TOY.vocab_size) for _ in range(count)], dtype=np.int32)


def run_seed(seed: int, policy: str | None = None) -> Outcome:
    """Run one seed; raises CheckFailed (or an integrity error) when anything is wrong."""
    rng = random.Random(seed)
    name = policy or rng.choice(sorted(POLICIES))
    spec = random_cluster(rng, name)
    workload = random_workload(rng, seed)
    max_delay_s = rng.choice((0.0, 0.001, 0.03))

    def delay(src: str, dst: str, message: AnyMessage) -> float:
        return rng.random() * max_delay_s

    async def main(clock: Clock) -> Outcome:
        _, arranged_spec = arranged(spec)
        cluster = VirtualCluster(arranged_spec, clock, delay=delay, after_event=VirtualCluster.check_integrity)
        engine = PddEngine(spec, clock, cluster=cluster)
        await engine.start()
        results = await asyncio.gather(*(_one(engine, clock, plan) for plan in workload))
        for _ in range(200):  # aborted legs may still wind down
            if all(node.core.is_idle for node in cluster.nodes.values()) and not engine.router.flights:
                break
            await clock.sleep(1.0)
        _check_idle(cluster, engine)
        await engine.close()
        return _outcome(name, workload, results)

    try:
        return run(main, is_virtual=True)
    except Deadlock as error:
        raise CheckFailed(f"seed {seed} ({name}): {error}") from error
    except AssertionError as error:
        raise CheckFailed(f"seed {seed} ({name}): {error}") from error


async def _one(engine: PddEngine, clock: Clock, plan: Planned) -> Completion | None:
    """Send one request, compare its tokens; None when its client left."""
    await clock.sleep(plan.at_s)
    stream = Collected()
    task = asyncio.ensure_future(engine.generate(plan.request, stream))
    if plan.abort_after_s is not None:
        done, _ = await asyncio.wait({task}, timeout=plan.abort_after_s)
        if not done:
            task.cancel()
            await asyncio.wait({task})
            _compare(plan.request, stream.ids, is_whole=False)
            return None
    completion = await task
    _compare(plan.request, stream.ids, is_whole=True)
    return completion


def _compare(request: GenerateRequest, ids: Sequence[int], *, is_whole: bool) -> None:
    """Every token must be the model's greedy choice after all before it: one plain pass over prompt and output shows
    it."""
    if is_whole and len(ids) != request.max_tokens:
        raise CheckFailed(f"{request.request_id}: {len(ids)} tokens came, {request.max_tokens} were asked for")
    if not ids:
        return
    expected = plain_choices(request.prompt.tobytes(), tuple(ids[:-1]))[len(request.prompt) - 1 :]
    if list(ids) != list(expected):
        raise CheckFailed(f"{request.request_id}: got {list(ids)}, the model run plainly gives {list(expected)}")


def _check_idle(cluster: VirtualCluster, engine: PddEngine) -> None:
    for name, node in cluster.nodes.items():
        core = node.core
        if not core.is_idle:
            raise CheckFailed(f"{name} still holds {sorted(core.legs)}")
        if core.cache.pool.num_free + core.cache.tree.num_pages != core.spec.num_pages:
            raise CheckFailed(f"{name}: {core.cache.pool.num_free} free + {core.cache.tree.num_pages} kept pages")
        if core.cache.tree.num_evictable != core.cache.tree.num_pages:
            raise CheckFailed(f"{name}: a kept page is still locked")
    if engine.router.flights:
        raise CheckFailed(f"the router still holds {sorted(engine.router.flights)}")
    if engine.router.line.outstanding:
        raise CheckFailed(f"the router still counts {sorted(engine.router.line.outstanding)} as on the line")


def _outcome(policy: str, workload: list[Planned], results: list[Completion | None]) -> Outcome:
    ended = [completion for completion in results if completion is not None]
    for completion in ended:
        if any(tokens > completion.prompt_tokens for tokens in completion.cached_tokens.values()):
            raise CheckFailed(f"more cached than prompt tokens: {completion}")
    return Outcome(
        policy=policy,
        num_ok=len(ended),
        num_aborted=len(workload) - len(ended),
        num_relayed=sum(completion.pipeline == "p-rld-md" for completion in ended),
        num_handoffs=sum("commit" in completion.stages_ns for completion in ended),
    )


@lru_cache(maxsize=4096)
def plain_choices(prompt: bytes, output: tuple[int, ...]) -> tuple[int, ...]:
    """The toy model run plainly, without any engine: its greedy choice after each token of `prompt` (int32 bytes) and
    `output`."""
    from engines.pdd.model.llama import plain_logits

    ids = [*np.frombuffer(prompt, dtype=np.int32).tolist(), *output]
    return tuple(plain_logits(_toy_weights(), TOY, ids).argmax(-1).tolist())


@lru_cache(maxsize=1)
def _toy_weights() -> Any:
    from engines.pdd.model.weights import random_weights

    return random_weights(TOY)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m engines.pdd.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds, from 0")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="this policy in every seed")
    args = parser.parse_args(argv)
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    totals: dict[str, list[int]] = {}
    for seed in seeds:
        try:
            outcome = run_seed(seed, args.policy)
        except CheckFailed as error:
            print(f"FAILED: {error}\nreplay: python -m engines.pdd.check --seed {seed}", file=sys.stderr)
            return 1
        row = totals.setdefault(outcome.policy, [0, 0, 0, 0, 0])
        for i, value in enumerate((1, outcome.num_ok, outcome.num_aborted, outcome.num_relayed, outcome.num_handoffs)):
            row[i] += value
    print(f"{'policy':<12}{'seeds':>8}{'ok':>8}{'aborted':>9}{'relayed':>9}{'handoffs':>10}")
    for policy, row in sorted(totals.items()):
        print(f"{policy:<12}{row[0]:>8}{row[1]:>8}{row[2]:>9}{row[3]:>9}{row[4]:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
