"""Switches of layout over the memory bus, in virtual time, with ranks that follow the protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Bus, Declined, Message
from bus.memory import MemoryBroker, MemoryBus
from fleet.experts import ModelShape
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned
from fleet.layout import TP_EP
from fleet.placement import Placement, linear
from fleet.requests.handovers import CommitHandover, ProposeHandover
from fleet.requests.plans import ApplyPlan, MigrateExpert, RollBack, SetLayout
from migration.planning.layout_switch import switch
from migration.planning.staging_capacity import StagingRoom
from tests.migration.builders import joined
from tests.migration.executor_fixture import (
    CONFIG,
    SUBJECTS,
    ask,
    at_rest,
    leading,
    log,
)
from tests.migration.fake_ranks import Ranks

SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=16, expert_intermediate=8)
FIRST = linear(layers=3, experts=8, ranks=2, slots_per_rank=6)
PART = SHAPE.expert_bytes // 2
LAYER = 8 * PART
"""bytes that one layer moves between its two ranks, and as many within them"""


@asynccontextmanager
async def engine(broker: MemoryBroker, placement: Placement = FIRST, **fields: Any) -> AsyncIterator[Ranks]:
    """Yield an engine that has joined, whose ranks can turn layers over."""
    bus = MemoryBus(broker)
    ranks = Ranks(bus, SUBJECTS, placement, free=6)
    about = {"shape": SHAPE, "unshardable": "", **fields}
    async with ranks.serving():
        await bus.record(SUBJECTS.membership("a"), joined(1, "a", placement, **about))
        yield ranks


async def refusal(bus: Bus, request: Message) -> str:
    with pytest.raises(Declined) as refused:
        await bus.request(SUBJECTS.migrate, request, 20)
    return str(refused.value)


def every(now: bool = True, **fields: Any) -> SetLayout:
    return SetLayout(engine="a", sharded=(0, 1, 2), now=now, **fields)


async def planned(bus: Bus) -> list[MigrationPlanned]:
    return [entry for entry in await log(bus) if isinstance(entry, MigrationPlanned)]


@pytest.mark.looptime
async def test_an_engine_changes_to_experts_tp_and_back_one_layer_at_a_time() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        accepted = await ask(bus, every())
        assert (accepted.handovers, accepted.bytes, accepted.copies) == (3, 3 * LAYER, 3 * 8)
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert service.placements.engines()["a"].layout.sharded == (0, 1, 2)
        proposed = [one for rank, one in ranks.commands if isinstance(one, ProposeHandover) and rank == 0]
        assert [one.placement.sharded for one in proposed] == [(0,), (0, 1), (0, 1, 2)]
        assert not any(one.copies for one in proposed), "what is read follows from the forms"
        (entry,) = await planned(bus)
        assert (entry.to_sharded, entry.to_whole, entry.paced) == ((0, 1, 2), (), False)
        done = [one for one in await log(bus) if isinstance(one, MigrationCommitted)]
        assert [one.bytes for one in done] == [LAYER] * 3
        await ask(bus, SetLayout(engine="a", sharded=(1,), now=True))
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (1,)
        assert np.array_equal(ranks.placement.expert_of_slot[[0, 2]], FIRST.expert_of_slot[[0, 2]])
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_a_switch_and_a_migration_exclude_each_other_and_a_rollback_restores_what_was() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await ask(bus, MigrateExpert(engine="a", layer=1, expert=2, rank=1, move=True))
        assert "carrying out plan" in await refusal(bus, every())
        await asyncio.sleep(2)
        moved = ranks.placement
        await ask(bus, every())
        move = MigrateExpert(engine="a", layer=1, expert=0, rank=1)
        assert "carrying out plan" in await refusal(bus, move)
        await asyncio.sleep(5)
        assert "all layers of engine 'a' are sharded" in await refusal(bus, move)
        await ask(bus, SetLayout(engine="a", sharded=(1,), now=True))
        await asyncio.sleep(5)
        assert "layer 1 is sharded" in await refusal(bus, move)
        await ask(bus, msgspec.structs.replace(move, layer=0))
        await asyncio.sleep(2)
        first = (await planned(bus))[1].plan
        await ask(bus, RollBack(engine="a", plan=first))
        await asyncio.sleep(8)
        assert ranks.placement.sharded == ()
        assert np.array_equal(ranks.placement.replicas_on_rank, moved.replicas_on_rank)
        assert at_rest(broker, ranks)


@pytest.mark.looptime
async def test_a_coordinator_that_ends_amid_a_switch_is_followed_by_one_that_ends_it() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks:
        async with leading(bus):
            await ask(bus, every())
            await ranks.commands_to(CommitHandover)
        async with leading(MemoryBus(broker)) as service:
            await asyncio.sleep(8)
            assert ranks.placement.sharded == (0, 1, 2)
            assert service.placements.engines()["a"].placement == ranks.placement
            assert ranks.served == [0, 1, 2, 3]


@pytest.mark.looptime
async def test_a_switch_that_is_given_up_stays_where_it_is_and_can_be_continued() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        await ask(bus, every())
        await ranks.commands_to(CommitHandover)
        ranks.fails[1] = ("a part does not compare", "checksum")
        await asyncio.sleep(5)
        done = len(ranks.placement.sharded)
        assert isinstance((await log(bus))[-1], MigrationAborted)
        assert 1 <= done < 3
        ranks.fails.clear()
        again = await ask(bus, every())
        assert again.handovers == 3 - done
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (0, 1, 2)


@pytest.mark.looptime
async def test_without_now_handovers_wait_for_the_byte_budget() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    paced = replace(CONFIG, budget_bytes=2 * LAYER, budget_seconds=60.0)
    async with engine(broker) as ranks, leading(bus, paced):
        accepted = await ask(bus, every(now=False))
        assert accepted.switch is not None
        assert accepted.switch.budget_seconds == pytest.approx(30.0), (
            "one of three layers is beyond the budget"
        )
        await asyncio.sleep(20)
        assert ranks.served == [0, 1, 2]
        assert "which waits for the byte budget" in await refusal(bus, every())
        await asyncio.sleep(50)
        assert ranks.served == [0, 1, 2, 3]
        assert (await planned(bus))[0].paced


@pytest.mark.looptime
async def test_without_a_byte_budget_a_switch_needs_now() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus, replace(CONFIG, budget_bytes=0)):
        assert "planner.budget_bytes is 0" in await refusal(bus, every(now=False))
        expected = (await ask(bus, every(dry_run=True))).switch
        assert expected is not None
        assert expected.budget_seconds is None
        await ask(bus, every())
        await asyncio.sleep(5)
        assert ranks.placement.sharded == (0, 1, 2)


@pytest.mark.looptime
async def test_a_dry_run_says_bytes_by_link_seconds_and_cells_and_does_nothing() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    config = replace(CONFIG, node_bytes_per_second=1000.0)
    async with engine(broker, nodes=("x", "y")) as ranks, leading(bus, config):
        accepted = await ask(bus, every(dry_run=True))
        found = accepted.switch
        assert found is not None
        assert found.bytes_by_link == {"local": 3 * LAYER, "same-node": 0, "cross-node": 3 * LAYER}
        assert found.seconds == pytest.approx(3 * (LAYER / 2 / 1000 + 0.05), rel=1e-3)
        assert (found.measured, found.cells, found.free) == (False, 4, 6)
        await asyncio.sleep(2)
        assert ranks.served == [0]
        assert await planned(bus) == []
        await ask(bus, SetLayout(engine="a", sharded=(0,), now=True))
        await asyncio.sleep(2)
        measured = (await ask(bus, every(dry_run=True))).switch
        assert measured is not None
        assert measured.measured
        assert measured.seconds == pytest.approx(2 * (LAYER / 2 / (384 / 0.01) + 0.05), rel=1e-3)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("fields", "free", "words"),
    [
        ({"unshardable": "its agent does not turn layers over"}, 6, "its agent does not turn layers over"),
        ({"layout": TP_EP}, 6, "attention is tensor-parallel"),
        ({"shape": msgspec.structs.replace(SHAPE, expert_intermediate=7)}, 6, "size 7 do not divide"),
        ({}, 3, "needs 4 free cells to turn a layer over, and one has only 3"),
    ],
)
async def test_a_switch_that_an_engine_cannot_make_is_refused_with_the_reason(
    fields: dict[str, Any], free: int, words: str
) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker, **fields) as ranks, leading(bus):
        ranks.free = free
        assert words in await refusal(bus, every())
        plan = switch(FIRST, (0,), StagingRoom(np.zeros(2, np.intp), SHAPE.expert_bytes)).plan
        if free == 6:
            assert words in await refusal(bus, ApplyPlan(engine="a", plan=msgspec.json.encode(plan)))
        assert ranks.served == [0]


@pytest.mark.looptime
async def test_layers_that_do_not_exist_and_layouts_that_are_there_already_are_refused() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker), leading(bus):
        nothing = SetLayout(engine="a", sharded=())
        assert "all layers are whole already" in await refusal(bus, nothing)
        assert "layer 3 does not exist" in await refusal(bus, SetLayout(engine="a", sharded=(3,)))
