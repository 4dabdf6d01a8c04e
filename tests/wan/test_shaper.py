"""One direction on the wall clock: order holds whatever an arrival sets off, and counters follow the model's times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engines.clock import Clock, run
from engines.wan.link import LinkSpec
from engines.wan.meter import LATE_S, Meter
from engines.wan.shaper import Chunk, Shaper


class Heard:
    """A source that notes what arrived and may do something on it."""

    def __init__(self, on_arrival: Callable[[str], None] = lambda text: None) -> None:
        self.arrived_texts: list[str] = []
        self._on_arrival = on_arrival

    def arrived(self, chunk: Chunk) -> None:
        text = bytes(chunk.payload).decode()
        self.arrived_texts.append(text)
        self._on_arrival(text)


def test_what_an_arrival_sets_off_does_not_overtake_what_is_due() -> None:
    spec = LinkSpec("line")

    async def main(clock: Clock) -> list[str]:
        shaper = Shaper(asyncio.get_running_loop(), spec, seed=0)

        def send(text: str) -> None:
            shaper.send("flow", Chunk(heard, Meter(spec), memoryview(text.encode())))

        def on_arrival(text: str) -> None:
            if text == "first":
                send("third")
                shaper.drop("another flow")  # as the end of a connection does

        heard = Heard(on_arrival)
        send("first")
        send("second")
        shaper.pump()
        while len(heard.arrived_texts) < 3:
            await clock.sleep(0.001)
        shaper.close()
        return heard.arrived_texts

    assert run(main, is_virtual=False) == ["first", "second", "third"]


def test_a_dropped_chunk_is_no_longer_waited_for() -> None:
    spec = LinkSpec("line", rate_bps=8.0)

    async def main(clock: Clock) -> None:
        shaper, meter = Shaper(asyncio.get_running_loop(), spec, seed=0), Meter(spec)
        shaper.send("flow", Chunk(Heard(), meter, memoryview(b"for a minute" * 5)))
        shaper.drop("flow")
        busy_s = meter.as_dict(shaper.settle())["busy_s"]
        await clock.sleep(0.01)
        assert meter.as_dict(shaper.settle())["busy_s"] == busy_s
        shaper.close()

    run(main, is_virtual=False)


def test_a_meter_tells_allowed_from_realised_and_counts_late_chunks() -> None:
    meter = Meter(LinkSpec("line", rate_bps=8e6, rtt_s=0.02))
    for _ in range(10):  # ten chunks of 1 ms, all there at 0
        meter.enter(0.0, 1000)
    for number in range(10):
        left_s = (number + 1) * 0.001
        ends = meter.leave(left_s, 1000)
        late_s = 2 * LATE_S if number >= 8 else 0.0
        meter.write(left_s + 0.01 + late_s, left_s + 0.01, left_s, 1000, ends_busy=ends)
    counts = meter.as_dict(1.0)
    assert counts["bytes_in"] == counts["bytes_out"] == 10_000
    assert counts["busy_s"] == pytest.approx(0.01)
    assert counts["allowed_rate_bps"] == pytest.approx(8e6)
    assert counts["realised_rate_bps"] == pytest.approx(80_000 / 0.012)
    assert counts["delay_p50_s"] == pytest.approx(0.01, abs=3e-5)
    assert counts["late_share"] == pytest.approx(0.2)
    assert counts["late_max_s"] == pytest.approx(0.002)


def test_a_restart_leaves_out_what_left_before_it() -> None:
    meter = Meter(LinkSpec("line"))
    meter.enter(0.0, 1000)
    meter.leave(1.0, 1000)
    meter.restart(2.0, LinkSpec("line", rtt_s=0.02))
    meter.write(3.0, 1.0, 1.0, 1000, ends_busy=True)
    counts = meter.as_dict(4.0)
    assert (counts["bytes_out"], counts["busy_s"]) == (1000, 1.0)
    assert counts["chunks"] == 0
    assert counts["realised_rate_bps"] is None
    assert counts["late_share"] is None
