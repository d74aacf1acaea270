"""Dynamo's workers that are ranks of engines in Roost's fleet are priced as these ranks, experts included."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from engine_adapter.dynamo.card import ENGINE_DATA
from fleet.blocks import local_hashes, sequence_hashes
from fleet.completions import DECISION_HEADER, ApiError
from fleet.facts.engines import EngineHeartbeat
from fleet.timing import EngineSpeed
from router.scheduling.decision_record import DecisionRecord
from tests.router.dynamo.fake_workers import DynamoFleet, dynamo_fleet, envelope
from tests.router.dynamo.test_deciding import post
from tests.router.dynamo.test_follower import blocks, overlap
from tests.router.learnt_tables import halves, published_clusters, tables
from tests.router.router_fixture import TEMPLATE, MockRank, Serve, archive, bpe, engine_joined, until

ENGINE, OTHER = 2**64 - 9, 2**63 + 5
PROMPT = list(range(48))


def ranks_of(engine: str, worker_id: int, first: int, ranks: int = 1) -> dict[str, Any]:
    """Limits in the card of a worker with these ranks of an engine of ours."""
    named = {"engine": engine, "worker_id": f"{worker_id:016x}"}
    return {
        "data_parallel_start_rank": first,
        "data_parallel_size": ranks,
        "runtime_data": {ENGINE_DATA: named},
    }


@cache
def packed() -> bytes:
    """The tokenizer of all engines. Two archives of one tokenizer may differ in their times."""
    return archive(bpe(300), {"eos_token": "<eos>", "chat_template": TEMPLATE})


async def joins(
    fleet: DynamoFleet,
    engine: str = "moe",
    worker_id: int = ENGINE,
    urls: Sequence[str] = ("http://127.0.0.1:9", "http://127.0.0.1:10"),
) -> None:
    """An engine of ours joins Roost's fleet. Experts 0 and 1 of every layer are on its first half."""
    digest = await fleet.bus.put_blob(packed())
    joined = engine_joined(
        engine,
        urls,
        digest,
        worker_id=worker_id,
        model="tiny",
        block_size=16,
        speed=EngineSpeed(dispatch=1e-3),
    )
    await fleet.bus.record(fleet.subjects.membership(engine), joined)
    beat = EngineHeartbeat(engine=engine, worker_id=worker_id, epoch=0)
    await fleet.bus.publisher(fleet.subjects.heartbeats(engine)).publish(beat)

    def priced() -> bool:
        state = fleet.service.view.engine(worker_id)
        return state is not None and state.obstacle is None and state.locality is not None

    await until(priced)


async def embedded(fleet: DynamoFleet) -> None:
    """An engine with two ranks, each a worker of its own in Dynamo."""
    await joins(fleet)
    for rank, instance in enumerate((101, 102)):
        await fleet.join(instance, limits=ranks_of("moe", ENGINE, rank))
    await until(lambda: set(fleet.follower.serving) >= {(ENGINE, 0), (ENGINE, 1)})


async def teach(fleet: DynamoFleet, weights: tuple[float, float]) -> None:
    """Let the tracker know the experts of PROMPT's blocks."""
    blocks = sequence_hashes(local_hashes(PROMPT))
    rows = {block: (weights, 4.0 * at) for at, block in enumerate(blocks, 1)}
    clusters = msgspec.structs.replace(published_clusters(halves(5)), model="tiny")
    await fleet.bus.publisher(fleet.subjects.clusters).publish(clusters)
    told = tables(5, clusters=5, blocks=rows, gain=1.0, model="tiny")
    await fleet.bus.publisher(fleet.subjects.tables).publish(told)

    def come() -> bool:
        replica = fleet.service.scheduler.predictor.replica("tiny")
        priced = fleet.service.view.prices("tiny").priced
        return replica is not None and replica.tables is not None and bool(priced.all())

    await until(come)


def decided(fleet: DynamoFleet) -> DecisionRecord:
    """The decision about the last request that was served."""
    decision = fleet.service.kept(fleet.calls.served[-1].metadata[DECISION_HEADER])
    assert decision is not None
    return decision.record()


@pytest.mark.parametrize("home", [0, 1])
async def test_a_request_goes_to_the_worker_whose_rank_has_its_experts(home: int) -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        await teach(fleet, (0.95, 0.05) if home == 0 else (0.05, 0.95))
        await fleet.ask(PROMPT)
        record = decided(fleet)
        assert record.chosen == f"moe/{home}"
        near, far = record.candidates
        assert near.terms_ms.experts < far.terms_ms.experts
        assert {one.experts_note for one in record.candidates} == {None}
        assert record.epochs.placement == {"moe": 0}
        assert fleet.calls.served[0].instance == (101, 102)[home]
        assert fleet.calls.served[0].body["routing"].get("dp_rank") == (None, 1)[home]


async def test_events_on_dynamos_plane_are_not_applied_to_ranks_of_the_fleet() -> None:
    """Those on the bus of the fleet are."""
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        fleet.follower.take(envelope(101, 0, blocks(101, 2)))
        assert overlap(fleet) == [0, 0]
        assert fleet.calls.dumps == 0


async def test_a_worker_is_an_engine_of_its_own_until_its_engine_has_joined_and_after_it_is_forgotten() -> (
    None
):
    async with dynamo_fleet() as fleet:
        await fleet.join(101, limits=ranks_of("moe", ENGINE, 0, 2))
        assert set(fleet.follower.serving) == {(101, 0), (101, 1)}
        await fleet.ask(PROMPT)
        await joins(fleet)
        await until(lambda: set(fleet.follower.serving) == {(ENGINE, 0), (ENGINE, 1)})
        await fleet.ask(PROMPT)
        assert decided(fleet).chosen.startswith("moe/")
        assert [one.instance for one in fleet.calls.served] == [101, 101]
        fleet.service.forget_worker(ENGINE)
        await until(lambda: set(fleet.follower.serving) == {(101, 0), (101, 1)})
        await fleet.ask(PROMPT)
        assert decided(fleet).chosen.startswith("backend-")


@pytest.mark.parametrize(
    "named",
    [
        {"engine": "other", "worker_id": f"{ENGINE:016x}"},
        {"engine": "moe", "worker_id": f"{OTHER:016x}"},
        {"engine": "moe", "worker_id": ENGINE},
        {"engine": "moe", "worker_id": "not hexadecimal!"},
        ["moe"],
        None,
    ],
)
async def test_a_card_that_does_not_name_a_known_engine_leaves_its_worker_alone(named: Any) -> None:
    async with dynamo_fleet() as fleet:
        await joins(fleet)
        await fleet.join(101, limits={"runtime_data": {ENGINE_DATA: named}})
        assert set(fleet.follower.serving) == {(101, 0)}


async def test_ranks_that_the_engine_does_not_have_are_none_of_its_own() -> None:
    async with dynamo_fleet() as fleet:
        await joins(fleet)
        await fleet.join(101, limits=ranks_of("moe", ENGINE, 1, 2))
        assert set(fleet.follower.serving) == {(101, 0), (101, 1)}


async def test_an_engine_outside_dynamo_gets_no_request_of_its_frontend() -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        await joins(fleet, "outside", OTHER)
        for _ in range(4):
            await fleet.ask(PROMPT)
            record = decided(fleet)
            assert {one.engine for one in record.candidates} == {"moe"}
            assert {one.reason for one in record.excluded} == {
                "it does not serve in Dynamo's namespace dynamo"
            }


async def test_a_request_that_only_engines_outside_dynamo_could_serve_is_refused_with_the_reason() -> None:
    async with dynamo_fleet() as fleet:
        await joins(fleet)
        with pytest.raises(ApiError, match="does not serve in Dynamo's namespace") as refused:
            await fleet.ask(PROMPT)
        assert refused.value.status == 503


async def test_a_worker_that_leaves_dynamo_leaves_its_rank_to_the_fleet() -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        fleet.store.records = {key: one for key, one in fleet.store.records.items() if "101" not in key}
        await until(lambda: set(fleet.follower.serving) == {(ENGINE, 1)})
        for _ in range(3):
            await fleet.ask(PROMPT)
        assert {one.instance for one in fleet.calls.served} == {102}
        state = fleet.service.view.engine(ENGINE)
        assert state is not None
        assert state.obstacle is None


async def test_of_two_workers_with_one_rank_the_one_that_renews_its_record_serves_it() -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        fleet.store.stale = {101}
        await fleet.join(103, limits=ranks_of("moe", ENGINE, 0))
        await until(lambda: fleet.follower.serving[ENGINE, 0].instance_id == 103)


async def test_a_worker_of_another_kind_with_the_same_tokenizer_serves_the_same_requests() -> None:
    async with dynamo_fleet(11) as fleet:
        await embedded(fleet)

        def together() -> bool:
            return len(fleet.service.view.target_table("tiny").targets) == 3

        await until(together)
        await fleet.ask(PROMPT)
        assert {one.engine[:7] for one in decided(fleet).candidates} == {"moe", "backend"}


async def test_a_worker_named_by_the_client_serves_with_any_of_its_ranks() -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        for named in (102, 101, 102):
            await fleet.ask(PROMPT, routing={"backend_instance_id": named})
        assert [one.instance for one in fleet.calls.served] == [102, 101, 102]
        assert {one.reason for one in decided(fleet).excluded} == {"the request names another worker"}


async def test_the_choice_names_the_instance_by_headers() -> None:
    async with dynamo_fleet() as fleet:
        await embedded(fleet)
        status, found = await post(fleet, "/v1/route", {"prompt": PROMPT, "max_tokens": 4})
        assert status == 200, found
        rank = int(found["chosen"].rpartition("/")[2])
        expected = {"x-dynamo-worker-instance-id": ("101", "102")[rank]}
        assert found["headers"] == (expected | {"x-dynamo-dp-rank": "1"} if rank else expected)


async def test_over_http_only_engines_of_the_fleet_are_candidates(
    serve_rank: Serve, byte_archive: bytes
) -> None:
    async with dynamo_fleet(11) as fleet:
        rank = await serve_rank(MockRank(byte_archive))
        await joins(fleet, urls=[rank.url])
        await fleet.join(101, limits=ranks_of("moe", ENGINE, 0))
        await until(lambda: len(fleet.service.view.target_table("tiny").targets) == 2)
        for seed in range(6):
            body = {"prompt": PROMPT, "max_tokens": 4, "seed": seed}
            status, found = await post(fleet, "/v1/completions", body)
            assert status == 200, found
        assert len(rank.requests) == 6
        assert not fleet.calls.served
