"""Exhaustive check of handovers that turn layers over: a cell is filled from all ranks and read by all ranks.
And of the checker itself: it finds known defects.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from fleet.handover import Cell, CellEvent, Filling
from fleet.placement import EMPTY, linear, with_rows
from fleet.sharding import turn
from tests.handovers.exploration import Broken, explore
from tests.handovers.handover_model import Handovers
from tests.handovers.handover_world import WHOLE, Faults, Flow, Rank, Size, State

MOST = 1_000_000
TURN = Size(2, 2, 2, Faults(), verified_at_once=True, turns=True)
LAST = "the step begins: ranks 0, 1 go over to the next epoch"


class _Strict(Handovers):
    """A cell that is free too early is wrong, even before it is used again."""

    strict = True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_reads_of_the_model_are_those_of_a_turn(ranks: int) -> None:
    whole = linear(layers=1, experts=ranks, ranks=ranks)
    sharded = with_rows(whole, {0: None}, epoch=1)
    expected = {
        ((at - distance) % ranks, at)
        for at in range(ranks)
        for distance in TURN._replace(ranks=ranks).sources
    }
    into, back = turn(whole, sharded), turn(sharded, with_rows(sharded, {0: np.arange(ranks)}, epoch=2))
    for copies, keys in ((into, into.expert), (back, back.part)):
        read = list(zip(copies.source.tolist(), copies.destination.tolist(), strict=True))
        assert set(read) == expected
        assert len(read) == len(expected), "one part of each source"
        assert keys.tolist() == copies.source.tolist(), "in order of the sources"
    assert (sharded.expert_of_slot == EMPTY).all()


@pytest.mark.parametrize(
    ("size", "least"),
    [
        (Size(2, 2, 2, Faults(), turns=True, one_by_one=True), 8_000),
        (TURN._replace(cells=3, faults=Faults(overdue=1)), 7_000),
        (TURN._replace(verified_at_once=False, faults=Faults(corrupted=1)), 9_000),
        (TURN._replace(faults=Faults(deaths=1)), 6_000),
        (TURN._replace(handovers=1, faults=Faults(leaders=1, deaths=1, overdue=1)), 3_000),
        (TURN._replace(ranks=3, handovers=1, faults=Faults(overdue=1)), 8_000),
    ],
    ids=[
        "there and back, one read after the other",
        "an overdue part",
        "a corrupted part",
        "a death",
        "two coordinators, a death, an overdue part",
        "3 ranks, an overdue part",
    ],
)
def test_while_layers_turn_over_every_promise_holds_and_every_run_ends(size: Size, least: int) -> None:
    model = _Strict(size)
    assert explore(model, most=MOST).states > least, "the model does less than it should"
    assert model.stops == 0, "ranks never mean different placements by one epoch"


def test_a_source_drains_until_its_last_reader_has_settled() -> None:
    found = explore(_AfterAnOverdueRead(TURN._replace(ranks=3, cells=3, handovers=1)), most=MOST)
    assert found.states > 5_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        TURN._replace(ranks=3),
        TURN._replace(cells=3, faults=Faults(leaders=1, deaths=1, overdue=1)),
        Size(2, 1, 2, Faults(leaders=1, deaths=1, overdue=1, corrupted=1), turns=True, one_by_one=True),
        TURN._replace(handovers=3, cells=3, faults=Faults(overdue=1)),
    ],
    ids=["3 ranks there and back", "three faults", "every fault, one read after the other", "3 handovers"],
)
def test_with_several_faults_together_layers_turn_over_and_every_promise_holds(size: Size) -> None:
    model = _Strict(size)
    assert explore(model, most=MOST).states > 25_000
    assert model.stops == 0


class _FreeWithTheFirstPart(Handovers):
    """A quarantined cell is free as soon as one of its reads has settled."""

    def after_part(self, use: Cell, filling: Filling) -> CellEvent | None:
        return CellEvent.SETTLED if use is Cell.QUARANTINED else super().after_part(use, filling)


class _FreeWhenGivenUp(Handovers):
    """A cell that is given up counts as free, as if no part used it any more."""

    def given_up(self, use: Cell, filling: Filling) -> CellEvent:
        return super().given_up(use, Filling())


class _ReadsAgain(Handovers):
    """An overdue part is read again into the cell that is reserved for it."""

    def reread(self, rank: Rank, flow: Flow) -> Rank | None:
        return rank._replace(flows=(*rank.flows, flow))


class _ReservesQuarantined(Handovers):
    """A quarantined cell is filled again."""

    def reservable(self, use: Cell) -> bool:
        return use in (Cell.FREE, Cell.QUARANTINED)

    def cell_after(self, state: Cell, event: CellEvent) -> Cell:
        again = (state, event) == (Cell.QUARANTINED, CellEvent.RESERVED)
        return Cell.PULLING if again else super().cell_after(state, event)


class _StagedBeforeTheLast(Handovers):
    """A cell is staged when the first of its parts compares."""

    def after_part(self, use: Cell, filling: Filling) -> CellEvent | None:
        first = use is Cell.VERIFYING and filling.comparing.bit_count() < len(self.size.sources)
        return CellEvent.VERIFIED if first else super().after_part(use, filling)


class _AfterAnOverdueRead(_Strict):
    """Begin where a handover was aborted because one read was overdue, which has not settled yet."""

    def start(self) -> State:
        world, *ranks = super().start()
        free = self.born(0, 0, 0)
        live, given_up, *others = free.cells
        given_up = given_up._replace(use=Cell.QUARANTINED, filling=Filling(reading=1 << 1))
        reader = free._replace(cells=(live, given_up, *others), flows=(Flow(1, 1, 0),))
        return (world, self.rank_number(reader), *ranks[1:])


class _DrainsForOneReader(_AfterAnOverdueRead):
    """A cell out of service is free when the first of its readers has settled."""

    def drained(self, readers: Sequence[int], cell: int) -> bool:
        return any(not leased >> cell & 1 for leased in readers)


class _TwoPlans(Handovers):
    """A coordinator that takes over repeats the open proposal with a placement of its own: the layer stays as
    it is."""

    def form(self, epoch: int, token: int) -> int:
        return WHOLE if token > 1 else super().form(epoch, token)


class _TwoPlansNoDigest(_TwoPlans):
    """And headers do not say what an epoch means."""

    def agree(self, ranks: list[Rank]) -> bool:
        return True


class _TwoPlansLateDigest(_TwoPlans):
    """And headers state the placement in service, not the one that follows."""

    def digest(self, rank: Rank) -> int:
        return 2 * rank.made + rank.form


FORMS = "ranks serve different placements as one epoch in one step"


@pytest.mark.parametrize(
    ("broken", "size", "promise", "ending"),
    [
        (
            _FreeWithTheFirstPart,
            TURN._replace(faults=Faults(overdue=1)),
            "a cell is used again while bytes of an earlier read still land in it",
            "hears the proposal of handover 2",
        ),
        (
            _FreeWhenGivenUp,
            TURN._replace(faults=Faults(corrupted=1)),
            "a cell is used again while bytes of an earlier read still land in it",
            "hears the proposal of handover 2",
        ),
        (
            _ReadsAgain,
            TURN._replace(faults=Faults(overdue=1)),
            "a cell is used again while bytes of an earlier read still land in it",
            "is overdue",
        ),
        (
            _ReservesQuarantined,
            TURN._replace(faults=Faults(overdue=1)),
            "a cell is used again while bytes of an earlier read still land in it",
            "hears the proposal of handover 2",
        ),
        (
            _StagedBeforeTheLast,
            TURN._replace(handovers=1, verified_at_once=False),
            "a part is served that was never verified",
            LAST,
        ),
        (
            _DrainsForOneReader,
            TURN._replace(ranks=3, cells=3, handovers=1),
            "a cell is free while another rank still reads from it",
            "hears that it flipped",
        ),
        (_TwoPlansNoDigest, TURN._replace(handovers=1, faults=Faults(leaders=1)), FORMS, LAST),
        (_TwoPlansLateDigest, TURN._replace(handovers=1, faults=Faults(leaders=1)), FORMS, LAST),
    ],
)
def test_a_turn_that_lacks_a_rule_is_caught_and_how_it_fails_is_told(
    broken: type[Handovers], size: Size, promise: str, ending: str
) -> None:
    with pytest.raises(Broken) as found:
        explore(broken(size), most=MOST)
    assert found.value.promise == promise
    assert ending in found.value.story[-1]


def test_headers_of_different_placements_stop_the_engine_before_it_computes() -> None:
    model = _TwoPlans(TURN._replace(handovers=1, faults=Faults(leaders=1)))
    explore(model, most=MOST)
    assert model.stops > 0
