"""Slots shared fairly: round robin over clients, bounded, and no slot is lost when a waiting client
disconnects.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import ApiError
from router.bodies.fair_turns import FairTurns


async def test_a_client_with_many_jobs_delays_another_one_by_one_job() -> None:
    turns, order = FairTurns("jobs", 1, 100, 100), []

    async def job(client: str) -> None:
        async with turns.turn(client):
            order.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*(job(client) for client in [*"aaaaaa", *"bb", "c"]))
    assert "".join(order) == "aabcabaaa"  # the second a was queued before the other clients came


@pytest.mark.parametrize(("client", "status"), [("greedy", 429), ("other", 503)])
async def test_too_many_waiting_jobs_are_refused_by_client_and_in_all(client: str, status: int) -> None:
    turns = FairTurns("jobs", 1, max_waiting=3, max_per_client=2)
    await turns.take("greedy")
    waiting = [asyncio.create_task(turns.take(name)) for name in ("greedy", "greedy", "third")]
    await asyncio.sleep(0)
    assert turns.waiting == 3
    with pytest.raises(ApiError) as refused:
        await turns.take(client)
    assert (refused.value.status, refused.value.code) == (status, "too_many_large_requests")
    assert refused.value.retry_after
    for _ in waiting:
        turns.give_back()
    await asyncio.gather(*waiting)
    assert turns.waiting == 0


async def test_a_place_given_to_a_client_that_leaves_at_that_moment_goes_to_the_next() -> None:
    turns = FairTurns("jobs", 1, 10, 10)
    await turns.take("a")
    leaving, staying = asyncio.create_task(turns.take("b")), asyncio.create_task(turns.take("c"))
    await asyncio.sleep(0)
    turns.give_back()
    leaving.cancel()  # it has its slot, and has not run since
    await asyncio.wait_for(staying, 1.0)
    assert leaving.cancelled()


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "give", "leave"])), max_size=60),
    st.integers(1, 3),
)
def test_no_slot_is_lost_or_taken_twice_whenever_clients_leave(
    steps: list[tuple[str, str]], slots: int
) -> None:
    async def run() -> None:
        turns, tasks, held = FairTurns("jobs", slots, 1000, 1000), [], 0
        for client, step in steps:
            if step == "take":
                tasks.append(asyncio.create_task(turns.take(client)))
            elif step == "leave" and tasks:
                tasks.pop(0).cancel()
            elif step == "give" and held:
                held -= 1
                turns.give_back()
            for _ in range(3):
                await asyncio.sleep(0)
            done = [task for task in tasks if task.done() and not task.cancelled()]
            held += len(done)
            tasks = [task for task in tasks if not task.done()]
            assert held <= slots
            assert turns.waiting == len(tasks)
            assert held == slots or not tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(held):
            turns.give_back()
        for _ in range(slots):
            await asyncio.wait_for(turns.take("last"), 1.0)

    asyncio.run(run())
