"""What runs in the next step: decodes first, then chunks in order, none longer than a chunk."""

from __future__ import annotations

import numpy as np
import pytest

from engines.pdd.config import EngineSpec, InstanceSpec
from engines.pdd.leg import Leg, LegKind
from engines.pdd.messages import Ask
from engines.pdd.scheduler import Scheduler, Work
from engines.wan.link import LinkSpec
from traces.errors import UserError


def leg(name: str, num_prompt: int, kind: LegKind = LegKind.PREFILL, max_tokens: int = 8) -> Leg:
    prompt = np.arange(10, 10 + num_prompt, dtype=np.int32)
    one = Leg(name, 0, kind, Ask(prompt=prompt.tobytes(), max_tokens=max_tokens), prompt, [])
    one.may_run = True
    return one


def scheduler(chunk: int = 8, budget: int = 16, seqs: int = 4) -> Scheduler:
    return Scheduler(
        InstanceSpec("x", "MIXED", "a", prefill_chunk_tokens=chunk, max_step_tokens=budget, max_batch_seqs=seqs)
    )


def admit(_: Leg) -> bool:
    return True


def shape(batch: list[Work]) -> list[tuple[str, int, bool]]:
    return [(work.leg.r, work.count, work.is_sampled) for work in batch]


def finish(batch: list[Work]) -> None:
    for work in batch:
        work.leg.num_computed += work.count
        if work.is_sampled:
            work.leg.output.append(7)


def test_a_long_prompt_runs_in_chunks_and_is_sampled_after_the_last() -> None:
    one = scheduler()
    one.waiting.append(leg("long", 20))
    shapes = []
    for _ in range(3):
        batch = one.next_batch(admit)
        shapes.append(shape(batch))
        finish(batch)
    assert shapes == [[("long", 8, False)], [("long", 8, False)], [("long", 4, True)]]


def test_a_short_prompt_runs_beside_a_long_one() -> None:
    one = scheduler()
    one.waiting.extend([leg("long", 100), leg("short", 3)])
    assert shape(one.next_batch(admit)) == [("long", 8, False), ("short", 3, True)]


def test_decodes_stand_before_chunks_and_take_no_room_from_each_other() -> None:
    one = scheduler(budget=9)
    running = [leg(f"d{i}", 4, LegKind.MIXED) for i in range(2)]
    for item in running:
        item.num_computed, item.output = 4, [5]
    one.running.extend(running)
    one.waiting.append(leg("new", 20))
    assert shape(one.next_batch(admit)) == [("d0", 1, True), ("d1", 1, True), ("new", 7, False)]


def test_an_extend_runs_all_handed_over_tokens_in_one_step() -> None:
    one = scheduler()
    main = leg("m", 4, LegKind.MAIN, max_tokens=20)
    main.num_computed, main.output = 4, [5, 6, 7, 8, 9]
    one.running.append(main)
    batch = one.next_batch(admit)
    assert shape(batch) == [("m", 5, True)]
    assert list(batch[0].item().token_ids) == [5, 6, 7, 8, 9]
    assert batch[0].item().start == 4


def test_who_has_all_of_its_output_does_not_run() -> None:
    one = scheduler()
    done = leg("m", 4, LegKind.MAIN, max_tokens=2)
    done.num_computed, done.output = 5, [5, 6]
    one.running.append(done)
    assert one.next_batch(admit) == []


def test_the_first_that_finds_no_room_holds_back_those_behind_it() -> None:
    one = scheduler()
    one.waiting.extend([leg("big", 9), leg("small", 2)])
    assert one.next_batch(lambda item: item.r != "big") == []
    assert [item.r for item in one.waiting] == ["big", "small"]


def test_a_size_below_one_is_refused_by_name() -> None:
    link = LinkSpec(name="line")
    with pytest.raises(UserError, match=r"engine\.kv_frame_tokens: must be at least 1, got 0"):
        EngineSpec("pdd", (InstanceSpec("p0", "P", "a"),), link, link, kv_frame_tokens=0)
    with pytest.raises(UserError, match=r"cluster.instances \(p0\).prefill_chunk_tokens"):
        EngineSpec("pdd", (InstanceSpec("p0", "P", "a", prefill_chunk_tokens=0),), link, link)
