"""Requests that pairs of prefill and decode workers serve."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.completions import DECISION_HEADER, ApiError
from fleet.popularity import PROMPT_EXPERTS, ExpertCounts, PromptExperts
from router.config import RouterConfig
from router.dynamo.config import DynamoConfig
from router.dynamo.eligibility import EXPECTS_KV
from router.dynamo.workers import prefill_model
from router.health.attempt_failures import AttemptFailure
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.routing_request import RoutingRequest
from router.upstream.rank_client import UpstreamFailed
from tests.router.dynamo.fake_workers import (
    HANDLE,
    DynamoFleet,
    FakeContext,
    dynamo_fleet,
    envelope,
    expected,
    ids_of,
)
from tests.router.dynamo.test_fleet_ranks import ENGINE, joins, ranks_of, teach
from tests.router.router_fixture import metric, until

PROMPT = list(range(40))
PREFILL, DECODE = (11, 12), (21, 22)


@asynccontextmanager
async def pairs(
    prefill: tuple[int, ...] = PREFILL, decode: tuple[int, ...] = DECODE, limits: Any = None, **more: Any
) -> AsyncIterator[DynamoFleet]:
    more |= {} if limits is None else {"limits": limits}
    async with dynamo_fleet(*prefill, worker_type="prefill", model_type="", **more) as fleet:
        await fleet.join(*decode, worker_type="decode")
        yield fleet


def decision_of(fleet: DynamoFleet, at: int = -1) -> Decision:
    decision = fleet.service.kept(fleet.calls.served[at].metadata[DECISION_HEADER])
    assert decision is not None
    return decision


def record_of(fleet: DynamoFleet, at: int = -1) -> DecisionRecord:
    return decision_of(fleet, at).record()


def blocks_stored(worker: int, tokens: list[int], sequence: int = 1) -> list[bytes]:
    """A worker's message that it holds the blocks of these tokens."""
    local = local_hashes(tokens, 16)
    blocks = [
        {"block_hash": whole, "tokens_hash": own}
        for whole, own in zip(sequence_hashes(local), local, strict=True)
    ]
    stored = {"stored": {"parent_hash": None, "blocks": blocks}}
    event = {"event_id": sequence, "data": stored, "dp_rank": 0}
    return envelope(worker, sequence, [{"worker_id": worker, "event": event}], publisher=worker)


def fails(*calls: int, how: AttemptFailure = AttemptFailure.BROKEN) -> Any:
    def fault(call: int, item: int) -> None:
        if call in calls:
            raise UpstreamFailed(how, "killed")

    return fault


async def test_a_prefill_worker_computes_the_prompt_and_a_decode_worker_the_answer() -> None:
    async with pairs() as fleet:
        items = await fleet.ask(PROMPT)
        first, second = fleet.calls.served
        assert ids_of(items) == expected(PROMPT, 8)
        assert (first.instance in PREFILL, second.instance in DECODE) == (True, True)
        assert first.body["routing"]["prefill_worker_id"] == first.instance
        assert second.body["prefill_result"]["disaggregated_params"] == HANDLE
        assert second.body["routing"]["prefill_worker_id"] == first.instance
        assert second.body["routing"]["backend_instance_id"] == second.instance
        assert second.body["stop_conditions"]["max_tokens"] == 8
        assert "prefill_result" not in first.body


async def test_one_record_shows_both_choices() -> None:
    async with pairs() as fleet:
        await fleet.ask(PROMPT)
        record = record_of(fleet)
        assert record.prefill is not None
        assert record.prefill.decision is not None
        before = record.prefill.decision
        assert {int(one.worker_id) for one in record.candidates} == set(DECODE)
        assert {int(one.worker_id) for one in before.candidates} == set(PREFILL)
        assert before.id == fleet.calls.served[0].metadata[DECISION_HEADER] != record.id
        assert record_of(fleet, 0).id == before.id
        assert record.prefill.failure is None


async def test_a_prefill_worker_is_priced_by_prefix_and_queue_alone() -> None:
    async with pairs() as fleet:
        await fleet.ask(PROMPT)
        before = decision_of(fleet, 0)
    assert before.ask.output_tokens == 0
    assert before.scores.ms("prefill").min() > 0
    for term in ("decode", "experts", "distinct"):
        assert not before.scores.ms(term).any()


async def test_the_prefill_worker_that_holds_the_prefix_is_chosen() -> None:
    async with pairs((11, 12, 13)) as fleet:
        for holder in (13, 11, 12):
            prompt = [holder * 7 + at for at in range(160)]
            await holds(fleet, holder, prompt, 10, prefill_model("tiny"))
            await fleet.ask(prompt)
            assert fleet.calls.served[-2].instance == holder


async def holds(fleet: DynamoFleet, worker: int, prompt: list[int], blocks: int, model: str) -> None:
    """Let a worker report the first blocks of a prompt, and wait until the router knows."""
    fleet.follower.take(blocks_stored(worker, prompt[: 16 * blocks]))
    table = fleet.service.scheduler.target_table(model)
    need = RoutingRequest(
        model=model,
        prompt=TokenPrompt(prompt, salted_seed("")),
        context=len(prompt),
        output=1,
        tokenizer=table.sent_tokenizer,
    )

    def known() -> bool:
        decision = fleet.service.decide(need, "probe")
        return int(decision.overlap_blocks[table.index[worker, 0]]) == blocks

    await until(known)


async def test_a_decode_worker_is_priced_by_the_transfer_of_what_it_lacks() -> None:
    settings = DynamoConfig(namespace="dynamo", poll_seconds=0.01, kv_transfer_token_seconds=1e-3)
    async with pairs(settings=settings) as fleet:
        prompt = list(range(100, 260))
        await holds(fleet, 22, prompt, 6, "tiny")
        await fleet.ask(prompt)
        record = record_of(fleet)
        decision = decision_of(fleet)
    by_worker = {int(one.worker_id): one for one in record.candidates}
    assert record.chosen == f"{by_worker[22].engine}/0"
    assert by_worker[22].overlap_blocks == 6
    assert decision.cached_tokens == 96
    terms = dict(
        zip([one.key[0] for one in decision.target_table.targets], decision.scores.ms("prefill"), strict=True)
    )
    assert terms[21] - terms[22] == pytest.approx(96.0)
    assert record.prefill is not None
    assert record.prefill.transfer_token_ms == pytest.approx(1.0)
    assert {one.uncached_tokens for one in record.candidates} == {1}


async def test_the_bookings_of_both_end() -> None:
    async with pairs() as fleet:
        await fleet.ask(PROMPT)
        for model in ("tiny", "tiny (prefill)"):
            table = fleet.service.scheduler.target_table(model)
            assert not fleet.service.scheduler.reservations.load(table.rows, fleet.service.clock()).any()


async def test_another_prefill_worker_takes_the_place_of_one_that_fails() -> None:
    async with pairs() as fleet:
        fleet.calls.fault = fails(1)
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        first, second, third = fleet.calls.served
        assert {first.instance, second.instance} == set(PREFILL)
        assert third.body["routing"]["prefill_worker_id"] == second.instance
        assert record_of(fleet, 1).replaces == record_of(fleet, 0).id


async def test_the_decode_worker_computes_the_prompt_when_every_prefill_worker_fails() -> None:
    async with pairs() as fleet:
        fleet.calls.fault = fails(1, 2)
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        last = fleet.calls.served[-1]
        assert last.instance in DECODE
        assert "prefill_result" not in last.body
        prefill = record_of(fleet).prefill
        assert prefill is not None
        assert prefill.failure is not None
        assert "killed" in prefill.failure or "failed this request" in prefill.failure
        assert record_of(fleet).candidates[0].uncached_tokens == len(PROMPT)


async def test_without_prefill_workers_the_decode_worker_computes_the_prompt() -> None:
    async with dynamo_fleet(*DECODE, worker_type="decode") as fleet:
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        prefill = record_of(fleet).prefill
        assert prefill is not None
        assert (prefill.failure, prefill.decision) == ("no prefill worker is known", None)


async def test_prefill_workers_beside_aggregated_ones_are_not_used() -> None:
    async with dynamo_fleet(11, worker_type="prefill", model_type="") as fleet:
        await fleet.join(31)
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        assert [one.instance for one in fleet.calls.served] == [31]
        assert record_of(fleet).prefill is None


async def test_aggregated_workers_beside_pairs_serve_what_no_prefill_worker_can() -> None:
    async with pairs() as fleet:
        await fleet.join(31)
        await fleet.ask(PROMPT)
        assert fleet.calls.served[-1].instance in DECODE
        fleet.calls.fault = fails(3, 4)
        await fleet.ask(PROMPT[::-1])
        assert fleet.calls.served[-1].instance == 31
        assert EXPECTS_KV in {one.reason for one in record_of(fleet).excluded}


async def test_prefill_workers_alone_serve_nothing() -> None:
    async with dynamo_fleet(11, worker_type="prefill", model_type="") as fleet:
        with pytest.raises(ApiError) as refused:
            await fleet.ask(PROMPT)
        assert refused.value.status == 404
        assert fleet.follower.offered(None) is None


async def test_a_prefill_worker_that_names_no_kv_is_replaced() -> None:
    async with pairs((11,)) as fleet:
        fleet.calls.prefilled = {}
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        prefill = record_of(fleet).prefill
        assert prefill is not None
        assert prefill.failure is not None


async def test_a_request_that_a_prefill_worker_calls_invalid_is_refused() -> None:
    async with pairs() as fleet:

        def fault(call: int, item: int) -> None:
            raise ApiError(400, "no such thing", code="invalid_value")

        fleet.calls.fault = fault
        with pytest.raises(ApiError, match="no such thing"):
            await fleet.ask(PROMPT)
        assert len(fleet.calls.served) == 1


async def test_an_answer_that_breaks_off_is_continued_by_another_pair() -> None:
    async with pairs() as fleet:

        def fault(call: int, item: int) -> None:
            if call == 2 and item == 3:
                raise UpstreamFailed(AttemptFailure.BROKEN, "killed")

        fleet.calls.fault = fault
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        _, broken, again, last = fleet.calls.served
        assert again.body["token_ids"] == last.body["token_ids"] == PROMPT + expected(PROMPT, 3)
        assert {broken.instance, last.instance} == set(DECODE)
        assert last.body["stop_conditions"]["max_tokens"] == 5


BOOTSTRAP = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9, "bootstrap_room": 77}


async def test_workers_that_meet_while_the_prefill_runs_are_called_together() -> None:
    async with pairs() as fleet:
        fleet.calls.prefilled = {"disaggregated_params": BOOTSTRAP | {"more": 1}, "finish_reason": None}
        fleet.calls.after_prefill = asyncio.Event()
        items = await fleet.ask(PROMPT)  # although the prefill worker never ends its answer
        assert ids_of(items) == expected(PROMPT, 8)
        assert fleet.calls.served[-1].body["bootstrap_info"] == BOOTSTRAP
        assert "prefill_result" not in fleet.calls.served[-1].body
        table = fleet.service.scheduler.target_table("tiny (prefill)")
        assert not fleet.service.scheduler.reservations.load(table.rows, fleet.service.clock()).any()


async def test_a_meeting_place_in_the_card_goes_to_both_workers_at_once() -> None:
    limits = {"disaggregated_endpoint": {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9}}
    async with pairs(limits=limits, ranks=4) as fleet:
        fleet.calls.prefilled = {"finish_reason": None}
        fleet.calls.after_prefill = asyncio.Event()
        for rank in (3, 1):
            hints = {"prefill_worker_id": 11, "prefill_dp_rank": rank}
            assert ids_of(await fleet.ask(PROMPT, routing=hints)) == expected(PROMPT, 8)
            first, second = fleet.calls.served[-2:]
            place = first.body["bootstrap_info"]
            assert place == second.body["bootstrap_info"]
            assert place["bootstrap_room"] % 4 == rank == first.body["routing"]["dp_rank"]
            assert 0 <= place["bootstrap_room"] < 2**63


async def test_a_client_that_leaves_during_the_prefill_leaves_nothing_behind() -> None:
    async with pairs() as fleet:
        fleet.calls.after_prefill = asyncio.Event()
        task = asyncio.create_task(fleet.ask(PROMPT))
        await until(lambda: fleet.calls.served)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        table = fleet.service.scheduler.target_table("tiny (prefill)")
        assert not fleet.service.scheduler.reservations.load(table.rows, fleet.service.clock()).any()
        await fleet.door.drained()


@pytest.mark.parametrize("error", [True, False])
async def test_a_client_that_leaves_during_the_prefill_blames_no_worker(error: bool) -> None:
    async with pairs() as fleet:
        context = FakeContext()
        fleet.calls.prefilled = {"finish_reason": "cancelled"}

        def stops(call: int, item: int) -> None:
            context.stopped = True
            if error:
                raise UpstreamFailed(AttemptFailure.BROKEN, "cancelled")

        fleet.calls.fault = stops
        assert await fleet.ask(PROMPT, context=context) == []
        assert len(fleet.calls.served) == 1
        assert metric(fleet.service.metrics, "retries_total", cause="broken") == 0


async def test_a_client_may_name_both_workers() -> None:
    async with pairs() as fleet:
        for one, other in ((11, 22), (12, 21)):
            await fleet.ask(PROMPT, routing={"prefill_worker_id": one, "decode_worker_id": other})
        assert [one.instance for one in fleet.calls.served] == [11, 22, 12, 21]


async def test_a_prompt_that_was_computed_elsewhere_is_not_computed_again() -> None:
    async with pairs() as fleet:
        await fleet.ask(PROMPT, prefill_result={"disaggregated_params": HANDLE})
        (served,) = fleet.calls.served
        assert served.body["prefill_result"] == {"disaggregated_params": HANDLE}


async def test_too_many_prompts_are_refused_and_not_computed_beside_decoding() -> None:
    config = RouterConfig(max_requests_per_rank=1, queue_requests=1, queue_wait_seconds=0.05)
    async with pairs((11,), config=config) as fleet:
        fleet.calls.after_prefill = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(fleet.ask(PROMPT))
            await until(lambda: fleet.calls.served)
            with pytest.raises(ApiError) as refused:
                await fleet.ask(PROMPT, context=FakeContext("second"))
            assert refused.value.status in (429, 503)
            assert len(fleet.calls.served) == 1
            fleet.calls.after_prefill.set()
        assert ids_of(first.result()) == expected(PROMPT, 8)


@pytest.mark.parametrize("stated", [{"tokens": "x"}, {"tokens": 3, "counts": {"layers": 1}}, 5])
async def test_experts_that_cannot_be_read_fail_the_attempt_only(stated: Any) -> None:
    async with pairs() as fleet:
        fleet.calls.prefilled |= {"engine_data": {PROMPT_EXPERTS: stated}}
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        assert metric(fleet.service.metrics, "retries_total", cause="broken") >= 0


async def test_what_the_prompt_activated_reaches_the_record() -> None:
    counts = np.arange(12).reshape(3, 4)
    stated = msgspec.to_builtins(PromptExperts(tokens=40, counts=ExpertCounts.of(counts)))
    stated = msgspec.json.decode(msgspec.json.encode(stated))
    async with pairs() as fleet:
        fleet.calls.prefilled |= {"engine_data": {PROMPT_EXPERTS: stated}}
        await fleet.ask(PROMPT)
        prefill = record_of(fleet).prefill
        assert prefill is not None
        assert prefill.activated_tokens == 40


@pytest.mark.parametrize("reports", [False, True])
async def test_the_decode_worker_has_the_experts_that_the_prompt_activated(reports: bool) -> None:
    """The prediction says the first half of the experts, which are on rank 0. The prompt activated the other
    half, but a stock prefill worker does not say so.
    """
    async with dynamo_fleet() as fleet:
        await joins(fleet)
        for rank, instance in enumerate(DECODE):
            await fleet.join(instance, limits=ranks_of("moe", ENGINE, rank), worker_type="decode")
        await fleet.join(11, worker_type="prefill", model_type="")
        await until(lambda: set(fleet.follower.serving) == {(ENGINE, 0), (ENGINE, 1), (11, 0)})
        await teach(fleet, (0.95, 0.05))
        if reports:
            counts = ExpertCounts.of(np.array([[0, 0, 9, 9]] * 2))
            stated = msgspec.json.encode(PromptExperts(tokens=len(PROMPT), counts=counts))
            fleet.calls.prefilled |= {"engine_data": {PROMPT_EXPERTS: msgspec.json.decode(stated)}}
        assert ids_of(await fleet.ask(PROMPT)) == expected(PROMPT, 8)
        record = record_of(fleet)
        assert [one.instance for one in fleet.calls.served] == [11, DECODE[reports]]
        assert record.chosen == f"moe/{int(reports)}"
        assert record.prefill is not None
        assert record.prefill.failure is None
        assert record.prediction is not None
        assert record.prediction.best == ("prefill" if reports else "prefix")
        near, far = record.candidates
        assert near.terms_ms.experts < far.terms_ms.experts
