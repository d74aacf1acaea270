"""How a simulated engine's experts move: cells that say what lies in them, links that take their time, ranks
that go over together. Time is virtual."""

import asyncio

import numpy as np
import pytest

from engine_adapter.engine import EngineFailed
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.handover import SimulatedEpoch
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from engine_adapter.simulated.model.memory import SimulatedCells
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.checksums import checksums
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import AddressRefused, Overdue, PeerGone, Pull
from fleet.placement import Placement, linear, with_rows
from tests.engine_adapter.simulated.test_engine import ask, running

pytestmark = pytest.mark.looptime
SLOTS = 17
"""per rank: of 32 experts on two ranks, one is room for a replica"""


FORM = CellFormat.of(SimulatedCells(linear(layers=1, experts=2, ranks=2), 0, 2))
"""of the cells of two ranks"""


def whole(source: int, cell: int, ranks: int = 2) -> Pull:
    """All of a cell."""
    return Pull(source, 0, cell, 0, 64 * ranks)


def replicated(engine: SimulatedEngine, layer: int = 1, expert: int = 3, epoch: int = 1) -> Placement:
    """An expert of rank 0, also in the last slot of rank 1."""
    table = engine.placement.expert_of_slot.copy()
    table[layer, -1] = expert
    return Placement(table, experts=32, ranks=2, epoch=epoch)


async def prepared(
    engine: SimulatedEngine, placement: Placement, layer: int = 1, expert: int = 3
) -> list[SimulatedEpoch]:
    """By every rank, with the expert brought into a free cell of rank 1."""
    source, target = engine.ranks
    free = placement.layers * SLOTS
    await target.transfer.pull(
        source.transfer.address(own_address(source.experts.memory)),
        [whole(int(source.experts.cells[layer, expert]), free)],
        1.0,
    )
    cells = target.experts.cells.copy()
    cells[layer, -1] = free
    return [
        await source.experts.prepare(placement, source.experts.cells),
        await target.experts.prepare(placement, cells),
    ]


def test_a_cell_says_which_expert_lies_in_it_and_no_two_are_alike() -> None:
    config = SimulatedConfig(ranks=2, slots_per_rank=SLOTS)
    engine = SimulatedEngine(config)
    memories = [SimulatedCells(engine.placement, rank, 2) for rank in range(2)]
    held = np.concatenate([engine.placement.on_rank(rank).ravel() for rank in range(2)])
    seen = [
        checksums(memory.cell(cell), CellFormat.of(memory))
        for memory in memories
        for cell in range(4 * SLOTS)
    ]
    assert len({sums for sums, expert in zip(seen, held, strict=True) if expert >= 0}) == 4 * 32
    assert memories[0].cells == 5 * SLOTS
    with pytest.raises(IndexError, match="cell 85 of 85"):
        memories[0].cell(85)


def test_a_part_is_the_same_in_both_forms_and_a_misplaced_one_is_found() -> None:
    """Layer 1 is cut by copying parts; what the memory expects of a sharded layer is the oracle."""
    first = linear(layers=3, experts=5, ranks=3, slots_per_rank=2)
    turned = with_rows(first, {1: None}, epoch=1)
    memories = [SimulatedCells(first, rank, 3, spare_layers=2) for rank in range(3)]
    form = CellFormat.of(memories[0])
    assert memories[0].cells == 5 * 2
    cells = np.arange(6, dtype=np.int32).reshape(3, 2)
    cells[1] = 6, 7
    for rank, memory in enumerate(memories):
        for expert in range(5):
            holder, slot = divmod(int(np.flatnonzero(first.expert_of_slot[1] == expert)[0]), 2)
            assert memory.misplaced(turned, cells) is not None
            for one in form.pulls(2 + slot, rank, 6 + expert // 3, expert % 3, sharded=True):
                source, offset = memories[holder].cell(one.source), one.source_offset
                memory.cell(one.cell)[one.offset : one.offset + one.bytes] = source[
                    offset : offset + one.bytes
                ]
        assert memory.misplaced(turned, cells) is None
        assert memory.misplaced(first, cells) == (1, 0)
        assert memory.misplaced(first, np.arange(6, dtype=np.int32).reshape(3, 2)) is None
    again = SimulatedCells(turned, 2, 3)
    assert again.misplaced(turned, np.arange(6, dtype=np.int32).reshape(3, 2)) is None


async def test_reading_takes_the_time_of_the_experts_real_size_on_the_link_and_reads_of_a_rank_take_turns() -> (
    None
):
    fast, size = 1e6, SimulatedConfig().model_shape.expert_bytes
    async with running(
        ranks=4, node_ranks=2, rank_bytes_per_second=fast, node_bytes_per_second=fast / 10, time_scale=0.5
    ) as engine:
        addresses = [rank.transfer.address(own_address(rank.experts.memory)) for rank in engine.ranks]
        reader = engine.ranks[0]
        for source, speed in ((1, fast), (2, fast / 10)):
            pulled = await reader.transfer.pull(addresses[source], [whole(0, 33, 4), whole(1, 34, 4)], 60.0)
            assert pulled.bytes == 2 * size
            assert pulled.seconds == pytest.approx(0.5 * 2 * size / speed, rel=1e-2)
            for cell in range(2):
                assert (
                    reader.experts.memory.cell(33 + cell) == engine.ranks[source].experts.memory.cell(cell)
                ).all()
        both = await asyncio.gather(
            *(reader.transfer.pull(addresses[1], [whole(0, cell, 4)], 60.0) for cell in (33, 34))
        )
        assert both[1].seconds == pytest.approx(2 * both[0].seconds, rel=1e-2)


async def test_a_read_that_takes_too_long_is_overdue_and_settles_when_it_has_landed() -> None:
    async with running(rank_bytes_per_second=1e4) as engine:
        source, reader = engine.ranks
        address = source.transfer.address(own_address(source.experts.memory))
        with pytest.raises(Overdue) as overdue:
            await reader.transfer.pull(address, [whole(0, 70)], 0.5)
        assert not reader.experts.memory.cell(70).any()
        await overdue.value.settled
        assert (reader.experts.memory.cell(70) == source.experts.memory.cell(0)).all()
        with pytest.raises(AddressRefused):
            await reader.transfer.pull(address, [whole(1000, 66)], 0.5)


async def test_all_ranks_go_over_at_one_step_and_not_before_the_last_is_ready() -> None:
    async with running(slots_per_rank=SLOTS) as engine:
        placement = replicated(engine)
        first, second = await prepared(engine, placement)
        asking = asyncio.create_task(ask(engine.ranks[0], 10, 50))
        waiting = asyncio.create_task(engine.ranks[0].experts.adopt(first))
        await asyncio.sleep(0.2)
        assert engine.placement.epoch == 0
        assert not waiting.done()
        await engine.ranks[1].experts.adopt(second)
        await waiting
        assert engine.placement is placement
        assert all(rank.placement is placement for rank in engine.ranks)
        assert engine.ranks[1].experts.cells[1, -1] == 4 * SLOTS
        assert len((await asking).token_ids) == 50


async def test_an_engine_that_sleeps_goes_over_at_once() -> None:
    async with running(slots_per_rank=SLOTS) as engine:
        both = await prepared(engine, replicated(engine))
        await asyncio.gather(*(rank.experts.adopt(one) for rank, one in zip(engine.ranks, both, strict=True)))
        assert engine.placement.epoch == 1
        assert engine.steps == 0
        assert len((await ask(engine.ranks[1], 10, 5)).token_ids) == 5


async def test_steps_last_as_long_as_the_new_placement_makes_them() -> None:
    settings = {"ranks": 2, "slots_per_rank": 32, "expert_read": 0.001, "time_scale": 1.0}
    seconds = []
    async with running(**settings) as engine:
        began = engine.now
        await ask(engine.ranks[0], 1, 10)
        seconds.append(engine.now - began)
        everywhere = np.tile(
            np.arange(32), (4, 2)
        )  # every expert on both ranks: what rank 0 wants it reads from its own
        placement = Placement(everywhere, experts=32, ranks=2, epoch=1)
        for rank in engine.ranks:
            other = engine.ranks[1 - rank.description.rank]
            _whole(rank.experts.memory, rank.placement, rank.description.rank, other.experts.memory)
        both = [await rank.experts.prepare(placement, _cells(rank.description.rank)) for rank in engine.ranks]
        await asyncio.gather(*(rank.experts.adopt(one) for rank, one in zip(engine.ranks, both, strict=True)))
        began = engine.now
        await ask(engine.ranks[0], 1, 10)
        seconds.append(engine.now - began)
    assert seconds[0] != pytest.approx(seconds[1], rel=0.01)


def _cells(rank: int) -> np.ndarray:
    """Own experts where they are; the others in the cells of the empty slots behind them."""
    table = np.arange(4 * 32, dtype=np.int32).reshape(4, 32)
    return table if rank == 0 else np.concatenate([table[:, 16:], table[:, :16]], axis=1)


def _whole(memory: SimulatedCells, placement: Placement, rank: int, other: SimulatedCells) -> None:
    """Bring what the other rank holds into the cells of the empty slots."""
    assert (placement.on_rank(rank)[:, 16:] == -1).all()
    for layer in range(4):
        for slot in range(16):
            memory.cell(layer * 32 + 16 + slot)[:] = other.cell(layer * 32 + slot)


async def test_a_slot_whose_cell_holds_something_else_is_refused_before_it_is_served() -> None:
    async with running(slots_per_rank=SLOTS) as engine:
        with pytest.raises(ValueError, match="layer 1 slot 16 on rank 1 does not hold"):
            await engine.ranks[1].experts.prepare(replicated(engine), engine.ranks[1].experts.cells)
        with pytest.raises(ValueError, match="does not follow"):
            await engine.ranks[1].experts.prepare(
                SimulatedEngine(SimulatedConfig(ranks=4)).placement, engine.ranks[1].experts.cells
            )
        assert engine.placement.epoch == 0


def test_a_new_life_goes_on_with_the_last_epoch_if_it_fits() -> None:
    config = SimulatedConfig(ranks=2, slots_per_rank=SLOTS)
    last = replicated(SimulatedEngine(config), epoch=7)
    engine = SimulatedEngine(config, last=last.record())
    assert engine.placement == last
    assert engine.ranks[1].experts.memory.misplaced(last, engine.ranks[1].experts.cells) is None
    assert SimulatedEngine(SimulatedConfig(ranks=2), last=last.record()).placement.epoch == 0


def test_a_new_life_goes_on_with_sharded_layers_whose_groups_lie_in_their_cells() -> None:
    config = SimulatedConfig(ranks=2, slots_per_rank=SLOTS)
    last = with_rows(replicated(SimulatedEngine(config)), {0: None, 3: None}, epoch=7)
    engine = SimulatedEngine(config, last=last.record())
    assert engine.placement == last
    assert all(rank.experts.memory.misplaced(last, rank.experts.cells) is None for rank in engine.ranks)


@pytest.mark.parametrize(
    ("ranks", "reason"), [(1, ""), (2, ""), (3, "size 64 do not divide into parts for 3")]
)
def test_an_engine_states_whether_its_experts_can_be_cut(ranks: int, reason: str) -> None:
    engine = SimulatedEngine(SimulatedConfig(ranks=ranks))
    for rank in engine.ranks:
        assert reason in rank.description.unshardable
        assert bool(rank.description.unshardable) == bool(reason)


async def test_an_engine_whose_ranks_have_different_forms_of_one_epoch_ends() -> None:
    async with running(slots_per_rank=SLOTS) as engine:
        whole = replicated(engine)
        first, second = await prepared(engine, whole)
        other = second._replace(placement=with_rows(whole, {0: None}, epoch=whole.epoch))
        found = await asyncio.gather(
            engine.ranks[0].experts.adopt(first),
            engine.ranks[1].experts.adopt(other),
            return_exceptions=True,
        )
        assert all(isinstance(one, EngineFailed) for one in found)
        assert "different placements of epoch 1" in str(engine.failure)
        assert engine.placement.epoch == 0


async def test_an_engine_that_ends_ends_what_waits_for_its_next_epoch() -> None:
    async with running(slots_per_rank=SLOTS) as engine:
        both = await prepared(engine, replicated(engine))
        waiting = asyncio.create_task(engine.ranks[0].experts.adopt(both[0]))
        await asyncio.sleep(0.01)
        engine.order(FaultOrder(fault="die"))
        with pytest.raises(EngineFailed):
            await waiting
        with pytest.raises(EngineFailed):
            await engine.ranks[1].experts.adopt(both[1])


async def test_reads_are_slow_broken_or_damaged_where_that_was_ordered_and_nowhere_else() -> None:
    async with running(ranks=2) as engine:
        source, reader = engine.ranks
        addresses = [rank.transfer.address(own_address(rank.experts.memory)) for rank in engine.ranks]
        free, intact = 4 * 16, checksums(source.experts.memory.cell(0), FORM)

        async def read() -> tuple[int, ...]:
            await reader.transfer.pull(addresses[0], [whole(0, free)], 60.0)
            return checksums(reader.experts.memory.cell(free), FORM)

        assert await read() == intact
        engine.order(FaultOrder(fault="corrupt_reads", rank=1, seconds=10))
        assert [one == other for one, other in zip(await read(), intact, strict=True)] == [
            True,
            True,
            True,
            False,
        ]
        engine.order(FaultOrder(fault="break_reads", rank=0))
        await reader.transfer.pull(addresses[0], [whole(0, free)], 60.0)
        with pytest.raises(PeerGone, match=r"rank 1 is gone \(injected fault\)"):
            await source.transfer.pull(addresses[1], [whole(0, free)], 60.0)
        engine.order(FaultOrder(fault="heal"))
        engine.order(FaultOrder(fault="slow_reads", factor=1e9))
        with pytest.raises(Overdue):
            await reader.transfer.pull(addresses[0], [whole(0, free)], 1.0)


async def test_a_rank_says_that_it_holds_no_weights_and_shares_its_process() -> None:
    async with running(ranks=2) as engine:
        for rank in engine.ranks:
            memory = rank.description.memory
            assert memory is not None
            assert (memory.attention, memory.other_weights, memory.kv_pool, memory.runtime) == (0, 0, 0, 0)
            assert memory.ranks_in_process == 2
            assert "computes nothing" in memory.note
