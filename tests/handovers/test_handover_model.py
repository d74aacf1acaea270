"""Exhaustive check of handovers: every order of all events, within bounds. And of the checker itself: it
finds known defects.
"""

from collections.abc import Sequence

import pytest

from fleet.handover import CELL, Cell, CellEvent, CommandVerdict, ProtocolState, aborted, flips, next_state
from tests.handovers.exploration import Broken, TooLarge, explore
from tests.handovers.handover_model import Handovers
from tests.handovers.handover_world import ABORT, ABORTED_BIT, COMMIT, CellRecord, Faults, Rank, Size, World

MOST = 1_000_000
SMALL = Size(2, 2, 2, Faults(), verified_at_once=True)
LATE = "something is left open, and nothing that is due will ever end it"


@pytest.mark.parametrize(
    ("size", "least"),
    [
        (Size(3, 2, 2, Faults()), 5_000),
        (Size(3, 1, 2, Faults(leaders=1, deaths=1), verified_at_once=True), 4_000),
        (Size(2, 2, 2, Faults(leaders=1)), 8_000),
        (Size(2, 2, 3, Faults(overdue=1)), 3_000),
        (Size(2, 2, 2, Faults(corrupted=1)), 1_000),
        (Size(2, 2, 2, Faults(deaths=1, overdue=1)), 5_000),
    ],
    ids=[
        "3 ranks",
        "3 ranks, two coordinators, a death",
        "two coordinators",
        "an overdue transfer",
        "a corrupted transfer",
        "a death and an overdue transfer",
    ],
)
def test_every_promise_holds_in_every_state_and_every_run_ends(size: Size, least: int) -> None:
    assert explore(Handovers(size), most=MOST).states > least, "the model does less than it should"


class _Impatient(Handovers):
    """Coordinators that abort do not wait for silent ranks, but repeat the abort to ranks found with an ended
    handover.
    """

    silence_ends_aborts = clears_strays = True


@pytest.mark.parametrize(
    "size",
    [
        SMALL,
        SMALL._replace(faults=Faults(deaths=1)),
        pytest.param(SMALL._replace(faults=Faults(leaders=1, deaths=1)), marks=pytest.mark.slow),
        pytest.param(Size(3, 2, 2, Faults(), verified_at_once=True), marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "a death", "two coordinators, and a death", "3 ranks"],
)
def test_an_abort_need_not_wait_for_ranks_that_are_silent_if_they_are_told_later(size: Size) -> None:
    explore(_Impatient(size), most=MOST)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        Size(3, 2, 2, Faults(leaders=1, deaths=1), verified_at_once=True),
        Size(3, 2, 3, Faults(deaths=1, overdue=1), verified_at_once=True),
        Size(3, 2, 2, Faults(deaths=2), verified_at_once=True),
        Size(2, 2, 3, Faults(leaders=1, deaths=1, overdue=1)),
        Size(2, 2, 2, Faults(leaders=2, deaths=1), verified_at_once=True),
        Size(2, 3, 3, Faults(overdue=1), verified_at_once=True),
    ],
    ids=[
        "3 ranks, two coordinators, a death",
        "3 ranks, a death, an overdue read",
        "3 ranks, two deaths",
        "all of it",
        "3 coordinators",
        "3 handovers",
    ],
)
def test_with_several_faults_together_every_promise_holds_and_every_run_ends(size: Size) -> None:
    assert explore(Handovers(size), most=MOST).states > 30_000


class _NoLease(Handovers):
    """A cell out of service counts as free, even with readers."""

    def drained(self, readers: Sequence[int], cell: int) -> bool:
        return True


class _NoBarrier(Handovers):
    """A rank flips as soon as it is ready itself."""

    def flipping(self, ranks: list[Rank]) -> list[int]:
        return [at for at, rank in enumerate(ranks) if flips(rank.steps, (self.ready(rank),))]


class _ReuseBeforeSettled(Handovers):
    """An overdue transfer counts as ended."""

    def cell_after(self, state: Cell, event: CellEvent) -> Cell:
        return Cell.FREE if event is CellEvent.OVERDUE else super().cell_after(state, event)


class _StaleCommit(Handovers):
    """A commit applies to an epoch of an engine's name, from any sender: no handover, no incarnation and no
    token.
    """

    def meant(self, rank: ProtocolState, kind: int, handover: int, epoch: int) -> int:
        return rank.handover if kind == COMMIT and rank.handover and epoch == rank.served + 1 else handover

    def fenced(self, rank: ProtocolState, token: int) -> int:
        return max(token, rank.token)

    def addressed(self, world: World, kind: int, handover: int) -> bool:
        return kind == COMMIT or super().addressed(world, kind, handover)


class _StaleAbort(Handovers):
    """An abort applies to an epoch."""

    def meant(self, rank: ProtocolState, kind: int, handover: int, epoch: int) -> int:
        return rank.handover if kind == ABORT and rank.handover and epoch == rank.served + 1 else handover


class _EveryLife(Handovers):
    """A command applies to the engine's name, not to one of its incarnations."""

    def addressed(self, world: World, kind: int, handover: int) -> bool:
        return True


class _ForgetsWhatIsOver(Handovers):
    """A proposal is accepted after its abort."""

    def heed(self, rank: ProtocolState, kind: int, token: int, handover: int, epoch: int) -> CommandVerdict:
        return super().heed(rank._replace(concluded=0), kind, token, handover, epoch)


class _DecidesBlindly(Handovers):
    """The decision is written without compare-and-set."""

    decides_blindly = True


class _TakesSilenceForDeath(Handovers):
    """A handover is closed because the engine is silent."""

    def gone(self, world: World, handover: int) -> bool:
        return True


class _TakesStagedForDecided(Handovers):
    """A new incarnation starts with the staged record of the log, unless it was aborted since."""

    def last_decided(self, world: World) -> int:
        staged = world.staged.bit_length() - 1
        return staged if staged > 0 and not world.decided[staged - 1] & ABORTED_BIT else world.placed


class _LeavesStrays(Handovers):
    """An abort does not wait for silent ranks, and is not repeated to them later."""

    silence_ends_aborts = True


class _GivesUpAlone(Handovers):
    """A rank that has staged stops waiting for the decision."""

    def gives_up(self, rank: Rank, protocol_state: ProtocolState) -> Rank | None:
        return self.dropped(rank)._replace(
            protocol_state=aborted(protocol_state, protocol_state.token, protocol_state.handover)
        )


class _MakesRoomFirst(Handovers):
    """The old expert is evicted before the new one has arrived."""

    def with_room(self, rank: Rank) -> Rank:
        cells = tuple(
            CellRecord(next_state(CELL, next_state(CELL, record.use, CellEvent.EVICTED), CellEvent.SETTLED))
            if record.use is Cell.LIVE
            else record
            for record in rank.cells
        )
        return rank._replace(cells=cells)


@pytest.mark.parametrize(
    ("broken", "size", "promise", "ending"),
    [
        (
            _NoLease,
            SMALL._replace(cells=3, faults=Faults(overdue=1)),
            "a cell is used again while another rank still reads from it",
            "hears the proposal",
        ),
        (_NoBarrier, SMALL, "ranks serve different epochs in one step", "the step begins: rank 0 goes over"),
        (
            _ReuseBeforeSettled,
            SMALL._replace(faults=Faults(overdue=1)),
            "a cell is used again while bytes of an earlier read still land in it",
            "tries again",
        ),
        (_StaleCommit, SMALL._replace(faults=Faults(deaths=1)), LATE, "hears the commit of handover 1"),
        (
            _StaleAbort,
            SMALL,
            "a handover is both committed and aborted",
            "committing handover 2: refused by all",
        ),
        (_EveryLife, SMALL._replace(faults=Faults(deaths=1, leaders=1)), LATE, "says that it has staged"),
        (_ForgetsWhatIsOver, SMALL._replace(faults=Faults(leaders=1)), LATE, "says that it has staged"),
        (
            _DecidesBlindly,
            SMALL,
            "a handover is both committed and aborted",
            "that was asleep since handover 1 was proposed",
        ),
        (_TakesSilenceForDeath, SMALL._replace(faults=Faults(leaders=1)), LATE, "says that it has staged"),
        (_LeavesStrays, SMALL._replace(faults=Faults(leaders=1)), LATE, "says that it has staged"),
        (
            _TakesStagedForDecided,
            SMALL._replace(faults=Faults(deaths=1)),
            "an epoch is served that was never decided",
            "begins a new life",
        ),
        (_GivesUpAlone, SMALL, LATE, "gives up"),
        (
            _MakesRoomFirst,
            SMALL._replace(cells=1),
            "the last verified copy of an expert is gone",
            "hears the proposal",
        ),
    ],
)
def test_a_protocol_that_lacks_a_rule_is_caught_and_how_it_fails_is_told(
    broken: type[Handovers], size: Size, promise: str, ending: str
) -> None:
    with pytest.raises(Broken) as found:
        explore(broken(size), most=MOST)
    assert found.value.promise == promise
    assert ending in found.value.story[-1]
    assert str(found.value).startswith(f"{promise}\n  1. ")


def test_a_counterexample_reads_as_a_story() -> None:
    with pytest.raises(Broken) as found:
        explore(_NoBarrier(SMALL), most=MOST)
    assert found.value.story == [
        "a coordinator makes handover 1 to epoch 1 durable, and proposes it",
        "rank 0 hears the proposal of handover 1 from coordinator 1",
        "rank 1 hears the proposal of handover 1 from coordinator 1",
        "rank 0 has verified cell 1, and says that it has staged",
        "rank 1 has verified cell 1, and says that it has staged",
        "a coordinator records that handover 1 is staged",
        "a coordinator, proposing handover 1: all staged; it makes durable: committing",
        "rank 0 hears the commit of handover 1 from coordinator 1",
        "the step begins: rank 0 goes over to the next epoch",
    ]


class _NoFencing(Handovers):
    def fenced(self, rank: ProtocolState, token: int) -> int:
        return max(token, rank.token)


def test_while_the_store_is_consistent_numbers_and_compare_and_set_suffice_and_tokens_are_a_second_line() -> (
    None
):
    explore(_NoFencing(SMALL._replace(faults=Faults(leaders=1))), most=MOST)


def test_a_search_that_would_not_end_in_time_says_so() -> None:
    with pytest.raises(TooLarge, match="more than 100 states: allow fewer faults"):
        explore(Handovers(SMALL), most=100)
