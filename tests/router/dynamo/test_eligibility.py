"""Constraints of a request restrict the workers that may serve it."""

import asyncio
from typing import Any

import pytest

from fleet.completions import DECISION_HEADER, ApiError
from tests.router.dynamo.fake_workers import DynamoFleet, dynamo_fleet

PROMPT = list(range(40))
FAST, SLOW, BARE = 11, 12, 13


async def labelled(fleet: DynamoFleet) -> None:
    """Three workers: two with taints."""
    await fleet.join(FAST, limits={"taints": ["gpu/fast", "dynamo.topology/zone=a"]})
    await fleet.join(SLOW, limits={"taints": ["gpu/slow", "dynamo.topology/zone=a"]})
    await fleet.join(BARE)


def required(*taints: str) -> dict[str, Any]:
    return {"routing_constraints": {"required_taints": list(taints), "preferred_taints": {"gpu/slow": 9.0}}}


async def candidates(fleet: DynamoFleet, routing: dict[str, Any]) -> set[int]:
    """Workers that a request with these wishes may get. One of them serves it."""
    await fleet.ask(PROMPT, routing=routing)
    last = fleet.calls.served[-1]
    decision = fleet.service.kept(last.metadata[DECISION_HEADER])
    assert decision is not None
    found = {int(one.worker_id) for one in decision.record().candidates}
    assert last.instance in found
    return found


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (required("gpu/fast"), {FAST}),
        (required("dynamo.topology/zone=a"), {FAST, SLOW}),
        (required("dynamo.topology/zone=a", "gpu/slow"), {SLOW}),
        (required(), {FAST, SLOW, BARE}),
        ({"routing_constraints": None}, {FAST, SLOW, BARE}),
        ({"routing_constraints": {}}, {FAST, SLOW, BARE}),
        ({"allowed_worker_ids": [BARE, 99]}, {BARE}),
        ({"allowed_worker_ids": [BARE, FAST], **required("gpu/fast")}, {FAST}),
        ({"backend_instance_id": SLOW, "allowed_worker_ids": [SLOW, FAST]}, {SLOW}),
    ],
)
async def test_only_workers_within_the_constraints_serve(routing: dict[str, Any], expected: set[int]) -> None:
    async with dynamo_fleet() as fleet:
        await labelled(fleet)
        assert await candidates(fleet, routing) == expected


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (required("gpu/none"), "it has not the required taints gpu/none"),
        ({"allowed_worker_ids": []}, "allowed_worker_ids"),
        ({"backend_instance_id": SLOW, **required("gpu/fast")}, "names another worker"),
    ],
)
async def test_a_request_that_no_worker_may_serve_is_refused_at_once(
    routing: dict[str, Any], reason: str
) -> None:
    async with dynamo_fleet() as fleet:
        await labelled(fleet)
        with pytest.raises(ApiError, match=reason) as refused:
            await fleet.ask(PROMPT, routing=routing)
        assert refused.value.status == 503
        assert not fleet.calls.served


async def test_the_decision_says_why_the_others_were_left_out() -> None:
    async with dynamo_fleet() as fleet:
        await labelled(fleet)
        await fleet.ask(PROMPT, routing=required("gpu/fast"))
        decision = fleet.service.kept(fleet.calls.served[0].metadata[DECISION_HEADER])
    assert decision is not None
    assert [one.reason for one in decision.record().excluded] == [
        "it has not the required taints gpu/fast"
    ] * 2


async def test_a_broken_answer_is_continued_only_within_the_constraints() -> None:
    async with dynamo_fleet() as fleet:
        await labelled(fleet)
        fleet.calls.down = {FAST}
        with pytest.raises(ApiError):
            await fleet.ask(PROMPT, routing=required("gpu/fast"))
        assert not fleet.calls.served


async def test_taints_that_a_worker_gets_later_count_from_then_on() -> None:
    async with dynamo_fleet() as fleet:
        await labelled(fleet)
        await fleet.join(BARE, limits={"taints": ["gpu/fast"]})
        wanted = {**required("gpu/fast"), "allowed_worker_ids": [BARE]}
        async with asyncio.timeout(5):
            while True:
                try:
                    await fleet.ask(PROMPT, routing=wanted)
                    break
                except ApiError:
                    await asyncio.sleep(0.005)
