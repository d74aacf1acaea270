"""A vLLM deployment as an engine that comes and goes with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bus import Message
from bus.claims import NameTaken
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.parts.vllm import next_worker_id, represent
from deploy.process import alongside, first_of
from engine_adapter.config import AgentConfig
from engine_adapter.vllm.config import VllmConfig
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineJoined, EngineLeft, RankDrained
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION, EP
from fleet.placement import Placement
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from fleet.requests.handovers import CommitHandover, DescribeHandover, HandoverDescribed, ProposeHandover
from tests.conftest import free_port
from tests.engine_adapter.vllm.plugin_workers import (
    SECRET,
    PluginWorker,
    disconnect,
    placement,
    table,
    until,
    vote,
)
from tests.engine_adapter.vllm.recorded_server import RECORDING, RecordedVllm, recorded_vllm

SUBJECTS = Subjects()
CONFIG = AgentConfig(heartbeat_seconds=0.05, lease_seconds=0.3)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RecordedVllm]:
    """A recorded vLLM whose tokenizer is on this machine."""
    (tmp_path / "tokenizer.json").write_text("{}")
    async with asyncio.timeout(30), recorded_vllm() as server:
        server.models["data"][0]["root"] = str(tmp_path)
        yield server


def settings(server: RecordedVllm, **about: Any) -> VllmConfig:
    fast = {"load_seconds": 0.02, "misses": 2, "plugin_seconds": 0.0, "listen": "127.0.0.1:0"}
    return VllmConfig(urls=(server.url,), **fast | about)


@asynccontextmanager
async def represented(
    broker: MemoryBroker, config: VllmConfig, name: str = "v"
) -> AsyncIterator["asyncio.Task[None]"]:
    running = represent(MemoryBus(broker), SUBJECTS, name, config, None, SECRET, CONFIG)
    async with alongside(running, name) as task:
        yield task


async def test_it_joins_with_all_that_it_found(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, settings(server)):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
    assert isinstance(joined, EngineJoined)
    assert (joined.model, joined.urls, joined.rank_header) == (
        "small",
        (server.url,) * 2,
        "X-data-parallel-rank",
    )
    assert (joined.block_size, joined.kv_blocks, joined.max_context) == (32, 24, 512)
    assert joined.tokenizer is not None
    can = joined.capabilities
    assert (can.kv_events, can.load, can.returns_ids, can.isolates_tenants) == (True, True, True, True)
    assert (can.experts, can.token_ids, joined.rearranges, joined.shape) == (False, False, False, None)


async def test_load_and_cached_blocks_of_each_rank_are_published(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with (
        represented(broker, settings(server)),
        MemoryBus(broker).subscribe(SUBJECTS.kv_metrics) as loads,
    ):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
        assert isinstance(joined, EngineJoined)
        server.metrics = RECORDING["loaded"]
        busy: dict[int, KvMetrics] = {}
        while not (busy.get(1) and busy[1].running):
            load = (await anext(loads)).message
            assert isinstance(load, KvMetrics)
            busy[load.dp_rank] = load
        await server.publish(5)
        sizes = [0, 0]
        while 0 in sizes:
            for rank in range(2):
                subject = SUBJECTS.kv_snapshot("v", joined.worker_id, rank)
                answer = await MemoryBus(broker).request(
                    subject, KvSnapshotRequested(worker_id=joined.worker_id, rank=rank)
                )
                assert isinstance(answer, KvSnapshot)
                sizes[rank] = len(answer.events)
            await server.publish(15, before=5)
    assert (busy[1].running, busy[1].waiting) == (2, 4)
    assert busy.get(0) is None or busy[0].running == 0


async def test_it_leaves_with_the_reason_and_joins_again_as_another(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    server.up = False  # not there yet: waited for
    async with represented(broker, settings(server)):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        server.up = True
        joined = (await anext(received)).message
        server.up = False
        left = (await anext(received)).message
        server.up = True
        again = (await anext(received)).message
    assert isinstance(joined, EngineJoined)
    assert isinstance(left, EngineLeft)
    assert isinstance(again, EngineJoined)
    assert left.worker_id == joined.worker_id != again.worker_id
    assert "HTTP 503" in left.reason


async def test_a_restart_that_no_reading_missed_is_another_incarnation(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, settings(server)):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        joined = (await anext(received)).message
        server.metrics = server.metrics.replace("process_start_time_seconds ", "process_start_time_seconds 1")
        left = (await anext(received)).message
        again = (await anext(received)).message
    assert isinstance(left, EngineLeft)
    assert "has started anew" in left.reason
    assert isinstance(joined, EngineJoined)
    assert isinstance(again, EngineJoined)
    assert joined.worker_id != again.worker_id


async def test_parts_that_outlive_the_http_server_are_named(
    server: RecordedVllm, caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, settings(server)):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        await anext(received)
        server.up = False
        await anext(received)
    assert "Address already in use" in caplog.text
    assert "the publisher of KV events at tcp://127.0.0.1:" in caplog.text


async def test_without_a_tokenizer_it_joins_without_exact_blocks_and_says_so(
    server: RecordedVllm, caplog: pytest.LogCaptureFixture
) -> None:
    server.models["data"][0]["root"] = "someone/model"
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, settings(server)):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
    assert isinstance(joined, EngineJoined)
    assert (joined.tokenizer, joined.capabilities.kv_events, joined.capabilities.load) == (None, False, True)
    assert "its tokenizer is not on this machine" in caplog.text
    assert "--tokenizer DIR" in caplog.text


async def test_a_name_that_is_taken_ends_it(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, settings(server)), recorded_vllm() as second:
        await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))
        with pytest.raises(ExceptionGroup) as caught:
            await represent(MemoryBus(broker), SUBJECTS, "v", settings(second), None, SECRET, CONFIG)
    assert first_of(caught.value, (NameTaken,)) is not None


# With the plugin in its workers


@asynccontextmanager
async def with_workers(
    server: RecordedVllm, **about: Any
) -> AsyncIterator[tuple[VllmConfig, list[PluginWorker]]]:
    """Settings of an agent, and workers that connect to it again and again."""
    config = settings(server, listen=f"127.0.0.1:{free_port()}", plugin_seconds=20.0, **about)
    workers = [PluginWorker(0), PluginWorker(1)]
    for worker in workers:
        worker.connect(config.address)
    try:
        yield config, workers
    finally:
        for worker in workers:
            await disconnect(worker)


async def test_with_the_plugin_it_joins_with_its_experts(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, _), represented(broker, config):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
    assert isinstance(joined, EngineJoined)
    assert (joined.rearranges, joined.gathers_all, joined.dispatch) == (True, True, "row-hash")
    assert joined.capabilities.experts
    assert joined.placement is not None
    assert Placement.from_record(joined.placement) == placement(0, epoch=1)
    assert joined.shape is not None
    assert (joined.shape.layers, joined.shape.experts, joined.shape.top_k) == (2, 6, 2)
    assert joined.shape.expert_bytes == 1200
    assert (joined.layout, len(joined.urls), joined.expert_ranks) == (EP, 2, 2)


async def test_workers_that_connect_late_bring_their_experts(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    config = settings(server, listen=f"127.0.0.1:{free_port()}")
    workers = [PluginWorker(0), PluginWorker(1)]
    async with represented(broker, config):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        first = (await anext(received)).message
        for worker in workers:
            worker.connect(config.address)
        left = (await anext(received)).message
        second = (await anext(received)).message
        for worker in workers:
            await disconnect(worker)
    assert isinstance(first, EngineJoined)
    assert isinstance(left, EngineLeft)
    assert isinstance(second, EngineJoined)
    assert (first.rearranges, left.reason, second.rearranges) == (
        False,
        "the plugin of its workers has connected",
        True,
    )


async def test_an_agent_that_ends_leaves_silently_and_its_successor_is_the_same(server: RecordedVllm) -> None:
    """vLLM may still carry out a decided handover: it is the same incarnation, with the epoch its workers know."""
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers):
        async with represented(broker, config):
            first = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
            await until(lambda: [worker.mailbox.epoch for worker in workers] == [1, 1])
        async with represented(broker, config):
            received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
            assert (await anext(received)).message == first
            second = (await anext(received)).message
    assert isinstance(first, EngineJoined)
    assert isinstance(second, EngineJoined)
    assert second.worker_id == first.worker_id
    assert second.placement == first.placement


async def test_a_restarted_vllm_joins_with_its_map_under_an_epoch_above_all_on_record(
    server: RecordedVllm,
) -> None:
    broker = MemoryBroker(SUBJECTS)
    committed = PlacementCommitted(
        engine="v", worker_id=1, attention=DP_ATTENTION, placement=placement(1, epoch=7).record()
    )
    await MemoryBus(broker).record(SUBJECTS.placements("v"), committed)
    async with with_workers(server) as (config, workers), represented(broker, config):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        first = (await anext(received)).message
        for worker in workers:
            await disconnect(worker)
        again = [PluginWorker(0, instance="start 2"), PluginWorker(1, instance="start 2")]
        for worker in again:
            worker.connect(config.address)
        await anext(received)
        second = (await anext(received)).message
        for worker in again:
            await disconnect(worker)
    assert isinstance(first, EngineJoined)
    assert isinstance(second, EngineJoined)
    assert first.placement is not None
    assert second.placement is not None
    assert (first.placement.epoch, second.placement.epoch) == (8, 9)
    assert first.worker_id != second.worker_id
    assert second.placement.slots == table().astype("<i2").tobytes()


async def test_a_map_that_vllm_chose_during_an_outage_has_an_epoch_above_all_on_record(
    server: RecordedVllm,
) -> None:
    """The network was apart for so long that vLLM's own policy took over."""
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers), represented(broker, config):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        first = (await anext(received)).message
        assert isinstance(first, EngineJoined)
        assert first.placement is not None
        committed = PlacementCommitted(
            engine="v", worker_id=first.worker_id, attention=DP_ATTENTION, placement=first.placement
        )
        await MemoryBus(broker).record(SUBJECTS.placements("v"), committed)  # as the planner does
        await until(lambda: [worker.mailbox.epoch for worker in workers] == [1, 1])
        server.up = False
        for worker in workers:
            await disconnect(worker)
        await anext(received)
        for worker in workers:
            worker.mailbox.replaced_by_vllm(table(2))
            worker.connect(config.address)
        server.up = True
        again = (await anext(received)).message
    assert isinstance(again, EngineJoined)
    assert again.placement is not None
    assert again.placement.slots == table(2).astype("<i2").tobytes()
    assert again.placement.epoch == 2
    assert again.worker_id != first.worker_id


async def test_workers_that_outlive_their_server_are_not_taken_for_those_of_the_next(
    server: RecordedVllm,
) -> None:
    """Its API server was killed, and the next vLLM runs without the plugin."""
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, _), represented(broker, replace(config, plugin_seconds=1.0)):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        first = (await anext(received)).message
        server.up = False
        await anext(received)
        server.metrics = server.metrics.replace("process_start_time_seconds ", "process_start_time_seconds 1")
        server.up = True
        second = (await anext(received)).message
        with pytest.raises(TimeoutError):  # it stays as it is
            await asyncio.wait_for(anext(received), 0.5)
    assert isinstance(first, EngineJoined)
    assert isinstance(second, EngineJoined)
    assert (first.rearranges, second.rearranges) == (True, False)


async def test_wrong_weights_drain_the_engine(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers), represented(broker, config):
        await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))
        workers[1].send(workers[1].digests(wrong=(0, 0)))
        drained = (await anext(MemoryBus(broker).replay(SUBJECTS.drains("v", None)))).message
    assert isinstance(drained, RankDrained)
    assert (drained.engine, drained.rank, drained.draining) == ("v", None, True)
    assert "the copy of expert 4 of layer 0" in drained.reason


async def test_wrong_weights_stay_drained_when_the_agent_starts_again(server: RecordedVllm) -> None:
    """Drains are kept by worker_id, and this vLLM is still the same one."""
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers):
        async with represented(broker, config):
            first = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
            workers[1].find_mismatch()
            await anext(MemoryBus(broker).replay(SUBJECTS.drains("v", None)))
        async with represented(broker, config):
            received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
            assert (await anext(received)).message == first
            second = (await anext(received)).message
    assert isinstance(first, EngineJoined)
    assert isinstance(second, EngineJoined)
    assert second.worker_id == first.worker_id
    assert not second.rearranges


async def test_wrong_weights_are_drained_again_after_an_outage(server: RecordedVllm) -> None:
    """Its workers have connected anew meanwhile, so they refuse maps from the start."""
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers), represented(broker, config):
        received = MemoryBus(broker).replay(SUBJECTS.membership("v"))
        await anext(received)
        drains = MemoryBus(broker).replay(SUBJECTS.drains("v", None))
        workers[1].find_mismatch()
        first = (await anext(drains)).message
        for worker in workers:
            await disconnect(worker)
            worker.connect(config.address)
        server.up = False
        await anext(received)
        server.up = True
        again = (await anext(received)).message
        second = (await anext(drains)).message
    assert isinstance(first, RankDrained)
    assert isinstance(again, EngineJoined)
    assert isinstance(second, RankDrained)
    assert second.worker_id == again.worker_id != first.worker_id
    assert second.draining
    assert "slot 3 of layer 1" in second.reason


async def test_a_proposed_map_reaches_the_workers_and_comes_into_force(server: RecordedVllm) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with with_workers(server) as (config, workers), represented(broker, config):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("v")))).message
        assert isinstance(joined, EngineJoined)
        new = placement(1, epoch=2)

        async def command(about: Callable[[int], Message]) -> list[HandoverDescribed]:
            answers = []
            for rank in range(2):
                subject = SUBJECTS.handover("v", joined.worker_id, rank)
                answers.append(await MemoryBus(broker).request(subject, about(rank)))
            return [answer for answer in answers if isinstance(answer, HandoverDescribed)]

        name: dict[str, Any] = {"worker_id": joined.worker_id, "token": 1}
        plan: dict[str, Any] = {"engine": "v", "handover": 5, "plan": "p", "deadline_seconds": 10.0}
        await command(lambda rank: ProposeHandover(rank=rank, placement=new.record(), **name, **plan))
        await until(lambda: all(worker.mailbox.held is not None for worker in workers))
        await command(lambda rank: CommitHandover(rank=rank, handover=5, **name))
        await until(lambda: all(worker.mailbox.proposal() is not None for worker in workers))
        assert vote(workers)
        served: set[int] = set()
        while served != {2}:
            await asyncio.sleep(0.01)
            served = {one.served for one in await command(lambda rank: DescribeHandover(rank=rank, **name))}
    assert all((worker.mailbox.table == new.expert_of_slot).all() for worker in workers)
    assert [worker.mailbox.flipped for worker in workers] == [5, 5]


def joined_as(worker_id: int) -> EngineJoined:
    return EngineJoined(
        engine="v",
        worker_id=worker_id,
        model="m",
        node="n",
        urls=(),
        block_size=32,
        kv_blocks=0,
        max_context=1,
        max_batch_tokens=1,
    )


def test_an_identity_belongs_to_one_start_of_vllm_and_ends_with_a_leave() -> None:
    first = next_worker_id("v", "start 1", None)
    assert next_worker_id("v", "start 1", joined_as(first)) == first  # the agent was started again
    second = next_worker_id("v", "start 1", EngineLeft(engine="v", worker_id=first, reason="gone"))
    assert next_worker_id("v", "start 1", joined_as(second)) == second
    others = [
        next_worker_id("v", "start 2", joined_as(first)),
        next_worker_id("w", "start 1", None),
        next_worker_id("v", "start 1", EngineLeft(engine="v", worker_id=second, reason="gone")),
    ]
    assert len({first, second, *others}) == 5
    assert all(0 <= one < 2**64 for one in (first, second, *others))
