"""The memory that ranks state: cells by use at every stage of a handover, and what their engine states."""

import asyncio

import msgspec
import pytest

from bus import Declined
from engine_adapter.agent.memory_report import memory_described
from engine_adapter.config import TransferConfig
from engine_adapter.engine import RankMemory
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.transfer.in_process import MemoryTransfer, PullFault
from fleet.handover import RankState
from fleet.placement import linear, with_rows
from fleet.requests.engines import DescribeMemory, MemoryDescribed
from tests.engine_adapter.rank_fixture import SUBJECTS, WORKER, Group, after, standing

pytestmark = pytest.mark.looptime
FIRST = linear(layers=2, experts=6, ranks=3, slots_per_rank=3)
"""rank 0 has experts 0 and 1, rank 1 has 2 and 3, rank 2 has 4 and 5; the last slot of each is empty"""
COPIED = after(FIRST, (1, 8, 0))
"""expert 1/0 comes to rank 2"""
LATE = TransferConfig(retries=0, quarantine_cells=2)


async def described(group: Group, rank: int) -> MemoryDescribed:
    request = DescribeMemory(worker_id=WORKER, rank=rank)
    answer = await group.bus.request(SUBJECTS.handover("a", WORKER, rank), request)
    assert isinstance(answer, MemoryDescribed)
    assert (answer.worker_id, answer.rank) == (WORKER, rank)
    return answer


async def cells(group: Group, rank: int) -> dict[str, int]:
    """Cells by use, without those that there are none of. All cells are counted once."""
    found = (await described(group, rank)).cells
    assert sum(found.values()) == group.ranks[rank].experts.memory.cells
    return {use: count for use, count in found.items() if count}


async def test_cells_are_counted_by_use_at_every_stage_of_a_handover() -> None:
    async with standing(FIRST) as group:
        at_rest = {"whole": 4, "empty": 2, "free": 3}
        assert await cells(group, 2) == at_rest
        group.transfers[2].faults.append(PullFault(delay_seconds=0.8))
        await group.propose(COPIED)
        await asyncio.sleep(0.3)
        assert await cells(group, 2) == {**at_rest, "free": 2, "pulling": 1}
        for rank in range(3):
            await group.reaches(rank, RankState.STAGED)
        assert await cells(group, 2) == {**at_rest, "free": 2, "staged": 1}
        for rank in range(3):
            await group.commit(rank)
        await group.until(2, lambda status: status.served == 1)
        assert await cells(group, 2) == {"whole": 5, "empty": 1, "free": 3}
        assert await cells(group, 0) == at_rest


async def test_late_bytes_are_counted_in_quarantine() -> None:
    async with standing(FIRST, LATE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(COPIED, deadline=5.0)
        await group.reaches(2, RankState.FAILED)
        assert (await cells(group, 2))["quarantined"] == 1
        for rank in range(3):
            await group.abort(rank)
        assert (await cells(group, 2))["quarantined"] == 1
        group.fabric.resume(group.transfers[0])
        await group.until(2, lambda status: status.free == 3)
        assert await cells(group, 2) == {"whole": 4, "empty": 2, "free": 3}


async def test_cells_in_service_are_told_apart_by_the_form_of_their_layer() -> None:
    sharded = with_rows(FIRST, {0: None}, epoch=1)
    async with standing(FIRST) as group:
        await group.hand_over(sharded)
        for rank in range(3):
            assert await cells(group, rank) == {"whole": 2, "sharded": 2, "empty": 2, "free": 3}


async def test_a_question_to_another_rank_is_refused() -> None:
    async with standing(FIRST) as group:
        with pytest.raises(Declined, match="this is rank 1 of worker 7, not rank 0"):
            await group.bus.request(
                SUBJECTS.handover("a", WORKER, 1), DescribeMemory(worker_id=WORKER, rank=0)
            )


async def test_what_the_engine_and_its_transfers_state_is_added_and_nothing_is_made_up() -> None:
    async with standing(FIRST) as group:
        bare = await described(group, 0)
        assert (bare.attention, bare.kv_pool, bare.communicators, bare.runtime) == (None,) * 4
        assert bare.cell_bytes == group.ranks[0].experts.memory.cell_bytes
        assert bare.resident > bare.resident_shared >= bare.resident_foreign
        stated = RankMemory(
            attention=10, other_weights=20, kv_pool=30, communicators=40, runtime=50, note="n"
        )
        about = msgspec.structs.replace(group.ranks[0].description, memory=stated)
        agent, memory = group.agents[0], group.ranks[0].experts.memory

        class Opened(MemoryTransfer):
            opened_bytes = 500

        ways = (Opened(group.fabric, "x", memory), group.transfers[0])
        context = RankContext(group.bus, SUBJECTS, "a", WORKER, about)
        found = memory_described(context, memory, agent.protocol.cell_table, FIRST, ways)
        assert (found.attention, found.other_weights, found.kv_pool) == (10, 20, 30)
        assert (found.communicators, found.runtime, found.note) == (540, 50, "n")
