"""Handovers of three ranks over the memory bus, as each rank takes part in them: good ones, and everything
that can go wrong. Time is virtual."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import BusError, BusTimeout, Declined
from bus.memory import MemoryBus
from engine_adapter.config import TransferConfig
from engine_adapter.engine import EngineFailed
from engine_adapter.transfer.in_process import PullFault
from fleet.handover import Cell, RankState
from fleet.placement import EMPTY, Placement, linear, with_rows
from fleet.requests.handovers import (
    CommitHandover,
    DescribeHandover,
    EndLease,
    ExpertCopy,
    ExpertsLeased,
    HandoverDescribed,
    LeaseEnded,
    LeaseExperts,
)
from fleet.sharding import ALL_PARTS
from tests.engine_adapter.rank_fixture import (
    CONFIG,
    LEASE,
    SCALE,
    SUBJECTS,
    WORKER,
    Group,
    LateChecksums,
    NoChecksums,
    after,
    standing,
    weights,
)

pytestmark = pytest.mark.looptime
FIRST = linear(layers=2, experts=6, ranks=3, slots_per_rank=3)
"""rank 0 has experts 0 and 1, rank 1 has 2 and 3, rank 2 has 4 and 5; the last slot of each is empty"""
COPIED = after(FIRST, (1, 8, 0))
"""expert 1/0 comes to rank 2"""
SHARED = after(FIRST, (1, 5, 0))
"""expert 1/0 is on ranks 0 and 1"""
ONCE = TransferConfig(lease_seconds=LEASE, retries=0, quarantine_cells=0)
SLOW = TransferConfig(lease_seconds=LEASE, retries=2, quarantine_cells=1, bytes_per_second=100)
AUDITED = TransferConfig(lease_seconds=LEASE, audit_seconds=60.0)
EXPERT_BYTES = 12 * 8 * 4 + 12 * 4


def lease(*experts: tuple[int, int, int], rank: int = 0, reader: int = 2, handover: int = 1) -> LeaseExperts:
    return LeaseExperts(
        worker_id=WORKER,
        rank=rank,
        reader=reader,
        handover=handover,
        experts=tuple((*one, ALL_PARTS) for one in experts),
        seconds=60.0,
    )


async def ask(group: Group, request: Any, rank: int = 0) -> Any:
    return await group.bus.request(SUBJECTS.leases("a", WORKER, rank), request)


async def all_free(group: Group, seconds: float = 60.0) -> None:
    """Wait until every rank has all its room back, and check it."""
    for rank, free in enumerate(group.free):
        await group.until(rank, lambda described, free=free: described.free == free, seconds)  # type: ignore[misc]
    group.check()
    assert all(handovers.protocol.at_rest for handovers in group.agents)


# good ones


async def test_an_expert_is_brought_into_an_empty_slot_and_served_from_the_commit_on() -> None:
    async with standing(FIRST) as group:
        described = await group.hand_over(COPIED)
        assert group.placement == COPIED
        assert [one.state for one in described] == [RankState.SERVING] * 3
        assert [(pull.source, pull.transfer, pull.experts) for pull in described[2].pulls] == [
            (0, "memory", 1)
        ]
        assert group.transfers[2].requested[0][1][0].source == 3  # layer 1 slot 0 is in cell 3
        await all_free(group)


async def test_experts_change_places_and_are_dropped_and_come_back() -> None:
    swapped = after(FIRST, (0, 0, 5), (0, 7, 0))
    back = after(swapped, (0, 0, 0), (0, 7, 5), (1, 0, EMPTY), (1, 8, 0))
    dropped = after(after(back, (1, 0, 0)), (1, 8, EMPTY))
    async with standing(FIRST) as group:
        for expected in (swapped, back, after(back, (1, 0, 0)), dropped):
            await group.hand_over(expected)
            group.check()
        await all_free(group)


async def test_a_new_split_alone_is_handed_over_without_reading_anything() -> None:
    other = Placement(FIRST.expert_of_slot, experts=6, ranks=3, epoch=1)
    async with standing(FIRST) as group:
        await group.hand_over(other)
        assert group.placement.epoch == 1
        assert not any(way.requested for way in group.transfers)


async def test_experts_of_one_rank_are_one_read_and_come_in_order() -> None:
    expected = after(FIRST, (0, 8, 0), (1, 8, 1))
    async with standing(FIRST) as group:
        await group.hand_over(expected)
        assert [[pull.source for pull in pulls] for _, pulls in group.transfers[2].requested] == [[0, 4]]
        await all_free(group)


async def test_every_change_is_said_on_the_bus_once() -> None:
    states: list[str] = []
    async with standing(FIRST) as group, MemoryBus(group.broker).subscribe(SUBJECTS.handovers()) as feed:
        await group.propose(COPIED)
        for rank in (2, 1, 0):
            await group.reaches(rank, RankState.STAGED)
            await group.commit(rank)
        await group.until(2, lambda described: described.served == 1)
        async with asyncio.timeout(60):
            async for received in feed:
                described = received.message
                assert isinstance(described, HandoverDescribed)
                if described.rank == 2:
                    states.append(described.state)
                    if described.served == 1:
                        break
    assert [state for at, state in enumerate(states) if at == 0 or states[at - 1] != state] == [
        "staging",
        "staged",
        "ready",
        "serving",
    ]
    assert len(states) <= 8


async def test_the_source_is_told_to_help_while_it_is_read() -> None:
    async with standing(FIRST) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=0.5))
        await group.propose(COPIED)
        await asyncio.sleep(0.2)
        assert [way.is_busy for way in group.transfers] == [True, False, False]
        await group.reaches(2, RankState.STAGED)
        await asyncio.sleep(0.1)
        assert not group.transfers[0].is_busy


# layers that turn over

SHARDED = with_rows(FIRST, {1: None}, epoch=1)


def back(placement: Placement) -> Placement:
    """Whole again, each expert on another rank than at first."""
    row = np.roll(FIRST.expert_of_slot[1], 3)
    return with_rows(placement, {1: row}, epoch=placement.epoch + 1)


async def test_a_layer_turns_over_and_back_and_every_rank_holds_what_it_shall() -> None:
    async with standing(FIRST) as group:
        described = await group.hand_over(SHARDED)
        assert group.placement.sharded == (1,)
        group.check()
        await all_free(group)
        for rank, one in enumerate(described):
            pulls = {pull.source: pull for pull in one.pulls}
            assert sorted(pulls) == [0, 1, 2]
            assert {pull.transfer for pull in one.pulls} == {"memory", "local"}
            assert pulls[rank].transfer == "local"
            # Each rank held two experts, of which each other rank gets a third.
            assert all(pull.bytes == 2 * EXPERT_BYTES // 3 for pull in one.pulls)
        assert sum(len(pulls) for way in group.transfers for _, pulls in way.requested) == 3 * 4 * 2
        described = await group.hand_over(back(SHARDED))
        assert group.placement.sharded == ()
        await all_free(group)
        assert sum(pull.bytes for one in described for pull in one.pulls) == 6 * EXPERT_BYTES


async def test_a_turn_that_is_proposed_to_a_rank_without_checksums_waits_for_them() -> None:
    late = LateChecksums()
    async with standing(FIRST, executors={1: late}) as group:
        proposing = asyncio.create_task(group.propose(SHARDED))
        await asyncio.sleep(1.0)
        described = await group.describe(1)
        assert (described.state, described.fault) == (RankState.SERVING, "")
        late.release()
        await proposing
        for rank in range(3):
            await group.reaches(rank, RankState.STAGED)
            await group.abort(rank)
        await all_free(group)


async def test_a_turn_that_is_aborted_before_its_rank_has_checksums_is_never_staged() -> None:
    late = LateChecksums()
    async with standing(FIRST, executors={0: late}) as group:
        with pytest.raises(BusTimeout):
            await group.propose(SHARDED)
        await group.abort(0)
        late.release()
        await asyncio.sleep(1.0)
        assert (await group.describe(0)).state == RankState.SERVING
        await group.hand_over(SHARDED)
        await all_free(group)


async def test_a_layer_turns_over_while_experts_of_another_move() -> None:
    async with standing(FIRST) as group:
        row = FIRST.expert_of_slot[0].copy()
        row[2], row[5] = 4, EMPTY
        await group.hand_over(
            with_rows(FIRST, {0: row, 1: None}, epoch=1),
            [ExpertCopy(layer=0, expert=4, source=6, slot=2)],
        )
        await all_free(group)


async def test_parts_that_a_rank_has_itself_are_copied_at_the_limited_rate() -> None:
    clock = asyncio.get_running_loop().time
    async with standing(FIRST, SLOW) as group:
        began = clock()
        await group.hand_over(SHARDED)
        await all_free(group)
        await group.hand_over(back(SHARDED))
        # What follows waits for the rate: of each turn, two parts of 144 bytes are copied.
        assert 2.88 <= clock() - began < 5.76
        await all_free(group)


async def test_an_abort_ends_copies_that_wait_for_their_rate() -> None:
    clock = asyncio.get_running_loop().time
    async with standing(FIRST, SLOW) as group:
        await group.hand_over(SHARDED)
        await all_free(group)
        await group.propose(back(SHARDED))
        await asyncio.sleep(0.5)
        began = clock()
        for rank in range(3):
            await group.abort(rank)
        await all_free(group)
        assert clock() - began < 1.0, "2 s more would have passed"
        await group.hand_over(back(SHARDED))
        await all_free(group)


async def test_a_part_that_is_overdue_under_a_limit_never_counts_as_compared() -> None:
    async with standing(FIRST, SLOW) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=15.0, corrupt=3))
        await group.propose(SHARDED)
        assert (await group.reaches(2, RankState.FAILED)).fault == "overdue"
        for rank in range(3):
            await group.abort(rank)
        await all_free(group)
        await group.hand_over(SHARDED)
        await all_free(group)


@pytest.mark.parametrize("config", [CONFIG, SLOW], ids=["unlimited", "limited"])
async def test_a_damaged_part_fails_the_turn_and_every_rank_serves_on(config: TransferConfig) -> None:
    async with standing(FIRST, config) as group:
        group.transfers[2].faults.append(PullFault(corrupt=5))
        await group.propose(SHARDED)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "checksum"
        assert "part 2 of expert 1/" in described.failure
        for rank in range(3):
            await group.abort(rank)
        await all_free(group)
        await group.hand_over(SHARDED)
        await all_free(group)


async def test_one_stopped_source_keeps_every_cell_that_it_may_still_write_to_in_quarantine() -> None:
    async with standing(FIRST, ONCE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(SHARDED)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "overdue"
        for rank in range(3):
            await group.abort(rank)
        # Experts 0 and 1 of rank 0 are pieces of the first of two groups.
        assert (await group.describe(2)).quarantined == 1
        group.check()
        group.fabric.resume(group.transfers[0])
        await all_free(group)


async def test_parts_of_a_sharded_layer_are_leased_by_the_slot_of_their_group() -> None:
    async with standing(SHARDED) as group:
        given = await ask(group, msgspec.structs.replace(lease(), experts=((1, 1, 5, 0), (0, 0, 0, 2))))
        assert len(given.cells) == 2
        assert {len(sums) for sums in given.checksums} == {2}
        with pytest.raises(Declined, match=r"no part 1 of expert 1/5, but \[0\]"):
            await ask(group, msgspec.structs.replace(lease(), experts=((1, 1, 5, 1),)))


async def test_a_sharded_layer_whose_memory_is_changed_ends_its_rank() -> None:
    async with standing(SHARDED, AUDITED) as group:
        await asyncio.sleep(3 * 60.0)
        assert not any(task.done() for task in group.running), "nothing was changed"
        cell = int(group.agents[1].protocol.cell_table.table[1, 1])
        group.ranks[1].experts.memory.cell(cell)[7] ^= 1
        handovers = group.running.pop(1)
        async with asyncio.timeout(2 * 60.0):
            await asyncio.wait([handovers])
        failure = handovers.exception()
        assert isinstance(failure, ExceptionGroup)
        assert f"group 1 of layer 1 (cell {cell}: gate part 0)" in str(failure.exceptions)


# aborts


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.1, 3.0])
async def test_an_abort_at_any_stage_leaves_everything_as_it_was(seconds: float) -> None:
    async with standing(FIRST) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=0.3))
        await group.propose(COPIED)
        await asyncio.sleep(seconds)
        for rank in range(3):
            described = await group.abort(rank)
            assert (described.verdict, described.state, described.concluded) == ("take", RankState.SERVING, 1)
        assert group.placement == FIRST
        await all_free(group)
        await group.hand_over(COPIED)
        await all_free(group)


async def test_an_engine_is_told_to_drop_what_it_prepared_for_an_aborted_handover() -> None:
    async with standing(FIRST) as group:
        await group.propose(COPIED)
        for rank in range(3):
            await group.reaches(rank, RankState.STAGED)
            await group.abort(rank)
        assert [rank.experts.forgotten for rank in group.ranks] == [1, 1, 1]
        await group.hand_over(COPIED)
        assert [rank.experts.forgotten for rank in group.ranks] == [1, 1, 1]


async def test_an_abort_is_answered_once_its_room_is_back_where_that_is_soon() -> None:
    async with standing(FIRST) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=0.1))
        await group.propose(COPIED)
        await asyncio.sleep(0.05)
        described = await group.abort(2)
        assert (described.quarantined, described.free) == (0, 3)


async def test_an_abort_that_comes_before_its_proposal_makes_it_past() -> None:
    async with standing(FIRST) as group:
        assert (await group.abort(2, handover=1)).verdict == "take"
        described = await group.propose(COPIED)
        assert [one.verdict for one in described] == ["take", "take", "past"]


async def test_an_abort_after_the_commit_is_refused_and_the_flip_follows() -> None:
    async with standing(FIRST) as group:
        await group.propose(COPIED)
        for rank in range(3):
            await group.reaches(rank, RankState.STAGED)
        await group.commit(2)
        described = await group.abort(2)
        assert (described.verdict, described.state) == ("premature", RankState.READY)
        for rank in range(2):
            await group.commit(rank)
        await group.until(2, lambda described: described.served == 1)
        group.check()


# commands that come twice, late, or from somebody else


async def test_commands_that_come_again_are_answered_and_change_nothing() -> None:
    async with standing(FIRST) as group:
        await group.propose(COPIED)
        assert (await group.tell(2, group.proposal(2, COPIED))).verdict == "repeat"
        await group.reaches(2, RankState.STAGED)
        again = await group.tell(2, group.proposal(2, COPIED))
        assert (again.verdict, again.state) == ("repeat", RankState.STAGED)
        for rank in range(3):
            await group.commit(rank)
        await group.until(2, lambda described: described.served == 1)
        assert (await group.commit(2)).verdict == "repeat"
        assert (await group.tell(2, group.proposal(2, COPIED))).verdict == "past"
        assert (await group.abort(2)).verdict == "premature"
        assert len(group.transfers[2].requested) == 1
        await all_free(group)


async def test_proposals_that_come_at_once_are_one() -> None:
    async with standing(FIRST) as group:
        group.handover = 1
        verdicts = [
            one.verdict
            for one in await asyncio.gather(*(group.tell(2, group.proposal(2, COPIED)) for _ in range(5)))
        ]
        assert sorted(verdicts) == ["repeat"] * 4 + ["take"]


async def test_a_commit_that_comes_too_early_or_for_another_handover_is_refused() -> None:
    async with standing(FIRST) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=0.5))
        await group.propose(COPIED)
        assert (await group.commit(2)).verdict == "premature"
        await group.reaches(2, RankState.STAGED)
        stray = CommitHandover(worker_id=WORKER, rank=2, token=1, handover=9)
        assert (await group.tell(2, stray)).verdict == "unknown"


async def test_a_second_handover_finds_the_rank_busy() -> None:
    async with standing(FIRST) as group:
        await group.propose(COPIED)
        assert [one.verdict for one in await group.propose(COPIED)] == ["busy"] * 3


async def test_a_coordinator_that_was_replaced_is_fenced() -> None:
    async with standing(FIRST) as group:
        group.token = 5
        await group.propose(COPIED)
        await group.reaches(2, RankState.STAGED)
        group.token = 4
        assert (await group.commit(2)).verdict == "fenced"
        assert (await group.abort(2)).verdict == "fenced"
        assert (await group.describe(2)).state == RankState.STAGED


async def test_a_coordinator_that_is_silent_for_ever_leaves_the_rank_serving_and_readable() -> None:
    async with standing(FIRST) as group:
        await group.propose(COPIED)
        await group.reaches(2, RankState.STAGED)
        await asyncio.sleep(100_000)
        described = await group.describe(2)
        assert (described.state, described.served) == (RankState.STAGED, 0)
        assert isinstance(await ask(group, lease((0, 0, 0))), ExpertsLeased)
        group.token = 2
        assert (await group.abort(2)).verdict == "take"


async def test_commands_for_others_and_strange_ones_are_refused_in_a_sentence() -> None:
    async with standing(FIRST) as group:
        with pytest.raises(Declined, match="this is rank 1 of worker 7, not rank 2 of worker 7"):
            await group.bus.request(
                SUBJECTS.handover("a", WORKER, 1), DescribeHandover(worker_id=WORKER, rank=2)
            )
        with pytest.raises(Declined, match="this is rank 1 of worker 7, not rank 1 of worker 8"):
            await group.bus.request(SUBJECTS.handover("a", WORKER, 1), DescribeHandover(worker_id=8, rank=1))
        with pytest.raises(Declined, match="expected a command about handovers, got LeaseEnded"):
            await group.bus.request(
                SUBJECTS.handover("a", WORKER, 1), LeaseEnded(worker_id=WORKER, rank=1, lease=1)
            )
        with pytest.raises(Declined, match="expected LeaseExperts or EndLease"):
            await ask(group, DescribeHandover(worker_id=WORKER, rank=0))


async def test_a_placement_that_cannot_be_read_fails_the_handover_and_nothing_else() -> None:
    async with standing(FIRST) as group:
        group.handover = 1
        broken = msgspec.structs.replace(
            group.proposal(2, COPIED), placement=msgspec.structs.replace(COPIED.record(), slots=b"123")
        )
        described = await group.tell(2, broken)
        assert (described.state, described.fault) == (RankState.FAILED, "placement")
        assert "3 bytes of slots" in described.failure
        await group.abort(2)
        await group.hand_over(COPIED)


# sources that fail


async def test_a_damaged_read_is_tried_from_another_replica() -> None:
    async with standing(SHARED) as group:
        group.transfers[2].faults.append(PullFault(corrupt=SCALE))
        described = await group.hand_over(after(SHARED, (1, 8, 0)))
        assert [pull.source for pull in described[2].pulls] == [0, 1]
        await all_free(group)


async def test_damage_that_stays_fails_and_names_the_tensor() -> None:
    async with standing(FIRST) as group:
        group.ranks[0].experts.memory.cell(3)[SCALE] ^= 1
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "checksum"
        assert (
            "expert 1/0, as read from rank 0, does not match that rank's checksums: scale part 0"
            in described.failure
        )
        assert len(group.transfers[2].requested) == 3
        await group.abort(2)
        assert (group.ranks[0].experts.memory.cell(3)[: len(weights(1, 0))] == weights(1, 0)).sum() == len(
            weights(1, 0)
        ) - 1


async def test_a_source_that_breaks_off_is_let_go_of_and_another_replica_is_read() -> None:
    async with standing(SHARED) as group:
        group.fabric.kill(group.transfers[0])
        described = await group.hand_over(after(SHARED, (1, 8, 0)))
        assert [pull.source for pull in described[2].pulls] == [1]
        assert group.transfers[2].forgotten == [group.transfers[0].agent]
        await all_free(group)


async def test_a_source_that_does_not_answer_fails_the_handover_in_time() -> None:
    async with standing(FIRST, executors={0: NoChecksums()}) as group:
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "source"
        assert "rank 0 refuses a read lease to rank 2: no answer" in described.failure
        assert described.seconds < 7


async def test_a_source_of_another_layout_fails_the_handover() -> None:
    async with standing(FIRST, ONCE) as group:
        group.transfers[0].address = lambda address: msgspec.structs.replace(
            address, agent=group.transfers[0].agent, layout="another"
        )  # type: ignore[method-assign]
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "transfer"
        assert "run one version and one dtype on all ranks" in described.failure


async def test_a_source_that_no_way_reaches_fails_the_handover_and_says_what_to_set() -> None:
    async with standing(FIRST, ONCE) as group:
        group.transfers[2].reaches = lambda address: False  # type: ignore[method-assign]
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert (
            described.failure
            == "rank 2 has no way to read the memory of rank 0 (ways: memory); set transfer.backend"
        )


async def test_a_transfer_that_fails_as_it_never_should_costs_its_cell_and_not_the_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with standing(FIRST, ONCE) as group:

        async def fail(*_: object) -> None:
            raise RuntimeError("a defect")

        group.transfers[2].pull = fail  # type: ignore[assignment, method-assign]
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert (described.fault, described.quarantined) == ("overdue", 1)
        assert "failed in a way it never should: a defect" in described.failure
        assert "a defect" in caplog.text


async def test_a_stopped_source_is_overdue_its_cell_is_quarantined_and_room_is_back_when_it_has_settled() -> (
    None
):
    async with standing(FIRST, ONCE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert (described.fault, described.quarantined, described.free) == ("overdue", 1, 2)
        assert "took more than 1 s" in described.failure
        for rank in range(3):
            await group.abort(rank)
        refused = (await group.propose(COPIED))[2]
        assert (refused.state, refused.fault) == (RankState.FAILED, "quarantine")
        for rank in range(3):
            await group.abort(rank)
        assert (await group.describe(2)).oldest_seconds > 0
        group.fabric.resume(group.transfers[0])
        await all_free(group)
        await group.hand_over(COPIED)
        await all_free(group)


async def test_a_stopped_source_that_dies_settles_what_was_read_from_it() -> None:
    async with standing(FIRST, ONCE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(COPIED)
        await group.reaches(2, RankState.FAILED)
        await group.abort(2)
        group.fabric.kill(group.transfers[0])
        await group.until(2, lambda described: (described.free, described.quarantined) == (3, 0))


async def test_an_overdue_read_is_made_elsewhere_and_never_lands_in_what_is_served() -> None:
    expected = after(SHARED, (1, 8, 0))
    async with standing(SHARED) as group:
        group.fabric.stop(group.transfers[0])
        described = await group.hand_over(expected)
        assert described[2].quarantined == 1
        group.check()
        group.fabric.resume(group.transfers[0])
        await all_free(group)


async def test_the_deadline_of_staging_ends_everything_that_hangs() -> None:
    async with standing(FIRST) as group:
        group.fabric.stop(group.transfers[0])
        clock = asyncio.get_running_loop().time
        began = clock()
        await group.propose(COPIED, deadline=0.5)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "overdue"
        assert clock() - began < 0.6


async def test_too_little_room_fails_and_is_no_lasting_harm() -> None:
    crowded = after(FIRST, (0, 6, 0), (0, 7, 1), (0, 8, 2), (1, 8, 0), (0, 0, 4), (0, 1, 5))
    async with standing(FIRST) as group:
        await group.propose(crowded)
        described = await group.reaches(2, RankState.FAILED)
        assert described.fault == "room"
        assert "4 experts must be copied, but 3 cells are free" in described.failure
        for rank in range(3):
            await group.abort(rank)
        await all_free(group)


async def test_an_engine_that_cannot_prepare_fails_the_handover_and_serves_on() -> None:
    async with standing(FIRST) as group:
        group.ranks[2].experts.refusal = MemoryError("no memory for the tables")
        await group.propose(COPIED)
        described = await group.reaches(2, RankState.FAILED)
        assert (described.fault, described.served) == ("engine", 0)
        assert "the engine of rank 2 could not prepare: no memory for the tables" in described.failure
        group.ranks[2].experts.refusal = None
        for rank in range(3):
            await group.abort(rank)
        await group.hand_over(COPIED)


# leases


async def test_a_leased_expert_that_a_flip_evicts_drains_until_its_reader_has_ended() -> None:
    async with standing(COPIED) as group:
        given = await ask(group, lease((1, 0, 0)))
        await group.hand_over(after(COPIED, (1, 0, 5)))
        described = await group.describe(0)
        assert (described.draining, described.free) == (1, 2)
        assert (
            group.ranks[0].experts.memory.cell(given.cells[0])[: len(weights(1, 0))] == weights(1, 0)
        ).all()
        ended = await ask(group, EndLease(worker_id=WORKER, rank=0, lease=given.lease))
        assert ended == LeaseEnded(worker_id=WORKER, rank=0, lease=given.lease)
        await all_free(group)


async def test_a_reader_that_falls_silent_loses_its_lease_and_one_that_renews_it_does_not() -> None:
    async with standing(COPIED) as group:
        await ask(group, lease((1, 0, 0)))
        await group.hand_over(after(COPIED, (1, 0, 5)))
        for _ in range(5):
            await asyncio.sleep(0.8 * LEASE)
            await ask(group, lease((1, 0, 0)))
        assert (await group.describe(0)).draining == 1
        await asyncio.sleep(1.01 * LEASE)
        await all_free(group, 0.1)


async def test_a_long_read_keeps_its_lease() -> None:
    async with standing(FIRST, TransferConfig(lease_seconds=LEASE, min_seconds=100.0)) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=10 * LEASE))
        await group.propose(COPIED, deadline=1000.0)
        await asyncio.sleep(9 * LEASE)
        assert group.agents[0].protocol.cell_table.leases == 1
        await group.reaches(2, RankState.STAGED)
        assert group.agents[0].protocol.cell_table.leases == 0


async def test_a_late_read_ends_its_lease_when_it_settles() -> None:
    async with standing(FIRST, ONCE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(COPIED)
        await group.reaches(2, RankState.FAILED)
        await group.abort(2)
        await asyncio.sleep(3 * LEASE)
        assert group.agents[0].protocol.cell_table.leases == 1
        group.fabric.resume(group.transfers[0])
        await asyncio.sleep(0.1)
        assert group.agents[0].protocol.cell_table.leases == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (lease((0, 3, 2)), "slot 3 of this rank does not exist"),
        (lease((0, -1, 0)), "slot -1 of this rank does not exist"),
        (lease((0, 0, 5)), "holds expert 0/0, not expert 5"),
        (lease((0, 0, 0), reader=0), "rank 0 asks to read rank 0"),
        (lease((0, 0, 0), reader=7), "rank 7 asks to read rank 0; this engine has ranks 0 to 2"),
        (lease((0, 0, 0), rank=1), "this is rank 0 of worker 7, not rank 1"),
        (lease(), "a lease of 0 experts"),
        (msgspec.structs.replace(lease((0, 0, 0)), seconds=float("nan")), "a lease for nan s"),
    ],
)
async def test_only_what_is_here_is_leased_and_only_to_other_ranks(
    request_: LeaseExperts, status: str
) -> None:
    async with standing(FIRST) as group:
        with pytest.raises(Declined, match=status):
            await ask(group, request_)


async def test_the_bus_may_go_away_while_experts_are_read() -> None:
    async with standing(FIRST) as group:
        group.transfers[2].faults.append(PullFault(delay_seconds=0.5))
        await group.propose(COPIED)
        await asyncio.sleep(0.1)
        group.broker.reachable = False
        await asyncio.sleep(5.0)
        with pytest.raises(BusError):
            await group.describe(2)
        group.broker.reachable = True
        await group.reaches(2, RankState.STAGED)
        for rank in range(3):
            await group.commit(rank)
        await group.until(2, lambda described: described.served == 1)
        await all_free(group)


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.1, 1.5])
async def test_everything_ends_within_a_bound_wherever_a_handover_is(seconds: float) -> None:
    """What hangs is a read that never settles."""
    async with standing(FIRST, ONCE) as group:
        group.fabric.stop(group.transfers[0])
        await group.propose(COPIED)
        await asyncio.sleep(seconds)


async def test_an_engine_of_one_rank_hands_over_by_renaming_slots() -> None:
    first = linear(layers=1, experts=3, ranks=1, slots_per_rank=4)
    async with standing(first) as group:
        await group.hand_over(after(first, (0, 0, 2), (0, 2, EMPTY), (0, 3, 0)))
        await all_free(group)


async def test_a_copy_that_is_not_needed_is_not_made() -> None:
    async with standing(FIRST) as group:
        await group.hand_over(
            COPIED,
            [
                ExpertCopy(layer=1, expert=0, source=0, slot=8),
                ExpertCopy(layer=0, expert=1, source=1, slot=1),
            ],
        )
        assert [len(way.requested) for way in group.transfers] == [0, 0, 1]


class Spans:
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str | int], str]] = []

    def stage(
        self, traceparent: str, name: str, began: int, attributes: dict[str, str | int], failure: str
    ) -> None:
        assert traceparent == "t"
        self.seen.append((name, attributes, failure))


async def test_what_staging_consists_of_is_traced() -> None:
    spans = Spans()
    async with standing(FIRST, tracing=spans) as group:
        group.transfers[2].faults.append(PullFault(broken=True))
        await group.hand_over(COPIED)
    names = [
        name for name, attributes, _ in spans.seen if attributes.get("roost.source") == 0 or name == "prepare"
    ]
    assert names.count("prepare") == 3
    assert [name for name in names if name != "prepare"] == ["pull", "pull", "verify"]
    assert [bool(failure) for name, _, failure in spans.seen if name == "pull"] == [True, False]


# the audit


async def test_memory_that_is_changed_while_it_is_served_ends_its_rank() -> None:
    async with standing(FIRST, AUDITED) as group:
        await asyncio.sleep(3 * 60.0)
        assert not any(task.done() for task in group.running), "nothing was changed"
        cell = int(group.agents[1].protocol.cell_table.table[1, 0])
        group.ranks[1].experts.memory.cell(cell)[7] ^= 1
        handovers = group.running.pop(1)
        async with asyncio.timeout(2 * 60.0):
            await asyncio.wait([handovers])
        failure = handovers.exception()
        assert isinstance(failure, ExceptionGroup)
        assert failure.subgroup(EngineFailed) is not None
        assert f"expert 1/2 (cell {cell}" in str(failure.exceptions)
        assert not any(task.done() for task in group.running)


async def test_experts_that_come_and_go_and_cells_that_serve_nothing_alarm_nobody() -> None:
    config = TransferConfig(lease_seconds=LEASE, audit_seconds=0.2)
    swapped = after(FIRST, (0, 0, 5), (0, 7, 0))
    back = after(swapped, (0, 0, 0), (0, 7, 5))
    async with standing(FIRST, config) as group:
        for expected in (swapped, back, after(back, (1, 8, 0))):
            await group.hand_over(expected)
            await asyncio.sleep(1.0)
        cell_table = group.agents[0].protocol.cell_table
        free = next(
            cell for cell in range(group.ranks[0].experts.memory.cells) if cell_table.use(cell) is Cell.FREE
        )
        group.ranks[0].experts.memory.cell(free)[:] = 255
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in group.running)


async def test_without_an_audit_nobody_looks() -> None:
    async with standing(FIRST, TransferConfig(lease_seconds=LEASE, audit_seconds=0.0)) as group:
        group.ranks[1].experts.memory.cell(int(group.agents[1].protocol.cell_table.table[1, 0]))[7] ^= 1
        await asyncio.sleep(3600.0)
        assert not any(task.done() for task in group.running)
