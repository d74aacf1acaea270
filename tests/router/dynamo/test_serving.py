"""A Dynamo frontend gets whole answers through the router, whatever happens to the workers."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.completions import DECISION_HEADER, ApiError
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed
from tests.router.dynamo.fake_workers import FakeContext, dynamo_fleet, expected, ids_of
from tests.router.router_fixture import metric, until

PROMPT = list(range(40))


def dies_at(item: int, calls: int = 1) -> Any:
    """A fault: the first calls break off before this item."""

    def fault(call: int, at: int) -> None:
        if call <= calls and at == item:
            raise UpstreamFailed(AttemptFailure.BROKEN, "killed")

    return fault


async def test_an_answer_comes_through_unchanged() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        items = await fleet.ask(PROMPT)
    assert ids_of(items) == expected(PROMPT, 8)
    assert items[-1]["finish_reason"] == "length"
    (served,) = fleet.calls.served
    assert served.body["routing"]["backend_instance_id"] == served.instance
    assert served.body["token_ids"] == PROMPT


async def test_the_decision_is_kept_with_every_candidate_and_term() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        await fleet.ask(PROMPT, context=FakeContext("from-the-frontend"))
        decision = fleet.service.kept(fleet.calls.served[0].metadata[DECISION_HEADER])
    assert decision is not None
    record = decision.record()
    assert (record.request_id, len(record.candidates)) == ("from-the-frontend", 2)
    assert {one.engine[:8] for one in record.candidates} == {"backend-"}


@pytest.mark.parametrize("item", [0, 1, 5, 8])
async def test_an_answer_that_breaks_off_is_continued_by_another_worker(item: int) -> None:
    async with dynamo_fleet(11, 12) as fleet:
        fleet.calls.fault = dies_at(item)
        items = await fleet.ask(PROMPT)
    assert ids_of(items) == expected(PROMPT, 8)
    if item < 8:
        first, second = fleet.calls.served
        assert first.instance != second.instance
        assert second.body["token_ids"] == PROMPT + expected(PROMPT, item)
        assert second.body["stop_conditions"]["max_tokens"] == 8 - item


async def test_an_answer_whose_last_token_came_is_ended_without_another_worker() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        fleet.calls.extra = {"finish_reason": None}
        items = await fleet.ask(PROMPT)
    assert ids_of(items) == expected(PROMPT, 8)
    assert items[-1] == {"token_ids": [], "finish_reason": "length"}
    assert len(fleet.calls.served) == 1


async def test_a_worker_that_refuses_connections_is_not_tried_again_while_its_record_is_old() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        fleet.calls.down = {11}
        for _ in range(6):
            assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
            await asyncio.sleep(0.02)
        assert metric(fleet.service.metrics, "retries_total", cause="connect") <= 1
        fleet.calls.down, fleet.store.now = set(), 3.0
        await until(lambda: all(state.obstacle is None for state in fleet.service.view.engines()))


async def test_an_error_reaches_the_frontend_when_every_worker_fails() -> None:
    async with dynamo_fleet(11, 12, config=RouterConfig(max_attempts=2)) as fleet:
        fleet.calls.fault = dies_at(0, calls=9)
        with pytest.raises(ApiError) as failed:
            await fleet.ask(PROMPT)
    assert failed.value.status == 503


async def test_an_inexact_continuation_is_refused() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        fleet.calls.fault = dies_at(3)
        with pytest.raises(ApiError, match="cannot be continued exactly"):
            await fleet.ask(PROMPT, sampling_options={"guided_decoding": {"json": {}}})


@pytest.mark.parametrize("body", [{}, {"token_ids": []}, {"token_ids": ["x"]}])
async def test_a_request_that_cannot_be_read_is_refused(body: dict[str, Any]) -> None:
    async with dynamo_fleet(11) as fleet:
        with pytest.raises(ApiError) as refused:
            _ = [item async for item in fleet.door.handle(body, FakeContext())]
    assert refused.value.status == 400


async def test_an_unknown_model_is_refused() -> None:
    async with dynamo_fleet(11) as fleet:
        with pytest.raises(ApiError) as refused:
            await fleet.ask(PROMPT, model="other")
    assert refused.value.status == 404


async def test_a_client_that_names_a_worker_gets_it() -> None:
    async with dynamo_fleet(11, 12, 13) as fleet:
        for named in (13, 11, 12):
            await fleet.ask(PROMPT, routing={"backend_instance_id": named})
    assert [one.instance for one in fleet.calls.served] == [13, 11, 12]


async def test_the_rank_of_a_worker_is_chosen_and_sent() -> None:
    async with dynamo_fleet(11, ranks=3) as fleet:
        for named in (2, 0):
            await fleet.ask(PROMPT, routing={"backend_instance_id": 11, "dp_rank": named})
        await fleet.ask(PROMPT)
    assert [one.body["routing"]["dp_rank"] for one in fleet.calls.served][:2] == [2, 0]


async def test_the_cache_namespace_is_the_salt_of_the_blocks() -> None:
    async with dynamo_fleet(11) as fleet:
        await fleet.ask(PROMPT, routing={"cache_salt": "tenant 1"})
        decision = fleet.service.kept(fleet.calls.served[0].metadata[DECISION_HEADER])
    assert decision is not None
    assert decision.cache_salt == "tenant 1"
    assert fleet.calls.served[0].body["routing"]["cache_salt"] == "tenant 1"
    salted = sequence_hashes(local_hashes(PROMPT, 16, salted_seed("tenant 1")))
    assert salted != sequence_hashes(local_hashes(PROMPT, 16))


async def test_the_trace_context_travels_with_the_request() -> None:
    async with dynamo_fleet(11) as fleet:
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        await fleet.ask(PROMPT, context=FakeContext(headers={"traceparent": trace}))
    assert fleet.calls.served[0].metadata["traceparent"].split("-")[1] == "a" * 32


async def test_a_client_that_leaves_ends_the_request_and_blames_no_worker() -> None:
    async with dynamo_fleet(11) as fleet:
        fleet.calls.hold = asyncio.Event()
        context = FakeContext()

        def stops(call: int, item: int) -> None:
            if item == 2:
                context.stopped = True
                raise UpstreamFailed(AttemptFailure.BROKEN, "cancelled")

        fleet.calls.fault = stops
        fleet.calls.hold.set()
        items = await fleet.ask(PROMPT, context=context)
        assert ids_of(items) == expected(PROMPT, 2)
        assert len(fleet.calls.served) == 1
        assert metric(fleet.service.metrics, "retries_total", cause="broken") == 0
        await fleet.door.drained()


async def test_an_answer_that_is_abandoned_leaves_nothing_booked() -> None:
    async with dynamo_fleet(11) as fleet:
        body = {"model": "tiny", "token_ids": PROMPT, "stop_conditions": {"max_tokens": 8}}
        async with aclosing(fleet.door.handle(body, FakeContext())) as items:
            await anext(items)
        table = fleet.service.scheduler.target_table("tiny")
        assert not fleet.service.scheduler.reservations.load(table.rows, fleet.service.clock()).any()
        await fleet.door.drained()


async def test_a_stopping_router_refuses_new_requests_and_finishes_open_ones() -> None:
    async with dynamo_fleet(11) as fleet:
        fleet.calls.hold = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            opened = tasks.create_task(fleet.ask(PROMPT))
            await until(lambda: fleet.calls.served)
            fleet.service.refusing = True
            with pytest.raises(ApiError, match="stopping"):
                await fleet.ask(PROMPT)
            fleet.calls.hold.set()
        assert ids_of(opened.result()) == expected(PROMPT, 8)
        await fleet.door.drained()


async def test_experts_are_asked_for_and_kept_from_clients_that_did_not() -> None:
    settings = DynamoConfig(
        namespace="dynamo", poll_seconds=0.01, routed_experts_share=1.0, layers=1, experts=4, top_k=1
    )
    async with dynamo_fleet(11, settings=settings) as fleet:
        fleet.calls.extra = {"engine_data": {"routed_experts": [[[0]]]}}
        items = await fleet.ask(PROMPT)
        asked = await fleet.ask(PROMPT, extra_args={"nvext": {"extra_fields": ["routed_experts"]}})
    assert [one.body["extra_args"]["nvext"]["extra_fields"] for one in fleet.calls.served] == [
        ["routed_experts"]
    ] * 2
    assert all(item["engine_data"] is None for item in items)
    assert all(item["engine_data"] == {"routed_experts": [[[0]]]} for item in asked)


async def test_the_speed_of_a_worker_is_learnt_from_its_answers() -> None:
    async with dynamo_fleet(11, 12) as fleet:
        for _ in range(12):
            await fleet.ask(list(range(2000)), count=40)

        def measured() -> bool:
            table = fleet.service.scheduler.target_table("tiny")
            return fleet.service.scheduler.speeds.known(table).measured is None

        await until(measured)
        await fleet.ask(PROMPT)
        decision = fleet.service.kept(fleet.calls.served[-1].metadata[DECISION_HEADER])
    assert decision is not None
    assert {one.speed for one in decision.record().candidates} == {"measured"}
