"""The transfer between ranks of one process: what its faults do. Its contract is tested with that of the
others."""

import asyncio

import looptime
import numpy as np
import pytest

from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.in_process import MemoryFabric, MemoryTransfer, PullFault
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.port import Overdue, PeerGone, Pull
from fleet.requests.handovers import MemoryAddress

pytestmark = pytest.mark.looptime
TENSORS = laid_out([("weights", "float32", (30, 30)), ("scales", "float32", (3,))])
WHOLE = Pull(1, 0, 2, 0, 4096)
"""all of cell 1, into cell 2"""


class Pair:
    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.source, self.target = MappedCells(TENSORS, 4), MappedCells(TENSORS, 4)
        self.giving, self.taking = self.fabric.join(self.source), self.fabric.join(self.target)
        self.source.cell(1)[:] = np.arange(self.source.cell_bytes) % 251

    @property
    def address(self) -> MemoryAddress:
        return self.giving.address(own_address(self.source))

    def landed(self) -> float:
        return float(np.mean(self.target.cell(2) == self.source.cell(1)))


@pytest.fixture
def pair() -> Pair:
    return Pair()


async def test_a_delay_beyond_the_deadline_is_overdue_and_lands_late(
    pair: Pair, looptime: looptime.LoopTimeProxy
) -> None:
    pair.taking.faults.append(PullFault(delay_seconds=5))
    with pytest.raises(Overdue) as overdue:
        await pair.taking.pull(pair.address, [WHOLE], 1)
    assert looptime == 1
    assert pair.landed() < 0.1
    assert not overdue.value.settled.done()
    await overdue.value.settled
    assert looptime == 5
    assert pair.landed() == 1


async def test_a_broken_pull_leaves_half_a_cell(pair: Pair) -> None:
    pair.taking.faults.append(PullFault(broken=True))
    with pytest.raises(PeerGone):
        await pair.taking.pull(pair.address, [WHOLE], 1)
    assert 0.4 < pair.landed() < 0.6


async def test_a_corrupted_byte_is_the_one_that_was_ordered(pair: Pair) -> None:
    pair.taking.faults.append(PullFault(corrupt=7))
    await pair.taking.pull(pair.address, [WHOLE], 1)
    assert np.flatnonzero(pair.target.cell(2) != pair.source.cell(1)).tolist() == [7]


async def test_a_stopped_rank_is_overdue_and_settles_once_it_goes_on(pair: Pair) -> None:
    pair.fabric.stop(pair.giving)
    with pytest.raises(Overdue) as overdue:
        await pair.taking.pull(pair.address, [WHOLE], 1)
    pair.fabric.resume(pair.giving)
    await overdue.value.settled
    assert pair.landed() == 1


async def test_what_hangs_settles_when_the_stopped_rank_is_killed(pair: Pair) -> None:
    pair.fabric.stop(pair.giving)
    with pytest.raises(Overdue) as overdue:
        await pair.taking.pull(pair.address, [WHOLE], 1)
    pair.fabric.kill(pair.giving)
    await overdue.value.settled
    with pytest.raises(PeerGone):
        await pair.taking.pull(pair.address, [WHOLE], 1)


async def test_a_cancelled_pull_says_that_bytes_are_still_landing(pair: Pair) -> None:
    pair.taking.faults.append(PullFault(delay_seconds=5))
    pulling = asyncio.create_task(pair.taking.pull(pair.address, [WHOLE], 60), name="a pull")
    await asyncio.sleep(1)
    pulling.cancel()
    with pytest.raises(Overdue) as overdue:
        await pulling
    await overdue.value.settled
    assert pair.landed() == 1


async def test_it_ends_with_a_read_that_hangs(pair: Pair) -> None:
    pair.fabric.stop(pair.giving)
    with pytest.raises(Overdue) as overdue:
        await pair.taking.pull(pair.address, [WHOLE], 1)
    await pair.taking.close()
    assert not overdue.value.settled.done()


def test_it_is_known_what_was_asked(pair: Pair) -> None:
    taking: MemoryTransfer = pair.taking
    taking.busy(True)
    taking.forget(pair.address)
    assert taking.is_busy
    assert taking.forgotten == [pair.giving.agent]
