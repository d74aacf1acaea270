"""Claims of engine names."""

import asyncio

import pytest

from bus import Claim
from bus.claims import ClaimStep, Holder, NameClaim, NameTaken, holder_of, next_step
from bus.memory import MemoryBroker, MemoryBus

KEY = "engine.a"


def claim_of(worker_id: int, revision: int) -> Claim:
    return Claim(value=b'{"worker_id": %d, "node": "n", "beat": 1}' % worker_id, revision=revision)


@pytest.mark.parametrize(
    ("seen", "now", "watched", "replaces", "verdict"),
    [
        (None, None, 0.0, None, ClaimStep.CREATE),
        (claim_of(1, 5), None, 1.0, None, ClaimStep.CREATE),
        (claim_of(1, 5), claim_of(1, 5), 0.0, None, ClaimStep.WAIT),
        (claim_of(1, 5), claim_of(1, 5), 2.9, None, ClaimStep.WAIT),
        (claim_of(1, 5), claim_of(1, 5), 3.0, None, ClaimStep.TAKE),
        (claim_of(1, 5), claim_of(1, 6), 0.1, None, ClaimStep.REFUSE),
        (claim_of(1, 5), claim_of(2, 6), 9.0, None, ClaimStep.REFUSE),
        (claim_of(1, 5), claim_of(1, 5), 0.0, 1, ClaimStep.TAKE),
        (claim_of(1, 5), claim_of(1, 5), 0.0, 2, ClaimStep.WAIT),
    ],
)
def test_the_verdict_on_a_claim(
    seen: Claim | None, now: Claim | None, watched: float, replaces: int | None, verdict: ClaimStep
) -> None:
    assert next_step(seen, now, watched, replaces=replaces) is verdict


def test_an_unreadable_claim_has_a_holder_that_can_only_go_stale() -> None:
    assert holder_of(Claim(b"\xff garbage", 1)) == Holder(worker_id=-1, node="an unknown node", beat=0)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


def claimant(broker: MemoryBroker, worker_id: int, replaces: int | None = None) -> NameClaim:
    return NameClaim(
        MemoryBus(broker),
        KEY,
        "a",
        worker_id=worker_id,
        node=f"node-{worker_id}",
        replaces=replaces,
        lease=0.6,
    )


async def beat(claim: NameClaim) -> None:
    while True:
        await claim.refresh()
        await asyncio.sleep(0.1)


async def test_a_free_name_is_taken_and_a_released_one_is_free_again(broker: MemoryBroker) -> None:
    first, second = claimant(broker, 1), claimant(broker, 2)
    await first.take()
    await first.refresh()
    await first.release()
    await second.take()
    assert second.held
    assert not first.held


async def test_the_name_of_a_living_engine_is_refused_with_holder_and_remedy(broker: MemoryBroker) -> None:
    first = claimant(broker, 1)
    await first.take()
    beating = asyncio.create_task(beat(first))
    with pytest.raises(
        NameTaken, match=r"the engine name 'a' is taken: worker 1 on node-1 .* another name \(--name\)"
    ):
        await claimant(broker, 2).take()
    beating.cancel()


async def test_the_name_of_a_silent_engine_is_taken_over_and_its_old_holder_learns_it(
    broker: MemoryBroker,
) -> None:
    first, second = claimant(broker, 1), claimant(broker, 2)
    await first.take()
    await second.take()
    with pytest.raises(NameTaken, match="worker 2 on node-2"):
        await first.refresh()
    await first.release()
    await second.refresh()


async def test_the_launcher_need_not_wait_for_an_incarnation_it_has_ended(broker: MemoryBroker) -> None:
    await claimant(broker, 1).take()
    async with asyncio.timeout(0.3):
        await claimant(broker, 2, replaces=1).take()


async def test_of_two_claimants_of_a_stale_name_one_gets_it(broker: MemoryBroker) -> None:
    await claimant(broker, 1).take()
    rivals = [claimant(broker, 2), claimant(broker, 3)]
    tasks = [asyncio.create_task(rival.take()) for rival in rivals]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    winner = rivals[tasks.index(next(iter(done)))]
    beating = asyncio.create_task(beat(winner))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(rival.held for rival in rivals) == [False, True]
    assert sum(isinstance(result, NameTaken) for result in results) == 1
    beating.cancel()


async def test_a_claim_that_vanished_with_its_server_is_made_anew(broker: MemoryBroker) -> None:
    first = claimant(broker, 1)
    await first.take()
    held = broker.claimed(KEY)
    assert held is not None
    broker.set_claim(KEY, None, held.revision)
    await first.refresh()
    assert first.restored
    await first.refresh()
    assert not first.restored


async def test_tokens_grow_from_holder_to_holder_and_refreshing_leaves_them(broker: MemoryBroker) -> None:
    first, second = claimant(broker, 1), claimant(broker, 2)
    await first.take()
    token = first.token
    await first.refresh()
    assert first.token == token > 0
    await second.take()
    assert second.token > token


async def test_a_token_above_what_others_have_heard_is_kept_for_whoever_comes_next(
    broker: MemoryBroker,
) -> None:
    first, second = claimant(broker, 1), claimant(broker, 2)
    await first.take()
    await first.outbid(first.token - 1)
    assert first.token < 500
    await first.outbid(500)
    assert first.token == 501
    await second.take()
    assert second.token > 501


async def test_tokens_go_on_growing_when_revisions_begin_anew(broker: MemoryBroker) -> None:
    first = claimant(broker, 1)
    for _ in range(20):
        churn(broker)
    await first.take()
    held = broker.claimed(KEY)
    assert held is not None
    broker.set_claim(KEY, None, held.revision)
    broker._revision = 0
    await first.refresh()
    second = claimant(broker, 2)
    await second.take()
    assert second.token > first.token > 20


def churn(broker: MemoryBroker) -> None:
    """Create and delete a key repeatedly: revisions increase."""
    broker.set_claim("other", None, broker.set_claim("other", b"x", None))
