"""The handoff and its endings, one scenario each, with toy tokens on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.base import Completion, GenerateRequest, RequestRejected
from engines.clock import Clock, run
from engines.pdd.check import TOY, Collected, plain_choices
from engines.pdd.cluster_virtual import VirtualCluster
from engines.pdd.config import DeciderSpec, EngineSpec, InstanceSpec, StepTiming
from engines.pdd.engine import PddEngine
from engines.wan.link import LinkSpec

TIMING = StepTiming(base_s=0.0, prefill_token_s=1e-4, weights_s=0.01)
Scenario = Callable[[PddEngine, Clock], Coroutine[Any, Any, Any]]


def spec(*, flow_bps: float = 1e6, threshold_s: float = 0.0, policy: str = "pdd", **changes: Any) -> EngineSpec:
    instances = tuple(
        InstanceSpec(name, role, site, num_pages=200, prefill_chunk_tokens=8, timing=TIMING)  # type: ignore[arg-type]
        for name, role, site in (("p0", "P", "a"), ("rld0", "RLD", "a"), ("md0", "MD", "b"))
    )
    base = EngineSpec(
        policy=policy,
        instances=instances,
        line=LinkSpec(name="line", rate_bps=flow_bps * 4, rtt_s=0.002, flow_rate_bps=flow_bps, lanes=4),
        local=LinkSpec(name="local", rate_bps=1e9, rtt_s=0.0, lanes=4),
        model=TOY,
        decider=DeciderSpec(relay_threshold_s=threshold_s),
        page_size=4,
    )
    return replace(base, **changes)


def play(scenario: Scenario, engine_spec: EngineSpec) -> Any:
    async def main(clock: Clock) -> Any:
        engine = PddEngine(engine_spec, clock)
        assert isinstance(engine.cluster, VirtualCluster)
        await engine.start()
        result = await scenario(engine, clock)
        await clock.sleep(100.0)
        engine.cluster.check_integrity()
        for node in engine.cluster.nodes.values():
            assert node.core.is_idle
        assert not engine.router.flights
        return result

    return run(main, is_virtual=True)


def prompt(length: int, first: int = 10) -> np.ndarray[Any, Any]:
    return np.array([first + i % 50 for i in range(length)], dtype=np.int32)


async def ask(engine: PddEngine, r: str, length: int, max_tokens: int, **fields: Any) -> tuple[Completion, Collected]:
    stream = Collected()
    request = GenerateRequest(r, prompt(length), max_tokens, **fields)
    completion = await engine.generate(request, stream)
    ids = stream.ids
    assert ids == list(plain_choices(request.prompt.tobytes(), tuple(ids[:-1])))[length - 1 :]
    return completion, stream


def test_rld_starts_md_takes_over_and_the_stream_has_no_seam() -> None:
    completion, stream = play(lambda engine, clock: ask(engine, "r", 40, 60), spec())
    assert completion.pipeline == "p-rld-md"
    assert stream.sources[0] == "RLD"
    assert stream.sources[-1] == "MD"
    assert stream.sources == sorted(stream.sources, key=("RLD", "MD").index)
    assert completion.eager_tokens == stream.sources.count("RLD")
    assert completion.output_tokens == 60


def test_stage_times_stand_in_the_order_of_the_flow() -> None:
    completion, _ = play(lambda engine, clock: ask(engine, "r", 40, 60), spec())
    order = [
        "received", "md_reserved", "decided", "prefill_start", "prefill_end", "rld_ready", "md_ready", "seal",
        "extend_start", "commit", "finished",
    ]  # fmt: skip
    times = [completion.stages_ns[name] for name in order]
    assert times == sorted(times)


def test_a_full_hit_at_md_moves_less_than_a_page_and_still_computes_one_token() -> None:
    async def twice(engine: PddEngine, clock: Clock) -> Completion:
        await ask(engine, "a", 40, 4)
        await clock.sleep(10.0)
        completion, _ = await ask(engine, "b", 40, 4)
        return completion

    completion = play(twice, spec(threshold_s=9.0))
    assert completion.cached_tokens == {"P": 36, "MD": 36}
    assert completion.bytes_by_link["line"] == 4 * TOY.kv_bytes_per_token
    assert completion.bytes_by_link == completion.planned_bytes_by_link


def test_md_keeps_prompt_and_output_so_the_next_turn_moves_the_new_tokens_only() -> None:
    async def turns(engine: PddEngine, clock: Clock) -> Completion:
        _, stream = await ask(engine, "a", 32, 9)
        follow = np.concatenate([prompt(32), np.array([*stream.ids, 11, 12, 13], dtype=np.int32)])
        return await engine.generate(GenerateRequest("b", follow, 2), Collected())

    completion = play(turns, spec(threshold_s=9.0))
    assert completion.cached_tokens == {"P": 32, "MD": 40}


def test_rld_that_finishes_first_ends_the_request_and_md_still_keeps_the_context() -> None:
    async def turns(engine: PddEngine, clock: Clock) -> tuple[Completion, Completion]:
        first, stream = await ask(engine, "a", 40, 5)
        await clock.sleep(60.0)
        follow = np.concatenate([prompt(40), np.array([*stream.ids, 11, 12, 13], dtype=np.int32)])
        second = await engine.generate(GenerateRequest("b", follow, 2), Collected())
        return first, second

    first, second = play(turns, spec(flow_bps=1e5))
    assert "commit" not in first.stages_ns
    assert first.eager_tokens == 5
    assert second.cached_tokens["MD"] == 44


def test_md_that_is_ready_before_rld_owns_all_of_the_output() -> None:
    slow_relay = LinkSpec(name="local", rate_bps=1e5, rtt_s=0.0, lanes=4)
    completion, stream = play(lambda engine, clock: ask(engine, "r", 40, 6), spec(flow_bps=1e8, local=slow_relay))
    assert completion.pipeline == "p-rld-md"
    assert set(stream.sources) == {"MD"}
    assert completion.eager_tokens == 0


def test_a_stop_token_in_the_relayed_part_ends_the_request_there() -> None:
    expected = list(plain_choices(prompt(40).tobytes(), ()))[-1]
    completion, stream = play(lambda engine, clock: ask(engine, "r", 40, 30, stop_token_ids=(expected,)), spec())
    assert completion.finish_reason == "stop"
    assert stream.ids == [expected]


def test_max_tokens_of_one_gives_one_token_on_every_pipeline() -> None:
    for threshold_s in (0.0, 9.0):
        completion, stream = play(lambda engine, clock: ask(engine, "r", 40, 1), spec(threshold_s=threshold_s))
        assert (completion.finish_reason, len(stream.ids)) == ("length", 1)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestRejected, match="505 tokens and output of 10 exceed the model's context of 512"):
        play(lambda engine, clock: ask(engine, "r", 505, 10), spec())


def test_an_id_in_use_is_refused() -> None:
    async def both(engine: PddEngine, clock: Clock) -> None:
        task = asyncio.ensure_future(ask(engine, "r", 20, 5))
        await clock.sleep(0.001)
        with pytest.raises(RequestRejected, match="in use"):
            await ask(engine, "r", 20, 5)
        await task

    play(both, spec())


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_an_abort_at_any_moment_frees_p_rld_and_md(after_s: float) -> None:
    async def leave(engine: PddEngine, clock: Clock) -> None:
        task = asyncio.ensure_future(ask(engine, "r", 40, 60))
        await clock.sleep(after_s)
        task.cancel()
        await asyncio.wait({task})
        await clock.sleep(1.0)  # on virtual time: all legs are gone within a second
        assert isinstance(engine.cluster, VirtualCluster)
        assert all(node.core.is_idle for node in engine.cluster.nodes.values())

    play(leave, spec())


def test_with_first_token_prefill_the_client_has_it_before_any_kv_has_moved() -> None:
    async def one(engine: PddEngine, clock: Clock) -> str:
        _, stream = await ask(engine, "r", 40, 6)
        return stream.sources[0]

    assert play(one, spec(first_token="prefill")) == "P"
    assert play(one, spec(first_token="decode")) == "RLD"


def test_without_drc_md_matches_nothing() -> None:
    async def twice(engine: PddEngine, clock: Clock) -> Completion:
        await ask(engine, "a", 40, 4)
        await clock.sleep(10.0)
        completion, _ = await ask(engine, "b", 40, 4)
        return completion

    completion = play(twice, spec(threshold_s=9.0, drc=False))
    assert completion.cached_tokens == {"P": 36, "MD": 0}


def test_policies_differ_only_in_what_they_allow() -> None:
    pipelines = {}
    for policy in ("colocated", "pd", "cross_pd", "pdd"):
        completion, stream = play(lambda engine, clock: ask(engine, "r", 40, 60), spec(policy=policy))
        pipelines[policy] = (completion.pipeline, sorted(completion.bytes_by_link), stream.ids)
    assert {policy: pipeline for policy, (pipeline, _, _) in pipelines.items()} == {
        "colocated": "mixed", "pd": "p-md", "cross_pd": "p-md", "pdd": "p-rld-md"
    }  # fmt: skip
    assert [links for _, links, _ in pipelines.values()] == [[], ["local"], ["line"], ["line", "local"]]
    assert len({tuple(ids) for _, _, ids in pipelines.values()}) == 1
