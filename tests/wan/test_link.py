"""The fluid link against an exact reference, its invariants, and the closed forms of simple cases."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.wan.link import FluidLink, LinkSpec, LinkSpecError
from traces.errors import UserError

PRESETS = Path(__file__).resolve().parents[2] / "conf" / "wan"

# (gap before it in ms, flow, bytes)
MESSAGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 20_000)), min_size=1, max_size=40)
RATES = st.sampled_from([None, 8e3, 1e6, 3.3e6])


def spec(rate_bps: float | None, flow_rate_bps: float | None, **more: float) -> LinkSpec:
    return LinkSpec("line", rate_bps=rate_bps, flow_rate_bps=flow_rate_bps, **more)  # type: ignore[arg-type]


def run_messages(link: FluidLink, messages: list[tuple[int, int, int]]) -> list[tuple[float, object]]:
    """Send all, item = index, driving the link by its own events; returns deliveries in order."""
    delivered: list[tuple[float, object]] = []
    now_s = 0.0
    for index, (gap_ms, flow, nbytes) in enumerate(messages):
        until_s = now_s + gap_ms / 1e3
        while (due_s := link.next_event_s()) is not None and due_s <= until_s:
            delivered += link.advance(due_s)
        now_s = until_s
        link.send(now_s, f"f{flow}", nbytes, index)
    while (due_s := link.next_event_s()) is not None:
        delivered += link.advance(due_s)
    return delivered


def reference(messages: list[tuple[int, int, int]], line: LinkSpec) -> dict[int, Fraction]:
    """When each message has left, by the definition of fluid max-min sharing, in exact arithmetic."""
    rate = None if line.rate_bps is None else Fraction(line.rate_bps) / 8
    cap = None if line.flow_rate_bps is None else Fraction(line.flow_rate_bps) / 8
    arrivals, at = [], Fraction(0)
    for index, (gap_ms, flow, nbytes) in enumerate(messages):
        at = Fraction(float(at) + gap_ms / 1e3)
        arrivals.append((at, flow, index, Fraction(nbytes)))
    queues: dict[int, list[list[Fraction | int]]] = {}
    left: dict[int, Fraction] = {}
    now = Fraction(0)
    while arrivals or any(queues.values()):
        active = [queue for queue in queues.values() if queue]
        shares = [x for x in (cap, None if rate is None or not active else rate / len(active)) if x is not None]
        share = min(shares) if shares else None
        steps = [Fraction(0) if share is None else Fraction(queue[0][1]) / share for queue in active]
        step = min(steps) if steps else None
        if arrivals and (step is None or now + step > arrivals[0][0]):
            step = arrivals[0][0] - now
        assert step is not None
        now += step
        for queue in active:
            queue[0][1] = queue[0][1] - (queue[0][1] if share is None else share * step)
            while queue and queue[0][1] <= 0:
                left[int(queue.pop(0)[0])] = now
        while arrivals and arrivals[0][0] == now:
            _, flow, index, size = arrivals.pop(0)
            queue = queues.setdefault(flow, [])
            queue.append([index, size])
    return left


@settings(max_examples=60)
@given(MESSAGES, RATES, RATES)
def test_every_message_leaves_when_exact_fluid_sharing_says(
    messages: list[tuple[int, int, int]], rate_bps: float | None, flow_rate_bps: float | None
) -> None:
    line = spec(rate_bps, flow_rate_bps, rtt_s=0.02)
    delivered = {index: at for at, index in run_messages(FluidLink(line), messages)}
    exact = reference(messages, line)
    assert delivered.keys() == exact.keys() == set(range(len(messages)))
    for index, left in exact.items():
        assert delivered[index] == pytest.approx(float(left) + 0.01, rel=1e-9, abs=1e-9)


@settings(max_examples=60)
@given(MESSAGES, RATES, RATES, st.integers(0, 3), st.floats(0, 0.05))
def test_bytes_are_conserved_and_each_flow_is_fifo(
    messages: list[tuple[int, int, int]],
    rate_bps: float | None,
    flow_rate_bps: float | None,
    seed: int,
    jitter_s: float,
) -> None:
    link = FluidLink(spec(rate_bps, flow_rate_bps, rtt_s=0.01, jitter_s=jitter_s), seed)
    delivered = run_messages(link, messages)
    assert [at for at, _ in delivered] == sorted(at for at, _ in delivered)
    for flow in {flow for _, flow, _ in messages}:
        order = [index for _, index in delivered if messages[index][1] == flow]  # type: ignore[call-overload]
        assert order == [index for index, message in enumerate(messages) if message[1] == flow]
    total = sum(nbytes for _, _, nbytes in messages)
    assert link.bytes_sent == link.bytes_accepted == total == sum(link.flow_bytes_sent().values())
    assert link.backlog_bytes() == link.num_active_flows == 0


@given(st.integers(1, 50), st.floats(1, 1e12), st.floats(1, 1e12))
def test_rates_are_max_min_fair_and_work_conserving(num_flows: int, rate_bps: float, flow_rate_bps: float) -> None:
    link = FluidLink(spec(rate_bps, flow_rate_bps))
    for flow in range(num_flows):
        link.send(0.0, f"f{flow}", 10, None)
    share_bps, total_bps = link.share_Bps * 8, link.share_Bps * 8 * num_flows
    assert link.num_active_flows == num_flows
    assert share_bps <= flow_rate_bps
    assert total_bps <= rate_bps * (1 + 1e-12)
    # All get the same, so none below its cap gets less than another; and no rate is left that a flow could take.
    assert math.isclose(total_bps, min(rate_bps, num_flows * flow_rate_bps), rel_tol=1e-12)


@given(MESSAGES, st.integers(0, 3))
def test_the_same_inputs_give_the_same_floats(messages: list[tuple[int, int, int]], seed: int) -> None:
    line = spec(1e6, 3e5, rtt_s=0.01, jitter_s=0.02)
    assert run_messages(FluidLink(line, seed), messages) == run_messages(FluidLink(line, seed), messages)


@given(MESSAGES, st.lists(st.floats(0, 1), max_size=10))
def test_extra_calls_of_advance_change_nothing(messages: list[tuple[int, int, int]], times: list[float]) -> None:
    plain, watched = FluidLink(spec(1e6, 3e5, rtt_s=0.01)), FluidLink(spec(1e6, 3e5, rtt_s=0.01))
    for index, (_, flow, nbytes) in enumerate(messages):
        plain.send(0.0, f"f{flow}", nbytes, index)
        watched.send(0.0, f"f{flow}", nbytes, index)
    seen = [delivery for now_s in sorted(times) for delivery in watched.advance(now_s)] + watched.advance(10.0)
    wanted = plain.advance(10.0)
    assert sorted(item for _, item in seen) == sorted(item for _, item in wanted)  # type: ignore[type-var]
    assert [at for at, _ in seen] == pytest.approx([at for at, _ in wanted], abs=1e-9)


def test_one_message_takes_its_bytes_at_the_cap_plus_half_the_round_trip() -> None:
    link = FluidLink(spec(8e6, 4e6, rtt_s=0.02))
    link.send(1.0, "a", 500_000, "m")
    assert link.expected_transfer_s(500_000, 1.0) == pytest.approx(1.01)
    assert link.next_event_s() == pytest.approx(2.01)
    assert link.advance(2.0) == []
    assert [item for _, item in link.advance(2.01)] == ["m"]
    assert link.busy_s == pytest.approx(1.0)


def test_two_flows_share_and_the_longer_one_speeds_up_when_the_other_ends() -> None:
    link = FluidLink(spec(8e6, None))
    link.send(0.0, "short", 500_000, "short")
    link.send(0.0, "long", 1_000_000, "long")
    (short_s, short), (long_s, long) = link.advance(9.0)
    assert (short, long) == ("short", "long")
    assert short_s == pytest.approx(1.0)
    assert long_s == pytest.approx(1.5)


def test_a_line_without_limits_delivers_at_once_and_keeps_marks_in_their_place() -> None:
    link = FluidLink(LinkSpec("none"))
    for index, nbytes in enumerate((10**9, 0, 5)):
        link.send(3.0, "a", nbytes, index)
    assert link.next_event_s() == 3.0
    assert link.advance(3.0) == [(3.0, 0), (3.0, 1), (3.0, 2)]


def test_a_new_spec_holds_from_its_moment_on() -> None:
    link = FluidLink(spec(8e6, None))
    link.send(0.0, "a", 1_000_000, "m")
    link.set_spec(0.5, spec(4e6, None, rtt_s=0.2))
    assert next(at for at, _ in link.advance(9.0)) == pytest.approx(1.6)
    link.send(10.0, "a", 1_000_000, "n")
    link.set_spec(10.5, link.spec.unshaped())
    assert link.advance(10.5) == [(10.5, "n")]


def test_a_dropped_flow_gives_its_share_to_the_others() -> None:
    link = FluidLink(spec(8e6, None))
    link.send(0.0, "a", 1_000_000, "a")
    link.send(0.0, "b", 1_000_000, "b")
    assert link.drop(1.0, "a") == ["a"]
    ((at, item),) = link.advance(9.0)
    assert item == "b"
    assert at == pytest.approx(1.5)
    assert (link.bytes_accepted, link.bytes_sent, link.bytes_dropped) == (2_000_000, 1_000_000, 1_000_000)
    assert link.backlog_bytes() == 0


@pytest.mark.parametrize("gap_s, wanted_s", [(0.02, 0.005), (1e-5, 0.01 - math.sqrt(math.pi * 1e-5 * 0.01 / 2))])
def test_ordered_jitter_is_as_late_as_documented(gap_s: float, wanted_s: float) -> None:
    link = FluidLink(spec(None, None, jitter_s=0.01), seed=5)
    extra = []
    for index in range(8000):
        link.send(index * gap_s, "a", 1, index)
    for at, item in link.advance(1e9):
        assert isinstance(item, int)
        extra.append(at - item * gap_s)
    assert statistics.fmean(extra[2000:]) == pytest.approx(wanted_s, rel=0.03)


def test_time_that_goes_back_is_refused() -> None:
    link = FluidLink(LinkSpec("line"))
    link.advance(2.0)
    with pytest.raises(ValueError, match="went back"):
        link.advance(1.0)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"name": "x", "rate_mpbs": 3}, "rate_mpbs.*did you mean rate_mbps"),
        ({"name": "x", "rate_mbps": -1}, "rate_mbps.*above 0.*-1"),
        ({"name": "x", "rate_mbps": 0}, "rate_mbps"),
        ({"name": "x", "flow_mbps": float("nan")}, "flow_mbps.*nan"),
        ({"name": "x", "flow_mbps": "fast"}, "flow_mbps.*'fast'"),
        ({"name": "x", "rtt_ms": float("inf")}, "rtt_ms.*inf"),
        ({"name": "x", "rtt_ms": None}, "rtt_ms.*None"),
        ({"name": "x", "jitter_ms": True}, "jitter_ms.*True"),
        ({"name": "x", "lanes": 0}, "lanes.*0"),
        ({"name": "x", "lanes": 1.5}, r"lanes.*1\.5"),
        ({"name": ""}, "name"),
        ({"rtt_ms": 1.0}, "name"),
    ],
)
def test_a_wrong_key_is_named(config: dict[str, object], words: str) -> None:
    with pytest.raises(LinkSpecError, match=words) as caught:
        LinkSpec.from_config(config)
    assert isinstance(caught.value, UserError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["none", "lan", "metro", "cross_city", "cross_country"])
def test_presets_are_valid_and_survive_json(name: str) -> None:
    line = LinkSpec.from_config(yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8")))
    assert line.name == name
    assert msgspec.json.decode(msgspec.json.encode(line), type=LinkSpec) == line == LinkSpec.from_dict(line.as_dict())


def test_preset_units_become_si() -> None:
    line = LinkSpec.from_config(
        {"name": "x", "rate_mbps": 2, "rtt_ms": 20, "jitter_ms": 1, "flow_mbps": None, "lanes": 3}
    )
    assert line == LinkSpec("x", rate_bps=2e6, rtt_s=0.02, jitter_s=0.001, flow_rate_bps=None, lanes=3)
