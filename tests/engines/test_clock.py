"""Virtual time jumps, keeps order and names a deadlock."""

from __future__ import annotations

import asyncio

import pytest

from engines.clock import Clock, Deadlock, run


def test_virtual_time_jumps_to_the_deadline_exactly() -> None:
    async def main(clock: Clock) -> list[int]:
        await clock.sleep(86_400.0)
        first = clock.now_ns()
        await clock.sleep_until_ns(first + 1)
        return [first, clock.now_ns()]

    assert run(main, is_virtual=True)[0] == 86_400 * 10**9


def test_equal_deadlines_run_in_the_order_in_which_they_were_set() -> None:
    seen: list[int] = []

    async def main(clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, seen.append, number)
        await clock.sleep(2.0)

    run(main, is_virtual=True)
    assert seen == list(range(50))


def test_nothing_left_to_wait_for_is_a_deadlock_that_names_the_task() -> None:
    async def main(clock: Clock) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="main"):
        run(main, is_virtual=True)


def test_an_error_in_a_callback_ends_a_virtual_run() -> None:
    async def main(clock: Clock) -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 / 0)
        await clock.sleep(5.0)

    with pytest.raises(ZeroDivisionError):
        run(main, is_virtual=True)


def test_cancelled_timers_do_not_move_time() -> None:
    async def main(clock: Clock) -> int:
        loop = asyncio.get_running_loop()
        for _ in range(200):
            loop.call_later(100.0, lambda: None).cancel()
        await clock.sleep(1.0)
        return clock.now_ns()

    assert run(main, is_virtual=True) == 10**9


def test_the_wall_clock_never_goes_back() -> None:
    async def main(clock: Clock) -> tuple[int, int]:
        before = clock.now_ns()
        await clock.sleep(0.0)
        return before, clock.now_ns()

    before, after = run(main, is_virtual=False)
    assert after >= before


@pytest.mark.parametrize("is_virtual", [True, False], ids=["virtual", "wall"])
def test_sleeping_until_a_time_never_wakes_before_it(is_virtual: bool) -> None:
    async def main(clock: Clock) -> list[int]:
        early = []
        for _ in range(40):
            deadline_ns = clock.now_ns() + 1_400_001
            await clock.sleep_until_ns(deadline_ns)
            early.append(min(0, clock.now_ns() - deadline_ns))
        return early

    assert run(main, is_virtual=is_virtual) == [0] * 40
