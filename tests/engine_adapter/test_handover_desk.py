"""Handovers of three ranks over the memory bus, as each rank takes part in them. Time is virtual."""

import pytest

from fleet.handover import RankState
from fleet.placement import EMPTY, linear
from tests.engine_adapter.standing_ranks import after, standing

pytestmark = pytest.mark.looptime
FIRST = linear(layers=2, experts=6, ranks=3, slots_per_rank=3)
"""rank 0 has experts 0 and 1, rank 1 has 2 and 3, rank 2 has 4 and 5; the last slot of each is empty"""


async def test_an_expert_is_brought_into_an_empty_slot_and_served_from_the_commit_on() -> None:
    wanted = after(FIRST, (1, 8, 0))
    async with standing(FIRST) as group:
        described = await group.hand_over(wanted)
        group.check()
        assert group.placement == wanted
        assert [one.state for one in described] == [RankState.SERVING] * 3
        assert [(pull.source, pull.experts) for pull in described[2].pulls] == [(0, 1)]
        assert [one.free for one in described] == group.free


async def test_two_experts_change_places() -> None:
    wanted = after(FIRST, (0, 0, 5), (0, 7, 0))
    async with standing(FIRST) as group:
        await group.hand_over(wanted)
        group.check()
        await group.hand_over(after(wanted, (0, 0, 0), (0, 7, 5), (1, 0, EMPTY), (1, 8, 0)))
        group.check()
