"""KV goes by absolute position, once, over a fixed number of lanes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.pdd.leg import Leg, LegKind
from engines.pdd.messages import Ask, Target
from engines.pdd.transfer import MAX_FRAMES_IN_FLIGHT, KVSender


def sender(lanes: int = 2, frame_tokens: int = 4) -> KVSender:
    return KVSender({"line": lanes, "local": lanes}, frame_tokens)


def test_only_what_is_computed_is_sent() -> None:
    one = sender()
    one.open("r", (Target("md0", 4, "line"),), 16)
    assert one.pump(0) == []
    one.make_available("r", 10)
    assert [(frame.start, frame.stop, frame.is_last) for frame in one.pump(0)] == [(4, 8, False), (8, 10, False)]
    one.make_available("r", 16)
    assert [(frame.start, frame.stop, frame.is_last) for frame in one.pump(0)] == [(10, 14, False), (14, 16, True)]


def test_a_transfer_waits_for_a_free_lane_and_takes_it_when_another_ends() -> None:
    one = sender(lanes=1)
    for name in ("a", "b"):
        one.open(name, (Target("md0", 0, "line"),), 4)
        one.make_available(name, 4)
    frames = one.pump(0)
    assert [frame.r for frame in frames] == ["a"]
    assert one.on_applied("a", "md0", 0, 4, is_gone=False)
    assert [(frame.r, frame.lane) for frame in one.pump(0)] == [("b", 0)]


def test_frames_in_flight_are_bounded() -> None:
    one = sender(frame_tokens=1)
    one.open("r", (Target("md0", 0, "line"),), 100)
    one.make_available("r", 100)
    assert len(one.pump(0)) == MAX_FRAMES_IN_FLIGHT
    assert one.pump(0) == []
    one.on_applied("r", "md0", 0, 1, is_gone=False)
    assert len(one.pump(0)) == 1


def test_a_source_is_free_when_both_receivers_have_all() -> None:
    one = sender(frame_tokens=64)
    one.open("r", (Target("rld0", 0, "local"), Target("md0", 8, "line")), 12)
    one.make_available("r", 12)
    assert {(frame.node, frame.start) for frame in one.pump(0)} == {("rld0", 0), ("md0", 8)}
    assert not one.on_applied("r", "rld0", 0, 12, is_gone=False)
    assert one.on_applied("r", "md0", 8, 12, is_gone=False)


def test_a_receiver_that_is_gone_ends_its_transfer_alone() -> None:
    one = sender(frame_tokens=64)
    one.open("r", (Target("rld0", 0, "local"), Target("md0", 0, "line")), 12)
    one.make_available("r", 6)
    one.pump(0)
    assert not one.on_applied("r", "rld0", 0, 6, is_gone=True)
    one.make_available("r", 12)
    assert [frame.node for frame in one.pump(0)] == ["md0"]


def test_a_cancelled_transfer_gives_its_lane_back() -> None:
    one = sender(lanes=1)
    one.open("a", (Target("md0", 0, "line"),), 4)
    one.open("b", (Target("md0", 0, "line"),), 4)
    one.make_available("a", 4)
    one.make_available("b", 4)
    one.pump(0)
    one.cancel("a")
    assert [frame.r for frame in one.pump(0)] == ["b"]
    one.on_applied("a", "md0", 0, 4, is_gone=False)  # a late word about a transfer that is gone


@given(st.permutations(range(8)), st.integers(0, 7))
def test_frames_may_arrive_in_any_order_and_twice(order: list[int], twice: int) -> None:
    prompt_len = 19
    cuts = [(start, min(start + 2, prompt_len)) for start in range(4, prompt_len, 2)]
    import numpy as np

    leg = Leg("r", 0, LegKind.MAIN, Ask(prompt=b"", max_tokens=1), np.zeros(prompt_len, dtype=np.int32), [])
    leg.num_cached = 4
    leg.first_token = 9
    for index in [*order[:4], order[twice % 4], *order[4:]]:
        assert not leg.has_whole_prompt
        leg.note_received(*cuts[index])
    assert leg.has_whole_prompt
