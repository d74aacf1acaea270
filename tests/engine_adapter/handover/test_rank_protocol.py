"""One rank's part in handovers, decided without a bus: what is refused and why, what is tried again, and
whatever order things happen in."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_adapter.config import TransferConfig
from engine_adapter.handover.cell_table import CellTable
from engine_adapter.handover.inbound_copies import (
    MAX_SOURCES,
    CellRead,
    CellsVerified,
    CopyLocal,
    LeaseDenied,
    LeaseGranted,
    LeaseRenewed,
    ReadBroken,
    ReadCells,
    ReadLanded,
    ReadLate,
    ReadSettled,
    ReleaseLease,
    RequestLease,
    StopReads,
    VerifyCells,
)
from engine_adapter.handover.proposal_check import LONGEST_SECONDS, StagingFault
from engine_adapter.handover.rank_protocol import Adopt, Effect, Forget, Prepare, RankProtocol
from fleet.handover import Cell, CommandVerdict, RankState
from fleet.placement import EMPTY, Placement, with_attention, with_rows
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    ExpertCopy,
    ExpertsLeased,
    MemoryAddress,
    ProposeHandover,
)
from fleet.sharding import ALL_PARTS, contents
from tests.engine_adapter.rank_fixture import after, copies_to

RANK = 1
MEMORY = MemoryAddress(cells=9, cell_bytes=64, layout="x", base=4096)
SUMS = (5, 6)
FIRST = Placement(np.array([[0, 1, -1, 2, 3, -1, 0, 4, 5]] * 2), experts=6, ranks=3)
"""rank 0 has 0 and 1, rank 1 has 2 and 3, rank 2 has 0, 4 and 5; slots 2 and 5 are empty"""
CONFIG = TransferConfig(retries=1, quarantine_cells=0)


class RankRig:
    """A rank, and whatever plays the world around it."""

    def __init__(
        self,
        placement: Placement = FIRST,
        config: TransferConfig = CONFIG,
        parts: int = 1,
        tp_refusal: str = "",
    ) -> None:
        held = placement.on_rank(RANK)
        self.cell_table = CellTable(
            placement,
            RANK,
            np.arange(held.size, dtype=np.int32).reshape(held.shape),
            held.size + placement.slots_per_rank,
            parts,
        )
        self.protocol = RankProtocol(
            worker_id=1, rank=RANK, placement=placement, cell_table=self.cell_table, tensors=2, config=config,
            tp_refusal=tp_refusal,
        )  # fmt: skip
        self.now = 0.0

    def propose(
        self,
        placement: Placement,
        copies: Iterable[ExpertCopy] | None = None,
        *,
        number: int = 1,
        token: int = 1,
        deadline: float = 10.0,
    ) -> CommandVerdict:
        stated = copies_to(self.protocol.placement, placement) if copies is None else copies
        command = ProposeHandover(
            engine="a", worker_id=1, rank=RANK, token=token, handover=number, plan="p", placement=placement.record(), copies=tuple(stated),
            deadline_seconds=deadline,
        )  # fmt: skip
        return self.protocol.propose(command, placement, self.now)

    def commit(self, number: int = 1, token: int = 1) -> CommandVerdict:
        return self.protocol.commit(CommitHandover(worker_id=1, rank=RANK, token=token, handover=number))

    def abort(self, number: int = 1, token: int = 1) -> CommandVerdict:
        return self.protocol.abort(
            AbortHandover(worker_id=1, rank=RANK, token=token, handover=number, reason="x"), self.now
        )

    def take(self, report: Any) -> list[Effect]:
        self.protocol.take(report, self.now)
        return self.protocol.drain()

    def lease(self, effect: Effect, lease: int = 9) -> ExpertsLeased:
        assert isinstance(effect, RequestLease)
        count = len(effect.experts)
        return ExpertsLeased(
            worker_id=1,
            rank=effect.source,
            lease=lease,
            memory=MEMORY,
            cells=tuple(range(count)),
            checksums=tuple(
                SUMS * (self.cell_table.parts if part == ALL_PARTS else 1) for *_, part in effect.experts
            ),
        )

    def read(self, effect: Effect) -> ReadCells:
        """Grant a lease; what is read then."""
        assert isinstance(effect, RequestLease)
        (read,) = self.take(LeaseGranted(effect.batch, self.lease(effect)))
        assert isinstance(read, ReadCells)
        return read

    def verify(self, read: ReadCells, *wrong: str) -> list[Effect]:
        """Let it land, and compare."""
        end, check, *more = self.take(ReadLanded(read.batch, "shared", 64, 0.1))
        assert isinstance(end, ReleaseLease)
        assert isinstance(check, VerifyCells)
        assert check.reads == read.reads
        return [*more, *self.take(CellsVerified(read.batch, wrong or ("",) * len(check.reads)))]

    @property
    def status(self) -> tuple[str, str]:
        described = self.protocol.describe(self.now)
        return described.state, described.fault

    def finish(self) -> None:
        assert self.protocol.at_rest
        assert self.cell_table.idle
        self.cell_table.check_integrity()
        assert self.cell_table.count(Cell.FREE) == self.protocol.placement.slots_per_rank


def copy(layer: int, expert: int, source: int, slot: int) -> ExpertCopy:
    return ExpertCopy(layer=layer, expert=expert, source=source, slot=slot)


REQUESTED = after(FIRST, (0, 5, 0))
"""expert 0/0, which ranks 0 and 2 hold, comes to rank 1"""


def test_a_handover_goes_from_the_proposal_over_staged_to_the_flip() -> None:
    rig = RankRig()
    assert rig.propose(REQUESTED) is CommandVerdict.TAKE
    (lease,) = rig.protocol.drain()
    assert lease == RequestLease(1, 0, 1, ((0, 0, 0, ALL_PARTS),), 10.0)
    read = rig.read(lease)
    assert (read.source, read.reads, read.until) == (
        0,
        (CellRead(0, ALL_PARTS, 6, ALL_PARTS, False),),
        10.0,
    )
    (prepare,) = rig.verify(read)
    assert isinstance(prepare, Prepare)
    assert prepare.placement == REQUESTED
    assert prepare.cells.tolist() == [[0, 1, 6], [3, 4, 5]]
    assert rig.status[0] == RankState.STAGING
    assert rig.protocol.prepared(1)
    assert rig.status[0] == RankState.STAGED
    rig.now = 4.0
    assert rig.commit() is CommandVerdict.TAKE
    assert rig.protocol.drain() == [Adopt(1)]
    rig.protocol.adopted(rig.now)
    described = rig.protocol.describe(9.0)
    assert (described.state, described.served, described.flipped, described.concluded, described.seconds) == (
        "serving",
        1,
        1,
        1,
        4.0,
    )
    rig.finish()


def test_a_proposal_that_copies_nothing_is_prepared_at_once() -> None:
    rig = RankRig()
    rig.propose(after(FIRST, (0, 6, EMPTY)))
    (prepare,) = rig.protocol.drain()
    assert isinstance(prepare, Prepare)
    assert prepare.cells.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_expert_that_changes_slots_on_its_rank_is_not_read() -> None:
    rig = RankRig()
    rig.propose(after(FIRST, (0, 3, EMPTY), (0, 5, 2)), copies=())
    (prepare,) = rig.protocol.drain()
    assert isinstance(prepare, Prepare)
    assert prepare.cells.tolist() == [[2, 1, 0], [3, 4, 5]]
    assert [
        (pull.source, pull.transfer, pull.experts, pull.bytes) for pull in rig.protocol.describe(0.0).pulls
    ] == [(RANK, "local", 1, 0)]


def _other_shape(rig: RankRig) -> None:
    rig.propose(Placement(FIRST.expert_of_slot[:1], experts=6, ranks=3, epoch=1))


def _twice_on_a_rank(rig: RankRig) -> None:
    table = FIRST.expert_of_slot.copy()
    table[0, 2] = table[0, 0]
    rig.propose(Placement(table, experts=6, ranks=3, epoch=1, duplicates=True))


@pytest.mark.parametrize(
    ("propose", "fault", "status"),
    [
        (
            _twice_on_a_rank,
            StagingFault.PLACEMENT,
            "a rank would hold an expert twice in a layer",
        ),
        (
            _other_shape,
            StagingFault.PLACEMENT,
            r"\(1, 6, 3, 3\), and this engine has \(2, 6, 3, 3\); plan anew",
        ),
        (
            lambda rig: rig.propose(REQUESTED, ()),
            StagingFault.COPIES,
            "expert 0/0 is new in slot 5 of rank 1, and no copy names its source",
        ),
        (
            lambda rig: rig.propose(REQUESTED, [copy(0, 0, 1, 5)]),
            StagingFault.COPIES,
            "slot 1 does not hold it in epoch 0, which is served",
        ),
        (
            lambda rig: rig.propose(REQUESTED, [copy(0, 1, 1, 5)]),
            StagingFault.COPIES,
            "slot 5 of the new placement does not hold it",
        ),
        (
            lambda rig: rig.propose(REQUESTED, [copy(0, 0, 0, 5), copy(0, 0, 6, 5)]),
            StagingFault.COPIES,
            "another copy fills slot 5 too",
        ),
        (
            lambda rig: rig.propose(REQUESTED, [copy(0, 0, 0, 5), copy(0, 0, 9, 5)]),
            StagingFault.COPIES,
            "there are 2 layers of 9 slots",
        ),
        (
            lambda rig: rig.propose(REQUESTED, [copy(-1, 0, 0, 5)]),
            StagingFault.COPIES,
            "there are 2 layers of 9 slots",
        ),
        (lambda rig: rig.propose(REQUESTED, [copy(0, EMPTY, 2, 5)]), StagingFault.COPIES, "does not hold it"),
        (lambda rig: rig.propose(REQUESTED, deadline=0.0), StagingFault.DEADLINE, "use more than 0"),
        (lambda rig: rig.propose(REQUESTED, deadline=math.nan), StagingFault.DEADLINE, "nan s for staging"),
        (
            lambda rig: rig.propose(REQUESTED, deadline=2 * LONGEST_SECONDS),
            StagingFault.DEADLINE,
            "86400 at most",
        ),
    ],
)
def test_a_proposal_that_does_not_fit_fails_and_says_why(
    propose: Callable[[RankRig], None], fault: StagingFault, status: str
) -> None:
    rig = RankRig()
    propose(rig)
    assert rig.status == (RankState.FAILED, fault)
    with pytest.raises(AssertionError, match=status):
        raise AssertionError(rig.protocol.failure)
    assert rig.abort() is CommandVerdict.TAKE
    rig.finish()
    assert rig.protocol.failure
    assert rig.propose(REQUESTED, number=2) is CommandVerdict.TAKE
    assert not rig.protocol.failure


def test_a_proposal_that_cannot_be_read_fails() -> None:
    rig = RankRig()
    command = ProposeHandover(
        engine="a", worker_id=1, rank=RANK, token=1, handover=1, plan="p", placement=REQUESTED.record(), deadline_seconds=1.0
    )  # fmt: skip
    assert rig.protocol.propose(command, "placement: 3 bytes of slots", 0.0) is CommandVerdict.TAKE
    assert rig.status == (RankState.FAILED, StagingFault.PLACEMENT)


def test_more_experts_than_cells_are_free_fail_for_want_of_room() -> None:
    rig = RankRig()
    rig.propose(after(FIRST, (0, 3, 0), (0, 4, 1), (0, 5, 4), (0, 0, 2), (0, 1, 3), (1, 5, 0)))
    assert rig.status == (RankState.FAILED, StagingFault.ROOM)
    assert "4 experts must be copied, but 3 cells are free (3 free, 6 live)" in rig.protocol.failure
    rig.abort()
    rig.finish()


def test_experts_of_one_source_are_one_batch_and_sources_take_turns() -> None:
    first = Placement(
        np.array([[0, 1, EMPTY, 2, EMPTY, EMPTY, 3, EMPTY, EMPTY, 4, EMPTY, EMPTY]]), experts=5, ranks=4
    )
    rig = RankRig(first)
    expected = after(first, (0, 3, 0), (0, 4, 3), (0, 5, 4), (0, 7, 2))
    rig.propose(expected)
    leases = rig.protocol.drain()
    assert [lease.source for lease in leases if isinstance(lease, RequestLease)] == [0, 2]
    assert len(leases) == MAX_SOURCES
    third = rig.verify(rig.read(leases[0]))
    assert [lease.source for lease in third if isinstance(lease, RequestLease)] == [3]
    rig.verify(rig.read(leases[1]))
    (prepare,) = rig.verify(rig.read(third[0]))
    assert isinstance(prepare, Prepare)


def test_an_expert_is_read_from_its_other_holder_when_the_first_refuses_and_then_the_first_once_more() -> (
    None
):
    rig = RankRig(config=TransferConfig(retries=2))
    rig.propose(REQUESTED)
    sources = []
    for _ in range(3):
        (lease,) = rig.protocol.drain()
        assert isinstance(lease, RequestLease)
        sources.append((lease.source, lease.experts))
        rig.protocol.take(LeaseDenied(lease.batch, f"rank {lease.source} says no"), rig.now)
    assert sources == [
        (0, ((0, 0, 0, ALL_PARTS),)),
        (2, ((0, 6, 0, ALL_PARTS),)),
        (0, ((0, 0, 0, ALL_PARTS),)),
    ]
    assert rig.status == (RankState.FAILED, StagingFault.SOURCE)
    assert rig.protocol.failure == "rank 0 says no"
    assert rig.protocol.drain() == [Forget(1)]
    rig.abort()
    rig.finish()


def test_a_broken_read_ends_its_lease_and_is_tried_from_the_other_holder() -> None:
    rig = RankRig()
    rig.propose(REQUESTED)
    read = rig.read(*rig.protocol.drain())
    end, lease = rig.take(ReadBroken(read.batch, "it broke"))
    assert end == ReleaseLease(read.batch, 0, 9)
    assert isinstance(lease, RequestLease)
    assert lease.source == 2
    read = rig.read(lease)
    end, forget = rig.take(ReadBroken(read.batch, "it broke again"))
    assert (end, forget) == (ReleaseLease(read.batch, 2, 9), Forget(1))
    assert rig.status == (RankState.FAILED, StagingFault.TRANSFER)


def test_a_damaged_expert_is_read_again_while_the_good_ones_of_its_batch_stay() -> None:
    rig = RankRig()
    rig.propose(after(FIRST, (0, 5, 0), (1, 5, 1)), copies=[copy(0, 0, 0, 5), copy(1, 1, 1, 5)])
    read = rig.read(*rig.protocol.drain())
    (lease,) = rig.verify(read, "scale", "")
    assert isinstance(lease, RequestLease)
    assert (lease.source, lease.experts) == (2, ((0, 6, 0, ALL_PARTS),))
    assert (rig.cell_table.count(Cell.STAGED), rig.cell_table.count(Cell.PULLING)) == (1, 1)
    assert rig.verify(rig.read(lease), "scale") == [Forget(1)]
    assert rig.status == (RankState.FAILED, StagingFault.CHECKSUM)
    assert (
        "expert 0/0, as read from rank 2, does not match that rank's checksums: scale" in rig.protocol.failure
    )
    rig.abort()
    rig.finish()


def test_an_overdue_read_loses_its_cell_and_is_tried_where_another_holder_is_left() -> None:
    rig = RankRig(config=TransferConfig(retries=5))
    rig.propose(REQUESTED)
    first = rig.read(*rig.protocol.drain())
    (lease,) = rig.take(ReadLate(first.batch, "too long"))
    assert isinstance(lease, RequestLease)
    assert lease.source == 2
    second = rig.read(lease)
    assert first.reads[0].cell != second.reads[0].cell
    assert rig.take(ReadLate(second.batch, "too long again")) == [Forget(1)]
    assert rig.status == (RankState.FAILED, StagingFault.OVERDUE)
    rig.abort()
    rig.protocol.drain()
    assert rig.cell_table.count(Cell.QUARANTINED) == 2
    assert rig.take(ReadSettled(first.batch)) == [ReleaseLease(first.batch, 0, 9)]
    assert rig.take(ReadSettled(second.batch)) == [ReleaseLease(second.batch, 2, 9)]
    rig.finish()


def test_while_more_is_quarantined_than_may_be_proposals_fail_and_room_comes_back_when_it_settles() -> None:
    rig = RankRig()
    rig.propose(REQUESTED)
    read = rig.read(*rig.protocol.drain())
    rig.abort()
    assert rig.protocol.drain() == [StopReads(read.batch), Forget(1)]
    assert rig.propose(REQUESTED, number=2) is CommandVerdict.TAKE
    assert rig.status == (RankState.FAILED, StagingFault.QUARANTINE)
    rig.abort(2)
    rig.take(ReadSettled(read.batch))
    rig.finish()
    rig.propose(REQUESTED, number=3)
    assert rig.status == (RankState.STAGING, "")


def test_a_lease_that_is_granted_after_the_abort_is_ended_at_once() -> None:
    rig = RankRig()
    rig.propose(REQUESTED)
    (lease,) = rig.protocol.drain()
    rig.abort()
    assert rig.protocol.drain() == [Forget(1)]
    assert not rig.protocol.at_rest
    assert rig.take(LeaseGranted(lease[0], rig.lease(lease, 4))) == [ReleaseLease(lease[0], 0, 4)]
    rig.finish()


def test_the_number_of_a_renewed_lease_is_the_one_that_is_ended() -> None:
    rig = RankRig()
    rig.propose(REQUESTED)
    read = rig.read(*rig.protocol.drain())
    assert rig.take(LeaseRenewed(read.batch, 31)) == []
    end, *_ = rig.take(ReadLanded(read.batch, "shared", 64, 0.1))
    assert end == ReleaseLease(read.batch, 0, 31)
    assert rig.take(LeaseRenewed(77, 31)) == []


@pytest.mark.parametrize("cells", [(), (0, 1)])
@pytest.mark.parametrize("checksums", [(), ((1,),), ((1, 2, 3),)])
def test_a_lease_of_other_things_than_were_asked_for_is_refused(
    cells: tuple[int, ...], checksums: tuple[tuple[int, ...], ...]
) -> None:
    rig = RankRig()
    rig.propose(REQUESTED)
    (lease,) = rig.protocol.drain()
    answer = ExpertsLeased(worker_id=1, rank=0, lease=3, memory=MEMORY, cells=cells, checksums=checksums)
    end, again = rig.take(LeaseGranted(lease[0], answer))
    assert end == ReleaseLease(lease[0], 0, 3)
    assert isinstance(again, RequestLease)
    assert again.source == 2


def test_staging_that_takes_too_long_fails_and_says_what_it_waited_for() -> None:
    rig = RankRig()
    rig.propose(REQUESTED, deadline=5.0)
    read = rig.read(*rig.protocol.drain())
    assert rig.protocol.wakes == 5.0
    rig.protocol.tick(4.9)
    assert rig.status[0] == RankState.STAGING
    rig.protocol.tick(5.0)
    assert rig.status == (RankState.FAILED, StagingFault.OVERDUE)
    assert (
        rig.protocol.failure == "rank 1 had not staged 5 s after the proposal: reading 1 experts from rank 0"
    )
    assert rig.protocol.drain() == [StopReads(read.batch), Forget(1)]
    assert rig.protocol.wakes == float("inf")


def test_an_engine_that_cannot_prepare_fails_the_handover() -> None:
    rig = RankRig()
    rig.propose(after(FIRST, (0, 6, EMPTY)))
    rig.protocol.drain()
    rig.protocol.unprepared(1, "out of memory", 1.0)
    assert rig.status == (RankState.FAILED, StagingFault.ENGINE)
    assert not rig.protocol.prepared(1)


def test_commands_of_a_replaced_coordinator_are_fenced_and_tokens_are_remembered_whatever_becomes_of_a_command() -> (
    None
):
    rig = RankRig()
    assert rig.commit(number=5, token=8) is CommandVerdict.UNKNOWN
    assert rig.propose(REQUESTED, token=7) is CommandVerdict.FENCED
    assert rig.propose(REQUESTED, token=8) is CommandVerdict.TAKE
    assert rig.abort(token=7) is CommandVerdict.FENCED
    assert rig.abort(token=9) is CommandVerdict.TAKE
    assert rig.protocol.describe(0.0).token == 9


# layers that turn over

SEALED = (5, 5, 5, 6, 6, 6)
"""checksums of two tensors in three parts"""
SHARDED = with_rows(FIRST, {0: None}, epoch=1)
"""layer 0 is cut: the parts 1 of its six experts are two cells of three pieces on rank 1"""


def turning(placement: Placement = FIRST, proposed: Placement = SHARDED) -> tuple[RankRig, list[Effect]]:
    """A rig, and its effects: leases from ranks 0 and 2, and a local copy."""
    rig = RankRig(placement, parts=3)
    for resident in rig.cell_table.residents():
        rig.cell_table.seal(resident, SEALED)
    rig.propose(proposed, copies=())
    first, local, second = rig.protocol.drain()
    return rig, [first, second, local]


def test_a_rank_gets_its_part_of_every_expert_and_copies_those_that_it_holds_itself() -> None:
    rig, (first, second, local) = turning()
    assert isinstance(first, RequestLease)
    assert isinstance(second, RequestLease)
    assert (first.source, first.experts) == (0, ((0, 0, 0, RANK), (0, 1, 1, RANK)))
    assert (second.source, second.experts) == (2, ((0, 7, 4, RANK), (0, 8, 5, RANK)))
    assert isinstance(local, CopyLocal)
    assert local.reads == (CellRead(0, RANK, 6, 2, True), CellRead(1, RANK, 7, 0, True))
    (verify,) = rig.take(ReadLanded(local.batch, "local", 99, 0.5))
    assert verify == VerifyCells(local.batch, RANK, local.reads, (SUMS, SUMS))
    assert rig.take(CellsVerified(local.batch, ("", ""))) == []
    assert rig.verify(rig.read(second)) == []
    assert rig.cell_table.count(Cell.STAGED) == 1, "the second group has all its pieces"
    (prepare,) = rig.verify(rig.read(first))
    assert isinstance(prepare, Prepare)
    assert prepare.cells.tolist() == [[6, 7, 2], [3, 4, 5]]
    assert [(pull.transfer, pull.experts, pull.bytes) for pull in rig.protocol.describe(0.0).pulls] == [
        ("local", 2, 99),
        ("shared", 2, 64),
        ("shared", 2, 64),
    ]
    rig.protocol.prepared(1)
    rig.commit()
    rig.protocol.drain()
    rig.protocol.adopted(1.0)
    rig.finish()


def test_a_layer_that_becomes_whole_is_read_part_by_part_from_every_rank() -> None:
    before = with_rows(FIRST, {0: None}, epoch=0)
    after_ = with_rows(before, {0: FIRST.expert_of_slot[0]}, epoch=1)
    rig, (first, second, local) = turning(before, after_)
    assert isinstance(first, RequestLease)
    assert (first.source, first.experts) == (0, ((0, 0, 2, 0), (0, 1, 3, 0)))
    assert isinstance(second, RequestLease)
    assert (second.source, second.experts) == (2, ((0, 6, 2, 2), (0, 7, 3, 2)))
    assert isinstance(local, CopyLocal)
    assert local.reads == (CellRead(0, 2, 6, RANK, False), CellRead(1, 0, 7, RANK, False))
    assert rig.read(first).reads == (CellRead(0, 2, 6, 0, False), CellRead(1, 0, 7, 0, False))


def test_where_one_part_is_overdue_its_whole_cell_waits_until_every_read_into_it_has_settled() -> None:
    rig, (first, second, local) = turning()
    late, other = rig.read(first), rig.read(second)
    effects = rig.take(ReadLate(late.batch, "too long"))
    assert effects == [StopReads(other.batch), Forget(1)]
    assert rig.status == (RankState.FAILED, StagingFault.OVERDUE)
    assert rig.cell_table.count(Cell.QUARANTINED) == 2
    rig.abort()
    rig.take(ReadSettled(late.batch))
    assert rig.cell_table.count(Cell.QUARANTINED) == 2, (
        "pieces from this rank and from rank 2 are on their way"
    )
    assert isinstance(local, CopyLocal)
    rig.take(ReadLanded(local.batch, "local", 99, 0.5))
    assert rig.cell_table.count(Cell.QUARANTINED) == 1
    rig.take(ReadSettled(other.batch))
    rig.finish()


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (lambda batch: LeaseDenied(batch, "no"), StagingFault.SOURCE),
        (lambda batch: ReadBroken(batch, "it broke"), StagingFault.TRANSFER),
    ],
)
def test_a_part_is_never_read_a_second_time(report: Callable[[int], Any], fault: StagingFault) -> None:
    rig, (first, second, local) = turning()
    if fault is StagingFault.TRANSFER:
        rig.read(first)
    assert isinstance(first, RequestLease)
    effects = rig.take(report(first.batch))
    assert not [one for one in effects if isinstance(one, RequestLease | ReadCells)]
    assert rig.status == (RankState.FAILED, fault)
    rig.abort()
    assert isinstance(local, CopyLocal)
    assert isinstance(second, RequestLease)
    rig.take(ReadLanded(local.batch, "local", 99, 0.5))
    rig.take(LeaseDenied(second.batch, "no"))
    rig.finish()


def test_a_damaged_part_fails_the_turn_and_names_it() -> None:
    rig, (_, _, local) = turning()
    assert isinstance(local, CopyLocal)
    rig.take(ReadLanded(local.batch, "local", 99, 0.5))
    rig.take(CellsVerified(local.batch, ("", "scale")))
    assert rig.status == (RankState.FAILED, StagingFault.CHECKSUM)
    assert "part 1 of expert 0/3, as read from rank 1, does not match" in rig.protocol.failure


def test_a_turn_needs_room_for_the_cells_of_its_layers() -> None:
    rig = RankRig(parts=3)
    rig.propose(with_rows(FIRST, {0: None, 1: None}, epoch=1), copies=())
    assert rig.status == (RankState.FAILED, StagingFault.ROOM)
    assert "4 cells with parts of experts must be copied, but 3 cells are free" in rig.protocol.failure


def test_a_rank_that_does_not_know_its_own_checksums_yet_fails_a_turn() -> None:
    rig = RankRig(parts=3)
    rig.propose(SHARDED, copies=())
    assert rig.status == (RankState.FAILED, StagingFault.SOURCE)
    assert "no checksums yet" in rig.protocol.failure


def test_memory_that_does_not_cut_experts_refuses_a_turn() -> None:
    rig = RankRig()
    rig.propose(SHARDED, copies=())
    assert rig.status == (RankState.FAILED, StagingFault.PLACEMENT)
    assert "layers [0] change between whole and sharded, but the memory" in rig.protocol.failure


def test_experts_of_other_layers_are_copied_in_the_same_handover() -> None:
    rig = RankRig(parts=3)
    for resident in rig.cell_table.residents():
        rig.cell_table.seal(resident, SEALED)
    rig.propose(with_rows(after(FIRST, (1, 5, 0)), {0: None}, epoch=1), copies=[copy(1, 0, 0, 5)])
    first, *_ = rig.protocol.drain()
    assert isinstance(first, RequestLease)
    assert first.experts == ((1, 0, 0, ALL_PARTS), (0, 0, 0, RANK), (0, 1, 1, RANK))
    assert rig.cell_table.count(Cell.PULLING) == 3


# attention

EVERY = with_rows(FIRST, {0: None, 1: None}, epoch=1)
TP = with_attention(EVERY, "tp", epoch=2)


@pytest.mark.parametrize(("served", "proposed"), [(EVERY, TP), (TP, with_attention(TP, "dp", epoch=3))])
def test_a_change_of_attention_copies_nothing_and_leaves_every_cell(
    served: Placement, proposed: Placement
) -> None:
    rig = RankRig(served, parts=3)
    before = rig.cell_table.table.copy()
    assert rig.propose(proposed, copies=()) is CommandVerdict.TAKE
    (prepare,) = rig.protocol.drain()
    assert isinstance(prepare, Prepare)
    assert (prepare.placement, prepare.cells.tolist()) == (proposed, before.tolist())
    assert rig.protocol.prepared(1)
    rig.commit()
    rig.protocol.adopted(rig.now)
    assert rig.protocol.placement.attention == proposed.attention
    rig.finish()


@pytest.mark.parametrize(
    ("served", "proposed", "refusal", "reason"),
    [
        (EVERY, TP, "its heads do not divide", "from dp to tp, but its heads do not divide"),
        (TP, with_attention(TP, "dp", epoch=3), "it cannot", "from tp to dp, but it cannot"),
        (FIRST, with_attention(FIRST, "tp", epoch=1), "", "while 2 of 2 layers are whole"),
        (SHARDED, TP, "", "while 1 of 2 layers are whole"),
        (TP, with_rows(EVERY, {0: FIRST.expert_of_slot[0]}, epoch=3), "", "together with layers or experts"),
    ],
)
def test_a_change_of_attention_that_cannot_be_is_refused(
    served: Placement, proposed: Placement, refusal: str, reason: str
) -> None:
    rig = RankRig(served, parts=3, tp_refusal=refusal)
    rig.propose(proposed, copies=())
    assert rig.status == (RankState.FAILED, StagingFault.PLACEMENT)
    assert reason in rig.protocol.failure


def one_more(served: Placement, *, layer: int, expert: int) -> Placement:
    """The next epoch, in which the rank holds an expert more, in the place of nothing or of a spare replica.
    The same experts where that cannot be."""
    row = served.expert_of_slot[layer]
    spare = [
        slot
        for slot in range(RANK * served.slots_per_rank, (RANK + 1) * served.slots_per_rank)
        if row[slot] == EMPTY or np.count_nonzero(row == row[slot]) > 1
    ]
    if layer in served.sharded or expert in served.on_rank(RANK)[layer] or not spare:
        return after(served)
    return after(served, (layer, spare[-1], expert))


class Rank(RuleBasedStateMachine):
    """Anything in any order: commands of two coordinators, late, repeated, for other handovers; effects
    carried out or failed, one after another."""

    @initialize()
    def begin(self) -> None:
        self.rig = RankRig(config=TransferConfig(retries=1, quarantine_cells=2), parts=3)
        for resident in self.rig.cell_table.residents():
            self.rig.cell_table.seal(resident, SEALED)
        self.pending: list[Effect] = []
        self.unsettled: set[int] = set()
        self.served = 0
        self.adopting = False

    def _collect(self) -> None:
        for effect in self.rig.protocol.drain():
            match effect:
                case StopReads():
                    assert any(
                        isinstance(one, ReadCells) and one.batch == effect.batch for one in self.pending
                    )
                    self.pending = [
                        one
                        for one in self.pending
                        if not (isinstance(one, ReadCells) and one.batch == effect.batch)
                    ]
                    self.unsettled.add(effect.batch)
                case Forget():
                    self.pending = [one for one in self.pending if not isinstance(one, Prepare)]
                case ReleaseLease():
                    assert not any(
                        isinstance(one, ReadCells) and one.batch == effect.batch for one in self.pending
                    )
                case _:
                    self.pending.append(effect)

    @rule(
        seed=st.integers(0, 10_000),
        number=st.integers(1, 6),
        token=st.integers(1, 2),
        deadline=st.sampled_from([0.0, 2.0, 8.0]),
        ahead=st.integers(1, 2),
        turns=st.sampled_from([(), (), (0,), (1,)]),
    )
    def propose(
        self, seed: int, number: int, token: int, deadline: float, ahead: int, turns: tuple[int, ...]
    ) -> None:
        served = self.rig.protocol.placement
        table = np.random.default_rng(seed).permuted(served.expert_of_slot, axis=1)
        try:
            expected = Placement(
                table, experts=6, ranks=3, epoch=served.epoch + ahead, sharded=served.sharded
            )
        except ValueError:
            expected = one_more(served, layer=seed % 2, expert=seed % 6)
        rows = {layer: FIRST.expert_of_slot[layer] if layer in served.sharded else None for layer in turns}
        expected = with_rows(expected, rows, epoch=expected.epoch)
        verdict = self.rig.propose(expected, number=number, token=token, deadline=deadline)
        assert verdict is not CommandVerdict.TAKE or expected.epoch == served.epoch + 1
        self._collect()

    @rule(number=st.integers(1, 6), token=st.integers(1, 2))
    def commit(self, number: int, token: int) -> None:
        before = self.rig.protocol.protocol_state
        verdict = self.rig.commit(number, token)
        assert (verdict is CommandVerdict.TAKE) == (
            before.state is RankState.STAGED and before.handover == number and token >= before.token
        )
        self._collect()

    @rule(number=st.integers(1, 6), token=st.integers(1, 2))
    def abort(self, number: int, token: int) -> None:
        self.rig.abort(number, token)
        self._collect()

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.protocol.tick(self.rig.now)
        self._collect()

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 9), fate=st.sampled_from(["good", "good", "good", "bad", "late"]))
    def carry_out(self, which: int, fate: str) -> None:
        effect = self.pending.pop(which % len(self.pending))
        rig, protocol, now = self.rig, self.rig.protocol, self.rig.now
        match effect:
            case RequestLease():
                protocol.take(
                    (
                        LeaseGranted(effect.batch, rig.lease(effect))
                        if fate == "good"
                        else LeaseDenied(effect.batch, "no")
                    ),
                    now,
                )
            case ReadCells():
                self._read(effect, fate)
            case CopyLocal():
                landed, broken = ReadLanded(effect.batch, "local", 9, 0.1), ReadBroken(effect.batch, "broke")
                protocol.take(broken if fate == "bad" else landed, now)
            case VerifyCells():
                protocol.take(
                    CellsVerified(effect.batch, ("" if fate == "good" else "scale",) * len(effect.reads)), now
                )
            case Prepare():
                if fate == "bad":
                    protocol.unprepared(effect.handover, "no", now)
                else:
                    assert protocol.prepared(effect.handover)
            case Adopt():
                protocol.adopted(now)
                self.served += 1
        self._collect()

    def _read(self, effect: ReadCells, fate: str) -> None:
        assert all(self.rig.cell_table.use(cell) is Cell.PULLING for _, _, cell, _, _ in effect.reads)
        match fate:
            case "good":
                self.rig.protocol.take(ReadLanded(effect.batch, "shared", 64, 0.1), self.rig.now)
            case "bad":
                self.rig.protocol.take(ReadBroken(effect.batch, "broke"), self.rig.now)
            case _:
                self.unsettled.add(effect.batch)
                self.rig.protocol.take(ReadLate(effect.batch, "late"), self.rig.now)

    @precondition(lambda self: self.unsettled)
    @rule(which=st.integers(0, 9))
    def settle(self, which: int) -> None:
        batch = sorted(self.unsettled)[which % len(self.unsettled)]
        self.unsettled.discard(batch)
        self.rig.protocol.take(ReadSettled(batch), self.rig.now)
        self._collect()

    @invariant()
    def the_books_agree(self) -> None:
        self.rig.cell_table.check_integrity()
        assert self.rig.protocol.protocol_state.served == self.rig.protocol.placement.epoch == self.served
        assert (self.rig.cell_table.held == contents(self.rig.protocol.placement, RANK)).all()
        described = self.rig.protocol.describe(self.rig.now)
        assert bool(described.failure) == bool(described.fault)
        if self.rig.protocol.at_rest:
            assert self.rig.cell_table.idle
            assert described.quarantined == 0

    def teardown(self) -> None:
        """Faults stop, and the coordinator ends what is open: all room is back."""
        if not hasattr(self, "rig"):
            return
        while self.pending:
            self.carry_out(0, "good")
        protocol_state = self.rig.protocol.protocol_state
        if protocol_state.handover:
            assert (
                self.rig.abort(protocol_state.handover, max(2, protocol_state.token)) is CommandVerdict.TAKE
            )
            self._collect()
        while self.pending:
            self.carry_out(0, "good")
        while self.unsettled:
            self.settle(0)
        self.rig.finish()


TestRank = Rank.TestCase
TestRank.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.slow
class TestLongLivedRank(Rank.TestCase):
    settings = settings(
        max_examples=300,
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
